// Division of a batch into micro-batches, which follow each other through the stages of a pipeline.
#pragma once

#include <vector>

#include "models/model.h"

namespace moesaic::models {

/// A micro-batch: consecutive rows of a batch. *Part* is short for it here and in JointStep.
struct PipelinePart {
  parallel::Range rows;
  parallel::Range logits;                              // of the batch's logit_rows
  std::vector<kernels::SequenceSlice> sequences = {};  // numbered from the part's first row
  std::vector<int32_t> logit_rows = {};                // likewise
};

/// Divides the rows so that all of `stages` stages compute at the same time. All ranks get the same parts.
/// There is one part if there is one stage, or if the batch shall not be divided.
///
/// 64 rows or more become the number of parts with the shortest time, at most four per stage and of at least
/// 32 rows. Each part reads the weights again, which takes as long as computing `read_rows` rows. Fewer rows
/// are divided between sequences, one part per stage.
std::vector<PipelinePart> SplitForPipeline(const ForwardBatch& batch, int stages, double read_rows);

/// Returns `read_rows` of a model, whose rows use `top_k` of `experts`; 0 experts: rows use all weights.
double ReadRows(int experts, int top_k);

}  // namespace moesaic::models
