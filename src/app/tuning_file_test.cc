#include "app/tuning_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace moesaic::app {
namespace {

using testing::HasSubstr;

runtime::Topology Machine() {
  runtime::Topology topology;
  topology.cpu_model = "A processor";
  topology.cores = 4;
  topology.caches = {{.level = 2, .bytes = 2 << 20, .count = 4}};
  return topology;
}

class TuningFileTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "tuning_" + std::to_string(getpid());
    std::filesystem::create_directories(folder_ + "/moesaic");
    setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
    unsetenv("MOESAIC_TUNING");
  }
  void TearDown() override {
    unsetenv("XDG_CACHE_HOME");
    unsetenv("MOESAIC_TUNING");
    std::filesystem::remove_all(folder_);
  }
  void Write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

  // Returns the error of a good file after an RFC 7386 patch, or "".
  std::string ErrorWith(const char* patch) {
    auto text = nlohmann::json::parse(TuningText(machine_, {}));
    text.merge_patch(nlohmann::json::parse(patch));
    return Message(ParseTuning(text.dump(), machine_).status());
  }

  std::string folder_;
  nlohmann::json machine_ = TuningMachine(Machine(), {.avx2 = true}, 0);
};

TEST_F(TuningFileTest, RoundTrips) {
  kernels::Tuning tuning;
  tuning.tile_sizes.panel_bytes = 1 << 20;
  tuning.tile_sizes.tasks_per_thread = 7;
  tuning.few_below[static_cast<int>(tensor::PackedFormat::kI8)] = 8;
  tuning.few_below[static_cast<int>(tensor::PackedFormat::kQ6K)] = 0;
  EXPECT_EQ(*ParseTuning(TuningText(machine_, tuning), machine_), tuning);
  EXPECT_EQ(machine_["threads"], 4);
}

TEST_F(TuningFileTest, RejectsDamagedText) {
  EXPECT_EQ(ErrorWith("{}"), "");
  EXPECT_EQ(Message(ParseTuning("", machine_).status()), "not JSON");
  EXPECT_EQ(Message(ParseTuning("{\"machine\": ", machine_).status()), "not JSON");
  EXPECT_THAT(Message(ParseTuning("[1, 2]", machine_).status()), HasSubstr("must be an object"));
  EXPECT_EQ(ErrorWith(R"({"few_below": {"int8": "4"}})"), "\"int8\" must be an integer, found \"4\"");
  EXPECT_EQ(ErrorWith(R"({"few_below": {"int8": 99999999999}})"), "\"int8\" is out of range: 99999999999");
  EXPECT_THAT(ErrorWith(R"({"few_below": {"int3": 4}})"), HasSubstr("int3"));
  EXPECT_EQ(ErrorWith(R"({"few_below": [4]})"), "\"few_below\" must be an object");
  EXPECT_EQ(ErrorWith(R"({"cut": {"panels": 4}})"), "\"cut\" has an unknown key \"panels\"");
  EXPECT_EQ(ErrorWith(R"({"more": 1})"), "the file has an unknown key \"more\"");
  EXPECT_EQ(ErrorWith(R"({"machine": null})"), "\"machine\" must be an object");
}

// Recursive parsing of this depth would overflow the stack.
TEST_F(TuningFileTest, RejectsDeepNesting) {
  const auto error = [&](const std::string& text) { return Message(ParseTuning(text, machine_).status()); };
  constexpr int kDeep = 1 << 20;
  const std::string open(kDeep, '['), close(kDeep, ']');
  for (const std::string& text : {open, open + close, "{\"cut\": {\"row_bytes\": " + open + close + "}}",
                                  "{\"machine\": " + open + close + "}"}) {
    EXPECT_EQ(error(text), "nested deeper than 4 levels");
  }
  EXPECT_EQ(error(R"({"machine": {"caches": [{"bytes": [1]}]}})"), "nested deeper than 4 levels");
  EXPECT_THAT(error(R"({"machine": {"caches": [{"bytes": 1}]}})"), HasSubstr("for another machine"));
}

TEST_F(TuningFileTest, BelongsToOneMachine) {
  const auto error = [&](const nlohmann::json& here) {
    const auto parsed = ParseTuning(TuningText(machine_, {}), here);
    return parsed.ok() ? "" : Message(parsed.status());
  };
  runtime::Topology other = Machine();
  other.cpu_model = "Another";
  EXPECT_EQ(error(TuningMachine(other, {.avx2 = true}, 0)),
            "for another machine: its \"processor\" is \"A processor\", but here it is \"Another\"");
  EXPECT_THAT(error(TuningMachine(Machine(), {.avx2 = true, .avx_vnni = true}, 0)),
              HasSubstr("instruction_sets"));
  EXPECT_EQ(error(TuningMachine(Machine(), {.avx2 = true}, 3)), "for 4 threads, but this run has 3");
  other = Machine();
  other.caches[0].bytes = 1 << 20;
  EXPECT_THAT(error(TuningMachine(other, {.avx2 = true}, 0)), HasSubstr("caches"));
  nlohmann::json newer = machine_;
  newer["kernels"] = kernels::kTuningVersion + 1;
  EXPECT_THAT(error(newer), HasSubstr("\"kernels\""));
}

