// Tests every storage scheme of a linear layer's weight on values small enough to check by hand. tests/golden
// compares whole models in these formats with independent readers.
#include "checkpoint/linear_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/test_files.h"

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;

class LinearSourceTest : public testing::Test {
 protected:
  // Opens a folder with this "quantization_config" and these tensors.
  void Open(const json& quant, const SafetensorsMaker& tensors) {
    json config = json::object();
    if (!quant.is_null()) config["quantization_config"] = quant;
    folder_.Write("config.json", config.dump());
    folder_.Write("model.safetensors", tensors.File());
    auto opened = Checkpoint::Open(folder_.Path());
    status_ = opened.status();
    checkpoint_ = opened.ok() ? *std::move(opened) : nullptr;
  }
  std::string OpenFault(const json& quant) {
    Open(quant, SafetensorsMaker());
    return WithoutFolder(Message(status_));
  }
  StatusOr<std::vector<float>> Read(int64_t out, int64_t in) {
    if (!status_.ok()) return status_;
    ASSIGN_OR_RETURN(const LinearSource source, checkpoint_->FindLinear("m", out, in));
    std::vector<float> values(static_cast<size_t>(out * in));
    // Reading row by row and reading all rows together must agree.
    for (int64_t row = 0; row < out; ++row) {
      RETURN_IF_ERROR(checkpoint_->ReadLinearRows(source, row, 1, std::span(values).subspan(row * in)));
    }
    std::vector<float> whole(values.size());
    RETURN_IF_ERROR(checkpoint_->ReadLinearRows(source, 0, out, whole));
    EXPECT_EQ(values, whole);
    EXPECT_FALSE(checkpoint_->ReadLinearRows(source, 1, out, whole).ok());
    EXPECT_FALSE(checkpoint_->ReadLinearRows(source, -1, 1, whole).ok());
    return values;
  }
  std::string Fault(int64_t out, int64_t in) { return WithoutFolder(Message(Read(out, in).status())); }
  std::string WithoutFolder(std::string message) const {
    for (size_t at = 0; (at = message.find(folder_.Path())) != std::string::npos;) {
      message.replace(at, folder_.Path().size(), "F/");
    }
    return message;
  }

