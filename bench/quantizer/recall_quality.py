#!/usr/bin/env python3
"""Measures the effect of quantization on moesaic-recall, or on another model of its tasks (--model).

    python3 bench/quantizer/recall_quality.py build/release/bin/moesaic [--only w8a8,nvfp4]

Calibration (48 rows) and text (64 rows, each a window) are rows of 1,024 tokens of the model's tasks, with seeds that
neither training nor evaluation uses. Prints KL(bf16 || quantized) in nats per token with the standard error over rows, and
the share of equal likeliest tokens: over all tokens, most of which are filler words drawn evenly from up to 25; over tokens
whose second likeliest token has less than 90% of the first's probability; and over the predictable words of answers and
repetitions. The first line compares the bf16 model with itself in f32. Needs tokenizers, safetensors and numpy.
"""
import argparse
import pathlib
import random
import shutil
import sys
import tempfile

import numpy
import safetensors.numpy
from tokenizers import Tokenizer

import compare
from answers import WINDOW, logprobs

RECALL = compare.ROOT / "models" / "moesaic-recall"
sys.path.append(str(RECALL))
import tasks  # noqa: E402

GPTQ = ["--method", "gptq"]
SMOOTHED, STATIC = ["--activations", "smoothed"], ["--activations", "static"]
RUNS = (("w8a8", []), ("w8a8", GPTQ), ("w8a8", GPTQ + SMOOTHED), ("w8a8", GPTQ + STATIC),
        ("w8a16", []), ("w8a16", GPTQ), ("w4a16", []), ("w4a16", ["--method", "mse"]), ("w4a16", GPTQ), ("nvfp4", []),
        ("nvfp4", ["--method", "mse"]), ("nvfp4", GPTQ), ("fp8", []), ("fp8", GPTQ))


def rows(name, count):
    """Returns [(words, kinds)], one per row."""
    made = [tasks.training_row(random.Random(f"quantizing|{name}|{i}"), WINDOW) for i in range(count)]
    return [(row.tokens[:WINDOW], row.kinds[:WINDOW]) for row in made]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("--model", type=pathlib.Path, default=RECALL)
    parser.add_argument("--only", help="schemes, e.g. w8a8,nvfp4")
    parser.add_argument("--rows", type=int, default=64, help="of the text")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))

    def ids_of(words):
        ids = tokenizer.encode(tasks.text_of(words), add_special_tokens=False).ids
        assert len(ids) == len(words)  # one token per word
        return ids

    print("| scheme | flags | KL, all | top-1, all | second below 90% | KL, answers | top-1, answers |")
    print("|---|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        text, saved, out = folder / "text", folder / "rows", folder / "out"
        calibration = folder / "calibration.safetensors"
        tokens = numpy.array([ids_of(words) for words, _ in rows("calibration", 48)], numpy.int32)
        safetensors.numpy.save_file({"tokens": tokens}, calibration)
        held_out = rows("text", arguments.rows)
        text.write_text("".join(tasks.text_of(words) for words, _ in held_out))
        tokens_read, scored, exact = logprobs(arguments.moesaic, arguments.model, text, saved)
        assert (tokens_read == sum((ids_of(words) for words, _ in held_out), [])).all()
        answers = numpy.concatenate([kinds for _, kinds in held_out])[scored] != tasks.PLAIN
        second, first = numpy.partition(exact, -2)[:, -2:].T
        clear = second < first + numpy.log(0.9)

        def show(scheme, flags, others, base):
            kl = (numpy.exp(base) * (base - others)).sum(-1)
            same = base.argmax(-1) == others.argmax(-1)
            error = kl.reshape(len(held_out), -1).mean(-1).std(ddof=1) / len(held_out) ** 0.5
            print(f"| {scheme} | {' '.join(flags).replace('--', '') or 'rtn'} | {kl.mean():.5f} ± {error:.5f} | "
                  f"{same.mean():.2%} | {same[clear].mean():.2%} of {clear.mean():.1%} | {kl[answers].mean():.5f} | "
                  f"{same[answers].mean():.2%} of {answers.sum()} |", flush=True)

        show("bf16", ["beside", "f32"], exact, logprobs(arguments.moesaic, arguments.model, text, saved, "--dtype", "f32")[2])
        for scheme, flags in RUNS:
            if arguments.only and scheme not in arguments.only.split(","):
                continue
            more = ["--calibration", calibration] if set(flags) & {"gptq", "--activations"} else []
            compare.run([arguments.moesaic, "quantize", arguments.model, "-o", out, "--scheme", scheme, *flags, *more])
            show(scheme, flags, logprobs(arguments.moesaic, out, text, saved)[2], exact)
            shutil.rmtree(out)


if __name__ == "__main__":
    main()
