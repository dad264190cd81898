"""Chooses prompts, runs an oracle over them and writes golden.safetensors (names and shapes: ../README.md)."""

import json
import zlib

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PROMPT_LENGTHS = (1, 7, 70, 200)
GREEDY_TOKENS = 64
KEPT_ROWS = 8  # of prompts longer than FULL_ROWS
FULL_ROWS = 64
MIN_ROUTER_MARGIN = 1e-4
MIN_GREEDY_MARGIN = 2e-3
MAX_FP32_NOISE = 3e-5


def _greedy(model, ids, min_router_margin):
    """Greedy continuation, or None as soon as a routing or a token choice is too close to call."""
    model.router_margin = float("inf")
    logits, hidden = model.start(ids)
    tokens, margins, step = [], [], logits[-1]
    while len(tokens) < GREEDY_TOKENS:
        top = step.topk(2)
        tokens.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        if margins[-1] < MIN_GREEDY_MARGIN or model.router_margin < min_router_margin:
            return None
        if len(tokens) < GREEDY_TOKENS:
            step = model.extend(tokens[-1:])[0][-1]
    return logits, hidden, tokens, margins, model.router_margin


def _rows(length):
    return torch.arange(max(0, length - KEPT_ROWS) if length > FULL_ROWS else 0, length)


def make(model, name, vocab, extras=(), max_noise=MAX_FP32_NOISE, min_router_margin=MIN_ROUTER_MARGIN):
    """Golden tensors and metadata of `model`.

    `extras`: functions (prefix, ids, greedy, hidden, rows) -> further tensors of a prompt, or None to reject it.
    """
    tensors, router, greedy, noise, fp64 = {}, float("inf"), float("inf"), 0.0, model.double()
    for i, length in enumerate(PROMPT_LENGTHS):
        for attempt in range(1000):
            g = torch.Generator().manual_seed(zlib.crc32(f"{name}/{length}/{attempt}".encode()))
            ids = torch.randint(3, vocab, (length,), generator=g).tolist()  # 0..2 are often special
            result = _greedy(model, ids, min_router_margin)
            if result is None:
                continue
            logits, hidden, tokens, margins, router_margin = result
            p, rows = f"prompt_{i}.", _rows(length)
            more = [extra(p, ids, tokens, hidden, rows) for extra in extras]
            if all(m is not None for m in more):
                break
        else:
            raise RuntimeError(f"{name}: no clear prompt of {length} tokens in 1000 tries")
        reference = fp64.start(ids)[0]
        noise = max(noise, (logits - reference).abs().max().item())
        router, greedy = min(router, router_margin), min(greedy, *margins)
        tensors |= {
            p + "ids": torch.tensor(ids, dtype=torch.int32),
            p + "rows": rows.int(),
            p + "logits": logits[rows].clone(),
            p + "greedy": torch.tensor(tokens, dtype=torch.int32),
            p + "margins": torch.tensor(margins),
        }
        for m in more:
            tensors |= m
    assert noise < max_noise, f"{name}: fp32 noise {noise}"
    metadata = {
        "oracle": model.oracle,
        "torch": torch.__version__,
        "min_router_margin": f"{router:.3g}",
        "min_greedy_margin": f"{greedy:.3g}",
        "fp32_noise": f"{noise:.3g}",
    }
    return tensors, metadata


def write(path, tensors, metadata, file="golden.safetensors"):
    # One metadata key, because safetensors writes several in an order that differs from run to run.
    metadata = {"golden": json.dumps(metadata, sort_keys=True)}
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / file, metadata=metadata)


def compare(path, tensors):
    """Largest difference between the stored golden and `tensors`; integers must be equal."""
    worst = 0.0
    with safe_open(path / "golden.safetensors", "pt") as stored:
        assert set(stored.keys()) == set(tensors), set(stored.keys()) ^ set(tensors)
        for key in stored.keys():
            old, new = stored.get_tensor(key), tensors[key]
            assert old.shape == new.shape and old.dtype == new.dtype, key
            if old.dtype == torch.int32:
                assert torch.equal(old, new), key
            else:
                worst = max(worst, (old - new).abs().max().item())
    return worst
