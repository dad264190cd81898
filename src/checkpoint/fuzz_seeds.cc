// Writes small valid inputs for this room's fuzzers: fuzz_seeds CORPUS fills CORPUS/<fuzzer>/. Mutations of
// valid files reach deeper code than random bytes.
#include <cstdio>

#include "base/test_seeds.h"
#include "checkpoint/packed_file.h"
#include "checkpoint/test_files.h"

namespace moesaic::checkpoint {
namespace {

using base::SeedCorpus;
using nlohmann::json;

void AddNumbers(GgufMaker& maker, const std::string& arch,
                const std::vector<std::pair<const char*, uint32_t>>& numbers) {
  maker.String("general.architecture", arch);
  for (const auto& [key, value] : numbers) maker.U32(arch + "." + key, value);
  maker.F32(arch + ".attention.layer_norm_rms_epsilon", 1e-5F);
}

std::string Llama() {
  GgufMaker maker;
  AddNumbers(maker, "llama",
             {{"block_count", 1},
              {"context_length", 32},
              {"embedding_length", 8},
              {"feed_forward_length", 12},
              {"attention.head_count", 2},
              {"attention.head_count_kv", 1}});
  maker.Strings("tokenizer.ggml.tokens", {"a", "b"}).Array<float>("tokenizer.ggml.scores", 6, {0, 1});
  maker.String("tokenizer.chat_template", "{{ x }}");
  maker.F32Tensor("token_embd.weight", {8, 4})
      .F32Tensor("blk.0.attn_q.weight", {8, 8})
      .F32Tensor("blk.0.attn_k.bias", {4});
  maker.F32Tensor("rope_freqs.weight", {2}, 1);
  maker.Tensor("blk.0.attn_k.weight", {32, 4}, 8, std::string(136, '\1'));
  return maker.File();
}

std::string Qwen3Moe() {
  GgufMaker maker;
  AddNumbers(maker, "qwen3moe",
             {{"block_count", 1},
              {"context_length", 32},
              {"embedding_length", 8},
              {"feed_forward_length", 12},
              {"attention.head_count", 2},
              {"attention.head_count_kv", 1},
              {"expert_count", 2},
              {"expert_used_count", 1},
              {"expert_feed_forward_length", 4}});
  maker.F32Tensor("token_embd.weight", {8, 4}).F32Tensor("blk.0.ffn_up_exps.weight", {8, 4, 2});
  maker.Tensor("blk.0.ffn_down_exps.weight", {256, 1, 2}, 14, std::string(420, '\1'));
  return maker.File();
}

std::string Deepseek() {
  GgufMaker maker;
  AddNumbers(maker, "deepseek2",
             {{"block_count", 2},
              {"context_length", 64},
              {"embedding_length", 8},
              {"feed_forward_length", 8},
              {"attention.head_count", 2},
              {"attention.key_length_mla", 24},
              {"attention.value_length_mla", 16},
              {"attention.kv_lora_rank", 32},
              {"rope.dimension_count", 8},
              {"expert_count", 4},
              {"expert_used_count", 2},
              {"expert_shared_count", 1},
              {"leading_dense_block_count", 1},
              {"expert_feed_forward_length", 4},
              {"expert_gating_func", 2},
              {"rope.scaling.original_context_length", 16}});
  maker.String("deepseek2.rope.scaling.type", "yarn").F32("deepseek2.rope.scaling.factor", 4);
  maker.F32("deepseek2.rope.scaling.yarn_log_multiplier", 0.1F).F32("deepseek2.expert_weights_scale", 2.5F);
  maker.F32Tensor("token_embd.weight", {8, 4}).F32Tensor("output.weight", {8, 4});
  maker.Tensor("blk.0.attn_k_b.weight", {16, 32, 2}, 30, std::string(2048, '\1'))
      .F32Tensor("blk.0.attn_v_b.weight", {32, 16, 2});
  return maker.File();
}

std::string WithConfig(const json& quant, const SafetensorsMaker& tensors) {
  const std::string config = json{{"quantization_config", quant}}.dump();
  const auto length = static_cast<uint16_t>(config.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + config + tensors.File();
}

json Compressed(const json& weights, const std::string& format) {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"ignore", {"lm_head", "re:.*gate$"}},
          {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}}}}}};
}

