// The tokens that a quantizer calibrates with, from the files that people have.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::app {

struct CalibrationFile {
  std::string path;
  int64_t max_tokens = 0;
  int sequence_length = 0;  // longer texts are cut into sequences of this
};

/// Token ids of sequences of 2 to sequence_length tokens, max_tokens in all, from
///   .safetensors  the tensor "tokens" (quantizer/carve.h)
///   .jsonl        one record a line: {"text": "..."}, or {"messages": [...], "tools": [...]}, through the
///                 model's chat template
///   else          a text in UTF-8
/// with the tokenizer of `source`. An error names file and line.
StatusOr<std::vector<std::vector<int32_t>>> ReadCalibrationFile(const CalibrationFile& file,
                                                                const checkpoint::Checkpoint& source);

}  // namespace moesaic::app
