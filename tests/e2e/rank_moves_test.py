#!/usr/bin/env python3
"""Kills and stops rank processes while experts move. The server must end with an error that names the rank, or roll the move back and
continue without the rank if --tolerate-rank-failure is set. No answer may change, nothing may hang, and no process may remain.

MOESAIC_RANK_FAULTS sets the number of faults (4). A fault that met no move, by the server's log, is repeated with another server.

The processes that send to a rank share a queue in its memory (UCX's shared memory transports). One that is stopped while it writes an
entry keeps the rank from reading all later ones, so that the rank does not answer, either, and fails with it. With
--tolerate-rank-failure the server must continue without both, and the fault is repeated, too. At least one server of each such fault
must lose one rank alone."""
import collections
import concurrent.futures
import http.client
import itertools
import json
import os
import random
import re
import signal
import sys
import threading
import time
import unittest

from moesaic_cli import ROOT, limit, main

sys.path.insert(0, str(ROOT / "tests" / "server"))
from ranks_test import children, ended, shared_files  # noqa: E402
from serving import Server, until  # noqa: E402

FAULTS = int(os.environ.get("MOESAIC_RANK_FAULTS", "4"))
PROMPTS = [f"{a} + {b} = {a + b}. {b} + {a} = {a + b}. {a} * {b} =" for a in range(11, 17) for b in range(2, 6)]
FLAGS = ("-dp", "4", "-ep", "--dtype", "f32", "--threads", "1", "--expert-load-window", "0.1", "--redundant-experts", "2",
         "--drain-timeout", "2")
STOP_LIMIT = "10"  # seconds; a rank that is killed must not be taken for a stopped one meanwhile
KILL_LIMIT = "60"
SERVERS = 5  # for one fault, until it meets a move


Outcome = collections.namedtuple("Outcome", "kills alone seconds met rolled_back")


