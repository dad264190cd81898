"""Measures retrieval by moesaic-recall over long documents cached by a server, by budget.

Tasks of RULER's kind (arXiv 2404.06654), each at every depth of a document:

- needle: ten names in filler, far apart; the question names one
- keys: 400 names; the question names one
- values: three values of a key anywhere in the document; all are expected in any order
- frequent: the value seen most often, of nine that make up a fifth of the sentences; sparse attention cannot count them

"""
import pathlib
import random
import sys

import asking

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models" / "moesaic-recall"))
import tasks  # noqa: E402

KINDS = ["needle", "keys", "values", "frequent"]
TAIL = 64  # tokens reserved for question and answer


def document(seed, length, statements):
    """Returns filler of up to `length` tokens with statements: (depth from 0 to 1, function of the document)."""
    made = tasks.Document(random.Random(seed))
    made.open()
    rest = sorted(statements, key=lambda s: s[0])
    while len(made.tokens) < length - TAIL:
        if rest and rest[0][0] * (length - TAIL - 16) <= len(made.tokens):
            rest.pop(0)[1](made)
        else:
            made.filler()
    for _, say in rest:
        say(made)
    return made


def questions(kind, length, number, share=1.0):
    """Returns [(document text, question, correct answers)]. `share` scales the number of questions."""
    seed = f"{kind}|{length}|{number}"
    rng = random.Random(seed + "|statements")
    if kind == "needle":
        made = document(seed, length, [((i + number / 2) / 9.5, tasks.Document.name) for i in range(10)])
    elif kind == "keys":
        made = document(seed, length, [(i / 399, tasks.Document.name) for i in range(400)])
    elif kind == "values":
        keys = rng.sample(tasks.KEYS, 10)
        made = document(seed, length, [(rng.random(), lambda d, k=k, v=v: d.meet(k, v))
                                       for k in keys for v in rng.sample(tasks.VALUES, tasks.MET)])
    else:
        made = document(seed, length, [(i / (length // 40), tasks.Document.see) for i in range(length // 40)])
    text = tasks.text_of(made.tokens[2:])
    if kind == "frequent":
        return [(text, " who was seen most?", [f"we saw {max(made.seen, key=made.seen.get)} most."])]
    if kind == "values":
        return [(text, f" who did {key} meet?", [tasks.said_met(key, order) + "." for order in orders(values)])
                for key, values in list(made.met.items())[:max(1, round(10 * share))]]
    keys = list(made.names)
    wanted = max(1, round((10 if kind == "needle" else 20) * share))
    return [(text, f" who is {key}?", [f"here lives {key} {made.names[key]}."])
            for key in [keys[i * (len(keys) - 1) // max(1, wanted - 1)] for i in range(wanted)]]


def orders(values):
    if len(values) == 1:
        return [values]
    return [[v, *rest] for i, v in enumerate(values) for rest in orders(values[:i] + values[i + 1:])]


def documents(kind):
    return {"needle": 2, "keys": 1, "values": 2, "frequent": 10}[kind]


def perplexity_text(path, length, count):
    """Returns `count` documents of exactly `length` tokens, a fifth of whose sentences are repetitions."""
    with open(path, "w") as out:
        for number in range(count):
            rng = random.Random(f"perplexity|{length}|{number}")
            made = tasks.Document(rng)
            made.open()
            made.name()
            while len(made.tokens) < length:
                draw = rng.random()
                if draw < 0.2:
                    made.again()
                elif draw < 0.3 and len(made.names) < 400:
                    made.name()
                else:
                    made.filler()
            out.write(tasks.text_of(made.tokens[:length]))


def table(moesaic, model, length, budgets, all_budgets, dense_layers, summary, reuse, kinds, share, show):
    made = {kind: [(text + question, answers) for n in range(documents(kind))
                   for text, question, answers in questions(kind, length, n, share)] for kind in kinds}
    print(f"\n### {model.name}, {length} tokens, {dense_layers} dense layers, {summary}\n")
    asking.table(moesaic, model, 2 * length, made, asking.settings_of(length, budgets, all_budgets, reuse),
                 ["--kv-sparsity-dense-layers", dense_layers, "--kv-sparsity-summary", summary, "--kv-memory", "3GiB"],
                 lambda said, answers: said in answers, dict.fromkeys(made, 16), show)
