#!/usr/bin/env python3
"""Times SGLang's radix cache (its own Python file, not part of this project) on cache_tree_bench's prompts.

Usage: sglang_radix.py PATH/TO/sglang/python/sglang/srt/mem_cache/radix_cache.py [MOESAIC_BENCH_BINARY]

Needs torch. What the file imports from the rest of SGLang is replaced by plain records. With the path of
cache_tree_bench, runs that too and prints both, with their ratio.
"""
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
import types

import torch

PROMPT_TOKENS, PAGE = 100_000, 64
WHOLE = PROMPT_TOKENS // PAGE * PAGE
TURN_TOKENS, TURNS = 4096, 50


class Record:
    """Stands for SGLang's parameter and result types."""

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


def load(path):
    def module(name, **members):
        made = types.ModuleType(name)
        made.__getattr__ = lambda missing: Record
        made.__dict__.update(members)
        sys.modules[name] = made

    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.mem_cache",
                 "sglang.srt.mem_cache.cache_init_params", "sglang.srt.mem_cache.utils",
                 "sglang.srt.mem_cache.hicache_storage"):
        module(name, __path__=[])
    module("sglang.srt.disaggregation.kv_events", MEDIUM_GPU="GPU")
    module("sglang.srt.mem_cache.base_prefix_cache", BasePrefixCache=BaseCache)
    module("sglang.srt.mem_cache.evict_policy", LRUStrategy=Lru)
    spec = importlib.util.spec_from_file_location("radix_cache", path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["radix_cache"] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def tokens(count, seed):
    source = random.Random(seed)
    return [source.randrange(150_000) for _ in range(count)]


def times(action, rounds):
    took = []
    for i in range(rounds):
        start = time.process_time()
        action(i)
        took.append((time.process_time() - start) * 1e6)
    return statistics.median(took)


def measure(sglang):
    def key(ids):
        return sglang.RadixKey(ids, None)

    cache = sglang.RadixCache(Record(disable=False, page_size=PAGE, eviction_policy="lru",
                                     enable_kv_cache_events=False, token_to_kv_pool_allocator=Allocator()))

    def insert(ids):
        cache.insert(Record(key=key(ids), value=torch.arange(len(ids)), priority=0))

    result = {}
    prompt = tokens(PROMPT_TOKENS, 0)
    for seed in range(1, 9):
        insert(tokens(WHOLE, seed))
    insert(prompt[:WHOLE])
    for runs in (1, 16, 195):
        for cut in range(1, runs):
            insert(prompt[:WHOLE // PAGE * cut // runs * PAGE] + [1] * PAGE)
        found = cache.match_prefix(Record(key=key(prompt))).device_indices
        assert len(found) == WHOLE, len(found)
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
