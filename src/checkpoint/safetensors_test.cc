#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "checkpoint/json_text.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/test_files.h"
#include "runtime/memory.h"

namespace moesaic::checkpoint {
namespace {

std::string SafetensorsFault(const std::string& file) {
  const auto parsed = ParseSafetensors(BytesOf(file), "x.safetensors");
  return Message(parsed.status());
}

std::string Fault(const std::string& header, size_t data_bytes) {
  return SafetensorsFault(SafetensorsFile(header, std::string(data_bytes, '\0')));
}

TEST(Safetensors, ReadsTensorsInPlace) {
  const std::string file = SafetensorsFile(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},)"
      R"("a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"none":{"dtype":"I64","shape":[0,7],)"
      R"("data_offsets":[16,16]},"one":{"dtype":"U8","shape":[],"data_offsets":[22,23]}}   )",
      std::string(23, 'x'));
  const auto parsed = ParseSafetensors(BytesOf(file), "x.safetensors");
  ASSERT_TRUE(parsed.ok()) << Message(parsed.status());
  EXPECT_EQ(parsed->metadata.at("format"), "pt");
  ASSERT_EQ(parsed->tensors.size(), 4U);
  EXPECT_EQ(parsed->tensors[0].name, "a");
  EXPECT_EQ(parsed->tensors[0].shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(static_cast<const void*>(parsed->tensors[0].bytes.data()), file.data() + parsed->data_start);
  EXPECT_EQ(parsed->tensors[1].name, "none");
  EXPECT_EQ(parsed->tensors[2].dtype, tensor::DType::kBF16);
  EXPECT_TRUE(parsed->tensors[3].shape.empty());
}

TEST(Safetensors, RejectsDamagedFilesInOneLine) {
  EXPECT_EQ(SafetensorsFault("1234567"), "x.safetensors: a safetensors file has at least 8 bytes, found 7");
  EXPECT_EQ(SafetensorsFault(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8)),
            "x.safetensors: the header may have 100000000 bytes, found 18446744073709551615; this is no "
            "safetensors file");
  EXPECT_EQ(SafetensorsFault(SafetensorsFile("{}", "").substr(0, 9)),
            "x.safetensors: the header should have 2 bytes but the file ends after 1; is it complete?");
  EXPECT_EQ(Fault("[]", 0), "x.safetensors: header: must be a JSON object, found []");
  EXPECT_TRUE(Fault("{", 0).starts_with("x.safetensors: header: not JSON: parse error at line 1"));
  EXPECT_TRUE(Fault("{\"\xff\":1}", 0).starts_with("x.safetensors: header: not JSON: "));
  EXPECT_EQ(Fault(std::string(65, '['), 0), "x.safetensors: header: JSON nests deeper than 64 levels");
  EXPECT_EQ(Fault(R"({"__metadata__":{"n":1}})", 0), "x.safetensors: __metadata__ \"n\" must be a string");
}

struct HeaderFault {
  const char* entry;
  size_t data;
  const char* message;  // the part after "x.safetensors: tensor t: "
};

TEST(Safetensors, RejectsEveryInvalidEntry) {
  const HeaderFault faults[] = {
      {"1", 0, "needs \"dtype\", \"shape\" and \"data_offsets\""},
      {R"({"dtype":"F32","shape":[1]})", 4, "needs \"dtype\", \"shape\" and \"data_offsets\""},
      {R"({"dtype":7,"shape":[1],"data_offsets":[0,4]})", 4, "\"dtype\" must be a string, found 7"},
      {R"({"dtype":"F4","shape":[1],"data_offsets":[0,4]})", 4,
       "dtype must be one of F64 ... BOOL, found \"F4\""},
      {R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})", 4,
       "a size in \"shape\" must be a non-negative integer, found -1"},
      {R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})", 4,
       "a size in \"shape\" must be a non-negative integer, found 1.0"},
      {R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]})", 4,
       "\"shape\" must be a list of at most 8 sizes"},
      {R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]})", 4,
       "a size in \"shape\" is too large, found 18446744073709551615"},
      {R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]})", 4,
       "\"shape\" has too many elements"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4,
       "\"data_offsets\" must span 8 bytes, found 4"},
      {R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 4,
       "\"data_offsets\" [0, 8] lie outside the 4 bytes of data; is the file complete?"},
      {R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})", 4,
       "\"data_offsets\" [4, 0] lie outside the 4 bytes of data; is the file complete?"},
      {R"({"dtype":"F32","shape":[1],"data_offsets":[0]})", 4, "\"data_offsets\" must be [begin, end]"},
      {R"({"dtype":"F32","shape":[1],"data_offsets":["0",4]})", 4,
       "\"data_offsets\" must be a non-negative integer, found \"0\""},
  };
  for (const HeaderFault& fault : faults) {
    EXPECT_EQ(Fault(fmt::format("{{\"t\":{}}}", fault.entry), fault.data),
              std::string("x.safetensors: tensor t: ") + fault.message);
  }
}

TEST(Safetensors, RejectsGapsOverlapsAndTrailingBytes) {
  const std::string first = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  EXPECT_EQ(Fault(first + R"(,"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})", 5),
            "x.safetensors: tensor b begins at byte 3 of the data, expected 4");
  EXPECT_EQ(Fault(first + R"(,"b":{"dtype":"U8","shape":[2],"data_offsets":[6,8]}})", 8),
            "x.safetensors: tensor b begins at byte 6 of the data, expected 4");
  EXPECT_EQ(Fault(first + "}", 7), "x.safetensors: 3 bytes follow the last tensor, expected none");
  EXPECT_EQ(Fault(first + R"(,"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8),
            "x.safetensors: header: tensor a occurs twice");
}

TEST(SafetensorsWriter, RoundTripsThroughReader) {
  const TestFolder folder;
  const std::vector<float> values = {1, -2, 3.5F};
  const auto bytes = [&] {
    const auto* begin = reinterpret_cast<const std::byte*>(values.data());
    return std::vector<std::byte>(begin, begin + values.size() * sizeof(float));
  };
  const std::string path = folder.Path("w.safetensors");
  ASSERT_TRUE(WriteSafetensors(
                  path, {{"x", tensor::DType::kF32, {3}, bytes}, {"y", tensor::DType::kF32, {1, 3}, bytes}},
                  {{"format", "pt"}})
                  .ok());
  const auto file = runtime::MappedFile::Open(path);
  const auto parsed = ParseSafetensors((*file)->bytes(), path);
  ASSERT_TRUE(parsed.ok()) << Message(parsed.status());
  EXPECT_EQ(parsed->tensors[1].shape, (std::vector<int64_t>{1, 3}));
  EXPECT_TRUE(std::ranges::equal(parsed->tensors[1].bytes, std::as_bytes(std::span(values))));
  EXPECT_EQ(parsed->metadata.at("format"), "pt");
}

TEST(JsonText, TruncatesLongValuesBetweenCharacters) {
  EXPECT_EQ(ShownJson(std::string(100, 'a')), fmt::format("\"{}...", std::string(59, 'a')));
  std::string umlauts;
  for (int i = 0; i < 50; ++i) umlauts += "\u00e4";
  const std::string shown = ShownJson(umlauts);
  EXPECT_TRUE(nlohmann::json::accept(fmt::format("{}\"", shown))) << shown;
  EXPECT_EQ(ShownJson(std::vector<int>(100)), "a list of 100");
}

}  // namespace
}  // namespace moesaic::checkpoint
