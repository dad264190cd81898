#!/usr/bin/env python3
"""Writes GGUF files with the layer shapes of published MoE models and random weights, to measure speed.

A file has fewer layers than the release, so that it has 2 to 7 GB. The vocabulary is reduced in the same proportion, so
that the output head takes the same share of a step. The tokenizer is an artificial byte-pair one, because servers require
one. The files are for measuring speed on random token ids.

Values are drawn once and repeated at random offsets, because speed does not depend on them. Routers decide the share of
experts that a step reads, so each draws its own values. Needs nothing beyond Python 3.9.

    python3 bench/make_shapes.py build/bench/shapes            # all shapes, q8_0, q4_0 and bf16
    python3 bench/make_shapes.py build/bench/shapes --shape qwen3-30b-a3b --type q8_0
"""
import argparse
import array
import math
import pathlib
import random
import struct

ALIGNMENT = 32
DEVIATION = 0.02  # standard deviation of weights, as at initialisation and similar after training
GGML_TYPE = {"f32": 0, "q4_0": 2, "q5_0": 6, "q8_0": 8, "q4_k": 12, "bf16": 30}
BLOCK_VALUES = {"f32": 1, "q4_0": 32, "q5_0": 32, "q8_0": 32, "q4_k": 256, "bf16": 1}
BLOCK_BYTES = {"f32": 4, "q4_0": 18, "q5_0": 22, "q8_0": 34, "q4_k": 144, "bf16": 2}
FOUR_BITS = ("q4_0", "q4_k")
POOL_BYTES = 64 << 20
END = "<|endoftext|>"


def qwen3_moe(hidden, heads, kv_heads, head, experts, width, layers, vocab, active):
    keys = {"block_count": layers, "context_length": 40960, "embedding_length": hidden,
            "feed_forward_length": 3 * hidden, "attention.head_count": heads, "attention.head_count_kv": kv_heads,
            "attention.key_length": head, "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
            "expert_count": experts, "expert_used_count": active, "expert_feed_forward_length": width,
            "vocab_size": vocab}
    tensors = [("token_embd", (vocab, hidden)), ("output_norm", (hidden,)), ("output", (vocab, hidden))]
    for i in range(layers):
        tensors += [(f"blk.{i}.{name}", shape) for name, shape in (
            ("attn_norm", (hidden,)), ("ffn_norm", (hidden,)),
            ("attn_q", (heads * head, hidden)), ("attn_k", (kv_heads * head, hidden)),
            ("attn_v", (kv_heads * head, hidden)), ("attn_output", (hidden, heads * head)),
            ("attn_q_norm", (head,)), ("attn_k_norm", (head,)), ("ffn_gate_inp", (experts, hidden)),
            ("ffn_gate_exps", (experts, width, hidden)), ("ffn_up_exps", (experts, width, hidden)),
            ("ffn_down_exps", (experts, hidden, width)))]
    return "qwen3moe", keys, tensors


def qwen3_30b_a3b(four_bits, layers=None):
    layers = layers or (8 if four_bits else 5)
    return qwen3_moe(hidden=2048, heads=32, kv_heads=4, head=128, experts=128, width=768, layers=layers,
                     vocab=24576 if layers > 5 else 16384, active=8)


def qwen3_30b_a3b_deep(_):
    """Returns a model of two layers, which fills long contexts in a minute or two."""
    return qwen3_30b_a3b(False, layers=2)


def qwen3_30b_a3b_start(four_bits):
    """Returns a model of more than 4 GB in 8 bits, for start-up times."""
    return qwen3_30b_a3b(four_bits, layers=13 if four_bits else 7)


def qwen3_moe_small(_):
    """Returns a small Qwen3-MoE that plays hours of agents' traffic on two cores."""
    return qwen3_moe(hidden=512, heads=8, kv_heads=2, head=64, experts=32, width=256, layers=4, vocab=16384, active=4)


def deepseek_v2_lite_deep(_):
    return deepseek_v2_lite(False, layers=2)


