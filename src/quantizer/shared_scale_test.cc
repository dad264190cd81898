// Tests linears with a shared NVFP4 scale in exclusive units.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "quantizer/io/journal.h"
#include "quantizer/test_quantize.h"

namespace moesaic::quantizer {
namespace {

using ::testing::HasSubstr;
using SharedScaleTest = QuantizeTest;

// Linears with a shared global scale that are too large for a unit are read once if the memory holds them.
// Otherwise only the rows that do not fit are read twice.
TEST_F(SharedScaleTest, LinearsInAnExclusiveUnitAreReadOnce) {
  const std::string tiny = models::SourcePath("models/moesaic-tiny");
  options_.output.scheme = Scheme::kNvfp4;
  for (const bool search : {false, true}) {
    options_.output.search = search;
    const std::string name = search ? "mse" : "rtn";
    options_.sizes = {};
    ASSERT_TRUE(Run(tiny, name).ok());
    const auto expected = FilesOf(folder_.Path(name));
    int64_t before = 0;
    for (const int64_t alone_bytes : {2'000'000, 300'000, 120'000, 0}) {
      const std::string out = fmt::format("{}-{}", name, alone_bytes);
      options_.sizes = {.unit_bytes = 60'000, .alone_bytes = alone_bytes};
      const StatusOr<QuantizeReport> report = Run(tiny, out);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(FilesOf(folder_.Path(out)), expected) << out;
      const int64_t again = report->stream.read_bytes - report->source_bytes;
      EXPECT_EQ(again == 0, alone_bytes == 2'000'000) << out;
      EXPECT_GE(again, before);
      before = again;
    }
    EXPECT_GT(before, 0);
  }
}

// Counts linears whose scale is shared with the first linear of the next file.
int PartedPairs(const std::string& folder) {
  std::ifstream in(folder + "/model.safetensors.index.json");
  const nlohmann::json files = nlohmann::json::parse(in)["weight_map"];
  int parted = 0;
  for (const auto& [name, file] : files.items()) {
    const size_t at = name.find("gate_proj.weight_packed");
    if (at == std::string::npos) continue;
    parted += files.at(std::string(name).replace(at, 4, "up")) == file ? 0 : 1;
  }
  return parted;
}

// Selects units after which a run is interrupted: within linears that share a scale, after exclusive and
// after ordinary units, and between such linears. A few of each kind.
std::vector<size_t> Stops(const QuantizePlan& plan) {
  std::vector<size_t> stops;
  int within_alone = 0, within = 0, alone = 0;
  for (size_t u = 1; u < plan.work.units.size(); ++u) {
    const Piece& first = plan.work.pieces[plan.work.units[u].first];
    const bool inside = first.first > 0 || FusedWith(plan.items, first.item).first < first.item;
    const bool behind_alone = plan.work.units[u - 1].alone;
    if (!inside && !behind_alone) continue;
    int& of_kind = inside && behind_alone ? within_alone : inside ? within : alone;
    if (++of_kind <= 4) stops.push_back(u);
  }
  EXPECT_GT(within_alone, 0);
  EXPECT_GT(within, 0);
  EXPECT_GT(alone, 0);
  return stops;
}

// A run that stops within linears that share a scale finds the scale again from the rows that it does not
// round.
TEST_F(SharedScaleTest, ResumesWithinLinearsThatShareAScale) {
  const std::string tiny = models::SourcePath("models/moesaic-tiny");
  options_.output.scheme = Scheme::kNvfp4;
  options_.output.shard_bytes = 100'000;  // many pairs span two files
  ASSERT_TRUE(Run(tiny, "whole").ok());
  const auto expected = FilesOf(folder_.Path("whole"));
  EXPECT_GT(PartedPairs(folder_.Path("whole")), 3);

  const auto opened = checkpoint::Checkpoint::Open(tiny);
  ASSERT_TRUE(opened.ok()) << opened.status();
  // Memory for one of an expert's gate and up, then for both, and for some rows of the dense layer's.
  for (const int64_t alone_bytes : {120'000, 300'000}) {
    const UnitSizes sizes{.unit_bytes = 60'000, .alone_bytes = alone_bytes};
    options_.sizes = sizes;
    const StatusOr<QuantizePlan> plan = PlanQuantize(**opened, options_);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const std::vector<size_t> stops = Stops(*plan);
    for (const size_t stop : stops) {
      const std::string out = fmt::format("{}-stopped-{}", alone_bytes, stop);
      size_t calls = 0;
      options_.sizes = sizes;
      options_.progress = [&](const QuantizeProgress&) { return ++calls != stop; };
      ASSERT_EQ(Run(tiny, out).status().code(), StatusCode::kCancelled);
      std::ifstream journal(folder_.Path(out) + "/" + kJournalFile);
      std::string header;
      std::getline(journal, header);
      EXPECT_THAT(header, HasSubstr(fmt::format("\"alone_bytes\":{}", alone_bytes)));
      options_.sizes = {};
      options_.progress = nullptr;
      const StatusOr<QuantizeReport> rest = Run(tiny, out);
      ASSERT_TRUE(rest.ok()) << rest.status();
      EXPECT_EQ(rest->stream.resumed_units, stop);
      EXPECT_EQ(FilesOf(folder_.Path(out)), expected) << out;
    }
  }
}

}  // namespace
}  // namespace moesaic::quantizer
