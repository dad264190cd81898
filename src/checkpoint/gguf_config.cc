#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <set>

#include "checkpoint/ggml_blocks.h"
#include "checkpoint/gguf_checkpoint.h"

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;

// Reads "<arch>.<key>" entries. Like ConfigReader, it keeps the first error and tracks which keys were read.
class KeyReader {
 public:
  KeyReader(const GgufMetadata& metadata, std::string arch, std::string file)
      : metadata_(metadata), arch_(std::move(arch)), file_(std::move(file)) {}

  int64_t Int(const std::string& key, int64_t low, int64_t high) {
    const bool present = Has(key);
    const std::optional<int64_t> value = metadata_.Int(Full(key));
    if (!value) return Fail(key, present ? "must be an integer" : "is missing"), low;
    if (*value < low || *value > high) {
      Fail(key, fmt::format("must be an integer in [{}, {}], found {}", low, high, *value));
      return low;
    }
    return *value;
  }
  int64_t IntOr(const std::string& key, int64_t low, int64_t high, int64_t fallback) {
    return Has(key) ? Int(key, low, high) : fallback;
  }
  double Number(const std::string& key, double low, double high) {
    const bool present = Has(key);
    const std::optional<double> value = metadata_.Number(Full(key));
    if (!value) return Fail(key, present ? "must be a number" : "is missing"), low;
    if (!(*value >= low && *value <= high)) {
      Fail(key, fmt::format("must be a number in [{:g}, {:g}], found {}", low, high, *value));
      return low;
    }
    return *value;
  }
  double NumberOr(const std::string& key, double low, double high, double fallback) {
    return Has(key) ? Number(key, low, high) : fallback;
  }
  bool BoolOr(const std::string& key, bool fallback) {
    if (!Has(key)) return fallback;
    const std::optional<bool> value = metadata_.Bool(Full(key));
    if (!value) Fail(key, "must be true or false");
    return value.value_or(fallback);
  }
  std::string StringOr(const std::string& key, const std::string& fallback) {
    if (!Has(key)) return fallback;
    const std::string* value = metadata_.String(Full(key));
    if (value == nullptr) Fail(key, "must be a string");
    return value == nullptr ? fallback : *value;
  }
  bool Has(const std::string& key) {
    read_.insert(Full(key));
    return metadata_.Has(Full(key));
  }
  /// Marks keys that duplicate other keys or do not affect inference.
  void Ignore(const std::vector<std::string>& keys) {
    for (const std::string& key : keys) read_.insert(Full(key));
  }
  void Fail(const std::string& key, const std::string& what) { Fault("metadata \"{}\" {}", Full(key), what); }
  template <typename... Args>
  void Fault(fmt::format_string<Args...> format, Args&&... args) {
    if (fault_.ok())
      fault_ = InvalidArgument("{}: {}", file_, fmt::format(format, std::forward<Args>(args)...));
  }
  const std::string& file() const { return file_; }
  std::string Full(const std::string& key) const { return arch_ + "." + key; }

  /// Returns the first error; otherwise an error that names a key that was not read.
  Status Finish() {
    if (!fault_.ok()) return fault_;
    for (const std::string& key : metadata_.Keys()) {
      if (!key.starts_with(arch_ + ".") || read_.contains(key)) continue;
      return Unimplemented(
          "{}: metadata \"{}\" is not supported; running the model without it could give wrong results",
          file_, key);
    }
    return OkStatus();
  }

 private:
  const GgufMetadata& metadata_;
  std::string arch_, file_;
  std::set<std::string> read_;
  Status fault_ = OkStatus();
};

constexpr int64_t kMaxDim = int64_t{1} << 24;
constexpr int64_t kMaxHeads = 4096;

