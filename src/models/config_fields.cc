#include "models/config_fields.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <optional>

namespace moesaic::models {
namespace {

using checkpoint::ConfigReader;
using layers::RopeSpec;

// YaRN's attention temperature, arXiv 2309.00071 section 3.4.
double MScale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double ReadYarn(ConfigReader& scaling, RopeSpec& rope) {
  rope.scaling = RopeSpec::Scaling::kYarn;
  rope.beta_fast = scaling.NumberOr("beta_fast", 1e-3, 1e6, 32);
  rope.beta_slow = scaling.NumberOr("beta_slow", 1e-3, 1e6, 1);
  const double mscale = scaling.NumberOr("mscale", 0, 100, 1);
  const double all_dim = scaling.NumberOr("mscale_all_dim", 0, 100, 0);
  const double derived = MScale(rope.factor, mscale) / MScale(rope.factor, all_dim);
  rope.attention_factor = scaling.NumberOr("attention_factor", 1e-3, 1e3, derived);
  scaling.OnlyBool("truncate", true);
  return MScale(rope.factor, all_dim);
}

double ReadScaling(ConfigReader& scaling, const std::string& type, int context, RopeSpec& rope) {
  if (type == "default") return 1;
  rope.factor = scaling.Number("factor", 1e-3, 1e6);
  if (type == "linear") {
    rope.scaling = RopeSpec::Scaling::kLinear;
    return 1;
  }
  rope.original_context =
      static_cast<int>(scaling.IntOr("original_max_position_embeddings", 1, INT32_MAX, context));
  if (type == "yarn") return ReadYarn(scaling, rope);
  rope.scaling = RopeSpec::Scaling::kLlama3;
  rope.low_freq_factor = scaling.Number("low_freq_factor", 1e-3, 1e6);
  rope.high_freq_factor = scaling.Number("high_freq_factor", 1e-3, 1e6);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    scaling.Fail(fmt::format("\"high_freq_factor\" must exceed \"low_freq_factor\" {}, found {}",
                             rope.low_freq_factor, rope.high_freq_factor));
  }
  return 1;
}

constexpr char kShare[] = "partial_rotary_factor";

// The contents of "rope_scaling" or "rope_parameters".
struct RopeObject {
  RopeSpec rope;
  double all_dim_scale = 1;     // see ReadRope
  bool has_theta = false;       // the object has its own rope_theta
  std::optional<double> share;  // rotated share of a head
};

RopeObject ReadRopeObject(ConfigReader& scaling, int context, const RopeSpec& before) {
  RopeObject object;
  object.has_theta = scaling.Has("rope_theta");
  object.rope.theta = scaling.NumberOr("rope_theta", 1, 1e12, before.theta);
  if (scaling.Has(kShare)) object.share = scaling.NumberOr(kShare, 1e-3, 1, 1);
  // Older files use "type", newer ones "rope_type", and some both.
  scaling.OnlyString("type", {"default", "linear", "yarn", "llama3"});
  scaling.OnlyString("rope_type", {"default", "linear", "yarn", "llama3"});
  const std::string type = scaling.StringOr("rope_type", scaling.StringOr("type", "default"));
  if (type == "default" || type == "linear" || type == "yarn" || type == "llama3") {
    object.all_dim_scale = ReadScaling(scaling, type, context, object.rope);
  }
  return object;
}

// Returns whether two objects of one config describe the same rotation. One of them may omit the base.
bool Agree(const RopeObject& a, const RopeObject& b) {
  if (a.has_theta && b.has_theta && a.rope.theta != b.rope.theta) return false;
  RopeSpec one = a.rope;
  one.theta = b.rope.theta;
  return one == b.rope && a.all_dim_scale == b.all_dim_scale;
}

}  // namespace

