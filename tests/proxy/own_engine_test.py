#!/usr/bin/env python3
"""Tests two engines of this project with the proxy: the official client, cached tokens, equal token ids, `moesaic proxy`."""
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile

from proxying import BINARY, HOST, MODEL, MODULE, ROOT, WAIT_SECONDS, ProxyTest, main, request, together, until

sys.path.insert(0, str(ROOT / "tests" / "server"))
from serving import Server, model_with, serving  # noqa: E402

BLOCK = 64  # tokens of a KV block of `moesaic serve`
WORDS = ["The", "capital", "of", "France", "is", "Paris", ".", "\n", "1 + 1 =", "{\"a\": [1, 2]}", "<|im_end|>", "na\u00efve", "\u4e2d\u6587", "  ", "\t", "don't"]
# Templates in addition to that of the model: one that prints contents as they are, and one that strips them, as Llama's do.
TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "stripped": "{% for message in messages %}{{ '[' + message['role'] + ']\\n\\n' + message['content'] | trim + '\\n' }}{% endfor %}"
                "{% if add_generation_prompt %}{{ '[assistant]\\n\\n' }}{% endif %}",
}

try:
    import openai
except ImportError:
    openai = None


class OwnEngines(ProxyTest):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(tempfile.mkdtemp())
        cls.events = [f"ipc://{folder}/kv{i}" for i in range(2)]
        cls.servers = [Server("--kv-events", e, "--kv-events-replay", e + "r", "--allowed-host", "*") for e in cls.events]

    @classmethod
    def tearDownClass(cls):
        for server in cls.servers:
            server.stop()

    def pool(self):
        return f"api moesaic; model {MODEL};" + "".join(
            f"engine {s.url} kv_events={e} kv_replay={e}r;" for s, e in zip(self.servers, self.events))

    def test_ids_equal_those_of_the_engine(self):
        """The engine is asked through the proxy for the ids that it got, and directly for those that it computes."""
        proxy = self.proxy(self.pool())
        chance = random.Random(3)
        texts = [" ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 60))) for _ in range(1000)]

        def check(thread):
            for text in texts[thread::8]:
                status, answer = proxy.complete(prompt=text, max_tokens=1, return_token_ids=True, model="moesaic-tiny")
                self.assertEqual(status, 200, answer)
                wanted = self.servers[0].json("POST", "/tokenize", {"prompt": text})[1]["tokens"]
                self.assertEqual(answer["choices"][0]["prompt_token_ids"], wanted)
        together(8, check)
        self.assertEqual(proxy.metric("moesaic_proxy_unrendered_total"), 0)
        proxy.idle()

    def chats(self, seed, count):
        """Random chats. The proxy sends the ids of all of them."""
        chance = random.Random(seed)
        words = [*WORDS, "<|user|>", "<|assistant|>", "<|end|>", "assistant\n"]
        text = lambda: " ".join(chance.choice(words) for _ in range(chance.randint(0, 30)))
        for number in range(count):
            roles = ["system"] * chance.randint(0, 1) + ["user", "assistant", "user"][:chance.randint(1, 3)]
            chat = {"messages": [{"role": role, "content": text()} for role in roles]}
            yield {**chat, "add_generation_prompt": False} if number % 5 == 4 else chat

    def check_chats(self, model, server, seed):
        """An engine with SGLang's API gets the ids in the field `input_ids`; `server` renders the same chats."""
        engine = self.mock()
        proxy = self.proxy(f"api sglang; model {model}; engine {engine.url};")
        chats = list(self.chats(seed, 120))  # a mock engine keeps the last 200 requests

        def send(thread):
            for number in range(thread, len(chats), 8):
                body = {"model": "mock", "max_tokens": 1, "user": str(number), **chats[number]}
                status, _, answer = proxy.request("POST", "/v1/chat/completions", json.dumps(body, ensure_ascii=number % 2 == 0).encode())
                self.assertEqual(status, 200, answer)
        together(8, send)
        self.assertEqual(proxy.metric("moesaic_proxy_unrendered_total"), 0)
        sent = {int(body["user"]): body.get("input_ids") for path, _, body in engine.requests() if path == "/v1/chat/completions"}
        self.assertEqual(sorted(sent), list(range(len(chats))))
        for number, chat in enumerate(chats):
            status, rendered = server.json("POST", "/v1/chat/completions/render", chat)
            self.assertEqual(status, 200, rendered)
            self.assertEqual(sent[number], rendered["prompt_token_ids"], chat)
        proxy.idle()

    def test_ids_of_chats_equal_those_of_the_engine(self):
        self.check_chats(MODEL, self.servers[0], seed=4)

    def test_ids_of_chats_with_other_templates_equal_those_of_the_engine(self):
        settings = json.loads((MODEL / "tokenizer_config.json").read_text())
        for seed, (name, template) in enumerate(TEMPLATES.items()):
            changed = model_with("tokenizer_config.json", {**settings, "chat_template": template})
            with self.subTest(name), changed as folder, serving(model=folder) as server:
                self.check_chats(folder, server, seed)

    def test_a_common_prefix_is_cached_in_one_engine(self):
        proxy = self.proxy(self.pool())
        system = "You answer in one word. " * 20
        until(lambda: all(engine["index"] == "exact" for engine in proxy.state()["engines"]), what=proxy.state)
        known = proxy.state()["index"]["memberships"]  # blocks of other tests
        cached, predicted, common, prompts = [], [], [], []  # common: tokens that the prompt shares with one before
        for question in ("What is the capital of France?", "What is the capital of Spain?", "What is 1 + 1?"):
            body = {"model": "moesaic-tiny", "max_tokens": 4,
                    "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}
            status, rendered = self.servers[0].json("POST", "/v1/chat/completions/render", {"messages": body["messages"]})
            self.assertEqual(status, 200, rendered)
            ids = rendered["prompt_token_ids"]
            common.append(max((len(os.path.commonprefix([ids, other])) for other in prompts), default=0))
            prompts.append(ids)
            status, _, text = proxy.request("POST", "/v1/chat/completions", body)
            self.assertEqual(status, 200, text)
            usage = json.loads(text)["usage"]
            self.assertEqual(usage["prompt_tokens"], len(ids))
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            predicted.append(int(proxy.access(len(prompts))[-1][17]))
            # The engine's events arrive after its answer.
            until(lambda: proxy.state()["index"]["memberships"] >= known + 2, what=proxy.state)
        self.assertTrue(all(count >= BLOCK for count in common[1:]), common)
        # The engine also copies the tokens of a block that differs later. The first prompt may begin as one of another test.
        self.assertLess(cached[0], BLOCK)
        self.assertEqual(cached[1:], common[1:])
        self.assertEqual(predicted, [tokens // BLOCK * BLOCK for tokens in common])
        state = proxy.idle()
        self.assertEqual(state["tokens"]["cached"], sum(cached))

    def test_tools_through_the_proxy_equal_those_of_the_engine(self):
        """Forced and free calls, as answers and as streams, and the turn after the result of a call."""
        proxy = self.proxy(self.pool())
        until(lambda: all(engine["index"] == "exact" for engine in proxy.state()["engines"]), what=proxy.state)
        tools = [{"type": "function", "function": {
            "name": "get_weather", "description": "Returns the weather of a city. " * 20,
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}}}]
        forced = {"type": "function", "function": {"name": "get_weather"}}
        body = {"model": "moesaic-tiny", "temperature": 0, "tools": tools, "max_tokens": 60,
                "messages": [{"role": "user", "content": "What is the weather in Paris?"}]}

        def message(body):
            """Returns the message by the proxy, after a comparison with that of an engine."""
            status, _, text = proxy.request("POST", "/v1/chat/completions", body)
            answers = []
            for status, answer in ((status, json.loads(text)), self.servers[0].json("POST", "/v1/chat/completions", body)):
                self.assertEqual(status, 200, answer)
                answers.append(answer["choices"][0])
                for call in answers[-1]["message"].get("tool_calls") or []:
                    self.assertTrue(call.pop("id"))
            self.assertEqual(answers[0], answers[1])
            return answers[0]["message"]
        free = message(body)
        call = message({**body, "tool_choice": forced})["tool_calls"][0]["function"]
        self.assertEqual(call["name"], "get_weather")
        self.assertIsInstance(json.loads(call["arguments"])["city"], str)
        name, arguments = "", ""
        json_type = {"content-type": "application/json"}
        with proxy.streaming(json_type, path="/v1/chat/completions", **{**body, "tool_choice": forced}) as stream:
            text = stream.read().decode()
            for line in text.splitlines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        for piece in choice["delta"].get("tool_calls") or []:
                            name += piece["function"].get("name") or ""
                            arguments += piece["function"].get("arguments") or ""
        self.assertEqual({"name": name, "arguments": arguments}, call, text)
        turn = [{"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "{\"sky\": \"clear\"}"}]
        message({**body, "messages": body["messages"] + turn})
        self.assertIsNotNone(free)
        # The proxy has rendered the tools as the engine has: it found the common beginning in the engines' events.
        self.assertEqual(proxy.metric("moesaic_proxy_unrendered_total"), 0)
        until(lambda: message(body) and int(proxy.access(1)[-1][17]) >= 64, what=lambda: proxy.access(1)[-1])
        proxy.idle()

    def test_errors_are_those_of_the_engine(self):
        proxy = self.proxy(self.pool())
        chat = {"model": "moesaic-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        bodies = [("/v1/chat/completions", {**chat, **change}) for change in (
            {"model": "nothing"}, {"messages": []}, {"messages": [{"role": "king", "content": "x"}]},
            {"messages": [{"role": "user", "content": 3}]}, {"temperature": -1}, {"top_p": 0}, {"max_tokens": 100000}, {"min_tokens": 4},
            {"stop": [1]}, {"logit_bias": {"5": 101}}, {"tool_choice": "required"}, {"tools": [{"type": "function"}]},
            {"response_format": {"type": "xml"}}, {"stream": True, "temperature": -1})]
        bodies += [("/v1/completions", {"model": "moesaic-tiny", **change}) for change in (
            {"prompt": [10**6]}, {"prompt": "x", "suffix": "y"}, {"prompt": "x", "model": "nothing"})]
        for path, body in bodies:
            with self.subTest(path=path, body=body):
                wanted = self.servers[0].json("POST", path, body)
                self.assertEqual(wanted[0], 404 if body["model"] == "nothing" else 400, wanted)
                status, _, text = proxy.request("POST", path, body)
                self.assertEqual((status, json.loads(text)), wanted)
        state = proxy.idle()
        self.assertEqual(state["outcomes"]["failed"], len(bodies))
        self.assertEqual([engine["state"] for engine in state["engines"]], ["enabled"] * 2)  # no breaker opened

    def test_an_engine_stops_when_the_client_leaves(self):
        proxy = self.proxy(self.pool())
        aborted = lambda: sum(server.aborted() for server in self.servers)
        running = lambda: sum(server.metric("vllm:num_requests_running") for server in self.servers)
        json_type = {"content-type": "application/json"}

        def cancelled():
            """False if a fast machine has ended the half million tokens before the client left."""
            before = aborted()
            with proxy.streaming(json_type, path="/v1/chat/completions", model="moesaic-tiny", n=128, max_tokens=4000, ignore_eos=True,
                                 messages=[{"role": "user", "content": "Tell me a story."}]) as stream:
                stream.readline()
                seen = running() > 0
            until(lambda: running() == 0, what=lambda: running())
            return seen and aborted() > before
        until(cancelled)
        for server in self.servers:
            server.wait_until_quiet()
        self.assertGreaterEqual(proxy.idle()["outcomes"]["aborted"], 1)

    def test_official_client_is_served(self):
        if openai is None:
            self.skipTest("the package openai is not installed")
        proxy = self.proxy(self.pool())
        client = openai.OpenAI(base_url=f"http://{HOST}:{proxy.port}/v1", api_key="none", timeout=WAIT_SECONDS)
        self.assertEqual([m.id for m in client.models.list()], ["moesaic-tiny"])
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model="moesaic-tiny", messages=messages, temperature=0)
        self.assertIn("Paris", answer.choices[0].message.content)
        stream = client.chat.completions.create(model="moesaic-tiny", messages=messages, temperature=0, stream=True,
                                                stream_options={"include_usage": True})
        chunks = list(stream)
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), answer.choices[0].message.content)
        self.assertEqual(chunks[-1].usage.prompt_tokens, answer.usage.prompt_tokens)
        with self.assertRaises(openai.NotFoundError):
            client.chat.completions.create(model="nothing", messages=messages)
        with client.chat.completions.create(model="moesaic-tiny", messages=messages, stream=True, max_tokens=2000,
                                            extra_body={"ignore_eos": True}) as long:
            next(iter(long))
        proxy.idle()


