"""Writes and reads the Hugging Face folder: DeepSeek-V3 names, bf16, the MTP module as the layer after the last."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model import CONFIG, MoE, Model

STACKS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
GENERATION = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 512}


def to_hub(model: Model) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of the DeepSeek-V3 release, fp32."""
    mtp = f"model.layers.{model.c['num_hidden_layers']}."
    moes = {name for name, module in model.named_modules() if isinstance(module, MoE)}
    out = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        hub = owner.replace("mtp.layer", mtp[:-1]) if owner.startswith("mtp.layer") else f"model.{owner}"
        if owner in moes and leaf in STACKS:
            for i, expert in enumerate(tensor):
                out[f"{hub}.experts.{i}.{STACKS[leaf]}.weight"] = expert
        elif owner in moes:
            out[f"{hub}.gate." + {"router": "weight", "bias": "e_score_correction_bias"}[leaf]] = tensor
        elif owner == "lm_head":
            out["lm_head.weight"] = tensor
        elif owner == "mtp.norm":
            out[mtp + "shared_head.norm.weight"] = tensor
        elif owner.startswith("mtp.") and not owner.startswith("mtp.layer"):
            out[mtp + f"{owner[4:]}.{leaf}"] = tensor
        else:
            out[f"{hub}.{leaf}"] = tensor
    # The release stores the shared tables a second time with the module, and readers expect them there.
    out[mtp + "embed_tokens.weight"] = out["model.embed_tokens.weight"].clone()
    out[mtp + "shared_head.head.weight"] = out["lm_head.weight"].clone()
    return out


def export(model: Model, folder: Path) -> None:
    tensors = {name: t.contiguous() if name.endswith("e_score_correction_bias") else t.to(torch.bfloat16).contiguous()
               for name, t in to_hub(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


def load(folder: Path) -> Model:
    """The exported weights back in the training model, fp32."""
    model = Model(json.loads((folder / "config.json").read_text()))
    stored = load_file(folder / "model.safetensors")
    state = model.state_dict()
    # to_hub returns views of the model's own storage: filling them fills the model.
    for name, view in to_hub(model).items():
        view.copy_(stored[name].float())
    model.load_state_dict(state)
    return model.eval()