DecoderSpec ReadCommon(const nlohmann::json& config, ConfigReader& reader) {
  DecoderSpec spec;
  reader.Ignore({"architectures",
                 "torch_dtype",
                 "dtype",
                 "transformers_version",
                 "use_cache",
                 "bos_token_id",
                 "eos_token_id",
                 "pad_token_id",
                 "attention_dropout",
                 "initializer_range",
                 "quantization_config",
                 "auto_map",
                 "pretraining_tp",
                 "output_router_logits",
                 "router_aux_loss_coef",
                 "aux_loss_alpha",
                 "seq_aux",
                 "ep_size",
                 "transformers.js_config",
                 "return_dict",
                 "output_attentions",
                 "output_hidden_states",
                 "chunk_size_feed_forward"});
  // Fields of every config that transformers 4 wrote in full, as that of Kimi-K2-Thinking: defaults of
  // sampling, which generation_config.json replaces, and settings of training and of other tasks.
  reader.Ignore({"bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size",
                 "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
                 "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
                 "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "label2id",
                 "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
                 "num_beams", "num_return_sequences", "output_scores", "prefix", "problem_type",
                 "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
                 "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
                 "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p",
                 "unk_token_id", "use_bfloat16",
                 // marks of a program that fine-tunes models
                 "unsloth_fixed", "unsloth_version"});
  reader.OnlyBool("is_encoder_decoder", false);
  reader.OnlyBool("add_cross_attention", false);
  for (const auto& item : config.items()) {
    if (item.key().starts_with('_')) reader.Ignore({item.key()});
  }
  spec.architecture = config.at("architectures").at(0).get<std::string>();
  spec.model_type = reader.StringOr("model_type", "");
  spec.vocab = static_cast<int>(reader.Int("vocab_size", 1, kMaxDim));
  spec.hidden = static_cast<int>(reader.Int("hidden_size", 1, kMaxDim));
  spec.layers = static_cast<int>(reader.Int("num_hidden_layers", 1, 1024));
  spec.context = static_cast<int>(reader.Int("max_position_embeddings", 1, 1 << 26));
  spec.norm_eps = static_cast<float>(reader.Number("rms_norm_eps", 0, 1));
  spec.tied = reader.BoolOr("tie_word_embeddings", false);
  spec.is_moe.assign(spec.layers, false);
  reader.OnlyString("hidden_act", {"silu"});
  return spec;
}

void ReadGqa(ConfigReader& reader, DecoderSpec& spec, int64_t default_head_dim) {
  AttentionSpec& attention = spec.attention;
  attention.kind = AttentionSpec::Kind::kGqa;
  attention.heads = static_cast<int>(reader.Int("num_attention_heads", 1, kMaxHeads));
  attention.kv_heads = static_cast<int>(reader.IntOr("num_key_value_heads", 1, kMaxHeads, attention.heads));
  if (attention.heads % attention.kv_heads != 0) {
    reader.Fail(fmt::format(
        "\"num_attention_heads\" is {} but \"num_key_value_heads\" is {}, which does not divide it",
        attention.heads, attention.kv_heads));
  }
  if (!reader.Has("head_dim") && default_head_dim == 0 && spec.hidden % attention.heads != 0) {
    reader.Fail(
        fmt::format("\"hidden_size\" is {} but \"num_attention_heads\" is {}, which does not divide it, and "
                    "there is no \"head_dim\"",
                    spec.hidden, attention.heads));
  }
  const int64_t fallback =
      default_head_dim > 0 ? default_head_dim : std::max(spec.hidden / attention.heads, 1);
  attention.head_dim = static_cast<int>(reader.IntOr("head_dim", 1, kMaxHeadDim, fallback));
  // The attention kernel reads keys and values eight elements at a time.
  if (attention.head_dim % 8 != 0) {
    reader.Fail(fmt::format("\"head_dim\" must be a multiple of 8, found {}", attention.head_dim));
  }
  attention.scale = 1.0F / std::sqrt(static_cast<float>(attention.head_dim));
}

