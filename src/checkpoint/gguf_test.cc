#include "checkpoint/gguf.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "checkpoint/gguf_checkpoint.h"
#include "checkpoint/test_files.h"

namespace moesaic::checkpoint {
namespace {

std::string FaultOf(const std::string& file) { return Message(ParseGguf(BytesOf(file), "x.gguf").status()); }

TEST(Gguf, ReadsMetadataOfEveryType) {
  GgufMaker maker;
  maker.String("s", "text")
      .U32("u32", 7)
      .I32("i32", -7)
      .F32("f32", 0.5F)
      .Bool("b", true)
      .U64("u64", 1U << 31);
  maker.Strings("ss", {"a", "", "c"}).Array<int32_t>("is", 5, {-1, 2}).Array<float>("fs", 6, {1.5F});
  maker.Array<uint8_t>("bs", 7, {1, 0}).Array<double>("ds", 12, {2.5}).Array<uint16_t>("us", 2, {65535});
  for (const uint32_t version : {2U, 3U}) {
    const std::string file = maker.File(version);
    const auto gguf = ParseGguf(BytesOf(file), "x.gguf");
    ASSERT_TRUE(gguf.ok()) << Message(gguf.status());
    const GgufMetadata& data = gguf->metadata;
    EXPECT_EQ(*data.String("s"), "text");
    EXPECT_EQ(data.Int("u32"), 7);
    EXPECT_EQ(data.Int("i32"), -7);
    EXPECT_EQ(data.Int("u64"), int64_t{1} << 31);
    EXPECT_EQ(data.Number("f32"), 0.5);
    EXPECT_EQ(data.Number("u32"), 7);
    EXPECT_EQ(data.Bool("b"), true);
    EXPECT_EQ(*data.Strings("ss"), (std::vector<std::string>{"a", "", "c"}));
    EXPECT_EQ(*data.Ints("is"), (std::vector<int64_t>{-1, 2}));
    EXPECT_EQ(*data.Ints("us"), std::vector<int64_t>{65535});
    EXPECT_EQ(*data.Ints("bs"), (std::vector<int64_t>{1, 0}));
    EXPECT_EQ(*data.Numbers("fs"), std::vector<double>{1.5});
    EXPECT_EQ(*data.Numbers("ds"), std::vector<double>{2.5});
    // A key with another type counts as absent.
    EXPECT_EQ(data.String("u32"), nullptr);
    EXPECT_EQ(data.Int("s"), std::nullopt);
    EXPECT_EQ(data.Int("b"), std::nullopt);
    EXPECT_EQ(data.Strings("is"), nullptr);
    EXPECT_EQ(data.Bool("absent"), std::nullopt);
    EXPECT_EQ(data.Keys().size(), 12U);
  }
}

TEST(Gguf, ReadsTensorsInPlace) {
  GgufMaker maker;
  maker.F32Tensor("w", {3, 2}, 1.5F).Tensor("q", {32, 2}, 8, std::string(68, 'q'));
  const std::string file = maker.File();
  const auto gguf = ParseGguf(BytesOf(file), "x.gguf");
  ASSERT_TRUE(gguf.ok()) << Message(gguf.status());
  EXPECT_EQ(gguf->tensors[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(gguf->tensors[1].dtype, tensor::DType::kQ8_0);
  EXPECT_EQ(gguf->tensors[1].bytes.size(), 68U);
  EXPECT_EQ(static_cast<char>(gguf->tensors[1].bytes[67]), 'q');
}

TEST(Gguf, RejectsDamagedFilesInOneLine) {
  const std::string good = GgufMaker().String("k", "v").F32Tensor("w", {2}).File();
  EXPECT_EQ(FaultOf("GGML" + good.substr(4)), "x.gguf: a GGUF file begins with \"GGUF\"");
  EXPECT_EQ(FaultOf(GgufMaker().File(1)), "x.gguf: GGUF version must be 2 or 3, found 1");
  EXPECT_EQ(FaultOf(GgufMaker().File(0x03000000)),
            "x.gguf: must be little-endian, found a big-endian GGUF file");
  for (size_t length = 0; length + 1 < good.size(); length += 3) {
    const std::string message = FaultOf(good.substr(0, length));
    EXPECT_TRUE(message.find("x.gguf: ") != std::string::npos) << length << ": " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
  std::string counts = good;
  std::memset(counts.data() + 8, 0xff, 8);
  EXPECT_EQ(FaultOf(counts), fmt::format("x.gguf: 18446744073709551615 tensors and 1 metadata entries do not "
                                         "fit {} bytes; is the file complete?",
                                         good.size() - 24));
}

TEST(Gguf, RejectsEveryInvalidEntry) {
  using Maker = GgufMaker;
  const std::pair<Maker, const char*> faults[] = {
      {Maker().String("k", "v").U32("k", 1), "x.gguf: metadata key \"k\" occurs twice"},
      {Maker().EmptyArray("k", 4, uint64_t{1} << 60),
       "x.gguf: metadata \"k\": an array of 1152921504606846976 elements does not fit the 15 bytes left"},
      {Maker().EmptyArray("k", 8, 1000),
       "x.gguf: metadata \"k\": an array of 1000 elements does not fit the 15 bytes left"},
      {Maker().EmptyArray("k", 13, 0), "x.gguf: metadata \"k\": an array holds the unsupported type 13"},
      {Maker().EmptyArray("k", 9, 0), "x.gguf: metadata \"k\": an array holds the unsupported type 9"},
      {Maker().U64("k", std::numeric_limits<uint64_t>::max()),
       "x.gguf: metadata \"k\": a number at byte 45 is larger than 2^63"},
      {Maker().U32("general.alignment", 3), "x.gguf: \"general.alignment\" must be a power of two, found 3"},
      {Maker().String("general.alignment", "32"),
       "x.gguf: \"general.alignment\" must be a power of two, found 0"},
      {Maker().U32("general.alignment", 0), "x.gguf: \"general.alignment\" must be a power of two, found 0"},
      {Maker().F32Tensor("w", {2}).F32Tensor("w", {2}), "x.gguf: tensor w occurs twice"},
      {Maker().F32Tensor("w", {1, 1, 1, 1, 1}), "x.gguf: tensor w must have 1 to 4 dimensions, found 5"},
      {Maker().TensorAt("w", {}, 0, 0), "x.gguf: tensor w must have 1 to 4 dimensions, found 0"},
      {Maker().TensorAt("w", {0, 4}, 0, 0),
       "x.gguf: tensor w: dimension 0 must be in [1, 2^48] in all, found 0"},
      {Maker().TensorAt("w", {uint64_t{1} << 32, uint64_t{1} << 32}, 0, 0),
       "x.gguf: tensor w: dimension 1 must be in [1, 2^48] in all, found 4294967296"},
      {Maker().TensorAt("w", {31}, 8, 0),
       "x.gguf: tensor w: rows must be whole blocks of 32 elements, found 31"},
      {Maker().TensorAt("w", {32}, 40, 0),
       "x.gguf: tensor w: type must be F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K or MXFP4, "
       "found "
       "NVFP4"},
      {Maker().TensorAt("w", {32}, 77, 0),
       "x.gguf: tensor w: type must be F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K or MXFP4, "
       "found "
       "number 77"},
      {Maker().TensorAt("w", {32}, 0, 0),
       "x.gguf: tensor w needs 128 bytes at 0 of the 0 bytes of data; is the file complete?"},
      {Maker().F32Tensor("w", {32}).TensorAt("v", {1}, 0, 4),
       "x.gguf: tensor v needs 4 bytes at 4 of the 128 bytes of data; is the file complete?"},
      {Maker().F32Tensor("w", {32}).TensorAt("v", {1}, 0, ~uint64_t{31}),
       "x.gguf: tensor v needs 4 bytes at 18446744073709551584 of the 128 bytes of data; is the file "
       "complete?"},
      {Maker().F32Tensor("w", {32}).TensorAt("v", {1}, 0, 32), "x.gguf: tensors w and v overlap"},
  };
  for (const auto& [maker, message] : faults) EXPECT_EQ(FaultOf(maker.File()), message);
}

// Returns a Llama model with one layer: 2 heads of 4 and one KV head.
GgufMaker Llama(const std::function<void(GgufMaker&)>& more = nullptr, const std::string& without = "",
                uint32_t head_dim = 4) {
  GgufMaker maker;
  maker.String("general.architecture", "llama");
  const std::pair<const char*, uint32_t> numbers[] = {{"block_count", 1},
                                                      {"context_length", 32},
                                                      {"embedding_length", 8},
                                                      {"feed_forward_length", 12},
                                                      {"attention.head_count", 2},
                                                      {"attention.head_count_kv", 1},
                                                      {"attention.key_length", head_dim},
                                                      {"attention.value_length", head_dim}};
  for (const auto& [key, value] : numbers) {
    if (key != without) maker.U32(std::string("llama.") + key, value);
  }
  if (without != "attention.layer_norm_rms_epsilon")
    maker.F32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  if (more) more(maker);
  maker.F32Tensor("token_embd.weight", {8, 10});
  std::vector<float> rows;
  for (int row = 0; row < 8; ++row) rows.insert(rows.end(), 8, static_cast<float>(row));
  maker.Tensor("blk.0.attn_q.weight", {8, 8}, 0, RawBytes(rows));
  return maker;
}

StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& file) {
  return ReadGguf(BytesOf(file), "dir/x.gguf");
}
std::string ViewFault(const std::string& file) { return Message(Open(file).status()); }

TEST(GgufCheckpoint, PresentsLlamaLikeTheHub) {
  const std::string file =
      Llama([](GgufMaker& maker) {
        maker.String("tokenizer.chat_template", "{{ x }}").U32("tokenizer.ggml.eos_token_id", 2);
      }).File();
  const auto opened = Open(file);
  ASSERT_TRUE(opened.ok()) << Message(opened.status());
  const Checkpoint& checkpoint = **opened;
  EXPECT_EQ(checkpoint.config()["vocab_size"], 10);
  EXPECT_EQ(checkpoint.config()["tie_word_embeddings"], true);
  EXPECT_EQ(checkpoint.config()["eos_token_id"], 2);
  EXPECT_EQ(checkpoint.ReadText("chat_template.jinja"), "{{ x }}");
  EXPECT_EQ(checkpoint.ReadText("tokenizer.json"), std::nullopt);
  // Rows 0 2 1 3 of each head: pairs (0, 1), (2, 3) become halves (0, 2), (1, 3).
  const int64_t shape[] = {8, 8};
  const auto q = *checkpoint.ReadF32("model.layers.0.self_attn.q_proj.weight", shape);
  std::vector<float> order;
  order.reserve(8);
  for (int row = 0; row < 8; ++row) order.push_back(q[row * 8]);
  EXPECT_EQ(order, (std::vector<float>{0, 2, 1, 3, 4, 6, 5, 7}));
  const auto source = checkpoint.FindLinear("model.layers.0.self_attn.q_proj", 8, 8);
  ASSERT_TRUE(source.ok());
  std::vector<float> row(8);
  ASSERT_TRUE(checkpoint.ReadLinearRows(*source, 5, 1, row).ok());
  EXPECT_EQ(row[0], 6);
}

TEST(GgufCheckpoint, RestoresLlama3RopeScaling) {
  const auto with = [](const std::vector<float>& factors) {
    const auto more = [&](GgufMaker& maker) {
      maker.F32("llama.rope.freq_base", 500000)
          .Tensor("rope_freqs.weight", {factors.size()}, 0, RawBytes(factors));
    };
    return Llama(more, "", /*head_dim=*/16).File();
  };
  // Divisors that transformers applies to the frequencies of Llama 3.2 for heads of 16.
  const std::string file = with({1, 1, 1, 1, 3.292262554168701F, 32, 32, 32});
  const auto opened = Open(file);
  ASSERT_TRUE(opened.ok()) << Message(opened.status());
  const nlohmann::json expected = {{"rope_type", "llama3"},
                                   {"factor", 32.0},
                                   {"low_freq_factor", 1.0},
                                   {"high_freq_factor", 4.0},
                                   {"original_max_position_embeddings", 8192}};
  EXPECT_EQ((*opened)->config()["rope_scaling"], expected);
  const std::string none = with(std::vector<float>(8, 1));
  EXPECT_FALSE((*Open(none))->config().contains("rope_scaling"));
  EXPECT_EQ(ViewFault(with({1, 1, 1, 1, 4, 32, 32, 32})),
            "x.gguf: tensor rope_freqs.weight must be Llama 3's rope scaling (3.29226 at 4 for factor 32), "
            "found 4");
  EXPECT_EQ(ViewFault(with({1, 1, 1})), "x.gguf: tensor rope_freqs.weight must be F32 [8], found F32 [3]");
}

// Like llama.cpp, whose default type is linear.
TEST(GgufCheckpoint, FactorWithoutTypeScalesLinearly) {
  const auto scaling = [](const std::function<void(GgufMaker&)>& more) {
    const std::string file = Llama(more).File();
    const auto opened = Open(file);
    EXPECT_TRUE(opened.ok()) << Message(opened.status());
    if (!opened.ok() || !(*opened)->config().contains("rope_scaling")) return nlohmann::json();
    return (*opened)->config()["rope_scaling"];
  };
  const nlohmann::json linear = {{"type", "linear"}, {"factor", 4.0}};
  EXPECT_EQ(scaling([](GgufMaker& m) { m.F32("llama.rope.scaling.factor", 4); }), linear);
  EXPECT_EQ(scaling([](GgufMaker& m) {
              m.F32("llama.rope.scaling.factor", 4).U32("llama.rope.scaling.original_context_length", 8);
            }),
            linear);
  for (const float factor : {0.0F, 1.0F}) {
    EXPECT_TRUE(scaling([&](GgufMaker& m) { m.F32("llama.rope.scaling.factor", factor); }).is_null());
  }
  EXPECT_TRUE(scaling([](GgufMaker& m) {
                m.F32("llama.rope.scaling.factor", 4).String("llama.rope.scaling.type", "none");
              }).is_null());
  EXPECT_EQ(ViewFault(Llama([](GgufMaker& m) { m.F32("llama.rope.scaling.factor", -4); }).File()),
            "x.gguf: metadata \"llama.rope.scaling.factor\" must be a number in [0, 1e+06], found -4");
}

TEST(GgufCheckpoint, FrequencyFactorsAreNeverDropped) {
  const std::vector<float> factors = {1, 1, 1, 1, 3.292262554168701F, 32, 32, 32};
  const std::string both = Llama(
                               [&](GgufMaker& m) {
                                 m.F32("llama.rope.freq_base", 500000)
                                     .F32("llama.rope.scaling.factor", 2)
                                     .String("llama.rope.scaling.type", "linear")
                                     .Tensor("rope_freqs.weight", {8}, 0, RawBytes(factors));
                               },
                               "", /*head_dim=*/16)
                               .File();
  EXPECT_EQ(ViewFault(both),
            "x.gguf: tensor rope_freqs.weight and metadata \"llama.rope.scaling.factor\" must not both scale "
            "the rotation");
  GgufMaker qwen;
  qwen.String("general.architecture", "qwen3");
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, uint32_t>>{{"block_count", 1},
                                                     {"context_length", 32},
                                                     {"embedding_length", 8},
                                                     {"feed_forward_length", 12},
                                                     {"attention.head_count", 2},
                                                     {"attention.head_count_kv", 1},
                                                     {"attention.key_length", 16}}) {
    qwen.U32(std::string("qwen3.") + key, value);
  }
  qwen.F32("qwen3.attention.layer_norm_rms_epsilon", 1e-6F).F32("qwen3.rope.freq_base", 500000);
  qwen.F32Tensor("token_embd.weight", {8, 10}).Tensor("rope_freqs.weight", {8}, 0, RawBytes(factors));
  const std::string file = qwen.File();
  const auto opened = Open(file);
  ASSERT_TRUE(opened.ok()) << Message(opened.status());
  EXPECT_EQ((*opened)->config()["rope_scaling"]["factor"], 32.0);
}

TEST(GgufCheckpoint, RejectsInvalidMetadataInOneLine) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const std::pair<std::string, const char*> faults[] = {
      {GgufMaker().File(), "x.gguf: metadata \"general.architecture\" is missing"},
      {GgufMaker().String("general.architecture", "mamba").File(),
       "x.gguf: metadata \"general.architecture\" must be llama, qwen3, qwen3moe or deepseek2, found "
       "\"mamba\""},
      {GgufMaker().U32("general.architecture", 1).File(),
       "x.gguf: metadata \"general.architecture\" is missing"},
      {Llama(nullptr, "block_count").File(), "x.gguf: metadata \"llama.block_count\" is missing"},
      {Llama([](GgufMaker& m) { m.U32("llama.block_count", 0); }, "block_count").File(),
       "x.gguf: metadata \"llama.block_count\" must be an integer in [1, 1024], found 0"},
      {Llama([](GgufMaker& m) { m.U32("llama.block_count", 1U << 31); }, "block_count").File(),
       "x.gguf: metadata \"llama.block_count\" must be an integer in [1, 1024], found 2147483648"},
      {Llama([](GgufMaker& m) { m.I32("llama.block_count", -1); }, "block_count").File(),
       "x.gguf: metadata \"llama.block_count\" must be an integer in [1, 1024], found -1"},
      {Llama([](GgufMaker& m) { m.String("llama.block_count", "1"); }, "block_count").File(),
       "x.gguf: metadata \"llama.block_count\" must be an integer"},
      {Llama([](GgufMaker& m) { m.Array<int32_t>("llama.attention.head_count", 5, {2}); },
             "attention.head_count")
           .File(),
       "x.gguf: metadata \"llama.attention.head_count\" must be an integer"},
      {Llama([&](GgufMaker& m) { m.F32("llama.attention.layer_norm_rms_epsilon", nan); },
             "attention.layer_norm_rms_epsilon")
           .File(),
       "x.gguf: metadata \"llama.attention.layer_norm_rms_epsilon\" must be a number in [0, 1], found nan"},
      {Llama([&](GgufMaker& m) { m.F32("llama.rope.freq_base", inf); }).File(),
       "x.gguf: metadata \"llama.rope.freq_base\" must be a number in [1, 1e+12], found inf"},
      {Llama([](GgufMaker& m) {
         m.String("llama.rope.scaling.type", "longrope").F32("llama.rope.scaling.factor", 2);
       }).File(),
       "x.gguf: metadata \"llama.rope.scaling.type\" must be none, linear or yarn, found longrope"},
      {Llama([](GgufMaker& m) { m.U32("llama.rope.scaling.type", 1); }).File(),
       "x.gguf: metadata \"llama.rope.scaling.type\" must be a string"},
      {Llama([](GgufMaker& m) { m.U32("llama.rope.dimension_count", 2); }).File(),
       "x.gguf: metadata \"llama.rope.dimension_count\" must be 4, the length of a key, found 2"},
      {Llama([](GgufMaker& m) { m.U32("llama.expert_count", 8); }).File(),
       "x.gguf: metadata \"llama.expert_count\" must be 0: Mixtral models are not supported"},
      {Llama([](GgufMaker& m) { m.U32("llama.attention.sliding_window", 8); }).File(),
       "x.gguf: metadata \"llama.attention.sliding_window\" is not supported; running the model without it "
       "could give "
       "wrong results"},
      {Llama([](GgufMaker& m) { m.F32Tensor("blk.0.attn_sinks.weight", {4}); }).File(),
       "x.gguf: tensor blk.0.attn_sinks.weight is not known; running the model without it could give wrong "
       "results"},
      {Llama([](GgufMaker& m) {
         m.F32Tensor("blk.00.attn_q.weight", {8, 8});
       }).File(),
       "x.gguf: tensor model.layers.0.self_attn.q_proj.weight occurs twice (also in x.gguf)"},
      {Llama([](GgufMaker& m) {
         m.F32Tensor("blk.0.attn_k.weight", {8, 3});
       }).File(),
       "x.gguf: tensor model.layers.0.self_attn.k_proj.weight must have rows in multiples of 2, found [3,8]"},
      {Llama([](GgufMaker& m) {
         m.Tensor("blk.0.attn_k.weight", {8, 4}, 24, std::string(32, '\0'));
       }).File(),
       "x.gguf: tensor model.layers.0.self_attn.k_proj.weight must be of a floating-point or block type, "
       "found I8"},
      {Llama([](GgufMaker& m) {
         m.F32Tensor("blk.0.ffn_up_exps.weight", {2, 2, 2});
       }).File(),
       "x.gguf: tensor model.layers.0.mlp.experts.{}.up_proj.weight must be [0, out, in], found [2,2,2]"},
      {Llama([](GgufMaker& m) {
         m.F32Tensor("blk.0.attn_v_b.weight", {2, 2, 2});
       }).File(),
       "x.gguf: tensor model.layers.0.self_attn.v_b.weight has no matching k_b"},
      {Llama([](GgufMaker& m) { m.U32("split.count", 3); }).File(),
       "dir/x.gguf: a model in parts must be opened from its files"},
  };
  for (const auto& [file, message] : faults) EXPECT_EQ(ViewFault(file), message);
}

TEST(GgufCheckpoint, OpensSplitModels) {
  const TestFolder folder;
  const std::string first =
      folder.Write("m-00001-of-00002.gguf", Llama([](GgufMaker& m) {
                                              m.Array<uint16_t>("none", 2, {});
                                              m.U32("split.count", 2).U32("split.no", 0);
                                              m.I32("split.tensors.count", 3);
                                            }).File());
  const auto part = [](uint32_t number) {
    return GgufMaker()
        .U32("split.count", 2)
        .U32("split.no", number)
        .F32Tensor("output_norm.weight", {8}, 3)
        .File();
  };
  EXPECT_EQ(Message(Checkpoint::Open(first).status()),
            folder.Path("m-00002-of-00002.gguf") + ": no such file");
  const std::string second = folder.Write("m-00002-of-00002.gguf", part(1));
  const auto opened = Checkpoint::Open(first);
  ASSERT_TRUE(opened.ok()) << Message(opened.status());
  EXPECT_EQ((*opened)->ReadF32("model.norm.weight", std::vector<int64_t>{8})->at(7), 3);
  EXPECT_EQ(Message(Checkpoint::Open(second).status()), second + ": this is part 2 of 2; open the first one");
  folder.Write("m-00002-of-00002.gguf", part(0));
  EXPECT_EQ(Message(Checkpoint::Open(first).status()), second + ": must be part 2 of 2, found 1 of 2");
  folder.Write("m-00002-of-00002.gguf", GgufMaker().U32("split.count", 2).U32("split.no", 1).File());
  EXPECT_EQ(Message(Checkpoint::Open(first).status()),
            first + ": the parts must have 3 tensors together, found 2");
}

// Returns a DeepSeek model in the older form: there is no YaRN multiplier.
GgufMaker OlderDeepseek() {
  GgufMaker maker;
  maker.String("general.architecture", "deepseek2");
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, uint32_t>>{{"block_count", 2},
                                                     {"context_length", 64},
                                                     {"embedding_length", 8},
                                                     {"feed_forward_length", 8},
                                                     {"attention.head_count", 2},
                                                     {"attention.head_count_kv", 2},
                                                     {"attention.key_length", 24},
                                                     {"attention.value_length", 16},
                                                     {"attention.kv_lora_rank", 32},
                                                     {"rope.dimension_count", 8},
                                                     {"expert_count", 4},
                                                     {"expert_used_count", 2},
                                                     {"expert_shared_count", 0},
                                                     {"leading_dense_block_count", 0},
                                                     {"expert_feed_forward_length", 4},
                                                     {"rope.scaling.original_context_length", 16},
                                                     {"vocab_size", 10}}) {
    maker.U32(std::string("deepseek2.") + key, value);
  }
  maker.F32("deepseek2.attention.layer_norm_rms_epsilon", 1e-6F).F32("deepseek2.rope.scaling.factor", 4);
  maker.String("deepseek2.rope.scaling.type", "yarn").F32("deepseek2.expert_weights_scale", 1);
  maker.U32("deepseek2.attention.q_lora_rank", 0);  // files with few layers mark its absence this way
  return maker;
}

// kv_b_proj is whole, too.
TEST(GgufConfig, ReadsOlderDeepseekFiles) {
  GgufMaker maker = OlderDeepseek();
  maker.F32Tensor("output.weight", {8, 10}).F32Tensor("blk.0.attn_kv_b.weight", {32, 64});
  maker.F32Tensor("blk.0.attn_k_b.weight", {16, 32, 2}).F32Tensor("blk.0.attn_v_b.weight", {32, 16, 2});
  const std::string file = maker.File();
  const auto opened = Open(file);
  ASSERT_TRUE(opened.ok()) << Message(opened.status());
  const nlohmann::json& config = (*opened)->config();
  EXPECT_EQ(config["architectures"][0], "DeepseekV2ForCausalLM");
  EXPECT_EQ(config["topk_method"], "greedy");
  EXPECT_EQ(config["scoring_func"], "softmax");
  EXPECT_EQ(config["qk_nope_head_dim"], 16);
  EXPECT_EQ(config["v_head_dim"], 16);
  EXPECT_EQ(config["first_k_dense_replace"], 0);
  EXPECT_TRUE(config["q_lora_rank"].is_null());
  EXPECT_EQ(config["rope_scaling"]["attention_factor"], 1.0);
  EXPECT_EQ((*opened)->tensors().size(), 2U);  // kv_b_proj is whole; its halves hold the same values
}

TEST(GgufConfig, RejectsFrequencyFactorsOfDeepseek) {
  EXPECT_EQ(ViewFault(OlderDeepseek().F32Tensor("rope_freqs.weight", {4}, 2).File()),
            "x.gguf: tensor rope_freqs.weight is not supported for deepseek2");
}

// Each half must find kv_b_proj by its name: a search through all tensors would take minutes here.
TEST(GgufCheckpoint, OpensManySplitKvBProjections) {
  GgufMaker maker = OlderDeepseek();
  constexpr int kHalves = 20000;
  for (int i = 0; i < kHalves; ++i) {
    maker.TensorAt(fmt::format("blk.{}.attn_kv_b.weight", i), {1}, 0, 96 * i);
    maker.TensorAt(fmt::format("blk.{}.attn_k_b.weight", i), {1}, 0, 96 * i + 32);
    maker.TensorAt(fmt::format("blk.{}.attn_v_b.weight", i), {1}, 0, 96 * i + 64);
  }
  const std::string file = maker.File() + std::string(96 * kHalves, '\0');
  const auto opened = Open(file);
  ASSERT_TRUE(opened.ok()) << Message(opened.status());
  EXPECT_EQ((*opened)->tensors().size(), static_cast<size_t>(kHalves));
}

}  // namespace
}  // namespace moesaic::checkpoint
