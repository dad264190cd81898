"""Runs a checkpoint folder through Hugging Face transformers in fp32, eager attention, plain experts."""

import copy
import tempfile
from pathlib import Path

import torch
import transformers

from . import folder, routing


class HfModel:
    """A causal LM with one sequence in its cache. `config` is config.json as stored."""

    oracle = "transformers " + transformers.__version__

    def __init__(self, path, quantized=None):
        """`quantized`: optional function (config, tensors) -> plain tensors, for tensors that transformers does not read."""
        self.config, tensors = folder.read(Path(path))
        arch = self.config["architectures"][0]
        cls = getattr(transformers, arch)
        plain = {k: v for k, v in self.config.items() if k not in ("quantization_config", "auto_map")}
        if quantized:
            tensors = quantized(self.config, tensors)
        mtp = self.config["num_hidden_layers"]
        tensors = {k: v for k, v in tensors.items() if not k.startswith(f"model.layers.{mtp}.")}
        with tempfile.TemporaryDirectory() as tmp:
            folder.write(Path(tmp) / "m", plain, tensors)
            # The class is named rather than looked up: model_type kimi_k2 is not registered, its architecture is.
            hf_config = cls.config_class.from_dict({**plain, "model_type": cls.config_class.model_type})
            self.model, info = cls.from_pretrained(
                Path(tmp) / "m",
                config=hf_config,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        self.model.eval()
        self.router_margin = float("inf")
        for module in self.model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._watcher())

    def _watcher(self):
        def watch(module, _, output):  # a closure, so that copied layers still report here
            bias = getattr(module, "e_score_correction_bias", None)
            self.router_margin = min(self.router_margin, routing.margin(output[0], self.config, bias))

        return watch

    def double(self):
        """The same model with fp64 weights, to estimate what fp32 rounding does to the logits."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).double()
        return other

    def start(self, ids):
        """Runs `ids` from nothing; returns logits [len, vocab] and the final-normed hidden state [len, hidden]."""
        self.cache = None
        return self.extend(ids)

    @torch.no_grad()
    def extend(self, ids):
        out = self.model.model(torch.tensor([ids]), past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        return self.model.lm_head(out.last_hidden_state)[0].float(), out.last_hidden_state[0]
