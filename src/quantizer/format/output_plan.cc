#include "quantizer/format/output_plan.h"

#include <fmt/ranges.h>
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>

#include "base/round.h"
#include "checkpoint/linear_source.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::ModulePatterns;
using nlohmann::ordered_json;
using tensor::DType;

// Alignment of tensors in the file: a multiple of the reference writer's.
constexpr int64_t kDataAlignment = 64;

std::string PatternOf(const KeepRule& rule) { return "re:.*(?:" + rule.pattern + ")"; }

// Returns the "ignore" pattern of a linear that is kept by default.
const char* DefaultPattern(const std::string& module) {
  for (const auto& [ending, pattern] :
       {std::pair(".mlp.gate", "re:.*\\.mlp\\.gate$"), std::pair(".kv_b_proj", "re:.*\\.kv_b_proj$"),
        std::pair(".eh_proj", "re:.*\\.eh_proj$"),
        std::pair(".shared_head.head", "re:.*\\.shared_head\\.head$")}) {
    if (module.ends_with(ending)) return pattern;
  }
  return nullptr;  // other programs do not treat embeddings as linears
}

class Chooser {
 public:
  static StatusOr<Chooser> Create(const OutputSettings& settings) {
    Chooser chooser(settings);
    for (const KeepRule& rule : settings.keep) {
      ASSIGN_OR_RETURN(ModulePatterns patterns, ModulePatterns::Parse({PatternOf(rule)}, "--keep"));
      chooser.rules_.push_back(std::move(patterns));
    }
    chooser.used_.resize(settings.keep.size());
    return chooser;
  }

  StatusOr<OutputItem> Choose(const ModelItem& item, const SourceForm& form) {
    OutputItem output;
    std::optional<DType> kept = KeptAs(item);
    if (item.roundable && !kept) {
      ASSIGN_OR_RETURN(output.precision, PrecisionOf(item));
      if (output.precision.kept()) kept = output.precision.dtype;
    }
    if (item.roundable && !kept) {
      output.form = Form::kRounded;
      const Grid grid = output.precision.grid();
      if (const Status fits = CheckGrid(grid, static_cast<int>(item.shape[1])); !fits.ok()) {
        return InvalidArgument("{}: {}; choose another group size, or --keep bf16 for it", item.name,
                               Message(fits));
      }
      for (StoredTensor& stored : TensorsOf(grid, item.shape[0], item.shape[1])) {
        output.tensors.push_back({std::move(stored)});
      }
      if (settings_.InputScale(item.name) > 0) {
        output.tensors.push_back({{".input_scale", DType::kF32, {1}, 0}});
      }
      return output;
    }
    const char* suffix = item.linear ? ".weight" : "";
    output.form = form.plain ? Form::kCopied : Form::kConverted;
    // Reordered rows stay exact; already rounded values become bf16.
    const bool wide = form.dtype == DType::kF64 || form.dtype == DType::kF32 || form.dtype == DType::kF16;
    DType dtype = form.plain ? form.dtype : wide ? DType::kF32 : DType::kBF16;
    if (kept && *kept != dtype) {
      output.form = Form::kConverted;
      dtype = *kept;
    }
    if (settings_.folding() != nullptr && settings_.folding()->Touches(item.name)) {
      output.form = Form::kConverted;
      if (dtype == DType::kF16) dtype = DType::kF32;
    }
    output.tensors.push_back({{suffix, dtype, item.shape, RowsOf(item) > 1 ? 1 : 0}});
    return output;
  }

  /// True if a mix decides the item.
  bool IsMixed(const ModelItem& item) { return item.roundable && !KeptAs(item); }

  /// Fails if only one of two fused linears is kept. `free`: no rule keeps it.
  static Status CheckFused(const ModelItem& first, bool first_free, const ModelItem& item, bool free) {
    if (first.fused < 0 || first.fused != item.fused || first_free == free) return OkStatus();
    return InvalidArgument("--keep must name all linears that run as one: it names only one of {} and {}",
                           first.name, item.name);
  }

