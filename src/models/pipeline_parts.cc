#include "models/pipeline_parts.h"

#include <algorithm>

namespace moesaic::models {
namespace {

using kernels::SequenceSlice;
using parallel::kMinPartRows;
using parallel::kPartsPerStage;
using parallel::Range;

// Parts of about equal size that begin with a sequence.
std::vector<Range> PartsBetweenSequences(std::span<const SequenceSlice> sequences, int rows, int stages) {
  const int parts = std::min<int>(stages, static_cast<int>(sequences.size()));
  std::vector<Range> ranges(parts);
  for (const SequenceSlice& sequence : sequences) {
    const int middle = sequence.row + sequence.count / 2;
    Range& range = ranges[int64_t{middle} * parts / rows];
    if (range.count == 0) range.first = sequence.row;
    range.count += sequence.count;
  }
  std::erase_if(ranges, [](const Range& range) { return range.count == 0; });
  return ranges;
}

// The number of parts with the least time: the last part leaves the last stage after parts + stages - 1 times
// that of a part, which reads the weights and computes its rows.
int PartsOf(int rows, int stages, double read_rows) {
  const int most = std::min(rows / kMinPartRows, kPartsPerStage * stages);
  const auto seconds = [&](int parts) {
    return (parts + stages - 1) * (read_rows + static_cast<double>(rows) / parts);
  };
  int best = 1;
  for (int parts = 2; parts <= most; ++parts) {
    if (seconds(parts) < seconds(best)) best = parts;
  }
  return best;
}

PipelinePart PartOf(const ForwardBatch& batch, Range rows) {
  PipelinePart part = {.rows = rows, .logits = {}};
  for (const SequenceSlice& sequence : batch.sequences) {
    const int first = std::max(sequence.row, rows.first);
    const int end = std::min(sequence.row + sequence.count, rows.end());
    if (first >= end) continue;
    SequenceSlice& slice = part.sequences.emplace_back(sequence);
    slice.start += first - sequence.row;
    slice.count = end - first;
    slice.row = first - rows.first;
  }
  for (const int32_t row : batch.logit_rows) {
    if (row < rows.first) ++part.logits.first;
    if (row >= rows.first && row < rows.end()) part.logit_rows.push_back(row - rows.first);
  }
  part.logits.count = static_cast<int>(part.logit_rows.size());
  return part;
}

}  // namespace

double ReadRows(int experts, int top_k) {
  // Integer kernels of one core compute 2 (AVX2) to 40 (AMX) rows while they read the weights of a dense
  // matrix.
  constexpr double kDenseRows = 8;
  return experts > 0 && top_k > 0 ? kDenseRows * experts / top_k : kDenseRows;
}

std::vector<PipelinePart> SplitForPipeline(const ForwardBatch& batch, int stages, double read_rows) {
  const auto rows = static_cast<int>(batch.tokens.size());
  std::vector<Range> ranges = {{0, rows}};
  if (stages > 1 && batch.divides && rows >= 2 * kMinPartRows) {
    ranges = parallel::Divide(rows, 1, PartsOf(rows, stages, read_rows));
  } else if (stages > 1 && batch.divides) {
    ranges = PartsBetweenSequences(batch.sequences, rows, stages);
  }
  std::vector<PipelinePart> parts;
  for (const Range& range : ranges) parts.push_back(PartOf(batch, range));
  return parts;
}

}  // namespace moesaic::models
