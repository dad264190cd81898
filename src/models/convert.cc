#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/packed_file.h"
#include "models/model.h"
#include "models/model_info.h"
#include "models/packer.h"

namespace moesaic::models {
namespace {

using checkpoint::Checkpoint;
using checkpoint::PackedRegion;
using checkpoint::PackedWriter;

// Files other than weights that a model needs; those that the checkpoint has are stored in the packed file.
constexpr const char* kTexts[] = {"tokenizer.json",
                                  "tokenizer_config.json",
                                  "special_tokens_map.json",
                                  "added_tokens.json",
                                  "vocab.json",
                                  "merges.txt",
                                  "tiktoken.model",
                                  "chat_template.jinja",
                                  "chat_template.json",
                                  "generation_config.json"};

std::vector<std::pair<std::string, std::string>> Metadata(
    const Checkpoint& checkpoint, const std::vector<std::pair<std::string, std::string>>& texts) {
  std::vector<std::pair<std::string, std::string>> metadata = {
      {"source", std::filesystem::path(checkpoint.path()).filename().string()},
      {"config.json", checkpoint.config().dump()}};
  for (const char* name : kTexts) {
    if (std::optional<std::string> text = checkpoint.ReadText(name))
      metadata.emplace_back(name, *std::move(text));
  }
  metadata.insert(metadata.end(), texts.begin(), texts.end());
  return metadata;
}

// The weights of each rank.
StatusOr<std::vector<WeightPlan>> PlanParts(const DecoderSpec& spec, const Checkpoint& checkpoint,
                                            WeightDtype dtype, const parallel::Layout& layout) {
  if (layout.degrees().data > 1 && !layout.exchanges_tokens()) {
    return InvalidArgument(
        "data parallel replicas that do not divide the experts have equal parts: convert without dp, found "
        "dp={}",
        layout.degrees().data);
  }
  ASSIGN_OR_RETURN(const parallel::ModelShape shape, DivisibleShape(spec, checkpoint, dtype));
  std::vector<WeightPlan> parts;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    ASSIGN_OR_RETURN(const parallel::Shard shard, parallel::MakeShard(layout, rank, shape));
    ASSIGN_OR_RETURN(parts.emplace_back(), PlanFromCheckpoint(spec, checkpoint, dtype, shard));
  }
  return parts;
}

}  // namespace

Status Convert(const std::string& path, const std::string& out, const LoadOptions& options,
               runtime::ThreadPool& pool, const std::vector<std::pair<std::string, std::string>>& texts,
               const parallel::Layout& layout) {
  ASSIGN_OR_RETURN(const WeightDtype dtype, ParseWeightDtype(options.dtype));
  if (checkpoint::PackedFile::Is(path)) return InvalidArgument("{} is a packed file already", path);
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(path));
  ASSIGN_OR_RETURN(DecoderSpec spec, SpecFromConfig(checkpoint->config(), ConfigFile(*checkpoint)));
  if (options.experts_per_token != 0) {
    return InvalidArgument(
        "experts per token are chosen when a model is loaded, not when it is converted; found {}",
        options.experts_per_token);
  }
  if (!options.load_mtp) spec.mtp_layers = 0;
  DropAbsentMtp(*checkpoint, spec);
  ASSIGN_OR_RETURN(const std::vector<WeightPlan> parts, PlanParts(spec, *checkpoint, dtype, layout));
  std::vector<std::pair<std::string, std::string>> metadata = Metadata(*checkpoint, texts);
  const bool divided = layout.ranks() > 1;
  if (divided) metadata.emplace_back(checkpoint::kLayoutKey, layout.PartsText());
  std::vector<PackedRegion> regions;
  int64_t total = 0;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    total += parts[rank].bytes;
    for (const RegionPlan& region : parts[rank].regions) {
      PackedRegion& described = regions.emplace_back(Describe(region));
      if (divided) described.name = checkpoint::RankRegion(static_cast<int>(rank), described.name);
    }
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<PackedWriter> writer,
                   PackedWriter::Create(out, std::move(regions), metadata));
  size_t first = 0;
  int64_t before = 0;
  for (const WeightPlan& part : parts) {
    const PackProgress progress = [&](int64_t done, int64_t) {
      return !options.progress || options.progress(before + done, total);
    };
    RETURN_IF_ERROR(
        PackStream(*checkpoint, part, progress, pool, [&](size_t region, std::span<const std::byte> bytes) {
          return writer->Append(first + region, bytes);
        }));
    first += part.regions.size();
    before += part.bytes;
  }
  return writer->Finish();
}

}  // namespace moesaic::models
