#!/usr/bin/env python3
"""Judges a running server's answers to the questions of everyday.json: samples each several times and checks each answer.

Usage: evaluate.py URL [--samples 5] [--show] [--out FILE.jsonl] [--set FIELD=JSON ...] [--only REGEX]

A request holds the question and a seed and nothing else, so that the server's own sampling defaults decide. --set adds
a field to every request, such as --set temperature=1. Exit status 1: fewer than 90% of the answers are sensible.
Standard library only.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import sys
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
MIN_SENSIBLE = 0.9  # share of answers
LONGEST_WORDS = 400
REQUEST_SECONDS = 3600
COMMON_WORDS = set("a an and are as be but can do for from has have i in is it its not of on or so that the their there "
                   "this to we was were with you your".split())


def fault(row, answer, finish):
    """Returns the reason why `answer` is not sensible, or None. `row` is a line of everyday.json."""
    words = re.findall(r"[a-z']+", answer.lower())
    if finish != "stop":
        return f"did not end by itself: {finish}"
    if not words:
        return "is empty"
    if len(words) > row.get("most_words", LONGEST_WORDS):
        return f"has {len(words)} words"
    if sum(c.isascii() or c in "–—’‘“”é•°₂" for c in answer) < 0.98 * len(answer):
        return "is not English: foreign characters"
    if len(words) >= 12 and sum(w in COMMON_WORDS for w in words) < 0.15 * len(words):
        return "is not English: few common words"
    if loop := repeated(answer, words):
        return f"repeats itself: {loop!r}"
    if "<|" in answer or "�" in answer:
        return "holds marks of the template or broken characters"
    for pattern in row["must"]:
        if not re.search(pattern, answer, re.IGNORECASE | re.DOTALL):
            return f"misses {pattern!r}"
    for pattern in row.get("must_not", []):
        if found := re.search(pattern, answer, re.IGNORECASE | re.DOTALL):
            return f"holds {found[0]!r}"
    return None


def repeated(answer, words):
    """Returns a sentence, or eight words, that occur three times; else None."""
    sentences = collections.Counter(s.strip().lower() for s in re.split(r"[.!?\n]+", answer) if len(s.split()) >= 3)
    runs = collections.Counter(" ".join(words[i:i + 8]) for i in range(len(words) - 7))
    for counted in (sentences, runs):
        for text, count in counted.most_common(1):
            if count >= 3:
                return text
    return None


def ask(url, question, seed, fields):
    """Returns (answer, finish reason) of one chat request."""
    body = {"messages": [{"role": "user", "content": question}], "seed": seed, **fields}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
        choice = json.load(response)["choices"][0]
    return choice["message"]["content"] or "", choice["finish_reason"]


def wait_until_ready(url):
    """Waits until the model is loaded; fails if the server does not listen."""
    while True:
        try:
            urllib.request.urlopen(url + "/ready", timeout=60).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        time.sleep(0.2)


def evaluate(url, rows, samples, fields=None):
    """Yields one record per answer, in the order of the questions; the seeds are 1 to `samples`."""
    def record(job):
        row, seed = job
        answer, finish = ask(url, row["question"], seed, fields or {})
        return {"question": row["question"], "seed": seed, "answer": answer, "finish": finish,
                "fault": fault(row, answer, finish)}

    jobs = [(row, seed) for row in rows for seed in range(1, samples + 1)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        yield from pool.map(record, jobs)


def questions():
    return json.loads((HERE / "everyday.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8000")
    parser.add_argument("--samples", type=int, default=5, help="number of answers per question")
    parser.add_argument("--show", action="store_true", help="print all answers, not only faulty ones")
    parser.add_argument("--out", help="write one JSON line per answer")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="a field of every request")
    parser.add_argument("--only", default="", metavar="REGEX", help="only questions that match")
    options = parser.parse_args()
    fields = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    rows = [row for row in questions() if re.search(options.only, row["question"])]
    if not rows:
        parser.error("no question matches --only")
    wait_until_ready(options.url)
    records = []
    with open(options.out or os.devnull, "w", encoding="utf-8") as out:
        for record in evaluate(options.url, rows, options.samples, fields):
            records.append(record)
            print(json.dumps(record, ensure_ascii=False), file=out, flush=True)
            if options.show or record["fault"]:
                mark = f"BAD ({record['fault']})" if record["fault"] else "ok"
                print(f"{mark} [{record['seed']}] {record['question']}\n    {record['answer']!r}", flush=True)
    good = sum(record["fault"] is None for record in records)
    print(f"{good} of {len(records)} answers are sensible: {good / len(records):.1%}")
    return 0 if good >= MIN_SENSIBLE * len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
