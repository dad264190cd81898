// Configs that must be rejected, each with its error message, and the sizes of known models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "models/model_info.h"

namespace moesaic::models {
namespace {

using nlohmann::json;

json Config(const std::string& name) {
  std::ifstream file(std::string(MOESAIC_SOURCE_DIR) + "/tests/golden/" + name + "/config.json");
  EXPECT_TRUE(file) << name;
  return json::parse(file);
}

struct Refusal {
  const char* base;   // golden checkpoint whose config is changed
  const char* patch;  // JSON merge patch
  const char* message;
};
void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.base << " with " << refusal.patch; }

constexpr Refusal kRefusals[] = {
    {"llama-untied-f16", R"({"architectures": ["GPT2LMHeadModel"]})",
     "config.json: architecture \"GPT2LMHeadModel\" is not supported; this build runs DeepseekV2ForCausalLM, "
     "DeepseekV3ForCausalLM, Glm4MoeForCausalLM, LlamaForCausalLM, MistralForCausalLM, "
     "PanguUltraMoEForCausalLM, "
     "Qwen3ForCausalLM, Qwen3MoeForCausalLM"},
    {"llama-untied-f16", R"({"architectures": null})",
     "config.json: \"architectures\" must be a list of one name, found nothing"},
    {"llama-untied-f16", R"({"num_hidden_layers": 0})",
     "config.json: \"num_hidden_layers\" must be an integer in [1, 1024], found 0"},
    {"llama-untied-f16", R"({"num_hidden_layers": 2147483648})",
     "config.json: \"num_hidden_layers\" must be an integer in [1, 1024], found 2147483648"},
    {"llama-untied-f16", R"({"hidden_act": "gelu"})",
     "config.json: \"hidden_act\" must be \"silu\", found \"gelu\""},
    {"llama-untied-f16", R"({"num_key_value_heads": 3})",
     "config.json: \"num_attention_heads\" is 4 but \"num_key_value_heads\" is 3, which does not divide it"},
    {"llama-untied-f16", R"({"head_dim": 12})",
     "config.json: \"head_dim\" must be a multiple of 8, found 12"},
    {"llama-untied-f16", R"({"rope_scaling": {"rope_type": "longrope"}})",
     "config.json: rope_scaling: \"rope_type\" must be one of \"default\", \"linear\", \"yarn\", \"llama3\", "
     "found "
     "\"longrope\""},
    {"llama-untied-f16", R"({"clip_qkv": 8})",
     "config.json: unsupported field \"clip_qkv\"; running the model without it could give wrong results"},
    {"qwen3-tied", R"({"use_sliding_window": true})",
     "config.json: \"use_sliding_window\" must be false, found true: not supported"},
    {"qwen3-tied", R"({"layer_types": ["full_attention", "sliding_attention"]})",
     "config.json: \"layer_types\" must be \"full_attention\" everywhere, found \"sliding_attention\""},
    {"qwen3-moe-norm-tied", R"({"num_experts_per_tok": 9})",
     "config.json: \"num_experts_per_tok\" is 9 but \"num_experts\" is 8"},
    {"deepseek-v3-noqlora", R"({"num_experts_per_tok": 17})",
     "config.json: \"num_experts_per_tok\" is 17 but \"n_routed_experts\" is 16"},
    {"deepseek-v3-noqlora", R"({"num_experts_per_tok": 9})",
     "config.json: \"num_experts_per_tok\" is 9 but \"topk_group\" 2 groups of \"n_group\" 4 hold 8 experts"},
    {"deepseek-v3-noqlora", R"({"n_group": 3})",
     "config.json: \"n_group\" is 3, which does not divide \"n_routed_experts\", 16"},
    {"deepseek-v3-noqlora", R"({"topk_group": 5})", "config.json: \"topk_group\" is 5 but \"n_group\" is 4"},
    {"deepseek-v3-noqlora", R"({"scoring_func": "softmax"})",
     "config.json: \"scoring_func\" must be \"sigmoid\", found \"softmax\""},
    {"deepseek-v3-noqlora", R"({"qk_rope_head_dim": 12})",
     "config.json: \"qk_rope_head_dim\" must be a multiple of 8, found 12"},
    {"deepseek-v2-lite", R"({"norm_topk_prob": true})",
     "config.json: \"norm_topk_prob\" must be false, found true: not supported"},
    {"pangu-ultra-moe-v11", R"({"rope_scaling": {"type": "yarn"}})",
     "config.json: \"rope_scaling\" must be absent or null"},
    // Larger shares would rotate elements beyond the head.
    {"glm4-moe", R"({"partial_rotary_factor": null, "rope_parameters": {"partial_rotary_factor": 1.5}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be a number in [0.001, 1], found 1.5"},
    {"glm4-moe", R"({"partial_rotary_factor": null, "rope_parameters": {"partial_rotary_factor": 1000}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be a number in [0.001, 1], found 1000"},
    {"glm4-moe", R"({"partial_rotary_factor": null, "rope_parameters": {"partial_rotary_factor": 1e300}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be a number in [0.001, 1], found 1e+300"},
    {"glm4-moe", R"({"partial_rotary_factor": null, "rope_parameters": {"partial_rotary_factor": -1}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be a number in [0.001, 1], found -1"},
    {"glm4-moe", R"({"partial_rotary_factor": null, "rope_parameters": {"partial_rotary_factor": "0.5"}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be a number in [0.001, 1], found \"0.5\""},
    {"glm4-moe", R"({"partial_rotary_factor": null, "rope_scaling": {"partial_rotary_factor": 2}})",
     "config.json: rope_scaling: \"partial_rotary_factor\" must be a number in [0.001, 1], found 2"},
    {"glm4-moe", R"({"partial_rotary_factor": 1.5})",
     "config.json: \"partial_rotary_factor\" must be a number in [0.001, 1], found 1.5"},
    {"glm4-moe", R"({"partial_rotary_factor": 0.01})",
     "config.json: the rotated part of a head must be even and at least 2, found 0"},
    {"glm4-moe", R"({"partial_rotary_factor": 0.625})",
     "config.json: the rotated part of a head must be even and at least 2, found 15"},
    {"glm4-moe", R"({"rope_parameters": {"partial_rotary_factor": 0.25}})",
     "config.json: \"partial_rotary_factor\" must have one value, found 0.5 and 0.25"},
    // The other architectures rotate whole heads.
    {"llama-untied-f16", R"({"rope_parameters": {"partial_rotary_factor": 0.5}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be 1 for LlamaForCausalLM, found 0.5"},
    {"llama-untied-f16", R"({"partial_rotary_factor": 0.5})",
     "config.json: unsupported field \"partial_rotary_factor\"; running the model without it could give "
     "wrong "
     "results"},
    {"llama-untied-f16",
     R"({"architectures": ["MistralForCausalLM"], "attention_bias": null, "mlp_bias": null,
      "pretraining_tp": null, "rope_scaling": {"partial_rotary_factor": 0.5}})",
     "config.json: rope_scaling: \"partial_rotary_factor\" must be 1 for MistralForCausalLM, found 0.5"},
    {"qwen3-tied", R"({"rope_parameters": {"partial_rotary_factor": 0.5}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be 1 for Qwen3ForCausalLM, found 0.5"},
    {"deepseek-v3-fp8", R"({"rope_parameters": {"partial_rotary_factor": 0.5}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be 1 for DeepseekV3ForCausalLM, found "
     "0.5"},
    {"pangu-ultra-moe-v11", R"({"rope_parameters": {"partial_rotary_factor": 0.5}})",
     "config.json: rope_parameters: \"partial_rotary_factor\" must be 1 for PanguUltraMoEForCausalLM, found "
     "0.5"},
    // One scaling must not hide another.
    {"deepseek-v3-noqlora", R"({"rope_parameters": {"rope_type": "default"}})",
     "config.json: \"rope_scaling\" and \"rope_parameters\" must agree, since both are present"},
    {"llama-untied-f16",
     R"({"rope_scaling": {"rope_type": "linear", "factor": 2},
         "rope_parameters": {"rope_type": "linear", "factor": 4}})",
     "config.json: \"rope_scaling\" and \"rope_parameters\" must agree, since both are present"},
    {"llama-untied-f16", R"({"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": {"rope_theta": 1e5}})",
     "config.json: \"rope_scaling\" and \"rope_parameters\" must agree, since both are present"},
};

