// `moesaic quantize`: writes a checkpoint's linears on another grid, in bounded memory, and goes on where a
// run before it was killed.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernel_table.h"
#include "quantizer/output_plan.h"
#include "quantizer/work_plan.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {

struct QuantizeProgress {
  int64_t done = 0, total = 0;  // output bytes
  bool checking = false;        // reads what an earlier run wrote
};

struct QuantizeOptions {
  OutputSettings output;
  int64_t memory = int64_t{8} << 30;  // what may be resident at most
  int64_t unit_bytes = 0;             // of the largest unit (work_plan.h); 0: what the memory allows
  bool direct = false;                // past the page cache, with O_DIRECT
  runtime::AsyncFiles::Backend backend = runtime::AsyncFiles::Backend::kBest;
  /// Further files of the folder: name and content.
  std::vector<std::pair<std::string, std::string>> texts;
  /// Called after each unit; return false to stop.
  std::function<bool(const QuantizeProgress&)> progress;
};

struct QuantizeReport {
  int64_t source_bytes = 0;                               // of the checkpoint's tensors
  int64_t output_bytes = 0;                               // of the files written, whole
  int64_t read_bytes = 0;                                 // from the checkpoint, by this run
  int64_t written_bytes = 0;                              // by this run
  size_t units = 0, resumed_units = 0, redone_units = 0;  // redone: journaled, but their bytes were not right
  size_t rounded = 0, copied = 0, converted = 0;          // linears, and other tensors
  double seconds = 0;
  double read_wait_seconds = 0, compute_seconds = 0, write_wait_seconds = 0;
  int64_t peak_bytes = 0;  // resident
  std::string io;          // AsyncFiles::backend()
};

/// Everything that is decided before the first weight is read.
struct QuantizePlan {
  std::vector<ModelItem> items;
  std::vector<SourceForm> forms;
  OutputPlan output;
  WorkPlan work;
  int64_t unit_bytes = 0;  // CutWork's
  int64_t source_bytes = 0;
};

/// Plans a run. A memory that is too small is refused with how much is needed.
StatusOr<QuantizePlan> PlanQuantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options);

/// Quantizes `source` into `folder`, which must be empty, new, or hold the journal of a run with the same
/// settings and source. After any failure the same call goes on from the last unit in the journal; the files
/// that come out are the same to the byte.
StatusOr<QuantizeReport> Quantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options,
                                  const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                  const std::string& folder);

}  // namespace moesaic::quantizer
