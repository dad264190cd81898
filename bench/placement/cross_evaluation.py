#!/usr/bin/env python3
"""Measures plans of published balancers with our evaluator, and all plans with the balancers' own measures.

Usage: cross_evaluation.py MOESAIC EPLB VLLM_ASCEND OMNI_INFER [--ranks 32] [--layers 8] [--seed 1]

EPLB, VLLM_ASCEND and OMNI_INFER are checkouts of https://github.com/deepseek-ai/EPLB, vllm-project/vllm-ascend and Huawei's
omni-infer. Packages are those of tests/golden/balancer_goldens.py, and pandas for OmniPlacement's measure. Plans are made
for five generated workloads and measured on the sixth; values are means over layers of the largest rank load over the mean,
equal shares of replicas. EPLB publishes no measure: its column has the loads of GPUs that its arrays stand for.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()
import numpy
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/golden"))
import balancer_goldens as published

TOKENS = 1 << 20  # of a layer; loads of all workloads are scaled to it


class Measures:
    """The published measures, of pattern [layers][ranks][slots] and loads [layers, experts]."""

    def __init__(self, eplb, flashlb, swift, analysis):
        self.eplb, self.flashlb, self.swift, self.analysis = eplb, flashlb, swift, analysis

    def of_eplb(self, plan, loads):
        """Loads of GPUs as rebalance_experts_hierarchical computes them from a physical-to-logical map."""
        values = []
        for layer, ranks in enumerate(plan):
            phy2log = torch.tensor([expert for rank in ranks for expert in rank])
            counts = torch.bincount(phy2log, minlength=loads.shape[1])
            tokens = (torch.from_numpy(loads[layer]) / counts).gather(-1, phy2log)
            packs = tokens.view(len(ranks), -1).sum(-1)
            values.append(float(packs.max() / packs.mean()))
        return numpy.mean(values)

    def of_flashlb(self, plan, loads):
        """Its score adds a hundredth of a token to both sides."""
        return numpy.mean([self.flashlb.compute_score(loads[layer:layer + 1].astype(float),
                                                      numpy.bincount(numpy.concatenate(ranks), minlength=loads.shape[1]),
                                                      numpy.array(ranks)) for layer, ranks in enumerate(plan)])

    def of_swift(self, plan, loads):
        policy = self.swift.SwiftBalanceEplb()
        policy.num_ranks = len(plan[0])
        return numpy.mean(policy.calculate_imbalance(numpy.array(plan), loads.astype(float)))

    def of_omni(self, plan, loads):
        pattern = numpy.zeros((len(plan[0]), len(plan), loads.shape[1]), dtype=int)
        for layer, ranks in enumerate(plan):
            for rank, experts in enumerate(ranks):
                pattern[rank, layer, experts] = 1
        table = self.analysis.analyze_device_load(pattern, loads.astype(float), "cross")
        return float((table.max(axis=1) / self.analysis.calculate_best_ep_per_layer(loads, len(plan[0]), "cross")).mean())


def load_measures(arguments):
    flashlb, swift = published.load_policies(arguments.vllm_ascend)
    for name in ("matplotlib", "matplotlib.pyplot", "seaborn"):  # only for its plots
        try:
            __import__(name)
        except ImportError:
            published.empty_module(name, rcParams={})
    sys.modules["matplotlib"].pyplot = sys.modules["matplotlib.pyplot"]
    tool = pathlib.Path(arguments.omni_infer) / "omni/accelerators/placement/utils/omni_pattern_tool"
    patterns = published.load_module("omni_patterns", tool / "step_2_placement_pattern_generation.py")
    analysis = published.load_module("omni_analysis", tool / "step_4_load_analysis_and_plot.py")
    eplb = published.load_module("eplb_published", pathlib.Path(arguments.eplb) / "eplb.py")
    return Measures(eplb, flashlb, swift, analysis), patterns


def published_plans(measures, patterns, known, ranks):
    """Plans of the published files, [layers][ranks][slots]."""
    mean = known.sum(axis=0)
    layers, experts = mean.shape
    slots = experts // ranks + 1
    start = published.first_placement(experts, ranks, slots)
    table = torch.from_numpy(numpy.broadcast_to(start, (layers, *start.shape)).copy())
    plans = {"default order": numpy.broadcast_to(numpy.arange(experts).reshape(ranks, -1), (layers, ranks, experts // ranks)).tolist()}
    phy2log = measures.eplb.rebalance_experts(torch.from_numpy(mean), ranks * slots, 1, 1, ranks)[0]
    plans["EPLB"] = phy2log.view(layers, ranks, slots).tolist()
    _, _, plan = measures.flashlb.FlashLB().rebalance_experts(table, torch.from_numpy(published.slot_loads(known, start)))
    plans["FlashLB"] = numpy.asarray(plan).tolist()
    plans["SwiftBalance"] = measures.swift.SwiftBalanceEplb().rebalance_experts(
        table, torch.from_numpy(published.slot_loads(mean, start)))[2]
    # Its last argument is a number from which the golden script takes layers and a limit: all layers, 11 further replicas.
    choice = next(n for n in range(12 * (layers + 1)) if n % (layers + 1) == layers and n % 12 == 11)
    plans["OmniPlacement"] = [[rank.tolist() for rank in layer]
                              for layer in published.run_omni(patterns, mean[numpy.newaxis], ranks, 1, choice)]
    return plans


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("moesaic")
    parser.add_argument("eplb")
    parser.add_argument("vllm_ascend")
    parser.add_argument("omni_infer")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    moesaic = pathlib.Path(arguments.moesaic).resolve()
    for name in ("eplb", "vllm_ascend", "omni_infer"):
        setattr(arguments, name, pathlib.Path(getattr(arguments, name)).resolve())
    with tempfile.TemporaryDirectory(prefix="moesaic-cross-") as folder:
        os.chdir(folder)  # OmniPlacement's files write logs
        folder = pathlib.Path(folder)

        def run(*words):
            return subprocess.run([moesaic, "placement", *map(str, words)], check=True, capture_output=True, text=True).stdout

        run("generate", "--out", folder / "loads", "--layers", arguments.layers, "--seed", arguments.seed)
        files = sorted((folder / "loads").glob("*.npy"))
        loads = numpy.stack([numpy.load(path) for path in files]).astype(float)
        loads = numpy.rint(loads * TOKENS / loads.sum(axis=-1, keepdims=True)).astype(numpy.int64)
        for path, load in zip(files, loads):
            numpy.save(path, load)
        measures, patterns = load_measures(arguments)
        plans = published_plans(measures, patterns, loads[:-1], arguments.ranks)
        slots = (loads.shape[-1] // arguments.ranks + 1) * arguments.ranks
        run("plan", *files[:-1], "--ranks", arguments.ranks, "--slots", slots, "--out", folder / "ours.json")
        plans["moesaic"] = json.loads((folder / "ours.json").read_text())["layers"]
        print(f"EP{arguments.ranks}, {slots} slots, {arguments.layers} layers, planned for five workloads, measured on a sixth\n")
        print("| plan \\ measure | moesaic | EPLB | FlashLB | SwiftBalance | OmniPlacement | repeated replicas |\n|---|---|---|---|---|---|---|")
        for name, plan in plans.items():
            path = folder / "plan.json"
            path.write_text(json.dumps({"format": "moesaic-placement", "version": 1, "experts": loads.shape[-1], "layers": plan}))
            printed = json.loads(run("evaluate", files[-1], "--plan", path, "--json"))
            repeated = printed["repeated_replicas"]
            values = [printed["loads"][0]["mean"], *(measure(plan, loads[-1]) for measure in
                                                     (measures.of_eplb, measures.of_flashlb, measures.of_swift, measures.of_omni))]
            if repeated:
                values[-1] = float("nan")  # its pattern has no place for two replicas of an expert on a rank
            print(f"| {name} | " + " | ".join("-" if numpy.isnan(value) else f"{value:.4f}" for value in values) + f" | {repeated} |")


if __name__ == "__main__":
    main()
