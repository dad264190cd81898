#!/usr/bin/env python3
"""Measures moesaic.graph against PyTorch (and torch_scatter, if it is installed) on the CPU, in one run.

Usage: graph_operators.py [--threads N] [--repetitions N] [--cpu-time] [--repeated]. Prints medians, best times and ratios; for sums of
rows also the rate at which the rows were read. Rows "bound: .." move the least bytes that an operator must move, in order and without its
work. Functions run in turn, so that each starts with caches that the others have filled; with --repeated, each runs all its repetitions
in a row.
"""
import argparse
import importlib.util
import statistics
import time

import torch

import moesaic
from moesaic import graph
from moesaic import scatter as ts

SHAPES = {"512 x 64 x 256": (512, 32768, 256), "50k, 1M x 64": (50000, 1000000, 64)}


CLOCK = {"now": time.perf_counter, "repeated": False}


def clock(function):
    begin = CLOCK["now"]()
    function()
    return 1e3 * (CLOCK["now"]() - begin)


def add_options(parser, repetitions):
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--cpu-time", action="store_true",
                        help="measure processor time instead of elapsed time: for a machine that also does other work")
    parser.add_argument("--repeated", action="store_true", help="run each function's repetitions in a row: caches keep its data")


def prepare(options):
    if options.cpu_time:
        CLOCK["now"] = time.process_time
    CLOCK["repeated"] = options.repeated
    torch.set_num_threads(options.threads)
    moesaic.set_num_threads(options.threads)


def measure(functions, repetitions):
    """Runs all functions in turn, so that a change of the machine's speed meets all of them; in a row with --repeated."""
    if CLOCK["repeated"]:
        return {name: [clock(function) for _ in range(repetitions + 1)][1:] for name, function in functions.items()}
    times = {name: [] for name in functions}
    for repetition in range(repetitions + 1):
        for name, function in functions.items():
            elapsed = clock(function)
            if repetition > 0:
                times[name].append(elapsed)
    return times


def report(title, times, ours, bytes_moved=0):
    """Prints medians, ratios to `ours` and their spread; with bytes_moved also rates of memory."""
    print(f"\n{title}")
    base = statistics.median(times[ours])
    for name, values in times.items():
        ordered = sorted(values)
        spread = f"{ordered[len(ordered) // 4] / base:.2f}..{ordered[3 * len(ordered) // 4] / base:.2f}"
        print(f"  {name:42} median {statistics.median(values):9.3f} ms   best {ordered[0]:9.3f} ms   "
              f"{statistics.median(values) / base:7.2f} x ({spread})"
              + (f"   {bytes_moved / statistics.median(values) / 1e6:6.1f} GB/s" if bytes_moved else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, 9)
    options = parser.parse_args()
    prepare(options)
    print(f"PyTorch {torch.__version__}, kernels {moesaic.kernels()}, {options.threads} threads")
    scatter = None
    if importlib.util.find_spec("torch_scatter"):
        import torch_scatter as scatter
    generator = torch.Generator().manual_seed(1)
    for title, (nodes, edges, columns) in SHAPES.items():
        src, dst = (torch.randint(0, nodes, (edges,), generator=generator) for _ in range(2))
        u, w = torch.randn(nodes, columns), torch.randn(edges)
        plan = graph.Graph(src, dst, nodes, nodes)
        ptr, sources, edge = (torch.from_numpy(x).long() for x in plan.csc())
        ordered, dst_in_order, messages = w[edge], dst[edge], torch.randn(edges, columns)
        csr = torch.sparse_csr_tensor(ptr, sources, ordered, (nodes, nodes))
        segments = graph.Segments(dst, nodes)

        def unfused():
            return torch.zeros(nodes, columns).index_add_(0, dst, u[src] * w[:, None])

        def bag(weights):
            return torch.nn.functional.embedding_bag(sources, u, ptr[:-1], mode="sum", per_sample_weights=weights)

        repeated = u.expand(edges // nodes, nodes, columns)  # the gathered bytes, read from one table
        plan_bytes = torch.empty(2, 14 * edges, dtype=torch.uint8)  # two int64 read, three int32 written per edge
        report(f"u_mul_e sum, {title}", measure({
            "moesaic gspmm": lambda: graph.u_mul_e_sum(plan, u, w),
            "moesaic gspmm without weights (copy_u)": lambda: graph.copy_u(plan, u),
            "gather, multiply, index_add_": unfused,
            "embedding_bag, weights put in order": lambda: bag(w[edge]),
            "embedding_bag, weights in order before": lambda: bag(ordered),
            "sparse CSR @ dense, weights in order before": lambda: csr @ u,
            "bound: read of the gathered bytes": lambda: repeated.sum(),
        }, options.repetitions), "moesaic gspmm")
        in_order = graph.Graph(sources, dst_in_order, nodes, nodes)
        report(f"u_mul_e sum, edges in the order of their destinations, {title}", measure({
            "moesaic gspmm": lambda: graph.u_mul_e_sum(in_order, u, ordered),
            "gather, multiply, index_add_":
                lambda: torch.zeros(nodes, columns).index_add_(0, dst_in_order, u[sources] * ordered[:, None]),
            "embedding_bag": lambda: bag(ordered),
            "sparse CSR @ dense": lambda: csr @ u,
        }, options.repetitions), "moesaic gspmm")
        functions = {
            "moesaic segment_reduce, plan reused": lambda: graph.segment_reduce(segments, messages),
            "moesaic scatter_sum, with plan": lambda: ts.scatter_sum(messages, dst, 0, dim_size=nodes),
            "index_add_": lambda: torch.zeros(nodes, columns).index_add_(0, dst, messages),
        }
        if scatter is not None:
            functions["torch_scatter scatter_sum"] = lambda: scatter.scatter_sum(messages, dst, 0, dim_size=nodes)
        functions["bound: read of the same bytes (torch.sum)"] = lambda: messages.sum()
        report(f"scatter sum, {title}", measure(functions, options.repetitions), "moesaic segment_reduce, plan reused",
               bytes_moved=messages.nbytes)
        grouped = graph.Segments.from_ptr(ptr)
        report(f"sum of rows in the order of their segments, {title}", measure({
            "moesaic segment_reduce": lambda: graph.segment_reduce(grouped, messages),
            "bound: read of the same bytes (torch.sum)": lambda: messages.sum(),
            "torch.segment_reduce": lambda: torch.segment_reduce(messages, "sum", offsets=ptr, unsafe=True),
        }, options.repetitions), "moesaic segment_reduce", bytes_moved=messages.nbytes)
        report(f"plan, {title}", measure({
            "moesaic Graph (COO -> CSC)": lambda: graph.Graph(src, dst, nodes, nodes),
            "torch.sort": lambda: torch.sort(dst, stable=True),
            "bound: copy of the same bytes": lambda: plan_bytes[0].copy_(plan_bytes[1]),
        }, options.repetitions), "moesaic Graph (COO -> CSC)")


if __name__ == "__main__":
    main()
