#!/usr/bin/env python3
"""Simulates steps of DeepSeek-V3 (int8 or fp8 weights) in several layouts, and prints markdown.

    python3 bench/parallel/steps.py three-way     TP16, EP16, PP8 x TP2 and others on the 16-chip server
    python3 bench/parallel/steps.py deepseek      prefill TP4 x DP8 with EP32, decode TP4 x DP36 with EP144, on H800 nodes
    python3 bench/parallel/steps.py dilated       4 layers, three with 64 experts, on 8 chips of that server, simulated, and in real
                                                  time in network namespaces: links and computations are slower by 1,000
                                                  (needs root and two idle cores)
    POLL_US=2 python3 bench/parallel/steps.py three-way --simulator smpi --narrow 256        the same schedules under SMPI

The collectives and exchanges are this repository's; computations take the time of a roofline of the described devices.
In virtual time, hidden states have --narrow times fewer values, and links are as many times slower: messages then take the
same time, but a step that moves gigabytes is simulated on one machine. Routes of exchanges keep their size: they are 0.5% of
a row of DeepSeek-V3, and count as --narrow times as much (7% with 16). `three-way` narrows exchanges by 4 at most. Small sums
are cut into fewer pieces: a decode step of TP16 takes 224 ms with 64 instead of 217 ms.
--simulator virtual (default) runs ranks as threads in virtual time, smpi as processes of SimGrid's SMPI, where a look for ended
messages takes POLL_US (1) microseconds. --layers N simulates N layers, all with experts, instead of the release's 61 (3 without);
the embedding and the output head then take a larger part of a step. Needs a build folder with the benchmarks:
    ninja -C build/release parallel_step_work parallel_step_bench comm_smpi_platform
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from namespaces import NamespaceTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests/support/deepseek_v3_config.json"
SERVER = ROOT / "topologies/accelerators-16-dual-chip.json"


class Simulator:
    def __init__(self, build, kind, folder, layers=None):
        self.build, self.kind, self.folder = build, kind, pathlib.Path(folder)
        self.model = self.folder / "DeepSeek-V3"
        self.model.mkdir()
        config = json.loads(CONFIG.read_text())
        if layers:
            config.update(num_hidden_layers=layers, first_k_dense_replace=0)
        (self.model / "config.json").write_text(json.dumps(config))
        for name in ("parallel_step_work", "parallel_step_bench"):
            if not (build / "bin" / name).exists():
                sys.exit(f"steps.py: {build / 'bin' / name} is missing; build it by: ninja -C {build} {name}")
        self.program = build / "bin/parallel_step_bench"
        if kind == "smpi":
            self.program = self.folder / "parallel_step_bench"
            self.run([ROOT / "bench/comm/smpi_program.sh", "build", build, "parallel_step_bench", self.program,
                      "bench/parallel/step_bench.cc", "bench/parallel/step_schedule.cc"])

    @staticmethod
    def run(command):
        environment = {"POLL_US": "1", **os.environ}  # of smpi_program.sh
        done = subprocess.run([str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"steps.py: {' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def work(self, topology, tp=1, pp=1, dp=1, ep=False, flops="int8", slots=0, tokens=128, name="work"):
        command = [self.build / "bin/parallel_step_work", self.model, "--topology", topology, "--flops", flops, "--tp", tp,
                   "--pp", pp, "--dp", dp, "--expert-slots", slots, "--tokens", max(1, tokens)]
        path = self.folder / f"{name}.json"
        path.write_text(self.run(command + (["--ep"] if ep else [])))
        return path

    def narrowed(self, topology, work, narrow):
        """Returns files with links `narrow` times slower, and hidden states `narrow` times narrower."""
        description, deployment = json.loads(topology.read_text()), json.loads(work.read_text())
        description["tree"] = with_links(description["tree"], lambda link: {**link, "gb_per_s": link["gb_per_s"] / narrow})
        deployment["hidden"] //= narrow
        slow, less = self.folder / f"narrow-{topology.name}", self.folder / f"narrow-{work.name}"
        slow.write_text(json.dumps(description))
        less.write_text(json.dumps(deployment))
        return slow, less

    def step(self, topology, work, sequences=1, rows=1, context=0, steps=0, narrow=1, quantum_us=0):
        name = work.stem
        if narrow > 1:
            topology, work = self.narrowed(topology, work, narrow)
        arguments = [work, "--topology", topology, "--sequences", sequences, "--rows", rows, "--context", context,
                     "--steps", steps]
        if self.kind == "smpi":
            command = [ROOT / "bench/comm/smpi_program.sh", "run", self.build, topology, self.program, *arguments,
                       "--transport", "mpi"]
        else:
            command = [self.program, *arguments, "--quantum-us", quantum_us]
        start = time.monotonic()
        result = json.loads(self.run(command))
        print(f"steps.py: {name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        result["bytes"] = {level: value * narrow for level, value in result["bytes"].items()}
        return result


def with_links(node, change):
    """Returns the tree with every link changed."""
    if "children" in node:
        node = {**node, "children": [with_links(child, change) for child in node["children"]]}
    return {**node, "link": change(node["link"])} if "link" in node else node


def row(cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def header(cells):
    row(cells)
    print("|---|" + "---:|" * (len(cells) - 1))


def milliseconds(value):
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def between(result):
    mean = result["mean_ms"]
    return sum(mean[part] for part in ("sums", "dispatch", "combine", "transfer"))


THREE_WAY = {"TP16": {"tp": 16}, "EP16": {"dp": 16}, "PP2 x TP8": {"pp": 2, "tp": 8}, "PP4 x TP4": {"pp": 4, "tp": 4},
             "PP8 x TP2": {"pp": 8, "tp": 2}, "PP16": {"pp": 16}}


def hybrids():
    """Returns the other layouts of 16 ranks whose replicas divide the experts."""
    sizes = (1, 2, 4, 8, 16)
    degrees = [{"pp": pp, "tp": tp, "dp": 16 // pp // tp} for pp in sizes for tp in sizes if 1 < pp * tp < 16]
    return {" x ".join(f"{kind.upper()}{size}" for kind, size in each.items() if size > 1): each for each in degrees}


def three_way(simulator, prefill_rows, narrow, titles, layouts):
    """Prints a table for each of the steps `titles`. `layouts`: sizes by name; times are compared with the first one."""
    for title, rows, sequences in (("decode", 1, 64), ("prefill", prefill_rows, 1)):
        if title not in titles:
            continue
        print(f"\n{title}, {rows * sequences} {'sequences' if rows == 1 else 'rows'} per step; ms\n")
        header(["layout", "one step", "interval", "between ranks", f"of the interval of {next(iter(layouts))}"])
        base = None
        for name, degrees in layouts.items():
            replicas = degrees.get("dp", 1)
            shape = {"rows": rows // replicas} if rows > 1 else {"sequences": sequences // replicas}
            work = simulator.work(SERVER, tokens=rows * sequences // 16, ep=replicas > 1, name=name.replace(" ", ""), **degrees)
            # Steps of one stage are equal; a pipeline has to be filled first.
            result = simulator.step(SERVER, work, steps=0 if degrees.get("pp", 1) > 1 else 2,
                                    narrow=min(narrow, 4) if replicas > 1 else narrow, **shape)
            base = base or result["interval_ms"]
            row([name, milliseconds(result["latency_ms"]), milliseconds(result["interval_ms"]),
                 milliseconds(between(result)), f"{result['interval_ms'] / base:.2f}"])
            sys.stdout.flush()


def deepseek(simulator, prefill_rows, narrow, titles):
    deployments = [
        (f"prefill TP4 x DP8, EP32, 4 nodes; {prefill_rows} rows of each replica",
         ROOT / "topologies/h800-4x8-infiniband.json", {"tp": 4, "dp": 8, "tokens": prefill_rows // 4},
         {"rows": prefill_rows, "context": prefill_rows // 2}),
        ("decode TP4 x DP36, EP144, 18 nodes; 176 sequences of 4,989 tokens on each replica",
         ROOT / "topologies/h800-18x8-infiniband.json", {"tp": 4, "dp": 36, "tokens": 44},
         {"sequences": 176, "context": 4989})]
    for title, topology, degrees, shape in deployments:
        if title.split()[0] not in titles:
            continue
        work = simulator.work(topology, ep=True, flops="fp8", slots=288, name=f"EP{degrees['tp'] * degrees['dp']}", **degrees)
        result = simulator.step(topology, work, steps=1, narrow=narrow, quantum_us=QUANTUM_US, **shape)
        print(f"\n{title}: {milliseconds(result['latency_ms'])} ms per step\n")
        header(["part", "mean ms of a rank"])
        for part, value in result["mean_ms"].items():
            if value > 0:
                row([part, milliseconds(value)])
        print()
        header(["level", "GB that all ranks send per step"])
        for level, value in result["bytes"].items():
            row([level, f"{value / 1e9:.2f}"])


# Messages of a large job that arrive within this time arrive together: a thousandth of the time of an exchange.
QUANTUM_US = 1
# Ranks' copies and sums of values, which are not simulated, take a tenth of the time of their messages then.
DILATION = 1000
# Time of an empty message between namespaces of this machine, in microseconds.
NAMESPACE_LATENCY_US = 60
# Hidden states between stages are sent after an answer of the receiver, as in the simulation, where a message starts when both
# sides have posted it. Smaller messages are sent at once, because answers would wait in queues of 50 ms. Parts are larger than
# 8 KiB: the machine's own time for each is not part of the simulation.
UCX = {"UCX_RNDV_THRESH": "3mb", "UCX_TCP_TX_SEG_SIZE": "64kb", "UCX_TCP_RX_SEG_SIZE": "64kb"}
DILATED = {"TP8": {"tp": 8}, "EP8": {"dp": 8, "ep": True}, "PP2 x TP4": {"pp": 2, "tp": 4}, "PP4 x TP2": {"pp": 4, "tp": 2}}


def dilated(simulator, rows_per_step, layouts):
    """Prints a table of simulated and real times. `layouts`: sizes by name."""
    topology = json.loads(SERVER.read_text())
    topology["tree"]["children"][0]["children"][0]["count"] = 1  # one PCIe switch per socket
    # The latencies of a dilated topology are those of this machine.
    topology["tree"] = with_links(topology["tree"], lambda link: {**link, "latency_us": NAMESPACE_LATENCY_US / DILATION})
    path = simulator.folder / "eight.json"
    path.write_text(json.dumps(topology))
    # With all experts, most of a step would be computation, which is a sleep in both.
    config = json.loads(CONFIG.read_text())
    config.update(num_hidden_layers=4, first_k_dense_replace=1, num_nextn_predict_layers=0, n_routed_experts=64)
    (simulator.model / "config.json").write_text(json.dumps(config))
    print(f"\n4 layers, three with 64 experts, on 8 chips, prefill, {rows_per_step} rows per step; "
          f"ms, with links and computations {DILATION} times slower\n")
    header(["layout", "one step, simulated", "in namespaces", "difference", "interval, simulated", "in namespaces", "difference"])
    network = NamespaceTree(topology, DILATION)
    try:
        for name, degrees in layouts.items():
            rows = rows_per_step // degrees.get("dp", 1)
            work = simulator.work(path, tokens=rows, name=name.replace(" ", ""), **degrees)
            steps = 2 * degrees.get("pp", 1)
            predicted = simulator.step(path, work, rows=rows, steps=steps)
            start = time.monotonic()
            real = json.loads(network.launch([simulator.build / "bin/parallel_step_bench", work, "--topology", path, "--rows",
                                              rows, "--steps", steps, "--transport", "", "--dilation", DILATION], UCX))
            print(f"steps.py: {name} in namespaces: {time.monotonic() - start:.0f} s", file=sys.stderr)
            cells = [name]
            for key in ("latency_ms", "interval_ms"):
                cells += [f"{predicted[key] * DILATION:.0f}", f"{real[key] * DILATION:.0f}", f"{real[key] / predicted[key] - 1:+.0%}"]
            row(cells)
            print(f"steps.py: {name}: {json.dumps(real['mean_ms'])}, simulated {json.dumps(predicted['mean_ms'])}", file=sys.stderr)
            sys.stdout.flush()
    finally:
        network.close()


def chosen_layouts(parser, arguments):
    """Returns the sizes of each experiment's layouts by name."""
    tables = {"three-way": THREE_WAY | (hybrids() if arguments.hybrids else {}), "dilated": DILATED}
    tables = {experiment: table for experiment, table in tables.items() if experiment in arguments.experiments}
    if arguments.layouts:
        tables = {experiment: {name: table[name] for name in arguments.layouts if name in table}
                  for experiment, table in tables.items()}
        for name in arguments.layouts:
            if not any(name in table for table in tables.values()):
                parser.error(f"--layouts: {name} is no layout of {', '.join(arguments.experiments)}"
                             f"{'' if arguments.hybrids else ' without --hybrids'}")
        for experiment, table in tables.items():
            if not table:
                parser.error(f"--layouts: none is a layout of {experiment}")
    if arguments.layers is None:
        return tables
    if arguments.experiments != ["three-way"] or arguments.layers < 1:
        parser.error("--layers takes a positive number, for three-way alone")
    for name, degrees in tables["three-way"].items():
        if degrees.get("pp", 1) > arguments.layers:
            parser.error(f"--layers {arguments.layers} is less than the number of stages of {name}; choose others by --layouts")
    return tables


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=["three-way", "deepseek", "dilated"])
    parser.add_argument("--simulator", choices=["virtual", "smpi"], default="virtual")
    parser.add_argument("--rows", type=int,
                        help="rows of a prefill step (default 1024; deepseek: 4096 of each replica; dilated: 512)")
    parser.add_argument("--steps", nargs="+", choices=["decode", "prefill"], default=["decode", "prefill"],
                        help="of three-way and deepseek")
    parser.add_argument("--hybrids", action="store_true", help="three-way: also the other layouts of 16 ranks, in powers of two")
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT",
                        help='layouts that three-way and dilated simulate, named as in their tables, such as "PP8 x TP2" (default: all)')
    parser.add_argument("--layers", type=int, help="three-way: simulate that many layers, all with experts (default: all 61)")
    parser.add_argument("--narrow", type=int, default=16, help="factor by which simulated hidden states are narrower (16)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    arguments = parser.parse_args()
    if arguments.narrow < 1:
        parser.error(f"--narrow must be 1 or more, found {arguments.narrow}")
    layouts = chosen_layouts(parser, arguments)
    os.environ.setdefault("LC_ALL", "C")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("steps.py: ended by a signal"))  # removes namespaces
    with tempfile.TemporaryDirectory() as folder:
        simulator = Simulator(arguments.build.resolve(), arguments.simulator, folder, arguments.layers)
        for experiment in arguments.experiments:
            if experiment == "three-way":
                three_way(simulator, arguments.rows or 1024, arguments.narrow, arguments.steps, layouts["three-way"])
            elif experiment == "deepseek":
                deepseek(simulator, arguments.rows or 4096, arguments.narrow, arguments.steps)
            else:
                dilated(simulator, arguments.rows or 512, layouts["dilated"])


if __name__ == "__main__":
    main()
