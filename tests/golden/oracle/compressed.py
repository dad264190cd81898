"""compressed-tensors checkpoints: int-quantized, pack-quantized and nvfp4-pack-quantized, written and read.

Reading follows the published format and is checked, tensor by tensor, against the compressed-tensors package.
"""

import fnmatch
import re

import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_tensor

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_MAX, _FP8_MAX = 6.0, 448.0


def scheme_of(module, config):
    """The config group that quantizes linear `module`, or None."""

    def hit(patterns, linear):
        for p in patterns:
            if p == "Linear":
                yield linear
            elif p.startswith("re:"):
                yield re.match(p[3:], module) is not None
            else:
                yield fnmatch.fnmatch(module, p)

    if any(hit(config["ignore"], False)):
        return None
    return next((g for g in config["config_groups"].values() if any(hit(g["targets"], True))), None)


def modules_of(config, tensors):
    """{linear module: its config group} of a plain checkpoint."""
    found = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and module != name and "embed_tokens" not in module:
            group = scheme_of(module, config)
            if group:
                found[module] = group
    return found


def _pack(codes, bits):
    """Signed codes [rows, n] as int32 words, 32 / bits a word from its low end up, half of their range added."""
    each = 32 // bits
    pad = -codes.shape[1] % each
    fields = torch.nn.functional.pad((codes + 2 ** (bits - 1)).long(), (0, pad)).unflatten(1, (-1, each))
    words = (fields << (bits * torch.arange(each))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _unpack(words, n, bits):
    fields = (words.long()[..., None] >> (bits * torch.arange(32 // bits))) & (2**bits - 1)
    return (fields.flatten(1)[:, :n] - 2 ** (bits - 1)).float()


def _packed(w, args, g):
    rows, cols = w.shape
    bits, half = args["num_bits"], 2 ** (args["num_bits"] - 1)
    size = args["group_size"] if args["strategy"] == "group" else cols
    group_of = torch.arange(cols) // size
    if args["actorder"] == "group":  # columns were grouped in the order of their activations
        group_of = group_of[torch.randperm(cols, generator=g)]
    scale, zero = torch.empty(rows, cols // size), torch.zeros(rows, cols // size)
    for i in range(cols // size):
        part = w[:, group_of == i]
        if args["symmetric"]:
            scale[:, i] = part.abs().amax(1) / (half - 0.5)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, i] = (high - low) / (2 * half - 1)
            zero[:, i] = (-half - low / scale[:, i]).round().clamp(-half, half - 1)
    scale = scale.bfloat16()
    codes = (w / scale.float()[:, group_of] + zero[:, group_of]).round().clamp(-half, half - 1)
    out = {"weight_packed": _pack(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}
    if not args["symmetric"]:
        out["weight_zero_point"] = _pack(zero.T, bits).T.contiguous()
    if args["actorder"] == "group":
        out["weight_g_idx"] = group_of.int()
    return out


def _nvfp4(w):
    grouped = w.unflatten(1, (-1, 16))
    global_scale = _FP8_MAX * _FP4_MAX / w.abs().max()
    scale = (grouped.abs().amax(-1) / _FP4_MAX * global_scale).to(torch.float8_e4m3fn)
    x = grouped / (scale.float() / global_scale)[..., None]
    codes = (x.abs()[..., None] - _FP4).abs().argmin(-1).flatten(1) + 8 * (x < 0).flatten(1)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": global_scale.view(1)}


def quantize(config, tensors, input_amax=None):
    """Replaces the weight of every linear that `config` (a quantization_config) names.

    `input_amax`: {module: largest input seen in calibration}, for static activation scales. They are set to 0.8 of
    it, so that inputs do get clamped.
    """
    out, chosen = {}, modules_of(config, tensors)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or module not in chosen:
            out[name] = tensor
            continue
        w, args = tensor.float(), chosen[module]["weights"]
        if args["type"] == "float":
            parts = _nvfp4(w)
        elif config["format"] == "pack-quantized":
            parts = _packed(w, args, torch.Generator().manual_seed(len(out)))
        else:
            scale = w.abs().amax(1, keepdim=True) / 127.5
            parts = {"weight": (w / scale).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}
            inputs = chosen[module]["input_activations"]
            if inputs and not inputs["dynamic"]:
                parts["input_scale"] = torch.tensor([0.8 * input_amax[module] / 127])
        out |= {f"{module}.{k}": v for k, v in parts.items()}
    return out


def _read(parts):
    if "weight_packed" not in parts:
        return parts["weight"].float() * parts["weight_scale"].float()
    packed, scale = parts["weight_packed"], parts["weight_scale"].float()
    if packed.dtype == torch.uint8:
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        values = torch.where(codes >= 8, -1.0, 1.0) * _FP4[codes & 7]
        return values * (scale / parts["weight_global_scale"]).repeat_interleave(16, 1)
    rows, cols = parts["weight_shape"].tolist()
    groups, bits = scale.shape[1], 32 // -(-cols // packed.shape[1])
    group_of = parts.get("weight_g_idx", torch.arange(cols) // (cols // groups)).long()
    zero = torch.zeros(rows, groups)
    if "weight_zero_point" in parts:
        zero = _unpack(parts["weight_zero_point"].T.contiguous(), rows, bits).T
    return (_unpack(packed, cols, bits) - zero[:, group_of]) * scale[:, group_of]


def _package_read(parts, args):
    """The same by the compressed-tensors package, with f32 scales. It has no g_idx any more."""
    args = QuantizationArgs(**{k: v for k, v in args.items() if v is not None})
    state = parts | {"weight_scale": parts["weight_scale"].float()}
    if args.type == "float":  # its compressor would round to bf16
        rows, half = parts["weight_packed"].shape
        codes = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, dtype=torch.float32)
        global_scale = parts["weight_global_scale"]
        return dequantize_tensor(codes, state["weight_scale"], args=args, global_scale=global_scale)
    compressor = PackedQuantizationCompressor if "weight_packed" in parts else IntQuantizationCompressor
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return compressor.decompress(state, scheme)["weight"].float()


def dequantize(config, tensors):
    """Plain f32 tensors of a compressed checkpoint; `config` is config.json."""
    config, out = config["quantization_config"], {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind in ("weight", "weight_packed") and module + ".weight_scale" in tensors:
            parts = {k.rpartition(".")[2]: v for k, v in tensors.items() if k.startswith(module + ".")}
            parts.pop("input_scale", None)
            bias = parts.pop("bias", None)
            out[module + ".weight"] = _read(parts)
            if "weight_g_idx" not in parts:
                theirs = _package_read(parts, scheme_of(module, config)["weights"])
                assert torch.allclose(theirs, out[module + ".weight"], rtol=1e-6, atol=0), module
            if bias is not None:
                out[module + ".bias"] = bias
        elif module + ".weight_scale" not in tensors:
            out[name] = tensor
    return out
