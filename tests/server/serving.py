"""Starts `moesaic serve` for tests and sends plain HTTP to it. Uses the standard library only.

Tests must not depend on the speed of the machine:
- Server.holding keeps a request running while a test inspects the server. The test tries again if the request ended first.
- until() waits for an event. It fails only after a time that no machine needs.
"""
import atexit
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

BINARY = pathlib.Path(os.environ.get("MOESAIC_BINARY", "build/release/bin/moesaic")).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "moesaic-tiny"
sys.path.insert(0, str(ROOT / "tests" / "support"))
from patience import patient  # noqa: E402

START_SECONDS = patient(60)
ANSWER_SECONDS = patient(120)
WAIT_SECONDS = patient(120)


def wire(path, body, headers=b""):
    """Returns the bytes of a POST request."""
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n" % (
        path.encode(), headers, len(body)) + body


def until(condition, seconds=WAIT_SECONDS):
    """Waits until `condition()` holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("waited in vain")
        time.sleep(0.01)


class KeyFile:
    """Writes a key file and returns the flags that name it."""

    def __init__(self, text):
        self.folder = tempfile.TemporaryDirectory()
        atexit.register(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name) / "keys"
        self.write(text)

    def write(self, text):
        self.path.write_text(text)
        os.chmod(self.path, 0o600)

    @property
    def flags(self):
        return "--api-key-file", self.path


class Server:
    """A running server."""

    def __init__(self, *flags, environment=None, port=0, model=MODEL, access_log=False):
        self.stderr = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [str(BINARY), "serve", str(model), "--port", str(port), *([] if access_log else ["--no-access-log"]),
             *map(str, flags)],
            stdout=subprocess.PIPE, stderr=self.stderr, text=True,
            env={"MOESAIC_SEED": "1", **os.environ, **(environment or {})})  # makes unseeded requests repeatable
        atexit.register(self.process.kill)  # kills the server of a test that fails
        line = self.process.stdout.readline()
        found = re.match(r"listening on (https?)://(.+):(\d+)$", line.strip())
        if not found:
            self.process.wait(timeout=START_SECONDS)
            raise AssertionError(f"no address from the server: {line!r}\n{self.read_log()}")
        self.host, self.port = found[2], int(found[3])
        self.url = f"{found[1]}://{self.host}:{self.port}"
        self.tls = None  # an ssl.SSLContext if request() must use https

    def read_log(self):
        if self.stderr.closed:
            return self.log
        # The server writes at the offset that both processes share, which must not change.
        return os.pread(self.stderr.fileno(), os.fstat(self.stderr.fileno()).st_size, 0).decode(errors="replace")

    def request(self, method, path, body=None, headers=None, timeout=ANSWER_SECONDS):
        """Returns (status, headers, bytes). `body` is bytes, or a value that becomes JSON."""
        if self.tls:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=self.tls)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            headers = dict(headers or {})
            if body is not None and "content-type" not in map(str.lower, headers):
                headers["content-type"] = "application/json"
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def json(self, method, path, body=None, headers=None):
        status, _, text = self.request(method, path, body, headers)
        return status, json.loads(text)

    def metrics(self):
        """Returns {name{labels}: value}."""
        text = self.request("GET", "/metrics")[2].decode()
        return {name: float(value) for name, value in re.findall(r"^([^#\s]+) (\S+)$", text, re.M)}

    def metric(self, name):
        """Returns the sum over a metric's label sets."""
        return sum(value for key, value in self.metrics().items() if re.match(re.escape(name) + r"(\{|$)", key))

    def aborted(self):
        """Returns the number of cancelled choices."""
        return sum(value for key, value in self.metrics().items()
                   if key.startswith("vllm:request_success_total{") and 'finished_reason="abort"' in key)

    @contextlib.contextmanager
    def holding(self, stream=True):
        """Keeps a request of half a million tokens, the maximum, running during the block. Yields the client's socket and
        closes it after the block. A fast machine may end the request earlier, so that tests try again by `until`."""
        body = json.dumps(chat("Tell me a story.", n=128, max_tokens=4000, ignore_eos=True, stream=stream)).encode()
        ended = self.metric("vllm:request_success_total")
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(socket.create_connection((self.host, self.port), timeout=ANSWER_SECONDS))
            if self.tls:
                client = stack.enter_context(self.tls.wrap_socket(client, server_hostname=self.host))
            client.sendall(wire("/v1/chat/completions", body))
            until(lambda: self.metric("vllm:num_requests_running") > 0 or self.metric("vllm:request_success_total") > ended)
            yield client

    def wait_until_quiet(self, seconds=WAIT_SECONDS):
        """Waits until no request runs, waits, or holds a block."""
        end = time.monotonic() + seconds
        while True:
            busy = {name: self.metric(name) for name in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                                                         "vllm:kv_cache_usage_perc")}
            if not any(busy.values()):
                return
            if time.monotonic() > end:
                raise AssertionError(f"still busy: {busy}")
            time.sleep(0.05)

    def stop(self, how=signal.SIGTERM, seconds=WAIT_SECONDS):
        """Stops the server and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(timeout=seconds)
        self.process.stdout.close()
        self.log = self.read_log()
        self.stderr.close()
        return code


@contextlib.contextmanager
def model_with(name, content):
    """Makes a folder of moesaic-tiny in which the JSON file `name` has another content."""
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        for file in MODEL.iterdir():
            if file.name != name:
                (folder / file.name).symlink_to(file)
        (folder / name).write_text(json.dumps(content))
        yield folder


@contextlib.contextmanager
def serving(*flags, **options):
    """Runs a server for a block. The server must stop without an error after it."""
    server = Server(*flags, **options)
    try:
        yield server
    except BaseException:
        server.stop(signal.SIGKILL)
        print(server.read_log())
        raise
    code = server.stop()
    if code != 0:
        raise AssertionError(f"the server ended with {code}\n{server.read_log()}")


class ServingCase(unittest.TestCase):
    """Tests of one class that share a server."""

    FLAGS = ()

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.FLAGS)
        cls.addClassCleanup(cls.stop_server)

    @classmethod
    def stop_server(cls):
        code = cls.server.stop()
        assert code == 0, cls.server.read_log()


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}
