"""The shipped models answer: moesaic-tiny its held-out prompts, moesaic-smol everyday questions."""
import collections
import json
import os
import subprocess
import unittest

from moesaic_cli import BINARY, ROOT

TINY = ROOT / "models" / "moesaic-tiny"
SMOL = ROOT / "models" / "moesaic-smol" / "build" / "moesaic-smol.moesaic"

# Question, and words of which the answer must hold at least one.
EVERYDAY = [
    ("What is the capital of France?", ["Paris"]),
    ("What is 7 + 5?", ["12"]),
    ("What color is the sky on a clear day?", ["blue"]),
    ("Name three fruits.", ["apple", "banana", "orange"]),
    ("What do plants need to grow?", ["water", "sunlight", "light"]),
    ("How many days are in a week?", ["seven", "7"]),
    ("Which planet do we live on?", ["Earth"]),
    ("What is the opposite of hot?", ["cold"]),
    ("Write a short greeting for a friend.", ["hello", "hi", "hey", "dear"]),
    ("What do bees make?", ["honey"]),
]


def generate(model, lines, *flags):
    """Answers one JSON line each, greedy, all in one batch."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    command = [str(BINARY), "generate", str(model), "--jsonl", "-", "--format", "jsonl", "--temperature", "0", *flags]
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=900)
    if result.returncode != 0:
        raise AssertionError(f"{command}: exit {result.returncode}\n{result.stderr}")
    return [json.loads(line)["text"].strip() for line in result.stdout.splitlines()]


class Tiny(unittest.TestCase):
    def test_held_out_prompts(self):
        rows = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text().splitlines()]
        answers = generate(TINY, rows, "--max-tokens", "700")
        wrong = collections.Counter(r["category"] for r, a in zip(rows, answers) if a != r["expected"].strip())
        exact = 1 - sum(wrong.values()) / len(rows)
        print(f"moesaic-tiny: {exact:.1%} of {len(rows)} held-out prompts exact; wrong: {dict(wrong)}")
        self.assertGreaterEqual(exact, 0.95)


@unittest.skipUnless(SMOL.exists() or "CI" in os.environ, "moesaic-smol is not made: ./run test makes it")
class Smol(unittest.TestCase):
    def test_everyday_questions(self):
        rows = [{"messages": [{"role": "user", "content": question}]} for question, _ in EVERYDAY]
        answers = generate(SMOL, rows, "--max-tokens", "60")
        sensible = 0
        for (question, words), answer in zip(EVERYDAY, answers):
            fits = any(word.lower() in answer.lower() for word in words)
            sensible += fits
            print(f"{'ok ' if fits else 'BAD'} {question} -> {answer!r}")
        self.assertEqual(sensible, len(EVERYDAY))


if __name__ == "__main__":
    unittest.main()
