"""Starts mock engines and nginx with the proxy module for tests. Uses the standard library only.

Every test process has a loopback address of its own, so that its ports are free.
"""
import atexit
import contextlib
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
import threading
import time
import unittest

BINARY = pathlib.Path(os.environ.get("MOESAIC_BINARY", "build/release/bin/moesaic")).resolve()
MODULE = pathlib.Path(os.environ.get("MOESAIC_NGINX_MODULE", BINARY.parent / "ngx_http_moesaic_module.so")).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "moesaic-tiny"
sys.path.insert(0, str(ROOT / "tests" / "support"))
from find_program import find_program  # noqa: E402
from patience import patient  # noqa: E402

SKIPPED = 77
WAIT_SECONDS = patient(60)
HOST = f"127.{64 + (os.getpid() >> 16) % 64}.{os.getpid() >> 8 & 255}.{os.getpid() & 255 or 1}"
FAST = ["--prefill-base-ms", "1", "--prefill-us", "2", "--step-ms", "2", "--pair-ns", "0", "--kv-token-ns", "0"]
STAGES = ["received", "tokenized", "prefix_matched", "prefill_waiting", "prefill_scheduled", "prefill_running", "decode_waiting",
          "decode_scheduled", "decode_running", "done"]


def find_nginx():
    return find_program("nginx")


def has_ipv6():
    with contextlib.suppress(OSError):
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        return True
    return False


def main():
    """Runs the tests of the calling script, or prints why they cannot run."""
    for there, reason in ((find_nginx(), "nginx cannot be found: install the package, as ./run test does"),
                          (MODULE.exists(), f"{MODULE.name} is not built: install nginx-dev and run cmake again")):
        if not there:
            print(f"SKIPPED: {reason}")
            sys.exit(SKIPPED)
    unittest.main()


def until(condition, seconds=WAIT_SECONDS, what=lambda: ""):
    """Waits until `condition()` is true and returns its value."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited in vain: {what()}")
        time.sleep(0.01)


def tokens(seed, count):
    return [(seed * 7919 + i * 31) % 50000 for i in range(count)]


def request(host, port, method, path, body=None, headers=None, timeout=WAIT_SECONDS):
    """Returns (status, headers, bytes)."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection.request(method, path, body, {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


class Mock:
    """A mock engine in a process of its own."""

    def __init__(self, *flags, port=0, fast=True, host=HOST):
        self.flags, self.fast, self.host = flags, fast, host
        self.start(port)

    def start(self, port):
        self.process = subprocess.Popen([str(BINARY), "mock-engine", "--host", self.host, "--port", str(port),
                                         *self.fast_flags(), *map(str, self.flags)],
                                        stdout=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)
        line = self.process.stdout.readline()
        self.port = int(re.search(r":(\d+)$", line.strip())[1])
        self.url = f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def fast_flags(self):
        pairs = zip(FAST[::2], FAST[1::2])
        return [word for pair in pairs if self.fast and pair[0] not in self.flags for word in pair]

    def restart(self):
        self.kill()
        self.start(self.port)

    def get(self, path):
        return json.loads(request(self.host, self.port, "GET", path)[2])

    def state(self):
        return self.get("/mock/state")

    def requests(self):
        """Returns (path, headers, body) of the requests it got."""
        return [(r["path"], {k.lower(): v for k, v in r["headers"].items()}, json.loads(r["body"]))
                for r in self.get("/mock/requests")]

    def faults(self, **faults):
        request(self.host, self.port, "POST", "/mock/faults", faults)

    def reset(self, restart=False):
        request(self.host, self.port, "POST", "/mock/reset", {"restart": restart})

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT_SECONDS)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(WAIT_SECONDS)
        self.process.stdout.close()


class Daemon:
    """A process that left its parent, with the interface of Popen. `old`: the process that its file named before."""

    def __init__(self, pid_file, old=None):
        self.pid_file = pid_file
        self.pid = until(lambda: pid if (pid := self.read_pid()) != old else None, what=lambda: "the pid file")

    def read_pid(self):
        with contextlib.suppress(FileNotFoundError):
            text = self.pid_file.read_text()
            return int(text) if text.endswith("\n") else None
        return None

    def send_signal(self, number):
        os.kill(self.pid, number)

    def poll(self):
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        stat = pathlib.Path(f"/proc/{self.pid}/stat")  # a zombie has ended too
        return 0 if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z" else None

    def wait(self, seconds):
        until(lambda: self.poll() is not None, seconds)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)


