// Plans the format, offset and source tensor of every weight of a model. A plan is validated completely
// before any allocation.
#pragma once

#include <map>
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

/// Layout of one region. Records are `stride` bytes apart; part p of each record starts at offsets[p].
struct RegionPlan {
  RegionDecl decl;
  tensor::PackedFormat format = tensor::PackedFormat::kF32;  // format of the first part
  std::vector<tensor::PackedLayout> layouts;                 // [parts]
  std::vector<int64_t> offsets;                              // [parts], multiples of 64
  int64_t stride = 0;                                        // bytes of a record, a multiple of 64
  int64_t bytes = 0;                                         // bytes of the region
  std::vector<float> input_scales;  // [count * parts] static activation scales, or empty
  int64_t start = 0;                // offset of the region in an image of all regions; a multiple of 64

  /// Bytes that a decode step reads of a region whose weights are all used. MLA decodes absorbed: it reads
  /// the transposed copy instead of the original part.
  int64_t decode_bytes() const {
    int64_t read = bytes;
    for (const PartDecl& part : decl.parts) {
      if (part.transposed) read -= layouts[0].total_bytes * decl.count;
    }
    return read;
  }
  /// Returns the bytes that the region occupies in an image.
  int64_t placed_bytes() const { return base::RoundUp(bytes, int64_t{64}); }
};

struct WeightPlan {
  std::vector<RegionPlan> regions;
  int64_t bytes = 0;  // bytes of the image

  const RegionPlan* Find(const std::string& name) const;
  /// Appends a region.
  void Add(RegionPlan region);
};

/// Requested format of weights in memory, parsed from LoadOptions::dtype. nullopt ("auto"): as stored.
using WeightDtype = std::optional<tensor::PackedFormat>;
StatusOr<WeightDtype> ParseWeightDtype(const std::string& name);

/// Lays out one region with its parts in `formats` [parts].
StatusOr<RegionPlan> LayOut(RegionDecl decl, std::span<const tensor::PackedFormat> formats);

/// Returns the format that `dtype` requests where the stored format is irrelevant: bf16 for auto. Embeddings
/// and MLA's absorbed matrices are at least bf16.
tensor::PackedFormat FormatFor(Precision precision, WeightDtype dtype);

/// Returns whether a tied model's head gets its own weights, because an embedding cannot have the requested
/// format. False for "auto": that would keep both and round the input of the head, where answers are often
/// near a tie.
bool SeparatesHead(WeightDtype dtype);

/// Sets spec.mtp_layers to 0 if no weight of an MTP module is stored, as in many re-uploads whose config
/// still declares one. Partly stored modules are kept, and planning reports them as incomplete.
void DropAbsentMtp(const checkpoint::Checkpoint& checkpoint, DecoderSpec& spec);
void DropAbsentMtp(const checkpoint::PackedFile& file, DecoderSpec& spec);

/// Plans loading `checkpoint`. Every tensor of the spec must exist with its shape, and no tensor may be
/// unused.
StatusOr<WeightPlan> PlanFromCheckpoint(const DecoderSpec& spec, const checkpoint::Checkpoint& checkpoint,
                                        WeightDtype dtype);
/// Plans loading one rank's part. The tensors of other ranks need not be complete, but must be tensors of the
/// spec.
StatusOr<WeightPlan> PlanFromCheckpoint(const DecoderSpec& spec, const checkpoint::Checkpoint& checkpoint,
                                        WeightDtype dtype, const parallel::Shard& shard);

/// Widens the unit of the slices of a region's columns to that of the format of its last part.
void WidenUnit(const RegionDecl& decl, tensor::PackedFormat last, parallel::ModelShape* shape);

/// The sizes of `spec` that ranks can divide, with the units of the formats that `dtype` gives the weights of
/// `checkpoint`.
StatusOr<parallel::ModelShape> DivisibleShape(const DecoderSpec& spec,
                                              const checkpoint::Checkpoint& checkpoint, WeightDtype dtype);

/// Plans the frame of decoder layer `layer` (MTP modules follow the decoder's layers). The frame is
/// everything but the quantizable linears: norms, biases, the router and MLA's absorbed matrices.
StatusOr<WeightPlan> PlanFrame(const DecoderSpec& spec, const checkpoint::Checkpoint& checkpoint, int layer);

/// Plans mapping a packed file's regions. Each must exist with the layout that the spec implies.
StatusOr<WeightPlan> PlanFromPacked(const DecoderSpec& spec, const checkpoint::PackedFile& file);
/// The same of one rank's part of a file with a layout (PackedFile::OfRank).
StatusOr<WeightPlan> PlanFromPacked(const DecoderSpec& spec, const checkpoint::PackedFile& part,
                                    const parallel::Shard& shard);
/// Plans the whole model in the formats of a file with a layout, to describe it. It can't be loaded.
StatusOr<WeightPlan> PlanOfParts(const DecoderSpec& spec, const checkpoint::PackedFile& file);
/// The part of a rank of `layout` in `file`. InvalidArgument: the file has the parts of another layout.
StatusOr<std::shared_ptr<const checkpoint::PackedFile>> PartOfFile(
    std::shared_ptr<const checkpoint::PackedFile> file, const parallel::Layout& layout, int rank);

/// Describes a region for a packed file. The planner parses formats and scales back from it.
checkpoint::PackedRegion Describe(const RegionPlan& region);

}  // namespace moesaic::models
