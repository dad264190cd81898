"""All cases by name: how to make the checkpoint, and which oracle runs it."""

from . import cases_deepseek, cases_llama_qwen, folder, fp8, golden
from .hf import HfModel
from .mtp import HfMtp
from .mtp import extra as mtp_extra

NAMES = [*cases_deepseek.CONFIGS, *cases_llama_qwen.CONFIGS]
_SHARDS = {"deepseek-v3-noqlora": 3}


def checkpoint(name):
    """(config, tensors, number of shards) of a case."""
    module = cases_deepseek if name in cases_deepseek.CONFIGS else cases_llama_qwen
    return module.CONFIGS[name], module.tensors(name), _SHARDS.get(name, 1)


def run(name, path):
    """Golden tensors and metadata, from the checkpoint as it lies on disk."""
    config, tensors = folder.read(path)
    model = HfModel(path, fp8.dequantize if "quantization_config" in config else None)
    extras = []
    if config.get("num_nextn_predict_layers"):
        extras.append(mtp_extra(HfMtp(model, tensors), model, golden.MIN_ROUTER_MARGIN))
    return golden.make(model, name, config["vocab_size"], extras)
