#include <algorithm>

#include "checkpoint/checkpoint.h"
#include "checkpoint/packed_file.h"
#include "models/decoder_model.h"
#include "models/model_info.h"
#include "models/numa_nodes.h"
#include "models/packed_slices.h"
#include "runtime/topology.h"

namespace moesaic::models {
namespace {

using checkpoint::Checkpoint;
using checkpoint::PackedFile;

StatusOr<DecoderSpec> ReadSpec(const Checkpoint& checkpoint, const LoadOptions& options) {
  ASSIGN_OR_RETURN(DecoderSpec spec, SpecFromConfig(checkpoint.config(), ConfigFile(checkpoint)));
  RETURN_IF_ERROR(OverrideTopK(spec, options.experts_per_token));
  if (!options.load_mtp) spec.mtp_layers = 0;
  return spec;
}

StatusOr<std::unique_ptr<Model>> Finish(DecoderSpec spec, parallel::Shard shard, WeightMap weights,
                                        WeightSource weights_from, const NumaPlacement& placement,
                                        const LoadOptions& options) {
  ModelInfo info = InfoFromPlan(spec, weights.plan(), shard);
  info.weights_from = weights_from;
  info.numa = placement.policy;
  info.numa_nodes = static_cast<int>(std::max<size_t>(placement.nodes.size(), 1));
  ASSIGN_OR_RETURN(std::unique_ptr<DecoderModel> model,
                   DecoderModel::Create(std::move(spec), std::move(shard), std::move(weights),
                                        std::move(info), options.mla_path, options.groups));
  return std::unique_ptr<Model>(std::move(model));
}

// The other half is left for the KV cache and other processes. Ranks of one machine load at the same time.
bool FitsTwice(int64_t bytes, const LoadOptions& options) {
  return bytes <= runtime::AvailableMemory() / 2 / options.local_ranks;
}

bool HasSeveralRanks(const LoadOptions& options) {
  return options.groups != nullptr && options.groups->layout().ranks() > 1;
}

// Refuses weights that can't move (MovableExperts) before they are loaded, if the layout lets experts move.
// Ranks without experts of a layer are refused when a move begins.
Status CheckExpertsMove(const std::string& path, const DecoderSpec& spec, const WeightPlan& plan,
                        const NumaPlacement& placement, const LoadOptions& options) {
  if (options.groups == nullptr || !options.groups->layout().experts_move()) return OkStatus();
  if (placement.images() > 1) {
    return Unimplemented(
        "{}: experts with weights that are {} can't move to other ranks; leave out --rebalance-experts, or "
        "use --numa auto",
        path, ToString(placement.policy));
  }
  for (int layer = 0; layer < spec.layers; ++layer) {
    const RegionPlan* const experts = plan.Find(LayerPrefix(layer) + "mlp.experts");
    if (experts == nullptr || experts->input_scales.empty()) continue;
    return Unimplemented(
        "{}: experts of layer {} have static activation scales and can't move to other ranks; leave out "
        "--rebalance-experts",
        path, layer);
  }
  return OkStatus();
}

// The mapping of the file ends with the load, so that only the rank's part stays in memory.
StatusOr<std::unique_ptr<Model>> LoadPackedShard(const std::string& path, const PackedFile& file,
                                                 DecoderSpec spec, const WeightPlan& whole,
                                                 const LoadOptions& options, runtime::ThreadPool& pool) {
  const parallel::RankGroups& groups = *options.groups;
  if (options.mmap == MmapPolicy::kMap) {
    const std::string way_out =
        groups.layout().placement() != nullptr
            ? "leave it out"
            : "moesaic convert --layout " + groups.layout().PartsText() + " writes parts that can be mapped";
    return InvalidArgument(
        "{}: each rank copies its part of a packed file of the whole model, so --mmap can't be on with {}; "
        "{}",
        path, groups.layout().Name(), way_out);
  }
  // CheckDivisible has refused layouts that cut the file inside a tile before any rank loads.
  const parallel::ModelShape shape = DivisibleShape(spec, whole);
  ASSIGN_OR_RETURN(parallel::Shard shard, parallel::MakeShard(groups.layout(), groups.rank(), shape));
  ASSIGN_OR_RETURN(WeightPlan plan, PlanShardOfPacked(spec, whole, shard, path));
  ASSIGN_OR_RETURN(const NumaPlacement placement, PlaceWeights(options.numa, plan, pool));
  if (placement.policy == NumaPolicy::kSlice && placement.images() > 1) {
    return Unimplemented(
        "{}: ranks of a packed file can't have weights that are {}; --numa auto leaves the "
        "placement to the system",
        path, ToString(options.numa));
  }
  RETURN_IF_ERROR(CheckExpertsMove(path, spec, plan, placement, options));
  ASSIGN_OR_RETURN(WeightMap weights,
                   WeightMap::CopyShard(file, whole, std::move(plan), options.progress, placement, pool));
  return Finish(std::move(spec), std::move(shard), std::move(weights), WeightSource::kCopied, placement,
                options);
}

StatusOr<std::unique_ptr<Model>> LoadPacked(const std::string& path, DecoderSpec spec,
                                            const LoadOptions& options, runtime::ThreadPool& pool) {
  ASSIGN_OR_RETURN(std::shared_ptr<const PackedFile> file, PackedFile::Open(path));
  DropAbsentMtp(*file, spec);
  parallel::Shard shard = parallel::WholeModel(ShapeOf(spec));
  WeightPlan plan;
  if (file->layout().empty()) {
    ASSIGN_OR_RETURN(plan, PlanFromPacked(spec, *file));
    if (HasSeveralRanks(options)) {
      return LoadPackedShard(path, *file, std::move(spec), plan, options, pool);
    }
  } else {
    ASSIGN_OR_RETURN(plan, PlanOfParts(spec, *file));
    const parallel::Layout layout = HasSeveralRanks(options) ? options.groups->layout() : parallel::Layout();
    const int rank = HasSeveralRanks(options) ? options.groups->rank() : 0;
    ASSIGN_OR_RETURN(file, PartOfFile(std::move(file), layout, rank));
    ASSIGN_OR_RETURN(shard, parallel::MakeShard(layout, rank, DivisibleShape(spec, plan)));
    ASSIGN_OR_RETURN(plan, PlanFromPacked(spec, *file, shard));
  }
  const bool copied = options.mmap == MmapPolicy::kCopy ||
                      (options.mmap == MmapPolicy::kAuto && FitsTwice(plan.bytes, options));
  NumaPlacement placement;
  if (copied || IsByNode(options.numa)) {
    ASSIGN_OR_RETURN(placement, PlaceWeights(options.numa, plan, pool));
  }
  const bool by_node = placement.images() > 1;
  if (by_node && options.mmap == MmapPolicy::kMap) {
    return InvalidArgument(
        "{}: the pages of a mapped file can't be {}; --mmap off copies its weights, and --numa auto leaves "
        "them where they are",
        path, ToString(options.numa));
  }
  RETURN_IF_ERROR(CheckExpertsMove(path, spec, plan, placement, options));
  if (copied || by_node) {
    ASSIGN_OR_RETURN(WeightMap weights,
                     WeightMap::Copy(*file, std::move(plan), options.progress, placement, pool));
    return Finish(std::move(spec), std::move(shard), std::move(weights), WeightSource::kCopied, placement,
                  options);
  }
  ASSIGN_OR_RETURN(WeightMap weights, WeightMap::Map(std::move(file), std::move(plan)));
  return Finish(std::move(spec), std::move(shard), std::move(weights), WeightSource::kMapped, {}, options);
}

}  // namespace

const char* ToString(WeightSource source) {
  switch (source) {
    case WeightSource::kMapped:
      return "mapped";
    case WeightSource::kCopied:
      return "copied to huge pages";
    case WeightSource::kPacked:
      return "packed at load";
  }
  return "";
}

StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& path, const LoadOptions& options,
                                             runtime::ThreadPool& pool) {
  ASSIGN_OR_RETURN(const WeightDtype dtype, ParseWeightDtype(options.dtype));
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(path));
  ASSIGN_OR_RETURN(DecoderSpec spec, ReadSpec(*checkpoint, options));
  if (PackedFile::Is(path)) {
    if (dtype.has_value()) {
      return InvalidArgument("{}: a packed file keeps the format it was written in; \"{}\" can't be chosen",
                             path, options.dtype);
    }
    return LoadPacked(path, std::move(spec), options, pool);
  }
  if (options.mmap == MmapPolicy::kMap) {
    return InvalidArgument("{}: only a packed file can be mapped; moesaic convert makes one", path);
  }
  DropAbsentMtp(*checkpoint, spec);
  parallel::Shard shard = parallel::WholeModel(ShapeOf(spec));
  if (options.groups != nullptr) {
    ASSIGN_OR_RETURN(const parallel::ModelShape shape, DivisibleShape(spec, *checkpoint, dtype));
    ASSIGN_OR_RETURN(shard, parallel::MakeShard(options.groups->layout(), options.groups->rank(), shape));
  }
  ASSIGN_OR_RETURN(WeightPlan plan, PlanFromCheckpoint(spec, *checkpoint, dtype, shard));
  ASSIGN_OR_RETURN(const NumaPlacement placement, PlaceWeights(options.numa, plan, pool));
  RETURN_IF_ERROR(CheckExpertsMove(path, spec, plan, placement, options));
  ASSIGN_OR_RETURN(WeightMap weights,
                   WeightMap::Pack(*checkpoint, std::move(plan), options.progress, placement, pool));
  return Finish(std::move(spec), std::move(shard), std::move(weights), WeightSource::kPacked, placement,
                options);
}

}  // namespace moesaic::models
