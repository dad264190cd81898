#!/usr/bin/env python3
"""Converts a folder like moesaic-tiny to a bf16 GGUF file with llama.cpp's own converter.

The converter identifies tokenizers by checksum and does not know this one. It splits text like SmolLM's (single digits,
then GPT-2's pattern), so this script registers it as such.

Usage: to_gguf.py LLAMA_CPP_SOURCE MODEL OUT.gguf
"""
import sys

SOURCE, MODEL, OUT = sys.argv[1:]
sys.path[:0] = [SOURCE, f"{SOURCE}/gguf-py"]

import convert_hf_to_gguf  # noqa: E402
from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
sys.argv = ["convert_hf_to_gguf.py", MODEL, "--outtype", "bf16", "--outfile", OUT]
convert_hf_to_gguf.main()
