#!/usr/bin/env python3
"""Times SGLang's radix cache (its own Python file, not part of this project) on cache_tree_bench's prompts.

Usage: sglang_radix.py PATH/TO/sglang/python/sglang/srt/mem_cache/radix_cache.py [MOESAIC_BENCH_BINARY]

Needs torch, and the file of SGLang 0.5.23 or a similar version. Its imports from the rest of SGLang are replaced by plain
records. With the path of cache_tree_bench, also runs that and prints both with their ratio.
"""
import array
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time

import torch

PROMPT_TOKENS, PAGE = 100_000, 64
WHOLE = PROMPT_TOKENS // PAGE * PAGE
TURN_TOKENS, TURNS = 4096, 50


class Record:
    """Replaces SGLang's parameter and result types."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __getattr__(self, name):
        return None


class BaseCache:
    def update_eviction_metrics(self, *_):
        pass


class Lru:
    def get_priority(self, node):
        return node.last_access_time


class Allocator:
    device = torch.device("cpu")

    def free(self, indices):
        pass

    def free_segment(self, indices, start_pos):
        pass


class Silent:
    """Replaces event recorders: accepts every call and does nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports every module of SGLang with the given names, and records for all others."""
    MEMBERS = {
        "sglang.srt.mem_cache.base_prefix_cache": {"BasePrefixCache": BaseCache},
        "sglang.srt.mem_cache.events": {"KVCacheEventRecorder": Silent},
        "sglang.srt.mem_cache.utils": {"get_eviction_strategy": lambda *_: Lru(),
                                          "split_node_hash_value": lambda *_: (None, None)},
        "sglang.srt.utils.common": {"ceil_align": lambda value, unit: -(-value // unit) * unit},
    }

    def find_spec(self, name, *_):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "sglang" else None

    def exec_module(self, module):
        module.__dict__.update(self.MEMBERS.get(module.__name__, {}))
        module.__getattr__ = lambda missing: Record


def load(path):
    sys.meta_path.insert(0, Stand())
    spec = importlib.util.spec_from_file_location("radix_cache", path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["radix_cache"] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def tokens(count, seed):
    source = random.Random(seed)
    return array.array("q", (source.randrange(150_000) for _ in range(count)))


def times(action, rounds):
    took = []
    for i in range(rounds):
        start = time.process_time()
        action(i)
        took.append((time.process_time() - start) * 1e6)
    return statistics.median(took)


def measure(sglang):
    def key(ids):
        return sglang.RadixKey(ids)

    cache = sglang.RadixCache(Record(disable=False, page_size=PAGE, eviction_policy="lru",
                                     enable_kv_cache_events=False, token_to_kv_pool_allocator=Allocator()))

    def insert(ids):
        cache.insert(Record(key=key(ids), value=torch.arange(len(ids)), priority=0, inserted_len=0))

    result = {}
    prompt = tokens(PROMPT_TOKENS, 0)
    for seed in range(1, 9):
        insert(tokens(WHOLE, seed))
    insert(prompt[:WHOLE])
    for runs in (1, 16, 195):
        for cut in range(1, runs):
            insert(prompt[:WHOLE // PAGE * cut // runs * PAGE] + array.array("q", [1] * PAGE))
        found = cache.match_prefix(Record(key=key(prompt))).device_prefix_len
        assert found == WHOLE, found
        result[f"match, {runs} runs"] = times(lambda _: cache.match_prefix(Record(key=key(prompt))), 15)
    cache.reset()
    turns = [tokens(TURN_TOKENS, seed) for seed in range(4 * TURNS)]
    for turn in turns[:TURNS]:
        insert(turn)

    def serve(i):
        turn = turns[(TURNS + i) % len(turns)]
        cache.match_prefix(Record(key=key(turn)))
        cache.evict(Record(num_tokens=TURN_TOKENS))
        insert(turn)

    result["insert and evict"] = times(serve, 3 * TURNS)
    return result


def ours(binary):
    out = subprocess.run([binary, "--benchmark_format=json", "--benchmark_repetitions=5", "--benchmark_min_time=0.2",
                          "--benchmark_report_aggregates_only=true"], capture_output=True, check=True, text=True)
    medians = {run["run_name"]: run["cpu_time"] for run in json.loads(out.stdout)["benchmarks"]
               if run["aggregate_name"] == "median"}
    named = {f"match, {runs} runs": medians[f"BM_TreeMatch/runs:{runs}"] for runs in (1, 16, 195)}
    chain = {name: medians["BM_ChainMatch"] for name in named}
    named["insert and evict"], chain["insert and evict"] = medians["BM_TreeInsertEvict"], medians["BM_ChainInsertEvict"]
    return named, chain


def main():
    peer = measure(load(sys.argv[1]))
    tree, chain = ours(sys.argv[2]) if len(sys.argv) > 2 else ({}, {})
    print(f"{'processor microseconds, median':32}{'SGLang':>10}{'chain':>10}{'tree':>10}{'SGLang/tree':>13}")
    for name, took in peer.items():
        line = f"{name:32}{took:10.1f}"
        if name in tree:
            line += f"{chain[name]:10.1f}{tree[name]:10.1f}{took / tree[name]:13.1f}"
        print(line)


if __name__ == "__main__":
    main()
