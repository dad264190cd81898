"""Shows that the goldens can fail: changes one option of a committed checkpoint's config and prints how far the
logits move. Anything near or below the tests' tolerance (1e-4) would be an option that the golden does not prove."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from . import cases

_ROPE = "rope_scaling."
MUTATIONS = {
    "deepseek-v2-lite": {
        _ROPE + "mscale_all_dim": 1.0,
        _ROPE + "factor": 20,
        "rope_scaling": None,
    },
    "deepseek-v2-groups": {
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "topk_group": 3,
        _ROPE + "mscale": 0.707,
        _ROPE + "beta_fast": 1,
    },
    "deepseek-v3-noqlora": {
        "topk_group": 1,
        "norm_topk_prob": False,
        _ROPE + "mscale_all_dim": 0,
        "n_group": 2,
    },
    "deepseek-v3-mtp": {"rope_theta": 20000, "rms_norm_eps": 1e-3},
    "kimi-k2": {"rope_theta": 10000.0, _ROPE + "beta_fast": 32, "rms_norm_eps": 1e-5},
    "qwen3-moe-nonorm-untied": {"norm_topk_prob": True, "rope_theta": 10000.0, "rms_norm_eps": 1e-5},
    "qwen3-moe-norm-tied": {"norm_topk_prob": False},
    "llama3-rope-bias": {
        "rope_scaling": None,
        _ROPE + "factor": 4.0,
        _ROPE + "low_freq_factor": 2.0,
        "rms_norm_eps": 1e-5,
    },
    "pangu-ultra-moe-mtp": {"norm_topk_prob": False, "sandwich_norm": False, "rms_norm_eps": 1e-5},
}


def _logits(name, path, golden):
    model, out = cases.oracle(name, path), []
    for i in range(sum(k.endswith(".ids") for k in golden)):
        logits = model.start(golden[f"prompt_{i}.ids"].tolist())[0]
        out.append(logits[golden[f"prompt_{i}.rows"].long()])
    return torch.cat(out)


def show(here):
    for name, changes in MUTATIONS.items():
        golden = load_file(here / name / "golden.safetensors")
        base = _logits(name, here / name, golden)
        for key, value in changes.items():
            with tempfile.TemporaryDirectory() as tmp:
                shutil.copytree(here / name, Path(tmp) / "m")
                config = json.loads((here / name / "config.json").read_text())
                inner = config["rope_scaling"] if key.startswith(_ROPE) else config
                inner[key.removeprefix(_ROPE)] = value
                (Path(tmp) / "m/config.json").write_text(json.dumps(config))
                moved = (_logits(name, Path(tmp) / "m", golden) - base).abs()
            print(f"{name:26} {key + ' = ' + str(value):34} max {moved.max():.2e}  mean {moved.mean():.2e}")
