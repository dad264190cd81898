// Structures and weights that `moesaic protein` reads.
#include "app/protein_files.h"

#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace moesaic::app {
namespace {

class ProteinFilesTest : public testing::Test {
 protected:
  ProteinFilesTest() {
    std::string pattern = testing::TempDir() + "protein_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    std::ifstream in(std::string(MOESAIC_SOURCE_DIR) + "/examples/science/helix.pdb", std::ios::binary);
    helix_ = {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  ~ProteinFilesTest() override { std::filesystem::remove_all(folder_); }
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
    return folder_ + "/" + name;
  }
  // Appends a gzip member.
  std::string Append(const std::string& name, const std::string& bytes) const {
    std::string path = folder_ + "/" + name;
    const gzFile file = gzopen(path.c_str(), "ab");
    EXPECT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
              static_cast<int>(bytes.size()));
    gzclose(file);
    return path;
  }
  std::string folder_, helix_;
};

TEST_F(ProteinFilesTest, AllMembersOfAGzipFileAreRead) {
  ASSERT_EQ(ReadStructure(Write("helix.pdb", helix_))->residues(), 24);
  const size_t half = helix_.find('\n', helix_.size() / 2) + 1;
  Append("helix.pdb.gz", helix_.substr(0, half));
  const std::string path = Append("helix.pdb.gz", helix_.substr(half));
  EXPECT_EQ(ReadStructure(path)->residues(), 24);
  const auto size = std::filesystem::file_size(path);
  for (const auto cut : {size - 1, size - 9, size / 2 + 40}) {
    std::filesystem::resize_file(path, cut);
    EXPECT_EQ(Message(ReadStructure(path).status()), path + ": the gzip data are damaged or truncated");
  }
}

TEST_F(ProteinFilesTest, GitLfsPointersAreNamed) {
  const std::string path =
      Write("v_48_020.pt", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  const std::string message =
      path +
      ": this is a Git LFS pointer and not the file itself; run \"git lfs pull\" in its repository, or "
      "download the file again";
  EXPECT_EQ(Message(ReadProteinWeights(path).status()), message);
  EXPECT_EQ(Message(ReadStructure(path).status()), message);
}

TEST_F(ProteinFilesTest, NumberOfNeighborsIsChecked) {
  auto with = [&](const std::string& number) {
    std::string header = R"({"__metadata__":{"num_edges":")" + number + R"("}})";
    header.resize(64, ' ');
    return Write("weights.safetensors", std::string("\x40\0\0\0\0\0\0\0", 8) + header);
  };
  EXPECT_EQ(ReadProteinWeights(with("48"))->neighbors, 48);
  for (const std::string number : {"48x", "abc", "", "0", "-1", "10001", "1e300", "nan", "48.5"}) {
    const std::string path = with(number);
    EXPECT_EQ(Message(ReadProteinWeights(path).status()),
              path + ": \"num_edges\" must be an integer in [1, 10000], but is " + number);
  }
}

TEST_F(ProteinFilesTest, SafetensorsOfAllTypesAreConverted) {
  std::string header =
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},)"
      R"("c":{"dtype":"F16","shape":[2],"data_offsets":[12,16]},"d":{"dtype":"F32","shape":[0],"data_offsets":[16,16]}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  bytes[1] = static_cast<char>(header.size() >> 8);
  const std::string data("\0\0\x80\x3f\0\0\0\xc0\x80\x3f\0\xc0\0\x3c\0\xc0", 16);
  const ProteinWeights weights = *ReadProteinWeights(Write("weights.safetensors", bytes + header + data));
  for (const std::string name : {"a", "b", "c"})
    EXPECT_EQ(weights.tensors.at(name).values, (std::vector<float>{1, -2})) << name;
  EXPECT_TRUE(weights.tensors.at("d").values.empty());
  EXPECT_EQ(weights.neighbors, 0);
}

}  // namespace
}  // namespace moesaic::app
