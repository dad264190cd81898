#!/usr/bin/env python3
"""Measures the quality loss of attention over chosen blocks: retrieval by moesaic-recall and moesaic-tiny, perplexity.

usage: quality.py MOESAIC [--recall FOLDER --lengths 4096,16384 --summary box] [--tiny FOLDER] [--samples N]
                  [--chat MODEL --chat-lengths 2048,7936] [--text FILE --model MODEL [--window N] [--tokens N]]

Recall (recall.py): needles, many keys, several values and counting at each of --lengths, dense and for each budget, with
`decode` (only output tokens choose) and `all` (document and question choose as well); and perplexity of such documents.
Chat (english.py): needles, keys, values and words in English, for any chat model, with the default dense layers, at
each of --chat-lengths, which its context must hold.
Retrieval: needles at every depth of a text, values of keys in a long list, and repeated lists (models/moesaic-tiny's
own generator, prompts of about 2,000 tokens outside of training), greedy; only identical answers are correct. Also with
choices that several tokens share. Perplexity: every row of a window chooses. Prints markdown.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import asking
import english
import recall

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUDGETS = [256, 512, 1024]
# (label, flags): shared choices with the budget of 512.
WAYS = [("512, reuse 2", ["--kv-sparsity-reuse", "2"]), ("512, reuse 4", ["--kv-sparsity-reuse", "4"]),
        ("512, reuse 16", ["--kv-sparsity-reuse", "16"])]
# For perplexity, with a quarter of the window as the budget.
REUSES = [2, 4, 8, 16]


def needle(sampler, sentences, depth):
    """Returns a text with a code at `depth` (0 to 1)."""
    import domain
    key, code = sampler.rng.choice(domain.WORDS), str(sampler.rng.randint(10, 999))
    lines = [sampler.filler() for _ in range(sentences)]
    lines.insert(round(depth * sentences), f"The secret code for {key} is {code}.")
    question = " ".join(lines) + f"\nWhat is the secret code for {key}?"
    return [{"role": "user", "content": question}], f"The secret code for {key} is {code}."


def lookup(sampler, pairs, depth):
    """Returns a list and the value of the key at `depth`."""
    import domain
    rng = sampler.rng
    keys = [f"{j} {w}" for j in rng.sample(domain.ADJECTIVES, min(len(domain.ADJECTIVES), 4 + pairs // 8))
            for w in rng.sample(domain.WORDS, 9)]
    keys = rng.sample(keys, min(pairs, len(keys)))
    table = {key: sampler.value() for key in keys}
    key = keys[round(depth * (len(keys) - 1))]
    text = "Remember this list:\n" + "".join(f"- {k}: {v}\n" for k, v in table.items())
    return [{"role": "user", "content": text + f"What is {key}?"}], f"- {key}: {table[key]}"


def tasks(folder, samples):
    sys.path.insert(0, str(folder))
    import generate
    made = []
    for i in range(samples):
        sampler = generate.Sampler(random.Random(f"longcontext|{i}"), held_out=True, noise=False)
        depth = i / max(samples - 1, 1)
        made.append(("needle",) + needle(sampler, 170, depth))
        made.append(("lookup",) + lookup(sampler, 200, depth))
        messages = sampler.copy(150 + 10 * (i % 10))
        made.append(("copy",) + (messages[:-1], messages[-1]["content"]))
    return made


def answers(moesaic, model, prompts, flags):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for messages in prompts:
            file.write(json.dumps({"messages": messages}) + "\n")
        file.flush()
        ran = subprocess.run([moesaic, "generate", model, "--jsonl", file.name, "--format", "jsonl", "--temperature", "0",
                              "-n", "700", "--stats", "--max-sequences", "4", *flags], capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(ran.stderr)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    statistics = [line for line in ran.stderr.splitlines() if line.startswith("block-sparse attention: ")]
    lengths = [row["usage"]["prompt_tokens"] for row in rows]
    return [row["text"].strip() for row in rows], lengths, statistics[-1].split(": ", 1)[1] if statistics else ""


def retrieval(moesaic, folder, samples):
    made = tasks(folder, samples)
    kinds = list(dict.fromkeys(kind for kind, _, _ in made))
    print(f"### Retrieval, {folder.name}\n")
    settings = [("dense", [])]
    for budget in BUDGETS:
        for mode in ("decode", "all"):
            settings.append((f"{budget}, {mode}", ["--kv-sparsity", mode, "--kv-sparsity-budget", str(budget),
                                                   "--kv-sparsity-audit", "16"]))
    for name, flags in WAYS:
        for mode in ("decode", "all"):
            settings.append((f"{name}, {mode}", ["--kv-sparsity", mode, "--kv-sparsity-budget", "512",
                                                 "--kv-sparsity-audit", "16", *flags]))
    header = None
    for name, flags in settings:
        texts, lengths, statistics = answers(moesaic, folder, [messages for _, messages, _ in made], flags)
        if header is None:
            for kind in kinds:
                of = [n for n, (k, _, _) in zip(lengths, made) if k == kind]
                print(f"- {kind}: {len(of)} prompts of {min(of)} to {max(of)} tokens")
            header = f"\n| budget, rows that choose | {' | '.join(kinds)} | what came of it |\n|---|" + "---|" * (len(kinds) + 1)
            print(header)
        right = {kind: [text == expected for text, (k, _, expected) in zip(texts, made) if k == kind] for kind in kinds}
        print(f"| {name} | " + " | ".join(f"{sum(r)}/{len(r)}" for r in right.values()) + f" | {statistics} |", flush=True)


def perplexity(moesaic, model, text, window, tokens, more=(), ways=True):
    """`ways` adds shared choices. `more`: flags of all sparse runs."""
    print(f"\n### Perplexity, {pathlib.Path(model).name}, windows of {window}, {tokens} tokens\n")
    print("| budget | perplexity | of dense | what came of it |\n|---|---|---|---|")
    dense = None
    settings = [("dense", [])]
    settings += [(budget, ["--kv-sparsity-budget", str(budget)]) for budget in (256, 512, 1024, 2048, 4096) if budget < window]
    if ways:
        settings += [(f"{window // 4}, reuse {reuse}",
                      ["--kv-sparsity-budget", str(window // 4), "--kv-sparsity-reuse", str(reuse)]) for reuse in REUSES]
    for name, flags in settings:
        if flags:
            flags = [*flags, "--kv-sparsity-audit", "64", *more]
        ran = subprocess.run([moesaic, "perplexity", model, text, "-c", str(window), "--max-tokens", str(tokens),
                              "--format", "json", *flags], capture_output=True, text=True)
        if ran.returncode != 0:
            sys.exit(ran.stderr)
        value = json.loads(ran.stdout)["perplexity"]
        dense = dense or value
        statistics = [line for line in ran.stderr.splitlines() if line.startswith("block-sparse attention: ")]
        print(f"| {name} | {value:.4f} | {value / dense:.4f} | {statistics[-1].split(': ', 1)[1] if statistics else ''} |",
              flush=True)


def context_length(moesaic, model):
    """Returns the context of the model in tokens."""
    ran = subprocess.run([moesaic, "inspect", model, "--json"], capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(ran.stderr)
    return json.loads(ran.stdout)["context_length"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moesaic")
    parser.add_argument("--recall", type=pathlib.Path, default=ROOT / "models" / "moesaic-recall")
    parser.add_argument("--lengths", default="4096,8192,16384", help="for recall; empty: none")
    parser.add_argument("--budgets", default="256,512,1024,2048,4096", help="for recall")
    parser.add_argument("--all-budgets", default="1024,2048", help="for recall where document and question choose as well")
    parser.add_argument("--dense-layers", type=int, default=0, help="for recall, whose second layer retrieves")
    parser.add_argument("--summary", choices=["box", "sketch"], default="box", help="for recall and chat")
    parser.add_argument("--reuse", type=int, default=1, help="tokens that read one choice, for recall and chat")
    parser.add_argument("--kinds", default=",".join(recall.KINDS), help="for recall and chat")
    parser.add_argument("--share", type=float, default=1.0,
                        help="of the questions, for recall and chat, but for chat's keys, which are always ten; 0: none")
    parser.add_argument("--documents", type=int, default=2, help="for recall's perplexity; 0: none")
    parser.add_argument("--show", action="store_true", help="for recall and chat: print wrong answers")
    parser.add_argument("--tiny", type=pathlib.Path, default=ROOT / "models" / "moesaic-tiny")
    parser.add_argument("--samples", type=int, default=20, help="of each retrieval task; 0: none")
    parser.add_argument("--chat", type=pathlib.Path, help="model for the English tasks")
    parser.add_argument("--chat-lengths", default="2048,4096,7936")
    parser.add_argument("--text", help="for perplexity")
    parser.add_argument("--model", help="for perplexity")
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=16384)
    arguments = parser.parse_args()
    numbers = {name: [int(n) for n in getattr(arguments, name).split(",") if n]
               for name in ("lengths", "budgets", "all_budgets", "chat_lengths")}
    chat_lengths = numbers["chat_lengths"] if arguments.chat and arguments.share else []
    if chat_lengths:
        context = context_length(arguments.moesaic, arguments.chat)
        if max(chat_lengths) + english.ROOM > context:
            parser.error(f"--chat-lengths: {max(chat_lengths)} needs a context of {max(chat_lengths) + english.ROOM} tokens, "
                         f"and the model's is {context}")
    for length in numbers["lengths"]:
        if arguments.share:
            recall.table(arguments.moesaic, arguments.recall, length, numbers["budgets"], numbers["all_budgets"],
                         arguments.dense_layers, arguments.summary, arguments.reuse, arguments.kinds.split(","),
                         arguments.share, arguments.show)
        if arguments.documents:
            with tempfile.NamedTemporaryFile(suffix=".txt") as file:
                recall.perplexity_text(file.name, length, arguments.documents)
                perplexity(arguments.moesaic, arguments.recall, file.name, length, length * arguments.documents,
                           ["--kv-sparsity-dense-layers", str(arguments.dense_layers), "--kv-sparsity-summary",
                            arguments.summary, "--kv-sparsity-reuse", str(arguments.reuse)], ways=False)
    for length in chat_lengths:
        print(f"\n### {arguments.chat.name}, about {length} tokens, {arguments.summary}\n")
        made = {kind: english.questions(kind, length, arguments.share) for kind in arguments.kinds.split(",")}
        asking.table(arguments.moesaic, arguments.chat, min(2 * length, context), made,
                     asking.settings_of(length, numbers["budgets"], [], arguments.reuse),
                     ["--kv-sparsity-summary", arguments.summary, "--kv-memory", "6GiB"], english.right, english.OUTPUT,
                     arguments.show)
    if arguments.samples:
        retrieval(arguments.moesaic, arguments.tiny, arguments.samples)
    if arguments.text:
        perplexity(arguments.moesaic, arguments.model, arguments.text, arguments.window, arguments.tokens)


if __name__ == "__main__":
    main()
