// The weights of a model in memory, packed there or mapped from a packed file, found by name.
// docs/contracts/weights.md is the law.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "checkpoint/packed_file.h"
#include "kernels/ops.h"
#include "models/packer.h"
#include "models/weight_image.h"
#include "models/weight_plan.h"

namespace moesaic::models {

class WeightMap {
 public:
  /// Packs `plan` from `checkpoint` into huge-page memory, placed on NUMA nodes as `placement` says.
  static StatusOr<WeightMap> Pack(const checkpoint::Checkpoint& checkpoint, WeightPlan plan,
                                  const PackProgress& progress, const NumaPlacement& placement,
                                  runtime::ThreadPool& pool);
  /// Copies a packed file's regions into such memory.
  static StatusOr<WeightMap> Copy(const checkpoint::PackedFile& file, WeightPlan plan,
                                  const PackProgress& progress, const NumaPlacement& placement,
                                  runtime::ThreadPool& pool);
  /// Refers to a packed file's regions, which stay mapped as long as this lives; reads nothing.
  static StatusOr<WeightMap> Map(std::shared_ptr<const checkpoint::PackedFile> file, WeightPlan plan);

  bool Has(const std::string& name) const { return regions_.contains(name); }
  /// Values of a vector region. Asking for a region that the plan lacks is our bug and ends the program.
  const float* Vector(const std::string& name) const;
  /// Part `part` of record `record`, its static activation scale set.
  tensor::PackedMatrix Matrix(const std::string& name, int record = 0, int part = 0) const;
  /// A region of gate, up and down records as the MoE operator takes it.
  kernels::ExpertWeights Experts(const std::string& name) const;

  const WeightPlan& plan() const { return *plan_; }

 private:
  struct Place {
    const RegionPlan* region;
    const RegionPlan* layout;  // in memory: of a slice, or the region's own
    const std::byte* data;
    std::vector<tensor::StaticScale> moe_scales;  // [count * 2]: of gate/up and of down, or empty
  };
  WeightMap() = default;
  void Enter(const RegionPlan& region, const RegionPlan& layout, const std::byte* data);
  void EnterImage();
  const Place& At(const std::string& name) const;

  std::unique_ptr<WeightPlan> plan_;  // regions_ points into it
  WeightImage image_;
  std::shared_ptr<const checkpoint::PackedFile> file_;
  std::unordered_map<std::string, Place> regions_;
};

}  // namespace moesaic::models
