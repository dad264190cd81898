// Fixtures of tests of whole runs: a run from a golden into its own folder, and its verification.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "checkpoint/test_files.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "models/test_session.h"
#include "quantizer/quantize.h"
#include "quantizer/verify.h"

namespace moesaic::quantizer {

/// Returns the contents of the files of a folder by name, except the report, which contains times.
inline std::map<std::string, std::string> FilesOf(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path(), std::ios::binary);
    const std::string name = entry.path().filename().string();
    if (name != kReportFile) files[name] = {std::istreambuf_iterator<char>(in), {}};
  }
  return files;
}

/// Returns sequences of these lengths with arbitrary ids.
inline std::vector<std::vector<int32_t>> TestSequences(std::initializer_list<int> lengths, int vocab) {
  std::vector<std::vector<int32_t>> sequences;
  int32_t id = 1;
  for (const int length : lengths) {
    sequences.emplace_back();
    for (int i = 0; i < length; ++i) sequences.back().push_back(id = (id * 29 + 11) % vocab);
  }
  return sequences;
}

class QuantizeTest : public ::testing::Test {
 protected:
  QuantizeTest() { options_.memory = int64_t{4} << 30; }

  /// Quantizes `source` into folder `out` of folder_. Creates calibration text if options_ need it and have
  /// none.
  StatusOr<QuantizeReport> Run(const std::string& source, const std::string& out, int threads = 2) {
    const auto opened = checkpoint::Checkpoint::Open(source);
    if (!opened.ok()) return opened.status();
    if (options_.output.calibrated()) {
      if (options_.calibration.empty()) {
        options_.calibration = TestSequences({90, 64, 33, 8}, (*opened)->config()["vocab_size"]);
      }
      options_.output.calibration = CalibrationId::Of(options_.calibration);
    }
    const auto pool = *runtime::ThreadPool::Create({.threads = threads, .pin = false});
    return Quantize(**opened, options_, kernels_, *pool, folder_.Path(out));
  }
  StatusOr<VerifyReport> Check(const std::string& source, const std::string& out) {
    const auto a = checkpoint::Checkpoint::Open(folder_.Path(out)), b = checkpoint::Checkpoint::Open(source);
    if (!a.ok()) return a.status();
    if (!b.ok()) return b.status();
    const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
    return Verify(**a, **b, kernels_, *pool, nullptr);
  }
  static std::string Golden(const std::string& name) { return models::SourcePath("tests/golden/" + name); }

  /// Copies a golden, so that its files can be changed.
  std::string CopyOf(const std::string& golden) {
    const std::string to = folder_.Path("source");
    std::filesystem::copy(Golden(golden), to);
    return to;
  }

  checkpoint::TestFolder folder_;
  QuantizeOptions options_;
  kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
};

}  // namespace moesaic::quantizer
