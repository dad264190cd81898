"""Loads folders that moesaic quantize wrote with vLLM's own code, as if on a GPU. Needs vLLM's CUDA wheel, no GPU.

Usage: vllm_reader.py CAPABILITY FOLDER...      CAPABILITY: 7.5, 8.0, 9.0, 10.0
       vllm_reader.py --qwen3-moe FOLDER WIDTH  writes a random Qwen3-MoE there, for moesaic quantize

The platform is vLLM's for CUDA with a compute capability that is pretended; tensors stay in main memory and no kernel
runs. vLLM builds the model that config.json names, and that of its multi-token prediction, chooses scheme and kernel of each
linear and of the routed experts, and loads the weights. Prints, as JSON, of each folder
    linears, experts   {what vLLM chose: how often}
    refused            {kind of module, or "load_weights": vLLM's error}
    differ             parameters that are not, before any repacking, what the files have
    unread             tensors of the files that no parameter holds
    held               how many tensors of the files parameters hold, to the bit
The last three only where nothing is refused, from capability 8.0 on: below there is no bf16. Attention is not asked: its
backends have rules of their own.
"""
import collections
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

# Parameters that are not the files' to set: shapes, of joined linears the last one's, which no kernel reads; scales of the
# KV cache; NVFP4 experts' scales of activations, which exist for 16-bit activations, too.
NOT_OF_FILES = r"\.weight_shape$|_weight_shape$|\.attn\.[qkv]_(scale|zero_point)$|_input_global_scale$"


