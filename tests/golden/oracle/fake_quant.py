"""int8 activations in the linears of a transformers model: x -> clamp(round_half_even(x / scale), -127, 127) * scale.

Static: scale is the stored input_scale. Dynamic: scale = max |x| of the token / 127, as engines' kernels do (the
compressed-tensors package's own simulation divides by 127.5).

Rounding is discontinuous, too. `tie` is the smallest distance of any x / scale from a rounding boundary: where it is
large enough, every right implementation takes the same integers.
"""

import contextlib

from torch.nn import functional as F

from . import compressed


class FakeQuant:
    def __init__(self, hf, tensors):
        """`tensors`: the checkpoint as stored."""
        config, self.by_pointer, self.tie = hf.config["quantization_config"], {}, float("inf")
        for name in tensors:
            module, _, kind = name.rpartition(".")
            if kind == "weight_scale":
                weight = _parameter(hf.model, module)
                inputs = compressed.scheme_of(module, config)["input_activations"]
                static = None if inputs["dynamic"] else tensors[module + ".input_scale"].item()
                previous = self.by_pointer.setdefault(weight.data_ptr(), static)
                assert previous == static, f"{module}: fused projections need one input scale"
        self.used = set()

    def _linear(self, x, weight, bias=None):
        if weight.data_ptr() not in self.by_pointer:
            return self.original(x, weight, bias)
        self.used.add(weight.data_ptr())
        scale = self.by_pointer[weight.data_ptr()]
        if scale is None:
            scale = x.abs().amax(-1, keepdim=True) / 127
        scaled = x / scale
        inside = scaled[scaled.abs() < 127.5]
        if inside.numel():
            self.tie = min(self.tie, (inside - inside.floor() - 0.5).abs().min().item())
        return self.original(scaled.round().clamp(-127, 127), weight) * scale + (0 if bias is None else bias)

    @contextlib.contextmanager
    def active(self):
        self.original, F.linear = F.linear, self._linear
        try:
            yield self
        finally:
            F.linear = self.original


def _parameter(model, module):
    """The weight of linear `module`; of an expert's, its slice of transformers' stacked parameter."""
    if ".experts." not in module:
        return model.get_submodule(module).weight
    experts, _, rest = module.partition(".experts.")
    index, _, proj = rest.partition(".")
    stacked = "down_proj" if proj == "down_proj" else "gate_up_proj"
    return getattr(model.get_submodule(experts + ".experts"), stacked)[int(index)]


def calibrate(hf, modules, ids):
    """{module: largest |input|} over `ids`; projections that share an input get the same value."""
    amax, names = {}, {}
    for module in modules:
        names.setdefault(_parameter(hf.model, module).data_ptr(), []).append(module)
    original = F.linear

    def watch(x, weight, bias=None):
        for module in names.get(weight.data_ptr(), []):
            amax[module] = max(amax.get(module, 0.0), x.abs().max().item())
        return original(x, weight, bias)

    F.linear = watch
    try:
        hf.start(ids)
    finally:
        F.linear = original
    return amax
