// Saved predictions of a model over a text, for comparisons with other models or formats. `perplexity
// --save-logits` writes them and `--kl-base` reads them. docs/logprob-file.md describes the bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "app/scored_text.h"
#include "base/status.h"
#include "runtime/atomic_file.h"
#include "runtime/memory.h"
#include "tensor/dtype.h"

namespace moesaic::app {

/// Writes rows in order. Commit makes the file visible.
class LogprobWriter {
 public:
  /// `dtype` is kF16 or kF32.
  static StatusOr<LogprobWriter> Create(const std::string& path, const ScoredText& text, tensor::DType dtype);
  int64_t row_bytes() const { return row_bytes_; }
  /// Encodes one row of log-probabilities [vocab] into `out` [row_bytes()]. Thread-safe.
  void Encode(std::span<const float> logprobs, std::byte* out) const;
  Status Append(std::span<const std::byte> rows) { return file_->Write(rows.data(), rows.size()); }
  Status Commit() { return file_->Commit(); }

 private:
  LogprobWriter() = default;
  std::unique_ptr<runtime::AtomicFile> file_;
  tensor::DType dtype_ = tensor::DType::kF16;
  int64_t row_bytes_ = 0;
};

class LogprobFile {
 public:
  static StatusOr<LogprobFile> Open(const std::string& path);
  const ScoredText& text() const { return text_; }
  /// Reads row `row` as f32 [vocab] and normalises it again, so that the rounding of f16 does not count as a
  /// difference.
  void Read(int64_t row, std::span<float> out) const;

 private:
  LogprobFile() = default;
  std::shared_ptr<const runtime::MappedFile> file_;
  ScoredText text_;
  tensor::DType dtype_ = tensor::DType::kF16;
  std::span<const std::byte> rows_;
};

}  // namespace moesaic::app
