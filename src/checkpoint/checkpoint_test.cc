// Opens folders and files in the Hub's format.
#include "checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/test_files.h"

namespace moesaic::checkpoint {
namespace {

class CheckpointTest : public testing::Test {
 protected:
  std::string Fault(const std::string& path) {
    std::string message = Message(Checkpoint::Open(path).status());
    for (size_t at = 0; (at = message.find(folder_.Path())) != std::string::npos;) {
      message.replace(at, folder_.Path().size(), "F/");
    }
    return message;
  }
  TestFolder folder_;
};

SafetensorsMaker Sample() {
  SafetensorsMaker tensors;
  tensors.Add<float>("norm", "F32", {3}, {1, 2, 3}).Add<double>("wide", "F64", {2, 2}, {1, 2, 3, 4});
  tensors.Add<uint8_t>("fp8", "F8_E4M3", {2}, {0x38, 0xb8}).Add<int32_t>("ids", "I32", {2}, {7, 8});
  tensors.Add<uint8_t>("blocks", "F8_E4M3", {2}, {0x38, 0xb8})
      .Add<float>("blocks_scale_inv", "F32", {1}, {2});
  tensors.Add<uint8_t>("channels", "F8_E4M3", {2}, {0x38, 0xb8})
      .Add<float>("channels_scale", "F32", {1}, {2});
  return tensors;
}

TEST_F(CheckpointTest, OpensAFolder) {
  folder_.Write("config.json", R"({"model_type": "llama"})");
  folder_.Write("model.safetensors", Sample().File());
  folder_.Write("tokenizer.json", "{}");
  const auto checkpoint = Checkpoint::Open(folder_.Path());
  ASSERT_TRUE(checkpoint.ok()) << Message(checkpoint.status());
  EXPECT_EQ((*checkpoint)->config()["model_type"], "llama");
  EXPECT_EQ((*checkpoint)->container(), "safetensors");
  EXPECT_EQ((*checkpoint)->gguf(), nullptr);
  EXPECT_EQ((*checkpoint)->ReadText("tokenizer.json"), "{}");
  EXPECT_EQ((*checkpoint)->ReadText("chat_template.jinja"), std::nullopt);
  EXPECT_EQ((*checkpoint)->ReadText("../secret"), std::nullopt);
  EXPECT_TRUE((*checkpoint)->Has("norm"));
  EXPECT_FALSE((*checkpoint)->Has("nor"));
  EXPECT_EQ(*(*checkpoint)->ReadF32("norm", std::vector<int64_t>{3}), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(*(*checkpoint)->ReadF32("wide", std::vector<int64_t>{2, 2}), (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(*(*checkpoint)->ReadF32("fp8", std::vector<int64_t>{2}), (std::vector<float>{1, -1}));
  EXPECT_EQ(Message((*checkpoint)->ReadF32("norm", std::vector<int64_t>{3, 1}).status()),
            "model.safetensors: tensor norm must be [3, 1], found [3]");
  EXPECT_EQ(Message((*checkpoint)->ReadF32("ids", std::vector<int64_t>{2}).status()),
            "model.safetensors: tensor ids must hold floating-point numbers, found I32");
  for (const char* scaled : {"blocks", "channels"}) {
    EXPECT_EQ(
        Message((*checkpoint)->ReadF32(scaled, std::vector<int64_t>{2}).status()),
        fmt::format("model.safetensors: tensor {0} must not be quantized, found F8_E4M3 with the scales "
                    "{0}_scale{1}",
                    scaled, scaled == std::string("blocks") ? "_inv" : ""));
  }
  const TensorEntry* wide = (*checkpoint)->Find("wide");
  std::vector<float> row(2);
  ASSERT_TRUE((*checkpoint)->ReadRows(*wide, 1, 1, row).ok());
  EXPECT_EQ(row, (std::vector<float>{3, 4}));
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{1, 2}, {-1, 1}, {2, 1}, {0, -1}, {0, 2}}) {
    EXPECT_FALSE((*checkpoint)->ReadRows(*wide, first, count, row).ok()) << first << " " << count;
  }
}

TEST_F(CheckpointTest, OpensSingleFileAndConfigWithoutWeights) {
  const std::string file = folder_.Write("x.safetensors", Sample().File());
  EXPECT_EQ((*Checkpoint::Open(file))->config(), nlohmann::json::object());
  const std::string config = folder_.Write("config.json", R"({"a": 1})");
  EXPECT_EQ((*Checkpoint::Open(file))->config()["a"], 1);
  const auto alone = Checkpoint::Open(config);
  ASSERT_TRUE(alone.ok()) << Message(alone.status());
  EXPECT_TRUE((*alone)->tensors().empty());
  EXPECT_EQ(Message((*alone)->ReadF32("x", std::vector<int64_t>{1}).status()),
            config + ": there are no weights here");
}

TEST_F(CheckpointTest, ErrorNamesUnsupportedWeightFiles) {
  folder_.Write("config.json", "{}");
  const auto fault = [&] {
    const auto opened = Checkpoint::Open(folder_.Path());
    return Message(opened.ok() ? (*opened)->ReadF32("x", std::vector<int64_t>{1}).status() : opened.status());
  };
  EXPECT_EQ(fault(), folder_.Path() + ": there are no weights here");
  folder_.Write("training_args.bin", "x");
  EXPECT_EQ(fault(), folder_.Path() + ": there are no weights here");
  folder_.Write("pytorch_model.bin", "x");
  EXPECT_THAT(fault(), testing::HasSubstr("pytorch_model.bin is PyTorch's format"));
  folder_.Write("model-00001-of-00002.safetensors",
                SafetensorsMaker().Add<float>("x", "F32", {1}, {1}).File());
  EXPECT_THAT(fault(),
              testing::HasSubstr("neither model.safetensors nor model.safetensors.index.json, which lists "
                                 "the shards, though there is model-00001-of-00002.safetensors"));
}

TEST_F(CheckpointTest, ErrorNamesGitLfsPointers) {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
  const auto fault = [&](const std::string& path) { return Message(Checkpoint::Open(path).status()); };
  const std::string config = folder_.Write("config.json", pointer);
  EXPECT_EQ(fault(folder_.Path()),
            config +
                ": this is a Git LFS pointer and not the file itself; run \"git lfs pull\" in "
                "its repository, or download the file again");
  folder_.Write("config.json", "{}");
  const std::string weights = folder_.Write("model.safetensors", pointer);
  for (const std::string& file : {weights, folder_.Write("m.gguf", pointer)}) {
    EXPECT_THAT(fault(file), testing::StartsWith(file + ": this is a Git LFS pointer"));
  }
  EXPECT_THAT(fault(folder_.Path()), testing::StartsWith(weights + ": this is a Git LFS pointer"));
  const std::string index = folder_.Write("model.safetensors.index.json", pointer);
  EXPECT_THAT(fault(folder_.Path()), testing::StartsWith(index + ": this is a Git LFS pointer"));
}

TEST_F(CheckpointTest, OpensShards) {
  folder_.Write("config.json", "{}");
  folder_.Write("a.safetensors", SafetensorsMaker().Add<float>("x", "F32", {1}, {1}).File());
  folder_.Write("b.safetensors", SafetensorsMaker().Add<float>("y", "F32", {1}, {2}).File());
  const auto index = [&](const char* map) {
    folder_.Write("model.safetensors.index.json", fmt::format("{{\"weight_map\": {}}}", map));
  };
  index(R"({"x": "a.safetensors", "y": "b.safetensors"})");
  const auto checkpoint = Checkpoint::Open(folder_.Path());
  ASSERT_TRUE(checkpoint.ok()) << Message(checkpoint.status());
  EXPECT_EQ((*checkpoint)->ReadF32("y", std::vector<int64_t>{1})->at(0), 2);

  const std::pair<const char*, const char*> faults[] = {
      {"[]", "F/model.safetensors.index.json: \"weight_map\" must be an object"},
      {R"({"x": 1})", "F/model.safetensors.index.json: tensor x must name a file of this folder, found 1"},
      {R"({"x": "../a"})",
       "F/model.safetensors.index.json: tensor x must name a file of this folder, found \"../a\""},
      {R"({"x": "c.safetensors"})", "F/c.safetensors: no such file"},
      {R"({"x": "b.safetensors", "y": "a.safetensors"})",
       "F/model.safetensors.index.json: tensor x must be in b.safetensors, found in a.safetensors"},
      {R"({"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"})",
       "F/model.safetensors.index.json: tensor z must be in a.safetensors, found in no file"},
      {R"({"y": "b.safetensors", "q": "a.safetensors"})",
       "F/model.safetensors.index.json: tensor x of a.safetensors is missing in \"weight_map\""},
  };
  for (const auto& [map, message] : faults) {
    index(map);
    EXPECT_EQ(Fault(folder_.Path()), message) << map;
  }
  folder_.Write("b.safetensors", SafetensorsMaker().Add<float>("x", "F32", {1}, {2}).File());
  index(R"({"x": "a.safetensors", "y": "b.safetensors"})");
  EXPECT_EQ(Fault(folder_.Path()), "F/: tensor x is in both a.safetensors and b.safetensors");
}

TEST_F(CheckpointTest, RejectsUnreadableCheckpoints) {
  EXPECT_EQ(Fault(folder_.Path("absent")), "F/absent: no such file or folder");
  EXPECT_EQ(Fault(folder_.Path()), "F/: there is no config.json in this folder");
  folder_.Write("model.gguf", "GGUF");
  EXPECT_EQ(Fault(folder_.Path()),
            "F/: there is no config.json in this folder; name a file in it, such as model.gguf");
  folder_.Write("config.json", "[1]");
  EXPECT_EQ(Fault(folder_.Path()), "F/config.json: must be a JSON object, found [1]");
  folder_.Write("config.json", "{\"a\": NaN}");
  EXPECT_TRUE(Fault(folder_.Path()).starts_with("F/config.json: not JSON: parse error at line 1, column 7"))
      << Fault(folder_.Path());
  folder_.Write("config.json", std::string(1000000, '['));
  EXPECT_EQ(Fault(folder_.Path()), "F/config.json: JSON nests deeper than 64 levels");
  folder_.Write("config.json", "{}");
  folder_.Write("model.safetensors", "12345678");
  EXPECT_TRUE(Fault(folder_.Path()).starts_with("F/model.safetensors: the header may have "))
      << Fault(folder_.Path());
  EXPECT_EQ(Fault(folder_.Write("other.json", "{}")), "F/other.json: expected a file named config.json");
  for (const char* bytes : {"", "short", "root:x:0:0:root:/root:/bin/bash"}) {
    EXPECT_EQ(Fault(folder_.Write("any", bytes)), "F/any: neither GGUF, safetensors nor a packed file");
    EXPECT_EQ(Fault(folder_.Write("any.gguf", bytes)),
              "F/any.gguf: a GGUF file begins with \"GGUF\", this one does not");
  }
}

}  // namespace
}  // namespace moesaic::checkpoint
