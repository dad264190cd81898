#!/usr/bin/env python3
"""Compares the blocks that key summaries choose with the needed ones, for moesaic-recall's queries and keys, in PyTorch.

usage: key_summaries.py [--model FOLDER] [--length N] [--kind needle] [--budgets 256,...] [--documents N]

Considers the rows that must recall a name (the rows before a value of the answer). Prints by layer: the largest share,
over KV heads, of choices with the block that states the name (defined); the share of query heads' choices with the block of
their most attention (recall); and the share of attention within the chosen blocks (mean, p50 and p5). Methods:

  sketch     docs/contracts/sparsity.md: sum over a block's keys of exp(estimate), from signs of each rotated key - center
  1 bit      the same with one plane of signs, as keys of more than 64 dimensions have
  half       the same with one plane of half the dimensions
  largest    like sketch, with the block's largest estimate instead of the sum
  box        softmax of q . center + spread / 5 over blocks: the engine's default
  bound      the same with the whole spread, an upper bound (Quest's, arXiv 2406.10774, with the ball)
  mean       q . mean of the block's keys
  k-means    8 means per block, weighted by their numbers of keys
  int4       the 32 dimensions that vary most in the block, 4 bits each: as many bits as sketch's
  8          like box, with a summary for each 8 tokens: a block's importance is the sum over its parts
  a head     like sketch, but each query head chooses alone
  oracle     the attention itself, summed over the heads of a KV head: the best common choice

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
WAYS = ["sketch", "1 bit", "half", "largest", "box", "bound", "mean", "k-means", "int4", "8", "a head", "oracle"]


def record(model):
    """Makes every layer keep its rotated queries and keys."""
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


def rotation(size):
    """Applies random signs and a Hadamard transform, twice."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    random = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (2, size), generator=random) * 2.0 - 1
    return (matrix * signs[1]) @ (matrix * signs[0]) / size


def estimates(query, blocks, center, planes, size):
    """Estimates q . key from sketches with `planes` planes of signs of `size` dimensions: [heads, blocks, 64]."""
    rotate = rotation(blocks.shape[-1])
    off = blocks - center[:, None]
    turned, asked = (off @ rotate.T)[..., :size], (query @ rotate.T)[..., :size]
    step = asked.abs().amax(-1, keepdim=True) / (127 if planes == 1 else 63)
    asked = (asked / step).round() * step
    signs = torch.where(turned >= 0, 1.0, -1.0)
    if planes == 2:
        signs *= torch.where(turned.abs() > 1.23 * turned.abs().mean(-1, keepdim=True), 3.0, 1.0)
    factor = (off ** 2).sum(-1) / (turned * signs).sum(-1).clamp(min=1e-9)
    if size < blocks.shape[-1]:  # signs alone, without bias over directions (arXiv 2406.03482)
        factor = off.norm(dim=-1) * blocks.shape[-1] ** 0.5 / size * (torch.pi / 2) ** 0.5
    most = factor.amax(-1, keepdim=True) / 255
    factor = (factor / most).round() * most
    return (query @ center.T)[..., None] + torch.einsum("hd,bkd->hbk", asked, signs) * factor


def k_means(blocks, count):
    """Returns (means [blocks, count, size], number of keys of each)."""
    means = blocks[:, torch.linspace(0, BLOCK - 1, count).long()].clone()
    for _ in range(8):
        mine = torch.nn.functional.one_hot(torch.cdist(blocks, means).argmin(-1), count).float()
        number = mine.sum(1)
        means = torch.where(number[..., None] > 0,
                            torch.einsum("bkc,bkd->bcd", mine, blocks) / number[..., None].clamp(min=1), means)
    return means, number


