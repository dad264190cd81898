// Tests that measurements of a mix are resumed and not repeated, and that modified states are not used.
#include "quantizer/mixed/mix_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <set>

#include "kernels/exec_context.h"
#include "models/model_info.h"
#include "quantizer/mixed/mix_walk.h"
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
    options_.output.mix = {.options = {}, .budget = {MixBudget::Kind::kBitsPerWeight, 8}, .tokens = 195};
    for (const char* name : {"nvfp4", "w8a8", "bf16"}) {
      options_.output.mix.options.push_back(*ParsePrecision(name));
    }
    sequences_ = TestSequences({100, 60, 35}, source_->config()["vocab_size"]);
    options_.output.calibration = CalibrationId::Of(sequences_);
    units_ = PlanMix(items_, *FormsOf(*source_, items_), spec_, options_.output)->units;
    fs::create_directory(Folder());
  }

  std::string Folder() const { return folder_.Path("states"); }

  // Returns one pass for each layer, except for the unfinished one.
  std::vector<MixPass> Passes(const MixBegun& begun) const {
    const int64_t variants =
        PlanMixPasses(spec_, items_, options_.output, {}, int64_t{1} << 40)->front().variants;
    std::vector<MixPass> passes;
    for (int layer = begun.first; layer < spec_.layers; layer = passes.back().end) {
      const bool goes_on = layer == begun.first && begun.end > layer;
      passes.push_back(
          {.first = layer, .end = goes_on ? begun.end : layer + 1, .variants = variants, .bytes = 0});
    }
    return passes;
  }

  // Measures with the states in Folder(), to the end or until the `stop`th progress call.
  StatusOr<Mix> Measure(int stop, const std::function<void(MixState*)>& change = nullptr) {
    const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
    runtime::Arena scratch;
    const kernels::ExecContext ctx{.kernels = &kernels_, .pool = pool.get(), .scratch = &scratch};
    MixStore store(Folder(), kKey, 1);
    StatusOr<MixState> from = store.Load();
    if (!from.ok()) return from.status();
    if (change) change(&*from);
    walked_ = 0;
    int last = -1;
    const auto progress = [&](int done, int) {
      if (done == last) return true;  // a call within the same layer
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
  std::vector<PrecisionGroup> units_;
  std::vector<std::vector<int32_t>> sequences_;
  int walked_ = 0;  // number of layers walked
  const nlohmann::ordered_json kKey = {{"source", "01"}, {"mix", {"nvfp4", "bf16"}}};
};

TEST_F(MixStateTest, ResumesAfterEveryInterruption) {
  const std::string expected = Measure(0)->Json().dump();
  const int whole = walked_;
  EXPECT_EQ(whole, spec_.layers + spec_.layers * (spec_.layers + 1) / 2) << "gains, and a pass per layer";
  for (int stop = 1; stop <= whole; ++stop) {
    fs::remove_all(Folder());
    fs::create_directory(Folder());
    ASSERT_EQ(Measure(stop).status().code(), StatusCode::kCancelled);
    const StatusOr<Mix> again = Measure(0);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->Json().dump(), expected) << "interrupted before layer " << stop;
    EXPECT_EQ(walked_, whole - stop + 1) << "each layer is walked once";
  }
  // Interrupts the measurement repeatedly.
  fs::remove_all(Folder());
  fs::create_directory(Folder());
  for (int layer = 1; layer < whole; ++layer) {
    ASSERT_EQ(Measure(2).status().code(), StatusCode::kCancelled) << layer;
  }
  EXPECT_EQ(Measure(0)->Json().dump(), expected);
  EXPECT_EQ(walked_, 1);
}

TEST_F(MixStateTest, ModifiedStateIsNotUsed) {
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
        EXPECT_GT(walked_, whole - stop + 1) << name << " was used";
      }
    }
  }
  EXPECT_THAT(kinds, testing::UnorderedElementsAre("analysis-", "analysis-variant-", "analysis-variants-",
                                                   "analysis-mix.state"));
}

