// What was measured of a mix is not measured again, and is taken only as it was saved.
#include "quantizer/mix_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "models/model_info.h"
#include "quantizer/mix_walk.h"
#include "quantizer/test_quantize.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;

class MixStateTest : public QuantizeTest {
 protected:
  void SetUp() override {
    source_ = *Checkpoint::Open(Golden("kimi-k2"));
    spec_ = *models::SpecFromConfig(source_->config(), "config.json");
    items_ = *ListItems(*source_);
    options_.output.search = options_.output.gptq = true;
    options_.output.mix = {.options = {}, .budget = {MixBudget::Unit::kBitsPerWeight, 8}, .tokens = 195};
    for (const char* name : {"nvfp4", "w8a8", "bf16"}) {
      options_.output.mix.options.push_back(*ParsePrecision(name, 32));
    }
    sequences_ = TestSequences({100, 60, 35}, source_->config()["vocab_size"]);
    options_.output.calibration = CalibrationId::Of(sequences_);
    units_ = PlanMix(items_, *FormsOf(*source_, items_), spec_, options_.output)->units;
    fs::create_directory(Folder());
  }

  std::string Folder() const { return folder_.Path("states"); }

  // A pass for each layer, but for the one under way.
  std::vector<MixPass> Passes(const MixBegun& begun) const {
    const int64_t lanes = PlanMixPasses(spec_, items_, options_.output, {}, int64_t{1} << 40)->front().lanes;
    std::vector<MixPass> passes;
    for (int layer = begun.first; layer < spec_.layers; layer = passes.back().end) {
      const bool goes_on = layer == begun.first && begun.end > layer;
      passes.push_back({.first = layer, .end = goes_on ? begun.end : layer + 1, .lanes = lanes, .bytes = 0});
    }
    return passes;
  }

  // Measures with what is in Folder(), to the end or until the progress is asked for the `stop`th time.
  StatusOr<Mix> Measure(int stop, const std::string& key = "key") {
    const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
    runtime::Arena scratch;
    const kernels::ExecContext ctx{.kernels = &kernels_, .pool = pool.get(), .scratch = &scratch};
    MixStore store(Folder(), key, 0);
    StatusOr<MixState> from = store.Load();
    if (!from.ok()) return from.status();
    walked_ = 0;
    int last = -1;
    const auto progress = [&](int done, int) {
      if (done == last) return true;  // time went by within a layer
      last = done;
      return ++walked_ != stop;
    };
    const std::vector<MixPass> passes = Passes({.first = from->layers, .end = from->pass_end});
    return MeasureMix(ctx, *source_, spec_, items_, options_.output, passes, units_, sequences_,
                      {progress, &store, *std::move(from)});
  }

  std::unique_ptr<const Checkpoint> source_;
  models::DecoderSpec spec_;
  std::vector<ModelItem> items_;
  std::vector<MixUnit> units_;
  std::vector<std::vector<int32_t>> sequences_;
  int walked_ = 0;  // layers that were begun
};

TEST_F(MixStateTest, GoesOnFromWhereverItWasStopped) {
  const std::string expected = Measure(0)->Json().dump();
  const int whole = walked_;
  EXPECT_EQ(whole, spec_.layers + spec_.layers * (spec_.layers + 1) / 2) << "gains, and a pass a layer";
  for (int stop = 1; stop <= whole; ++stop) {
    fs::remove_all(Folder());
    fs::create_directory(Folder());
    ASSERT_EQ(Measure(stop).status().code(), StatusCode::kCancelled);
    const StatusOr<Mix> again = Measure(0);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->Json().dump(), expected) << "stopped before layer " << stop;
    EXPECT_EQ(walked_, whole - stop + 1) << "each layer is walked once";
  }
  // And stopped again and again.
  fs::remove_all(Folder());
  fs::create_directory(Folder());
  for (int layer = 1; layer < whole; ++layer) {
    ASSERT_EQ(Measure(2).status().code(), StatusCode::kCancelled) << layer;
  }
  EXPECT_EQ(Measure(0)->Json().dump(), expected);
  EXPECT_EQ(walked_, 1);
}

TEST_F(MixStateTest, WhatIsNotAsItWasSavedIsNotTaken) {
  const std::string expected = Measure(0)->Json().dump();
  const int whole = walked_;
  std::set<std::string> kinds;
  for (int stop = 2; stop <= whole; ++stop) {
    for (const bool gone : {false, true}) {
      fs::remove_all(Folder());
      fs::create_directory(Folder());
      ASSERT_EQ(Measure(stop).status().code(), StatusCode::kCancelled);
      for (const auto& [name, bytes] : FilesOf(Folder())) {
        fs::remove_all(Folder());
        fs::create_directory(Folder());
        ASSERT_EQ(Measure(stop).status().code(), StatusCode::kCancelled);
        const std::string path = Folder() + "/" + name;
        ASSERT_TRUE(fs::exists(path)) << path;
        kinds.insert(name.substr(0, name.find_first_of("0123456789")));
        if (gone) {
          fs::remove(path);
        } else {
          std::string flipped = bytes;
          flipped[bytes.size() / 2] = static_cast<char>(flipped[bytes.size() / 2] ^ 1);
          std::ofstream(path, std::ios::binary) << flipped;
        }
        const StatusOr<Mix> again = Measure(0);
        ASSERT_TRUE(again.ok()) << again.status();
        EXPECT_EQ(again->Json().dump(), expected) << name << " " << stop;
        EXPECT_GT(walked_, whole - stop + 1) << name << " was of no use";
      }
    }
  }
  EXPECT_THAT(kinds,
              testing::ElementsAre("analysis-", "analysis-lane-", "analysis-lanes-", "analysis-mix.state"));
}

TEST_F(MixStateTest, AnotherRunsLossesAreNotTaken) {
  ASSERT_EQ(Measure(4).status().code(), StatusCode::kCancelled);
  ASSERT_FALSE(FilesOf(Folder()).empty());
  MixStore other(Folder(), "another key", 0);
  EXPECT_EQ(other.Load()->gain_layers, 0);
  EXPECT_TRUE(FilesOf(Folder()).empty());
}

TEST_F(MixStateTest, ThePassUnderWayIsTheFirstIfItFits) {
  const auto all = *PlanMixPasses(spec_, items_, options_.output, {}, int64_t{1} << 40);
  ASSERT_EQ(all.size(), 1U);
  const int last = spec_.layers - 1;
  ASSERT_GT(last, 0);
  const auto rest = *PlanMixPasses(spec_, items_, options_.output, {.first = last, .end = 0}, all[0].bytes);
  ASSERT_EQ(rest.size(), 1U);
  EXPECT_EQ(rest[0].first, last);
  EXPECT_EQ(rest[0].end, spec_.layers);
  const auto two =
      *PlanMixPasses(spec_, items_, options_.output, {.first = 0, .end = last}, int64_t{1} << 40);
  ASSERT_EQ(two.size(), 2U);
  EXPECT_EQ(two[0].end, last);
  EXPECT_EQ(two[1].first, last);
  const MixBegun whole{.first = 0, .end = spec_.layers};
  const auto less = *PlanMixPasses(spec_, items_, options_.output, whole, all[0].bytes - 1);
  EXPECT_GT(less.size(), 1U) << "what does not fit any more is begun anew";
  EXPECT_TRUE(PlanMixPasses(spec_, items_, options_.output, {.first = spec_.layers, .end = 0}, 0)->empty());
}

}  // namespace
}  // namespace moesaic::quantizer
