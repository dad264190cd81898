#!/usr/bin/env python3
"""Tests a model on several ranks: equal results in every layout, refused layouts, and ranks started by this program, by mpirun and
by a Slurm script. rank_serving_test.py tests servers."""
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import urllib.request

from moesaic_cli import (BINARY, GOLDEN, MPI, MPI_FLAGS, ROOT, free_port, limit, main, mpirun, needs_mpirun, patient,
                         read_npy, read_until, run, wait_until_caught)

sys.path[:0] = [str(ROOT / "tests" / "server"), str(ROOT / "tests" / "support")]
from processes import children  # noqa: E402
from serving import MODEL, until  # noqa: E402

IDS = ",".join(str(3 + i * 7 % 90) for i in range(40))
LAYOUTS = (("-tp", "2"), ("-pp", "2"), ("-tp", "2", "-ep"), ("-tp", "2", "-pp", "2"), ("-tp", "3"), ("-pp", "3"),
           ("-tp", "4", "--ep-size", "2"), ("-tp", "2", "-dp", "2"), ("-dp", "2", "-ep"), ("-tp", "2", "-dp", "2", "-ep"),
           ("-pp", "2", "-dp", "2", "-ep"))


def ended(pid):
    """Whether a process has ended, reaped or not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def cores():
    """The processors of each core that this process may use."""
    siblings = {}
    for cpu in os.sched_getaffinity(0):
        folder = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        core = (folder / "thread_siblings_list").read_text() if folder.exists() else cpu
        siblings.setdefault(core, set()).add(cpu)
    return list(siblings.values())


def shared_files():
    """The files of shared memory that UCX has made and not yet unlinked, of all processes."""
    return set(pathlib.Path("/dev/shm").glob("ucx*"))


class RanksCase(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-ranks-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def logits(self, model, *flags):
        out = self.folder / "logits.npy"
        run("logits", model, "--ids", IDS, "--dtype", "f32", "--threads", "1", "--out", out, *flags)
        return read_npy(out)

    def assert_close(self, rows, expected):
        worst = max(abs(a - b) for row, other in zip(rows, expected) for a, b in zip(row, other))
        self.assertEqual(len(rows), len(expected))
        self.assertLessEqual(worst, 1e-4)


class Results(RanksCase):
    def test_logits_are_those_of_one_rank(self):
        for model in ("deepseek-v3-noqlora", "qwen3-moe-norm-tied"):
            expected = self.logits(GOLDEN / model)
            for flags in LAYOUTS:
                with self.subTest(model=model, layout=flags):
                    rows = self.logits(GOLDEN / model, *flags)
                    self.assert_close(rows, expected)
                    self.assertEqual(rows, self.logits(GOLDEN / model, *flags), "a layout repeats its results")

    def test_expert_parallelism_of_a_dense_model_is_reported(self):
        out = self.folder / "logits.npy"
        for flags in (("-tp", "2", "-ep"), ("-dp", "2", "-ep")):
            result = run("logits", GOLDEN / "qwen3-tied", "--ids", IDS, "--dtype", "f32", "--threads", "1", "--out", out, *flags)
            self.assertEqual(result.stderr.count("has no effect on a model without routed experts"), 1, result.stderr)

    TRANSPORT_LAYOUTS = (("-tp", "2"), ("-pp", "2"), ("-dp", "2", "-ep"), ("-tp", "2", "-pp", "2"), ("-tp", "2", "-dp", "2", "-ep"))

    def test_results_do_not_depend_on_the_transport(self):
        model = GOLDEN / "qwen3-moe-norm-tied"
        for flags in self.TRANSPORT_LAYOUTS:
            with self.subTest(layout=flags):
                expected = self.logits(model, *flags)
                for transport in ("tcp,self", "posix,self"):
                    with unittest.mock.patch.dict(os.environ, UCX_TLS=transport):
                        self.assertEqual(self.logits(model, *flags), expected, transport)

    @needs_mpirun
    def test_results_over_mpi_are_those_over_ucx(self):
        model, out = GOLDEN / "qwen3-moe-norm-tied", self.folder / "logits.npy"
        for flags in self.TRANSPORT_LAYOUTS:
            with self.subTest(layout=flags):
                expected = self.logits(model, *flags)
                out.unlink()
                result = mpirun("logits", model, "--ids", IDS, "--dtype", "f32", "--threads", "1", "--out", out, *flags,
                                ranks=2 ** flags.count("2"))
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(read_npy(out), expected)

    def test_verbs_take_the_same_flags(self):
        words = ("generate", MODEL, "--dtype", "f32", "--prompt", "Once upon a time", "--prompt", "The lion", "--prompt",
                 "In the woods", "-n", "24", "--temperature", "0", "--format", "jsonl")
        for flags in (("-dp", "2"), ("-dp", "2", "-ep")):
            self.assertEqual(run(*words, *flags).stdout, run(*words).stdout)
        text = self.folder / "text.txt"
        text.write_text("The lion was in the woods and the owl was in the tree. " * 8)
        words = ("generate", MODEL, "--dtype", "f32", "--prompt", "Once upon a time", "-n", "24", "--temperature", "0")
        for flags in (("-tp", "2"), ("--layout", "tp=2,pp=2,layers=1+3")):
            self.assertEqual(run(*words, *flags).stdout, run(*words).stdout)
        words = ("perplexity", MODEL, text, "--dtype", "f32", "--format", "json")
        one, *others = (json.loads(run(*words, *flags).stdout) for flags in ((), ("-pp", "2"), ("-dp", "2", "-ep")))
        for other in others:
            self.assertAlmostEqual(one["perplexity"], other["perplexity"], delta=1e-3 * one["perplexity"])
        words = ("chat", MODEL, "--dtype", "f32", "-p", "Hello", "-n", "12", "--temperature", "0", "-q")
        for flags in (("-tp", "2", "-ep"), ("-dp", "2", "-ep")):
            self.assertEqual(run(*words, *flags).stdout, run(*words).stdout)
        for flags, name in ((("-tp", "2"), "TP2"), (("-dp", "2"), "DP2"), (("-dp", "2", "-ep"), "DP2 x EP2")):
            table = json.loads(run("bench", MODEL, "-p", "16", "-n", "4", "-t", "1", "-r", "1", "-o", "json", *flags).stdout)
            self.assertEqual({line["layout"] for line in table}, {name})

    @needs_mpirun
    def test_mpirun_starts_the_ranks(self):
        words = ["generate", MODEL, "--dtype", "f32", "--prompt", "Once upon a time", "-n", "12", "--temperature", "0"]
        for flags in (("-tp", "2"), ("-dp", "2", "-ep")):
            result = mpirun(*words, *flags)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(result.stdout, run(*words).stdout)


TWO_DEVICES = {
    "name": "two", "source": "test",
    "devices": {"cpu": {"flops": {"bf16": 1e12}, "memory_gb_per_s": 10, "memory_gb": 4}},
    "tree": {"level": "node", "link": {"latency_us": 1, "gb_per_s": 10}, "children": [{"count": 2, "device": "cpu"}]}}


class Layouts(RanksCase):
    def setUp(self):
        super().setUp()
        self.topology = self.folder / "two.json"

    def write(self, **device):
        topology = json.loads(json.dumps(TWO_DEVICES))
        topology["devices"]["cpu"].update(device)
        self.topology.write_text(json.dumps(topology))

    def test_inspect_compares_all_layouts(self):
        self.write()
        layouts = json.loads(run("inspect", MODEL, "--topology", self.topology, "--json").stdout)["layouts"]
        degrees = {tuple(each[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data", "expert")) for each in layouts}
        self.assertEqual(degrees, {(2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 2)})
        seconds = [each["steps"][0]["seconds"] for each in layouts]
        self.assertEqual(seconds, sorted(seconds))
        self.assertTrue(all(each["fits"] for each in layouts))
        table = run("inspect", MODEL, "--topology", self.topology).stdout
        self.assertIn("2 ranks, devices and links of", table)

    def test_auto_chooses_and_prints_the_reason(self):
        self.write()
        words = ("generate", MODEL, "--dtype", "f32", "--prompt", "Once upon a time", "-n", "8", "--temperature", "0")
        result = run(*words, "--layout", "auto", "--topology", self.topology)
        self.assertEqual(result.stdout, run(*words).stdout)
        self.assertIn("--layout auto: ", result.stderr)
        self.assertEqual(result.stderr.count("has the shortest predicted step"), 1, "only rank 0 prints it")
        self.assertRegex(result.stderr, r"ms, \d+% of them between ranks; the best layout with(out)? replicas, [^,]+, takes")

    def test_auto_chooses_replicas_where_caches_and_slow_links_favour_them(self):
        topology = json.loads(json.dumps(TWO_DEVICES))
        topology["tree"]["link"] = {"latency_us": 200, "gb_per_s": 0.1}
        self.topology.write_text(json.dumps(topology))
        layouts = json.loads(run("inspect", MODEL, "--topology", self.topology, "--json").stdout)["layouts"]
        seconds = {each["data_parallel_size"]: each["steps"][0]["seconds"] for each in reversed(layouts)}
        self.assertLess(seconds[2], max(each["steps"][0]["seconds"] for each in layouts))
        words = ("generate", MODEL, "--dtype", "f32", "--prompt", "Once upon a time", "-n", "8", "--temperature", "0")
        result = run(*words, "--layout", "auto", "--topology", self.topology)
        self.assertEqual(result.stdout, run(*words).stdout)

    def test_faster_devices_get_more_layers(self):
        topology = json.loads(json.dumps(TWO_DEVICES))
        slow = topology["devices"]["cpu"]
        topology["devices"]["fast"] = slow | {"flops": {"bf16": 1e14}, "memory_gb_per_s": 1000}
        topology["tree"]["children"] = [{"count": 1, "device": name} for name in ("fast", "cpu")]
        self.topology.write_text(json.dumps(topology))
        words = ("generate", MODEL, "--dtype", "f32", "--prompt", "Once upon a time", "-n", "8", "--temperature", "0")
        result = run(*words, "-pp", "2", "--layer-split", "auto", "--topology", self.topology)
        self.assertEqual(result.stdout, run(*words).stdout)
        self.assertEqual(result.stderr.count("--layer-split auto: PP2, layers 3+1 for "), 1, result.stderr)
        self.assertIn("--layer-split auto needs --topology", run(*words, "-pp", "2", "--layer-split", "auto", code=1).stderr)

    def test_auto_refuses_topologies_without_rates(self):
        words = ("generate", MODEL, "--prompt", "Once", "--layout", "auto")
        self.assertIn("--layout auto needs --topology", run(*words, code=1).stderr)
        self.write(memory_gb=0.001)
        self.assertIn("no layout fits", run(*words, "--topology", self.topology, code=1).stderr)
        self.write(flops={})
        self.assertIn("needs memory_gb_per_s and flops", run(*words, "--topology", self.topology, code=1).stderr)
        self.write()
        self.assertIn("excludes --layout", run(*words, "--topology", self.topology, "-tp", "2", code=2).stderr)


class Doctor(RanksCase):
    @needs_mpirun
    def test_doctor_measures_the_links_of_a_job(self):
        for flags in ((), ("--json",)):
            result = mpirun("doctor", "--quick", *flags)
            self.assertEqual(result.returncode, 0, result.stderr)
            if flags:
                self.assertEqual(json.loads(result.stdout)["links"]["name"], "links of the job")
            else:
                self.assertEqual(result.stdout.count("measured links of 2 ranks"), 1)


class Refusals(RanksCase):
    def assert_refused(self, words, part, code=1):
        error = run("generate", MODEL, "--prompt", "Once", *words, code=code).stderr
        self.assertIn(part, error)

    def test_layouts_that_do_not_fit_are_named(self):
        self.assert_refused(["-tp", "7"], "4 attention heads can't be divided among 7 tensor parallel ranks")
        self.assert_refused(["-tp", "3", "--ep-size", "2"], "expert")
        self.assert_refused(["-tp", "0"], "--tensor-parallel-size", code=2)
        self.assert_refused(["--layout", "tp=2,cp=2"], "a layout has sizes tp, pp, dp and ep")
        self.assert_refused(["-dp", "2", "-tp", "2", "--ep-size", "2"],
                            "the expert parallel size must be 1 or 4 with 2 data parallel replicas, found 2")
        error = run("serve", MODEL, "-dp", "2", "--kv-events", "tcp://127.0.0.1:*", "--port", "0", code=1).stderr
        self.assertIn("KV events describe one cache, but DP2 has one for each replica", error)
        self.assertNotIn(": opening ", error)

    def test_tasks_of_srun_without_an_address_are_refused(self):
        with unittest.mock.patch.dict(os.environ, SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS="2", SLURM_PROCID="0"):
            self.assert_refused(["-tp", "2"], "srun started 2 tasks that have no address to meet at")

    def test_a_topology_has_one_device_for_each_rank(self):
        self.assert_refused(["-tp", "2", "--topology", ROOT / "topologies" / "h800-h20-mixed.json"],
                            "the topology must have one device for each of 2 ranks, found 16")

    def test_a_job_that_can_not_continue_without_a_rank_is_refused(self):
        for flags, part in (((), "-dp N -ep), found 1 rank"), (("-tp", "2"), "found TP2"), (("-dp", "2"), "found DP2"),
                            (("-dp", "2", "-pp", "2", "-ep"), "each replica is one rank"),
                            (("-dp", "2", "-tp", "2", "-ep"), "each replica is one rank")):
            self.assert_refused([*flags, "--tolerate-rank-failure"], part)
        for verb in ("bench", "perplexity", "logits"):
            for flag in ("--tolerate-rank-failure", "--rebalance-experts=5", "--redundant-experts=2"):
                error = run(verb, MODEL, "-dp", "2", "-ep", flag, code=2).stderr
                self.assertIn(flag.split("=")[0], error)
        self.assertIn("--record-expert-load", run("bench", MODEL, "--record-expert-load", "x.json", code=2).stderr)

    @needs_mpirun
    def test_mpi_ends_a_job_with_its_rank(self):
        result = mpirun("generate", MODEL, "--prompt", "Once", "-dp", "2", "-ep", "--tolerate-rank-failure")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("--tolerate-rank-failure needs ranks that meet over UCX", result.stderr)

    @needs_mpirun
    def test_a_failure_of_rank_0_ends_an_mpi_job(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            result = mpirun("serve", MODEL, "-tp", "2", "--port", taken.getsockname()[1])
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("Address already in use", result.stderr)

    def start_each(self, *ranks, code=1):
        """Runs each rank with its own (environment, arguments). All must exit with `code`. Returns their errors."""
        environment = os.environ | {"MOESAIC_JOB_SECRET": "secret", "MOESAIC_WORLD_SIZE": str(len(ranks)),
                                    "MOESAIC_RENDEZVOUS": "127.0.0.1:" + free_port()}
        started = []
        for rank, (own, words) in enumerate(ranks):
            started.append(subprocess.Popen([str(BINARY), *map(str, words)], stdin=subprocess.DEVNULL,
                                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                            env=environment | {"MOESAIC_RANK": str(rank)} | own))
            self.addCleanup(started[-1].kill)
        errors = [rank.communicate(timeout=limit())[1] for rank in started]
        self.assertEqual([rank.returncode for rank in started], [code] * len(ranks), errors)
        return errors

    def logits_of(self, model, *flags):
        return ["logits", model, "--ids", IDS, "--dtype", "f32", "--threads", "1", "--out", self.folder / "l.npy", *flags]

    def test_ranks_with_different_settings_are_named(self):
        words = ["generate", MODEL, "--prompt", "Once", "-tp", "2", "--dtype"]
        for error in self.start_each(({}, [*words, "f32"]), ({}, [*words, "int8"])):
            self.assertRegex(error, "all ranks must load the same model.* rank 1 has .*dtype int8.* rank 0 .*dtype f32")

    def test_ranks_with_other_weights_are_named(self):
        model, other = GOLDEN / "qwen3-moe-norm-tied", self.folder / "other"
        shutil.copytree(model, other)
        for path in other.glob("model*.safetensors"):  # another training: the same header
            data = bytearray(path.read_bytes())
            for i in range(8 + int.from_bytes(data[:8], "little"), len(data)):
                data[i] ^= 1
            path.write_bytes(data)
        for error in self.start_each(({}, self.logits_of(model, "-pp", "2")), ({}, self.logits_of(other, "-pp", "2"))):
            self.assertRegex(error, "all ranks must load the same model in the same way; rank 1 has .*weights")

    def test_ranks_with_another_topology_are_named(self):
        """Texts of ranks are cut where they are exchanged; long speeds come before the difference."""
        words = self.logits_of(GOLDEN / "qwen3-moe-norm-tied", "-dp", "2", "-ep", "--rank-speeds",
                               "0.12345678901234567,0.98765432109876543", "--topology")
        paths = []
        for latency in (1, 2):
            topology = json.loads(json.dumps(TWO_DEVICES))
            topology["tree"]["link"]["latency_us"] = latency
            paths.append(self.folder / f"{latency}.json")
            paths[-1].write_text(json.dumps(topology))
        for error in self.start_each(*(({}, [*words, path]) for path in paths)):
            self.assertIn("all ranks must load the same model in the same way; rank 1 has", error)

    def test_ranks_with_other_measured_times_are_named(self):
        paths = []
        for seconds in (1, 2):
            paths.append(self.folder / f"tuning-{seconds}.json")
            entry = {"collective": "all_reduce", "ranks": 2, "bytes": 1024, "candidate": "ring", "seconds": seconds}
            paths[-1].write_text(json.dumps({"entries": [entry]}))
        words = self.logits_of(GOLDEN / "qwen3-moe-norm-tied", "-tp", "2", "--collective-tuning")
        for error in self.start_each(*(({}, [*words, path]) for path in paths)):
            self.assertIn("all ranks must load the same model in the same way; rank 1 has", error)
        self.start_each(*(({}, [*words, paths[0]]) for _ in range(2)), code=0)
        paths[0].write_text('{"entries": [{}]}')
        self.assert_refused(["-tp", "2", "--collective-tuning", paths[0]], "tuning-1.json: entries[0]: expected an object")
        self.assertIn("--collective-tuning has no effect on one rank",
                      run("generate", MODEL, "--prompt", "Once", "-n", "1", "--collective-tuning", paths[1]).stderr)

    def test_shards_with_other_kernels_are_named(self):
        """Each shard chooses the experts of all rows, and other instruction sets round differently."""
        def ranks(*flags):
            words = self.logits_of(GOLDEN / "qwen3-moe-norm-tied", *flags)
            return ({}, words), ({"MOESAIC_ISA": "ref"}, words)
        for error in self.start_each(*ranks("-tp", "2")):
            self.assertRegex(error, "rank 1 has kernels for ref .*: set MOESAIC_ISA on all ranks")
        self.start_each(*ranks("-pp", "2"), code=0)

    @needs_mpirun
    def test_a_job_of_another_size_is_refused(self):
        result = mpirun("generate", MODEL, "--prompt", "Once")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("the job has 2 ranks, but", result.stderr)


class ExpertPlacement(RanksCase):
    """Loads that a run records become a plan, which another run reads."""
    MODEL = GOLDEN / "qwen3-moe-norm-tied"

    def record(self, *flags):
        load = self.folder / "load.json"
        run("logits", self.MODEL, "--ids", IDS, "--dtype", "f32", "--out", self.folder / "l.npy", "--record-expert-load", load, *flags)
        return load

    def test_every_layout_records_the_same_loads(self):
        one = json.loads(self.record().read_text())
        self.assertEqual(sum(one["logical_count"][0][0]) % len(IDS.split(",")), 0, "tokens times experts of each")
        for flags in (("-tp", "2"), ("-pp", "2"), ("-dp", "2", "-ep")):
            with self.subTest(layout=flags):
                self.assertEqual(json.loads(self.record(*flags).read_text()), one)

    def test_a_plan_from_a_recorded_load_keeps_the_results(self):
        expected = self.logits(self.MODEL)
        experts = len(json.loads(self.record().read_text())["logical_count"][0][0])
        plan = self.folder / "plan.json"
        for slots in (experts, experts + 2):  # without and with replicas
            run("placement", "plan", self.folder / "load.json", "--ranks", "2", "--slots", slots, "--out", plan)
            for flags in ((), ("-pp", "2")):
                rows = self.logits(self.MODEL, "-dp", "2", "-ep", "--expert-placement", plan, *flags)
                self.assert_close(rows, expected)
        for flags in (("--replica-split", "shares"), ("--rank-speeds", "1,0.5"), ("--spill-experts", "1M")):
            with self.subTest(flags=flags):  # outputs are summed in the order of the router's choices
                self.assertEqual(self.logits(self.MODEL, "-dp", "2", "-ep", "--expert-placement", plan, *flags), rows)

    def test_placements_that_do_not_fit_are_named(self):
        plan = self.folder / "plan.json"
        experts = json.loads((self.MODEL / "config.json").read_text())["num_experts"]
        first, second = list(range(experts // 2)), list(range(experts // 2, experts))

        def refused(layers, part, *flags):
            plan.write_text(json.dumps({"format": "moesaic-placement", "version": 1, "experts": experts, "layers": layers}))
            error = run("logits", self.MODEL, "--ids", IDS, "--out", self.folder / "l.npy", "--expert-placement", plan, *flags,
                        code=1).stderr
            self.assertIn(part, error)
        refused([[first, second]], "experts can be placed on ranks if data parallel replicas divide them", "-tp", "2", "-ep")
        refused([[first + second]], str(plan), "-dp", "2", "-ep")
        refused([[first, second]] * 7, "the expert placement must have the model's", "-dp", "2", "-ep")
        refused([[first, second[1:]]], str(plan), "-dp", "2", "-ep")
        refused([[first, second]], "--spill-experts needs --replica-split exact", "-dp", "2", "-ep", "--spill-experts", "1M",
                "--replica-split", "shares")
        refused([[first, second]], "one positive number for each of the 2 ranks", "-dp", "2", "-ep", "--rank-speeds", "1,1,1")
        refused([[first, second]], "--rank-speeds must be numbers", "-dp", "2", "-ep", "--rank-speeds", "fast")
        refused([[first, second]], "measured needs --rebalance-experts", "-dp", "2", "-ep", "--rank-speeds", "measured")


class Processes(RanksCase):
    def start(self, *flags):
        """Starts a long generation and returns the process and those of its other ranks."""
        process = subprocess.Popen([str(BINARY), "generate", str(MODEL), "--prompt", "Once", "-n", "4000", "--ignore-eos", *flags],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.kill)
        self.assertTrue(process.stdout.read(1), "no output")
        wait_until_caught(process)
        ranks = children(process.pid)
        self.assertTrue(ranks)
        return process, ranks

    def assert_ended(self, ranks):
        until(lambda: all(map(ended, ranks)), limit())

    def test_an_interrupt_ends_all_ranks(self):
        process, ranks = self.start("-tp", "2", "-pp", "2")
        self.assertEqual(len(ranks), 3)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(limit()), 128 + signal.SIGINT)
        self.assert_ended(ranks)

    @unittest.skipIf(len(cores()) < 2, "one core")
    def test_ranks_are_bound_to_cores_of_their_own(self):
        process, ranks = self.start("-tp", "2", "-t", "1")
        first, second = (os.sched_getaffinity(pid) for pid in (process.pid, *ranks))
        self.assertTrue(first and second and first | second <= os.sched_getaffinity(0))
        self.assertFalse(any(first & core and second & core for core in cores()))
        process.kill()
        process.wait(limit())
        self.assert_ended(ranks)

    def test_ranks_end_with_a_killed_parent(self):
        process, ranks = self.start("-tp", "3")
        process.kill()
        process.wait(limit())
        self.assert_ended(ranks)

    def test_a_killed_rank_is_named(self):
        for victim in range(2):
            with self.subTest(rank=victim + 1):
                process, ranks = self.start("-tp", "3")
                begin = time.monotonic()
                os.kill(ranks[victim], signal.SIGKILL)
                message = f"rank {victim + 1} (process {ranks[victim]}) was killed by signal 9"
                error = read_until(process.stderr, message)
                seconds = time.monotonic() - begin
                self.assertIn(message, error)
                self.assertLess(seconds, patient(2))
                process.communicate(timeout=limit())
                self.assertEqual(process.returncode, 1)
                self.assert_ended(ranks)


# Stand-ins for Slurm's programs: tasks are processes of this machine.
SRUN = """#!/bin/bash
[[ $SRUN_CPUS_PER_TASK == "$SLURM_CPUS_PER_TASK" ]] || exit 9
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_NTASKS=2 "$@" & done
wait -n
code=$?
wait
exit $code
"""
SCONTROL = "#!/bin/bash\necho localhost\n"


class Deployment(RanksCase):
    """The files under deploy/, as far as one machine can run them."""

    def answer(self, command, environment):
        """Starts a server that answers at the port of the environment, asks it, and ends it."""
        port = environment["MOESAIC_PORT"]
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, env=os.environ | environment,
                                   start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: self.get(url + "/ready") == 200, limit())
            body = json.dumps({"prompt": "Once", "max_tokens": 8}).encode()
            request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=limit()) as answer:
                self.assertEqual(json.loads(answer.read())["usage"]["completion_tokens"], 8)
            ranks = self.ranks_of(process)
            self.assertGreaterEqual(len(ranks), 2)
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(limit())
            until(lambda: all(map(ended, ranks)), limit())
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # all have ended
            process.wait(limit())

    @staticmethod
    def ranks_of(process):
        """Processes of the binary in the session of `process`, which started it."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.getsid(int(folder.name)) == process.pid and (folder / "exe").resolve() == BINARY:
                    found.append(int(folder.name))
            except OSError:
                pass  # it has ended
        return found

    @staticmethod
    def get(url):
        try:
            with urllib.request.urlopen(url, timeout=limit()) as answer:
                return answer.status
        except OSError:
            return 0

    def test_slurm_script_starts_one_rank_per_task(self):
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            program = self.folder / name
            program.write_text(text)
            program.chmod(0o755)
        self.answer([ROOT / "deploy" / "slurm" / "moesaic.sbatch", MODEL, "-pp", "2"],
                    {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "localhost",
                     "SLURM_CPUS_PER_TASK": "3", "MOESAIC": str(BINARY),
                     "MOESAIC_PORT": free_port(), "MOESAIC_RENDEZVOUS_PORT": free_port()})

    @needs_mpirun
    def test_mpirun_reads_the_host_file(self):
        port = free_port()
        self.answer(["mpirun", "--hostfile", ROOT / "deploy" / "mpi" / "hosts", *MPI_FLAGS, "-n", "2", BINARY, "serve", MODEL,
                     "-tp", "2", "--port", port], MPI | {"MOESAIC_PORT": port})


if __name__ == "__main__":
    main(verbosity=2)
