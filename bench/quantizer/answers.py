#!/usr/bin/env python3
"""Measures the effect of quantization on moesaic-tiny's answers, and on the surrounding text, which is half random.

    python3 bench/quantizer/answers.py build/release/bin/moesaic FOLDER...

Runs the bf16 model and each folder over the held-out prompts and answers. Prints KL(bf16 || folder) and the share of equal
likeliest tokens: over all tokens, over those whose second likeliest token has less than 90% of the first's probability, and
over the tokens of answers. Needs tokenizers, safetensors and numpy.
"""
import argparse
import json
import pathlib
import tempfile

import numpy
import safetensors.numpy
from tokenizers import Tokenizer

import compare
from compare import TINY, generate

WINDOW = 1024


def held_out():
    """Returns (text, [first, end) of each answer in it)."""
    text, spans = "", []
    for line in (TINY / "heldout.jsonl").read_text().splitlines():
        record = json.loads(line)
        text += "".join(t for t, _ in generate.segments(record["messages"], record.get("tools"), prompt=True))
        spans.append((len(text), len(text) + len(record["expected"])))
        text += record["expected"]
    return text, spans


def in_answers(text, spans):
    """Returns, for each token, whether it begins in an answer."""
    tokens = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text, add_special_tokens=False)
    inside = numpy.zeros(len(text) + 1, bool)
    for first, end in spans:
        inside[first:end] = True
    return numpy.array(tokens.ids), numpy.array([inside[first] for first, _ in tokens.offsets])


def logprobs(moesaic, model, text, path, *flags):
    """Returns ([scored] token numbers, their distributions)."""
    compare.run([moesaic, "perplexity", model, "--text", text, "--save-logits", path, "-c", WINDOW, *flags])
    saved = safetensors.numpy.load_file(path)
    rows = saved["logprobs"].astype(numpy.float32)
    rows -= numpy.log(numpy.exp(rows).sum(-1, keepdims=True))
    scored = numpy.array([i for i in range(len(saved["tokens"])) if i % WINDOW])
    return saved["tokens"], scored, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    text, spans = held_out()
    ids, answers = in_answers(text, spans)
    print("| folder | KL, all | top-1, all | second below 90% | KL, answers | top-1, answers |\n|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as temporary:
        file, saved = pathlib.Path(temporary) / "text", pathlib.Path(temporary) / "rows"
        file.write_text(text)
        tokens, scored, exact = logprobs(arguments.moesaic, TINY, file, saved)
        shift = len(tokens) - len(ids)  # the program may prepend a token
        assert (tokens[shift:] == ids).all()
        mine = answers[scored - shift] & (scored >= shift)
        second, first = numpy.partition(exact, -2)[:, -2:].T
        clear = second < first + numpy.log(0.9)
        for folder in arguments.folders:
            _, _, rows = logprobs(arguments.moesaic, folder, file, saved)
            kl = (numpy.exp(exact) * (exact - rows)).sum(-1)
            same = exact.argmax(-1) == rows.argmax(-1)
            print(f"| {folder.name} | {kl.mean():.5f} | {same.mean():.2%} | {same[clear].mean():.2%} of {clear.mean():.1%} | "
                  f"{kl[mine].mean():.5f} | {same[mine].mean():.2%} of {mine.sum()} |", flush=True)


if __name__ == "__main__":
    main()