  Status CheckRulesUsed() const {
    for (size_t i = 0; i < used_.size(); ++i) {
      if (!used_[i]) {
        return InvalidArgument("--keep: no linear's name has a match of \"{}\"", settings_.keep[i].pattern);
      }
    }
    return OkStatus();
  }

 private:
  explicit Chooser(const OutputSettings& settings) : settings_(settings) {
    if (settings.analysis != nullptr && settings.analysis->mix) choice_ = settings.analysis->mix->Choice();
  }

  // Returns the precision of a linear that no rule keeps.
  StatusOr<Precision> PrecisionOf(const ModelItem& item) const {
    if (!settings_.mix.wanted()) {
      return Precision{.scheme = settings_.scheme, .group_size = settings_.group_size};
    }
    const auto found = choice_.find(PrecisionGroupOf(item.name));
    if (found != choice_.end()) return found->second;
    return InvalidArgument("{}: the chosen mix has no precision for it; the mix was made for another model",
                           item.name);
  }

  std::optional<DType> KeptAs(const ModelItem& item) {
    if (!item.linear) return std::nullopt;
    for (size_t i = 0; i < rules_.size(); ++i) {
      if (!rules_[i].MatchName(item.name)) continue;
      used_[i] = true;
      return settings_.keep[i].dtype;
    }
    return std::nullopt;
  }

  const OutputSettings& settings_;
  std::vector<ModulePatterns> rules_;
  std::vector<bool> used_;
  std::map<std::string, Precision> choice_;  // of a mix, by precision group
};

// Returns a tensor's entry in the header of a file.
std::string HeaderEntry(const ModelItem& item, const StoredTensor& stored, int64_t offset) {
  return fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                     ordered_json(item.name + stored.suffix).dump(), tensor::DTypeName(stored.dtype),
                     fmt::join(stored.shape, ","), offset, offset + stored.bytes());
}

// Returns an upper bound: offsets have the same number of digits in files of up to 10 TB.
int64_t HeaderBytes(const ModelItem& item, const StoredTensor& stored) {
  constexpr int64_t kFarOffset = 1'000'000'000'000;
  return std::ssize(HeaderEntry(item, stored, kFarOffset));
}

int64_t HeaderBytes(const ModelItem& item, const OutputItem& output) {
  int64_t bytes = 0;
  for (const OutputTensor& tensor : output.tensors) bytes += HeaderBytes(item, tensor.stored);
  return bytes;
}

// Returns the option in which the whole linear has `precision`, or nothing if it does not fit.
std::optional<MixOption> OptionOf(const ModelItem& item, const Precision& precision) {
  const int64_t n = item.shape[0], k = item.shape[1];
  MixOption option{.precision = precision};
  std::vector<StoredTensor> tensors;
  if (precision.kept()) {
    tensors.push_back({".weight", precision.dtype, {n, k}});
  } else {
    if (!CheckGrid(precision.grid(), static_cast<int>(k)).ok()) return std::nullopt;
    tensors = TensorsOf(precision.grid(), n, k);
  }
  for (const StoredTensor& tensor : tensors) {
    option.bytes += tensor.bytes();
    option.header_bytes += HeaderBytes(item, tensor);
  }
  return option;
}

// Order of tensors in a file: by element size, largest first, so that each is aligned without gaps. Tensors
// of one size keep the model's order.
struct PlaceKey {
  int64_t element_bytes;
  std::string suffix;
  bool operator<(const PlaceKey& other) const {
    return std::tie(other.element_bytes, suffix) < std::tie(element_bytes, other.suffix);
  }
};

