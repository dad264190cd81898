// Linears that share an NVFP4 scale, in units that have the memory for themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quantizer/journal.h"
#include "quantizer/test_quantize.h"

namespace moesaic::quantizer {
namespace {

using ::testing::HasSubstr;
using SharedScaleTest = QuantizeTest;

// Linears that share a global scale and are too large for a unit: read once where the memory holds them, and
// else no more of them twice than it does not.
TEST_F(SharedScaleTest, LinearsAreReadOnceWhereTheyAreAlone) {
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

TEST_F(SharedScaleTest, GoesOnFromUnitsThatAreAlone) {
  options_.output.scheme = Scheme::kNvfp4;
  ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), "whole").ok());
  const auto expected = FilesOf(folder_.Path("whole"));
  for (int stop = 1;; stop += 3) {
    const std::string out = fmt::format("stopped-{}", stop);
    int calls = 0;
    options_.sizes = {.unit_bytes = 1, .alone_bytes = 200'000};
    options_.progress = [&](const QuantizeProgress&) { return ++calls != stop; };
    const StatusOr<QuantizeReport> first = Run(Golden("qwen3-moe-norm-tied"), out);
    if (first.ok()) {
      EXPECT_GT(stop, 10);
      break;
    }
    std::ifstream journal(folder_.Path(out) + "/" + kJournalFile);
    std::string header;
    std::getline(journal, header);
    EXPECT_THAT(header, HasSubstr("\"alone_bytes\":200000"));
    options_.sizes = {};
    options_.progress = nullptr;
    ASSERT_TRUE(Run(Golden("qwen3-moe-norm-tied"), out).ok());
    EXPECT_EQ(FilesOf(folder_.Path(out)), expected) << "stopped after " << stop;
  }
}

}  // namespace
}  // namespace moesaic::quantizer
