#!/usr/bin/env python3
"""Trains moesaic-tiny from scratch on a CPU and writes the checkpoint folder.

A step's data depends on the seed, the step and the worker only, so a run that is stopped and resumed sees what an
unbroken run sees. The rate is constant until --decay-from of the steps and then falls to zero; from --long-from on,
every third step has long documents.
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
from tokenizers import Tokenizer

import checkpoint
import generate
import optimizer as optimizers
from model import CONFIG, Model

TOKENS = 4096  # a step, over all workers
SHORT = 256  # row length
LONG = (512, 1024, 2048)  # row lengths of the long steps in turn; such a row begins with one long document
LONG_EVERY = 3  # steps, once long rows have begun
MIXES = ((850, generate.LAST), (400, generate.THEN), (0, generate.FIRST))  # first steps of each
PROMPT_WEIGHT = 0.1  # loss weight of prompt tokens, taken at every PROMPT_EVERY-th of them
PROMPT_EVERY = 8
MTP_WEIGHT = 0.3
BIAS_SPEED = 1e-3


def encode(tokenizer, conversation: dict) -> tuple[list[int], list[float]]:
    pieces = generate.segments(**conversation)
    encoded = tokenizer.encode_batch([text for text, _ in pieces], add_special_tokens=False)
    ids = [i for piece in encoded for i in piece.ids]
    return ids, [float(written) for (_, written), piece in zip(pieces, encoded) for _ in piece.ids]


def pack(sampler, tokenizer, rows: int, length: int, mix: generate.Mix, long: bool):
    """Fills rows with whole conversations, the last of a row cut; a long row begins with a long one.

    Returns ids [rows, length], loss weights of each token [rows, length], document numbers [rows, length]. A long
    row counts as one document: what follows its first conversation sees it, and learns to pass it over.
    """
    ids = torch.zeros(rows, length, dtype=torch.long)
    weights = torch.zeros(rows, length)
    documents = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        at = document = 0
        while at < length:
            room = length - at
            made = sampler.long_conversation(length) if long and at == 0 else sampler.conversation(
                min(max(room, 96), SHORT), mix)
            tokens, written = encode(tokenizer, made)
            end = min(at + len(tokens), length)
            ids[row, at:end] = torch.tensor(tokens[: end - at])
            weights[row, at:end] = torch.tensor(written[: end - at])
            documents[row, at:end] = document
            at = end
            document += not long
    prompt = (weights == 0) & (torch.arange(length) % PROMPT_EVERY == 0)
    weights[prompt] = PROMPT_WEIGHT
    return ids, weights, documents


def losses(model, ids, weights, documents):
    """Weighted cross-entropy of the head and of the MTP module, and the head's over answers alone."""
    mask = None
    if documents.any():  # else one document a row, and causal attention is enough
        mask = documents[:, None, :, None] == documents[:, None, None, :]
        mask = mask & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    hidden = model.hidden(ids, mask)
    drafts = model.drafts(hidden, ids, mask)

    def loss(states, ahead):
        target, weight = ids[:, ahead:], weights[:, ahead:] * (documents[:, ahead:] == documents[:, :-ahead])
        chosen = weight > 0
        logits = model.lm_head(states[:, : target.shape[1]][chosen]).float()
        each = F.cross_entropy(logits, target[chosen], reduction="none")
        weight = weight[chosen]
        answer = weight == 1.0
        return (each * weight).sum() / weight.sum(), each[answer].mean()

    main, answers = loss(hidden, 1)
    ahead, ahead_answers = loss(drafts[:, :-1], 2)
    return main, ahead, answers, ahead_answers


def reduce_gradients(model, workers: int) -> None:
    """Averages the gradients, and adds the expert loads, of all workers."""
    if workers == 1:
        return
    tensors = [p.grad for p in model.parameters()] + [m.load for m in model.moes()]
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))
    for p in model.parameters():
        p.grad /= workers


