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

TEST_F(ModelFilesTest, AChangedFileIsAnotherModel) {
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

TEST_F(ModelFilesTest, AMovedFolderIsTheSame) {
  const std::string before = *DescribeFiles(folder_);
  std::filesystem::rename(folder_, folder_ + "_moved");
  folder_ += "_moved";
  EXPECT_EQ(*DescribeFiles(folder_), before);
}

TEST_F(ModelFilesTest, AMissingOneIsTold) { EXPECT_FALSE(DescribeFiles(folder_ + "/none").ok()); }

}  // namespace
}  // namespace moesaic::app
