#!/usr/bin/env python3
"""Writes grids.safetensors: a matrix as the package compressed-tensors rounds it, scheme by scheme.

For each of int8, int4, nvfp4 and fp8: `<scheme>.scales` as stored, `<scheme>.codes` (u8, one each) and `<scheme>.values`
(f32), of `weights` [24, 160]. Scales are rounded to bf16, as in a bf16 model; everything else is in f32.
Needs torch, safetensors and compressed-tensors (0.20.0 made the file).
"""

from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from safetensors.torch import save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCHEMES = {
    "int8": dict(num_bits=8, type="int", strategy="channel"),
    "int4": dict(num_bits=4, type="int", strategy="group", group_size=32),
    "nvfp4": dict(num_bits=4, type="float", strategy="tensor_group", group_size=16,
                  scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn),
    "fp8": dict(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
}


def reduced(weights: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest of all weights that share a scale, in the shape of the scales."""
    rows, columns = weights.shape
    if scheme == "int8":
        shared = weights.view(rows, 1, columns)
    elif scheme == "fp8":
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
        padded[:rows, :columns] = weights
        shared = padded.view(padded.shape[0] // 128, 128, -1, 128).transpose(1, 2).flatten(2)
    else:
        shared = weights.view(rows, -1, SCHEMES[scheme]["group_size"])
    return shared.amin(-1), shared.amax(-1)


def codes_of(numbers: torch.Tensor, scheme: str) -> torch.Tensor:
    if scheme == "nvfp4":
        magnitude = (numbers.abs()[..., None] - E2M1).abs().argmin(-1)
        return (magnitude + 8 * torch.signbit(numbers)).to(torch.uint8)
    if scheme == "fp8":
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    return numbers.to(torch.int8).view(torch.uint8)


def main() -> None:
    torch.manual_seed(1)
    weights = (torch.distributions.StudentT(5.0).sample((24, 160)) * 0.02).bfloat16().float()
    out = {"weights": weights}
    for scheme, fields in SCHEMES.items():
        args = QuantizationArgs(symmetric=True, **fields)
        least, greatest = reduced(weights, scheme)
        global_scale = None
        if scheme == "nvfp4":
            global_scale = generate_gparam(weights.min(), weights.max())
            out["nvfp4.global_scale"] = global_scale
        scales, zeros = calculate_qparams(least, greatest, args, global_scale=global_scale)
        if scheme != "nvfp4":
            scales = scales.bfloat16()
        out[f"{scheme}.scales"] = scales.float()
        numbers = quantize(weights, scales.float(), zeros.float(), args, global_scale=global_scale)
        out[f"{scheme}.codes"] = codes_of(numbers, scheme)
        out[f"{scheme}.values"] = dequantize(numbers, scales.float(), None, args, dtype=torch.float32,
                                             global_scale=global_scale)
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, Path(__file__).parent / "grids.safetensors")


if __name__ == "__main__":
    main()
