"""FP8 e4m3 weights in 128x128 blocks, as DeepSeek-V3 is released: weight = code * weight_scale_inv of its block.

Edge blocks cover what is left of the matrix. Embedding, head, norms and the router stay as they are.
"""

import torch

_BLOCK = 128
_MAX = 448.0  # largest finite e4m3 value


def _stays(name, tensor):
    return tensor.ndim != 2 or "embed_tokens" in name or "lm_head" in name or "mlp.gate." in name


def _spread(scale, shape):
    wide = scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return wide[: shape[0], : shape[1]]


def quantize(tensors):
    out = {}
    for name, tensor in tensors.items():
        if _stays(name, tensor):
            out[name] = tensor
            continue
        rows, cols = (-(-n // _BLOCK) for n in tensor.shape)
        padded = torch.zeros(rows * _BLOCK, cols * _BLOCK)
        padded[: tensor.shape[0], : tensor.shape[1]] = tensor.float()
        amax = padded.reshape(rows, _BLOCK, cols, _BLOCK).abs().amax((1, 3))
        scale = amax / _MAX
        out[name] = (tensor.float() / _spread(scale, tensor.shape)).to(torch.float8_e4m3fn)
        out[name + "_scale_inv"] = scale
    return out


def dequantize(_, tensors):
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(name + "_scale_inv")
        out[name] = tensor if scale is None else tensor.float() * _spread(scale, tensor.shape)
    return out