TEST_F(TuningFileTest, SelectsTheFileByTheEnvironment) {
  const std::string cached = folder_ + "/moesaic/tuning-4.json", named = folder_ + "/named.json";
  kernels::KernelTable table = kernels::SelectKernels({});
  EXPECT_EQ(TuningPath(4), cached);
  EXPECT_THAT(TuneKernels(true, machine_, table)->text, HasSubstr("moesaic tune was not run"));
  kernels::Tuning tuning;
  tuning.tile_sizes.tasks_per_thread = 9;
  Write(cached, TuningText(machine_, tuning));
  EXPECT_EQ(TuneKernels(false, machine_, table)->text, "not tuned: --no-tuning");
  setenv("MOESAIC_TUNING", "off", 1);
  EXPECT_EQ(TuneKernels(true, machine_, table)->text, "not tuned: MOESAIC_TUNING=off");
  EXPECT_EQ(table.tile_sizes, kernels::TileSizes{});
  setenv("MOESAIC_TUNING", "", 1);
  EXPECT_EQ(TuneKernels(true, machine_, table)->text, "tuned by " + cached);
  EXPECT_EQ(table.tile_sizes.tasks_per_thread, 9);
  const nlohmann::json three = TuningMachine(Machine(), {.avx2 = true}, 3);
  EXPECT_EQ(TuneKernels(true, three, table)->text,
            "not tuned: moesaic tune was not run on this machine with 3 threads");
  tuning.tile_sizes.tasks_per_thread = 5;
  Write(named, TuningText(machine_, tuning));
  setenv("MOESAIC_TUNING", named.c_str(), 1);
  EXPECT_EQ(TuneKernels(true, machine_, table)->text, "tuned by " + named);
  EXPECT_EQ(table.tile_sizes.tasks_per_thread, 5);
}

// Tries a folder, the name of standard input, and an endless file.
TEST_F(TuningFileTest, ReadsOnlySmallRegularFiles) {
  const std::string cached = folder_ + "/moesaic/tuning-4.json";
  kernels::KernelTable table = kernels::SelectKernels({});
  const auto named_error = [&](const std::string& path) {
    setenv("MOESAIC_TUNING", path.c_str(), 1);
    const std::string error = Message(TuneKernels(true, machine_, table).status());
    unsetenv("MOESAIC_TUNING");
    return error;
  };
  EXPECT_EQ(named_error("-"), "MOESAIC_TUNING=-: the file does not exist");
  EXPECT_EQ(named_error("/dev/zero"), "MOESAIC_TUNING=/dev/zero: not a regular file");
  std::filesystem::create_directory(cached);
  EXPECT_THAT(TuneKernels(true, machine_, table)->text, HasSubstr("is ignored: not a regular file"));
  EXPECT_EQ(named_error(cached), "MOESAIC_TUNING=" + cached + ": not a regular file");
  std::filesystem::remove(cached);
  const std::string good = TuningText(machine_, {});
  Write(cached, good + std::string((64 << 10) - good.size(), ' '));
  EXPECT_EQ(TuneKernels(true, machine_, table)->text, "tuned by " + cached);
  Write(cached, good + std::string((64 << 10) + 1 - good.size(), ' '));
  EXPECT_THAT(TuneKernels(true, machine_, table)->text, HasSubstr("is ignored: longer than 65536 bytes"));
}

// A bad file of the cache is ignored; one that MOESAIC_TUNING names is an error.
TEST_F(TuningFileTest, BadFilesNeverCrash) {
  const std::string cached = folder_ + "/moesaic/tuning-4.json";
  kernels::KernelTable table = kernels::SelectKernels({});
  for (const char* text : {"", "{", R"({"machine": {}})", R"({"cut": 3})"}) {
    Write(cached, text);
    EXPECT_THAT(TuneKernels(true, machine_, table)->text, HasSubstr("is ignored: ")) << text;
    EXPECT_TRUE(TuneKernels(true, machine_, table)->ignored);
    setenv("MOESAIC_TUNING", cached.c_str(), 1);
    EXPECT_THAT(Message(TuneKernels(true, machine_, table).status()), HasSubstr("MOESAIC_TUNING=" + cached))
        << text;
    unsetenv("MOESAIC_TUNING");
  }
  kernels::Tuning wild;
  wild.tile_sizes.tasks_per_thread = 1000;
  Write(cached, TuningText(machine_, wild));
  EXPECT_THAT(TuneKernels(true, machine_, table)->text,
              HasSubstr("tasks_per_thread must be in [1, 64], found 1000"));
  EXPECT_EQ(table.tile_sizes, kernels::TileSizes{});
  setenv("MOESAIC_TUNING", "/nowhere/tuning.json", 1);
  EXPECT_THAT(Message(TuneKernels(true, machine_, table).status()), HasSubstr("/nowhere/tuning.json"));
}

}  // namespace
}  // namespace moesaic::app
