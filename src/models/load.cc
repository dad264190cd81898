#include "checkpoint/checkpoint.h"
#include "checkpoint/packed_file.h"
#include "models/decoder_model.h"
#include "models/model_info.h"

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

StatusOr<std::unique_ptr<Model>> Finish(DecoderSpec spec, WeightMap weights, const char* weights_from,
                                        layers::MlaPath mla_path) {
  ModelInfo info = InfoFromPlan(spec, weights.plan());
  info.weights_from = weights_from;
  ASSIGN_OR_RETURN(std::unique_ptr<DecoderModel> model,
                   DecoderModel::Create(std::move(spec), std::move(weights), std::move(info), mla_path));
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace

StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& path, const LoadOptions& options,
                                             runtime::ThreadPool& pool) {
  ASSIGN_OR_RETURN(const WeightDtype dtype, ParseWeightDtype(options.dtype));
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(path));
  ASSIGN_OR_RETURN(DecoderSpec spec, ReadSpec(*checkpoint, options));
  if (PackedFile::Is(path)) {
    if (dtype != WeightDtype::kAuto) {
      return InvalidArgument("{}: a packed file keeps the format it was written in; \"{}\" can't be chosen",
                             path, options.dtype);
    }
    ASSIGN_OR_RETURN(std::shared_ptr<const PackedFile> file, PackedFile::Open(path));
    DropAbsentMtp(*file, spec);
    ASSIGN_OR_RETURN(WeightPlan plan, PlanFromPacked(spec, *file));
    ASSIGN_OR_RETURN(WeightMap weights, WeightMap::Map(std::move(file), std::move(plan)));
    return Finish(std::move(spec), std::move(weights), "mapped", options.mla_path);
  }
  DropAbsentMtp(*checkpoint, spec);
  ASSIGN_OR_RETURN(WeightPlan plan, PlanFromCheckpoint(spec, *checkpoint, dtype));
  ASSIGN_OR_RETURN(WeightMap weights, WeightMap::Pack(*checkpoint, std::move(plan), options.progress, pool));
  return Finish(std::move(spec), std::move(weights), "packed at load", options.mla_path);
}

}  // namespace moesaic::models