class RefusalTest : public testing::TestWithParam<Refusal> {};

TEST_P(RefusalTest, ErrorStatesReason) {
  json config = Config(GetParam().base);
  ASSERT_TRUE(SpecFromConfig(config, "config.json").ok());
  config.merge_patch(json::parse(GetParam().patch));
  const auto spec = SpecFromConfig(config, "config.json");
  ASSERT_FALSE(spec.ok());
  EXPECT_EQ(Message(spec.status()), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(Configs, RefusalTest, testing::ValuesIn(kRefusals));

layers::RopeSpec RopeOf(const std::string& base, const char* patch) {
  json config = Config(base);
  config.merge_patch(json::parse(patch));
  const auto spec = SpecFromConfig(config, "config.json");
  EXPECT_TRUE(spec.ok()) << Message(spec.status());
  return spec.ok() ? spec->rope : layers::RopeSpec();
}

TEST(RopeTest, ReadsTheRotatedShareFromEachPlace) {
  EXPECT_EQ(RopeOf("glm4-moe", "{}").dim, 12);  // half of 24
  EXPECT_EQ(RopeOf("glm4-moe", R"({"partial_rotary_factor": null})").dim, 12);
  EXPECT_EQ(RopeOf("glm4-moe", R"({"partial_rotary_factor": 1})").dim, 24);
  for (const char* patch :
       {R"({"partial_rotary_factor": null, "rope_parameters": {"partial_rotary_factor": 0.25}})",
        R"({"partial_rotary_factor": null, "rope_scaling": {"partial_rotary_factor": 0.25}})",
        R"({"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.25}})"}) {
    EXPECT_EQ(RopeOf("glm4-moe", patch).dim, 6) << patch;
  }
  EXPECT_EQ(RopeOf("llama-untied-f16", R"({"rope_parameters": {"partial_rotary_factor": 1.0}})").dim, 16);
}

