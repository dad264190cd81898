#include <cmath>

#include "checkpoint/gguf_checkpoint.h"

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;

// Reads "<arch>.<key>" entries; the first fault is kept, as in ConfigReader.
class KeyReader {
 public:
  KeyReader(const GgufMetadata& metadata, std::string arch, std::string file)
      : metadata_(metadata), arch_(std::move(arch)), file_(std::move(file)) {}

  int64_t Int(const std::string& key, int64_t high) {
    const std::optional<int64_t> value = metadata_.Int(Full(key));
    if (!value) return Fail(key, "is missing or no integer"), 1;
    return Ranged(key, *value, high);
  }
  int64_t IntOr(const std::string& key, int64_t high, int64_t fallback) {
    if (!metadata_.Has(Full(key))) return fallback;
    return Int(key, high);
  }
  double Number(const std::string& key, double low, double high) {
    const std::optional<double> value = metadata_.Number(Full(key));
    if (!value) return Fail(key, "is missing or no number"), low;
    if (!(*value >= low && *value <= high)) {
      Fail(key, fmt::format("must be a number in [{:g}, {:g}], found {}", low, high, *value));
      return low;
    }
    return *value;
  }
  double NumberOr(const std::string& key, double low, double high, double fallback) {
    return metadata_.Has(Full(key)) ? Number(key, low, high) : fallback;
  }
  bool BoolOr(const std::string& key, bool fallback) const {
    return metadata_.Bool(Full(key)).value_or(fallback);
  }
  std::string StringOr(const std::string& key, const std::string& fallback) const {
    const std::string* value = metadata_.String(Full(key));
    return value == nullptr ? fallback : *value;
  }
  bool Has(const std::string& key) const { return metadata_.Has(Full(key)); }
  void Fail(const std::string& key, const std::string& what) {
    if (fault_.ok()) fault_ = InvalidArgument("{}: metadata \"{}\" {}", file_, Full(key), what);
  }
  const Status& fault() const { return fault_; }

 private:
  std::string Full(const std::string& key) const { return arch_ + "." + key; }
  int64_t Ranged(const std::string& key, int64_t value, int64_t high) {
    if (value < 1 || value > high) {
      Fail(key, fmt::format("must be an integer in [1, {}], found {}", high, value));
      return 1;
    }
    return value;
  }

  const GgufMetadata& metadata_;
  std::string arch_, file_;
  Status fault_ = OkStatus();
};

constexpr int64_t kMaxDim = int64_t{1} << 24;
constexpr int64_t kMaxHeads = 4096;

bool HasTensor(const GgufFile& gguf, const std::string& name) {
  for (const TensorEntry& entry : gguf.tensors) {
    if (entry.name == name) return true;
  }
  return false;
}

void ReadCommon(KeyReader& in, const GgufFile& gguf, json& config) {
  config["hidden_size"] = in.Int("embedding_length", kMaxDim);
  config["num_hidden_layers"] = in.Int("block_count", 1024);
  config["max_position_embeddings"] = in.Int("context_length", 1 << 26);
  config["intermediate_size"] = in.IntOr("feed_forward_length", kMaxDim, 1);
  config["num_attention_heads"] = in.Int("attention.head_count", kMaxHeads);
  config["rms_norm_eps"] = in.Number("attention.layer_norm_rms_epsilon", 0, 1);
  config["rope_theta"] = in.NumberOr("rope.freq_base", 1, 1e12, 10000);
  config["hidden_act"] = "silu";
  config["tie_word_embeddings"] = !HasTensor(gguf, "output.weight");
  for (const TensorEntry& entry : gguf.tensors) {
    if (entry.name == "token_embd.weight") config["vocab_size"] = entry.shape[0];
  }
  if (!config.contains("vocab_size")) config["vocab_size"] = in.Int("vocab_size", kMaxDim);
  const auto set = [&](const char* key, const char* metadata_key) {
    if (const auto id = gguf.metadata.Int(metadata_key)) config[key] = *id;
  };
  set("bos_token_id", "tokenizer.ggml.bos_token_id");
  set("eos_token_id", "tokenizer.ggml.eos_token_id");
}

void ReadGqa(KeyReader& in, json& config) {
  config["num_key_value_heads"] =
      in.IntOr("attention.head_count_kv", kMaxHeads, config["num_attention_heads"]);
  const int64_t heads = config["num_attention_heads"];
  const int64_t fallback = std::max<int64_t>(config["hidden_size"].get<int64_t>() / heads, 1);
  config["head_dim"] = in.IntOr("attention.key_length", kMaxDim, fallback);
  const int64_t value_dim = in.IntOr("attention.value_length", kMaxDim, config["head_dim"]);
  if (value_dim != config["head_dim"]) in.Fail("attention.value_length", "must equal attention.key_length");
}

