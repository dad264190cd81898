// `moesaic quantize` rounds a checkpoint's linears to another grid in bounded memory, and resumes interrupted
// runs.
#pragma once

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "quantizer/calibrate/calibrated_run.h"
#include "quantizer/io/unit_stream.h"
#include "quantizer/quantize_plan.h"

namespace moesaic::quantizer {

/// File of the output folder that holds QuantizeReport::Json().
inline constexpr char kReportFile[] = "quantize.json";

struct QuantizeReport {
  int64_t source_bytes = 0;  // size of the checkpoint's tensors
  int64_t output_bytes = 0;  // size of the complete output files
  StreamCounts stream;
  size_t units = 0;
  size_t rounded = 0, copied = 0, converted = 0;  // linears, and other tensors
  CalibrationReport calibration;                  // GPTQ only
  std::shared_ptr<const Analysis> analysis;       // may be null
  double analysis_seconds = 0;                    // of this process
  bool analysis_resumed = false;                  // an earlier run had made the analysis or a part of it
  double seconds = 0;
  int64_t peak_bytes = 0;  // peak resident memory
  std::string io;          // AsyncFiles::backend()
  std::string device;      // DeviceInfo::identity of the device that ran GPTQ's heavy stage; empty: the CPU

  double compute_seconds() const;  // excludes waiting
  nlohmann::ordered_json Json(const OutputSettings& settings) const;
};

/// Quantizes `source` into `folder`, which must be empty, new, or hold the journal of a run with the same
/// settings and source. After a failure the same call resumes from the last journaled unit, a calibrated run
/// from its last state. The resulting weights are identical to the byte.
StatusOr<QuantizeReport> Quantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options,
                                  const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                  const std::string& folder);

}  // namespace moesaic::quantizer
