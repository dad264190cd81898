#!/usr/bin/env python3
"""Tests the proxy in front of a real vLLM on this machine's CPU: one engine, and a prefill and a decode engine with NIXL.

MOESAIC_VLLM names the `vllm` script of an environment with vLLM for CPUs. MOESAIC_VLLM_NIXL=1 says that it has NIXL as well.
Without the first nothing runs, and the test is reported as skipped.
"""
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

from proxying import BINARY, HOST, MODEL, MODULE, SKIPPED, WAIT_SECONDS, ProxyTest, main, request, together, until

VLLM = os.environ.get("MOESAIC_VLLM")
NAME = "moesaic-tiny"
BLOCK = 32
SYSTEM = "You answer in one word. " * 12
# The side channel of NIXL and the engines have this address: NIXL needs an interface.
LOCAL = "127.0.0.1"


def free_ports(count):
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server((LOCAL, 0))).getsockname()[1] for _ in range(count)]


class Vllm:
    """vLLM in a process group of its own."""
    ATTEMPTS = 5

    def __init__(self, transfer=None):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-vllm-"))
        for attempt in range(self.ATTEMPTS):
            self.start(transfer)
            until(lambda: self.process.poll() is not None or self.healthy(), 5 * WAIT_SECONDS, what=self.tail)
            if self.process.poll() is None:
                return
            # vLLM binds some of its ports late: another process may have taken one meanwhile.
            if "Address already in use" not in (self.folder / "log").read_text() or attempt + 1 == self.ATTEMPTS:
                break
            self.end()
        tail = self.tail()
        self.stop()
        raise AssertionError(f"vLLM has ended: {tail}")

    def start(self, transfer):
        """Starts vLLM with ports that are free now."""
        self.port, side, *ports = free_ports(4)
        self.url = f"http://{LOCAL}:{self.port}"
        self.events, self.replay = (f"tcp://{LOCAL}:{port}" for port in ports)
        environment = dict(os.environ, VLLM_TARGET_DEVICE="cpu", VLLM_MLA_DISABLE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
                           HF_HUB_OFFLINE="1", GLOO_SOCKET_IFNAME="lo", VLLM_HOST_IP=LOCAL, VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
                           UCX_TLS="tcp,sm,self", UCX_NET_DEVICES="lo", VLLM_NIXL_SIDE_CHANNEL_HOST=LOCAL, VLLM_NIXL_SIDE_CHANNEL_PORT=str(side))
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
        command = [VLLM, "serve", str(MODEL), "--served-model-name", NAME, "--host", LOCAL, "--port", str(self.port), "--dtype", "bfloat16",
                   "--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK), "--max-num-seqs", "64",
                   "--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
                   "--kv-events-config", json.dumps(events)]
        if transfer:
            command += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": transfer, "kv_buffer_device": "cpu"})]
        self.log = open(self.folder / "log", "w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment, start_new_session=True)

    def healthy(self):
        with contextlib.suppress(OSError, http.client.HTTPException):
            return request(LOCAL, self.port, "GET", "/health")[0] == 200
        return False

    def tail(self):
        return (self.folder / "log").read_text()[-4000:]

    def post(self, path, body):
        status, _, text = request(LOCAL, self.port, "POST", path, body)
        assert status == 200, text
        return json.loads(text)

    def metric(self, name):
        text = request(LOCAL, self.port, "GET", "/metrics")[2].decode()
        values = re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.M)
        assert values, f"vLLM has no metric {name}"
        return sum(map(float, values))

    def running(self):
        return self.metric("num_requests_(?:running|waiting)")

    def kv_is_free(self):
        """The gauge changes with a step of the engine."""
        self.post("/v1/completions", {"model": NAME, "prompt": [1], "max_tokens": 1})
        return self.metric("kv_cache_usage_perc") == 0

    def option(self):
        return f"kv_events={self.events} kv_replay={self.replay}"

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.log.close()

    def stop(self):
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)