def column_of_children(column, pid):
    """Returns a column of ps for the children of a process."""
    return subprocess.run(["ps", "-o", f"{column}=", "--ppid", str(pid)], capture_output=True, text=True, check=True).stdout.split()


def read_pid(path):
    """Returns the pid in a file that nginx writes, or None."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else None


def children(pid):
    """Returns the pids of the processes that a process started and that run."""
    out = subprocess.run(["ps", "-o", "pid=,stat=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return {int(line.split()[0]) for line in out.splitlines() if line.split()[1][0] != "Z"}


def end(pid_file):
    """Ends the nginx that a failed test left."""
    if pid := read_pid(pid_file):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def workers_change_user():
    """Returns true if this user's nginx runs its workers as another user: root can, unless it lacks capabilities."""
    if os.geteuid() != 0:
        return False
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.chown(file.name, 65534, -1)
        except OSError:
            return False
    return True


def without_capabilities():
    """Returns words before a command that take the capabilities of root away."""
    words = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    return words if workers_change_user() and subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []


class Verb(ProxyTest):
    def command(self, *flags):
        return [str(BINARY), "proxy", "--module", str(MODULE), *map(str, flags)]

    def test_prints_checks_and_serves(self):
        engine = self.mock()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        engines = pathlib.Path(folder.name) / "engines.txt"
        engines.write_text(f"# engines\n{engine.url} max_requests=4\n")
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        flags = ["--engines", engines, "--host", HOST, "--port", port, "--workers", 2, "--set", "queue 100"]
        printed = subprocess.run(self.command(*flags, "--print-config"), capture_output=True, text=True)
        self.assertEqual(printed.returncode, 0, printed.stderr)
        self.assertIn("moesaic_pool engines {", printed.stdout)
        # Debian's unit starts nginx by `-g 'daemon on;'`, and a temporary folder is removed when the command ends.
        self.assertIn(f"engine {engine.url} max_requests=4;", printed.stdout)
        for word in ("daemon", "user ", "pid ", "_temp_path", "engines.conf"):
            self.assertNotIn(word, printed.stdout)
        checked = subprocess.run(self.command(*flags, "--check"), capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stderr)
        process = subprocess.Popen(self.command(*flags, "--access-log", pathlib.Path(folder.name) / "log"), stderr=subprocess.DEVNULL)
        self.addCleanup(process.kill)

        def answers():
            try:
                return request(HOST, port, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
            except OSError:
                return False
        until(answers)
        # A worker stores this body in a file.
        body = {"prompt": "a", "max_tokens": 1, "user": "x" * 2_000_000}
        self.assertEqual(request(HOST, port, "POST", "/v1/completions", body)[0], 200)
        if workers_change_user():
            until(lambda: len(column_of_children("pid", process.pid)) == 1)  # nginx, which has become a daemon
            nginx, = column_of_children("pid", process.pid)
            until(lambda: {"0"}.isdisjoint(column_of_children("uid", nginx)))  # one that was just forked still belongs to root
        other = self.mock()
        engines.write_text(f"{engine.url}\n{other.url}\n")
        process.send_signal(signal.SIGHUP)
        until(lambda: len(json.loads(request(HOST, port, "GET", "/moesaic/state")[2])["engines"]) == 2)
        process.terminate()
        self.assertEqual(process.wait(WAIT_SECONDS), 0)
        line = json.loads((pathlib.Path(folder.name) / "log").read_text().splitlines()[0])
        self.assertEqual((line["status"], line["outcome"]), (200, "completed"))

    def test_replaces_nginx_under_traffic(self):
        """SIGUSR2 starts nginx again, as after an update of the package, and the old one finishes its requests."""
        engine = self.mock()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        pid_file, log = pathlib.Path(folder.name) / "nginx.pid", pathlib.Path(folder.name) / "stdout"
        with open(log, "w") as stdout, open(pathlib.Path(folder.name) / "stderr", "w") as stderr:
            process = subprocess.Popen(self.command("--engine", engine.url, "--host", HOST, "--port", port, "--workers", 2, "--folder", folder.name,
                                                    "--set", "health off", "--access-log", "/dev/stdout"), stdout=stdout, stderr=stderr)
        self.addCleanup(process.kill)
        errors = lambda: (pathlib.Path(folder.name) / "stderr").read_text()
        master = lambda other=None: until(lambda: pid if (pid := read_pid(pid_file)) != other else None, what=errors)
        complete = lambda: request(HOST, port, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0]
        first = master()
        self.addCleanup(end, pid_file)
        with socket.create_connection((HOST, port), timeout=WAIT_SECONDS) as held:
            body = json.dumps({"prompt": "a", "max_tokens": 50, "stream": True}).encode()
            held.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            self.assertTrue(held.recv(1).startswith(b"H"))
            engine.faults(stall_ms=3600_000)
            process.send_signal(signal.SIGUSR2)
            second = master(first)
            until(lambda: "the old one finishes its requests" in errors(), what=errors)
            until(lambda: json.loads(request(HOST, port, "GET", "/moesaic/state")[2])["pid"] not in children(first))
            self.assertTrue(children(first))  # the request that the engine holds
            engine.faults()  # the engine continues
            self.assertTrue(b"".join(iter(lambda: held.recv(65536), b"")).rstrip().endswith(b"0"))
        until(lambda: not children(first) and complete() == 200)
        os.kill(second, signal.SIGUSR2)  # nginx's own procedure
        third = master(second)
        os.kill(second, signal.SIGQUIT)
        until(lambda: not children(second) and complete() == 200)
        before = children(third)
        process.send_signal(signal.SIGHUP)
        until(lambda: children(third) and not children(third) & before, what=errors)
        self.assertEqual(complete(), 200)
        config = pathlib.Path(folder.name) / "nginx.conf"
        config.write_text(config.read_text() + "nonsense;\n")
        process.send_signal(signal.SIGUSR2)  # the new nginx does not start
        until(lambda: "not upgraded" in errors(), what=errors)
        self.assertEqual((complete(), read_pid(pid_file)), (200, third))
        process.terminate()
        self.assertEqual(process.wait(WAIT_SECONDS), 0)
        self.assertFalse(pid_file.exists())
        outcomes = [outcome for line in log.read_text().splitlines() if (outcome := json.loads(line)["outcome"])]
        self.assertEqual(set(outcomes), {"completed"})
        self.assertGreaterEqual(len(outcomes), 4)

    def test_root_without_capabilities_keeps_its_user(self):
        command = self.command("--engine", "http://127.0.0.1:1", "--host", HOST, "--check")
        checked = subprocess.run([*without_capabilities(), *command], capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stderr)

    def test_refuses_a_configuration_that_others_may_read(self):
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder) / "nginx.conf"
            config.touch()
            config.chmod(0o666)
            pathlib.Path(folder).chmod(0o777)
            words = without_capabilities()
            if words:
                os.chown(config, 65534, -1)
            command = [*words, *self.command("--engine", "http://127.0.0.1:1", "--host", HOST, "--folder", folder, "--check")]
            checked = subprocess.run(command, capture_output=True, text=True)
            if words:
                self.assertEqual(checked.returncode, 1, checked.stderr)
                self.assertIn(f"cannot restrict {config} to its owner", checked.stderr)
                self.assertEqual(config.read_text(), "")
            else:  # the owner
                self.assertEqual(config.stat().st_mode & 0o777, 0o600)

    def test_root_is_warned_of_folders_that_workers_cannot_enter(self):
        with tempfile.TemporaryDirectory() as name:
            closed = pathlib.Path(name).resolve()
            folder = closed / "new" / "folder"
            command = self.command("--engine", "http://127.0.0.1:1", "--host", HOST, "--folder", folder, "--check")
            for mode, warned in ((0o700, workers_change_user()), (0o711, False)):
                closed.chmod(mode)
                checked = subprocess.run(command, capture_output=True, text=True, umask=0o077)
                self.assertEqual(checked.returncode, 0, checked.stderr)
                self.assertEqual(f"workers cannot enter {closed}\n" in checked.stderr, warned, checked.stderr)
            if workers_change_user():
                self.assertEqual([path.stat().st_mode & 0o777 for path in (folder, folder.parent)], [0o711, 0o711])

    def test_refuses_wrong_flags(self):
        for flags, word in ((["--prefill", "http://127.0.0.1:1"], "--decode"), ([], "--engine"),
                            (["--engine", "ftp://x"], "URL"), (["--engine", "http://127.0.0.1:1", "--set", "queue x"], "queue"),
                            (["--engine", "http://127.0.0.1:1", "--print-config", "--folder", "x"], "--folder")):
            result = subprocess.run(self.command(*flags), capture_output=True, text=True)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(word, result.stderr)

    def test_lets_engines_of_other_hosts_use_the_metaserver(self):
        flags = ["--transfer", "ascend", "--prefill", "http://10.0.0.1:8000", "--host", "10.0.0.9", "--print-config"]
        printed = subprocess.run(self.command(*flags, "--decode", "http://10.0.0.2:8000"), capture_output=True, text=True)
        self.assertEqual(printed.returncode, 0, printed.stderr)
        self.assertIn("metaserver_allow 127.0.0.0/8 ::1 10.0.0.1 10.0.0.2;", printed.stdout)
        refused = subprocess.run(self.command(*flags, "--decode", "http://decode.test:8000"), capture_output=True, text=True)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("metaserver_allow", refused.stderr)

    def test_ipv6_addresses_have_brackets_in_urls(self):
        pair = ["--prefill", "http://[fd00::1]:8000", "--decode", "http://[fd00::2]:8000"]
        for host in ("fd00::9", "[fd00::9]"):
            printed = subprocess.run(self.command("--transfer", "ascend", *pair, "--host", host, "--print-config"), capture_output=True, text=True)
            self.assertEqual(printed.returncode, 0, printed.stderr)
            self.assertIn("metaserver http://[fd00::9]:8100/v1/metaserver;", printed.stdout)
            self.assertIn("listen [fd00::9]:8100 ", printed.stdout)
            self.assertIn("metaserver_allow 127.0.0.0/8 ::1 fd00::1 fd00::2;", printed.stdout)

    def test_engines_of_a_file_can_be_looked_up(self):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as engines:
            engines.write("http://engines.test:8000 resolve\n")
            engines.flush()
            flags = ["--engines", engines.name, "--resolver", "127.0.0.1:53", "--host", HOST]
            checked = subprocess.run(self.command(*flags, "--check"), capture_output=True, text=True)
            self.assertEqual(checked.returncode, 0, checked.stderr)
            if re.search(r"^\s*nameserver\s+[^%\s]+\s*$", pathlib.Path("/etc/resolv.conf").read_text(), re.M):
                printed = subprocess.run(self.command("--engines", engines.name, "--print-config"), capture_output=True, text=True)
                self.assertIn("\n  resolver ", printed.stdout)

    def test_reference_equals_that_of_the_documentation(self):
        table = subprocess.run(self.command("--reference"), capture_output=True, text=True, check=True).stdout
        self.assertIn(table.strip(), (ROOT / "docs" / "proxy-directives.md").read_text())


if __name__ == "__main__":
    main()