void WriteSafetensors(const SeedCorpus& corpus) {
  const auto write = [&corpus](std::string_view name, std::string_view content) {
    corpus.Write("safetensors_fuzzer", name, content);
  };
  SafetensorsMaker fp8;
  fp8.Add<uint8_t>("m.weight", "F8_E4M3", {3, 5}, std::vector<uint8_t>(15, 0x38));
  fp8.Add<float>("m.weight_scale_inv", "F32", {2, 2}, {1, 10, 100, 1000});
  write("fp8", WithConfig({{"quant_method", "fp8"}, {"weight_block_size", {2, 4}}}, fp8));
  SafetensorsMaker int8;
  int8.Add<int8_t>("m.weight", "I8", {2, 3}, {1, -2, 127, -128, 0, 5})
      .Add<float>("m.weight_scale", "F32", {2, 1}, {1, 2});
  write("int8", WithConfig(Compressed({{"num_bits", 8}, {"strategy", "channel"}}, "int-quantized"), int8));
  SafetensorsMaker int4;
  int4.Add<uint32_t>("m.weight_packed", "I32", {2, 1}, {0x76543210, 1})
      .Add<int64_t>("m.weight_shape", "I64", {2}, {2, 8});
  int4.Add<float>("m.weight_scale", "F32", {2, 2}, {1, 2, 3, 4})
      .Add<uint32_t>("m.weight_zero_point", "I32", {1, 2}, {1, 2});
  int4.Add<int32_t>("m.weight_g_idx", "I32", {8}, {0, 0, 0, 0, 1, 1, 1, 1});
  write(
      "int4",
      WithConfig(Compressed({{"num_bits", 4}, {"strategy", "group"}, {"group_size", 4}, {"symmetric", false}},
                            "pack-quantized"),
                 int4));
  SafetensorsMaker packed8;
  packed8.Add<uint32_t>("m.weight_packed", "I32", {2, 2}, {0x76543210, 1, 0xff80007f, 2})
      .Add<int64_t>("m.weight_shape", "I64", {2}, {2, 8})
      .Add<float>("m.weight_scale", "F32", {2, 2}, {1, 2, 3, 4});
  write("packed_int8",
        WithConfig(Compressed({{"num_bits", 8}, {"strategy", "group"}, {"group_size", 4}}, "pack-quantized"),
                   packed8));
  SafetensorsMaker nvfp4;
  nvfp4.Add<uint8_t>("m.weight_packed", "U8", {1, 8}, std::vector<uint8_t>(8, 0x21));
  nvfp4.Add<uint8_t>("m.weight_scale", "F8_E4M3", {1, 1}, {0x40})
      .Add<float>("m.weight_global_scale", "F32", {1}, {4});
  write("nvfp4",
        WithConfig(
            Compressed({{"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}},
                       "nvfp4-pack-quantized"),
            nvfp4));
  write("plain", WithConfig(nullptr, SafetensorsMaker().Add<double>("m.weight", "F64", {1, 2}, {1, 2})));
}

void WriteConfigs(const SeedCorpus& corpus) {
  const auto write = [&corpus](std::string_view name, std::string_view content) {
    corpus.Write("config_fuzzer", name, content);
  };
  write("numbers", R"({"a": 7, "b": 1e-6, "c": true, "d": "silu", "e": [1, 2], "f": {"x": 1}, "g": null})");
  write("limits", R"({"a": 18446744073709551615, "b": -9223372036854775808, "c": 1e308, "d": [-1, 9]})");
  write(
      "fp8",
      R"({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}})");
  const json weights = {{"num_bits", 4}, {"strategy", "group"}, {"group_size", 32}, {"actorder", "group"}};
  write("groups", json{{"quantization_config", Compressed(weights, "pack-quantized")}}.dump());
}

bool WritePacked(const SeedCorpus& corpus) {
  const auto writer =
      PackedWriter::Create((corpus.Folder("packed_file_fuzzer") / "two").string(),
                           {{"a", R"({"k":3})", 64}, {"b", R"({"k":4})", 70}}, {{"config.json", "{}"}});
  const std::vector<std::byte> zeros(70);
  return writer.ok() && (*writer)->Append(0, std::span(zeros).first(64)).ok() &&
         (*writer)->Append(1, zeros).ok() && (*writer)->Finish().ok();
}

bool WriteAll(const SeedCorpus& corpus) {
  corpus.Write("gguf_fuzzer", "llama", Llama());
  corpus.Write("gguf_fuzzer", "qwen3moe", Qwen3Moe());
  corpus.Write("gguf_fuzzer", "deepseek2", Deepseek());
  WriteSafetensors(corpus);
  WriteConfigs(corpus);
  return WritePacked(corpus);
}

}  // namespace
}  // namespace moesaic::checkpoint

int main(int argc, char** argv) {
  try {
    return moesaic::checkpoint::WriteAll(moesaic::base::SeedCorpus(argc, argv)) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_seeds: %s\n", error.what());
    return 1;
  }
}
