#!/usr/bin/env python3
"""moesaic-tiny's kind of folder as a bf16 GGUF file, by llama.cpp's own converter.

The converter knows tokenizers by checksum and not this one, which cuts text as SmolLM's does (digits one by one, then
GPT-2's pattern): it is told so.

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