class Engine(ProxyTest):
    """Cases for any arrangement of engines. A subclass starts them."""

    def ask(self, **body):
        status, _, text = self.proxy_.request("POST", "/v1/chat/completions", {"model": NAME, "temperature": 0, **body})
        return status, json.loads(text)

    def question(self, text, system=SYSTEM):
        return [{"role": "system", "content": system}, {"role": "user", "content": text}]

    def check_answers_and_streams(self):
        messages = self.question("What is the capital of France?")
        status, answer = self.ask(messages=messages, max_tokens=12)
        self.assertEqual(status, 200, answer)
        direct = self.direct.post("/v1/chat/completions", {"model": NAME, "temperature": 0, "messages": messages, "max_tokens": 12})
        self.assertEqual(answer["choices"][0]["message"]["content"], direct["choices"][0]["message"]["content"])
        text, last = self.stream(messages)
        self.assertEqual(text, answer["choices"][0]["message"]["content"])
        self.assertEqual(last["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens"])

    def check_tools(self):
        tool = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
                                                 "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                                                                "required": ["city"]}}}
        status, answer = self.ask(messages=self.question("What is the weather in Paris?", "Use tools."), tools=[tool], max_tokens=64,
                                  tool_choice={"type": "function", "function": {"name": "get_weather"}})
        self.assertEqual(status, 200, answer)
        call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        self.assertEqual(call["name"], "get_weather")
        self.assertIn(json.loads(call["arguments"])["city"], ("Paris", "Rome"))

    def check_errors(self):
        for body, wanted in (({"model": "nothing"}, 404), ({"max_tokens": 100000}, 400), ({"temperature": -1}, 400)):
            status, answer = self.ask(messages=self.question("Hi"), **body)
            self.assertEqual(status, wanted, answer)
            self.assertIn("error", answer)

    def stream(self, messages, port=None):
        """Returns the text of a streamed chat and its last chunk."""
        with self.proxy_.streaming({"content-type": "application/json"}, "/v1/chat/completions", port, model=NAME, temperature=0, messages=messages,
                                   max_tokens=12, stream_options={"include_usage": True}) as stream:
            lines = [line[6:] for line in stream.read().decode().splitlines() if line.startswith("data: ")]
        self.assertEqual(lines[-1], "[DONE]")
        chunks = [json.loads(line) for line in lines[:-1]]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]), chunks[-1]

    def check_cancellation(self, engines):
        for stream in (True, False):
            body = json.dumps({"model": NAME, "messages": self.question("Tell me a story."), "max_tokens": 600, "ignore_eos": True, "stream": stream}).encode()
            client = socket.create_connection((HOST, self.proxy_.port), timeout=WAIT_SECONDS)
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: sum(engine.running() for engine in engines) > 0)
            client.close()
            until(lambda: sum(engine.running() for engine in engines) == 0)
            self.proxy_.idle()
        self.assertEqual(self.proxy_.state()["outcomes"]["aborted"], 2)


class Aggregated(Engine):
    @classmethod
    def setUpClass(cls):
        cls.engine = cls.direct = Vllm()

    @classmethod
    def tearDownClass(cls):
        cls.engine.stop()

    def setUp(self):
        super().setUp()
        self.proxy_ = self.proxy(f"model {MODEL}; block_size {BLOCK}; engine {self.engine.url} {self.engine.option()};")

    def test_answers_and_streams(self):
        self.check_answers_and_streams()

    def test_calls_tools(self):
        self.check_tools()

    def test_passes_errors_on(self):
        self.check_errors()

    def test_frees_blocks_when_the_client_leaves(self):
        self.check_cancellation([self.engine])

    def test_cached_tokens_are_those_that_the_proxy_predicts(self):
        """The proxy predicts what the engine reports."""
        chance = random.Random(7)
        system = f"{os.getpid()} " + " ".join(chance.choice(("red", "green", "blue", "seven", "nine")) for _ in range(150))
        until(lambda: self.ask(messages=self.question("Hi", system="a"), max_tokens=1)[0] == 200
              and self.proxy_.state()["engines"][0]["index"] == "exact", what=self.proxy_.state)
        reported = []
        for i, text in enumerate(("What is the capital of France?", "What is the capital of Spain?", "What is 1 + 1?", "What is 1 + 2?")):
            # Events of the request before are in the index: expected blocks were confirmed, or have expired.
            until(lambda: self.proxy_.metric("moesaic_proxy_index_speculative") == 0)
            status, answer = self.ask(messages=self.question(text, system), max_tokens=4)
            cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            self.assertEqual(status, 200, answer)
            self.assertEqual(cached > 0, i > 0, answer)
            self.assertEqual(cached % BLOCK, 0)
            reported.append(cached)

        def predicted():
            matched = [int(line[-1]) for line in self.proxy_.access(0) if int(line[12]) > 4 * BLOCK]  # without those before the loop
            return matched if len(matched) == len(reported) else None
        self.assertEqual(until(predicted, what=lambda: self.proxy_.access(0)), reported)
        self.assertEqual(self.proxy_.metric("moesaic_proxy_kv_errors_total"), 0)

    def test_ids_equal_those_of_the_engine(self):
        """1,000 completions, some of several segments, for which the engine gets ids."""
        words = ["The", "capital", "of", "France", "is", "Paris", ".", "\n", "1 + 1 =", "{\"a\": [1, 2]}", "<|im_end|>", "na\u00efve", "\u4e2d\u6587",
                 "  ", "\t", "don't", "\U0001F600"]
        chance = random.Random(3)
        texts = [" ".join(chance.choice(words) for _ in range(chance.randint(1, 60))) for _ in range(1000)]
        lines = "".join(f"Line {i} of a text.\n" for i in range(40))
        texts[::10] = [lines[: 8 * i] + text for i, text in enumerate(texts[::10])]

        def check(thread):
            for text in texts[thread::8]:
                status, answer = self.proxy_.complete(prompt=text, max_tokens=1, return_token_ids=True, model=NAME)
                self.assertEqual(status, 200, answer)
                wanted = self.engine.post("/tokenize", {"model": NAME, "prompt": text})["tokens"]
                self.assertEqual(answer["choices"][0]["prompt_token_ids"], wanted)
        together(8, check)
        self.assertEqual(self.proxy_.metric("moesaic_proxy_unrendered_total"), 0)
        self.assertEqual(self.proxy_.metric("moesaic_proxy_rendered_total"), 1000)
        self.proxy_.idle()


