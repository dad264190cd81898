#!/usr/bin/env python3
"""Runs published expert balancers on random inputs and stores a hash of each placement.

Usage: balancer_goldens.py VLLM_ASCEND OMNI_INFER LPLB OUT.npy

VLLM_ASCEND is a checkout of https://github.com/vllm-project/vllm-ascend (182b75e made the stored goldens), OMNI_INFER of
Huawei's omni-infer (652b242), and LPLB of https://github.com/deepseek-ai/LPLB. It needs NumPy 2, SciPy, Numba and PyTorch
(2.4.6, 1.17.1, 0.68.1 and 2.15.0). Modules of accelerators that the files import, but do not use for plans, are replaced
by empty ones. FlashLB writes past the end of an array where no rank is left for a replica; indices are checked, and such
inputs count as refused. Inputs are made from the number of the case by the same generator as in published_balancers_test.cc.
"""
import importlib.util
import logging
import os
import pathlib
import sys
import tempfile
import types

import numpy
import torch

MASK = (1 << 64) - 1
CASES = 300  # of each balancer
BALANCERS = ("omni", "flashlb", "swift", "lplb")


class Random:
    """splitmix64."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, bound):
        return self.next() % bound


def case(balancer, number):
    """Returns (loads [windows, layers, experts], ranks, redundant slots of a rank, a number for other choices)."""
    random = Random(1000 * BALANCERS.index(balancer) + number)
    ranks = (2, 4, 8, 16, 24, 32)[random.below(6)]
    own = 1 + random.below(8)
    spare = 1 if balancer == "omni" else random.below(min(own, 3) + 1)
    if balancer == "lplb":
        ranks, spare = (8, 16, 24)[random.below(3)], 1 + random.below(own)
    windows = 1 + random.below(4) if balancer == "flashlb" else 1
    if balancer == "flashlb" and random.below(8) == 0:
        windows = 60 + random.below(100)
    layers = 2 + random.below(2)
    ties = random.below(4) == 0 and balancer in ("omni", "lplb")
    choice = random.below(1000)
    loads = numpy.empty((windows, layers, ranks * own), dtype=numpy.int64)
    for index in range(loads.size):
        # The square makes some experts much hotter than others.
        value = random.next() >> 40
        loads.flat[index] = value % 7 if ties else (value * value) >> 24
    return loads, ranks, spare, choice


def result_hash(layers):
    """FNV-1a over sorted experts of each rank, which ends with -1; folded to 32 bits."""
    value = 0xCBF29CE484222325
    for layer in layers:
        for rank in layer:
            for number in [*sorted(int(expert) for expert in rank), -1]:
                value = ((value ^ (number & MASK)) * 0x100000001B3) & MASK
    return (value ^ (value >> 32)) & 0xFFFFFFFF


def load_module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def empty_module(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def load_policies(folder):
    """Returns the modules of FlashLB and SwiftBalance."""
    empty_module("torch_npu")
    torch.npu = types.SimpleNamespace(device_count=lambda: 8)
    empty_module("vllm", __path__=[])
    empty_module("vllm.logger", logger=logging.getLogger("vllm"))
    empty_module("vllm_ascend", __path__=[])
    empty_module("vllm_ascend.distributed", __path__=[])

    def group():
        raise RuntimeError("no group")

    empty_module("vllm_ascend.distributed.parallel_state", get_dynamic_eplb_group=group)
    empty_module("vllm_ascend.eplb", __path__=[])
    empty_module("vllm_ascend.eplb.core", __path__=[])
    empty_module("vllm_ascend.eplb.core.policy", __path__=[])
    policies = pathlib.Path(folder) / "vllm_ascend/eplb/core/policy"
    load_module("vllm_ascend.eplb.core.policy.policy_abstract", policies / "policy_abstract.py")
    return [load_module(f"vllm_ascend.eplb.core.policy.{name}", policies / f"{name}.py")
            for name in ("policy_flashlb", "policy_swift_balancer")]


def load_planner(folder):
    """Returns LPLB's planner, whose tensors are on the CPU."""
    folder = next(path for path in (pathlib.Path(folder), pathlib.Path(folder) / "LPLB") if (path / "lplb").is_dir())
    empty_module("lplb", __path__=[])
    empty_module("lplb._cpp", CompiledSolver=lambda *arguments: None)
    load_module("lplb.eplb", folder / "lplb/eplb.py")
    source = (folder / "lplb/planner.py").read_text().replace("device = 'cuda'", "device = 'cpu'").replace(".cuda()", "")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source)
        file.flush()
        module = load_module("lplb.planner", file.name)
    graphs = (folder / "tests/utils.py").read_text()
    names = {"torch": torch}
    exec("\n".join(graphs[graphs.index("CUBE_8P2E"):].splitlines()), names)  # the graphs come last
    torch.cuda.device_count = lambda: 8
    return module, names