def make_qwen3_moe(folder, width):
    import torch
    import transformers

    torch.manual_seed(6)
    config = transformers.Qwen3MoeConfig(
        vocab_size=1536, hidden_size=width, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.06,
        bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def let_cuda_library_load():
    """Replaces the driver that the wheel's operators link to; its functions are never called here."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return
    except OSError:
        pass
    sys.setdlopenflags(os.RTLD_LAZY)
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "libcuda.so.1"
        subprocess.run(["cc", "-shared", "-o", library, f"-Wl,-soname,{library.name}", "-xc", os.devnull], check=True)
        ctypes.CDLL(library)


def pretend(capability):
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    major, minor = map(int, capability.split("."))

    class Pretended(CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(major, minor))
        get_device_name = classmethod(lambda cls, device_id=0: "none")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        device_count = classmethod(lambda cls: 1)
        set_device = classmethod(lambda cls, device: None)

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):  # some ask the GPU
            of = AttentionBackendEnum
            return (of.TRITON_MLA if attn_selector_config.use_mla else of.TRITON_ATTN).get_path()

        @classmethod
        def get_mla_prefill_backend_cls(cls, config):  # they know few head sizes, moesaic-tiny's not among them
            from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

            return FlashAttnPrefillBackend

    vllm.platforms._current_platform = Pretended()
    from vllm.utils import torch_utils

    torch_utils._aux_stream = object()  # shared experts need a second stream; none is used


class Choices:
    """Intercepts vLLM's quantization: records the choice for each layer, and leaves rejected layers unquantized."""

    def __init__(self):
        from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

        self.linears, self.experts, self.refused = collections.Counter(), collections.Counter(), {}
        choose = CompressedTensorsConfig.get_quant_method

        def noting(config, layer, prefix):
            is_linear, is_experts = isinstance(layer, LinearBase), isinstance(layer, RoutedExperts)
            if not is_linear and not is_experts:
                return choose(config, layer, prefix)

            def plain():
                return UnquantizedLinearMethod() if is_linear else UnquantizedFusedMoEMethod(layer.moe_config)

            try:
                method = choose(config, layer, prefix)
            except Exception as error:  # the error is the result
                self.refuse(prefix, error)
                return plain()
            create = method.create_weights

            def creating(layer, *arguments, **named):
                try:
                    create(layer, *arguments, **named)
                except Exception as error:
                    self.refuse(prefix, error)
                    layer.quant_method = plain()
                    for name in list(layer._parameters):
                        del layer._parameters[name]
                    return layer.quant_method.create_weights(layer, *arguments, **named)
                (self.linears if is_linear else self.experts)[self.describe(layer, method)] += 1

            method.create_weights = creating
            return method

        CompressedTensorsConfig.get_quant_method = noting

    def refuse(self, prefix, error):
        kind = re.sub(r"^.*layers\.\d+\.(mtp_block\.)?", "", prefix)
        self.refused.setdefault(kind, f"{type(error).__name__}: {error}".splitlines()[0][:300])

    @staticmethod
    def describe(layer, method):
        scheme = getattr(layer, "scheme", None) or method
        backends = [value for name, value in vars(scheme).items() if name.endswith("_backend")]
        kernels = [type(value) for name, value in vars(scheme).items() if "kernel" in name and value is not None]
        by = getattr(backends[0], "name", str(backends[0])) if backends else kernels[0].__name__ if kernels else ""
        return type(scheme).__name__ + (f" by {by}" if by else "")


def expected(name, tensors, packed):
    """Returns (expected values of a parameter, their names in the files), or None if the files have none."""
    import torch

    expert = re.fullmatch(r"(.*\.experts)(?:\.routed_experts)?\.w(13|2)_(.*)", name)
    if expert:
        base, which, rest = expert.groups()
        count = 1 + max(int(n) for key in tensors for n in re.findall(re.escape(base) + r"\.(\d+)\.", key))
        of = ["gate_proj", "up_proj"] if which == "13" else ["down_proj"]
        names = [[f"{base}.{e}.{part}.{rest}" for part in of] for e in range(count)]
    else:
        module, _, rest = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        names = [[f"{parent}.{part}.{rest}".lstrip(".") for part in packed.get(leaf, [leaf])]]
    flat = [key for row in names for key in row]
    if not all(key in tensors for key in flat):
        return None
    rows = [torch.cat([tensors[key].reshape(-1) for key in row]) for row in names]
    return torch.cat(rows), flat


def hold(config, model_config, model, tensors, packed):
    """Returns (parameters that differ from the files, names of correctly loaded tensors) after loading."""
    import torch
    from vllm.model_executor.model_loader import get_model_loader

    for parameter in model.parameters():  # values that are not loaded are wrong
        parameter.data.copy_(torch.full_like(parameter.data, 77).to(parameter.dtype))
    loader = get_model_loader(config.load_config)
    model.load_weights(loader.get_all_weights(model_config, model))
    differ, held = [], set()
    for name, parameter in model.named_parameters():
        if re.search(NOT_OF_FILES, name):
            continue
        must = expected(name.replace(".mtp_block", ""), tensors, packed)
        values = parameter.data.reshape(-1)
        if must is None or must[0].numel() != values.numel() or not torch.equal(must[0].double(), values.double()):
            differ.append(name)
        else:
            held.update(must[1])
    return differ, held


def load(folder, capability, choices, packed):
    import safetensors.torch
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    choices.linears.clear(), choices.experts.clear(), choices.refused.clear()
    has_bf16 = float(capability) >= 8
    drafts = json.loads((pathlib.Path(folder) / "config.json").read_text()).get("num_nextn_predict_layers")
    config = EngineArgs(model=folder, enforce_eager=True, dtype="bfloat16" if has_bf16 else "half", max_model_len=256,
                        max_num_seqs=2, max_num_batched_tokens=256, skip_tokenizer_init=True,
                        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if drafts else None
                        ).create_engine_config()
    configs = [config.model_config] + ([config.speculative_config.draft_model_config] if drafts else [])
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        models = [initialize_model(vllm_config=config, model_config=of) for of in configs]
    result = {"linears": dict(choices.linears), "experts": dict(choices.experts), "refused": dict(choices.refused)}
    if choices.refused or not has_bf16:
        return result
    tensors = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(path))
    differ, held = [], set()
    for of, model in zip(configs, models):
        try:
            its_differ, its_held = hold(config, of, model, tensors, packed)
        except Exception as error:  # the error is the result
            choices.refuse("load_weights", error)
            return result | {"refused": dict(choices.refused)}
        differ += its_differ
        held |= its_held
    # A multi-token-prediction module repeats the model's embedding; vLLM keeps one of them.
    same = {name for name in tensors if name.endswith(".embed_tokens.weight")
            and torch.equal(tensors[name], tensors["model.embed_tokens.weight"])}
    unread = [name for name in tensors if name not in held | same and not name.endswith("weight_shape")]
    return result | {"differ": differ, "unread": unread, "held": len(held)}


def main(capability, folders):
    let_cuda_library_load()
    pretend(capability)
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, backend="gloo")
        initialize_model_parallel(1, 1)
    choices = Choices()
    packed = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"],
              "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}
    print(json.dumps({folder: load(folder, capability, choices, packed) for folder in folders}))


if __name__ == "__main__":
    if sys.argv[1] == "--qwen3-moe":
        make_qwen3_moe(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1], sys.argv[2:])
