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
    EXPECT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())), static_cast<int>(bytes.size()));
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
  const std::string path = Write("v_48_020.pt", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  const std::string message =
      path + ": this is a Git LFS pointer and not the file itself; run \"git lfs pull\" in its repository, or "
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

}  // namespace
}  // namespace moesaic::app