TEST(RopeTest, AcceptsEqualScalingInTwoPlaces) {
  const layers::RopeSpec rope = RopeOf("llama-untied-f16", R"({
      "rope_scaling": {"type": "linear", "factor": 2},
      "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})");
  EXPECT_EQ(rope.scaling, layers::RopeSpec::Scaling::kLinear);
  EXPECT_EQ(rope.factor, 2);
  EXPECT_EQ(rope.theta, 5e5);
  const json config = Config("deepseek-v3-noqlora");
  json twice = config;
  twice["rope_parameters"] = config["rope_scaling"];
  const auto once = SpecFromConfig(config, "config.json"), both = SpecFromConfig(twice, "config.json");
  ASSERT_TRUE(both.ok()) << Message(both.status());
  EXPECT_TRUE(both->rope == once->rope);
  EXPECT_EQ(both->attention.scale, once->attention.scale);
}

// Published configs, shortened to the fields that the architecture reads.
constexpr char kDeepseekV3[] = R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
  "attention_bias": false, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
  "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
  "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
  "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
  "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
  "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
  "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4,
  "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280})";
constexpr char kKimiK2[] =
    R"({"model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
  "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
  "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "vocab_size": 163840, "max_position_embeddings": 131072})";
constexpr char kQwen3Moe[] = R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
  "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
  "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
  "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false,
  "use_sliding_window": false, "vocab_size": 151936})";

ModelInfo InfoOfConfig(const json& config, const std::string& dtype) {
  const auto spec = SpecFromConfig(config, "config.json");
  EXPECT_TRUE(spec.ok()) << Message(spec.status());
  const auto info = InfoFromSpec(*spec, dtype);
  EXPECT_TRUE(info.ok()) << Message(info.status());
  return *info;
}

TEST(ModelInfoTest, CountsDeepseekV3) {
  const ModelInfo info = InfoOfConfig(json::parse(kDeepseekV3), "auto");
  EXPECT_NEAR(info.parameters / 1e9, 671.0, 0.1);  // the report says 671B, 37B active
  EXPECT_NEAR(info.active_parameters / 1e9, 37.0, 0.6);
  EXPECT_EQ(info.kv.layers, 62);
  EXPECT_EQ(info.kv.heads, 1);
  EXPECT_EQ(info.kv.key_dim, 576);
  EXPECT_EQ(info.kv.value_dim, 512);
  EXPECT_TRUE(info.kv.shared);
  EXPECT_EQ(info.weight_format, "bf16");
}

