// Readers for fields of config.json that several architectures share. Each field is read once and validated
// against the others.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>

#include "checkpoint/config_reader.h"
#include "models/decoder_spec.h"

namespace moesaic::models {

/// Limits far above any model, yet low enough that heads x head size and shared experts x width fit an int.
inline constexpr int64_t kMaxDim = 1 << 22;
inline constexpr int64_t kMaxHeads = 1 << 13;
inline constexpr int64_t kMaxHeadDim = 1 << 16;

/// Reads architecture, vocabulary, sizes, context, norm epsilon, tying and activation. Marks fields that
/// never affect inference as known (token ids, dropout, dtypes, training losses, names that begin with "_").
DecoderSpec ReadCommon(const nlohmann::json& config, checkpoint::ConfigReader& reader);

/// Reads heads, KV heads and head size of grouped-query attention. A missing head_dim becomes
/// `default_head_dim`, or hidden_size / num_attention_heads if that is 0.
void ReadGqa(checkpoint::ConfigReader& reader, DecoderSpec& spec, int64_t default_head_dim);

/// Reads rope_theta, rope_scaling and rope_parameters (the form of transformers 5) into spec.rope; requires
/// spec.context. If both objects are present, they must agree. Returns YaRN's m(factor, mscale_all_dim),
/// whose square multiplies DeepSeek's softmax scale; 1 without YaRN.
///
/// `head_dim` is the part of a head that can be rotated. An architecture that rotates a share of it gives the
/// default of "partial_rotary_factor", which is read at the top level and in both objects; it is at most 1.
/// Without a default the objects' field must be 1.
double ReadRope(checkpoint::ConfigReader& reader, const std::string& file, int head_dim, DecoderSpec& spec,
                std::optional<double> default_share = std::nullopt);

/// Reads "n_group" and "topk_group" and checks them against spec.moe.experts.
void ReadGroups(checkpoint::ConfigReader& reader, const std::string& experts_key, MoeSpec& moe,
                int default_groups = 1, int default_top_groups = 1);

/// Reads `top_k_key` and checks it against spec.moe.experts, which was read from `experts_key`. Call after
/// ReadGroups.
void ReadTopK(checkpoint::ConfigReader& reader, const std::string& top_k_key, const std::string& experts_key,
              MoeSpec& moe);

/// Checks that the attention kernel supports these dimensions. `nope` and `rope` are the field names for
/// messages.
void CheckMlaDims(checkpoint::ConfigReader& reader, const char* nope, const char* rope,
                  const AttentionSpec& attention);

/// Makes layers [first_dense, layers) MoE layers.
void FirstLayersDense(int first_dense, DecoderSpec& spec);

}  // namespace moesaic::models