def first_placement(experts, ranks, slots):
    """As vllm-ascend's generate_global_placement."""
    return (numpy.arange(ranks * slots) % experts).reshape(ranks, slots)


def slot_loads(loads, start):
    """Loads [..., ranks, slots] of which the first slot of an expert has all tokens."""
    flat = start.reshape(-1)
    _, first = numpy.unique(flat, return_index=True)
    result = numpy.zeros((*loads.shape[:-1], flat.size), dtype=loads.dtype)
    result[..., first] = loads
    return result.reshape(*loads.shape[:-1], *start.shape)


def run_flashlb(module, loads, ranks, spare, choice):
    layers, experts = loads.shape[1:]
    start = first_placement(experts, ranks, experts // ranks + spare)
    table = numpy.broadcast_to(start, (layers, *start.shape)).copy()
    try:
        _, _, plan = module.FlashLB().rebalance_experts(torch.from_numpy(table), torch.from_numpy(slot_loads(loads, start)))
    except IndexError:
        return None
    # Its last step permutes ranks to move fewer experts: they are compared in an order of their own.
    return [sorted(sorted(int(expert) for expert in rank) for rank in layer) for layer in plan]


def run_swift(module, loads, ranks, spare, choice):
    layers, experts = loads.shape[1:]
    start = first_placement(experts, ranks, experts // ranks + spare)
    table = numpy.broadcast_to(start, (layers, *start.shape)).copy()
    return module.SwiftBalanceEplb().rebalance_experts(torch.from_numpy(table),
                                                       torch.from_numpy(slot_loads(loads[0], start)))[2]


def run_omni(module, loads, ranks, spare, choice):
    """Returns None if the published file ends in an error."""
    layers, experts = loads.shape[1:]
    rows = numpy.ceil(loads[0] / 128)
    limit = choice % 12
    with tempfile.TemporaryDirectory() as folder:
        table = pathlib.Path(folder) / "rows.csv"
        lines = [",".join(["layer", *map(str, range(experts))])]
        lines += [",".join([str(layer), *(str(int(value)) for value in row)]) for layer, row in enumerate(rows)]
        table.write_text("\n".join(lines) + "\n")
        try:
            pattern = module.process_expert_deployments(str(table), folder, ranks, choice % (layers + 1), min(limit, ranks - 1),
                                                        layers, experts, output_file="pattern.npy", is_redundant=True,
                                                        log_timestamp="0")
        except (ValueError, RuntimeError):
            return None
    return [[numpy.flatnonzero(rank) for rank in pattern[:, layer]] for layer in range(layers)]


def run_lplb(module, graphs, loads, ranks, spare, choice):
    graph = [graphs["RING_8P"], graphs["CUBE_8P2E"], graphs["HYPERCUBE_16P2E"], graphs["torus_2d"](2, 4)][choice % 4]
    if ranks % graph.shape[0] or spare % graph.shape[1]:
        graph = graphs["RING_8P"]
    layers, experts = loads.shape[1:]
    plans = []
    for layer in range(layers):
        try:
            planner = module.Planner(graph, experts + ranks * spare, experts, ep_size=ranks)
            plan, _, _ = planner.update_redundancy_mapping(torch.from_numpy(loads[0, layer]))
        except AssertionError:
            return None
        plans.append(plan.reshape(ranks, -1).tolist())
    return plans


def main():
    ascend, omni, lplb, out = sys.argv[1:]
    os.environ["NUMBA_BOUNDSCHECK"] = "1"  # read when Numba is imported
    os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()
    torch.set_num_threads(1)
    flashlb, swift = load_policies(ascend)
    patterns = load_module("omni_patterns", pathlib.Path(omni) / "omni/accelerators/placement/utils/omni_pattern_tool" /
                           "step_2_placement_pattern_generation.py")
    planner, graphs = load_planner(lplb)
    runs = {"omni": lambda *words: run_omni(patterns, *words), "flashlb": lambda *words: run_flashlb(flashlb, *words),
            "swift": lambda *words: run_swift(swift, *words), "lplb": lambda *words: run_lplb(planner, graphs, *words)}
    hashes = numpy.zeros((len(BALANCERS), CASES), dtype=numpy.uint32)  # 0: the published file refuses the input
    for row, name in enumerate(BALANCERS):
        for number in range(CASES):
            plan = runs[name](*case(name, number))
            hashes[row, number] = 0 if plan is None else result_hash(plan)
        print(name, "refused", int((hashes[row] == 0).sum()), "of", CASES, file=sys.stderr)
    numpy.save(out, hashes)


if __name__ == "__main__":
    main()