TEST_F(MixStateTest, LossesOfAnotherRunAreNeitherUsedNorRemoved) {
  ASSERT_EQ(Measure(4).status().code(), StatusCode::kCancelled);
  const auto files = FilesOf(Folder());
  ASSERT_FALSE(files.empty());
  auto key = kKey;
  key["mix"] = {"bf16", "nvfp4"};
  EXPECT_THAT(Message(MixStore(Folder(), key, 1).Load().status()),
              testing::AllOf(testing::HasSubstr("analysis-mix.state: was measured with another mix: "
                                                R"(["nvfp4","bf16"] then, ["bf16","nvfp4"] now; )"),
                             testing::HasSubstr("use another folder, or delete")));
  EXPECT_THAT(Message(MixStore::CheckNone(Folder())), testing::HasSubstr("was measured for a mix"));
  EXPECT_EQ(FilesOf(Folder()), files);
  EXPECT_TRUE(Measure(0).ok());
}

TEST_F(MixStateTest, CompleteMeasurementIsNotRepeated) {
  const std::string expected = Measure(0)->Json().dump();
  EXPECT_EQ(FilesOf(Folder()).size(), 1U) << "no hidden states";
  const StatusOr<Mix> again = Measure(0);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->Json().dump(), expected);
  EXPECT_EQ(walked_, 0);
}

TEST_F(MixStateTest, ErrorNamesMissingUnits) {
  const auto refused = [&](const std::function<void(MixState*)>& change) {
    const Status status = Measure(0, change).status();
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    return std::string(Message(status));
  };
  ASSERT_EQ(Measure(2 * spec_.layers + 1).status().code(), StatusCode::kCancelled);  // in the second pass
  EXPECT_THAT(refused([](MixState* from) { from->measured.units.at(0).name = "other"; }),
              testing::HasSubstr("analysis-mix.state: its measurements of other do not fit"));
  EXPECT_THAT(refused([](MixState* from) { from->measured.units.at(0).options.pop_back(); }),
              testing::HasSubstr("delete the folder's analysis-*.state"));
  fs::remove_all(Folder());
  fs::create_directory(Folder());
  ASSERT_EQ(Measure(spec_.layers + 2).status().code(), StatusCode::kCancelled);  // in the first pass
  for (const char* key : {"units", "variants"}) {
    EXPECT_THAT(refused([&](MixState* from) {
                  ASSERT_GT(from->pass_end, 0);
                  if (key == std::string("units")) {
                    from->variants["units"].erase(0);
                  } else {
                    from->variants["variants"] = 1'000'000;
                  }
                }),
                testing::HasSubstr("do not fit this program"));
  }
}

TEST_F(MixStateTest, NonFiniteSumsSurviveSavingAndLoading) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  MixStore store(Folder(), kKey, 1);
  MixState state;
  state.gain_layers = 1;
  state.gains.sums[{"a", "nvfp4"}] = {kInfinity, 3};
  state.gains.sums[{"b", "nvfp4"}] = {2, kInfinity};
  state.gains.sums[{"c", "nvfp4"}] = {0.1, 0.3};
  ASSERT_TRUE(store.Save(&state, {}).ok());
  const MixState loaded = *store.Load();
  ASSERT_EQ(loaded.gains.sums.size(), 3U);
  for (const auto& [of, sum] : state.gains.sums) {
    EXPECT_EQ(loaded.gains.sums.at(of).gptq, sum.gptq) << of.first;
    EXPECT_EQ(loaded.gains.sums.at(of).nearest, sum.nearest) << of.first;
  }
  EXPECT_EQ(loaded.gains.Of("a", *ParsePrecision("nvfp4")), 1);
  EXPECT_EQ(loaded.gains.Of("b", *ParsePrecision("nvfp4")), 1);
}

TEST_F(MixStateTest, UnfinishedPassComesFirstIfItFits) {
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
  EXPECT_GT(less.size(), 1U) << "a pass that no longer fits starts again";
  const MixBegun filled{.first = 0, .end = spec_.layers, .slack = 1};
  const auto goes_on = *PlanMixPasses(spec_, items_, options_.output, filled, all[0].bytes - 1);
  ASSERT_EQ(goes_on.size(), 1U);
  EXPECT_EQ(goes_on[0].bytes, all[0].bytes);
  EXPECT_GT(PlanMixPasses(spec_, items_, options_.output, filled, all[0].bytes - 2)->size(), 1U);
  EXPECT_TRUE(PlanMixPasses(spec_, items_, options_.output, {.first = spec_.layers, .end = 0}, 0)->empty());
}

}  // namespace
}  // namespace moesaic::quantizer
