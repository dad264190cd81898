#include "app/model_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

namespace moesaic::app {
namespace {

class ModelFilesTest : public testing::Test {
 protected:
  ModelFilesTest() {
    std::string pattern = testing::TempDir() + "files_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    Write("config.json", "{}");
    Write("model.safetensors", "weights");
  }
  ~ModelFilesTest() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
  }
  std::string folder_;
};

TEST_F(ModelFilesTest, DescriptionChangesWithAFile) {
  const std::string before = *DescribeFiles(folder_);
  EXPECT_EQ(*DescribeFiles(folder_), before);
  const std::string file = folder_ + "/model.safetensors";
  const std::string alone = *DescribeFiles(file);
  EXPECT_NE(before.find(alone), std::string::npos);
  std::filesystem::last_write_time(file,
                                   std::filesystem::last_write_time(file) + std::chrono::nanoseconds(1));
  EXPECT_NE(*DescribeFiles(folder_), before);
  EXPECT_NE(*DescribeFiles(file), alone);
}

TEST_F(ModelFilesTest, DescribesAllPartsOfASplitFile) {
  for (int part = 1; part <= 3; ++part) Write("m-0000" + std::to_string(part) + "-of-00003.gguf", "weights");
  const std::string first = folder_ + "/m-00001-of-00003.gguf";
  const std::string before = *DescribeFiles(first);
  EXPECT_NE(before.find("m-00001-of-00003.gguf"), std::string::npos);
  Write("m-00003-of-00003.gguf", "others, and more");
  EXPECT_NE(*DescribeFiles(first), before);
  std::filesystem::remove(folder_ + "/m-00002-of-00003.gguf");
  EXPECT_FALSE(DescribeFiles(first).ok());
  Write("m-x0001-of-00003.gguf", "a file of its own");
  EXPECT_TRUE(DescribeFiles(folder_ + "/m-x0001-of-00003.gguf").ok());
}

TEST_F(ModelFilesTest, MovedFolderHasTheSameDescription) {
  const std::string before = *DescribeFiles(folder_);
  std::filesystem::rename(folder_, folder_ + "_moved");
  folder_ += "_moved";
  EXPECT_EQ(*DescribeFiles(folder_), before);
}

TEST_F(ModelFilesTest, MissingFileIsAnError) { EXPECT_FALSE(DescribeFiles(folder_ + "/none").ok()); }

}  // namespace
}  // namespace moesaic::app
