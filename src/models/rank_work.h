// Cost of the ranks of a layout, computed from a checkpoint without reading its weights.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "models/decoder_spec.h"
#include "models/weight_plan.h"
#include "parallel/layout.h"
#include "parallel/rank_work.h"
#include "parallel/shard.h"

namespace moesaic::models {

/// InvalidArgument: a checkpoint that is loaded in `dtype` can't be divided in this way.
Status CheckDivisible(const checkpoint::Checkpoint& checkpoint, const std::string& dtype,
                      const parallel::Layout& layout);

class WorkOfRanks {
 public:
  /// Formats are those in which `dtype` loads the checkpoint; a config without weights has bf16 ones for
  /// "auto". `kv_element_bytes`: bytes of one value of the KV cache. `load_mtp`: as in LoadOptions.
  static StatusOr<WorkOfRanks> Create(const checkpoint::Checkpoint& checkpoint, const std::string& dtype,
                                      double kv_element_bytes, bool load_mtp);

  const DecoderSpec& spec() const { return spec_; }
  /// InvalidArgument where the layout does not fit the model.
  StatusOr<parallel::RankWork> Of(const parallel::Layout& layout, int rank) const;

 private:
  DecoderSpec spec_;
  parallel::ModelShape shape_;
  WeightDtype dtype_;
  double kv_element_bytes_ = 2;
  // Formats of the parts of the whole model's regions, by name. Empty: FormatFor().
  std::map<std::string, std::vector<tensor::PackedFormat>> formats_;
};

}  // namespace moesaic::models
