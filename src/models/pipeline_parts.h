// Division of a batch into parts that follow each other through the stages of a pipeline.
#pragma once

#include <vector>

#include "models/model.h"

namespace moesaic::models {

/// Consecutive rows of a batch.
struct PipelinePart {
  parallel::Range rows;
  parallel::Range logits;                              // of the batch's logit_rows
  std::vector<kernels::SequenceSlice> sequences = {};  // numbered from the part's first row
  std::vector<int32_t> logit_rows = {};                // likewise
};

/// Divides the rows so that all of `stages` stages compute at the same time. All ranks get the same parts.
/// With at least 64 rows, the number of parts is that of the shortest time, if reading the weights takes as
/// long as computing `read_rows` rows: each part reads them again. Parts have at least 32 rows, and a stage
/// at most four of them. Fewer rows are divided between sequences, one part per stage. One stage, or a batch
/// that is not to be divided, has one part.
std::vector<PipelinePart> SplitForPipeline(const ForwardBatch& batch, int stages, double read_rows);

/// `read_rows` of a model. A row uses `top_k` of `experts`; 0 experts: all weights.
double ReadRows(int experts, int top_k);

}  // namespace moesaic::models
