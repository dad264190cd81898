#include "app/expert_load_file.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/test_patience.h"
#include "checkpoint/test_files.h"

namespace moesaic::app {
namespace {

namespace fs = std::filesystem;

class ExpertLoadFileTest : public testing::Test {
 protected:
  void SetUp() override {
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
  }
  void TearDown() override { spdlog::set_default_logger(before_); }

  // Writes loads and waits until the thread has written them, or has failed to.
  void WriteTokens(ExpertLoadFile& file, int64_t tokens) {
    const int64_t errors = file.write_errors();
    auto stats = std::make_shared<engine::ExpertLoadStats>();
    stats->layers = {1};
    stats->experts = 1;
    stats->total = {tokens};
    stats->recent = {0};
    stats->windows = {std::make_shared<const std::vector<int64_t>>(stats->total)};
    file.Write(stats);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(base::Patient(30));
    while (file.write_errors() == errors && Content() != engine::ToJson(*stats)) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Empty if there is no file, or a folder in its place.
  std::string Content() const {
    if (!fs::is_regular_file(path_)) return "";
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  // Ends the thread, so that the log has all of its lines.
  int LogLines(std::unique_ptr<ExpertLoadFile> file) {
    file.reset();
    int lines = 0;
    std::istringstream log(log_.str());
    for (std::string line; std::getline(log, line);)
      lines += line.find("expert loads are not recorded: " + path_) != std::string::npos;
    return lines;
  }

  checkpoint::TestFolder folder_;
  std::string path_;  // of the file

 private:
  std::ostringstream log_;
  std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(ExpertLoadFileTest, FailedWritesAreCountedAndTheirBeginningIsLogged) {
  path_ = folder_.Path("folder/load.json");
  auto file = std::make_unique<ExpertLoadFile>(path_);
  for (int write = 1; write <= 3; ++write) {
    WriteTokens(*file, write);
    EXPECT_EQ(file->write_errors(), write) << "the folder does not exist";
  }
  fs::create_directory(folder_.Path("folder"));
  WriteTokens(*file, 4);
  EXPECT_EQ(file->write_errors(), 3) << "the file is written as soon as that is possible";
  fs::remove(path_);
  fs::create_directory(path_);
  WriteTokens(*file, 5);
  EXPECT_EQ(file->write_errors(), 4) << "a file does not replace a folder";
  EXPECT_EQ(LogLines(std::move(file)), 2);
}

TEST_F(ExpertLoadFileTest, AFullDiskKeepsTheLastFile) {
  path_ = folder_.Path("load.json");
  WriteTokens(*std::make_unique<ExpertLoadFile>(path_), 1);
  const std::string last = Content();
  EXPECT_NE(last, "");
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit;  // bytes of a file
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small = {16, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  auto file = std::make_unique<ExpertLoadFile>(path_);
  WriteTokens(*file, 2);
  const int64_t errors = file->write_errors();
  const int lines = LogLines(std::move(file));
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(errors, 1);
  EXPECT_EQ(lines, 1);
  EXPECT_EQ(Content(), last);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.Path()), fs::directory_iterator()), 1)
      << "no partial file remains";
}

}  // namespace
}  // namespace moesaic::app