TEST(ModelInfoTest, CountsKimiK2) {
  json config = json::parse(kDeepseekV3);
  config.merge_patch(json::parse(kKimiK2));
  const ModelInfo info = InfoOfConfig(config, "int8");
  EXPECT_NEAR(info.parameters / 1e12, 1.03, 0.01);  // the card says 1T (1.03T), 32B active
  EXPECT_NEAR(info.active_parameters / 1e9, 32.0, 0.5);
  EXPECT_EQ(info.weight_format, "int8");
  EXPECT_NEAR(info.weight_bytes / 1e12, 1.04, 0.02);
}

TEST(ModelInfoTest, CountsQwen3Moe) {
  const ModelInfo info = InfoOfConfig(json::parse(kQwen3Moe), "auto");
  EXPECT_NEAR(info.parameters / 1e9, 30.5, 0.05);  // the card says 30.5B, 3.3B active
  EXPECT_NEAR(info.active_parameters / 1e9, 3.3, 0.3);
  // All weights but the routers are bf16: slightly more than two bytes per parameter.
  EXPECT_NEAR(info.weight_bytes / 2e9, 30.5, 0.1);
  EXPECT_EQ(info.kv.heads, 4);
}

TEST(DefaultsTest, MissingFieldsOfDeepseekV3HaveTheValuesOfItsConfigClass) {
  json config = json::parse(kDeepseekV3);
  for (const char* field : {"n_group", "topk_group", "routed_scaling_factor"}) config.erase(field);
  const auto spec = SpecFromConfig(config, "config.json");
  ASSERT_TRUE(spec.ok()) << Message(spec.status());
  EXPECT_EQ(spec->moe.groups, 8);
  EXPECT_EQ(spec->moe.top_groups, 4);
  EXPECT_EQ(spec->moe.scale, 2.5F);
}

TEST(DefaultsTest, FieldsThatTransformersWritesAreAccepted) {
  json v2 = Config("deepseek-v2-lite");
  v2["mlp_bias"] = false;
  EXPECT_TRUE(SpecFromConfig(v2, "config.json").ok());
  json full = json::parse(kDeepseekV3);
  full.merge_patch(json::parse(R"({"add_cross_attention": false, "diversity_penalty": 0.0, "do_sample": false,
      "id2label": {"0": "LABEL_0"}, "is_encoder_decoder": false, "max_length": 20, "num_beams": 1,
      "num_return_sequences": 1, "output_scores": false, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
      "torchscript": false, "typical_p": 1.0, "unsloth_fixed": true})"));
  const auto spec = SpecFromConfig(full, "config.json");
  EXPECT_TRUE(spec.ok()) << Message(spec.status());
}

TEST(DefaultsTest, MistralsMissingWindowIsNotFullAttention) {
  json config = Config("llama-untied-f16");
  config.merge_patch(json::parse(R"({"architectures": ["MistralForCausalLM"], "attention_bias": null,
      "mlp_bias": null, "pretraining_tp": null, "max_position_embeddings": 32768})"));
  EXPECT_EQ(Message(SpecFromConfig(config, "config.json").status()),
            "config.json: \"sliding_window\" must be null: attention is full");
  config["sliding_window"] = nullptr;
  EXPECT_TRUE(SpecFromConfig(config, "config.json").ok());
}

TEST(TopKTest, OverridesTopKWithinExpertCount) {
  const json config = Config("qwen3-moe-norm-tied");
  auto spec = SpecFromConfig(config, "config.json");
  ASSERT_TRUE(OverrideTopK(*spec, 8).ok());
  EXPECT_EQ(spec->moe.top_k, 8);
  EXPECT_EQ(Message(OverrideTopK(*spec, 9)), "experts per token must be in [1, 8], found 9");
  auto dense = SpecFromConfig(Config("qwen3-tied"), "config.json");
  EXPECT_EQ(Message(OverrideTopK(*dense, 2)),
            "experts per token can't be chosen: Qwen3ForCausalLM has no experts");
}

}  // namespace
}  // namespace moesaic::models