def deepseek_v2_lite(four_bits, layers=None):
    # kv_b_proj is one tensor, as older converters wrote it. llama.cpp runs it faster than its two halves, which
    # prevent the repacking of all weights.
    hidden, heads, nope, rope, value, latent = 2048, 16, 128, 64, 128, 512
    experts, shared, width, dense = 64, 2, 1408, 10944
    layers, vocab = (9, 24576) if four_bits else (layers or 6, 16384)
    keys = {"block_count": layers, "context_length": 163840, "embedding_length": hidden,
            "feed_forward_length": dense, "attention.head_count": heads, "attention.head_count_kv": heads,
            "attention.q_lora_rank": 0, "attention.kv_lora_rank": latent,
            "attention.key_length": nope + rope, "attention.value_length": value,
            "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": rope, "rope.freq_base": 1e4,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096, "rope.scaling.yarn_log_multiplier": 0.0707,
            "leading_dense_block_count": 1, "expert_count": experts, "expert_used_count": 6,
            "expert_shared_count": shared, "expert_feed_forward_length": width, "expert_weights_scale": 1.0,
            "expert_weights_norm": False, "expert_gating_func": 1, "vocab_size": vocab}
    tensors = [("token_embd", (vocab, hidden)), ("output_norm", (hidden,)), ("output", (vocab, hidden))]
    for i in range(layers):
        tensors += [(f"blk.{i}.{name}", shape) for name, shape in (
            ("attn_norm", (hidden,)), ("ffn_norm", (hidden,)), ("attn_kv_a_norm", (latent,)),
            ("attn_q", (heads * (nope + rope), hidden)), ("attn_kv_a_mqa", (latent + rope, hidden)),
            ("attn_kv_b", (heads * (nope + value), latent)),
            ("attn_output", (hidden, heads * value)))]
        if i == 0:
            tensors += [("blk.0.ffn_gate", (dense, hidden)), ("blk.0.ffn_up", (dense, hidden)),
                        ("blk.0.ffn_down", (hidden, dense))]
            continue
        tensors += [(f"blk.{i}.{name}", shape) for name, shape in (
            ("ffn_gate_inp", (experts, hidden)),
            ("ffn_gate_exps", (experts, width, hidden)), ("ffn_up_exps", (experts, width, hidden)),
            ("ffn_down_exps", (experts, hidden, width)),
            ("ffn_gate_shexp", (shared * width, hidden)), ("ffn_up_shexp", (shared * width, hidden)),
            ("ffn_down_shexp", (hidden, shared * width)))]
    return "deepseek2", keys, tensors


SHAPES = {"qwen3-30b-a3b": qwen3_30b_a3b, "qwen3-30b-a3b-start": qwen3_30b_a3b_start,
          "qwen3-30b-a3b-deep": qwen3_30b_a3b_deep, "qwen3-moe-small": qwen3_moe_small,
          "deepseek-v2-lite": deepseek_v2_lite, "deepseek-v2-lite-deep": deepseek_v2_lite_deep}


