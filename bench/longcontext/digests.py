#!/usr/bin/env python3
"""Which blocks digests choose, held against which were needed: moesaic-recall's own queries and keys, in PyTorch.

usage: digests.py [--model FOLDER] [--length N] [--kind needle] [--budgets 256,...] [--documents N]

For the rows that must recall a name (the rows before a value of the answer), by layer: of the KV heads, the best share of
choices that hold the block where the name was told (told); of the query heads' choices, the share that holds the block of their
most attention (recall); and how much of their attention lies in the chosen blocks, mean, p50 and p5. Ways to choose:

  engine     docs/contracts/sparsity.md: softmax of q . center + spread / 5 over blocks, summed over the heads of a KV head
  bound      the same with the whole spread, an upper bound (Quest's, arXiv 2406.10774, with the ball)
  box        the same with a fifth of the box alone
  mean       q . mean of the block's keys
  16, 8      as engine, with a digest for each 16 or 8 tokens: a block's importance is the sum of its parts'
  a head     as engine, but each query head for itself
  oracle     the attention itself, summed over the heads of a KV head: no choice that they share is better

All in f32; the first block, the one before the current and the current one are always read. Needs PyTorch.
"""
import argparse
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models" / "moesaic-recall"))
import network  # noqa: E402
import tasks  # noqa: E402
from tokenizer import build  # noqa: E402

import recall  # noqa: E402

BLOCK = 64
WAYS = ["engine", "bound", "box", "mean", "16", "8", "a head", "oracle"]


def record(model):
    """Has every layer keep its rotated queries and keys."""
    def keep(attention):
        def hook(_, inputs):
            x, rope = inputs
            batch, tokens, _ = x.shape
            q = attention.q_norm(attention.q_proj(x).view(batch, tokens, attention.heads, attention.size))
            k = attention.k_norm(attention.k_proj(x).view(batch, tokens, attention.groups, attention.size))
            attention.kept = [network.rotate(t, *rope)[0].transpose(0, 1) for t in (q, k)]  # [heads, tokens, size]
        return hook

    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(keep(layer.self_attn))


def scores(query, keys):
    """Block scores of each way and the true masses. query [heads, size], keys [tokens, size]; a KV head's."""
    query = query / keys.shape[1] ** 0.5
    tokens = len(keys)
    full = (tokens - 1) // BLOCK  # the current block has no digest
    blocks = keys[:full * BLOCK].view(full, BLOCK, -1)
    share = lambda logits: torch.softmax(logits, dim=-1)  # noqa: E731

    def digest(tokens_each):
        """(q . center, box's spread, spread) of parts of so many tokens."""
        parts = keys[:full * BLOCK].view(full * BLOCK // tokens_each, tokens_each, -1)
        low, high = parts.min(1).values, parts.max(1).values
        center, radius = (low + high) / 2, (high - low) / 2
        ball = (parts - center[:, None]).norm(dim=-1).max(1).values
        box = query.abs() @ radius.T
        return query @ center.T, box, torch.minimum(box, query.norm(dim=1)[:, None] * ball)

    middle, box, spread = digest(BLOCK)
    finer = {}
    for each in (16, 8):
        part, _, width = digest(each)
        finer[str(each)] = share(part + width / 5).view(len(query), full, BLOCK // each).sum(-1)
    weights = torch.softmax(query @ keys.T, dim=-1)
    masses = weights[:, :full * BLOCK].view(len(query), full, BLOCK).sum(-1)
    return {**finer, "engine": share(middle + spread / 5), "bound": share(middle + spread), "box": share(middle + box / 5),
            "mean": share(query @ blocks.mean(1).T), "oracle": masses}, masses, weights[:, full * BLOCK:].sum(-1)


def chosen(importance, full, budget):
    """A mask of the full blocks that are read. importance [full]"""
    keep = torch.zeros(full, dtype=torch.bool)
    keep[[0, full - 1]] = True
    count = -(-budget // BLOCK) - 3
    rest = importance.masked_fill(keep, -1)
    keep[rest.topk(min(count, full)).indices] = True
    return keep


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "moesaic-recall")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--kind", choices=recall.KINDS, default="needle")
    parser.add_argument("--budgets", default="256,512,1024,2048,4096")
    parser.add_argument("--documents", type=int, default=1)
    arguments = parser.parse_args()
    model, tokenizer = network.load(arguments.model), build()
    record(model)
    found = {}  # (layer, budget, way): ([recalled], [captured], {KV head: [told]})
    budgets = [int(b) for b in arguments.budgets.split(",")]
    for number in range(arguments.documents):
        asked = recall.questions(arguments.kind, arguments.length, number)
        text, tail = asked[0][0], ""
        for _, question, answers in asked:
            tail += question + "<|end|><|assistant|> " + answers[0] + "<|end|><|user|>"
        ids = tokenizer.encode("<|begin|><|user|>" + text + tail).ids
        head = len(tokenizer.encode("<|begin|><|user|>" + text).ids)
        values = set(tokenizer.encode("".join(" " + v for v in tasks.VALUES)).ids)
        told = {}  # (key, value) to the block that tells it
        for i in range(head):
            told.setdefault((ids[i - 1], ids[i]), i // BLOCK)
        rows, inside = [], False
        for i in range(head, len(ids)):  # rows before a value in an answer
            inside = (inside or ids[i] == tasks.ROLES.index("<|assistant|>")) and ids[i] != tasks.ROLES.index("<|user|>")
            if inside and ids[i] in values:
                rows.append(i - 1)
        with torch.no_grad():
            model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None])
        for at, layer in enumerate(model.layers):
            q, k = layer.self_attn.kept
            group = len(q) // len(k)
            for row in rows:
                for head_ in range(len(k)):
                    by, masses, current = scores(q[head_ * group:(head_ + 1) * group, row], k[head_, :row + 1])
                    full = masses.shape[1]
                    for budget in budgets:
                        for way in WAYS:
                            if way == "a head":
                                keep = torch.stack([chosen(one, full, budget) for one in by["engine"]])
                            else:
                                keep = chosen(by[way].sum(0), full, budget).expand(group, -1)
                            recalled, captured, heads = found.setdefault((at, budget, way), ([], [], {}))
                            block = told.get((ids[row], ids[row + 1]), full)
                            if block < full:
                                heads.setdefault(head_, []).append(keep[:, block].float().mean().item())
                            best = masses.argmax(-1)
                            recalled += keep.gather(1, best[:, None])[:, 0].float().tolist()
                            captured += ((masses * keep).sum(-1) + current).tolist()
    print(f"{arguments.kind}, {arguments.length} tokens, {len(rows) * arguments.documents} rows\n")
    print("| layer | budget | way | told | recall | captured: mean | p50 | p5 |\n|---|---|---|---|---|---|---|---|")
    for (layer, budget, way), (recalled, captured, heads) in sorted(found.items(), key=lambda f: f[0][:2]):
        shares = torch.tensor(captured)
        best = max((sum(h) / len(h) for h in heads.values()), default=float("nan"))
        cells = [f"{100 * best:.0f}%", f"{100 * sum(recalled) / len(recalled):.1f}%"]
        cells += [f"{100 * v:.1f}%" for v in (shares.mean(), shares.quantile(0.5), shares.quantile(0.05))]
        print(f"| {layer} | {budget} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
