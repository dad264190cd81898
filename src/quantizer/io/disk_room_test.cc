// Tests that a resumed run needs no more disk space than an uninterrupted one.
#include "quantizer/io/disk_room.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/test_files.h"
#include "quantizer/io/hidden_state.h"
#include "quantizer/test_quantize.h"

namespace moesaic::quantizer {
namespace {

TEST(DiskRoomTest, ExistingFilesAreNotCountedAgain) {
  checkpoint::TestFolder folder;
  const std::string path = folder.Path("");
  const std::vector<Shard> shards = {{.file = "model-00001-of-00002.safetensors", .bytes = 1000},
                                     {.file = "model-00002-of-00002.safetensors", .bytes = 500}};
  EXPECT_EQ(BytesToWrite(path, shards, 100), 1700) << "two states, the last one and the next one";
  folder.Write("analysis-variants-3.state", std::string(100, 'x'));
  EXPECT_EQ(BytesToWrite(path, shards, 100), 1600);
  folder.Write("analysis-variant-2.state", std::string(20, 'x'));
  EXPECT_EQ(BytesToWrite(path, shards, 100), 1580);
  folder.Write("analysis-4.state.7-0.partial", std::string(50, 'x'));
  folder.Write("analysis-of-2024.states.csv", std::string(50, 'x'));
  EXPECT_EQ(BytesToWrite(path, shards, 100), 1580) << "no states";
  folder.Write("calibration-1.state", std::string(300, 'x'));
  EXPECT_EQ(BytesToWrite(path, shards, 100), 1500) << "further states give no space to shards";
  EXPECT_EQ(BytesToWrite(path, shards, 0), 1500);
  folder.Write(shards[0].file, std::string(400, 'x'));
  folder.Write(shards[1].file, std::string(600, 'x'));
  EXPECT_EQ(BytesToWrite(path, shards, 0), 600);
}

TEST(StatesTest, RemovesOnlyFilesOfRuns) {
  const std::vector<std::string> unfinished = {
      "analysis-7.state.12-3.partial", "analysis-mix.state.12-3.partial", "calibration-2.state.12-3.partial"};
  const std::vector<std::string> of_analyses = {
      "analysis-0.state",   "analysis-12.state",   "analysis-variant-2.state", "analysis-variants-31.state",
      "analysis-mix.state", "analysis-walk.state", "analysis-decided-4.state"};
  const std::vector<std::string> others = {
      "analysis-.state",          "analysis-1.state.csv",     "analysis-1.states",
      "analysis-3b.state",        "analysis-variant-.state",  "analysis-mix.state.12.partial",
      "analysis-mix.state.bak",   "analysis-mix2.state",      "analysis-of-2024.states.csv",
      "calibration-1.state.json", "calibration-mix.state",    "analysis-decided.state",
      "my-analysis-1.state",      "notes.state.12-3.partial", "quantize.analysis"};
  checkpoint::TestFolder folder;
  const std::string path = folder.Path("");
  for (const auto* names : {&unfinished, &of_analyses, &others}) {
    for (const std::string& name : *names) folder.Write(name, name);
  }
  folder.Write("calibration-12.state", "");
  folder.Write("calibration-run.state", "");
  const auto names = [&] {
    std::vector<std::string> found;
    for (const auto& [name, content] : FilesOf(path)) found.push_back(name);
    return found;
  };
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), others.begin(), others.end());
    return more;
  };
  ASSERT_TRUE(RemoveStates(path, States::kUnfinished).ok());
  std::vector<std::string> whole = of_analyses;
  whole.insert(whole.end(), {"calibration-12.state", "calibration-run.state"});
  EXPECT_THAT(names(), testing::UnorderedElementsAreArray(with(whole)));
  ASSERT_TRUE(RemoveStates(path, States::kAnalysis).ok());
  EXPECT_THAT(names(),
              testing::UnorderedElementsAreArray(with({"calibration-12.state", "calibration-run.state"})));
  ASSERT_TRUE(RemoveStates(path, States::kAll).ok());
  EXPECT_THAT(names(), testing::UnorderedElementsAreArray(others));
}

}  // namespace
}  // namespace moesaic::quantizer