def balance(model, speed: float) -> float:
    """Moves each router's bias against its load; returns the worst max/mean load of the step."""
    worst = 0.0
    for moe in model.moes():
        worst = max(worst, float(moe.load.max() / moe.load.mean()))
        moe.bias += speed * torch.sign(moe.load.mean() - moe.load)
        moe.load.zero_()
    return worst


def learning_rate(step: int, steps: int, decay_from: float) -> float:
    """Share of the peak rate: a warm-up, a plateau, then straight down."""
    rate = min((step + 1) / 100, 1.0)
    progress = step / steps
    if progress > decay_from:
        rate *= max(1 - (progress - decay_from) / (1 - decay_from), 0.01)
    return rate


def work(rank: int, arguments) -> None:
    """One worker's run: the same model in each, a different part of every step's batch."""
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    workers = arguments.workers
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{arguments.state.absolute()}.rendezvous", rank=rank,
                                world_size=workers)
    tokenizer = Tokenizer.from_file(str(Path(__file__).parent / "tokenizer.json"))
    model = Model(CONFIG)
    rules = optimizers.build(model, arguments.lr)
    first = 0
    if arguments.state.exists():
        state = torch.load(arguments.state)
        model.load_state_dict(state["model"])
        for rule, saved in zip(rules, state["rules"]):
            rule.load_state_dict(saved)
        first = state["step"]
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, from step {first}", flush=True)
    started, tokens = time.time(), 0
    for step in range(first, arguments.steps):
        rate = learning_rate(step, arguments.steps, arguments.decay_from)
        for rule in rules:
            for group in rule.param_groups:
                group["lr"] = group["peak"] * rate
        long = step >= arguments.long_from and step % LONG_EVERY == 0
        length = LONG[step // LONG_EVERY % len(LONG)] if long else SHORT
        mix = next(m for first_step, m in MIXES if step >= first_step)
        sampler = generate.Sampler(random.Random(f"{arguments.seed}|{step}|{rank}"))
        batch = pack(sampler, tokenizer, TOKENS // length // workers, length, mix, long)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            main_loss, mtp_loss, answers, ahead = losses(model, *batch)
        (main_loss + MTP_WEIGHT * mtp_loss).backward()
        reduce_gradients(model, workers)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for rule in rules:
            rule.step()
            rule.zero_grad(set_to_none=True)
        worst = balance(model, BIAS_SPEED * rate)
        tokens += TOKENS
        last = step == arguments.steps - 1
        if rank == 0 and (step % 20 == 0 or long and step % 5 == 0 or last):
            names = dict(loss=main_loss, mtp=mtp_loss, answers=answers, mtp_answers=ahead, norm=norm)
            print(json.dumps({"step": step, "row": length} | {k: round(v.item(), 4) for k, v in names.items()} |
                             {"load": round(worst, 2), "rate": round(rate, 3),
                              "tokens_s": round(tokens / (time.time() - started)),
                              "seconds": round(time.time() - started)}), flush=True)
        if rank == 0 and ((step + 1) % 50 == 0 or last):
            part = arguments.state.with_suffix(".part")
            torch.save({"model": model.state_dict(), "rules": [r.state_dict() for r in rules], "step": step + 1}, part)
            part.replace(arguments.state)
    if rank == 0:
        checkpoint.export(model, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="checkpoint folder")
    parser.add_argument("--state", type=Path, required=True, help="file for the resumable training state")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--long-from", type=int, default=800, help="first step with long rows")
    parser.add_argument("--decay-from", type=float, default=0.7, help="share of steps before the rate falls")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread; part of the result")
    parser.add_argument("--export-only", action="store_true", help="write the checkpoint of the saved state")
    arguments = parser.parse_args()
    if arguments.export_only:
        model = Model(CONFIG)
        model.load_state_dict(torch.load(arguments.state)["model"])
        checkpoint.export(model, arguments.out)
    elif arguments.workers == 1:
        work(0, arguments)
    else:
        Path(f"{arguments.state.absolute()}.rendezvous").unlink(missing_ok=True)
        mp.spawn(work, (arguments,), nprocs=arguments.workers)


if __name__ == "__main__":
    main()
