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

/// Divides the rows so that all of `stages` stages compute at the same time. All ranks get the same parts. 64
/// rows or more are divided into parts of at least 32, with up to four parts per stage. Fewer rows are
/// divided between sequences, one part per stage. One stage has one part.
std::vector<PipelinePart> SplitForPipeline(const ForwardBatch& batch, int stages);

}  // namespace moesaic::models
