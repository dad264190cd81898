"""The sides of bench/peers/shapes.py: commands, candidate flags, and parsers of their output.

Each work of a side is a method of the same name that runs one or a few processes and returns speeds by test:
{"pp512": 1234.5} in tokens a second, and for START in seconds.
"""
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time

# Run-time formats of a file's weights here; peers use the stored format.
DTYPES = {"q8_0": "auto", "q4_0": "auto", "q4_k": "auto", "bf16": "bf16"}
# Dot products that define the peak.
PEAKS = {"q8_0": "int8", "q4_0": "int8", "q4_k": "int8", "bf16": "bf16"}
START = "start to first token"
PROMPT = "a tone in the rain"  # of a few tokens, in the files' made-up vocabulary
BATCHED_PROMPT, BATCHED_TOKENS = 128, 32
CHUNK = 512  # tokens of the prefill that is measured at a depth


def run(command):
    """Returns (stdout, stderr). Runs in the temporary folder, because some programs write logs there."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace",
                          cwd=tempfile.gettempdir())
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}\nexit code {done.returncode}")
    return done.stdout, done.stderr


def seconds_to_output(command):
    """Returns the time from before the process starts to the first byte on stdout."""
    start = time.perf_counter()
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          cwd=tempfile.gettempdir()) as process:
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if not first or process.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nno output, exit code {process.returncode}")
    return seconds


def read(path):
    """Reads a file into the page cache."""
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass


def at_depth(test, depth):
    return f"{test} @ d{depth}" if depth else test


def comma(numbers):
    return ",".join(map(str, numbers))


class Moesaic:
    name = "Moesaic"
    # Candidate flags by work; "" is the default. Other works run with defaults.
    candidates = {"start": ["--mmap on", ""]}

    def __init__(self, binary, options):
        self.binary, self.options = binary, options
        self.shares = collections.defaultdict(list)  # by test: of the read bandwidth (decode) or dot peak (prefill)
        self.peak = None  # operations per second of the fastest dot product that runs

    def find_peak(self, kind, threads):
        text, _ = run([self.binary, "doctor"])
        found = re.search(rf"^{PEAKS[kind]} dot products.*?([\d.]+) GOP/s(?: +([\d.]+) GOP/s)?", text, re.M)
        rates = {1: found.group(1), os.cpu_count(): found.group(2) or found.group(1)} if found else {}
        self.peak = float(rates[threads]) * 1e9 if threads in rates else None

    def packed(self, job):
        """Returns the file packed by this binary, so that the rounds do not pack it."""
        path = job.file.with_suffix(f".{job.dtype}.moesaic")
        if not path.exists() or path.stat().st_mtime < self.binary.stat().st_mtime:
            run([self.binary, "convert", job.file, "--dtype", job.dtype, "--out", path, "--force"])
        return path

    def bench(self, job, flags, more):
        command = [self.binary, "bench", self.packed(job), "--mmap", "off", "-t", job.threads, "-r", "1", "-o", "json"]
        return json.loads(run(command + more + flags.split())[0])

    def speeds(self, lines):
        for line in lines:
            if line["generate"] > 0:
                self.shares[line["test"]].append(line["bandwidth_share"])
            elif self.peak:  # two operations a weight; the head, a tenth of them, runs for the last token only
                operations = 2 * line["active_parameters"] * line["tokens_per_s"]
                self.shares[line["test"]].append(operations / self.peak)
        return {line["test"]: line["tokens_per_s"] for line in lines}

    def plain(self, job, flags):
        self.find_peak(job.kind, job.threads)
        more = ["-p", comma(self.options.prompts), "-n", self.options.decode]
        return self.speeds(self.bench(job, flags, more))

    def deep(self, job, flags, depth):
        return self.speeds(self.bench(job, flags, ["-p", CHUNK, "-n", self.options.decode, "-d", depth]))

    def batched(self, job, flags):
        lines = self.bench(job, flags, ["-p", "0", "-n", BATCHED_TOKENS, "-d", BATCHED_PROMPT,
                                        "-s", comma(self.options.batches)])
        return {f"tg{BATCHED_TOKENS} x {line['sequences']}": line["tokens_per_s"] for line in lines}

    def start(self, job, flags):
        packed = self.packed(job)
        read(packed)
        return {START: seconds_to_output([self.binary, "generate", packed, "--threads", job.threads, "-n", "1",
                                          "--temperature", "0", "--keep-special", "--prompt", PROMPT, *flags.split()])}


class Peer:
    """Common base of llama.cpp and its fork ik_llama.cpp. `folder` holds their binaries."""

    completion = "llama-completion"
    start_flags = ()

    def __init__(self, folder, options):
        self.folder, self.options = folder, options

    def call(self, program, job, flags, more):
        return run([self.folder / program, "-m", job.file, "-t", job.threads, *more, *flags.split()])

    def lines(self, outputs):
        return [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith('{"')]

    def bench(self, job, flags, more):
        lines = json.loads(self.call("llama-bench", job, flags, ["-r", "1", "-o", "json", *more])[0])
        return {at_depth(f"pp{line['n_prompt']}" if line["n_prompt"] else f"tg{line['n_gen']}",
                         line.get("n_depth", 0)): line["avg_ts"] for line in lines}

    def plain(self, job, flags):
        return self.bench(job, flags, ["-p", comma(self.options.prompts), "-n", self.options.decode])

    def start(self, job, flags):
        read(job.file)
        return {START: seconds_to_output([self.folder / self.completion, "-m", job.file, "-t", job.threads, "-n", "1",
                                          "-c", "512", "--temp", "0", "--no-warmup", "--no-display-prompt",
                                          *self.start_flags, "-p", PROMPT, *flags.split()])}


class LlamaCpp(Peer):
    name = "llama.cpp"
    candidates = {
        "plain": ["-fa 1", "-fa 0", "-fa 1 -ub 2048"],
        "deep": ["-fa 1", "-fa 0"],
        "batched": ["-fa on", "-fa off", "-fa on -kvu"],
        "start": ["--no-repack", ""],
    }
    start_flags = ("-no-cnv",)

    def deep(self, job, flags, depth):
        return self.bench(job, flags, ["-p", CHUNK, "-n", self.options.decode, "-d", depth])

    def batched(self, job, flags):
        context = max(self.options.batches) * (BATCHED_PROMPT + BATCHED_TOKENS)
        lines = self.lines(self.call("llama-batched-bench", job, flags, [
            "-c", context, "-npp", BATCHED_PROMPT, "-ntg", BATCHED_TOKENS, "-npl", comma(self.options.batches),
            "--output-format", "jsonl"]))
        return {f"tg{BATCHED_TOKENS} x {line['pl']}": line["speed_tg"] for line in lines}


class IkLlamaCpp(Peer):
    name = "ik_llama.cpp"
    completion = "llama-cli"
    candidates = {
        "plain": ["-fa 1 -fmoe 1 -rtr 1", "-fa 1 -fmoe 1 -rtr 0", "-fa 0 -fmoe 1 -rtr 1",
                  "-fa 1 -fmoe 1 -rtr 1 -ub 2048"],
        "deep": ["-fa on -rtr", "-fa off -rtr", "-fa on"],
        "batched": ["-fa on -rtr", "-fa on", "-fa off -rtr"],
        "start": ["-fa on"],
    }

    def deep(self, job, flags, depth):
        """Runs llama-sweep-bench in steps of CHUNK; the last one begins at `depth`."""
        lines = self.lines(self.call("llama-sweep-bench", job, flags, [
            "-c", depth + CHUNK, "-ub", CHUNK, "-n", self.options.decode, "--sweep-stride", depth // CHUNK,
            "--output-format", "jsonl"]))
        (line,) = [line for line in lines if line["n_kv"] == depth]
        return {at_depth(f"pp{CHUNK}", depth): line["speed_pp"],
                at_depth(f"tg{self.options.decode}", depth): line["speed_tg"]}

    def batched(self, job, flags):
        """Parses the table of its llama-batched-bench."""
        context = max(self.options.batches) * (BATCHED_PROMPT + BATCHED_TOKENS)
        outputs = self.call("llama-batched-bench", job, flags, [
            "-c", context, "-npp", BATCHED_PROMPT, "-ntg", BATCHED_TOKENS, "-npl", comma(self.options.batches)])
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for text in outputs for line in text.splitlines()
                if re.match(r"\| +\d", line)]
        return {f"tg{BATCHED_TOKENS} x {row[2]}": float(row[7]) for row in rows}
