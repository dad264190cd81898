#!/usr/bin/env python3
"""Trains the byte-level BPE tokenizer and writes tokenizer.json, tokenizer_config.json with the chat template."""

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import generate

VOCABULARY = 1536  # 256 bytes, the tokens below, and merges enough for one token a word of the domain
SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
PLAIN = ["<tool_call>", "</tool_call>"]  # kept in the decoded text, for parsers to find

CHAT_TEMPLATE = """\
{{- '<|begin|>' }}
{%- set ns = namespace(system='', rest=messages) %}
{%- if messages and messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
    {%- set ns.rest = messages[1:] %}
{%- endif %}
{%- if tools %}
    {%- if ns.system %}
        {%- set ns.system = ns.system + '\\n' %}
    {%- endif %}
    {%- set ns.system = ns.system + 'Tools:' %}
    {%- for tool in tools %}
        {%- set ns.system = ns.system + '\\n' + ((tool.function if tool.function else tool) | tojson) %}
    {%- endfor %}
{%- endif %}
{%- if ns.system %}
    {{- '<|system|>' + ns.system + '<|end|>' }}
{%- endif %}
{%- for message in ns.rest %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function else call %}
            {{- '<tool_call>{"name": ' + (function.name | tojson) + ', "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- elif message.role in ['user', 'tool', 'system'] %}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def train(seed: int, conversations: int) -> Tokenizer:
    sampler = generate.Sampler(random.Random(seed))
    texts = [text for _ in range(conversations)
             for text, _ in generate.segments(**sampler.conversation(256, generate.FIRST))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    plain = [AddedToken(t, special=False, normalized=False) for t in PLAIN]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special + plain, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    cut = "|".join(SPECIAL).replace("<|", "").replace("|>", "").split("|")
    for name in cut:
        texts = [t.replace(f"<|{name}|>", "") for t in texts]
    texts = [t.replace(PLAIN[0], "").replace(PLAIN[1], "") for t in texts]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def mark_plain(path: Path) -> None:
    """The trainer marks all of its special tokens special; the tool call markers must survive decoding."""
    data = json.loads(path.read_text())
    for token in data["added_tokens"]:
        if token["content"] in PLAIN:
            token["special"] = False
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=6000)
    arguments = parser.parse_args()
    path = arguments.out / "tokenizer.json"
    train(arguments.seed, arguments.conversations).save(str(path))
    mark_plain(path)
    tokenizer = Tokenizer.from_file(str(path))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>",
        "pad_token": "<|pad|>", "add_bos_token": False, "add_eos_token": False, "model_max_length": 4096,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens -> {path}")


if __name__ == "__main__":
    main()