void ReadScaling(KeyReader& in, json& config) {
  const std::string type = in.StringOr("rope.scaling.type", "none");
  if (type == "none") return;
  json scaling = {{"type", type}, {"factor", in.Number("rope.scaling.factor", 1e-3, 1e6)}};
  if (type == "yarn") {
    scaling["original_max_position_embeddings"] = in.Int("rope.scaling.original_context_length", 1 << 26);
    scaling["beta_fast"] = in.NumberOr("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32);
    scaling["beta_slow"] = in.NumberOr("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1);
    if (in.Has("rope.scaling.yarn_log_multiplier")) {
      // The converter stores 0.1 mscale_all_dim and drops mscale, which is the same in every DeepSeek
      // release.
      const double mscale = std::round(in.Number("rope.scaling.yarn_log_multiplier", 0, 10) * 1e7) / 1e6;
      scaling["mscale"] = mscale;
      scaling["mscale_all_dim"] = mscale;
    }
  } else if (type != "linear") {
    in.Fail("rope.scaling.type", fmt::format("must be none, linear or yarn, found {}", type));
  }
  config["rope_scaling"] = scaling;
}

void ReadLlama(KeyReader& in, json& config) {
  config["architectures"] = {"LlamaForCausalLM"};
  config["model_type"] = "llama";
  ReadGqa(in, config);
  if (in.IntOr("expert_count", kMaxDim, 1) != 1)
    in.Fail("expert_count", "is set: Mixtral models are not supported");
}

void ReadQwen3(KeyReader& in, bool moe, json& config) {
  config["architectures"] = {moe ? "Qwen3MoeForCausalLM" : "Qwen3ForCausalLM"};
  config["model_type"] = moe ? "qwen3_moe" : "qwen3";
  ReadGqa(in, config);
  if (!moe) return;
  config["num_experts"] = in.Int("expert_count", 65536);
  config["num_experts_per_tok"] = in.Int("expert_used_count", 65536);
  config["moe_intermediate_size"] = in.Int("expert_feed_forward_length", kMaxDim);
  config["norm_topk_prob"] =
      in.BoolOr("expert_weights_norm", true);  // what every release has and ggml assumes
  config["decoder_sparse_step"] = 1;
}

void ReadDeepseekExperts(KeyReader& in, bool v3, json& config) {
  config["n_routed_experts"] = in.Int("expert_count", 65536);
  config["num_experts_per_tok"] = in.Int("expert_used_count", 65536);
  config["moe_intermediate_size"] = in.Int("expert_feed_forward_length", kMaxDim);
  config["n_shared_experts"] = in.IntOr("expert_shared_count", 64, 1);
  config["first_k_dense_replace"] = in.IntOr("leading_dense_block_count", 1024, 1);
  config["routed_scaling_factor"] = in.NumberOr("expert_weights_scale", 0, 1e6, 1);
  config["norm_topk_prob"] = in.BoolOr("expert_weights_norm", false);
  const int64_t groups = in.IntOr("expert_group_count", 65536, 1);
  config["n_group"] = groups;
  config["topk_group"] = in.IntOr("expert_group_used_count", 65536, 1);
  config["scoring_func"] = v3 ? "sigmoid" : "softmax";
  config["topk_method"] = v3 ? "noaux_tc" : (groups > 1 ? "group_limited_greedy" : "greedy");
}

void ReadDeepseek2(KeyReader& in, json& config) {
  const int64_t gating = in.IntOr("expert_gating_func", 2, 1);
  const bool v3 = gating == 2;
  config["architectures"] = {v3 ? "DeepseekV3ForCausalLM" : "DeepseekV2ForCausalLM"};
  config["model_type"] = v3 ? "deepseek_v3" : "deepseek_v2";
  const int64_t rope = in.Int("rope.dimension_count", kMaxDim);
  const int64_t key = in.Has("attention.key_length_mla") ? in.Int("attention.key_length_mla", kMaxDim)
                                                         : in.Int("attention.key_length", kMaxDim);
  const int64_t value = in.Has("attention.value_length_mla") ? in.Int("attention.value_length_mla", kMaxDim)
                                                             : in.Int("attention.value_length", kMaxDim);
  if (key <= rope)
    in.Fail("rope.dimension_count", fmt::format("must be less than the key length {}, found {}", key, rope));
  config["num_key_value_heads"] = config["num_attention_heads"];
  config["qk_rope_head_dim"] = rope;
  config["qk_nope_head_dim"] = std::max<int64_t>(key - rope, 1);
  config["v_head_dim"] = value;
  config["kv_lora_rank"] = in.Int("attention.kv_lora_rank", kMaxDim);
  config["q_lora_rank"] =
      in.Has("attention.q_lora_rank") ? json(in.Int("attention.q_lora_rank", kMaxDim)) : json();
  const int64_t mtp = in.IntOr("nextn_predict_layers", 64, 0);
  if (mtp > 0) config["num_hidden_layers"] = config["num_hidden_layers"].get<int64_t>() - mtp;
  if (v3) config["num_nextn_predict_layers"] = mtp;
  ReadDeepseekExperts(in, v3, config);
}

}  // namespace

StatusOr<json> ConfigFromGguf(const GgufFile& gguf, const std::string& file) {
  const std::string* arch = gguf.metadata.String("general.architecture");
  if (arch == nullptr) return InvalidArgument("{}: metadata \"general.architecture\" is missing", file);
  if (*arch != "llama" && *arch != "qwen3" && *arch != "qwen3moe" && *arch != "deepseek2") {
    return Unimplemented(
        "{}: metadata \"general.architecture\" must be llama, qwen3, qwen3moe or deepseek2, found \"{}\"",
        file, *arch);
  }
  KeyReader in(gguf.metadata, *arch, file);
  json config;
  ReadCommon(in, gguf, config);
  if (*arch == "llama") {
    ReadLlama(in, config);
  } else if (*arch == "deepseek2") {
    ReadDeepseek2(in, config);
  } else {
    ReadQwen3(in, *arch == "qwen3moe", config);
  }
  ReadScaling(in, config);
  RETURN_IF_ERROR(in.fault());
  return config;
}

}  // namespace moesaic::checkpoint
