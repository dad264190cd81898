#!/usr/bin/env python3
"""Writes smollm2_perplexity.json: what transformers says, in fp32 on the dequantised weights, about the start of a text.

Usage: smollm2_perplexity.py SmolLM2-135M-Instruct.Q4_1.gguf wikitext-2_valid.txt
The text is tokenized once; each window of `window` tokens is scored from its second token on.
"""
import hashlib
import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW, WINDOWS = 1024, 4


def main():
    gguf, text = map(pathlib.Path, sys.argv[1:])
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    ids = tokenizer(text.read_text(), add_special_tokens=False).input_ids[: WINDOW * WINDOWS]
    total = 0.0
    for start in range(0, len(ids), WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        with torch.no_grad():
            logprobs = model(window).logits[0, :-1].double().log_softmax(-1)
        total -= logprobs.gather(1, window[0, 1:, None]).sum().item()
    scored = len(ids) - WINDOWS
    result = {
        "text_sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
        "window": WINDOW,
        "tokens": len(ids),
        "scored": scored,
        "mean_nll": total / scored,
    }
    (pathlib.Path(__file__).parent / "smollm2_perplexity.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
