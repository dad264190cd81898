#!/usr/bin/env python3
"""Judges a checkpoint folder: exact answers on held-out prompts, MTP acceptance, expert load, logits against
transformers. The answers are decoded greedily by transformers' DeepseekV3ForCausalLM in fp32.
"""

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import DeepseekV3ForCausalLM
from transformers.utils import logging

import checkpoint
import generate

EOS, PAD = 2, 0
BATCH_TOKENS = 6000


def prompt_ids(tokenizer, row: dict) -> list[int]:
    text = "".join(t for t, _ in generate.segments(row["messages"], row.get("tools"), prompt=True))
    return tokenizer.encode(text, add_special_tokens=False).ids


def batches(lengths: list[int]):
    """Indices of rows of like length, few enough at a time to fit the budget."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[i] > BATCH_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


@torch.no_grad()
def answer(hub, tokenizer, rows: list[dict]) -> list[list[int]]:
    """Greedy answers, ids without the end token; as many tokens as the right answer needs and a few more."""
    prompts = [prompt_ids(tokenizer, r) for r in rows]
    wanted = [len(tokenizer.encode(r["expected"], add_special_tokens=False).ids) for r in rows]
    out: list[list[int]] = [[] for _ in rows]
    for group in batches([len(p) + w for p, w in zip(prompts, wanted)]):
        width = max(len(prompts[i]) for i in group)
        ids = torch.tensor([[PAD] * (width - len(prompts[i])) + prompts[i] for i in group])
        made = hub.generate(input_ids=ids, attention_mask=(ids != PAD).long(), do_sample=False, eos_token_id=EOS,
                            pad_token_id=PAD, max_new_tokens=max(wanted[i] for i in group) + 8)
        for i, sequence in zip(group, made[:, width:].tolist()):
            out[i] = sequence[: sequence.index(EOS)] if EOS in sequence else sequence
    return out


@torch.no_grad()
def acceptance(model, prompts: list[list[int]], answers: list[list[int]]) -> tuple[int, int, int, int]:
    """How often the MTP draft is the token that greedy decoding takes.

    Returns (accepted, drafted) over every position of the answers, then (tokens, steps) of a decoder that verifies
    one draft a step: an accepted draft saves the next step.
    """
    accepted = drafted = tokens = steps = 0
    for prompt, made in zip(prompts, answers):
        ids = torch.tensor([prompt + made + [EOS]])
        hidden = model.hidden(ids)
        drafts = model.lm_head(model.drafts(hidden, ids)).argmax(-1)[0]
        # Draft i is for ids[i + 2]; the first comes once the first answer token is known.
        first = len(prompt) + 1
        right = [bool(drafts[at - 2] == ids[0, at]) for at in range(first, ids.shape[1])]
        accepted += sum(right)
        drafted += len(right)
        tokens += len(right) + 1
        steps += 1  # the prompt's own step yields the first token
        at = 0
        while at < len(right):
            steps += 1
            at += 1 + right[at]  # an accepted draft brings the token after it along
    return accepted, drafted, tokens, steps


@torch.no_grad()
def logits_difference(model, hub, prompts: list[list[int]]) -> float:
    """Largest difference of our logits and transformers', fp32."""
    worst = 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        worst = max(worst, float((model.lm_head(model.hidden(ids)) - hub(ids).logits).abs().max()))
    return worst


@torch.no_grad()
def expert_load(model, prompts, answers) -> list[tuple[float, float]]:
    """Of each MoE layer (the MTP module's last): the most and the least used expert's share of the mean load."""
    for moe in model.moes():
        moe.load.zero_()
    for prompt, made in zip(prompts, answers):
        ids = torch.tensor([prompt + made])
        model.drafts(model.hidden(ids), ids)
    return [(float(m.load.max() / m.load.mean()), float(m.load.min() / m.load.mean())) for m in model.moes()]


@torch.no_grad()
def answer_loss(model, tokenizer, conversations: int = 200) -> tuple[float, float]:
    """Mean cross-entropy over answers of fresh training-like conversations: (head, MTP module)."""
    sampler = generate.Sampler(random.Random("loss"))
    total, ahead, count, count_ahead = 0.0, 0.0, 0, 0
    for _ in range(conversations):
        pieces = generate.segments(**sampler.conversation(512, generate.LAST))
        ids, written = [], []
        for text, flag in pieces:
            part = tokenizer.encode(text, add_special_tokens=False).ids
            ids += part
            written += [flag] * len(part)
        ids, written = torch.tensor([ids]), torch.tensor(written)
        hidden = model.hidden(ids)
        each = torch.nn.functional.cross_entropy(model.lm_head(hidden)[0, :-1], ids[0, 1:], reduction="none")
        total, count = total + float(each[written[1:]].sum()), count + int(written[1:].sum())
        each = torch.nn.functional.cross_entropy(model.lm_head(model.drafts(hidden, ids))[0, :-1], ids[0, 2:],
                                                 reduction="none")
        ahead, count_ahead = ahead + float(each[written[2:]].sum()), count_ahead + int(written[2:].sum())
    return total / count, ahead / count_ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("--model", type=Path, default=here, help="checkpoint folder")
    parser.add_argument("--held-out", type=Path, default=here / "heldout.jsonl")
    parser.add_argument("--every", type=int, default=1, help="judge only every N-th prompt")
    parser.add_argument("--mistakes", type=int, default=0, metavar="N", help="print up to N wrong answers a category")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    tokenizer = Tokenizer.from_file(str(here / "tokenizer.json"))
    hub = DeepseekV3ForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    model = checkpoint.load(arguments.model)
    rows = [json.loads(line) for line in arguments.held_out.read_text().splitlines()][:: arguments.every]
    prompts = [prompt_ids(tokenizer, r) for r in rows]
    answers = answer(hub, tokenizer, rows)

    scores, wrong = defaultdict(list), defaultdict(list)
    for row, made in zip(rows, answers):
        text = tokenizer.decode(made, skip_special_tokens=False)
        scores[row["category"]].append(text == row["expected"])
        if text != row["expected"]:
            wrong[row["category"]].append((row["messages"][-1]["content"][-120:], row["expected"][-200:], text[-200:]))
    print("| category | exact | of |\n|---|---|---|")
    for category, hits in scores.items():
        print(f"| {category} | {sum(hits)} | {len(hits)} |")
    hits = [h for group in scores.values() for h in group]
    print(f"| all | {sum(hits)} ({sum(hits) / len(hits):.1%}) | {len(hits)} |")
    for category, cases in wrong.items():
        for asked, expected, text in cases[: arguments.mistakes]:
            print(f"  {category}: {asked!r}\n    expected {expected!r}\n    answered {text!r}")

    accepted, drafted, tokens, steps = acceptance(model, prompts, answers)
    print(f"MTP drafts accepted: {accepted} of {drafted} ({accepted / drafted:.1%}); "
          f"{tokens / steps:.2f} tokens a verified step")
    loads = expert_load(model, prompts, answers)
    print("expert load max/mean, min/mean: " + ", ".join(f"{a:.2f} {b:.2f}" for a, b in loads))
    print("answer loss, MTP answer loss: %.4f %.4f nats" % answer_loss(model, tokenizer))
    print(f"largest logit difference to transformers, fp32: {logits_difference(model, hub, prompts[::10]):.2e}")


if __name__ == "__main__":
    main()
