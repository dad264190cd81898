#!/usr/bin/env python3
"""Measures the time to first token of a long prompt whose blocks are not cached, on disk, or in memory.

Each length has a prefix of random tokens and a short question after it. All but the first row are medians of --rounds:
  computed   first request
  restored   after a restart of the server, the files' pages dropped from the page cache
  warm       after another restart, with those pages in the page cache
  in memory  repeated request
  from int8  with --warm-memory: repeated after another prompt of the length has replaced it in the cache

Also prints the bytes read, their rate, and its share of the rate of reading the same files with O_DIRECT in pieces of
16 MiB in this run. Needs nothing beyond Python 3.9.

    python3 bench/make_shapes.py build/shapes --shape qwen3-moe-small --type bf16 --context 131072
    python3 bench/longcontext/cold_prefix.py build/shapes/qwen3-moe-small-bf16.gguf --lengths 8192,16384,32768,65536
    python3 bench/longcontext/cold_prefix.py build/shapes/qwen3-moe-small-bf16.gguf --lengths 65536 \\
        --serve "--kv-sparsity all --kv-sparsity-budget 2048"
"""
import argparse
import json
import mmap
import os
import pathlib
import random
import shlex
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "server"))
os.environ.setdefault("MOESAIC_BINARY", str(ROOT / "build" / "release" / "bin" / "moesaic"))

from serving import serving, until  # noqa: E402

PIECE = 16 << 20


def ask(server, prompt):
    """Returns (seconds to the first token, that token, cached tokens)."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    start = time.perf_counter()
    status, answer = server.json("POST", "/v1/completions", body)
    seconds = time.perf_counter() - start
    if status != 200:
        raise SystemExit(answer)
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return seconds, answer["choices"][0]["token_ids"], cached


def files(folder):
    return sorted(pathlib.Path(folder).glob("*.segment"))


def drop_pages(folder):
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def direct_rate(folder):
    """Returns bytes per second of reading the files sequentially past the page cache; None if not supported."""
    buffer = mmap.mmap(-1, PIECE)
    total, start = 0, time.perf_counter()
    for path in files(folder):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return None
        at = 0
        while (got := os.preadv(descriptor, [buffer], at)) > 0:
            at += got
            total += got
            if got < PIECE:
                break
        os.close(descriptor)
    return total / (time.perf_counter() - start)


def measure(options, length):
    random_tokens = random.Random(length)
    prompt = [random_tokens.randrange(256, options.vocabulary) for _ in range(length + options.question)]
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        flags = ("--kv-disk", folder, "--max-sequences", 1, "--ctx-size", len(prompt) + 64, *options.flags)
        with serving(*flags, model=options.model) as server:
            computed, said, _ = ask(server, prompt)
            until(lambda: server.metric("moesaic:kv_disk_written_blocks_total") >= length // 64)
        for _ in range(options.rounds):
            row = {}
            drop_pages(folder)
            row["direct rate"] = direct_rate(folder)
            for kind in ("restored", "warm"):
                if kind == "restored":
                    drop_pages(folder)
                with serving(*flags, model=options.model) as server:
                    ask(server, prompt[:64])  # warms up code and weights
                    row[kind], token, cached = ask(server, prompt)
                    if token != said or cached != length // 64 * 64:
                        raise SystemExit(f"{kind}: {token} and {cached} cached tokens, computed: {said}")
                    if kind == "restored":
                        row["read"] = server.metric("moesaic:kv_disk_read_bytes_total")
                        row["load"] = server.metric("moesaic:kv_disk_load_seconds_total")
                        row["stored"] = server.metric("moesaic:kv_disk_bytes")
                    else:
                        row["in memory"], _, _ = ask(server, prompt)
            rows.append(row)
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0] if rows[0][key] is not None}
    return {"computed": computed, **middle, "restored from": min(row["restored"] for row in rows),
            "restored to": max(row["restored"] for row in rows)}


def measure_int8(options, length):
    """Returns medians of the time to first token with blocks restored from int8, and of the engine's restore time."""
    random_tokens = random.Random(length)
    prompt, others = ([random_tokens.randrange(256, options.vocabulary) for _ in range(length + options.question)]
                      for _ in range(2))
    flags = ("--kv-warm-memory", options.warm_memory, "--max-sequences", 1, "--ctx-size", len(prompt) + 64, *options.flags)
    rows = []
    with serving(*flags, model=options.model) as server:
        ask(server, prompt)
        ask(server, others)
        for _ in range(options.rounds):
            for asked in (prompt, others):  # each replaces the other
                before = server.metric("moesaic:kv_warm_restore_seconds_total")
                seconds, _, cached = ask(server, asked)
                if cached != length // 64 * 64:
                    raise SystemExit(f"from int8: {cached} cached tokens of {length}")
                rows.append((seconds, server.metric("moesaic:kv_warm_restore_seconds_total") - before))
        kept = server.metric("moesaic:kv_warm_store_seconds_total") / server.metric("moesaic:kv_warm_stored_blocks_total")
    middle = [statistics.median(column) for column in zip(*rows)]
    return {"from int8": middle[0], "bringing back": middle[1], "keeping": kept * (length // 64),
            "from": min(seconds for seconds, _ in rows), "to": max(seconds for seconds, _ in rows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="8192,16384,32768,65536", help="tokens of the prefixes, a multiple of 64")
    parser.add_argument("--question", type=int, default=16, help="tokens after the prefix, which are always computed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=16384, help="upper limit of random token ids")
    parser.add_argument("--folder", default=None,
                        help="where the disk to be measured is mounted; default: the temporary folder")
    parser.add_argument("--warm-memory", default=None, help="for --kv-warm-memory: room for two prompts, e.g. 2GiB")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", default="", help='flags for moesaic serve, e.g. "--kv-dtype int8"')
    options = parser.parse_args()
    options.flags = shlex.split(options.serve)
    if not options.json:
        print("tokens    computed  restored (from-to)     of computed  warm      in memory  read    of stored  load      "
              "rate         of direct")
    for length in map(int, options.lengths.split(",")):
        row = measure(options, length)
        int8 = measure_int8(options, length) if options.warm_memory else None
        if options.json:
            print(json.dumps({"tokens": length, **row, **({"int8": int8} if int8 else {})}), flush=True)
            continue
        rate = row["read"] / row["load"]
        share = f"{rate / row['direct rate']:.0%} of {row['direct rate'] / 1e9:.2f} GB/s" if "direct rate" in row else ""
        print(f"{length:<9} {row['computed']:<8.2f}s {row['restored']:<5.3f}s "
              f"({row['restored from']:.3f}-{row['restored to']:.3f})  {row['restored'] / row['computed']:<11.4f}x "
              f"{row['warm']:<8.3f}s {row['in memory']:<9.4f}s "
              f"{row['read'] / 1e6:<6.0f}MB {row['read'] / row['stored']:<9.1%} {row['load']:<8.3f}s "
              f"{rate / 1e9:<6.2f}GB/s  {share}", flush=True)
        if int8:
            print(f"          from int8 {int8['from int8']:.3f}s ({int8['from']:.3f}-{int8['to']:.3f}), "
                  f"{int8['from int8'] / row['computed']:.4f}x of computed, {int8['from int8'] / row['restored']:.2f}x of "
                  f"restored; {int8['bringing back']:.3f}s of it bring blocks back; keeping them took {int8['keeping']:.3f}s",
                  flush=True)


if __name__ == "__main__":
    main()