class Load:
    """Requests of one domain, two at a time, until the block ends. Collects the answers of each prompt."""

    def __init__(self, server):
        self.server, self.ends = server, threading.Event()
        self.answers, self.errors, self.cut = collections.defaultdict(set), [], 0
        self.pool = concurrent.futures.ThreadPoolExecutor(2)

    def __enter__(self):
        self.runs = [self.pool.submit(self.run, first) for first in range(2)]
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.pool.shutdown()
        for run in self.runs:
            run.result()

    def ask(self, prompt):
        """Returns the status."""
        status, headers, body = self.server.request("POST", "/v1/completions", {
            "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}, timeout=limit())
        if status != 200:
            self.errors.append(body.decode())
        elif "x-moesaic-missing-experts" not in {name.lower() for name in headers}:
            choice = json.loads(body)["choices"][0]
            self.answers[prompt].add((choice["text"], str(choice["logprobs"]["token_logprobs"])))
        return status

    def run(self, number):
        while not self.ends.is_set():
            try:
                self.ask(PROMPTS[number % len(PROMPTS)])
            except (OSError, http.client.HTTPException):  # the server has ended
                self.cut += 1
                if self.server.process.poll() is not None:
                    return
            number += 1


class SlowRank:
    """Lets a rank run a tenth of the time, so that steps and moves take long, and stops it at the end of the block."""

    def __init__(self, rank):
        self.rank, self.ends = rank, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.ends.is_set():
            os.kill(self.rank, signal.SIGSTOP)
            time.sleep(0.03)
            os.kill(self.rank, signal.SIGCONT)
            time.sleep(0.003)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()
        os.kill(self.rank, signal.SIGSTOP)


def experts(server):
    """The state of the moves; None: the server does not answer."""
    try:
        return server.json("GET", "/state")[1]["experts"]
    except (OSError, http.client.HTTPException, ValueError):
        return None


def alive(server):
    return server.metrics()["moesaic:ranks_alive"]


def events(log, cause):
    """Events of moves in the log until the server knew that the rank had failed."""
    found = re.findall(r"\[info\] experts: (.*)", log)
    return list(itertools.takewhile(lambda event: not event.endswith(f": {cause}"), found))


class RanksThatFailWhileExpertsMove(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        server = Server(*FLAGS, "--rebalance-experts", "86400", "--rank-time-limit", KILL_LIMIT)
        with Load(server) as load:
            until(lambda: len(load.answers) == len(PROMPTS), limit())
        cls.expected = dict(load.answers)
        assert server.stop() == 0 and all(len(each) == 1 for each in cls.expected.values()), cls.expected

    def stop_while_moving(self, server, rank):
        """Stops the process of a rank amid a move of experts, which can't end then: its ranks agree on the end in a step, which waits
        for the stopped rank. A rank that was stopped at another time continues, and is stopped again. Returns the events until then.
        None: plans gain nothing any more, or no move was met in time; the rank is stopped."""
        end = time.monotonic() + limit()
        until(lambda: self.loaded(server), limit())
        while True:
            with SlowRank(rank):
                while (state := experts(server)) is None or state["state"] != "moving":
                    no_gain = server.metrics().get('moesaic:expert_plans_total{result="no_gain"}', 0) > 1
                    if no_gain or time.monotonic() > end:
                        return None
                    time.sleep(0.001)
            before, steps = None, server.metric("moesaic:engine_steps_total")
            while before != steps:  # the step that waits for the rank has begun
                time.sleep(0.4)
                before, steps = steps, server.metric("moesaic:engine_steps_total")
            state = experts(server)
            if state is not None and state["state"] == "moving":
                return state["history"]
            os.kill(rank, signal.SIGCONT)

    @staticmethod
    def loaded(server):
        """Whether the ranks have nearly as many tokens as a plan needs."""
        return server.metric("vllm:prompt_tokens_total") > 150

    @staticmethod
    def kind(number):
        """Returns whether the server tolerates the fault, whether the rank is killed, and the time limit of ranks."""
        kills = number % 4 < 2
        return number % 2 == 1, kills, KILL_LIMIT if kills else STOP_LIMIT

    def serve(self, number):
        tolerates, _, rank_limit = self.kind(number)
        server = Server(*FLAGS, "--rebalance-experts", "0.2", "--rebalance-min-gain", "0", "--rank-time-limit", rank_limit,
                        *(("--tolerate-rank-failure",) if tolerates else ()))
        self.addCleanup(server.process.kill)
        return server

    def fault(self, server, number):
        """A rank of the server of serve() fails, amid a move where one could be met. The Outcome tells whether the rank was killed,
        whether no other rank of a tolerant server failed, the seconds until the fault is known, whether it met a move and the rank
        was alone, and whether the other ranks have rolled a move back."""
        chance = random.Random(number)
        tolerates, kills, rank_limit = self.kind(number)
        ranks = children(server.process.pid)
        self.assertEqual(len(ranks), 3)
        victim = chance.randrange(3)
        name = f"rank {victim + 1}"
        cause = f"{name} died" if kills else f"{name} did not answer for {STOP_LIMIT} s"
        causes = [cause]  # of all ranks that failed: the victim may keep others from reading
        with Load(server) as load:
            before = self.stop_while_moving(server, ranks[victim])
            begin = time.monotonic()
            if kills:
                os.kill(ranks[victim], signal.SIGKILL)
            if tolerates:
                until(lambda: alive(server) < 4, limit())
                seconds = time.monotonic() - begin
                status = load.ask(PROMPTS[0])
            else:
                server.process.wait(limit())
                seconds = time.monotonic() - begin
        for prompt, answers in load.answers.items():
            self.assertEqual(answers, self.expected[prompt], "an answer has changed")
        rolled_back = False
        if tolerates:
            causes = re.findall(r"\[error\] (.*); the job continues without it", server.read_log())
            self.assertEqual(causes.count(cause), 1, causes)
            for other in causes:
                self.assertTrue(other == cause or re.fullmatch(rf"rank \d did not answer for {rank_limit} s", other), causes)
            self.assertEqual(alive(server), 4 - len(causes))
            if causes == [cause]:
                self.assertEqual(status, 200)
            history = experts(server)["history"]
            self.assertIn(f"later moves are among the other ranks: {causes[-1]}", history)  # one event for ranks that fail together
            rolled_back = any(event.endswith(f"is rolled back: {each}") for event in history for each in causes)
            self.assertEqual(server.json("POST", "/v1/completions", {"prompt": "1 + 1 =", "max_tokens": 4})[0], 200)
            self.assertEqual(server.stop(), 0)
            named = rf"a rank that failed: ({'|'.join(map(re.escape, causes))})\b"
        else:
            self.assertEqual(server.stop(), 1)
            self.assertTrue(load.errors or load.cut)
            named = rf"(rank \d did not answer for [\d.]+ s, )*{name} did not answer for [\d.]+ s"
            if kills:
                named = rf"{name} (died|\(process {ranks[victim]}\) was killed by signal 9)"
            self.assertRegex(server.read_log(), rf"\[error\] {named}.*; the server stops")
        for error in load.errors:
            self.assertRegex(error, rf'[:"] ?{named}|(the server|it) is shutting down' if not tolerates else named)
        until(lambda: all(map(ended, ranks)), limit())
        # Each end of a move is an event: without a new one, the move was in progress when the rank was known to have failed.
        met = before is not None and causes == [cause] and events(server.read_log(), cause)[-len(before):] == before
        if tolerates and met:
            self.assertTrue(rolled_back, "a move was in progress, and is not rolled back")
        return Outcome(kills, causes == [cause], seconds, met, rolled_back)

    def fault_amid_a_move(self, number):
        """Servers with the same fault until one meets a move, at most SERVERS. Returns the outcomes."""
        outcomes = []
        while len(outcomes) < SERVERS and not (outcomes and outcomes[-1].met):
            server = self.serve(number)
            try:
                outcomes.append(self.fault(server, number))
            except BaseException:
                print(server.read_log()[-8000:], file=sys.stderr)
                raise
        self.assertTrue(any(outcome.alone for outcome in outcomes), "another rank failed with this one in each server")
        return outcomes

    def test_no_answer_changes_and_nothing_remains(self):
        before = shared_files()
        outcomes, met = [], 0
        for number in range(FAULTS):
            with self.subTest(fault=number):
                outcomes += self.fault_amid_a_move(number)
                met += outcomes[-1].met
        killed = sorted(outcome.seconds for outcome in outcomes if outcome.kills) or [0]
        rolled_back = sum(outcome.rolled_back for outcome in outcomes)
        together = sum(not outcome.alone for outcome in outcomes)
        print(f"{met} of {FAULTS} faults met a move, in {len(outcomes)} servers, of which {together} lost another rank with the first; "
              f"{rolled_back} moves rolled back by living ranks; a killed rank was known after {killed[len(killed) // 2]:.2f} s, at most "
              f"{killed[-1]:.2f} s", file=sys.stderr)
        self.assertGreater(met, 0)
        until(lambda: not shared_files() - before, limit())


if __name__ == "__main__":
    main(verbosity=2)
