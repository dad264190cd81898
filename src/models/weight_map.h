// The weights of a model in memory, packed or mapped from a packed file, looked up by name.
// docs/contracts/weights.md is normative.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "checkpoint/packed_file.h"
#include "kernels/moe.h"
#include "models/packer.h"
#include "models/weight_image.h"
#include "models/weight_plan.h"

namespace moesaic::models {

class WeightMap {
 public:
  /// Packs `plan` from `checkpoint` into huge-page memory with NUMA placement `placement`.
  static StatusOr<WeightMap> Pack(const checkpoint::Checkpoint& checkpoint, WeightPlan plan,
                                  const PackProgress& progress, const NumaPlacement& placement,
                                  runtime::ThreadPool& pool);
  /// Copies a packed file's regions into huge-page memory with NUMA placement `placement`.
  static StatusOr<WeightMap> Copy(const checkpoint::PackedFile& file, WeightPlan plan,
                                  const PackProgress& progress, const NumaPlacement& placement,
                                  runtime::ThreadPool& pool);
  /// Copies one rank's shard of a packed file. `whole` is the plan of the file, and `plan` the shard that
  /// PlanShardOfPacked made from it. `placement` must not be kSlice on several nodes.
  static StatusOr<WeightMap> CopyShard(const checkpoint::PackedFile& file, const WeightPlan& whole,
                                       WeightPlan plan, const PackProgress& progress,
                                       const NumaPlacement& placement, runtime::ThreadPool& pool);
  /// References a packed file's regions, which stay mapped for the lifetime of the result; reads nothing.
  static StatusOr<WeightMap> Map(std::shared_ptr<const checkpoint::PackedFile> file, WeightPlan plan);

  bool Has(const std::string& name) const { return regions_.contains(name); }
  /// Returns the values of a vector region. A region that is not in the plan aborts the program as a bug.
  const float* Vector(const std::string& name) const;
  /// Returns one matrix of a region: the `part`-th matrix (such as gate, up or down) of the `record`-th
  /// record (such as an expert), with its static activation scale if it has one.
  tensor::PackedMatrix Matrix(const std::string& name, int record = 0, int part = 0) const;
  /// Returns a region of gate, up and down records as the MoE operator's parameters.
  kernels::ExpertWeights Experts(const std::string& name) const;

  /// Returns the memory of a region that is not read any more to the system, as far as it has whole pages. A
  /// mapped file stays mapped.
  void Release(const std::string& name);

  const WeightPlan& plan() const { return *plan_; }

 private:
  struct RegionView {
    const RegionPlan* region;
    const RegionPlan* layout;  // layout in memory: that of a slice (kSlice), otherwise `region`
    const std::byte* data;
    std::vector<tensor::StaticScale> moe_scales;  // [count * 2]: scales of gate/up and of down, or empty
  };
  WeightMap() = default;
  void Enter(const RegionPlan& region, const RegionPlan& layout, const std::byte* data);
  void EnterImage();
  const RegionView& At(const std::string& name) const;

  std::unique_ptr<WeightPlan> plan_;  // target of pointers in regions_
  WeightImage image_;
  std::shared_ptr<const checkpoint::PackedFile> file_;
  std::unordered_map<std::string, RegionView> regions_;
};

}  // namespace moesaic::models