template <typename Visit>
void VisitInFileOrder(const std::vector<OutputItem>& items, const Shard& shard, const Visit& visit) {
  std::map<PlaceKey, std::vector<std::pair<size_t, size_t>>> places;
  for (size_t i = shard.first; i < shard.end; ++i) {
    for (size_t t = 0; t < items[i].tensors.size(); ++t) {
      const StoredTensor& stored = items[i].tensors[t].stored;
      const bool of_linear = items[i].form == Form::kRounded;
      places[{tensor::BytesOf(stored.dtype, 1), of_linear ? stored.suffix : ""}].emplace_back(i, t);
    }
  }
  for (const auto& [key, tensors] : places) {
    for (const auto& [i, t] : tensors) visit(i, t);
  }
}

std::string ShardName(size_t number, size_t count) {
  return count == 1 ? "model.safetensors"
                    : fmt::format("model-{:05}-of-{:05}.safetensors", number + 1, count);
}

std::vector<Shard> CutShards(const std::vector<OutputItem>& items, int64_t shard_bytes) {
  std::vector<Shard> shards;
  int64_t filled = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t bytes = items[i].bytes();
    if (shards.empty() || (filled > 0 && filled + bytes > shard_bytes)) {
      shards.push_back({.file = "", .first = i, .end = i});
      filled = 0;
    }
    shards.back().end = i + 1;
    filled += bytes;
  }
  for (size_t i = 0; i < shards.size(); ++i) shards[i].file = ShardName(i, shards.size());
  return shards;
}

}  // namespace

int64_t OutputItem::bytes() const {
  int64_t bytes = 0;
  for (const OutputTensor& tensor : tensors) bytes += tensor.stored.bytes();
  return bytes;
}

std::string OutputPlan::Header(const Shard& shard, const std::vector<ModelItem>& model,
                               const OutputSettings& settings) const {
  const ordered_json metadata = {{"format", "pt"}, {kSettingsKey, settings.Json().dump()}};
  std::string text = "{\"__metadata__\":" + metadata.dump();
  int64_t offset = 0;
  VisitInFileOrder(items, shard, [&](size_t i, size_t t) {
    const StoredTensor& stored = items[i].tensors[t].stored;
    text += HeaderEntry(model[i], stored, offset);
    offset += stored.bytes();
  });
  text += '}';
  uint64_t length = text.size() + sizeof(uint64_t);
  length = base::RoundUp(length, kDataAlignment) - sizeof(uint64_t);
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
  bytes += text;
  bytes.resize(sizeof(length) + length, ' ');
  return bytes;
}

StatusOr<MixPlan> PlanMix(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                          const models::DecoderSpec& spec, const OutputSettings& settings) {
  ASSIGN_OR_RETURN(Chooser chooser, Chooser::Create(settings));
  MixPlan plan;
  std::map<std::string, size_t> places;
  std::map<std::string, std::vector<bool>> fits;  // [options]
  for (size_t i = 0; i < items.size(); ++i) {
    const ModelItem& item = items[i];
    if (i > 0) {
      RETURN_IF_ERROR(
          Chooser::CheckFused(items[i - 1], chooser.IsMixed(items[i - 1]), item, chooser.IsMixed(item)));
    }
    if (!chooser.IsMixed(item)) {
      ASSIGN_OR_RETURN(const OutputItem output, chooser.Choose(item, forms[i]));
      plan.fixed.bytes += output.bytes() + HeaderBytes(item, output);
      continue;
    }
    const std::string name = PrecisionGroupOf(item.name);
    const auto [place, is_new] = places.try_emplace(name, plan.units.size());
    if (is_new) {
      plan.units.push_back({.name = name, .layer = item.layer, .options = {}});
      for (const Precision& p : settings.mix.options) plan.units.back().options.push_back({.precision = p});
      fits[name].resize(settings.mix.options.size(), true);
    }
    PrecisionGroup& unit = plan.units[place->second];
    unit.weights += item.elements();
    for (size_t o = 0; o < unit.options.size(); ++o) {
      const std::optional<MixOption> of_item = OptionOf(item, unit.options[o].precision);
      if (!of_item) {
        fits[name][o] = false;
        continue;
      }
      MixOption& sum = unit.options[o];
      sum.bytes += of_item->bytes;
      sum.header_bytes += of_item->header_bytes;
      if (item.layer >= spec.layers) continue;  // MTP modules lose nothing
      sum.loss += NominalError(sum.precision) * static_cast<double>(item.elements());
    }
  }
  for (PrecisionGroup& unit : plan.units) {
    std::vector<MixOption> left;
    for (size_t o = 0; o < unit.options.size(); ++o) {
      if (fits[unit.name][o]) left.push_back(unit.options[o]);
    }
    unit.options = std::move(left);
  }
  // Adds the overhead of each file: its metadata and the padding of its header. The number of files is
  // bounded as if each were half full.
  int64_t most = plan.fixed.bytes;
  for (const PrecisionGroup& unit : plan.units) {
    int64_t of_unit = 0;
    for (const MixOption& option : unit.options) of_unit = std::max(of_unit, option.bytes);
    most += of_unit;
  }
  OutputSettings longest = settings;
  longest.analysis_xxh3 = std::string(16, '0');
  const int64_t metadata = std::ssize(ordered_json(longest.Json().dump()).dump()) + 64 + kDataAlignment;
  plan.fixed.bytes += (2 * most / settings.shard_bytes + 1) * metadata;
  return plan;
}