class Proxy:
    """nginx with one pool. `pool` is the text of its block, in which @PORT@ is the port of nginx; `server` and `http` are
    directives of these blocks."""

    def __init__(self, pool, workers=2, server="", daemon=False, http=""):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-proxy-"))
        self.workers_wanted, self.server, self.daemon, self.http = workers, server, daemon, http
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        self.log_path = self.folder / "error.log"
        self.write(pool)
        command = [find_nginx(), "-p", str(self.folder), "-c", str(self.folder / "nginx.conf"), "-e", str(self.log_path)]
        checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
        if checked.returncode != 0:
            shutil.rmtree(self.folder)
            raise ValueError(checked.stderr)
        if daemon:
            subprocess.run(command, check=True)
        self.process = Daemon(self.folder / "pid") if daemon else subprocess.Popen(command)
        atexit.register(self.process.kill)
        # A signal that arrives before nginx has started its workers waits for the next signal.
        until(lambda: self.listens() and self.workers() or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise AssertionError(self.log())

    def write(self, pool):
        temporary = "\n".join(f"{kind}_temp_path {self.folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        user = "user root;" if os.geteuid() == 0 else ""
        (self.folder / "nginx.conf").write_text(f"""load_module {MODULE};
{user} daemon {'on' if self.daemon else 'off'}; worker_processes {self.workers_wanted}; pid {self.folder}/pid; error_log {self.log_path} info;
thread_pool default threads=2 max_queue=65536;
events {{ worker_connections 2048; }}
http {{ log_format stages '$status $moesaic_outcome $moesaic_received $moesaic_tokenized $moesaic_prefix_matched '
  '$moesaic_prefill_waiting $moesaic_prefill_scheduled $moesaic_prefill_running $moesaic_decode_waiting '
  '$moesaic_decode_scheduled $moesaic_decode_running $moesaic_done $moesaic_prompt_tokens $moesaic_cached_tokens '
  '$moesaic_output_tokens $moesaic_prefill_engine $moesaic_decode_engine $moesaic_matched_tokens';
  access_log {self.folder}/access.log stages; client_max_body_size 64m; client_body_buffer_size 64k;
{temporary} {self.http}
  moesaic_pool pool {{ zone 32m; {pool.replace("@PORT@", str(self.port))} }}
  server {{ listen {HOST}:{self.port} backlog=1024;
    location / {{ moesaic_pass pool; }} location = /metrics {{ moesaic_metrics pool; }} location = /moesaic {{ moesaic_page pool; }}
    location = /v1/metaserver {{ moesaic_metaserver pool; }} location = /engines {{ moesaic_engines pool; }} {self.server} }} }}
""")

    def listens(self):
        with contextlib.suppress(OSError):
            socket.create_connection((HOST, self.port), timeout=WAIT_SECONDS).close()
            return True
        return False

    def log(self):
        return self.log_path.read_text()

    def access(self, count):
        """Returns the fields of the access log's lines, without those of pages, once there are `count` of them: nginx
        writes a line after it has answered and freed the request."""
        def fields():
            lines = (self.folder / "access.log").read_text().splitlines()
            return [line.split() for line in lines if line.split()[1] != "-"]

        until(lambda: len(fields()) >= count, what=fields)
        return fields()

    def request(self, method, path, body=None, headers=None):
        return request(HOST, self.port, method, path, body, headers)

    def complete(self, headers=None, **body):
        """Returns the status and the JSON of a completion."""
        status, _, text = self.request("POST", "/v1/completions", {"model": "mock", **body}, headers)
        return status, json.loads(text)

    @contextlib.contextmanager
    def streaming(self, headers=None, path="/v1/completions", port=None, **body):
        """Yields the answer to a streaming request, to another server of this address with `port`."""
        connection = http.client.HTTPConnection(HOST, port or self.port, timeout=WAIT_SECONDS)
        try:
            connection.request("POST", path, json.dumps({"model": "mock", "stream": True, **body}), headers or {})
            yield connection.getresponse()
        finally:
            connection.close()

    def state(self):
        return json.loads(self.request("GET", "/moesaic?check")[2])

    def control(self, verb, url):
        """Drains or resumes an engine. Returns the status and the JSON of the answer."""
        status, _, text = self.request("POST", f"/engines?{verb}={url}")
        return status, json.loads(text)

    def metrics(self):
        text = self.request("GET", "/metrics")[2].decode()
        return {name: float(value) for name, value in re.findall(r"^([^#\s]+) (\S+)$", text, re.M)}

    def metric(self, name):
        return sum(value for key, value in self.metrics().items() if re.match(re.escape(name) + r"(\{|$)", key))

    def idle(self):
        """Waits until no request is left, and returns the state, in which all counters are zero."""
        def quiet():
            state = self.state()
            return state if state["slots_used"] == 0 else None
        state = until(quiet, what=self.state)
        assert state["invariants"] == "ok", state["invariants"]
        assert state["keys_used"] == 0, state
        assert all(stage["now"] == 0 for stage in state["stages"]), state
        for engine in state["engines"]:
            for counter in ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens", "kv_blocks", "references"):
                assert engine[counter] == 0, (counter, engine)
        return state

    def workers(self, process=None, exiting=False):
        """Returns the pids of the worker processes of the master, or of another one; those that exit only if wanted."""
        out = subprocess.run(["ps", "-o", "pid=,stat=,args=", "--ppid", str((process or self.process).pid)],
                             capture_output=True, text=True).stdout
        return [int(line.split()[0]) for line in out.splitlines()
                if "worker process" in line and (exiting or "shutting down" not in line) and line.split()[1][0] != "Z"]

    def upgrade(self):
        """Starts another master, as for a new binary. It is that of the proxy from now on; returns the old one."""
        old = self.process
        old.send_signal(signal.SIGUSR2)
        self.process = Daemon(old.pid_file, old=old.pid)
        atexit.register(self.process.kill)
        until(lambda: len(self.workers()) == self.workers_wanted, what=self.log)
        return old

    def reload(self, pool):
        old = set(self.workers())
        self.write(pool)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: len(set(self.workers()) - old) >= self.workers_wanted, what=self.log)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(WAIT_SECONDS)
        log = self.log()
        shutil.rmtree(self.folder, ignore_errors=True)
        return log


class ProxyTest(unittest.TestCase):
    """Stops what a test starts, and fails if a worker crashed."""

    def setUp(self):
        self.killed = False  # the test kills workers itself

    def mock(self, *flags, **options):
        mock = Mock(*flags, **options)
        self.addCleanup(mock.stop)
        return mock

    def endpoint(self, name):
        """A ZeroMQ endpoint of its own for this test."""
        folder = tempfile.mkdtemp(prefix="moesaic-events-")
        self.addCleanup(shutil.rmtree, folder)
        return f"ipc://{folder}/{name}"

    def proxy(self, pool, **options):
        proxy = Proxy(pool, **options)

        def stop():
            log = proxy.stop()
            # nginx kills workers that have not ended a second after it was asked to end, as on a busy machine.
            asked = log.find("signal 15 (SIGTERM) received")
            signals = [found[1] for found in re.finditer(r"exited on signal (\d+)", log)
                       if found[1] != "9" or not self.killed and not found.start() > asked >= 0]
            self.assertEqual(signals, [], log)
            self.assertNotIn("[emerg]", log)
        self.addCleanup(stop)
        return proxy


def together(count, call):
    """Runs call(i) in `count` threads and returns the results; raises the first exception."""
    results, errors = [None] * count, []

    def run(i):
        try:
            results[i] = call(i)
        except Exception as error:  # reported below
            errors.append(error)
    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def attempt(call):
    """Returns call(), or None if its connection or its answer was cut: the worker was killed or stopped."""
    with contextlib.suppress(OSError, http.client.HTTPException, json.JSONDecodeError):
        return call()
    return None


def raw(port, body, headers=""):
    """Sends a completion and returns the connected socket."""
    text = json.dumps(body).encode()
    client = socket.create_connection((HOST, port), timeout=WAIT_SECONDS)
    client.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(text)}\r\n\r\n".encode() + text)
    return client


def pair(test, transfer, directives="", prefill_us=20, **options):
    """Returns P, D and a proxy in front of both, with `options` of the proxy."""
    prefill = test.mock("--transfer", transfer, "--role", "prefill", "--prefill-us", prefill_us)
    decode = test.mock("--transfer", transfer, "--role", "decode", "--step-ms", "5")
    proxy = test.proxy(f"transfer {transfer}; api {'sglang' if transfer == 'sglang' else 'vllm'}; skip_prefill 16;"
                       f"metaserver http://{HOST}:@PORT@/v1/metaserver; {directives}"
                       f"engine {prefill.url} role=prefill bootstrap_port={prefill.port} max_requests=4;"
                       f"engine {decode.url} role=decode max_requests=4;", **options)
    return prefill, decode, proxy