def scores(query, keys):
    """Returns block scores of each method and the true masses. query [heads, size], keys [tokens, size] of a KV head."""
    query = query / keys.shape[1] ** 0.5
    tokens, size = keys.shape
    full = (tokens - 1) // BLOCK  # the current block has no summary
    blocks = keys[:full * BLOCK].view(full, BLOCK, -1)
    share = lambda logits: torch.softmax(logits, dim=-1)  # noqa: E731
    summed = lambda logits: share(logits.flatten(1)).view(logits.shape).sum(-1)  # noqa: E731

    def box(tokens_each):
        """Returns (center, q . center, spread) of parts of this many tokens."""
        parts = keys[:full * BLOCK].view(full * BLOCK // tokens_each, tokens_each, -1)
        low, high = parts.min(1).values, parts.max(1).values
        center, radius = (low + high) / 2, (high - low) / 2
        ball = (parts - center[:, None]).norm(dim=-1).max(1).values
        return center, query @ center.T, torch.minimum(query.abs() @ radius.T, query.norm(dim=1)[:, None] * ball)

    center, middle, spread = box(BLOCK)
    _, part, width = box(8)
    engine = estimates(query, blocks, center, 2 if size <= 64 else 1, size)
    means, number = k_means(blocks, 8)
    average = blocks.mean(1)
    off = blocks - average[:, None]
    wide = (off ** 2).sum(1).topk(32, -1).indices
    kept = off.gather(2, wide[:, None].expand(-1, BLOCK, -1))
    step = kept.abs().amax((1, 2), keepdim=True) / 7
    int4 = torch.einsum("hbd,bkd->hbk", query[:, wide], (kept / step).round() * step) + (query @ average.T)[..., None]
    weights = torch.softmax(query @ keys.T, dim=-1)
    masses = weights[:, :full * BLOCK].view(len(query), full, BLOCK).sum(-1)
    found = {"sketch": summed(engine), "1 bit": summed(estimates(query, blocks, center, 1, size)),
             "half": summed(estimates(query, blocks, center, 1, size // 2)), "largest": share(engine.amax(-1)),
             "box": share(middle + spread / 5), "bound": share(middle + spread), "mean": share(query @ average.T),
             "k-means": summed(torch.einsum("hd,bcd->hbc", query, means) + number.clamp(min=1e-9).log()),
             "int4": summed(int4), "8": share(part + width / 5).view(len(query), full, BLOCK // 8).sum(-1),
             "oracle": masses}
    return found, masses, weights[:, full * BLOCK:].sum(-1)


def chosen(importance, full, budget):
    """Returns a mask of the full blocks that are read. importance [full]"""
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
    found = {}  # (layer, budget, way): ([recalled], [captured], {KV head: [defined]})
    budgets = [int(b) for b in arguments.budgets.split(",")]
    for number in range(arguments.documents):
        asked = recall.questions(arguments.kind, arguments.length, number)
        text, tail = asked[0][0], ""
        for _, question, answers in asked:
            tail += question + "<|end|><|assistant|> " + answers[0] + "<|end|><|user|>"
        ids = tokenizer.encode("<|begin|><|user|>" + text + tail).ids
        head = len(tokenizer.encode("<|begin|><|user|>" + text).ids)
        values = set(tokenizer.encode("".join(" " + v for v in tasks.VALUES)).ids)
        definitions = {}  # (key, value) to the block that states it
        for i in range(head):
            definitions.setdefault((ids[i - 1], ids[i]), i // BLOCK)
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
                                keep = torch.stack([chosen(one, full, budget) for one in by["sketch"]])
                            else:
                                keep = chosen(by[way].sum(0), full, budget).expand(group, -1)
                            recalled, captured, heads = found.setdefault((at, budget, way), ([], [], {}))
                            block = definitions.get((ids[row], ids[row + 1]), full)
                            if block < full:
                                heads.setdefault(head_, []).append(keep[:, block].float().mean().item())
                            best = masses.argmax(-1)
                            recalled += keep.gather(1, best[:, None])[:, 0].float().tolist()
                            captured += ((masses * keep).sum(-1) + current).tolist()
    print(f"{arguments.kind}, {arguments.length} tokens, {len(rows) * arguments.documents} rows\n")
    print("| layer | budget | way | defined | recall | captured: mean | p50 | p5 |\n|---|---|---|---|---|---|---|---|")
    for (layer, budget, way), (recalled, captured, heads) in sorted(found.items(), key=lambda f: f[0][:2]):
        shares = torch.tensor(captured)
        best = max((sum(h) / len(h) for h in heads.values()), default=float("nan"))
        cells = [f"{100 * best:.0f}%", f"{100 * sum(recalled) / len(recalled):.1f}%"]
        cells += [f"{100 * v:.1f}%" for v in (shares.mean(), shares.quantile(0.5), shares.quantile(0.05))]
        print(f"| {layer} | {budget} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
