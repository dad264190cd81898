#include "checkpoint/packed_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <numeric>

#include "checkpoint/checkpoint.h"
#include "checkpoint/test_files.h"

namespace moesaic::checkpoint {
namespace {

std::vector<std::byte> Counting(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + 1);
  return bytes;
}

constexpr char kNormLayout[] = R"({"format":"f32","values":32})";

// Writes two regions; the second is appended in two pieces and its length is not a multiple of 64.
Status WriteSample(const std::string& path) {
  ASSIGN_OR_RETURN(const auto writer,
                   PackedWriter::Create(path, {{"norm", kNormLayout, 128}, {"w", R"({"k":3})", 100}},
                                        {{"config.json", R"({"a": 1})"}, {"tokenizer.json", "{}"}}));
  const auto bytes = Counting(128);
  RETURN_IF_ERROR(writer->Append(0, bytes));
  RETURN_IF_ERROR(writer->Append(1, std::span(bytes).first(60)));
  RETURN_IF_ERROR(writer->Append(1, std::span(bytes).subspan(60, 40)));
  return writer->Finish();
}

TEST(PackedFile, ReadsBackWrittenRegions) {
  const TestFolder folder;
  const std::string path = folder.Path("m.safetensors");
  ASSERT_TRUE(WriteSample(path).ok());
  EXPECT_TRUE(PackedFile::Is(path));
  const auto file = PackedFile::Open(path);
  ASSERT_TRUE(file.ok()) << Message(file.status());
  EXPECT_EQ((*file)->regions().size(), 2U);
  EXPECT_EQ(*(*file)->Metadata("config.json"), R"({"a": 1})");
  EXPECT_EQ((*(*file)->Describe("norm"))->layout, kNormLayout);
  const auto w = *(*file)->Region("w");
  const auto bytes = Counting(100);
  ASSERT_EQ(w.size(), 100U);
  EXPECT_EQ(std::memcmp(w.data(), bytes.data(), 100), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(w.data()) % 64, 0U);
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*file)->Region("norm")->data()) % 4096, 0U);
  EXPECT_EQ(Message((*file)->Region("v").status()), path + ": region v is missing");
  EXPECT_EQ(Message((*file)->Metadata("v").status()), path + ": no metadata \"v\"");
}

TEST(PackedFile, IsACheckpointWithItsConfigAndTexts) {
  const TestFolder folder;
  const std::string path = folder.Path("m.safetensors");
  ASSERT_TRUE(WriteSample(path).ok());
  const auto checkpoint = Checkpoint::Open(path);
  ASSERT_TRUE(checkpoint.ok()) << Message(checkpoint.status());
  EXPECT_EQ((*checkpoint)->container(), "moesaic");
  EXPECT_EQ((*checkpoint)->config()["a"], 1);
  EXPECT_EQ((*checkpoint)->ReadText("tokenizer.json"), "{}");
  EXPECT_EQ((*checkpoint)->ReadText("chat_template.jinja"), std::nullopt);
  EXPECT_EQ((*checkpoint)->tensors().size(), 2U);
}

TEST(PackedFile, AppearsOnlyWhenComplete) {
  const TestFolder folder;
  const std::string path = folder.Path("m.safetensors");
  {
    const auto writer = PackedWriter::Create(path, {{"w", R"({"k":3})", 100}}, {});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->Append(0, Counting(50)).ok());
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.Path()));
  EXPECT_FALSE(PackedWriter::Create(folder.Path("none/m.safetensors"), {}, {}).ok());
  EXPECT_EQ(Message(PackedWriter::Create(path, {}, {{"text", "\xff"}}).status()).substr(0, 47),
            "the metadata of a packed file must be UTF-8: [j");
}

TEST(PackedFile, RecognizesOnlyPackedFiles) {
  const TestFolder folder;
  EXPECT_FALSE(PackedFile::Is(folder.Path()));
  EXPECT_FALSE(PackedFile::Is(folder.Path("absent")));
  EXPECT_FALSE(PackedFile::Is(folder.Write("short", "{")));
  EXPECT_FALSE(PackedFile::Is(folder.Write("plain", SafetensorsFile("{}", ""))));
}

std::string FaultOf(const nlohmann::json& metadata, const std::string& tensors, size_t data) {
  std::string header = fmt::format("{{\"__metadata__\":{}{}}}", metadata.dump(), tensors);
  header.resize((header.size() + 8 + 63) / 64 * 64 - 8, ' ');
  const std::string file = SafetensorsFile(header, std::string(data, '\0'));
  const auto parsed = PackedFile::Parse(BytesOf(file), "m");
  return Message(parsed.status());
}

