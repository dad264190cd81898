#!/usr/bin/env python3
"""Tests a model on several ranks: equal results in every layout, ranks started by this program and by mpirun, and ranks that
are killed."""
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
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

from moesaic_cli import (BINARY, GOLDEN, MPI, MPI_FLAGS, ROOT, limit, main, mpirun, needs_mpirun, read_npy, run,
                         wait_until_caught)

sys.path.insert(0, str(ROOT / "tests" / "server"))
from serving import MODEL, Server, until, wire  # noqa: E402

IDS = ",".join(str(3 + i * 7 % 90) for i in range(40))
LAYOUTS = (("-tp", "2"), ("-pp", "2"), ("-tp", "2", "-ep"), ("-tp", "2", "-pp", "2"), ("-tp", "3"), ("-pp", "3"),
           ("-tp", "4", "--ep-size", "2"), ("-tp", "2", "-dp", "2"), ("-dp", "2", "-ep"), ("-tp", "2", "-dp", "2", "-ep"),
           ("-pp", "2", "-dp", "2", "-ep"))


def children(pid):
    """The processes that a process has started."""
    return [int(text) for task in pathlib.Path(f"/proc/{pid}/task").iterdir()
            for text in (task / "children").read_text().split()]


def ended(pid):
    """Whether a process has ended, reaped or not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


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

    @needs_mpirun
    def test_results_do_not_depend_on_the_transport(self):
        model, out = GOLDEN / "qwen3-moe-norm-tied", self.folder / "logits.npy"
        for flags in (("-tp", "2"), ("-pp", "2"), ("-dp", "2", "-ep")):
            with self.subTest(layout=flags):
                expected = self.logits(model, *flags)
                for transport in ("tcp,self", "posix,self"):
                    with unittest.mock.patch.dict(os.environ, UCX_TLS=transport):
                        self.assertEqual(self.logits(model, *flags), expected, transport)
                out.unlink()
                result = mpirun("logits", model, "--ids", IDS, "--dtype", "f32", "--threads", "1", "--out", out, *flags)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(read_npy(out), expected, "mpirun")

    def test_verbs_take_the_same_flags(self):
        words = ("generate", MODEL, "--dtype", "f32", "--prompt", "Once upon a time", "--prompt", "The lion", "--prompt",
                 "In the woods", "-n", "24", "--temperature", "0", "--format", "jsonl")
        for flags in (("-dp", "2"), ("-dp", "2", "-ep")):
            self.assertEqual(run(*words, *flags).stdout, run(*words).stdout)
        text = self.folder / "text.txt"
        text.write_text("The lion was in the woods and the owl was in the tree. " * 8)
        words = ("generate", MODEL, "--dtype", "f32", "--prompt", "Once upon a time", "-n", "24", "--temperature", "0")
        self.assertEqual(run(*words, "-tp", "2").stdout, run(*words).stdout)
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
    def test_it_measures_the_links_of_a_job(self):
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
        self.assert_refused(["-dp", "2", "-tp", "2", "--ep-size", "2"],
                            "the expert parallel size must be 1 or 4 with 2 data parallel replicas, found 2")
        error = run("serve", MODEL, "-dp", "2", "--kv-events", "tcp://127.0.0.1:*", "--port", "0", code=1).stderr
        self.assertIn("KV events describe one cache, but DP2 has one for each replica", error)

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

    def test_ranks_with_different_settings_are_named(self):
        environment = os.environ | {"MOESAIC_JOB_SECRET": "secret", "MOESAIC_WORLD_SIZE": "2",
                                    "MOESAIC_RENDEZVOUS": "127.0.0.1:" + Deployment.free_port()}
        ranks = []
        for rank, dtype in enumerate(("f32", "int8")):
            command = [str(BINARY), "generate", str(MODEL), "--prompt", "Once", "-tp", "2", "--dtype", dtype]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                          env=environment | {"MOESAIC_RANK": str(rank)}))
        for rank in ranks:
            _, error = rank.communicate(timeout=limit())
            self.assertEqual(rank.returncode, 1)
            self.assertRegex(error, "all ranks must load the same model.* rank 1 has .*dtype int8.* rank 0 .*dtype f32")

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
                _, error = process.communicate(timeout=limit())
                self.assertEqual(process.returncode, 1)
                self.assertIn(f"rank {victim + 1} (process {ranks[victim]}) was killed by signal 9", error.decode())
                self.assertLess(time.monotonic() - begin, limit() / 10)
                self.assert_ended(ranks)


class Serving(RanksCase):
    def kill_a_rank(self, server, victim=-1):
        """Kills a rank of a server and waits for the end of all."""
        ranks = children(server.process.pid)
        os.kill(ranks[victim], signal.SIGKILL)
        server.process.wait(limit())
        self.assertEqual(server.stop(), 1)
        until(lambda: all(map(ended, ranks)), limit())
        number = ranks.index(ranks[victim]) + 1
        self.assertIn(f"rank {number} (process {ranks[victim]}) was killed by signal 9", server.read_log())

    def test_each_rank_is_killed_in_turn_and_leaves_no_process_or_file(self):
        for victim in range(4):
            with self.subTest(rank=victim):
                before = shared_files()
                server = Server("-tp", "2", "-pp", "2")
                self.addCleanup(server.process.kill)
                ranks = children(server.process.pid)
                with server.holding():
                    if victim == 0:
                        self.assertEqual(server.stop(signal.SIGKILL), -signal.SIGKILL)
                        until(lambda: all(map(ended, ranks)), limit())
                    else:
                        self.kill_a_rank(server, victim - 1)
                until(lambda: not shared_files() - before, limit())  # those of tests that run at the same time end soon

    def test_a_killed_rank_ends_the_server_with_an_error_event(self):
        server = Server("-tp", "2")
        self.addCleanup(server.process.kill)
        with server.holding() as client:
            self.kill_a_rank(server)
            answer = b""
            while part := client.recv(1 << 16):
                answer += part
        self.assertIn(b'data: {"error"', answer)
        self.assertTrue(answer.rstrip().endswith((b"data: [DONE]", b"0")), answer[-200:])

    def test_health_fails_after_a_killed_rank_until_the_server_ends(self):
        """A client that does not read keeps the server waiting to write its answer."""
        server = Server("-tp", "2")
        self.addCleanup(server.process.kill)
        body = json.dumps({"prompt": "Once", "n": 16, "max_tokens": 2000, "logprobs": 20, "ignore_eos": True, "stream": True})
        client = socket.socket()
        self.addCleanup(client.close)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((server.host, server.port))
        client.sendall(wire("/v1/completions", body.encode()))
        until(lambda: server.metric("vllm:generation_tokens_total") > 2000, limit())  # 4 MB of text, more than socket buffers
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        answers = []

        def failed():
            try:
                answers.append(server.json("GET", "/health"))
            except (OSError, http.client.HTTPException):  # a busy machine may not ask within the two seconds
                return server.process.poll() is not None
            return answers[-1][0] == 503
        until(failed, limit())
        if answers[-1][0] == 503:
            status, health = answers.pop()
            self.assertEqual(health["status"], "failed")
            self.assertIn("rank 1", health["error"])
        self.assertEqual({status for status, _ in answers} - {200}, set(), answers)
        server.process.wait(limit())
        self.assertEqual(server.stop(), 1)

    def test_replicas_answer_like_one_rank(self):
        def answers(server):
            def ask(number):
                status, answer = server.json("POST", "/v1/completions", {
                    "prompt": f"{number} owls and a lion went to the woods", "max_tokens": 24, "temperature": 0})
                self.assertEqual(status, 200, answer)
                return answer["choices"][0]["text"]
            with concurrent.futures.ThreadPoolExecutor(32) as pool:
                return list(pool.map(ask, range(32)))

        def tokens(server):
            metrics = server.metrics()
            return [metrics[f'moesaic:replica_generation_tokens_total{{replica="{replica}"}}'] for replica in range(2)]

        one = Server("--dtype", "f32", "--threads", "1")
        expected = answers(one)
        self.assertEqual(one.stop(), 0)
        for flags in (("-dp", "2"), ("-dp", "2", "-tp", "2"), ("-dp", "2", "-pp", "2"), ("-dp", "2", "-ep"),
                      ("-dp", "2", "-tp", "2", "-ep")):
            with self.subTest(layout=flags):
                server = Server("--dtype", "f32", "--threads", "1", *flags)
                self.addCleanup(server.process.kill)
                ranks = children(server.process.pid)
                self.assertEqual(answers(server), expected)
                server.wait_until_quiet()
                self.assertTrue(all(count > 0 for count in tokens(server)), tokens(server))
                self.assertEqual(sum(tokens(server)), server.metric("vllm:generation_tokens_total"))
                self.assertEqual(server.stop(), 0)
                until(lambda: all(map(ended, ranks)), limit())

    def test_a_killed_rank_of_another_replica_ends_the_server(self):
        for flags in (("-dp", "2"), ("-dp", "2", "-ep")):
            with self.subTest(layout=flags):
                server = Server(*flags)
                self.addCleanup(server.process.kill)
                self.assertEqual(server.json("GET", "/health")[0], 200)
                self.kill_a_rank(server)

    def test_a_rank_that_is_killed_during_an_exchange_ends_the_server_with_an_error_event(self):
        server = Server("-dp", "2", "-ep")
        self.addCleanup(server.process.kill)
        with server.holding() as client:
            self.kill_a_rank(server)
            answer = b""
            while part := client.recv(1 << 16):
                answer += part
        self.assertIn(b'data: {"error"', answer)

    def test_a_server_continues_without_ranks_and_says_so(self):
        server = Server("-dp", "3", "-ep", "--tolerate-rank-failure", "--rank-time-limit", "4", "--threads", "1")
        self.addCleanup(server.process.kill)
        ranks = children(server.process.pid)
        self.assertEqual(len(ranks), 2)

        def ask():
            status, headers, body = server.request("POST", "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
            return status, headers.get("x-moesaic-missing-experts"), json.loads(body)

        status, missing, answer = ask()
        self.assertEqual((status, missing), (200, None), answer)
        self.assertEqual(server.json("GET", "/health"), (200, {"status": "ok"}))
        self.assertEqual(server.metrics()["moesaic:ranks_alive"], 3)
        os.kill(ranks[1], signal.SIGKILL)  # while the server is idle
        until(lambda: server.metrics()["moesaic:ranks_alive"] == 2)
        status, missing, answer = ask()
        self.assertEqual(status, 200, answer)
        metrics = server.metrics()
        lost = sum(value for name, value in metrics.items() if name.startswith("moesaic:missing_experts{"))
        self.assertGreater(lost, 0)
        self.assertEqual(int(missing), lost)
        self.assertEqual(metrics["moesaic:requests_with_missing_experts_total"], 1)
        self.assertEqual(metrics["moesaic:rank_failures_total"], 1)
        health = server.json("GET", "/health")
        self.assertEqual((health[0], health[1]["status"], health[1]["survival"]["failures"]), (200, "degraded", ["rank 2 died"]))
        self.assertEqual(server.json("GET", "/state")[1]["survival"]["alive"], 2)
        os.kill(ranks[0], signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # one of them at least is on rank 0
            results = list(pool.map(lambda _: ask(), range(4)))
        self.assertIn(200, [status for status, _, _ in results])
        for status, _, answer in results:
            if status != 200:
                self.assertRegex(answer["error"]["message"], "rank 1 (did not answer for 4 s|died)")
        self.assertEqual(server.metrics()["moesaic:ranks_alive"], 1)
        until(lambda: all(map(ended, ranks)), limit())
        status, more, answer = ask()
        self.assertEqual(status, 200, answer)
        self.assertGreater(int(more), lost)
        self.assertEqual(server.stop(), 0)

    def test_experts_move_while_answers_stay_the_same(self):
        def answers(server, rounds):
            texts = []
            for number in range(rounds):
                status, answer = server.json("POST", "/v1/completions", {
                    "prompt": f"{number} owls and a lion went to the woods", "max_tokens": 16, "temperature": 0})
                self.assertEqual(status, 200, answer)
                texts.append(answer["choices"][0]["text"])
            return texts

        flags = ("-dp", "2", "-ep", "--dtype", "f32", "--threads", "1", "--rebalance-experts", "0.5", "--expert-load-window", "0.2",
                 "--redundant-experts", "2")
        one = Server("--dtype", "f32", "--threads", "1")
        expected = answers(one, 12)
        self.assertEqual(one.stop(), 0)
        server = Server(*flags)
        self.addCleanup(server.process.kill)

        def moved():
            self.assertEqual(answers(server, 12), expected)
            return server.metrics().get('moesaic:expert_moves_total{result="applied"}', 0) > 0
        until(moved, limit())
        self.assertEqual(answers(server, 12), expected)
        experts = server.json("GET", "/state")[1]["experts"]
        self.assertIn(experts["state"], ("idle", "planning", "moving"))
        changes = re.findall(r"busiest rank ([\d.]+) times the mean, before ([\d.]+)", "\n".join(experts["history"]))
        self.assertTrue(changes, experts["history"])
        for after, before in changes:
            self.assertLessEqual(float(after), 0.91 * float(before), "a tenth, with rounding")
        self.assertEqual(server.stop(), 0)
        error = run("serve", MODEL, "-tp", "2", "-ep", "--rebalance-experts", "5", "--port", "0", code=1).stderr
        self.assertIn("--rebalance-experts needs data parallel replicas that divide the experts", error)

    def test_experts_that_are_sent_for_one_batch_give_the_same_answers(self):
        def ask(server, number):
            status, answer = server.json("POST", "/v1/completions", {
                "prompt": f"{number} " + "owls and a lion went to the woods " * 40, "max_tokens": 2, "temperature": 0, "logprobs": 1})
            self.assertEqual(status, 200, answer)
            return answer["choices"][0]["text"], answer["choices"][0]["logprobs"]["token_logprobs"]

        flags = ("-dp", "2", "-ep", "--dtype", "f32", "--threads", "1", "--rebalance-experts", "86400", "--no-prefix-cache")
        expected = {}
        for spill in ((), ("--spill-experts", "64M", "--spill-tolerance", "0.02")):
            server = Server(*flags, *spill)
            self.addCleanup(server.process.kill)

            def spills(server=server):
                for number in range(4):  # one after the other: chunks of prompts are the same in each run
                    answer = ask(server, number)
                    self.assertEqual(answer, expected.setdefault(number, answer))
                return server.metric("moesaic:spilled_experts_total") > 0
            if not spill:
                self.assertFalse(spills())
            else:
                # The first batch measures the time of a row. Sending experts may take longer than a fast processor saves.
                for _ in range(5):
                    if spills():
                        break
                metrics = server.metrics()
                print(f"{server.metric('moesaic:spilled_experts_total'):.0f} experts were sent", file=sys.stderr)
                self.assertGreaterEqual(metrics['moesaic:expert_split_imbalance{rank="0"}'], 1)
                self.assertGreater(metrics['moesaic:expert_split_seconds_total{rank="1"}'], 0)
            self.assertEqual(server.stop(), 0)

    def test_replicas_that_divide_the_experts_are_measured(self):
        server = Server("-dp", "2", "-ep", "--expert-load-window", "0.01")
        self.addCleanup(server.process.kill)
        for _ in range(3):  # a window ends with a step
            self.assertEqual(server.json("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 8})[0], 200)
        metrics = server.metrics()
        for rank in range(2):
            for name in ("rank_sent_rows", "rank_expert_rows"):
                self.assertGreater(metrics[f'moesaic:{name}_total{{rank="{rank}"}}'], 0)
            self.assertGreater(metrics[f'moesaic:rank_expert_imbalance{{rank="{rank}"}}'], 0)
            self.assertEqual(metrics[f'moesaic:replica_requests{{replica="{rank}",state="running"}}'], 0)
        sent = [value for name, value in metrics.items() if name.startswith("moesaic:rank_exchange_bytes_total")]
        self.assertTrue(sent and all(value > 0 for value in sent), metrics)
        load = server.json("GET", "/expert_load")[1]
        self.assertEqual(len(load["layers"]), len(load["logical_count"][0]))
        self.assertGreaterEqual(metrics[f'moesaic:expert_load_skew{{layer="{load["layers"][0]}"}}'], 1)
        self.assertEqual(server.stop(), 0)

    def test_an_idle_server_notices_a_killed_rank(self):
        server = Server("-pp", "2")
        self.addCleanup(server.process.kill)
        self.assertEqual(server.json("GET", "/health")[0], 200)
        self.kill_a_rank(server)

    def test_a_stopped_rank_ends_the_server_after_its_time_limit(self):
        server = Server("-tp", "2", "--rank-time-limit", "5")
        self.addCleanup(server.process.kill)
        rank = children(server.process.pid)[0]
        os.kill(rank, signal.SIGSTOP)
        status, answer = server.json("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 8})
        self.assertEqual(status, 500, answer)
        self.assertIn("rank 1", answer["error"]["message"])
        server.process.wait(limit())
        self.assertEqual(server.stop(), 1)
        until(lambda: ended(rank), limit())

    def test_an_idle_server_notices_a_dead_rank_of_another_launcher(self):
        environment = {"MOESAIC_JOB_SECRET": "secret", "MOESAIC_WORLD_SIZE": "2",
                       "MOESAIC_RENDEZVOUS": "127.0.0.1:" + Deployment.free_port()}
        other = subprocess.Popen([str(BINARY), "serve", str(MODEL), "-pp", "2"], stdin=subprocess.DEVNULL,
                                 env=os.environ | environment | {"MOESAIC_RANK": "1"})
        self.addCleanup(other.kill)
        server = Server("-pp", "2", environment=environment | {"MOESAIC_RANK": "0"})
        self.addCleanup(server.process.kill)
        other.kill()
        other.wait(limit())
        server.process.wait(limit())
        self.assertEqual(server.stop(), 1)
        self.assertIn("rank 1", server.read_log())

    def test_sigterm_drains_and_ends_all_ranks(self):
        server = Server("-tp", "2", "-pp", "2", "--drain-timeout", int(limit()))
        ranks = children(server.process.pid)
        status, answer = server.json("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 8})
        self.assertEqual(status, 200, answer)
        for rank in range(4):
            self.assertGreater(server.metrics()[f'moesaic:rank_step_seconds_total{{rank="{rank}"}}'], 0)
            self.assertGreater(server.metrics()[f'moesaic:rank_sent_bytes_total{{rank="{rank}"}}'], 0)
            self.assertGreater(server.metrics()[f'moesaic:rank_imbalance{{rank="{rank}"}}'], 0)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # SIGTERM comes while a request runs, or soon after it
            long = pool.submit(server.json, "POST", "/v1/completions", {"prompt": "Once", "max_tokens": 200, "ignore_eos": True})
            until(lambda: server.metric("vllm:num_requests_running") > 0 or long.done())
            self.assertEqual(server.stop(), 0)
            status, answer = long.result()
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["usage"]["completion_tokens"], 200)
        until(lambda: all(map(ended, ranks)), limit())


# Stand-ins for Slurm's programs: tasks are processes of this machine.
SRUN = """#!/bin/bash
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

    @staticmethod
    def free_port():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return str(listener.getsockname()[1])

    def test_slurm_script_starts_one_rank_per_task(self):
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            program = self.folder / name
            program.write_text(text)
            program.chmod(0o755)
        self.answer([ROOT / "deploy" / "slurm" / "moesaic.sbatch", MODEL, "-pp", "2"],
                    {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "localhost", "MOESAIC": str(BINARY),
                     "MOESAIC_PORT": self.free_port(), "MOESAIC_RENDEZVOUS_PORT": self.free_port()})

    @needs_mpirun
    def test_mpirun_reads_the_host_file(self):
        port = self.free_port()
        self.answer(["mpirun", "--hostfile", ROOT / "deploy" / "mpi" / "hosts", *MPI_FLAGS, "-n", "2", BINARY, "serve", MODEL,
                     "-tp", "2", "--port", port], MPI | {"MOESAIC_PORT": port})


if __name__ == "__main__":
    main(verbosity=2)
