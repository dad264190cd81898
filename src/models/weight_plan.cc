#include "models/weight_plan.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <set>

#include "checkpoint/linear_source.h"
#include "checkpoint/stored_groups.h"
#include "tensor/static_scale.h"

namespace moesaic::models {
namespace {

using checkpoint::Checkpoint;
using checkpoint::LinearSource;
using checkpoint::TensorEntry;
using checkpoint::WeightScheme;
using tensor::DType;
using tensor::PackedFormat;
using tensor::PackedLayout;

// Maximum MTP modules that a config may declare (num_nextn_predict_layers).
constexpr int kMaxMtpModules = 64;

// Properties of a region in the checkpoint, over all its matrices.
struct Stored {
  bool all_f32 = true;
  bool all_int8 = true;  // weights and activations
  bool any_static = false;
  // [parts] group-scaled format if it is the same in all records
  std::vector<std::optional<PackedFormat>> groups;
  std::vector<float> input_scales;  // [count * parts]
};

StatusOr<Stored> Inspect(const RegionDecl& decl, const Checkpoint& checkpoint,
                         std::set<std::string>& modules) {
  Stored stored;
  for (int record = 0; record < decl.count; ++record) {
    for (size_t p = 0; p < decl.parts.size(); ++p) {
      const PartDecl& part = decl.parts[p];
      const std::string module = part.Module(record);
      ASSIGN_OR_RETURN(const LinearSource source,
                       checkpoint.FindLinear(module, part.module_out, part.module_in));
      modules.insert(module);
      const TensorEntry* plain =
          source.scheme == WeightScheme::kPlain ? checkpoint.Find(module + ".weight") : nullptr;
      stored.all_f32 &= plain != nullptr && plain->dtype == DType::kF32;
      stored.all_int8 &= source.scheme == WeightScheme::kInt8Channel &&
                         (source.dynamic_activations || source.input_scale > 0);
      stored.any_static |= source.input_scale > 0;
      const auto format = part.transposed ? std::nullopt : checkpoint::StoredFormat(source);
      if (record == 0) stored.groups.push_back(format);
      if (stored.groups[p] != format) stored.groups[p] = std::nullopt;
      stored.input_scales.push_back(source.input_scale);
    }
  }
  return stored;
}

// Returns the format of each part.
std::vector<PackedFormat> ChooseFormats(Precision precision, WeightDtype dtype, const Stored& stored) {
  const auto all = [&](PackedFormat format) {
    return std::vector<PackedFormat>(stored.groups.size(), format);
  };
  if (dtype.has_value() || precision == Precision::kF32) return all(FormatFor(precision, dtype));
  if (stored.all_f32) return all(PackedFormat::kF32);
  if (precision != Precision::kAny) return all(PackedFormat::kBF16);
  if (stored.all_int8) return all(PackedFormat::kI8);
  std::vector<PackedFormat> formats;
  for (const auto& group : stored.groups) formats.push_back(group.value_or(PackedFormat::kBF16));
  // Gate and up share one quantized input; down has its own.
  if (formats.size() > 1 && formats[0] != formats[1]) formats[0] = formats[1] = PackedFormat::kBF16;
  return formats;
}

// Returns the first expert whose gate and up have different input scales, although their input is quantized
// once; -1 if none. In layers without experts gate and up quantize their own inputs.
int UnequalExpert(const RegionDecl& decl, const std::vector<float>& input_scales) {
  if (decl.touch != Touch::kTopK && !decl.name.ends_with(".shared_experts")) return -1;
  for (size_t i = 0; i + 2 < input_scales.size(); i += 3) {
    if (input_scales[i] != input_scales[i + 1]) return static_cast<int>(i / 3);
  }
  return -1;
}

StatusOr<RegionPlan> PlanRegion(const RegionDecl& decl, const Checkpoint& checkpoint, WeightDtype dtype,
                                std::set<std::string>& modules) {
  if (decl.is_vector()) {
    const int64_t shape[] = {decl.tensor_values};
    ASSIGN_OR_RETURN([[maybe_unused]] const TensorEntry* entry, checkpoint.Expect(decl.name, shape));
    return LayOut(decl, {});
  }
  ASSIGN_OR_RETURN(Stored stored, Inspect(decl, checkpoint, modules));
  ASSIGN_OR_RETURN(RegionPlan region, LayOut(decl, ChooseFormats(decl.precision, dtype, stored)));
  // An activation scale is valid only with the int8 weights it was calibrated for.
  if (region.format == PackedFormat::kI8 && stored.all_int8 && stored.any_static) {
    region.input_scales = std::move(stored.input_scales);
  }
  if (const int i = UnequalExpert(decl, region.input_scales); i >= 0) {
    return Unimplemented(
        "{}: tensors {}.input_scale and {}.input_scale must be equal, since an expert's input is rounded "
        "once; found {} and {}",
        checkpoint.path(), decl.parts[0].Module(i), decl.parts[1].Module(i), region.input_scales[3 * i],
        region.input_scales[3 * i + 1]);
  }
  return region;
}

// MTP modules come with copies of embedding and head, gigabytes large. Equal ones are shared.
bool IsCopy(const Checkpoint& checkpoint, const std::string& name, const std::string& of) {
  const TensorEntry* a = checkpoint.Find(name + ".weight");
  const TensorEntry* b = checkpoint.Find(of + ".weight");
  return a != nullptr && b != nullptr && a->dtype == b->dtype && a->bytes.size() == b->bytes.size() &&
         std::memcmp(a->bytes.data(), b->bytes.data(), a->bytes.size()) == 0;
}

bool SkipOptional(const DecoderSpec& spec, const RegionDecl& decl, const Checkpoint& checkpoint) {
  if (!decl.optional) return false;
  if (!checkpoint.Has(decl.name + ".weight")) return true;
  const bool embedding = decl.touch == Touch::kRow;
  return IsCopy(checkpoint, decl.name, embedding || spec.tied ? kEmbedding : kHead);
}

// Returns whether `tensor` belongs to one of the modules: X.weight, X.weight_scale and so on.
bool BelongsTo(const std::string& tensor, const std::set<std::string>& modules) {
  const size_t dot = tensor.rfind('.');
  return dot != std::string::npos && checkpoint::IsLinearField(std::string_view(tensor).substr(dot + 1)) &&
         modules.contains(tensor.substr(0, dot));
}

// Index of the layer that `name` belongs to, or -1.
int LayerOf(std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.";
  int layer = -1;
  if (!name.starts_with(kLayers)) return -1;
  name.remove_prefix(kLayers.size());
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc() && end != name.data() + name.size() && *end == '.' ? layer : -1;
}

// Returns whether an unused tensor does not affect results: rotary tables, which are computed, the copy of a
// tied head, and an MTP module's copies of embedding and head.
bool HasNoEffect(const DecoderSpec& spec, const std::string& tensor) {
  if (tensor.ends_with(".rotary_emb.inv_freq")) return true;
  if (tensor == "lm_head.weight") return spec.tied;
  const bool copy = tensor.ends_with(".embed_tokens.weight") || tensor.ends_with(".shared_head.head.weight");
  return copy && LayerOf(tensor) >= spec.layers;
}

// Returns `spec` with one more MTP module for each layer up to `last`: only modules may follow the decoder's
// layers.
StatusOr<DecoderSpec> WithStoredMtp(DecoderSpec spec, int last, const std::string& path) {
  if (last < spec.layers + spec.mtp_layers) return spec;
  if (last - spec.layers >= kMaxMtpModules) {
    return InvalidArgument("{}: layer {} lies beyond \"num_hidden_layers\", which is {}", path, last,
                           spec.layers);
  }
  spec.mtp_layers = last - spec.layers + 1;
  return spec;
}

Status NotAModule(const std::string& path, const DecoderSpec& spec, int layer, const Status& why) {
  return InvalidArgument(
      "{}: layer {} lies beyond \"num_hidden_layers\", which is {}, and is not a complete MTP module: {}",
      path, layer, spec.layers, Message(why));
}

// Plans regions of MTP modules that the checkpoint has but `spec` does not load. Each must be complete.
StatusOr<std::vector<RegionPlan>> PlanUnloadedMtp(const DecoderSpec& spec, const Checkpoint& checkpoint,
                                                  std::set<std::string>& modules) {
  int last = -1;
  for (const TensorEntry& entry : checkpoint.tensors()) last = std::max(last, LayerOf(entry.name));
  ASSIGN_OR_RETURN(const DecoderSpec stored, WithStoredMtp(spec, last, checkpoint.path()));
  std::vector<RegionPlan> regions;
  if (stored.mtp_layers == spec.mtp_layers) return regions;
  for (const RegionDecl& decl : DeclareWeights(stored, false)) {
    const int layer = LayerOf(decl.name);
    if (layer < spec.layers + spec.mtp_layers || decl.optional) continue;
    StatusOr<RegionPlan> region = PlanRegion(decl, checkpoint, std::nullopt, modules);
    if (!region.ok()) return NotAModule(checkpoint.path(), spec, layer, region.status());
    regions.push_back(*std::move(region));
  }
  return regions;
}

// Adds the modules and vectors of the whole model, of which `plan` may be one rank's part.
void AddNames(const DecoderSpec& spec, std::set<std::string>& modules, std::set<std::string>& vectors) {
  for (const RegionDecl& decl : DeclareWeights(spec, false)) {
    if (decl.optional) continue;
    if (decl.is_vector()) vectors.insert(decl.name);
    for (int record = 0; record < decl.count; ++record) {
      for (const PartDecl& part : decl.parts) modules.insert(part.Module(record));
    }
  }
}

Status CheckNoneLeft(const DecoderSpec& spec, const Checkpoint& checkpoint, const WeightPlan& plan,
                     const parallel::Shard& shard, std::set<std::string>& modules) {
  std::set<std::string> vectors;
  if (!shard.is_whole) AddNames(spec, modules, vectors);
  ASSIGN_OR_RETURN(const std::vector<RegionPlan> unloaded, PlanUnloadedMtp(spec, checkpoint, modules));
  for (const auto* regions : {&plan.regions, &unloaded}) {
    for (const RegionPlan& region : *regions) {
      if (region.decl.is_vector()) vectors.insert(region.decl.name);
    }
  }
  for (const TensorEntry& entry : checkpoint.tensors()) {
    if (vectors.contains(entry.name) || BelongsTo(entry.name, modules) || HasNoEffect(spec, entry.name))
      continue;
    return InvalidArgument("{}: tensor {} is not part of {} with this config.json", entry.file, entry.name,
                           spec.architecture);
  }
  return OkStatus();
}

// Whether kernels read a region of this precision in `format`.
bool Permits(Precision precision, PackedFormat format) {
  return precision == Precision::kAny || format == PackedFormat::kF32 ||
         (precision == Precision::kFloat && format == PackedFormat::kBF16);
}

Status RefuseRegion(const std::string& path, const RegionDecl& decl, const std::string& expected,
                    const std::string& found) {
  return DataLoss("{}: packed region {} must be {}, found {}", path, decl.name, expected, found);
}

nlohmann::json ParseLayout(const checkpoint::PackedRegion& region) {
  return nlohmann::json::parse(region.layout, nullptr, /*allow_exceptions=*/false);
}

nlohmann::json LayoutJson(const RegionPlan& region) {
  nlohmann::json layout;
  layout["format"] = tensor::PackedFormatName(region.format);
  if (region.decl.is_vector()) {
    layout["values"] = region.decl.values;
    return layout;
  }
  layout["count"] = region.decl.count;
  layout["stride"] = region.stride;
  for (size_t p = 0; p < region.layouts.size(); ++p) {
    layout["parts"].push_back(
        {{"n", region.layouts[p].n}, {"k", region.layouts[p].k}, {"offset", region.offsets[p]}});
    if (region.layouts[p].format != region.format) {
      layout["parts"].back()["format"] = tensor::PackedFormatName(region.layouts[p].format);
    }
  }
  if (!region.input_scales.empty()) layout["input_scales"] = region.input_scales;
  return layout;
}

// Returns the formats of the parts of a region with this `layout`.
StatusOr<std::vector<PackedFormat>> StoredFormats(const RegionDecl& decl, const nlohmann::json& layout,
                                                  const std::string& path) {
  auto refuse = [&](const std::string& expected, const std::string& found) {
    return RefuseRegion(path, decl, expected, found);
  };
  const auto format_name = layout.find("format");
  if (format_name == layout.end() || !format_name->is_string()) {
    return refuse("described by a \"format\"", layout.dump());
  }
  ASSIGN_OR_RETURN(const PackedFormat format, tensor::ParsePackedFormat(format_name->get<std::string>()));
  std::vector<PackedFormat> formats(decl.parts.size(), format);
  const auto parts = layout.find("parts");
  const bool has_parts = parts != layout.end() && parts->is_array() && parts->size() == formats.size();
  if (!formats.empty() && !has_parts) {
    return refuse(fmt::format("described by {} \"parts\"", formats.size()), layout.dump());
  }
  for (size_t p = 0; p < formats.size(); ++p) {
    const nlohmann::json& part = (*parts)[p];
    const auto own = part.is_object() ? part.find("format") : part.end();
    if (own == part.end() || !own->is_string()) continue;
    ASSIGN_OR_RETURN(formats[p], tensor::ParsePackedFormat(own->get<std::string>()));
  }
  for (const PackedFormat own : formats) {
    if (!Permits(decl.precision, own)) {
      return refuse(decl.precision == Precision::kF32 ? "f32" : "f32 or bf16", tensor::PackedFormatName(own));
    }
  }
  if (formats.size() == 3 && formats[0] != formats[1]) {
    return refuse("of one format for gate and up", layout.dump());
  }
  return formats;
}

StatusOr<RegionPlan> ReadDescription(const RegionDecl& decl, const checkpoint::PackedFile& file) {
  ASSIGN_OR_RETURN(const checkpoint::PackedRegion* stored, file.Describe(decl.name));
  auto refuse = [&](const std::string& expected, const std::string& found) {
    return RefuseRegion(file.path(), decl, expected, found);
  };
  const nlohmann::json layout = ParseLayout(*stored);
  ASSIGN_OR_RETURN(const std::vector<PackedFormat> formats, StoredFormats(decl, layout, file.path()));
  ASSIGN_OR_RETURN(RegionPlan region, LayOut(decl, formats));
  if (const auto scales = layout.find("input_scales"); scales != layout.end()) {
    for (const nlohmann::json& scale : *scales) {
      if (!scale.is_number()) return refuse("described by numeric \"input_scales\"", scale.dump());
      const auto value = scale.get<float>();
      if (value != 0 && !tensor::StaticScale::HasInverse(value)) {
        return refuse("described by \"input_scales\" of 0, or finite in f32 and at least 2^-126",
                      scale.dump());
      }
      region.input_scales.push_back(value);
    }
    if (region.input_scales.size() != decl.count * decl.parts.size()) {
      return refuse(fmt::format("described by {} \"input_scales\"", decl.count * decl.parts.size()),
                    std::to_string(region.input_scales.size()));
    }
    if (region.format != PackedFormat::kI8) {
      return refuse("of int8, or described without \"input_scales\"", stored->layout);
    }
    if (const int i = UnequalExpert(decl, region.input_scales); i >= 0) {
      return refuse("described by the same \"input_scales\" of gate and up, whose input is rounded once",
                    fmt::format("{} and {} of expert {}", region.input_scales[3 * i],
                                region.input_scales[3 * i + 1], i));
    }
  }
  if (const nlohmann::json expected = LayoutJson(region); layout != expected) {
    return refuse(expected.dump(), stored->layout);
  }
  if (stored->bytes != region.bytes) {
    return refuse(fmt::format("{} bytes", region.bytes), std::to_string(stored->bytes));
  }
  return region;
}

// Checks that every region belongs to the decoder or to a complete MTP module, loaded or not.
Status CheckNoRegionLeft(const DecoderSpec& spec, const checkpoint::PackedFile& file, bool separate_head,
                         const parallel::Shard& shard) {
  int last = -1;
  std::set<std::string> left;
  for (const checkpoint::PackedRegion& region : file.regions()) {
    last = std::max(last, LayerOf(region.name));
    left.insert(region.name);
  }
  ASSIGN_OR_RETURN(const DecoderSpec stored, WithStoredMtp(spec, last, file.path()));
  for (const RegionDecl& decl : DeclareWeights(stored, separate_head, shard)) {
    const int layer = LayerOf(decl.name);
    if (left.erase(decl.name) == 0 && layer >= spec.layers + spec.mtp_layers && !decl.optional) {
      return NotAModule(file.path(), spec, layer, NotFound("packed region {} is missing", decl.name));
    }
  }
  if (left.empty()) return OkStatus();
  return InvalidArgument("{}: packed region {} is not part of {} with its config.json", file.path(),
                         *left.begin(), spec.architecture);
}

bool IsFeedForward(const RegionDecl& decl) {
  return decl.precision == Precision::kAny && decl.parts.size() == 3;
}

// Whether tensor parallel ranks divide the columns of the region's last part.
bool HasDividedColumns(const RegionDecl& decl) {
  return IsFeedForward(decl) || decl.name.ends_with(".o_proj");
}

}  // namespace

void WeightPlan::Add(RegionPlan region) {
  region.start = bytes;
  bytes += region.placed_bytes();
  regions.push_back(std::move(region));
}

const RegionPlan* WeightPlan::Find(const std::string& name) const {
  const auto found = std::find_if(regions.begin(), regions.end(),
                                  [&](const RegionPlan& region) { return region.decl.name == name; });
  return found == regions.end() ? nullptr : &*found;
}

StatusOr<WeightDtype> ParseWeightDtype(const std::string& name) {
  if (name == "auto") return WeightDtype();
  if (const auto format = tensor::ParsePackedFormat(name); format.ok()) {
    if (tensor::CanQuantize(*format)) return WeightDtype(*format);
    return InvalidArgument("{} can't be chosen: only \"auto\" gives it, for GGUF files with such weights",
                           name);
  }
  return InvalidArgument("weights can be auto, {}, not \"{}\"",
                         fmt::join(tensor::QuantizableFormatNames(), ", "), name);
}

PackedFormat FormatFor(Precision precision, WeightDtype dtype) {
  if (precision == Precision::kF32) return PackedFormat::kF32;
  const PackedFormat wanted = dtype.value_or(PackedFormat::kBF16);
  return precision == Precision::kAny || wanted == PackedFormat::kF32 ? wanted : PackedFormat::kBF16;
}

bool SeparatesHead(WeightDtype dtype) { return dtype.has_value() && *dtype >= PackedFormat::kI8; }

StatusOr<RegionPlan> LayOut(RegionDecl decl, std::span<const PackedFormat> formats) {
  RegionPlan region;
  region.format = decl.is_vector() ? PackedFormat::kF32 : formats[0];
  if (decl.is_vector()) {
    region.bytes = region.stride = decl.values * static_cast<int64_t>(sizeof(float));
  } else {
    constexpr int kInt8Limit = 65536;  // see tensor/packed.h
    for (size_t p = 0; p < decl.parts.size(); ++p) {
      const PartDecl& part = decl.parts[p];
      const PackedFormat format = formats[p];
      if (format == PackedFormat::kI8 && part.k > kInt8Limit) {
        return Unimplemented("{} can't be int8: it has {} inputs, more than {}", part.module, part.k,
                             kInt8Limit);
      }
      region.layouts.push_back(PackedLayout::Of(format, part.n, part.k));
      region.offsets.push_back(region.stride);
      region.stride += region.layouts.back().total_bytes;
    }
    region.bytes = region.stride * decl.count;
  }
  region.decl = std::move(decl);
  return region;
}

void DropAbsentMtp(const Checkpoint& checkpoint, DecoderSpec& spec) {
  const std::string prefix = LayerPrefix(spec.layers);
  const auto& tensors = checkpoint.tensors();
  const bool stored = std::any_of(tensors.begin(), tensors.end(),
                                  [&](const TensorEntry& entry) { return entry.name.starts_with(prefix); });
  if (!stored) spec.mtp_layers = 0;
}

void DropAbsentMtp(const checkpoint::PackedFile& file, DecoderSpec& spec) {
  const std::string prefix = LayerPrefix(spec.layers);
  const bool stored = std::ranges::any_of(file.regions(), [&](const checkpoint::PackedRegion& region) {
    // Names of a file with a layout begin with the rank.
    return std::string_view(region.name).substr(region.name.find('/') + 1).starts_with(prefix);
  });
  if (!stored) spec.mtp_layers = 0;
}

StatusOr<WeightPlan> PlanFromCheckpoint(const DecoderSpec& spec, const Checkpoint& checkpoint,
                                        WeightDtype dtype) {
  return PlanFromCheckpoint(spec, checkpoint, dtype, parallel::WholeModel(ShapeOf(spec)));
}

StatusOr<WeightPlan> PlanFromCheckpoint(const DecoderSpec& spec, const Checkpoint& checkpoint,
                                        WeightDtype dtype, const parallel::Shard& shard) {
  WeightPlan plan;
  std::set<std::string> modules;
  for (const RegionDecl& decl : DeclareWeights(spec, SeparatesHead(dtype), shard)) {
    if (SkipOptional(spec, decl, checkpoint)) continue;
    ASSIGN_OR_RETURN(RegionPlan region, PlanRegion(decl, checkpoint, dtype, modules));
    plan.Add(std::move(region));
  }
  RETURN_IF_ERROR(CheckNoneLeft(spec, checkpoint, plan, shard, modules));
  return plan;
}

void WidenUnit(const RegionDecl& decl, tensor::PackedFormat last, parallel::ModelShape* shape) {
  if (!HasDividedColumns(decl)) return;
  int& most = IsFeedForward(decl) ? shape->ffn_unit : shape->attention_unit;
  most = std::max(most, tensor::ScaledInputs(last));
}

StatusOr<parallel::ModelShape> DivisibleShape(const DecoderSpec& spec, const Checkpoint& checkpoint,
                                              WeightDtype dtype) {
  parallel::ModelShape shape = ShapeOf(spec);
  std::set<std::string> modules;
  for (const RegionDecl& decl : DeclareWeights(spec, SeparatesHead(dtype))) {
    if (!HasDividedColumns(decl)) continue;
    ASSIGN_OR_RETURN(const Stored stored, Inspect(decl, checkpoint, modules));
    WidenUnit(decl, ChooseFormats(decl.precision, dtype, stored).back(), &shape);
  }
  return shape;
}

StatusOr<WeightPlan> PlanFrame(const DecoderSpec& spec, const Checkpoint& checkpoint, int layer) {
  WeightPlan plan;
  std::set<std::string> modules;
  const std::string prefix = LayerPrefix(layer);
  for (const RegionDecl& decl : DeclareWeights(spec, false)) {
    const bool between = decl.is_vector() || decl.precision != Precision::kAny;
    if (!between || decl.touch == Touch::kRow || !decl.name.starts_with(prefix)) continue;
    ASSIGN_OR_RETURN(RegionPlan region, PlanRegion(decl, checkpoint, std::nullopt, modules));
    plan.Add(std::move(region));
  }
  return plan;
}

StatusOr<WeightPlan> PlanFromPacked(const DecoderSpec& spec, const checkpoint::PackedFile& file) {
  return PlanFromPacked(spec, file, parallel::WholeModel(ShapeOf(spec)));
}

StatusOr<WeightPlan> PlanOfParts(const DecoderSpec& spec, const checkpoint::PackedFile& file) {
  std::map<std::string_view, const checkpoint::PackedRegion*> present;  // of the first rank that has it
  for (const checkpoint::PackedRegion& region : file.regions()) {
    present.emplace(std::string_view(region.name).substr(region.name.find('/') + 1), &region);
  }
  WeightPlan plan;
  const bool separate_head = spec.tied && present.contains(kHead);
  for (RegionDecl& decl : DeclareWeights(spec, separate_head)) {
    const auto found = present.find(decl.name);
    if (found == present.end() && decl.optional) continue;
    if (found == present.end()) return DataLoss("{}: no rank has region {}", file.path(), decl.name);
    ASSIGN_OR_RETURN(const std::vector<PackedFormat> formats,
                     StoredFormats(decl, ParseLayout(*found->second), file.path()));
    ASSIGN_OR_RETURN(RegionPlan region, LayOut(std::move(decl), formats));
    plan.Add(std::move(region));
  }
  return plan;
}

StatusOr<std::shared_ptr<const checkpoint::PackedFile>> PartOfFile(
    std::shared_ptr<const checkpoint::PackedFile> file, const parallel::Layout& layout, int rank) {
  if (const std::string stored = file->layout(); stored != layout.PartsText()) {
    return InvalidArgument(
        "{}: the file has the parts of the layout {}, but this is {}; start it with the file's layout, or "
        "convert the checkpoint again with --layout {}",
        file->path(), stored, layout.PartsText(), layout.PartsText());
  }
  if (layout.placement() != nullptr) {
    return InvalidArgument(
        "{}: the experts of each rank are fixed in the file; an expert placement needs the checkpoint, or a "
        "packed file of the whole model",
        file->path());
  }
  parallel::Coordinates at = layout.At(rank);
  if (!layout.exchanges_tokens()) at.replica = 0;  // replicas have equal parts
  return checkpoint::PackedFile::OfRank(std::move(file), layout.RankAt(at));
}

StatusOr<WeightPlan> PlanFromPacked(const DecoderSpec& spec, const checkpoint::PackedFile& file,
                                    const parallel::Shard& shard) {
  WeightPlan plan;
  std::set<std::string> present;
  for (const checkpoint::PackedRegion& region : file.regions()) present.insert(region.name);
  const bool separate_head = spec.tied && present.contains(kHead);
  for (const RegionDecl& decl : DeclareWeights(spec, separate_head, shard)) {
    if (decl.optional && !present.contains(decl.name)) continue;
    ASSIGN_OR_RETURN(RegionPlan region, ReadDescription(decl, file));
    plan.Add(std::move(region));
  }
  RETURN_IF_ERROR(CheckNoRegionLeft(spec, file, separate_head, shard));
  return plan;
}

checkpoint::PackedRegion Describe(const RegionPlan& region) {
  return {.name = region.decl.name, .layout = LayoutJson(region).dump(), .bytes = region.bytes};
}

}  // namespace moesaic::models
