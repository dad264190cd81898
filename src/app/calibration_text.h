// Reads calibration tokens for the quantizer from text, JSONL or safetensors files.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::app {

struct CalibrationFile {
  std::string path;
  int64_t max_tokens = 0;
  int sequence_length = 0;  // maximum length; longer texts are split
};

/// Returns sequences of 2 to sequence_length token ids, max_tokens in all, from
///   .safetensors  the tensor "tokens" (quantizer/calibrate/calibration_tokens.h)
///   .jsonl        one record per line: {"text": "..."}, or {"messages": [...], "tools": [...]}, which the
///                 model's chat template renders
///   else          a UTF-8 text
/// Uses the tokenizer of `source`. An error names the file and the line.
StatusOr<std::vector<std::vector<int32_t>>> ReadCalibrationFile(const CalibrationFile& file,
                                                                const checkpoint::Checkpoint& source);

}  // namespace moesaic::app