const TensorEntry* FindTensor(const GgufFile& gguf, const std::string& name) {
  for (const TensorEntry& entry : gguf.tensors) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

void ReadCommon(KeyReader& in, const GgufFile& gguf, json& config) {
  config["hidden_size"] = in.Int("embedding_length", 1, kMaxDim);
  config["num_hidden_layers"] = in.Int("block_count", 1, 1024);
  config["max_position_embeddings"] = in.Int("context_length", 1, 1 << 26);
  config["intermediate_size"] = in.Int("feed_forward_length", 1, kMaxDim);
  config["num_attention_heads"] = in.Int("attention.head_count", 1, kMaxHeads);
  config["rms_norm_eps"] = in.Number("attention.layer_norm_rms_epsilon", 0, 1);
  config["rope_theta"] = in.NumberOr("rope.freq_base", 1, 1e12, 10000);
  config["hidden_act"] = "silu";
  config["tie_word_embeddings"] = FindTensor(gguf, "output.weight") == nullptr;
  const TensorEntry* embedding = FindTensor(gguf, "token_embd.weight");
  if (embedding != nullptr) in.Ignore({"vocab_size"});
  config["vocab_size"] = embedding != nullptr ? embedding->shape[0] : in.Int("vocab_size", 1, kMaxDim);
  const auto set = [&](const char* key, const char* metadata_key) {
    if (const auto id = gguf.metadata.Int(metadata_key)) config[key] = *id;
  };
  set("bos_token_id", "tokenizer.ggml.bos_token_id");
  set("eos_token_id", "tokenizer.ggml.eos_token_id");
}

void ReadGqa(KeyReader& in, json& config) {
  config["num_key_value_heads"] =
      in.IntOr("attention.head_count_kv", 1, kMaxHeads, config["num_attention_heads"]);
  const int64_t heads = config["num_attention_heads"];
  const int64_t fallback = std::max<int64_t>(config["hidden_size"].get<int64_t>() / heads, 1);
  config["head_dim"] = in.IntOr("attention.key_length", 1, kMaxDim, fallback);
  for (const char* key : {"attention.value_length", "rope.dimension_count"}) {
    const int64_t dim = in.IntOr(key, 1, kMaxDim, config["head_dim"]);
    if (dim == config["head_dim"]) continue;
    in.Fail(key,
            fmt::format("must be {}, the length of a key, found {}", config["head_dim"].get<int64_t>(), dim));
  }
}

// llama.cpp divides the frequencies by a factor without a type, and treats a factor of 0 as 1. It ignores the
// factor if the type is "none".
void ReadScaling(KeyReader& in, json& config) {
  std::string type = in.StringOr("rope.scaling.type", "");
  if (type.empty()) {
    const double factor = in.NumberOr("rope.scaling.factor", 0, 1e6, 0);
    type = factor == 0 || factor == 1 ? "none" : "linear";
  }
  in.Ignore({"rope.scaling.finetuned"});
  if (type == "none") {
    in.Ignore({"rope.scaling.factor", "rope.scaling.original_context_length"});
    return;
  }
  if (type == "linear") in.Ignore({"rope.scaling.original_context_length"});
  if (config.contains("rope_scaling")) {
    in.Fault("tensor rope_freqs.weight and metadata \"{}\" must not both scale the rotation",
             in.Full("rope.scaling.factor"));
    return;
  }
  json scaling = {{"type", type}, {"factor", in.Number("rope.scaling.factor", 1e-3, 1e6)}};
  if (type == "yarn") {
    scaling["original_max_position_embeddings"] = in.Int("rope.scaling.original_context_length", 1, 1 << 26);
    scaling["beta_fast"] = in.NumberOr("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32);
    scaling["beta_slow"] = in.NumberOr("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1);
    if (in.Has("rope.scaling.yarn_log_multiplier")) {
      // The converter stores 0.1 mscale_all_dim and drops mscale, which has the same value in every DeepSeek
      // release.
      const double mscale = std::round(in.Number("rope.scaling.yarn_log_multiplier", 0, 10) * 1e7) / 1e6;
      scaling["mscale"] = mscale;
      scaling["mscale_all_dim"] = mscale;
    } else if (config.contains("kv_lora_rank")) {
      scaling["attention_factor"] = 1.0;  // llama.cpp then scales neither cos and sin nor the softmax
    }
  } else if (type != "linear") {
    in.Fail("rope.scaling.type", fmt::format("must be none, linear or yarn, found {}", type));
  }
  config["rope_scaling"] = scaling;
}

// The file stores Llama 3's rope scaling as a tensor of divisors of the frequencies. The divisors follow from
// four numbers, three of which are equal in all releases. This restores those numbers if they reproduce the
// tensor.
void ReadFrequencyFactors(KeyReader& in, const GgufFile& gguf, json& config) {
  const TensorEntry* entry = FindTensor(gguf, "rope_freqs.weight");
  if (entry == nullptr) return;
  const int64_t half = config["head_dim"].get<int64_t>() / 2;
  if (entry->dtype != tensor::DType::kF32 || entry->shape != std::vector<int64_t>{half}) {
    in.Fault("tensor rope_freqs.weight must be F32 [{}], found {} {}", half, tensor::DTypeName(entry->dtype),
             json(entry->shape).dump());
    return;
  }
  std::vector<float> found(static_cast<size_t>(half));
  DequantizeBlocks(entry->dtype, entry->bytes.data(), half, found.data());
  const double factor = half > 0 ? std::round(found.back()) : 1;
  constexpr double kLow = 1, kHigh = 4, kContext = 8192;
  const auto theta = config["rope_theta"].get<double>();
  for (int64_t i = 0; i < half; ++i) {
    const double turns =
        kContext / (2 * M_PI * std::pow(theta, static_cast<double>(i) / static_cast<double>(half)));
    const double smooth = std::clamp((turns - kLow) / (kHigh - kLow), 0.0, 1.0);
    const double expected = 1 / ((1 - smooth) / factor + smooth);
    if (std::fabs(found[i] - expected) <= 1e-3 * expected) continue;  // f32 arithmetic gives about 1e-5
    in.Fault(
        "tensor rope_freqs.weight must be Llama 3's rope scaling ({:g} at {} for factor {:g}), found {:g}",
        expected, i, factor, found[i]);
    return;
  }
  if (factor == 1) return;
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", factor},
                            {"low_freq_factor", kLow},
                            {"high_freq_factor", kHigh},
                            {"original_max_position_embeddings", static_cast<int64_t>(kContext)}};
}

void ReadLlama(KeyReader& in, const GgufFile& gguf, json& config) {
  config["architectures"] = {"LlamaForCausalLM"};
  config["model_type"] = "llama";
  ReadGqa(in, config);
  config["attention_bias"] = FindTensor(gguf, "blk.0.attn_q.bias") != nullptr;
  config["mlp_bias"] = FindTensor(gguf, "blk.0.ffn_gate.bias") != nullptr;
  if (in.IntOr("expert_count", 0, kMaxDim, 0) != 0) {
    in.Fail("expert_count", "must be 0: Mixtral models are not supported");
  }
  in.Ignore({"expert_used_count"});
}

void ReadQwen3(KeyReader& in, const GgufFile& gguf, bool moe, json& config) {
  config["architectures"] = {moe ? "Qwen3MoeForCausalLM" : "Qwen3ForCausalLM"};
  config["model_type"] = moe ? "qwen3_moe" : "qwen3";
  ReadGqa(in, config);
  config["attention_bias"] = FindTensor(gguf, "blk.0.attn_q.bias") != nullptr;
  if (!moe) return;
  config["num_experts"] = in.Int("expert_count", 1, 65536);
  config["num_experts_per_tok"] = in.Int("expert_used_count", 1, 65536);
  config["moe_intermediate_size"] = in.Int("expert_feed_forward_length", 1, kMaxDim);
  config["norm_topk_prob"] =
      in.BoolOr("expert_weights_norm", true);  // value of every release, assumed by ggml
  config["decoder_sparse_step"] = 1;
}

void ReadDeepseekExperts(KeyReader& in, bool v3, json& config) {
  config["n_routed_experts"] = in.Int("expert_count", 1, 65536);
  config["num_experts_per_tok"] = in.Int("expert_used_count", 1, 65536);
  config["moe_intermediate_size"] = in.Int("expert_feed_forward_length", 1, kMaxDim);
  config["n_shared_experts"] = in.Int("expert_shared_count", 0, 64);
  config["first_k_dense_replace"] = in.Int("leading_dense_block_count", 0, 1024);
  config["routed_scaling_factor"] = in.NumberOr("expert_weights_scale", 0, 1e6, 1);
  config["norm_topk_prob"] = in.BoolOr("expert_weights_norm", false);
  const int64_t groups = in.IntOr("expert_group_count", 1, 65536, 1);
  config["n_group"] = groups;
  config["topk_group"] = in.IntOr("expert_group_used_count", 1, 65536, 1);
  config["scoring_func"] = v3 ? "sigmoid" : "softmax";
  config["topk_method"] = v3 ? "noaux_tc" : (groups > 1 ? "group_limited_greedy" : "greedy");
}

void ReadDeepseek2(KeyReader& in, json& config) {
  // 1: softmax, 2: sigmoid. Files without this key are DeepSeek-V2's.
  const bool v3 = in.IntOr("expert_gating_func", 1, 2, 1) == 2;
  config["architectures"] = {v3 ? "DeepseekV3ForCausalLM" : "DeepseekV2ForCausalLM"};
  config["model_type"] = v3 ? "deepseek_v3" : "deepseek_v2";
  const int64_t rope = in.Int("rope.dimension_count", 1, kMaxDim);
  // In newer files the plain keys hold lengths of the latent space, and the _mla keys those of a head.
  const std::string mla = in.Has("attention.key_length_mla") ? "_mla" : "";
  const int64_t key = in.Int("attention.key_length" + mla, 1, kMaxDim);
  const int64_t value = in.Int("attention.value_length" + mla, 1, kMaxDim);
  in.Ignore({"attention.key_length", "attention.value_length", "attention.head_count_kv"});
  if (key <= rope)
    in.Fail("rope.dimension_count", fmt::format("must be less than the key length {}, found {}", key, rope));
  config["num_key_value_heads"] = config["num_attention_heads"];
  config["qk_rope_head_dim"] = rope;
  config["qk_nope_head_dim"] = std::max<int64_t>(key - rope, 1);
  config["v_head_dim"] = value;
  config["kv_lora_rank"] = in.Int("attention.kv_lora_rank", 1, kMaxDim);
  const int64_t q_rank = in.IntOr("attention.q_lora_rank", 0, kMaxDim, 0);
  config["q_lora_rank"] = q_rank > 0 ? json(q_rank) : json();
  const int64_t blocks = config["num_hidden_layers"];
  const int64_t mtp = in.IntOr("nextn_predict_layers", 0, blocks - 1, 0);  // the last blocks
  config["num_hidden_layers"] = blocks - mtp;
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
    ReadLlama(in, gguf, config);
  } else if (*arch == "deepseek2") {
    ReadDeepseek2(in, config);
  } else {
    ReadQwen3(in, gguf, *arch == "qwen3moe", config);
  }
  if (config.contains("head_dim")) {
    ReadFrequencyFactors(in, gguf, config);
  } else if (FindTensor(gguf, "rope_freqs.weight") != nullptr) {
    in.Fault("tensor rope_freqs.weight is not supported for {}", *arch);
  }
  ReadScaling(in, config);
  RETURN_IF_ERROR(in.Finish());
  return config;
}

}  // namespace moesaic::checkpoint