TEST(PackedFile, RejectsDamagedFilesInOneLine) {
  const auto meta = [](const std::string& regions) {
    return nlohmann::json{{"format", "moesaic-packed"}, {"version", "1"}, {"regions", regions}};
  };
  const std::string w = R"(,"w":{"dtype":"U8","shape":[64],"data_offsets":[0,64]})";
  const std::string region = R"({"name":"w","bytes":64,"layout":{}})";
  EXPECT_EQ(FaultOf(meta(fmt::format("[{}]", region)), w, 64), "");
  EXPECT_EQ(FaultOf({{"format", "pt"}, {"version", "1"}}, "", 0),
            "m: format must be moesaic-packed, found pt");
  EXPECT_EQ(FaultOf({{"format", "moesaic-packed"}}, "", 0), "m: no metadata \"version\"");
  EXPECT_EQ(FaultOf({{"format", "moesaic-packed"}, {"version", "2"}}, "", 0),
            "m: packed format version must be 1, found 2; convert the checkpoint again");
  EXPECT_EQ(FaultOf(meta("{}"), w, 64), "m: metadata \"regions\" must be a list");
  EXPECT_EQ(FaultOf(meta(std::string(100, '[')), w, 64), "m: metadata \"regions\" must be a list");
  EXPECT_EQ(FaultOf(meta("[7]"), w, 64), "m: a region needs \"name\", \"bytes\" and \"layout\", found 7");
  EXPECT_EQ(FaultOf(meta("[]"), w, 64), "m: metadata \"regions\" must name 1 tensors, found 0");
  EXPECT_EQ(FaultOf(meta(fmt::format("[{0},{0}]", region)), w, 64),
            "m: region w occurs twice in metadata \"regions\"");
  EXPECT_EQ(FaultOf(meta(R"([{"name":"v","bytes":64,"layout":{}}])"), w, 64), "m: region v is missing");
  for (const char* bytes : {"65", "0", "9223372036854775807", "18446744073709551615"}) {
    EXPECT_TRUE(FaultOf(meta(fmt::format(R"([{{"name":"w","bytes":{},"layout":{{}}}}])", bytes)), w, 64)
                    .starts_with("m: region w must have "))
        << bytes;
  }
  EXPECT_EQ(FaultOf(meta(fmt::format(R"([{},{{"name":"v","bytes":64,"layout":{{}}}}])", region)),
                    R"(,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[64],)"
                    R"("data_offsets":[1,65]},"v":{"dtype":"U8","shape":[64],"data_offsets":[65,129]})",
                    129)
                .substr(0, 49),
            "m: region w must begin at a multiple of 64 bytes,");
}

// Bytes that read() and its relatives have returned to this process.
int64_t BytesReadByThisProcess() {
  std::ifstream file("/proc/self/io");
  std::string name;
  int64_t bytes = -1;
  EXPECT_TRUE(file >> name >> bytes && name == "rchar:") << "/proc/self/io must begin with rchar";
  return bytes;
}

// Opening must not read weights: the file has 4 GiB, but no blocks on disk after its header.
TEST(PackedFile, OpensFourGigabytesWithoutReadingThem) {
  const TestFolder folder;
  const std::string path = folder.Path("m.safetensors");
  constexpr int64_t kBytes = int64_t{1} << 32;
  constexpr int kRegions = 512;
  std::string regions = "[", tensors;
  for (int64_t i = 0; i < kRegions; ++i) {
    const std::string name = "model.layers." + std::to_string(i) + ".mlp.experts";
    const nlohmann::json region = {{"name", name}, {"bytes", kBytes / kRegions}, {"layout", {{"k", 3}}}};
    if (i > 0) regions += ",";
    regions += region.dump();
    const nlohmann::json tensor = {
        {"dtype", "U8"},
        {"shape", {kBytes / kRegions}},
        {"data_offsets", {i * (kBytes / kRegions), (i + 1) * (kBytes / kRegions)}}};
    tensors += fmt::format(",\"{}\":{}", name, tensor.dump());
  }
  regions += "]";
  const nlohmann::ordered_json metadata = {
      {"format", "moesaic-packed"}, {"version", "1"}, {"regions", regions}, {"config.json", "{}"}};
  std::string header = fmt::format("{{\"__metadata__\":{}{}}}", metadata.dump(), tensors);
  header.resize((header.size() + 8 + 4095) / 4096 * 4096 - 8, ' ');
  folder.Write("m.safetensors", SafetensorsFile(header, ""));
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(header.size() + 8) + kBytes), 0);
  const int64_t read_before = BytesReadByThisProcess();
  const auto file = PackedFile::Open(path);
  const auto checkpoint = Checkpoint::Open(path);
  const int64_t read = BytesReadByThisProcess() - read_before;
  ASSERT_TRUE(file.ok()) << Message(file.status());
  ASSERT_TRUE(checkpoint.ok()) << Message(checkpoint.status());
  EXPECT_EQ((*file)->regions().size(), static_cast<size_t>(kRegions));
  // Neither call reads more than the header and files of the system.
  EXPECT_LT(read, 4 * std::ssize(header));
  std::cout << fmt::format("opening 4 GiB twice read {} bytes; the header has {}\n", read, header.size());
  // Nor does a mapping: resident pages come from the kernel's readahead after the header.
  const std::byte* first = (*file)->Region("model.layers.0.mlp.experts")->data();
  std::vector<unsigned char> resident(kBytes / 4096);
  ASSERT_EQ(mincore(const_cast<std::byte*>(first), kBytes, resident.data()), 0);
  EXPECT_LT(std::ranges::count_if(resident, [](unsigned char page) { return (page & 1) != 0; }), 1024);
}

}  // namespace
}  // namespace moesaic::checkpoint