double ReadRope(ConfigReader& reader, const std::string& file, int head_dim, DecoderSpec& spec,
                std::optional<double> default_share) {
  RopeSpec& rope = spec.rope;
  rope.theta = reader.NumberOr("rope_theta", 1, 1e12, 10000);
  std::optional<double> share;
  if (default_share && reader.Has(kShare)) share = reader.NumberOr(kShare, 1e-3, 1, 1);
  std::optional<RopeObject> found;
  for (const std::string key : {"rope_scaling", "rope_parameters"}) {
    const nlohmann::json* object = reader.Object(key);
    if (object == nullptr) continue;
    ConfigReader scaling(*object, fmt::format("{}: {}", file, key));
    const RopeObject next = ReadRopeObject(scaling, spec.context, rope);
    if (Status status = scaling.Finish(); !status.ok()) {
      std::string message = Message(status);
      if (message.starts_with(file + ": ")) message.erase(0, file.size() + 2);
      reader.Fail(message);
    }
    if (found && !Agree(*found, next)) {
      reader.Fail("\"rope_scaling\" and \"rope_parameters\" must agree, since both are present");
    }
    if (share && next.share && *share != *next.share) {
      reader.Fail(fmt::format("\"{}\" must have one value, found {} and {}", kShare, *share, *next.share));
    }
    if (next.share) share = next.share;
    if (!default_share && share.value_or(1) != 1) {
      reader.Fail(
          fmt::format("{}: \"{}\" must be 1 for {}, found {}", key, kShare, spec.architecture, *share));
    }
    rope = next.rope;
    found = next;
  }
  rope.dim = static_cast<int>(head_dim * share.value_or(default_share.value_or(1)));
  if (rope.dim < 2 || rope.dim % 2 != 0) {
    reader.Fail(fmt::format("the rotated part of a head must be even and at least 2, found {}", rope.dim));
  }
  return found ? found->all_dim_scale : 1;
}

void ReadGroups(ConfigReader& reader, const std::string& experts_key, MoeSpec& moe, int default_groups,
                int default_top_groups) {
  moe.groups = static_cast<int>(reader.IntOr("n_group", 1, 4096, default_groups));
  moe.top_groups = static_cast<int>(reader.IntOr("topk_group", 1, 4096, default_top_groups));
  if (moe.experts % moe.groups != 0) {
    reader.Fail(fmt::format("\"n_group\" is {}, which does not divide \"{}\", {}", moe.groups, experts_key,
                            moe.experts));
  }
  if (moe.top_groups > moe.groups) {
    reader.Fail(fmt::format("\"topk_group\" is {} but \"n_group\" is {}", moe.top_groups, moe.groups));
  }
  const bool top_two = moe.group_score == kernels::RouteParams::GroupScore::kTopTwoSum;
  if (top_two && moe.groups > 1 && moe.experts / moe.groups < 2) {
    reader.Fail(fmt::format("\"n_group\" is {} but \"{}\" is {}: a group needs two experts to be scored",
                            moe.groups, experts_key, moe.experts));
  }
}

void ReadTopK(ConfigReader& reader, const std::string& top_k_key, const std::string& experts_key,
              MoeSpec& moe) {
  moe.top_k = static_cast<int>(reader.Int(top_k_key, 1, kMaxDim));
  if (moe.top_k > moe.experts) {
    reader.Fail(fmt::format("\"{}\" is {} but \"{}\" is {}", top_k_key, moe.top_k, experts_key, moe.experts));
  }
  const int reachable = moe.experts / std::max(moe.groups, 1) * moe.top_groups;
  if (moe.groups > 1 && moe.top_k > reachable) {
    reader.Fail(fmt::format("\"{}\" is {} but \"topk_group\" {} groups of \"n_group\" {} hold {} experts",
                            top_k_key, moe.top_k, moe.top_groups, moe.groups, reachable));
  }
}

void CheckMlaDims(ConfigReader& reader, const char* nope, const char* rope, const AttentionSpec& attention) {
  // The attention kernel reads eight elements at a time. Latents and values are padded, parts of keys are
  // not.
  if (attention.rope_dim % 8 != 0) {
    reader.Fail(fmt::format("\"{}\" must be a multiple of 8, found {}", rope, attention.rope_dim));
  }
  if (attention.nope_dim % 8 != 0) {
    reader.Fail(fmt::format("\"{}\" must be a multiple of 8, found {}", nope, attention.nope_dim));
  }
}

void FirstLayersDense(int first_dense, DecoderSpec& spec) {
  for (int i = first_dense; i < spec.layers; ++i) spec.is_moe[i] = true;
}

}  // namespace moesaic::models