StatusOr<OutputPlan> PlanOutput(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                                const OutputSettings& settings) {
  ASSIGN_OR_RETURN(Chooser chooser, Chooser::Create(settings));
  OutputPlan plan;
  std::set<std::string> ignore = {"lm_head"};
  std::map<std::string, std::set<std::string>> units;  // of a mix, by the name of the precision
  for (size_t i = 0; i < items.size(); ++i) {
    ASSIGN_OR_RETURN(OutputItem output, chooser.Choose(items[i], forms[i]));
    if (i > 0) {
      RETURN_IF_ERROR(Chooser::CheckFused(items[i - 1], plan.items.back().form == Form::kRounded, items[i],
                                          output.form == Form::kRounded));
    }
    const bool is_static = output.form == Form::kRounded && settings.InputScale(items[i].name) > 0;
    if (settings.analyze.static_activations && output.form == Form::kRounded && !is_static) {
      plan.dynamic.push_back(items[i].name);
    }
    if (settings.mix.wanted() && chooser.IsMixed(items[i])) {
      units[output.precision.Name()].insert(PrecisionGroupOf(items[i].name));
    }
    const char* pattern = items[i].linear && !items[i].roundable ? DefaultPattern(items[i].name) : nullptr;
    if (pattern != nullptr) ignore.insert(pattern);
    plan.items.push_back(std::move(output));
  }
  RETURN_IF_ERROR(chooser.CheckRulesUsed());
  for (const KeepRule& rule : settings.keep) ignore.insert(PatternOf(rule));
  for (const Precision& precision : settings.mix.options) {
    const std::set<std::string>& named = units[precision.Name()];
    std::vector<std::string> patterns = MixPatterns(std::vector<std::string>(named.begin(), named.end()));
    if (precision.kept()) {
      ignore.insert(patterns.begin(), patterns.end());
    } else if (!patterns.empty()) {
      plan.mixed.push_back({precision, std::move(patterns)});
    }
  }
  plan.ignore.assign(ignore.begin(), ignore.end());

  plan.shards = CutShards(plan.items, settings.shard_bytes);
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    Shard& shard = plan.shards[s];
    shard.header_bytes = static_cast<int64_t>(plan.Header(shard, items, settings).size());
    int64_t offset = shard.header_bytes;
    VisitInFileOrder(plan.items, shard, [&](size_t i, size_t t) {
      OutputTensor& tensor = plan.items[i].tensors[t];
      plan.items[i].shard = static_cast<int>(s);
      tensor.offset = offset;
      offset += tensor.stored.bytes();
    });
    shard.bytes = offset;
    plan.bytes += offset;
  }
  return plan;
}

}  // namespace moesaic::quantizer
