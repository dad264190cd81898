#!/usr/bin/env python3
"""Writes tokenizer.json and tokenizer_config.json: one token a word of tasks.py, and bytes for all else."""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import tasks

CHAT_TEMPLATE = """\
{{- '<|begin|>' }}
{%- for message in messages %}
    {%- if message.role in ['user', 'assistant'] %}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def vocabulary() -> dict[str, int]:
    """Roles, then bytes (marks are bytes), then words with the space before them."""
    tokens = tasks.ROLES + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["Ġ" + w for w in tasks.WORDS]
    return {token: i for i, token in enumerate(tokens)}


def ids_of(tokens: list[str], ids: dict[str, int]) -> list[int]:
    """Tokens that the tokenizer gives for tasks.text_of(tokens)."""
    return [ids[t] if t in ids and (t in tasks.ROLES or t in tasks.MARKS) else ids["Ġ" + t] for t in tokens]


def build() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tasks.ROLES])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    tokenizer = build()
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>",
        "pad_token": "<|pad|>", "add_bos_token": False, "add_eos_token": False, "model_max_length": 32768,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
