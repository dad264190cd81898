"""What moesaic-recall is asked over long documents, through a server that keeps them: retrieval by budget.

Tasks of RULER's kind (arXiv 2404.06654), each at every depth of a document:

- needle: ten names in filler, far apart; one is asked for
- keys: 400 names; one is asked for
- values: three values of a key anywhere in the document, all asked for; right in any order
- frequent: the value seen most often, of nine that make a fifth of the sentences; no choice of blocks can count

A document is computed once, densely; each question behind it is asked at every budget. In the mode `decode` the answer's
rows choose blocks, `all` computes document and question again with all rows choosing.
"""
import json
import os
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "server"))
sys.path.insert(0, str(ROOT / "models" / "moesaic-recall"))
import tasks  # noqa: E402

KINDS = ["needle", "keys", "values", "frequent"]
TAIL = 64  # tokens left for question and answer


def document(seed, length, statements):
    """Filler up to `length` tokens with statements in it: (depth from 0 to 1, function of the document)."""
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
    """[(document's text, question, right answers)] of one document. `share` of the usual number of questions."""
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
    """`count` documents of exactly `length` tokens, in which a fifth of the sentences says again what was said."""
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


class Counters:
    """What the server's sparsity did since the last look."""

    def __init__(self, server):
        self.server, self.last = server, {}

    def look(self):
        self.server.wait_until_quiet()
        now = {k: v for k, v in self.server.metrics().items() if "kv_sparsity" in k}
        new = {k: v - self.last.get(k, 0) for k, v in now.items()}
        self.last = now

        def total(name):
            return sum(v for k, v in new.items() if k.split("{")[0] == "moesaic:kv_sparsity_" + name)

        if not total("choices_total"):
            return ["", ""]
        cells = [f"{100 * total('blocks_read_total') / total('blocks_total'):.1f}%", ""]
        heads = total("missed_count")
        if heads:
            buckets = sorted((float(k.split('le="')[1].split('"')[0]), v) for k, v in new.items()
                             if k.startswith("moesaic:kv_sparsity_missed_bucket"))
            at = [next(edge for edge, count in buckets if count >= q * heads) for q in (0.5, 0.95)]
            cells[1] = f"{100 * total('missed_sum') / heads:.2f}%, " + ", ".join(f"{100 * min(e, 1):g}%" for e in at)
        return cells


def ask(server, text, question, sparsity):
    """(answer, its logprobs)"""
    status, answer = server.json("POST", "/v1/chat/completions", {
        "messages": [{"role": "user", "content": text + question}], "temperature": 0, "max_tokens": 16, "logprobs": True,
        "top_logprobs": 5, "kv_sparsity": sparsity})
    if status != 200:
        raise SystemExit(answer)
    choice = answer["choices"][0]
    return choice["message"]["content"].strip(), choice["logprobs"], answer["usage"]["prompt_tokens"]


def table(moesaic, model, length, budgets, all_budgets, dense_layers, kinds, share, show):
    os.environ["MOESAIC_BINARY"] = str(moesaic)
    import serving  # reads the variable

    made = {kind: [q for n in range(documents(kind)) for q in questions(kind, length, n, share)] for kind in kinds}
    settings = [("dense", {"mode": "dense"})]
    settings += [(f"{b}, decode", {"mode": "decode", "budget": b}) for b in budgets if b < length]
    settings += [("all of it, decode", {"mode": "decode", "budget": 2 * length})]
    settings += [(f"{b}, all", {"mode": "all", "budget": b}) for b in all_budgets if b < length]
    print(f"\n### {model.name}, {length} tokens, {dense_layers} dense layers\n")
    print(f"| budget, rows that choose | {' | '.join(kinds)} | blocks read | attention missed: mean, p50, p95 at most |")
    print("|---|" + "---|" * (len(kinds) + 2), flush=True)
    with serving.serving("--kv-sparsity", "dense", "--kv-sparsity-audit", 7, "--kv-sparsity-dense-layers", dense_layers,
                         "--kv-memory", "3GiB", "--ctx-size", 2 * length, "--max-sequences", 2, model=model) as server:
        counters, dense = Counters(server), {}
        counters.look()
        for name, sparsity in settings:
            cells = []
            for kind in kinds:
                right = []
                for i, (text, question, answers) in enumerate(made[kind]):
                    said, logprobs, _ = ask(server, text, question, sparsity)
                    right.append(said in answers)
                    if show and said not in answers:
                        print(f"{name}, {kind} {i}: {question.strip()} {said} ({answers[0]})", file=sys.stderr)
                    if name == "dense":
                        dense[kind, i] = json.dumps([said, logprobs])
                    elif name.startswith("all of it") and dense[kind, i] != json.dumps([said, logprobs]):
                        raise SystemExit(f"{kind} {i}: a budget that holds everything gives other logprobs than dense")
                cells.append(f"{sum(right)}/{len(right)}")
            told = ["the same bits", ""] if name.startswith("all of it") else counters.look()
            print(f"| {name} | {' | '.join(cells + told)} |", flush=True)
