#!/usr/bin/env python3
"""Tests a server on several ranks: equal answers in every layout, replicas, moves of experts, and ranks that are killed or
stopped."""
import concurrent.futures
import datetime
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from moesaic_cli import BINARY, ROOT, free_port, limit, main, patient, run
from ranks_test import ended, shared_files

sys.path[:0] = [str(ROOT / "tests" / "server"), str(ROOT / "tests" / "support")]
from processes import children, memory_bytes  # noqa: E402
from serving import MODEL, Server, until, wire  # noqa: E402

NAMED_SECONDS = 2  # on an idle machine, until a rank that is killed or stopped is named


class Serving(unittest.TestCase):
    def kill_a_rank(self, server, victim=-1):
        """Kills a rank of a server, which names it within 2 s, and waits for the end of all."""
        ranks = children(server.process.pid)
        begin = time.time()
        os.kill(ranks[victim], signal.SIGKILL)
        server.process.wait(limit())
        self.assertEqual(server.stop(), 1)
        until(lambda: all(map(ended, ranks)), limit())
        number = ranks.index(ranks[victim]) + 1
        log = server.read_log()
        self.assertIn(f"rank {number} (process {ranks[victim]}) was killed by signal 9", log)
        self.failure_named_soon(log, begin)

    def failure_named_soon(self, log, begin):
        """Returns the reason that the log gives for the end of the server, within 2 s of the time `begin`."""
        named = re.search(r"^\[([\d-]+ [\d:.]+)\].*\[error\] (.*); the server stops", log, re.M)
        self.assertTrue(named, log)
        self.assertLess(datetime.datetime.fromisoformat(named[1]).timestamp() - begin, patient(NAMED_SECONDS))
        return named[2]

    def test_each_rank_is_killed_in_turn_and_leaves_no_process_or_file(self):
        for flags, victim in itertools.product((("-tp", "2", "-pp", "2"), ("-dp", "2", "-tp", "2", "-ep")), range(4)):
            with self.subTest(layout=flags, rank=victim):
                before = shared_files()
                server = Server(*flags)
                self.addCleanup(server.process.kill)
                ranks = children(server.process.pid)
                with server.holding():
                    if victim == 0:
                        self.assertEqual(server.stop(signal.SIGKILL), -signal.SIGKILL)
                        until(lambda: all(map(ended, ranks)), limit())
                    else:
                        self.kill_a_rank(server, victim - 1)
                until(lambda: not shared_files() - before, limit())  # those of tests that run at the same time end soon

    def answer_of_a_killed_rank(self, *flags):
        """The rest of a stream during which a rank of a new server is killed. It has an error event."""
        server = Server(*flags)
        self.addCleanup(server.process.kill)
        with server.holding() as client:
            self.kill_a_rank(server)
            answer = b""
            while part := client.recv(1 << 16):
                answer += part
        self.assertIn(b'data: {"error"', answer)
        return answer

    def test_a_killed_rank_ends_the_server_with_an_error_event(self):
        answer = self.answer_of_a_killed_rank("-tp", "2")
        self.assertTrue(answer.rstrip().endswith((b"data: [DONE]", b"0")), answer[-200:])

    def test_a_rank_that_runs_out_of_memory_while_requests_run_is_named(self):
        """Steps of the stream have 16 sequences. Rank 1 then gets a limit that leaves it 2 MiB, and the hidden states of a step with
        four prompts need 14 MiB."""
        server = Server("-tp", "2", "--threads", "1", "--max-sequences", "20", "--max-batch-tokens", "16384",
                        environment={"MALLOC_MMAP_THRESHOLD_": str(128 << 10)})  # freed memory does not stay in the process
        self.addCleanup(server.process.kill)
        rank, = children(server.process.pid)
        stream = {"prompt": "Once", "n": 16, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        prompts = [[3 + (i + number) % 1000 for i in range(3500)] for number in range(4)]

        def rest(client):
            parts = []
            while part := client.recv(1 << 16):
                parts.append(part)
            return b"".join(parts)

        with socket.create_connection((server.host, server.port), timeout=limit()) as client, \
                concurrent.futures.ThreadPoolExecutor(1) as pool:
            client.sendall(wire("/v1/completions", json.dumps(stream).encode()))
            answer = b""
            while b'"text"' not in answer:
                part = client.recv(1 << 16)
                self.assertTrue(part, answer)
                answer += part
            size = memory_bytes(rank, "VmData") + (2 << 20)
            resource.prlimit(rank, resource.RLIMIT_DATA, (size, size))
            reading = pool.submit(rest, client)
            begin = time.time()
            status, refused = server.json("POST", "/v1/completions", {"prompt": prompts, "max_tokens": 1})
            streamed = reading.result()
        self.assertEqual(status, 500, refused)
        self.assertIn("rank 1 ", refused["error"]["message"])
        self.assertIn(b'data: {"error"', streamed)
        server.process.wait(limit())
        self.assertEqual(server.stop(), 1)
        until(lambda: ended(rank), limit())
        log = server.read_log()
        named = self.failure_named_soon(log, begin)
        self.assertRegex(named, rf"^rank 1 (died|\(process {rank}\) exited with code 1)")
        if "exited" in named:  # all of its output came before
            self.assertRegex(log, r"rank 1: .*out of memory")

    def test_health_fails_after_a_killed_rank_until_the_server_ends(self):
        """A client that does not read keeps the server waiting to write its answer, until the test closes it."""
        patience = int(limit())
        server = Server("-tp", "2", "--drain-timeout", patience, "--write-timeout", patience)
        self.addCleanup(server.process.kill)
        body = json.dumps({"prompt": "Once", "n": 16, "max_tokens": 2000, "logprobs": 20, "ignore_eos": True, "stream": True})
        client = socket.socket()
        self.addCleanup(client.close)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((server.host, server.port))
        client.sendall(wire("/v1/completions", body.encode()))
        until(lambda: server.metric("vllm:generation_tokens_total") > 6000, limit())  # 12 MB of text, more than socket buffers
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        answers = []

        def failed():
            answers.append(server.json("GET", "/health"))
            return answers[-1][0] != 200
        until(failed, limit())
        status, health = answers[-1]
        self.assertEqual(status, 503, health)
        self.assertEqual(health["status"], "failed")
        self.assertRegex(health["error"], r"^rank 1 (died|\(process \d+\) was killed by signal 9)")
        client.close()
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
        self.answer_of_a_killed_rank("-dp", "2", "-ep")

    def test_a_server_continues_without_ranks_and_reports_it(self):
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
                self.assertRegex(answer["error"]["message"], "rank that failed: rank 1 did not answer for 4 s$")
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
        self.assertIn(experts["state"], ("idle", "planning", "moving", "changing"))
        changes = re.findall(r"busiest rank ([\d.]+) times the mean, before ([\d.]+)", "\n".join(experts["history"]))
        self.assertTrue(changes, experts["history"])
        for after, before in changes:
            self.assertLessEqual(float(after), 0.91 * float(before), "a tenth, with rounding")
        loads = experts["rank_load"]
        self.assertTrue(loads["layers"] and set(loads["layers"]) <= set(server.json("GET", "/expert_load")[1]["layers"]), loads)
        self.assertEqual(len(loads["over_mean"]), len(loads["layers"]))
        for row in loads["over_mean"]:
            self.assertEqual(len(row), 2)
            self.assertAlmostEqual(sum(row), 2, delta=0.002)  # thousandths of the mean
        self.assertEqual(server.stop(), 0)
        error = run("serve", MODEL, "-tp", "2", "-ep", "--rebalance-experts", "5", "--port", "0", code=1).stderr
        self.assertIn("--rebalance-experts needs data parallel replicas that divide the experts", error)

    def test_experts_that_are_sent_for_one_batch_give_the_same_answers(self):
        """Rank 0 has nearly all experts, and batches have so many rows that sending two experts takes a small part of the time that
        it saves on any processor: 0.4 ms against the time of about a thousand rows of 98,000 operations."""
        config = json.loads((MODEL / "config.json").read_text())
        count, moe_layers = config["n_routed_experts"], config["num_hidden_layers"] - config["first_k_dense_replace"]
        layer = [list(range(count - 1)), [count - 2, count - 1]]  # an expert with two replicas, so that sums are by choice
        with tempfile.NamedTemporaryFile("w", suffix=".json") as plan:
            json.dump({"format": "moesaic-placement", "version": 1, "experts": count, "layers": [layer] * moe_layers}, plan)
            plan.flush()
            flags = ("-dp", "2", "-ep", "--dtype", "f32", "--threads", "1", "--expert-placement", plan.name, "--no-prefix-cache",
                     "--max-batch-tokens", "2048")
            expected, spilled = {}, {}
            for spill in ((), ("--spill-experts", "64M", "--spill-tolerance", "0.02")):
                server = Server(*flags, *spill)
                self.addCleanup(server.process.kill)
                # One after the other: chunks of prompts are the same in each run. Whether experts are sent depends on measured times.
                for request in range(30 if spill else 3):
                    if request >= 3 and server.metric("moesaic:spilled_experts_total") >= moe_layers:
                        break
                    number = request % 3
                    status, answer = server.json("POST", "/v1/completions", {
                        "prompt": f"{number} " + "owls and a lion went to the woods " * 250, "max_tokens": 2, "temperature": 0,
                        "logprobs": 1})
                    self.assertEqual(status, 200, answer)
                    choice = answer["choices"][0]
                    said = choice["text"], choice["logprobs"]["token_logprobs"]
                    self.assertEqual(said, expected.setdefault(number, said))
                spilled[spill] = server.metric("moesaic:spilled_experts_total")
                if spill:
                    metrics = server.metrics()
                    self.assertGreaterEqual(metrics['moesaic:expert_split_imbalance{rank="0"}'], 1)
                    self.assertGreater(metrics['moesaic:expert_split_seconds_total{rank="1"}'], 0)
                self.assertEqual(server.stop(), 0)
        without, sent = spilled.values()
        self.assertEqual(without, 0)
        self.assertGreaterEqual(sent, moe_layers, "each layer of the batches after the first, which measures the time of a row")

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

    def test_failed_writes_of_the_loads_of_experts_are_logged_and_counted(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "loads", "load.json")
            os.mkdir(os.path.dirname(path))
            server = Server("--record-expert-load", path, "--expert-load-window", "0.01")
            self.addCleanup(server.process.kill)

            def errors():
                return server.metric("moesaic:expert_load_write_errors_total")

            def answered_until(condition):
                """Sends requests, with whose steps windows end, until the condition holds after one."""
                def answered():
                    self.assertEqual(server.json("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 8})[0], 200)
                    return condition()
                until(answered)

            answered_until(lambda: os.path.exists(path))
            self.assertEqual(errors(), 0)
            os.rename(os.path.dirname(path), os.path.join(folder, "renamed"))
            answered_until(lambda: errors() >= 2)
            os.mkdir(os.path.dirname(path))
            answered_until(lambda: os.path.exists(path))
            self.assertEqual(server.stop(), 0)
            lines = re.findall(r"\[error\] expert loads are not recorded: (.+)", server.read_log())
            self.assertEqual(len(lines), 1, lines)
            self.assertIn(path, lines[0])
            with open(path) as file:
                self.assertTrue(json.load(file)["logical_count"])

    def test_a_configuration_file_states_the_layout(self):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
            def write(text):
                config.seek(0)
                config.truncate()
                config.write(text)
                config.flush()
            write('layout = "tp=2,cp=2"\n')
            error = run("serve", MODEL, "--config", config.name, "--port", "0", code=1).stderr
            self.assertIn("a layout has sizes tp, pp, dp and ep", error)
            write('layout = "tp=2,pp=2"\n')
            server = Server("--config", config.name)
            self.addCleanup(server.process.kill)
            self.assertEqual(len(children(server.process.pid)), 3)
            status, answer = server.json("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2})
            self.assertEqual(status, 200, answer)
            self.assertEqual(server.stop(), 0)
            self.assertIn("ranks: TP2 x PP2 on 4 processes", server.read_log())

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
        until(lambda: f"rank 1 (process {rank}) was stopped by signal 19" in server.read_log(), patient(NAMED_SECONDS))
        status, answer = server.json("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 8})
        self.assertEqual(status, 500, answer)
        named = r"rank 1 did not answer for [\d.]+ s"
        self.assertRegex(answer["error"]["message"], f": {named}")
        server.process.wait(limit())
        self.assertEqual(server.stop(), 1)
        log = server.read_log()
        self.assertRegex(log, rf"\[error\] {named}.*; the server stops")
        self.assertRegex(log, r"rank 1 has not answered for [\d.]+ s: its process is stopped")
        until(lambda: ended(rank), limit())

    def start_by_launcher(self):
        """Returns the server of rank 0 and the process of rank 1, which the server has not started."""
        environment = {"MOESAIC_JOB_SECRET": "secret", "MOESAIC_WORLD_SIZE": "2",
                       "MOESAIC_RENDEZVOUS": "127.0.0.1:" + free_port()}
        other = subprocess.Popen([str(BINARY), "serve", str(MODEL), "-pp", "2"], stdin=subprocess.DEVNULL,
                                 env=os.environ | environment | {"MOESAIC_RANK": "1"})
        self.addCleanup(other.kill)
        server = Server("-pp", "2", environment=environment | {"MOESAIC_RANK": "0"})
        self.addCleanup(server.process.kill)
        return server, other

    def test_a_stopped_rank_of_another_launcher_is_named_and_may_continue(self):
        server, other = self.start_by_launcher()
        os.kill(other.pid, signal.SIGSTOP)
        until(lambda: re.search(r"rank 1 has not answered for [\d.]+ s: its process is stopped", server.read_log()),
              patient(NAMED_SECONDS))
        os.kill(other.pid, signal.SIGCONT)
        until(lambda: "rank 1 answers again" in server.read_log(), limit())
        status, answer = server.json("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 8})
        self.assertEqual(status, 200, answer)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(other.wait(limit()), 0)

    def test_an_idle_server_notices_a_dead_rank_of_another_launcher(self):
        server, other = self.start_by_launcher()
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
            metrics = server.metrics()
            self.assertGreater(metrics[f'moesaic:rank_exchange_seconds_total{{rank="{rank}"}}'], 0)
            self.assertGreater(metrics[f'moesaic:rank_step_seconds_total{{rank="{rank}"}}'],
                               metrics[f'moesaic:rank_exchange_seconds_total{{rank="{rank}"}}'])
            self.assertGreater(metrics[f'moesaic:rank_sent_bytes_total{{rank="{rank}"}}'], 0)
            self.assertGreater(metrics[f'moesaic:rank_imbalance{{rank="{rank}"}}'], 0)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # SIGTERM comes while a request runs, or soon after it
            long = pool.submit(server.json, "POST", "/v1/completions", {"prompt": "Once", "max_tokens": 200, "ignore_eos": True})
            until(lambda: server.metric("vllm:num_requests_running") > 0 or long.done())
            self.assertEqual(server.stop(), 0)
            status, answer = long.result()
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["usage"]["completion_tokens"], 200)
        until(lambda: all(map(ended, ranks)), limit())


if __name__ == "__main__":
    main(verbosity=2)
