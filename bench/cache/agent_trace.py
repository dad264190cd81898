#!/usr/bin/env python3
"""Converts recorded agent runs (SWE-agent's .traj files in a tar archive) to a trace for cache_trace_sim.

Usage: agent_trace.py ARCHIVE.tar.gz [SEED] > trace.jsonl

Each answer of the agent is one request with all text before it. Eight users replay every run with random starts and
pauses (SEED, default 1). Each has a different name after the shared system prompt and demonstration. A block has 256
characters, about 64 tokens; equal blocks with equal prefixes have equal names.
"""
import json
import random
import sys
import tarfile

BLOCK_CHARACTERS = 256
USERS = 8
START_WITHIN_S = 3000
MEAN_PAUSE_S = 22


def runs(path):
    """Returns (full text, its length before each answer) of each run."""
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.name.endswith(".traj"):
                continue
            said, asked = "", []
            for message in json.load(archive.extractfile(member))["history"]:
                if message["role"] == "assistant":
                    asked.append(len(said))
                said += f"{message['role']}:{message.get('content') or ''}\n"
            if asked:
                yield said, asked


def main():
    random.seed(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    recorded = list(runs(sys.argv[1]))
    requests = []
    for user in range(USERS):
        for number, (said, asked) in enumerate(recorded):
            name = f"[user {user} run {number}]"
            shared = max(0, asked[0] - 300)
            text = said[:shared] + name + said[shared:]
            now = random.uniform(0, START_WITHIN_S)
            for length in asked:
                requests.append((now, text[:length + len(name)]))
                now += 2 + random.expovariate(1 / (MEAN_PAUSE_S - 2))
    names = {}
    for _, text in sorted(requests):
        ids, before = [], None
        for at in range(0, len(text) - BLOCK_CHARACTERS + 1, BLOCK_CHARACTERS):
            before = names.setdefault((before, text[at:at + BLOCK_CHARACTERS]), len(names))
            ids.append(before)
        if ids:
            print(json.dumps({"hash_ids": ids}))


if __name__ == "__main__":
    main()
