"""Compares transformers' logits of quantized folders with ours in FOLDER-f32.npy and FOLDER-auto.npy.

Usage: hf_logits.py IDS FOLDER...   Prints, as JSON, of each folder
    weights   with weights brought to f32 while loading: the largest difference from ours with --dtype f32, as a share
              of the largest logit. The package multiplies codes in the type of their scales, and bf16 has not the
              bits for the products: what it reads is a copy whose scales are the same numbers in f32
    run       as the package runs it, activations rounded in f32 where config.json says so: the median over tokens of
              the difference's rms, as a share of the logits'
    refused   {which of these: why}
"""
import json
import pathlib
import shutil
import sys
import tempfile

import numpy
import safetensors.torch
import torch
import transformers
from transformers.utils.quantization_config import CompressedTensorsConfig

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
# Up to 4.x "run_compressed": False dequantizes weights, and linears still round activations.
NEW = int(transformers.__version__.split(".")[0]) >= 5


def with_f32_scales(folder, copy):
    shutil.copytree(folder, copy)
    for path in pathlib.Path(copy).glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        safetensors.torch.save_file({name: tensor.float() if name.endswith("_scale") and tensor.dtype == torch.bfloat16 else
                                     tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return copy


def logits(folder, ids, dense):
    config = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dense and NEW else {}
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True,
                                                                    **config)
    if told["missing_keys"]:
        raise ValueError(f"{len(told['missing_keys'])} weights are not found, as {sorted(told['missing_keys'])[0]}")
    if dense and not NEW:
        for module in model.modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is not None:
                scheme.input_activations = None
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].numpy()


def compare(folder, ids):
    result = {"refused": {}}
    for part, dense in (("weights", True), ("run", False)):
        try:
            with tempfile.TemporaryDirectory() as copy:
                theirs = logits(with_f32_scales(folder, f"{copy}/f32") if dense else folder, ids, dense)
        except Exception as error:  # an unsupported format is a result
            result["refused"][part] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        ours = numpy.load(f"{folder}-{'f32' if dense else 'auto'}.npy")
        if dense:
            result[part] = float(abs(theirs - ours).max() / abs(ours).max())
        else:
            shares = numpy.sqrt(((theirs - ours) ** 2).mean(-1) / (ours**2).mean(-1))
            result[part] = float(numpy.median(shares))
    return result


if __name__ == "__main__":
    ids = [int(i) for i in sys.argv[1].split(",")]
    print(json.dumps({folder: compare(folder, ids) for folder in sys.argv[2:]}))
