#!/usr/bin/env python3
"""Trains moesaic-recall on a CPU and writes the checkpoint folder: from scratch, or the second phase from the weights
of the first (--begin).

A step's data depends on the seed, the step and the worker only. Rows get longer by STAGES; from the second stage on,
half of the rows have positions with gaps (PoSE, arXiv 2309.10400), up to REACH, so that short rows train all
distances.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import network  # first: it finds moesaic-tiny's modules
import optimizer as optimizers
import tasks
from tokenizer import ids_of, vocabulary

REACH = 20480  # positions
# (first step, [(row length, rows) of the steps in turn])
STAGES = [
    (0, [(128, 32)]),  # names only, no gaps
    (150, [(256, 16), (1024, 4)]),
    (600, [(256, 16), (1024, 4), (1024, 4), (4096, 2)]),
    (1000, [(1024, 4), (4096, 2)]),
    # The second phase: rows are tasks.training_row()'s crowded ones.
    (1140, [(256, 16), (1024, 4), (1024, 4), (4096, 2)]),
    (1340, [(256, 16), (1024, 4), (4096, 2)]),
]
# Factors of each layer's queries before a step, or at the end. Among more tokens heads must be sharper.
SHARPEN = {1340: [1.5, 1.1, 1.15], 1385: [1.15, 1.12, 1.1]}
SECOND = 1140  # first step of the second phase, which rounds the weights to bf16 and begins with new optimizers
SECOND_RATE, SECOND_FALL = 0.7, 45  # of the first phase's; steps during which it falls
PLAIN_WEIGHT, PLAIN_EVERY = 0.1, 4  # weight and interval of tokens outside of answers
ANSWER_WEIGHT = 1.0  # weight of answer tokens that need no recall
BALANCE = 0.01
NAMES = {tasks.REPEATED: "repeated", tasks.NAME: "name", tasks.MANY: "met", tasks.SEEN: "seen"}


def positions(rng: random.Random, length: int, gaps: bool) -> torch.Tensor:
    at = torch.arange(length)
    if gaps:
        cuts = sorted(rng.sample(range(1, length), 6))
        room = rng.uniform(0, REACH - length)
        parts = sorted(rng.random() for _ in cuts)
        for cut, before, part in zip(cuts, [0.0] + parts, parts):
            at[cut:] += int(room * (part - before))
    return at


def batch(rng: random.Random, ids: dict[str, int], rows: int, length: int, gaps: bool, crowded: bool):
    """(ids, kinds, other right ids or -1, positions), each [rows, length], the third [rows, length, MET - 1]."""
    made = [tasks.training_row(rng, length, names_only=not gaps, crowded=crowded) for _ in range(rows)]
    where = [positions(rng, length, gaps and length < REACH / 2 and rng.random() < 0.5) for _ in range(rows)]
    also = torch.full((rows, length, tasks.MET - 1), -1)
    for row, one in enumerate(made):
        for at, words in one.also.items():
            if at < length and words:
                also[row, at, :len(words)] = torch.tensor(ids_of(words, ids))
    return (torch.tensor([ids_of(one.tokens[:length], ids) for one in made]),
            torch.tensor([one.kinds[:length] for one in made]), also, torch.stack(where))


def losses(model, ids, kinds, also, where, any_order: bool):
    """Returns (loss, mean over plain tokens, share of correct answers by kind). `any_order` accepts equivalent answers."""
    hidden = model.hidden(ids, where)
    target, kind, also = ids[:, 1:], kinds[:, 1:], also[:, 1:]
    plain = (kind == tasks.PLAIN) & (torch.arange(target.shape[1]) % PLAIN_EVERY == 0)
    taken = plain | (kind > 0)
    logits = model.logits(hidden[:, :-1][taken])
    target, kind, also = target[taken][:, None], kind[taken], also[taken]
    if not any_order:
        also = also.fill_(-1)
    right = torch.cat((target, also), dim=1)
    each = -logits.log_softmax(-1).gather(1, right.clamp(min=0)).masked_fill(right < 0, -torch.inf).logsumexp(-1)
    weight = torch.tensor([PLAIN_WEIGHT, ANSWER_WEIGHT, 1.0, 1.0, 1.0, 1.0])[kind]
    right = (logits.argmax(-1, keepdim=True) == right).any(-1).float()
    correct = {"answer": right[kind == tasks.ANSWER].mean().item()} if (kind == tasks.ANSWER).any() else {}
    correct |= {name: right[kind == k].mean().item() for k, name in NAMES.items() if (kind == k).any()}
    return (each * weight).sum() / weight.sum(), each[kind == 0].mean().item(), correct


def reduce_gradients(model, workers: int) -> None:
    if workers == 1:
        return
    tensors = [p.grad for p in model.parameters()]
    flat = torch.cat([t.flatten() for t in tensors]) / workers
    dist.all_reduce(flat)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


def learning_rate(step: int, steps: int, decay_from: float) -> float:
    if step >= SECOND:
        return SECOND_RATE * min((step + 1 - SECOND) / 20, 1.0, max((steps - step) / SECOND_FALL, 0.01))
    steps = min(steps, SECOND)
    return min((step + 1) / 50, 1.0, max((steps - step) / (steps * (1 - decay_from)), 0.01))


@torch.no_grad()
def sharpen(model, step: int) -> None:
    for layer, factor in zip(model.layers, SHARPEN.get(step, [1] * len(model.layers))):
        layer.self_attn.q_norm.weight.mul_(factor)


def work(rank: int, arguments: argparse.Namespace) -> None:
    workers = arguments.workers
    torch.set_num_threads(1)
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{arguments.state.absolute()}.rendezvous", rank=rank,
                                world_size=workers)
    torch.manual_seed(arguments.seed)
    model = network.Model()
    rules = optimizers.build(model, arguments.lr)
    ids, first = vocabulary(), 0
    if arguments.begin:
        model.load_state_dict(network.load(arguments.begin).state_dict())
        first = SECOND
    if arguments.state.exists():
        saved = torch.load(arguments.state)
        model.load_state_dict(saved["model"])
        for rule, state in zip(rules, saved["rules"]):
            rule.load_state_dict(state)
        first = saved["step"]
    started = time.time()
    for step in range(first, arguments.steps):
        if step == SECOND:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
            rules = optimizers.build(model, arguments.lr)
        sharpen(model, step)
        while arguments.pause_file and arguments.pause_file.exists():
            time.sleep(1)
        rate = learning_rate(step, arguments.steps, arguments.decay_from)
        for rule in rules:
            for group in rule.param_groups:
                group["lr"] = arguments.lr * rate * (2 if group["weight_decay"] == 0.01 else 1)
        stage = max(i for i, (begin, _) in enumerate(STAGES) if step >= begin)
        length, rows = STAGES[stage][1][step % len(STAGES[stage][1])]
        rng = random.Random(f"{arguments.seed}|{step}|{rank}")
        made = batch(rng, ids, rows // workers, length, stage > 0, step >= SECOND)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, plain, correct = losses(model, *made, any_order=step >= SECOND)
        (loss + BALANCE * model.balance()).backward()
        reduce_gradients(model, workers)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for rule in rules:
            rule.step()
            rule.zero_grad(set_to_none=True)
        last = step == arguments.steps - 1
        if rank == 0 and (step % 20 == 0 or length > 2048 or last):
            print(json.dumps({"step": step, "row": length, "loss": round(loss.item(), 4), "plain": round(plain, 3)} |
                             {k: round(v, 3) for k, v in correct.items()} |
                             {"norm": round(norm.item(), 2), "rate": round(rate, 3),
                              "seconds": round(time.time() - started)}), flush=True)
        if rank == 0 and ((step + 1) % 20 == 0 or last):
            part = arguments.state.with_suffix(".part")
            torch.save({"model": model.state_dict(), "rules": [r.state_dict() for r in rules], "step": step + 1}, part)
            part.replace(arguments.state)
    if rank == 0:
        sharpen(model, arguments.steps)
        network.export(model, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="checkpoint folder")
    parser.add_argument("--state", type=Path, required=True, help="file for the resumable training state")
    parser.add_argument("--begin", type=Path, help="folder with the weights of the first phase: begin with the second")
    parser.add_argument("--steps", type=int, default=1385)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--decay-from", type=float, default=0.85, help="share of the first phase's steps before the rate falls")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread; part of the result")
    parser.add_argument("--pause-file", type=Path, help="no step begins while this file is there")
    parser.add_argument("--export-only", action="store_true", help="write the checkpoint of the saved state")
    arguments = parser.parse_args()
    if arguments.export_only:
        model = network.Model()
        saved = torch.load(arguments.state)
        model.load_state_dict(saved["model"])
        sharpen(model, saved["step"])
        network.export(model, arguments.out)
    elif arguments.workers == 1:
        work(0, arguments)
    else:
        Path(f"{arguments.state.absolute()}.rendezvous").unlink(missing_ok=True)
        mp.spawn(work, (arguments,), nprocs=arguments.workers)


if __name__ == "__main__":
    main()
