"""Asks questions about long cached documents at several budgets, and counts correct answers.

A document is computed once, densely. Each question after it is asked densely and at every budget from the cache. In
the mode `decode` the answer's rows choose blocks, `all` computes document and question again with all rows choosing.
"""
import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "server"))


class Counters:
    """Returns the changes of the server's sparsity counters since the last call."""

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


def ask(server, prompt, output, sparsity):
    """Returns (answer, its logprobs)."""
    # A first prompt of 16k tokens takes minutes on a busy machine.
    status, _, body = server.request("POST", "/v1/chat/completions", {
        "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": output, "logprobs": True,
        "top_logprobs": 5, "kv_sparsity": sparsity}, timeout=1200)
    answer = json.loads(body)
    if status != 200:
        raise SystemExit(answer)
    choice = answer["choices"][0]
    return choice["message"]["content"].strip(), choice["logprobs"]


def settings_of(length, budgets, all_budgets, reuse):
    """Returns [(label, kv_sparsity)], dense first."""
    more, suffix = ({"reuse": reuse}, f", reuse {reuse}") if reuse > 1 else ({}, "")
    made = [("dense", {"mode": "dense"})]
    made += [(f"{b}{suffix}, decode", {"mode": "decode", "budget": b, **more}) for b in budgets if b < length]
    made += [("all of it, decode", {"mode": "decode", "budget": 2 * length})]
    return made + [(f"{b}{suffix}, all", {"mode": "all", "budget": b, **more}) for b in all_budgets if b < length]


def table(moesaic, model, context, made, settings, flags, judge, output, show):
    """Asks made[kind], (prompt, right answers) each, with every one of `settings`; judge(said, answers) decides whether the answer is correct.

    `context` tokens hold a prompt and its answer of at most output[kind] tokens; `flags` are the server's.
    """
    os.environ["MOESAIC_BINARY"] = str(moesaic)
    import serving  # reads the variable

    print(f"| budget, rows that choose | {' | '.join(made)} | blocks read | attention missed: mean, p50, p95 at most |")
    print("|---|" + "---|" * (len(made) + 2), flush=True)
    with serving.serving("--kv-sparsity", "dense", "--kv-sparsity-audit", 7, "--ctx-size", context, "--max-sequences", 2,
                         *flags, model=model) as server:
        counters, dense = Counters(server), {}
        counters.look()
        for name, sparsity in settings:
            cells = []
            for kind in made:
                right = []
                for i, (prompt, answers) in enumerate(made[kind]):
                    # MLA rounds differently in large chunks (S12 of docs/contracts/scheduler.md), so all settings use the cached prompt.
                    if name == "dense":
                        ask(server, prompt, 1, sparsity)
                    said, logprobs = ask(server, prompt, output[kind], sparsity)
                    right.append(judge(said, answers))
                    if show and not right[-1]:
                        print(f"{name}, {kind} {i}: {prompt[-60:].strip()} {said} ({answers[0]})", file=sys.stderr)
                    if name == "dense":
                        dense[kind, i] = json.dumps([said, logprobs])
                    elif name.startswith("all of it") and dense[kind, i] != json.dumps([said, logprobs]):
                        raise SystemExit(f"{kind} {i}: a budget that holds everything gives other logprobs than dense")
                cells.append(f"{sum(right)}/{len(right)}")
            counts = ["the same bits", ""] if name.startswith("all of it") else counters.look()
            print(f"| {name} | {' | '.join(cells + counts)} |", flush=True)