  TestFolder folder_;
  Status status_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

json Group(const json& weights, const std::string& format, const json& activations = nullptr) {
  return {
      {"quant_method", "compressed-tensors"},
      {"format", format},
      {"config_groups",
       {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", activations}}}}}};
}

json Int8(const std::string& strategy) {
  return {{"num_bits", 8}, {"type", "int"}, {"symmetric", true}, {"strategy", strategy}};
}
json Int4(bool symmetric, int group_size) {
  return {{"num_bits", 4},
          {"type", "int"},
          {"symmetric", symmetric},
          {"strategy", group_size > 0 ? "group" : "channel"},
          {"group_size", group_size > 0 ? json(group_size) : json()}};
}

TEST_F(LinearSourceTest, ReadsPlainHalves) {
  Open(nullptr, SafetensorsMaker().Add<uint16_t>("m.weight", "F16", {2, 1}, {0x3c00, 0xc000}));
  EXPECT_EQ(*Read(2, 1), (std::vector<float>{1, -2}));
  EXPECT_EQ(Fault(1, 2), "model.safetensors: tensor m.weight must be [1, 2], found [2, 1]");
  Open(nullptr, SafetensorsMaker().Add<uint16_t>("m.weight", "BF16", {1, 2}, {0x3f80, 0xc040}));
  EXPECT_EQ(*Read(1, 2), (std::vector<float>{1, -3}));
  Open(nullptr, SafetensorsMaker().Add<int8_t>("m.weight", "I8", {1, 2}, {1, 2}));
  EXPECT_EQ(Fault(1, 2),
            "model.safetensors: tensor m.weight must be a floating-point or ggml block type (or described by "
            "\"quantization_config\"), found I8 [1, 2]");
  EXPECT_EQ(Message(checkpoint_->FindLinear("n", 1, 2).status()),
            folder_.Path() + ": tensor n.weight [1, 2] is missing");
}

// 3 x 5 weights in blocks of 2 x 4: ragged in both directions. 0x38 is 1 and 0x40 is 2 in e4m3.
TEST_F(LinearSourceTest, ReadsFp8Blocks) {
  const json quant = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {2, 4}}};
  std::vector<uint8_t> weight(15, 0x38);
  weight[14] = 0x40;
  SafetensorsMaker tensors;
  tensors.Add<uint8_t>("m.weight", "F8_E4M3", {3, 5}, weight);
  tensors.Add<float>("m.weight_scale_inv", "F32", {2, 2}, {1, 10, 100, 1000});
  Open(quant, tensors);
  EXPECT_EQ(*Read(3, 5), (std::vector<float>{1, 1, 1, 1, 10, 1, 1, 1, 1, 10, 100, 100, 100, 100, 2000}));
  EXPECT_EQ(checkpoint_->FindLinear("m", 3, 5)->scheme, WeightScheme::kFp8Block);
  Open(quant, SafetensorsMaker()
                  .Add<uint8_t>("m.weight", "F8_E4M3", {3, 5}, weight)
                  .Add<float>("m.weight_scale_inv", "F32", {2, 1}, {1, 1}));
  EXPECT_EQ(Fault(3, 5), "model.safetensors: tensor m.weight_scale_inv must be [2, 2], found F32 [2, 1]");
  Open(quant, SafetensorsMaker().Add<uint8_t>("m.weight", "F8_E4M3", {3, 5}, weight));
  EXPECT_EQ(Fault(3, 5), "F/: tensor m.weight_scale_inv is missing");
  Open(nullptr, tensors);
  EXPECT_EQ(Fault(3, 5),
            "model.safetensors: tensor m.weight must be a floating-point or ggml block type (or described by "
            "\"quantization_config\"), found F8_E4M3 [3, 5]");
  // Modules stored in 16 bits need no scale and must not have one.
  Open(quant, SafetensorsMaker().Add<uint16_t>("m.weight", "BF16", {1, 1}, {0x3f80}));
  EXPECT_EQ(*Read(1, 1), std::vector<float>{1});
  Open(quant, SafetensorsMaker()
                  .Add<uint16_t>("m.weight", "BF16", {1, 1}, {0x3f80})
                  .Add<float>("m.weight_scale_inv", "F32", {1, 1}, {2}));
  EXPECT_EQ(
      Fault(1, 1),
      "model.safetensors: tensor m.weight is BF16 and not quantized, but m.weight_scale_inv exists too");
}

TEST_F(LinearSourceTest, RejectsZeroPointsOfSymmetricWeights) {
  const auto packed = [](uint32_t zero) {
    return SafetensorsMaker()
        .Add<uint32_t>("m.weight_packed", "I32", {1, 1}, {0x76543210})
        .Add<float>("m.weight_scale", "F32", {1, 1}, {1})
        .Add<int64_t>("m.weight_shape", "I64", {2}, {1, 8})
        .Add<uint32_t>("m.weight_zero_point", "I32", {1, 1}, {zero});
  };
  const json quant = Group(Int4(true, 8), "pack-quantized");
  Open(quant, packed(0x88888888));  // the middle code, which is 0
  EXPECT_EQ(*Read(1, 8), (std::vector<float>{-8, -7, -6, -5, -4, -3, -2, -1}));
  Open(quant, packed(0x88888883));
  EXPECT_EQ(Fault(1, 8),
            "model.safetensors: tensor m.weight_zero_point must be 0, since m is read as symmetric");
  const auto int8 = [](const char* field, int8_t zero) {
    return SafetensorsMaker()
        .Add<int8_t>("m.weight", "I8", {2, 1}, {1, -2})
        .Add<float>("m.weight_scale", "F32", {2, 1}, {1, 1})
        .Add<int8_t>(field, "I8", {2, 1}, {0, zero});
  };
  Open(Group(Int8("channel"), "int-quantized"), int8("m.weight_zero_point", 0));
  EXPECT_EQ(*Read(2, 1), (std::vector<float>{1, -2}));
  for (const char* field : {"m.weight_zero_point", "m.input_zero_point"}) {
    Open(Group(Int8("channel"), "int-quantized"), int8(field, 5));
    EXPECT_EQ(Fault(2, 1),
              fmt::format("model.safetensors: tensor {} must be 0, since m is read as symmetric", field));
  }
}

TEST_F(LinearSourceTest, ReadsStaticAndDynamicInt8Channels) {
  SafetensorsMaker tensors;
  tensors.Add<int8_t>("m.weight", "I8", {2, 3}, {1, -2, 127, -128, 0, 5});
  tensors.Add<float>("m.weight_scale", "F32", {2, 1}, {0.5F, 2});
  Open(Group(Int8("channel"), "int-quantized"), tensors);
  EXPECT_EQ(*Read(2, 3), (std::vector<float>{0.5F, -1, 63.5F, -256, 0, 10}));
  EXPECT_FALSE(checkpoint_->FindLinear("m", 2, 3)->dynamic_activations);
  Open(Group(Int8("channel"), "int-quantized", {{"num_bits", 8}, {"type", "int"}, {"dynamic", true}}),
       tensors);
  const auto dynamic = checkpoint_->FindLinear("m", 2, 3);
  ASSERT_TRUE(dynamic.ok()) << Message(dynamic.status());
  EXPECT_TRUE(dynamic->dynamic_activations);
  EXPECT_EQ(dynamic->input_scale, 0);
  std::vector<int8_t> rows(3);
  std::vector<float> scales(1);
  ASSERT_TRUE(checkpoint_->ReadLinearRowsI8(*dynamic, 1, 1, rows, scales).ok());
  EXPECT_EQ(rows, (std::vector<int8_t>{-128, 0, 5}));
  EXPECT_EQ(scales[0], 2);
  EXPECT_FALSE(checkpoint_->ReadLinearRowsI8(*dynamic, 1, 2, rows, scales).ok());

  const json static_activations = {{"num_bits", 8}, {"type", "int"}, {"dynamic", false}};
  Open(Group(Int8("channel"), "int-quantized", static_activations), tensors);
  EXPECT_EQ(Fault(2, 3), "F/: tensor m.input_scale is missing");
  Open(Group(Int8("channel"), "int-quantized", static_activations),
       tensors.Add<float>("m.input_scale", "F32", {1}, {0.25F}));
  EXPECT_EQ(checkpoint_->FindLinear("m", 2, 3)->input_scale, 0.25F);
  Open(Group(Int8("channel"), "int-quantized", static_activations),
       SafetensorsMaker()
           .Add<int8_t>("m.weight", "I8", {1, 1}, {3})
           .Add<float>("m.weight_scale", "F32", {1, 1}, {1})
           .Add<float>("m.input_scale", "F32", {1}, {0x1p-127F}));
  EXPECT_THAT(Fault(1, 1), testing::HasSubstr("m.input_scale must be at least 2^-126, found 5.87"));
  Open(Group(Int8("tensor"), "int-quantized"), SafetensorsMaker()
                                                   .Add<int8_t>("m.weight", "I8", {2, 1}, {3, 4})
                                                   .Add<float>("m.weight_scale", "F32", {1}, {10}));
  EXPECT_EQ(*Read(2, 1), (std::vector<float>{30, 40}));
}

// 9 inputs are a whole word and one nibble of the next; values are stored plus 8.
TEST_F(LinearSourceTest, ReadsInt4Words) {
  SafetensorsMaker symmetric;
  symmetric.Add<uint32_t>("m.weight_packed", "I32", {1, 2}, {0xfedc'ba98U, 0x7});
  symmetric.Add<uint16_t>("m.weight_scale", "BF16", {1, 2}, {0x3f80, 0x4000});  // 1, 2
  symmetric.Add<int64_t>("m.weight_shape", "I64", {2}, {1, 9});
  Open(Group(Int4(true, 8), "pack-quantized"), symmetric);
  EXPECT_EQ(*Read(1, 9), (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, -2}));
  EXPECT_EQ(checkpoint_->FindLinear("m", 1, 9)->scheme, WeightScheme::kIntPacked);

  // Column groups in another order.
  SafetensorsMaker ordered = symmetric;
  ordered.Add<int32_t>("m.weight_g_idx", "I32", {9}, {1, 1, 0, 0, 0, 0, 0, 0, 0});
  Open(Group(Int4(true, 8), "pack-quantized"), ordered);
  EXPECT_EQ(*Read(1, 9), (std::vector<float>{0, 2, 2, 3, 4, 5, 6, 7, -1}));
  SafetensorsMaker unset = symmetric;
  unset.Add<int32_t>("m.weight_g_idx", "I32", {9}, std::vector<int32_t>(9, -1));
  Open(Group(Int4(true, 8), "pack-quantized"), unset);
  EXPECT_EQ((*Read(1, 9))[8], -2);
  json by_group = Int4(true, 8);
  by_group["actorder"] = "group";
  Open(Group(by_group, "pack-quantized"), symmetric);
  EXPECT_EQ(Fault(1, 9), "F/: tensor m.weight_g_idx [9] is missing");
  Open(Group(by_group, "pack-quantized"), unset);
  EXPECT_EQ(Fault(1, 9), "model.safetensors: tensor m.weight_g_idx must hold groups in [0, 2), found -1");
}

// 5 inputs fill one word and one byte of the next. Values are stored plus 128, zero points along the outputs.
TEST_F(LinearSourceTest, ReadsInt8Words) {
  SafetensorsMaker tensors;
  tensors.Add<uint32_t>("m.weight_packed", "I32", {1, 2}, {0xff81'7f00U, 0x85});
  tensors.Add<uint16_t>("m.weight_scale", "BF16", {1, 2}, {0x3f80, 0x4000});  // 1, 2
  tensors.Add<int64_t>("m.weight_shape", "I64", {2}, {1, 5});
  json args = Int4(true, 4);
  args["num_bits"] = 8;
  Open(Group(args, "pack-quantized"), tensors);
  EXPECT_EQ(*Read(1, 5), (std::vector<float>{-128, -1, 1, 127, 10}));
  EXPECT_EQ(checkpoint_->FindLinear("m", 1, 5)->bits, 8);
  args["symmetric"] = false;
  Open(Group(args, "pack-quantized"),
       tensors.Add<uint32_t>("m.weight_zero_point", "I32", {1, 2}, {0x01, 0x80}));
  EXPECT_EQ(*Read(1, 5), (std::vector<float>{-1, 126, 128, 254, 10}));

  SafetensorsMaker column;
  column.Add<uint32_t>("m.weight_packed", "I32", {5, 1}, std::vector<uint32_t>(5, 0xff));
  column.Add<float>("m.weight_scale", "F32", {5, 1}, std::vector<float>(5, 1));
  column.Add<int64_t>("m.weight_shape", "I64", {2}, {5, 1});
  column.Add<uint32_t>("m.weight_zero_point", "I32", {2, 1}, {0x8040'2010U, 0xfe});
  json by_channel = Int4(false, 0);
  by_channel["num_bits"] = 8;
  Open(Group(by_channel, "pack-quantized"), column);
  EXPECT_EQ(*Read(5, 1), (std::vector<float>{239, 223, 191, 127, 1}));
}

// The checkpoint of Kimi-K2-Thinking.
TEST_F(LinearSourceTest, ReadsShapesOf32Bits) {
  SafetensorsMaker tensors;
  tensors.Add<uint32_t>("m.weight_packed", "I32", {1, 1}, {0x98a98769});
  tensors.Add<float>("m.weight_scale", "F32", {1, 1}, {1});
  tensors.Add<int32_t>("m.weight_shape", "I32", {2}, {1, 8});
  Open(Group(Int4(true, 8), "pack-quantized"), tensors);
  EXPECT_EQ(*Read(1, 8), (std::vector<float>{1, -2, -1, 0, 1, 2, 0, 1}));
  EXPECT_EQ(Fault(1, 7), "model.safetensors: tensor m.weight_shape must hold [1, 7], found [1, 8]");
}

// Zero points are packed along the outputs: output 8 is the first nibble of the second word.
TEST_F(LinearSourceTest, ReadsInt4ZeroPoints) {
  SafetensorsMaker tensors;
  tensors.Add<uint32_t>("m.weight_packed", "I32", {9, 1}, std::vector<uint32_t>(9, 0xf));
  tensors.Add<float>("m.weight_scale", "F32", {9, 1}, std::vector<float>(9, 1));
  tensors.Add<int64_t>("m.weight_shape", "I64", {2}, {9, 1});
  SafetensorsMaker with_zeros = tensors;
  with_zeros.Add<uint32_t>("m.weight_zero_point", "I32", {2, 1}, {0x7654'3210U, 0x8});
  Open(Group(Int4(false, 0), "pack-quantized"), with_zeros);
  EXPECT_EQ(*Read(9, 1), (std::vector<float>{15, 14, 13, 12, 11, 10, 9, 8, 7}));
  Open(Group(Int4(false, 0), "pack-quantized"), tensors);
  EXPECT_EQ(Fault(9, 1), "F/: tensor m.weight_zero_point [2, 1] is missing");
  Open(Group(Int4(true, 0), "pack-quantized"), tensors.Add<int32_t>("other", "I32", {1}, {1}));
  EXPECT_EQ((*Read(9, 1))[0], 7);
  EXPECT_EQ(Fault(9, 2), "model.safetensors: tensor m.weight_shape must hold [9, 2], found [9, 1]");
}

// Codes 0 to 15 in order, low nibble first; the block scale is 2 and the global one divides by 4.
TEST_F(LinearSourceTest, ReadsNvfp4) {
  const json weights = {{"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}};
  const std::vector<uint8_t> packed = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
  SafetensorsMaker tensors;
  tensors.Add<uint8_t>("m.weight_packed", "U8", {1, 8}, packed);
  tensors.Add<uint8_t>("m.weight_scale", "F8_E4M3", {1, 1}, {0x40});
  Open(Group(weights, "nvfp4-pack-quantized"), tensors);
  EXPECT_EQ(Fault(1, 16), "F/: tensor m.weight_global_scale is missing");
  SafetensorsMaker zero = tensors;
  Open(Group(weights, "nvfp4-pack-quantized"), zero.Add<float>("m.weight_global_scale", "F32", {1}, {0}));
  EXPECT_EQ(Fault(1, 16),
            "model.safetensors: tensor m.weight_global_scale must be positive and finite, found 0");
  Open(Group(weights, "nvfp4-pack-quantized"), tensors.Add<float>("m.weight_global_scale", "F32", {1}, {4}));
  EXPECT_EQ(*Read(1, 16), (std::vector<float>{0, 0.25F, 0.5F, 0.75F, 1, 1.5F, 2, 3, -0.0F, -0.25F, -0.5F,
                                              -0.75F, -1, -1.5F, -2, -3}));
}

TEST_F(LinearSourceTest, ReadsCompressedFp8) {
  SafetensorsMaker tensors;
  tensors.Add<uint8_t>("m.weight", "F8_E4M3", {2, 2}, {0x38, 0x40, 0x38, 0x40});
  SafetensorsMaker channel = tensors;
  channel.Add<float>("m.weight_scale", "F32", {2, 1}, {3, 5});
  Open(Group({{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}}, "float-quantized"), channel);
  EXPECT_EQ(*Read(2, 2), (std::vector<float>{3, 6, 5, 10}));
  SafetensorsMaker block = tensors;
  block.Add<float>("m.weight_scale", "F32", {1, 1}, {7});
  const json blocks = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "block"}, {"block_structure", {128, 128}}};
  Open(Group(blocks, "float-quantized"), block);
  EXPECT_EQ(*Read(2, 2), (std::vector<float>{7, 14, 7, 14}));
}

// Patterns and names take precedence over "Linear", regardless of the order of groups; "ignore" precedes all.
TEST_F(LinearSourceTest, GroupsByNamePrecedeLinear) {
  json quant = Group(Int8("channel"), "int-quantized");
  quant["config_groups"]["group_1"] = {
      {"targets", {"re:m.*"}}, {"weights", Int8("tensor")}, {"input_activations", nullptr}};
  SafetensorsMaker tensors;
  tensors.Add<int8_t>("m.weight", "I8", {2, 1}, {3, 4});
  tensors.Add<float>("m.weight_scale", "F32", {1}, {10});
  Open(quant, tensors);
  EXPECT_EQ(*Read(2, 1), (std::vector<float>{30, 40}));
  quant["ignore"] = {"re:.*m$"};
  Open(quant, tensors);
  EXPECT_EQ(Fault(2, 1), "F/: m is stored quantized, but \"quantization_config\" has no group for it");
}

TEST_F(LinearSourceTest, ErrorNamesUnsupportedScheme) {
  EXPECT_EQ(OpenFault(7), "config.json: \"quantization_config\" must be an object, found 7");
  EXPECT_EQ(OpenFault({{"quant_method", "gptq"}}),
            "config.json: \"quantization_config\": \"quant_method\" must be \"fp8\" or "
            "\"compressed-tensors\", found \"gptq\"");
  EXPECT_EQ(OpenFault({{"quant_method", "fp8"}, {"fmt", "e5m2"}}),
            "config.json: \"quantization_config\": \"fmt\" must be \"e4m3\", found \"e5m2\"");
  EXPECT_EQ(
      OpenFault({{"quant_method", "fp8"}, {"weight_block_size", {0, 128}}}),
      "config.json: \"quantization_config\": block size must be two integers in [1, 65536], found [0,128]");
  EXPECT_EQ(
      OpenFault({{"quant_method", "fp8"}}),
      "config.json: \"quantization_config\": block size must be two integers in [1, 65536], found null");
  json quant = Group(Int8("channel"), "int-quantized");
  quant["ignore"] = {"re:("};
  EXPECT_TRUE(OpenFault(quant).starts_with(
      "config.json: \"quantization_config\": \"ignore\": re:( is not a regular expression: "));
  quant["ignore"] = {"re:" + std::string(1000, 'a')};
  EXPECT_EQ(
      OpenFault(quant),
      "config.json: \"quantization_config\": \"ignore\": a pattern may have 1000 characters, found 1003");
  quant["ignore"] = {1};
  EXPECT_EQ(OpenFault(quant),
            "config.json: \"quantization_config\": \"ignore\" must be a list of names, found 1");
  quant = Group(Int8("channel"), "int-quantized", {{"num_bits", 4}, {"type", "int"}});
  EXPECT_EQ(OpenFault(quant),
            "config.json: \"quantization_config\": \"group_0\": \"input_activations\": integer activations "
            "must have "
            "8 bits, found 4");
  EXPECT_EQ(OpenFault(Group({{"num_bits", 64}}, "int-quantized")),
            "config.json: \"quantization_config\": \"group_0\": \"weights\": \"num_bits\" must be an integer "
            "in [1, 16], "
            "found 64");

  SafetensorsMaker tensors;
  tensors.Add<int8_t>("m.weight", "I8", {2, 2}, {1, 2, 3, 4})
      .Add<float>("m.weight_scale", "F32", {2, 1}, {1, 1});
  json three_bits = Int8("channel");
  three_bits["num_bits"] = 3;
  const std::pair<json, const char*> faults[] = {
      {Group(Int8("channel"), "marlin-24"),
       "compressed-tensors format must be int-quantized, pack-quantized, nvfp4-pack-quantized or "
       "float-quantized, found "
       "\"marlin-24\""},
      {Group(Int8("group"), "int-quantized"), "\"group_size\" must be positive, found 0"},
      {Group(Int8("attn_head"), "int-quantized"), "weight strategy \"attn_head\" is not supported"},
      {Group(three_bits, "pack-quantized"), "pack-quantized weights must have 4 or 8 bits, found 3"},
      {Group(Int4(true, 8), "int-quantized"), "int-quantized weights must have 8 bits, found 4"},
      {Group(Int8("channel"), "float-quantized"),
       "float-quantized weights must be 8-bit \"float\", found 8-bit \"int\""},
  };
  for (const auto& [config, message] : faults) {
    Open(config, tensors);
    EXPECT_EQ(Fault(2, 2), std::string("F/: m: ") + message);
  }
}

// Backtracking matchers take exponential time on this pattern.
TEST_F(LinearSourceTest, PatternsCannotHang) {
  json quant = Group(Int8("channel"), "int-quantized");
  quant["ignore"] = {"re:(a*)*(a*)*(a*)*b"};
  Open(quant, SafetensorsMaker());
  ASSERT_TRUE(status_.ok());
  EXPECT_FALSE(checkpoint_->FindLinear(std::string(60, 'a'), 1, 1).ok());
}

}  // namespace
}  // namespace moesaic::checkpoint