def vocabulary(size):
    """Returns (tokens, merges) of a byte-pair tokenizer: GPT-2's byte characters, one special token, and short words."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = (b for b in range(256) if b not in plain)
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens, merges = [letters[b] for b in range(256)] + [END], []
    alphabet = [letters[b] for b in b" etaoinshrdlucmfwypvbgkjqxz"]
    words = alphabet
    while True:
        longer = []
        for word in words:
            for letter in alphabet[1:]:
                if len(tokens) == size:
                    return tokens, merges
                tokens.append(word + letter)
                merges.append(f"{word} {letter}")
                longer.append(word + letter)
        words = longer


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item):
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, list):
        if isinstance(item[0], int):
            return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(string(one) for one in item)
    return struct.pack("<I", 8) + string(item)


def scales_of(kind):
    """Returns the scale bytes of a block that give weights of deviation DEVIATION and mean near 0."""
    uniform = {"q4_0": 16, "q5_0": 32, "q8_0": 256, "q4_k": 16}[kind]  # number of values of a weight's integer
    step = DEVIATION / math.sqrt((uniform**2 - 1) / 12)
    if kind != "q4_k":
        return struct.pack("<e", step)
    # Eight runs of 32 weights have a scale and a minimum of 6 bits each. All are 32, which packs to 0xa0 and zeros.
    return struct.pack("<ee", step / 32, 7.5 * step / 32) + b"\xa0" * 8 + b"\0" * 4


def encode(random_bytes, kind):
    """Converts random bytes to weights of `kind` with a deviation of about DEVIATION."""
    if kind == "bf16":  # a sign, and one of 512 magnitudes between 2^-9 and 2^-5
        high = bytes((0x3C, 0xBC, 0x3B, 0xBB)[i % 4] for i in range(256))
        data = bytearray(random_bytes)
        data[1::2] = data[1::2].translate(high)
        return bytes(data)
    block = BLOCK_BYTES[kind]
    data = bytearray(random_bytes[:len(random_bytes) // block * block])
    for at, byte in enumerate(scales_of(kind)):
        data[at::block] = bytes([byte]) * (len(data) // block)
    return bytes(data)


class Pool:
    """Encoded random values; tensors take runs at random offsets."""

    def __init__(self, rng, kind):
        self.rng = rng
        self.block = BLOCK_BYTES[kind]
        self.data = memoryview(encode(rng.randbytes(POOL_BYTES), kind))
        self.half = len(self.data) // 2 // self.block * self.block

    def runs(self, count):
        while count > 0:
            start = self.rng.randrange(self.half // self.block) * self.block
            run = self.data[start:start + min(count, self.half)]
            count -= len(run)
            yield run


def kind_of(name, shape, kind):
    if len(shape) == 1 or name.endswith("ffn_gate_inp"):
        return "f32"
    # Rows that are not a multiple of 256 are q5_0, as in llama-quantize.
    return "q5_0" if kind == "q4_k" and shape[-1] % BLOCK_VALUES[kind] else kind


def write(path, shape_name, kind, seed, context):
    rng = random.Random(seed)
    arch, keys, tensors = SHAPES[shape_name](kind in FOUR_BITS)
    keys["context_length"] = context or keys["context_length"]
    tokens, merges = vocabulary(keys["vocab_size"])
    end = tokens.index(END)
    metadata = {"general.architecture": arch, "general.name": f"{shape_name} shapes, random weights",
                "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": [3 if t == END else 1 for t in tokens], "tokenizer.ggml.merges": merges,
                "tokenizer.ggml.eos_token_id": end} | {f"{arch}.{key}": item for key, item in keys.items()}
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    header += b"".join(string(key) + value(item) for key, item in metadata.items())
    offset, sizes = 0, []
    for name, shape in tensors:
        stored = kind_of(name, shape, kind)
        size = math.prod(shape) // BLOCK_VALUES[stored] * BLOCK_BYTES[stored]
        header += string(name + ".weight") + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", GGML_TYPE[stored], offset)
        sizes.append(size)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    pools = {}
    temporary = path.with_suffix(".part")
    with open(temporary, "wb") as out:
        out.write(header + b"\0" * (-len(header) % ALIGNMENT))
        for (name, shape), size in zip(tensors, sizes):
            stored = kind_of(name, shape, kind)
            if len(shape) == 1:
                array.array("f", [1.0] * shape[0]).tofile(out)
            elif stored == "f32":
                array.array("f", [rng.gauss(0, DEVIATION) for _ in range(math.prod(shape))]).tofile(out)
            else:
                if stored not in pools:
                    pools[stored] = Pool(rng, stored)
                out.writelines(pools[stored].runs(size))
            out.write(b"\0" * (-size % ALIGNMENT))
    temporary.rename(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--type", choices=("q8_0", "q4_0", "q4_k", "bf16"), action="append",
                        help="default: q8_0, q4_0 and bf16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--context", type=int, default=0, help="tokens; default: the release's")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    for shape in options.shape or SHAPES:
        for kind in options.type or ("q8_0", "q4_0", "bf16"):
            path = options.directory / f"{shape}-{kind}.gguf"
            if path.exists():
                print(f"{path}: exists already")
                continue
            write(path, shape, kind, options.seed, options.context)
            print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
