#include <filesystem>

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

}  // namespace

Status Convert(const std::string& path, const std::string& out, const LoadOptions& options,
               runtime::ThreadPool& pool, const std::vector<std::pair<std::string, std::string>>& texts) {
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
  ASSIGN_OR_RETURN(const WeightPlan plan, PlanFromCheckpoint(spec, *checkpoint, dtype));
  std::vector<PackedRegion> regions;
  for (const RegionPlan& region : plan.regions) regions.push_back(Describe(region));
  ASSIGN_OR_RETURN(const std::unique_ptr<PackedWriter> writer,
                   PackedWriter::Create(out, std::move(regions), Metadata(*checkpoint, texts)));
  RETURN_IF_ERROR(PackStream(
      *checkpoint, plan, options.progress, pool,
      [&](size_t region, std::span<const std::byte> bytes) { return writer->Append(region, bytes); }));
  return writer->Finish();
}

}  // namespace moesaic::models
