#!/usr/bin/env python3
"""Runs llm-compressor for compare.py: quantizes a folder by a recipe and prints its time as a line of JSON.

Usage: llmcompressor_side.py MODEL OUT SCHEME METHOD TOKENS   (TOKENS: safetensors with "tokens" [rows, length])
"""
import json
import pathlib
import shutil
import sys
import time

import safetensors.torch
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

IGNORE = ["lm_head", "re:.*mlp\\.gate$", "re:.*kv_b_proj$"]  # linears that moesaic quantize keeps


def scheme_of(name, static):
    if name == "w8a8":
        return QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(num_bits=8, strategy="channel", symmetric=True),
            input_activations=QuantizationArgs(num_bits=8, strategy="tensor" if static else "token", symmetric=True,
                                               dynamic=not static))
    return QuantizationScheme(targets=["Linear"],
                              weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=True))


def main():
    folder, out, scheme, method, tokens = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    kind = GPTQModifier if method == "gptq" else QuantizationModifier
    recipe = [kind(config_groups={"group_0": scheme_of(scheme, method == "static")}, ignore=IGNORE)]
    if method == "static":
        recipe.insert(0, SmoothQuantModifier(smoothing_strength=0.8))
    rows = safetensors.torch.load_file(tokens)["tokens"].tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    calibration = {"dataset": data, "max_seq_length": len(rows[0]), "num_calibration_samples": len(rows)}
    start = time.monotonic()
    oneshot(model=model, processor=AutoTokenizer.from_pretrained(folder), recipe=recipe,
            **(calibration if method != "rtn" else {}))
    seconds = time.monotonic() - start
    model.save_pretrained(out, save_compressed=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pathlib.Path(folder) / name, out)
    print(json.dumps({"quantizing_seconds": seconds}))


if __name__ == "__main__":
    main()
