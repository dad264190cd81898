"""Compares a folder that moesaic quantize wrote with the compressed-tensors package. Needs the package and PyTorch.

The package's own classes parse config.json (they refuse any field they do not know), its own code unpacks codes and
multiplies scales. The result must be, to the bit, code times scale, and every code the one that is nearest to the
source's weight under its scale: what moesaic quantize means to write. Of a calibrated folder, whose codes are others,
the static scales of activations must be where config.json has them.
"""
import json
import pathlib
import re
import sys
import unittest

import safetensors.torch
import torch

try:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
except ImportError:  # until 0.13
    try:
        from compressed_tensors.compressors.quantized_compressors.fp4_quantized import unpack_fp4_from_uint8
    except ImportError:  # until 0.12
        from compressed_tensors.compressors.quantized_compressors.nvfp4_quantized import unpack_fp4_from_uint8
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def load(folder):
    tensors = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(path))
    return tensors


def is_named(module, names):
    return any(re.match(name[3:], module) if name.startswith("re:") else name == module for name in names)


def nearest_e2m1(value):
    """Returns the nearest e2m1 number, ties to the even code."""
    magnitude = value.abs().clamp(max=6)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    code = torch.searchsorted(middles, magnitude, right=False)  # a tie is rounded down ...
    tie = torch.isin(magnitude, middles) & (code % 2 == 1)      # ... but up from odd codes
    return E2M1[code + tie.int()] * torch.where(value.signbit(), -1.0, 1.0)


def per_value(scale, shape, block):
    """Expands scales to [rows, columns] of the values."""
    spread = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]


def read_linear(tensors, module, args):
    """(codes as numbers, scale of each value, what the package dequantizes to), all f32."""
    scale = tensors[module + ".weight_scale"]
    if module + ".weight_shape" in tensors:
        shape = torch.Size(tensors[module + ".weight_shape"].tolist())
        codes = unpack_from_int32(tensors[module + ".weight_packed"], args.num_bits, shape)
        theirs = dequantize(codes, scale.float(), args=args)
        return codes.float(), per_value(scale, shape, (1, args.group_size if args.strategy == "group" else shape[1])), theirs
    if args.num_bits == 4:
        packed = tensors[module + ".weight_packed"]
        shape = (packed.shape[0], packed.shape[1] * 2)
        codes = unpack_fp4_from_uint8(packed, *shape, dtype=torch.float32)
        divisor = tensors[module + ".weight_global_scale"]
        theirs = dequantize(codes, scale.float(), args=args, global_scale=divisor, dtype=torch.float32)
        return codes, per_value(scale.float() / divisor, shape, (1, 16)), theirs
    codes = tensors[module + ".weight"]
    theirs = dequantize(codes, scale, args=args)
    block = args.block_structure or (1, codes.shape[1])
    return codes.float(), per_value(scale, codes.shape, block), theirs.float()


def scheme_of(module, groups):
    """Returns the group that names the module, else the one for all linears."""
    named = [group for group in groups if is_named(module, group.targets)]
    return (named or [group for group in groups if "Linear" in group.targets])[0]


def check(folder, test, source=None, calibrated=False):
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    tensors, weights = load(folder), load(source or pathlib.Path(__file__).parents[2] / "models" / "moesaic-tiny")
    linears = 0
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or module.endswith("embed_tokens") or is_named(module, parsed.ignore):
            if name in tensors and not calibrated:
                test.assertTrue(torch.equal(tensors[name], weight), name)
            continue
        scheme = scheme_of(module, parsed.config_groups.values())
        static = scheme.input_activations is not None and not scheme.input_activations.dynamic
        test.assertEqual(module + ".input_scale" in tensors, static, module)
        if static:
            scale = tensors[module + ".input_scale"]
            test.assertTrue(scale.numel() == 1 and scale.item() > 0, module)
        codes, scales, theirs = read_linear(tensors, module, scheme.weights)
        test.assertTrue(torch.equal(theirs, codes * scales), module)
        linears += 1
        if calibrated:
            continue
        exact = weight.float() / scales
        if scheme.weights.type == "float" and scheme.weights.num_bits == 4:
            meant = nearest_e2m1(exact)
        elif scheme.weights.type == "float":
            meant = exact.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        else:
            low, high = (-8, 7) if scheme.weights.num_bits == 4 else (-127, 127)
            meant = exact.round().clamp(low, high)
        test.assertTrue(torch.equal(codes, meant), module)
    test.assertGreater(linears, 100)
    return linears


def told(folder, source, calibrated):
    """Returns the number of correct linears, or the reason why the package cannot read the folder."""
    try:
        return check(folder, unittest.TestCase(), source, calibrated)
    except AssertionError:
        raise
    except Exception as error:  # a scheme that this release does not support
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


if __name__ == "__main__":  # SOURCE [--calibrated=]FOLDER...
    print(json.dumps({path.removeprefix("--calibrated="): told(path.removeprefix("--calibrated="), sys.argv[1],
                                                               path.startswith("--calibrated="))
                      for path in sys.argv[2:]}))
