// Every weight of a model with its place: in which format, at which offset, from which tensor. A plan is made
// and checked in full before anything is allocated.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/round.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/packed_file.h"
#include "models/weight_decl.h"
#include "tensor/packed.h"

namespace moesaic::models {

/// One region laid out. Records are `stride` bytes apart; in each, part p starts at offsets[p].
struct RegionPlan {
  RegionDecl decl;
  tensor::PackedFormat format = tensor::PackedFormat::kF32;  // of the first part
  std::vector<tensor::PackedLayout> layouts;                 // [parts]
  std::vector<int64_t> offsets;                              // [parts], multiples of 64
  int64_t stride = 0;                                        // of a record, a multiple of 64
  int64_t bytes = 0;                                         // of the region
  std::vector<float> input_scales;  // [count * parts] static activation scales, or empty
  int64_t start = 0;                // where the region lies in an image of all regions; a multiple of 64

  /// What it takes there.
  int64_t placed_bytes() const { return base::RoundUp(bytes, int64_t{64}); }
};

struct WeightPlan {
  std::vector<RegionPlan> regions;
  int64_t bytes = 0;  // of the image

  const RegionPlan* Find(const std::string& name) const;
  /// Behind the others.
  void Add(RegionPlan region);
};

/// How weights are wanted in memory: LoadOptions::dtype parsed. Nothing ("auto"): as they are stored.
using WeightDtype = std::optional<tensor::PackedFormat>;
StatusOr<WeightDtype> ParseWeightDtype(const std::string& name);

/// Lays out one region, its parts in `formats` [parts].
StatusOr<RegionPlan> LayOut(RegionDecl decl, std::span<const tensor::PackedFormat> formats);

/// The format that `dtype` asks for where the checkpoint has no say: auto means bf16. Embeddings and MLA's
/// absorbed matrices are never less than bf16.
tensor::PackedFormat FormatFor(Precision precision, WeightDtype dtype);

/// Whether the head of a tied model gets weights of its own, since an embedding can't have such ones. Not by
/// "auto": that would keep both, and rounds what the head reads, where answers are often near a tie.
bool SeparatesHead(WeightDtype dtype);

/// Sets spec.mtp_layers to 0 when no weight of an MTP module is stored, as in many re-uploads whose config
/// still promises one. Modules that are there in part stay, and are reported as incomplete by the plan.
void DropAbsentMtp(const checkpoint::Checkpoint& checkpoint, DecoderSpec& spec);
void DropAbsentMtp(const checkpoint::PackedFile& file, DecoderSpec& spec);

/// Plans loading `checkpoint`: every tensor the spec needs must be there in its shape, and none may be left
/// over.
StatusOr<WeightPlan> PlanFromCheckpoint(const DecoderSpec& spec, const checkpoint::Checkpoint& checkpoint,
                                        WeightDtype dtype);

/// Plans the frame of decoder layer `layer` (MTP modules are counted on): what stands between the linears
/// that can be quantized, as norms, biases, the router and MLA's absorbed matrices.
StatusOr<WeightPlan> PlanFrame(const DecoderSpec& spec, const checkpoint::Checkpoint& checkpoint, int layer);

/// Plans mapping a packed file's regions: each must be there with the layout that the spec implies.
StatusOr<WeightPlan> PlanFromPacked(const DecoderSpec& spec, const checkpoint::PackedFile& file);

/// A region as a packed file describes it, and the formats and scales read back from such a description.
checkpoint::PackedRegion Describe(const RegionPlan& region);

}  // namespace moesaic::models