@unittest.skipUnless(os.environ.get("MOESAIC_VLLM_NIXL"), "SKIPPED: MOESAIC_VLLM_NIXL does not say that vLLM has NIXL")
class Pair(Engine):
    @classmethod
    def setUpClass(cls):
        cls.prefill, cls.decode = Vllm("kv_producer"), Vllm("kv_consumer")
        cls.direct = cls.decode

    @classmethod
    def tearDownClass(cls):
        cls.prefill.stop()
        cls.decode.stop()

    def setUp(self):
        super().setUp()
        self.proxy_ = self.proxy(f"transfer nixl; skip_prefill 0; model {MODEL}; block_size {BLOCK};"
                                 f"engine {self.prefill.url} role=prefill {self.prefill.option()}; engine {self.decode.url} role=decode {self.decode.option()};")

    def system(self, words):
        """A beginning that no engine has."""
        chance = random.Random(1)
        return f"{self.id()} {os.getpid()} " + " ".join(chance.choice(("red", "green", "blue", "seven", "nine")) for _ in range(words))

    def test_answers_and_streams(self):
        fetched = self.decode.metric("external_prefix_cache_hits_total")
        self.check_answers_and_streams()
        # The decode engine has the prompt from the other one.
        self.assertGreaterEqual(self.decode.metric("external_prefix_cache_hits_total") - fetched, BLOCK)
        self.assertEqual(self.decode.metric("nixl_num_failed_transfers_total"), 0)
        state = self.proxy_.idle()
        entered = {stage["name"]: stage["entered"] for stage in state["stages"]}
        self.assertEqual(entered["decode_scheduled"], 2)
        self.assertEqual(state["outcomes"]["completed"], 2)

    def test_passes_errors_on(self):
        self.check_errors()

    def test_frees_blocks_when_the_client_leaves(self):
        self.check_cancellation([self.prefill, self.decode])
        # No blocks wait for a decode engine that will not fetch them.
        until(self.prefill.kv_is_free)
        until(self.decode.kv_is_free)
        self.assertEqual(self.prefill.metric("nixl_num_kv_expired_reqs_total"), 0)

    def test_cached_tokens_are_those_of_the_prefill_engine(self):
        system, reported = self.system(150), []
        for text in ("What is the capital of France?", "What is the capital of Spain?", "What is 1 + 1?"):
            status, answer = self.ask(messages=self.question(text, system), max_tokens=4)
            self.assertEqual(status, 200, answer)
            reported.append((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        self.assertEqual((reported[0], reported[1] % BLOCK, reported[2]), (0, 0, reported[1]))
        self.assertGreaterEqual(reported[1], 4 * BLOCK)

    def test_the_verb_serves_a_pair(self):
        (port,) = free_ports(1)
        verb = subprocess.Popen([str(BINARY), "proxy", "--module", str(MODULE), "--prefill", self.prefill.url, "--decode", self.decode.url, "--host", HOST,
                                 "--port", str(port), "--model", str(MODEL), "--set", f"block_size {BLOCK}", "--set", "skip_prefill 0"], stderr=subprocess.DEVNULL)
        self.addCleanup(verb.wait, WAIT_SECONDS)
        self.addCleanup(verb.terminate)

        def serves():
            with contextlib.suppress(OSError):
                return request(HOST, port, "GET", "/v1/models")[0] == 200
        until(serves)
        messages = self.question("What is the capital of France?", self.system(100))
        fetched = self.decode.metric("external_prefix_cache_hits_total")
        text, last = self.stream(messages, port)
        self.assertGreaterEqual(self.decode.metric("external_prefix_cache_hits_total") - fetched, 3 * BLOCK)
        direct = self.direct.post("/v1/chat/completions", {"model": NAME, "temperature": 0, "messages": messages, "max_tokens": 12})
        self.assertEqual(text, direct["choices"][0]["message"]["content"])
        self.assertEqual(last["usage"]["prompt_tokens"], direct["usage"]["prompt_tokens"])


if __name__ == "__main__":
    if not VLLM:
        print("SKIPPED: MOESAIC_VLLM does not name a vLLM for CPUs")
        sys.exit(SKIPPED)
    main()
