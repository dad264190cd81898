#!/usr/bin/env python3
"""Measures what a router adds to a request: latency and CPU time, for the proxy and other routers before the same engines.

    bench/proxy/routers.py [--sglang PYTHON] [--vllm PROGRAM] [--tokens 1000 10000 100000] [--rounds 5] [--kv-events]
                           [--ids] [--cold | --connections N] [--json FILE]

PYTHON is the interpreter of an environment with sglang-router, PROGRAM the script vllm-router of another one. Two mock engines
answer every chat after a fixed time. Prompts are documents of the given number of tokens with a new question each, so that all
but the question is cached. The routers and the direct way take turns in each round. Added latency is the difference of
percentiles to the direct way; CPU time is that of all threads of the router, for 1,000 requests. At last, clients with small
prompts share a router with one that sends bodies of 8 MB: the largest latencies show the delay by a large body.

--connections N then sends prompts of the largest number of tokens on N connections without pauses, and prints the requests/s, the
latencies and the processors that the router used. The clients and the engines run on the same machine.

By default the engines send no KV events. With --kv-events they send them, and the proxy with a tokenizer follows them. It then sends
token ids in chats (`api sglang`), since the mock engines have no tokenizer and their own ids would not be those of the proxy: bodies
to engines are larger than with engines that tokenize chats, and the added latency includes the engine's time to read them. The
states of the indexes and the share of cached tokens are printed. Another row is vllm-router with the policy `kv_aware`, which
follows the events too. Use --ids to compare it: vllm-router does not tokenize for HTTP engines, and the mock engines have no
tokenizer that it could ask.

--cold sends prompts that no request sent before: each has a document of its own, which is made before the time is taken. The proxy
with a tokenizer tokenizes all of its text, and no engine has a block of it. The table with bodies of 8 MB is left out.

--ids sends completions whose prompts are lists of token ids in place of chats. No router tokenizes them.

Prints markdown with medians and the range over rounds. Needs nothing beyond Python 3.9.
"""
import argparse
import http.client
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import typing

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("MOESAIC_BINARY", ROOT / "build" / "release" / "bin" / "moesaic")).resolve()
HOST = "127.0.0.1"
BLOCK = 16  # tokens of a KV block of the mock engines
DOCUMENTS = 4
WARM = 2  # untimed requests of each document


def free_port():
    with socket.create_server((HOST, 0)) as free:
        return free.getsockname()[1]


class Refused(Exception):
    """A router does not take requests of this form."""


class Router:
    """A process group that serves at a port."""

    def __init__(self, name, command, port, log):
        self.name, self.port = name, port
        self.process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + 120
        while True:
            status = 0
            try:
                status = Connection(port).send(Connection.form.document(0, 40))
            except OSError:
                pass
            if status == 200:
                return
            if status in (400, 422):
                self.stop()
                raise Refused(f"status {status}")
            if time.monotonic() > end or self.process.poll() is not None:
                sys.exit(f"{name} does not answer; its output is in {log.name}")
            time.sleep(0.2)

    def pids(self):
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            found.append(pid)
            try:
                for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                    queue += map(int, (task / "children").read_text().split())
            except FileNotFoundError:
                pass
        return found

    def cpu(self):
        """Seconds that all threads have run."""
        total = 0
        for pid in self.pids():
            try:
                for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                    total += int((task / "schedstat").read_text().split()[0])
            except FileNotFoundError:
                pass
        return total / 1e9

    def stop(self):
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


