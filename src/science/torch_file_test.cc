// PyTorch checkpoints: a golden file, and damaged copies of it.
#include "science/torch_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

namespace moesaic::science {
namespace {

std::string GoldenBytes() {
  std::ifstream in(std::string(MOESAIC_SOURCE_DIR) + "/src/science/goldens/checkpoint.pt", std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

StatusOr<TorchFile> Parse(const std::string& bytes) {
  return ParseTorchFile(std::as_bytes(std::span(bytes.data(), bytes.size())), "x.pt");
}

TEST(TorchFileTest, ReadsTensorsAndNumbers) {
  const TorchFile file = *Parse(GoldenBytes());
  EXPECT_EQ(file.numbers.at("num_edges"), 48);
  EXPECT_EQ(file.numbers.at("noise_level"), 0.2);
  const WeightMap tensors = file.Under("model_state_dict/");
  EXPECT_EQ(tensors.at("a.weight").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensors.at("a.weight").values, (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(tensors.at("a.transposed").shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(tensors.at("a.transposed").values, (std::vector<float>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(tensors.at("half").values, (std::vector<float>{0.5F, -2}));
  EXPECT_EQ(tensors.at("bfloat").values, (std::vector<float>{0.5F, -2}));
  EXPECT_EQ(tensors.at("long").values, (std::vector<float>{7, -9}));
  EXPECT_EQ(tensors.at("scalar").shape, (std::vector<int64_t>{}));
  EXPECT_EQ(tensors.at("scalar").values, (std::vector<float>{3}));
  EXPECT_EQ(tensors.at("part").values, (std::vector<float>{2, 3}));
  EXPECT_TRUE(tensors.at("empty").values.empty());
}

TEST(TorchFileTest, DamagedFilesAreReported) {
  const std::string good = GoldenBytes();
  EXPECT_EQ(Message(Parse("").status()), "x.pt: no zip archive: only 0 bytes");
  for (size_t size = 0; size < good.size(); size += 7) EXPECT_FALSE(Parse(good.substr(0, size)).ok()) << size;
  // No damage of one byte may crash; most of the bytes are padding or data.
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x55);
    const auto file = Parse(bad);
    EXPECT_TRUE(file.ok() || !file.status().message().empty()) << at;
  }
}

template <typename T>
std::string Bytes(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

// An archive of stored entries (PKWARE APPNOTE 6.3); checksums are not read.
std::string Archive(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string archive, directory;
  for (const auto& [name, data] : entries) {
    const auto offset = static_cast<uint32_t>(archive.size());
    const auto size = Bytes(static_cast<uint32_t>(data.size())),
               name_size = Bytes(static_cast<uint16_t>(name.size()));
    archive += Bytes(uint32_t{0x04034b50}) + std::string(14, '\0') + size + size + name_size +
               std::string(2, '\0') + name + data;
    directory += Bytes(uint32_t{0x02014b50}) + std::string(16, '\0') + size + size + name_size +
                 std::string(12, '\0') + Bytes(offset) + name;
  }
  const auto at = static_cast<uint32_t>(archive.size());
  const std::string count = Bytes(static_cast<uint16_t>(entries.size()));
  return archive + directory + Bytes(uint32_t{0x06054b50}) + std::string(4, '\0') + count + count +
         Bytes(static_cast<uint32_t>(directory.size())) + Bytes(at) + std::string(2, '\0');
}

std::string PickledText(const std::string& text) {
  return "X" + Bytes(static_cast<uint32_t>(text.size())) + text;
}

// A dictionary of tensors [elements] that share one storage of bytes.
std::string SharedStorage(int tensors, uint16_t elements) {
  const std::string count = "M" + Bytes(elements);
  std::string pickle = "\x80\x02}(";
  for (int i = 0; i < tensors; ++i) {
    pickle += PickledText(std::to_string(i)) + "ctorch._utils\n_rebuild_tensor_v2\n((" +
              PickledText("storage") + "ctorch\nByteStorage\n" + PickledText("0") + PickledText("cpu") +
              count + "tQ" + std::string("K\0", 2) + "(" + count + "t(K\1ttR";
  }
  return Archive({{"x/data.pkl", pickle + "u."}, {"x/data/0", std::string(elements, '\3')}});
}

TEST(TorchFileTest, MemoryIsBoundedByTheFile) {
  const TorchFile file = *Parse(SharedStorage(2, 1000));
  EXPECT_EQ(file.tensors.at("1").values, std::vector<float>(1000, 3));
  const std::string bytes = SharedStorage(20, 1000);
  ASSERT_LT(4 * bytes.size(), 20 * 1000);
  EXPECT_EQ(Message(Parse(bytes).status()),
            fmt::format("x.pt: its tensors have more than {} elements, the limit for a file of its size",
                        4 * bytes.size()));
  const std::string pickle = "\x80\x02" + std::string((1 << 20) + 1, '}') + ".";
  EXPECT_EQ(Message(Parse(Archive({{"x/data.pkl", pickle}})).status()),
            "x.pt: the pickle has more than 1048576 values");
}

TEST(TorchFileTest, KeysAreBoundedByTheFile) {
  // A long key, remembered and used at every level: {k: {k: .. {k: 1}}}.
  const std::string remember("q\0", 2), recall("h\0", 2);
  std::string pickle = "\x80\x02}" + PickledText(std::string(20000, 'k')) + remember;
  for (int level = 1; level < 40; ++level) pickle += "}" + recall;
  pickle += "K\1" + std::string(40, 's') + ".";
  const std::string bytes = Archive({{"x/data.pkl", pickle}});
  EXPECT_EQ(
      Message(Parse(bytes).status()),
      fmt::format("x.pt: the names of its values have more than {} bytes, the limit for a file of its size",
                  4 * bytes.size()));
}

int64_t PeakKib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST(TorchFileTest, RememberedValuesAreNotCopied) {
  const std::string remember("q\0", 2), recall("h\0", 2);
  // One storage id with a long key, used many times.
  std::string pickle = "\x80\x02((" + PickledText("storage") + "ctorch\nByteStorage\n" +
                       PickledText(std::string(1 << 16, 'k')) + PickledText("cpu") + "K\1t" + remember;
  for (int i = 0; i < 20000; ++i) pickle += recall + "Q";
  const std::string used = Archive({{"x/data.pkl", pickle + "t."}});
  const int64_t before = PeakKib();
  EXPECT_TRUE(Parse(used).ok());
  EXPECT_LT(PeakKib() - before, 256 << 10);  // with a key for each: 1.3 GB
  // A shape with many dimensions.
  pickle =
      "\x80\x02"
      "ctorch._utils\n_rebuild_tensor_v2\n((" +
      PickledText("storage") + "ctorch\nByteStorage\n" + PickledText("0") + PickledText("cpu") + "K\1tQ" +
      std::string("K\0", 2) + "(";
  for (int i = 0; i < 65; ++i) pickle += "K\1";
  pickle += "t" + remember + recall + "tR.";
  const std::string deep = Archive({{"x/data.pkl", pickle}, {"x/data/0", "\3"}});
  EXPECT_EQ(Message(Parse(deep).status()),
            fmt::format("x.pt: the pickle is damaged at byte {}: a tensor has more than 64 dimensions",
                        pickle.size() - 1));
}

}  // namespace
}  // namespace moesaic::science
