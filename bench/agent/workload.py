"""Generates workloads of agents as calls with token ids, their order, and the pauses between them.

A workload is a list of sessions. A session is a list of calls that one client sends one after another.
"""
import dataclasses
import gzip
import json
import random
import tarfile

BLOCK = 64  # tokens; prefixes are shared in whole blocks
FIRST_ID = 300  # below lie bytes and special tokens of most vocabularies


@dataclasses.dataclass
class Call:
    prompt: list  # token ids
    max_tokens: int
    at: float = 0.0  # earliest time of sending, in seconds after the start


def _tokens(stream, count, vocabulary):
    return [stream.randrange(FIRST_ID, vocabulary) for _ in range(count)]


def agent(vocabulary, sessions=16, system=4096, first=8192, last=18432, turns=10, output=128, keep=0.4, seed=1):
    """Tool-using agents: one system prompt of all, then `turns` calls whose context grows from `first` to `last` tokens.

    Results of tools are new each turn. An agent also edits its history (drops old results, updates a plan): with
    probability 1 - keep a turn rewrites what follows a random point of it. keep = 0.4 gives about 70% of prompt tokens
    that were sent before.
    """
    common = _tokens(random.Random(seed), system, vocabulary)
    growth = (last - first) // max(1, turns - 1)
    result = []
    for number in range(sessions):
        stream = random.Random(f"{seed}/{number}")
        prompt = common + _tokens(stream, first - system, vocabulary)
        calls = []
        for turn in range(turns):
            if turn:
                if stream.random() > keep:
                    cut = stream.randrange(system, len(prompt))
                    prompt = prompt[:cut] + _tokens(stream, len(prompt) - cut, vocabulary)
                prompt = prompt + _tokens(stream, growth, vocabulary)
            calls.append(Call(prompt, output))
        result.append(calls)
    return result


def streams(vocabulary, sessions, prompt, output, seed=1):
    """Independent calls without common prefixes."""
    stream = random.Random(seed)
    return [[Call(_tokens(stream, prompt, vocabulary), output)] for _ in range(sessions)]


def reuse(vocabulary, pairs, length, share, output, seed=1):
    """One client that alternates between a new prompt and one that begins with `share` of the previous prompt's tokens."""
    stream, calls = random.Random(seed), []
    for _ in range(pairs):
        cold = _tokens(stream, length, vocabulary)
        kept = int(length * share)
        calls += [Call(cold, output), Call(cold[:kept] + _tokens(stream, length - kept, vocabulary), output)]
    return [calls]


def mooncake(path, vocabulary, requests=400, scale=8, speedup=1.0, longest=None):
    """Reads the Mooncake trace: timed requests, each in its own session; equal hash ids are equal tokens.

    `scale` divides lengths: a block of 512 tokens becomes one of 512 / scale. Requests longer than `longest` tokens
    (after scaling, output included) are skipped.
    """
    block = 512 // scale
    result = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            length = max(1, entry["input_length"] // scale)
            output = max(1, entry["output_length"] // scale)
            if longest and length + output > longest:
                continue
            prompt = []
            for identifier in entry["hash_ids"]:
                prompt += _tokens(random.Random(identifier), block, vocabulary)
            result.append([Call(prompt[:length], output, entry["timestamp"] / 1000 / speedup)])
            if len(result) == requests:
                break
    return result


def swe_agent(path, tokenize, output=64, longest=None):
    """Reads recorded SWE-agent runs: one call for each assistant message, with all text before it as the prompt."""
    result = []
    with tarfile.open(path) as archive:
        for member in sorted(archive.getnames()):
            if not member.endswith(".traj"):
                continue
            history = json.load(archive.extractfile(member))["history"]
            calls, prompt = [], []
            for message in history:
                if message["role"] == "assistant" and prompt and not (longest and len(prompt) + output > longest):
                    calls.append(Call(list(prompt), output))
                prompt = prompt + tokenize(f"<|{message['role']}|>\n{message['content']}\n")
            if calls:
                result.append(calls)
    return result


def in_order(sessions):
    """Interleaves the calls of all sessions, as concurrent clients send them."""
    longest = max(len(session) for session in sessions)
    order = [session[turn] for turn in range(longest) for session in sessions if turn < len(session)]
    return sorted(order, key=lambda call: call.at)


def block_names(sessions):
    """Returns, for each call, ids of its prompt's complete blocks; equal ids are equal blocks with equal prefixes."""
    names = {}
    for call in in_order(sessions):
        blocks, parent = [], None
        for start in range(0, len(call.prompt) - BLOCK + 1, BLOCK):
            parent = names.setdefault((parent, tuple(call.prompt[start : start + BLOCK])), len(names))
            blocks.append(parent)
        yield blocks


def reusable(sessions):
    """Returns (prompt tokens, tokens in complete blocks that an earlier call of any session sent): the ceiling of any
    cache."""
    seen, total, hits = set(), 0, 0
    for call in in_order(sessions):
        total += len(call.prompt)
        parent, matching = 0, True
        for start in range(0, len(call.prompt) - BLOCK + 1, BLOCK):
            parent = hash((parent, tuple(call.prompt[start : start + BLOCK])))
            matching = matching and parent in seen
            hits += BLOCK * matching
            seen.add(parent)
    return total, hits
