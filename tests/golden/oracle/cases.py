"""All cases by name: how to make the checkpoint, and which oracle runs it."""

from . import cases_compressed, cases_deepseek, cases_glm, cases_llama_qwen, cases_pangu, compressed, folder, fp8, golden
from .hf import HfModel
from .mtp import HfMtp
from .mtp import extra as mtp_extra
from .pangu import PanguModel, PanguMtp

_MODULES = (cases_deepseek, cases_glm, cases_llama_qwen, cases_pangu, cases_compressed)
NAMES = [name for module in _MODULES for name in module.CONFIGS]
_DEQUANTIZE = {None: None, "fp8": fp8.dequantize, "compressed-tensors": compressed.dequantize}
_SHARDS = {"deepseek-v3-noqlora": 3}


def checkpoint(name):
    """(config, tensors, number of shards) of a case."""
    module = next(m for m in _MODULES if name in m.CONFIGS)
    return module.CONFIGS[name], module.tensors(name), _SHARDS.get(name, 1)


def oracle(name, path):
    """The model that computes a case's golden."""
    if name in cases_pangu.CONFIGS:
        return PanguModel(path)
    config = folder.read(path)[0]
    return HfModel(path, _DEQUANTIZE[config.get("quantization_config", {}).get("quant_method")])


def run(name, path):
    """Golden tensors and metadata, from the checkpoint on disk."""
    config, tensors = folder.read(path)
    if name in cases_pangu.CONFIGS:
        cases_pangu.check_transcription(name)
    model, extras = oracle(name, path), []
    if name in cases_compressed.CONFIGS:
        w8a8 = cases_compressed.w8a8_extra(model, tensors, golden.MIN_ROUTER_MARGIN)
        extras += [w8a8] if w8a8 else []
    if model.config.get("num_nextn_predict_layers"):
        mtp = PanguMtp(model) if name in cases_pangu.CONFIGS else HfMtp(model, tensors)
        extras.append(mtp_extra(mtp, model, golden.MIN_ROUTER_MARGIN))
    return golden.make(model, name, config["vocab_size"], extras)