class Connection:
    """A connection that is kept open."""
    form = None  # of all requests

    def __init__(self, port):
        self.socket = socket.create_connection((HOST, port), timeout=120)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, document, question=b""):
        """Sends a request and returns the status. The text must need no escapes."""
        body = b"".join((b'{"model":"mock","max_tokens":1,', self.form.before, document, question, self.form.after))
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (self.form.path, len(body))
        self.socket.sendall(head + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self.read()
        head, _, rest = received.partition(b"\r\n\r\n")
        fields = {line.split(b":")[0].lower(): line.split(b":", 1)[1].strip() for line in head.split(b"\r\n")[1:]}
        if b"content-length" in fields:
            while len(rest) < int(fields[b"content-length"]):
                rest += self.read()
        else:
            while not rest.endswith(b"0\r\n\r\n"):
                rest += self.read()
        return int(head.split()[1])

    def read(self):
        piece = self.socket.recv(1 << 16)
        if not piece:
            raise ConnectionError("the connection was closed inside the answer")
        return piece


def text(seed, size):
    """English-like text of `size` bytes, with line breaks as JSON escapes."""
    chance = random.Random(seed)
    words = ("the of and to in is that for it as was with be by on not he this are or his from at which but have an had they you were "
             "their one all we can her has there been if more when will would who so no engine router cache prefix token prompt block").split()
    lines, length = [], 0
    while length < size:
        line = " ".join(chance.choice(words) for _ in range(14)).capitalize() + ".\\n"
        lines.append(line)
        length += len(line)
    return "".join(lines)[:size].rstrip("\\").encode()


def token_ids(seed, size):
    """A list of token ids of about `size` bytes, without brackets."""
    chance = random.Random(seed)
    return b",".join(b"%d" % chance.randrange(10000, 50000) for _ in range(max(size // 6, 1)))


class Form(typing.NamedTuple):
    """Requests of one kind. A prompt is a document, followed by a question."""
    path: bytes
    before: bytes
    after: bytes
    document: typing.Callable  # of a seed and a size in bytes
    question: bytes            # with two numbers


CHATS = Form(b"/v1/chat/completions", b'"messages":[{"role":"user","content":"', b'"}]}', text, b" Question %d of %d?")
IDS = Form(b"/v1/completions", b'"prompt":[', b"]}", token_ids, b",%d,%d")


def page(port, path):
    """Returns the body of a page."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def totals(router):
    """Returns the proxy's metrics of prompt tokens and of those that engines had cached."""
    found = {}
    for line in page(router.port, "/metrics").splitlines():
        name = line.split("{")[0]
        if name in ("moesaic_proxy_prompt_tokens_total", "moesaic_proxy_cached_tokens_total"):
            found[name] = found.get(name, 0) + float(line.split()[1])
    return found["moesaic_proxy_prompt_tokens_total"], found["moesaic_proxy_cached_tokens_total"]


def start_routers(engines, flags, folder):
    urls = [f"http://{HOST}:{port}" for port in engines]
    routers = []

    def add(name, command):
        port = next(word for word, before in zip(command[1:], command) if before == "--port")
        try:
            routers.append(Router(name, command, port, open(folder / f"{name}.log", "w")))
        except Refused as refused:
            print(f"{name} is left out: it refuses the requests ({refused})", flush=True)

    ours = [BINARY, "proxy", "--port", free_port(), "--workers", 2]
    for url in urls:
        ours += ["--engine", url]
    tokenizes = [*ours, "--model", ROOT / "models" / "moesaic-tiny", "--set", "token_cache 256m"]
    kv_aware = []
    if flags.kv_events:
        tokenizes += ["--api", "sglang"]
        for port, url in zip(engines, urls):
            state = json.loads(page(port, "/mock/state"))
            tokenizes[tokenizes.index(url)] = f"{url},kv_events={state['kv_events']},kv_replay={state['kv_replay']}"
            kv_aware += ["--kv-event-source", f"{url}={state['kv_events']}", "--kv-event-replay-source", f"{url}={state['kv_replay']}"]
    add("moesaic", tokenizes)
    ours[3] = free_port()
    add("moesaic, no tokenizer", ours)
    if flags.sglang:
        add("sglang-router", [flags.sglang, "-m", "sglang_router.launch_router", "--host", HOST, "--port", free_port(), "--worker-urls", *urls,
                              "--policy", "cache_aware", "--prometheus-port", free_port(), "--log-level", "warn"])
    if flags.vllm:
        def add_vllm(name, *policy):
            add(name, [flags.vllm, "--host", HOST, "--port", free_port(), "--worker-urls", *urls, "--policy", *policy,
                       "--prometheus-port", free_port(), "--log-level", "warning"])

        add_vllm("vllm-router", "cache_aware")
        if flags.kv_events:
            add_vllm("vllm-router, kv_aware", "kv_aware", *kv_aware, "--kv-event-block-size", BLOCK, "--kv-event-model", "mock")
    return routers


def tokens_per_byte(router):
    """Of a document, as the proxy counts."""
    before = totals(router)[0]
    status = Connection(router.port).send(Connection.form.document(99, 40000))
    if status != 200:
        sys.exit(f"{router.name}: status {status}")
    end = time.monotonic() + 10
    while totals(router)[0] == before:  # a worker process counts a request after it has answered
        if time.monotonic() > end:
            sys.exit(f"{router.name} does not count the tokens of prompts: see /metrics")
        time.sleep(0.01)
    return (totals(router)[0] - before) / 40000


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class NewDocuments:
    """A list of documents of `size` bytes; each access makes a new one."""
    seeds = itertools.count(1 << 20)

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return DOCUMENTS

    def __getitem__(self, _):
        return Connection.form.document(next(self.seeds), self.size)


def measure(port, documents, count, seed):
    """Returns the latencies of requests one after another, in seconds."""
    connection, times = Connection(port), []
    for i in range(count):
        prompt, question = documents[i % len(documents)], connection.form.question % (i, seed)
        begin = time.perf_counter()
        status = connection.send(prompt, question)
        times.append(time.perf_counter() - begin)
        if status != 200:
            sys.exit(f"port {port}: status {status}")
    return times


def with_large_bodies(port, documents, large, seconds):
    """Returns latencies of small requests while another client sends large ones, and the number of those."""
    stop, served = threading.Event(), []

    def send():
        connection, i = Connection(port), 0
        while not stop.is_set():
            connection.send(large, connection.form.question % (i, 0))
            i += 1
        served.append(i)
    sender = threading.Thread(target=send)
    sender.start()
    times, end, i = [], time.monotonic() + seconds, 0
    while time.monotonic() < end:
        times += measure(port, documents, 5, i)
        i += 1
    stop.set()
    sender.join()
    return times, served[0]


def sustain(ports, documents, count, seconds, router):
    """Sends requests on `count` connections, each after the answer to the one before. Returns a dictionary of the results.

    The connections take turns with the ports.
    """
    connections = [Connection(ports[number % len(ports)]) for number in range(count)]
    for connection in connections:  # a router may have several processes
        for text in documents:
            connection.send(text)
    times, faults = [[] for _ in range(count)], []
    start, end = time.monotonic(), time.monotonic() + seconds

    def send(number):
        try:
            i = 0
            while time.monotonic() < end:
                begin = time.perf_counter()
                question = Connection.form.question % (i, number)
                status = connections[number].send(documents[(number + i) % len(documents)], question)
                times[number].append(time.perf_counter() - begin)
                if status != 200:
                    raise ConnectionError(f"status {status}")
                i += 1
        except Exception as error:  # a malformed answer too
            faults.append(f"port {ports[number % len(ports)]}: {error!r}")
    threads = [threading.Thread(target=send, args=(number,)) for number in range(count)]
    before = router.cpu() if router else 0
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - start
    if faults:
        sys.exit(faults[0])
    latencies = [value for own in times for value in own]
    return {"rate": len(latencies) / took, "p50": percentile(latencies, 0.5) * 1e3, "p99": percentile(latencies, 0.99) * 1e3,
            "processors": (router.cpu() - before) / took if router else 0}


def sustain_all(ways, engines, documents, tokens, flags):
    """Lets the ways take turns, prints a table and returns its numbers. The direct way uses all engines, as the routers do."""
    rows = {name: [] for name, _, _ in ways}
    for turn in range(flags.rounds):
        for name, port, router in ways[turn % len(ways):] + ways[:turn % len(ways)]:
            rows[name].append(sustain([port] if router else engines, documents, flags.connections, flags.sustained_seconds, router))
    print(f"\n| {flags.connections} connections, {tokens} tokens | requests/s | p50, ms | p99, ms | processors |\n|---|---|---|---|---|")
    for name, results in rows.items():
        cells = [spread([result[key] for result in results]) for key in ("rate", "p50", "p99", "processors")]
        print(f"| {name} | {' | '.join(cells[:3])} | {'' if name == 'direct' else cells[3]} |", flush=True)
    return rows


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sglang", help="Python of an environment with sglang-router")
    parser.add_argument("--vllm", help="vllm-router of an environment")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="about the time of one router in one round")
    parser.add_argument("--large-seconds", type=float, default=3, help="time of each router with bodies of 8 MB; 0: leave it out")
    parser.add_argument("--kv-events", action="store_true", help="let the engines send KV events, and the proxy follow them")
    parser.add_argument("--ids", action="store_true", help="send completions with token ids in place of chats")
    parser.add_argument("--cold", action="store_true", help="send prompts that no request sent before")
    parser.add_argument("--connections", type=int, default=0, help="connections of the sustained load; 0: leave it out")
    parser.add_argument("--sustained-seconds", type=float, default=3, help="time of one router in one round of the sustained load")
    parser.add_argument("--json", help="file for all numbers")
    flags = parser.parse_args()
    if flags.cold and flags.connections > 0:
        parser.error("--connections takes cached prompts: leave out --cold")
    Connection.form = IDS if flags.ids else CHATS
    document = Connection.form.document
    folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-routers-"))
    engines, processes, results = [], [], {}
    routers = []
    try:
        events = ["--kv-events", f"tcp://{HOST}:*", "--kv-replay", f"tcp://{HOST}:*"] if flags.kv_events else []
        for _ in range(2):
            process = subprocess.Popen([BINARY, "mock-engine", "--host", HOST, "--port", "0", "--prefill-base-ms", "1", "--prefill-us", "0",
                                        "--pair-ns", "0", "--step-ms", "1", "--kv-token-ns", "0", "--blocks", "1000000", *events],
                                       stdout=subprocess.PIPE, text=True)
            processes.append(process)
            engines.append(int(process.stdout.readline().strip().rsplit(":", 1)[1]))
        routers = start_routers(engines, flags, folder)
        rate = tokens_per_byte(routers[0])
        ways = [("direct", engines[0], None)] + [(r.name, r.port, r) for r in routers]
        print(f"{rate:.3f} tokens per byte of {'ids' if flags.ids else 'text'}; {os.cpu_count()} processors"
              f"{'; new documents in each request' if flags.cold else ''}\n")
        print("| tokens | way | added p50, ms | added p99, ms | CPU s per 1,000 requests |\n|---|---|---|---|---|")
        for tokens in flags.tokens:
            size = int(tokens / rate)
            documents = NewDocuments(size) if flags.cold else [document(i, size) for i in range(DOCUMENTS)]
            for _, port, _ in ways:
                measure(port, documents, DOCUMENTS * WARM, 0)
            # New text takes the proxy with a tokenizer longer than an engine.
            once = statistics.median(measure(routers[0].port if flags.cold else engines[0], documents, 8, 1))
            count = max(20, min(400, int(flags.seconds / once / 2)))
            rows = {name: {"p50": [], "p99": [], "cpu": []} for name, _, _ in ways}
            for turn in range(flags.rounds):
                times = {}
                for name, port, router in ways[turn % len(ways):] + ways[:turn % len(ways)]:
                    before = router.cpu() if router else 0
                    times[name] = measure(port, documents, count, turn + 2)
                    if router:
                        rows[name]["cpu"].append((router.cpu() - before) / count * 1000)
                for name, values in times.items():
                    for key, share in (("p50", 0.5), ("p99", 0.99)):
                        base = 0 if name == "direct" else percentile(times["direct"], share)
                        rows[name][key].append((percentile(values, share) - base) * 1e3)
            results[tokens] = {"requests": count, "cold": flags.cold, **rows}
            for name, row in rows.items():
                label = "direct (not added)" if name == "direct" else name
                print(f"| {tokens} | {label} | {spread(row['p50'])} | {spread(row['p99'])} | {spread(row['cpu']) if row['cpu'] else ''} |", flush=True)
        if flags.connections > 0:
            results["sustained"] = sustain_all(ways, engines, [document(i, int(max(flags.tokens) / rate)) for i in range(DOCUMENTS)],
                                               max(flags.tokens), flags)
        if flags.kv_events:
            prompt, cached = totals(routers[0])
            states = [engine["index"] for engine in json.loads(page(routers[0].port, "/moesaic/state"))["engines"]]
            results["kv_events"] = {"prompt_tokens": prompt, "cached_tokens": cached, "index": states}
            print(f"\nKV events: index {' and '.join(states)}; {100 * cached / prompt:.1f}% of the prompt tokens were cached", flush=True)
        if flags.large_seconds > 0 and not flags.cold:
            small, large = [document(i, int(1000 / rate)) for i in range(DOCUMENTS)], document(7, 8 << 20)
            print("\n| 1,000 tokens beside bodies of 8 MB | p50, ms | p99, ms | largest, ms | large bodies |\n|---|---|---|---|---|")
            for name, port, _ in ways:
                Connection(port).send(large)
                times, served = with_large_bodies(port, small, large, flags.large_seconds)
                results[f"large {name}"] = {"times": times, "served": served}
                print(f"| {name} | {percentile(times, .5) * 1e3:.2f} | {percentile(times, .99) * 1e3:.2f} | {max(times) * 1e3:.2f} | {served} |", flush=True)
    finally:
        for router in routers:
            router.stop()
        for process in processes:
            process.kill()
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
