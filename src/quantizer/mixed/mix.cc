#include "quantizer/mixed/mix.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "models/weight_decl.h"
#include "quantizer/calibrate/calibration_report.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;
using tensor::DType;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct UnitKind {
  const char* name;     // name after the layer's prefix
  const char* pattern;  // pattern of its modules, after the layer's prefix
};
constexpr UnitKind kKinds[] = {
    {"mlp.experts", R"(mlp\.experts\.\d+\.(gate|up|down)_proj$)"},
    {"mlp.shared_experts", R"(mlp\.shared_experts\.(gate|up|down)_proj$)"},
    {"mlp", R"(mlp\.(gate|up|down)_proj$)"},
    {"self_attn.qkv_proj", R"(self_attn\.(q|k|v)_proj$)"},
    {"self_attn.qkv_a_proj", R"(self_attn\.(q_a_proj|kv_a_proj_with_mqa)$)"},
};

// Returns "mlp.experts" of "model.layers.3.mlp.experts".
std::string KindOfGroup(const std::string& unit) {
  return unit.substr(models::LayerPrefix(LayerOf(unit)).size());
}

constexpr std::pair<MixBudget::Kind, const char*> kBudgets[] = {
    {MixBudget::Kind::kBitsPerWeight, "bits_per_weight"},
    {MixBudget::Kind::kBytes, "bytes"},
};

// Returns the cost of an option under the budget.
KnapsackOption Cost(const MixOption& option, const MixBudget& budget) {
  const bool files = budget.kind == MixBudget::Kind::kBytes;
  return {.name = option.precision.Name(),
          .loss = option.loss,
          .bytes = option.bytes + (files ? option.header_bytes : 0)};
}

double BytesOf(const MixOption& option, const MixBudget& budget) {
  return static_cast<double>(Cost(option, budget).bytes);
}

std::vector<std::string> NamesOf(const MixSettings& settings) {
  std::vector<std::string> names;
  for (const Precision& option : settings.options) names.push_back(option.Name());
  return names;
}

Status RefuseBudget(const MixSettings& settings, double fixed, double least, double weights) {
  const MixBudget& budget = settings.budget;
  const std::vector<std::string> names = NamesOf(settings);
  if (budget.kind == MixBudget::Kind::kBitsPerWeight) {
    return ResourceExhausted(
        "{} {} is too little: the cheapest mix of {} takes {:.4f} bits per weight ({:.0f} bytes)",
        budget.Flag(), budget.amount, fmt::join(names, ", "), 8 * least / weights, least);
  }
  return ResourceExhausted(
      "{} {:.0f} is too little: the cheapest mix of {} takes {:.0f} bytes, {:.0f} of them for "
      "tensors that are kept",
      budget.Flag(), budget.amount, fmt::join(names, ", "), fixed + least, fixed);
}

// Returns the price of a byte: the steepest decrease of loss that one option of one group offers for more
// bytes of the budget's kind.
double PriceOf(const Mix& mix, const MixBudget& budget) {
  double price = 0;
  for (const PrecisionGroup& unit : mix.units) {
    const MixOption& now = unit.options[unit.chosen];
    for (const MixOption& other : unit.options) {
      const double more = BytesOf(other, budget) - BytesOf(now, budget);
      if (more <= 0 || other.loss >= now.loss) continue;
      price = std::max(price, (now.loss - other.loss) / more);
    }
  }
  return price;
}

}  // namespace

ordered_json InfiniteJson(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr);
}

double InfiniteIn(const ordered_json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_null() ? kInfinity : NumberIn(json, key);
}

std::string MixBudget::Flag() const {
  return kind == Kind::kBitsPerWeight ? "--bits-per-weight" : "--budget";
}

bool MixSettings::Has(DType kept) const {
  return std::ranges::any_of(options, [&](const Precision& p) { return p.kept() && p.dtype == kept; });
}

ordered_json MixSettings::Json() const {
  ordered_json json;
  json["options"] = NamesOf(*this);
  for (const auto& [unit, key] : kBudgets) {
    if (unit == budget.kind) json[key] = budget.amount;
  }
  json["tokens"] = tokens;
  return json;
}

StatusOr<MixSettings> MixSettings::FromJson(const nlohmann::json& json) {
  MixSettings settings;
  const auto refuse = [&] { return DataLoss("\"mix\" has an unknown form: {}", json.dump()); };
  const auto options = json.find("options"), tokens = json.find("tokens");
  if (options == json.end() || !options->is_array() || tokens == json.end() || !tokens->is_number_integer()) {
    return refuse();
  }
  for (const nlohmann::json& name : *options) {
    if (!name.is_string()) return refuse();
    ASSIGN_OR_RETURN(Precision precision, ParsePrecision(name.get<std::string>()));
    settings.options.push_back(precision);
  }
  settings.tokens = tokens->get<int64_t>();
  for (const auto& [unit, key] : kBudgets) {
    const auto amount = json.find(key);
    if (amount == json.end()) continue;
    if (!amount->is_number()) return refuse();
    settings.budget = {unit, amount->get<double>()};
  }
  return settings.options.empty() || settings.budget.amount <= 0 ? refuse() : StatusOr<MixSettings>(settings);
}

std::map<std::string, Precision> Mix::Choice() const {
  std::map<std::string, Precision> choice;
  for (const PrecisionGroup& unit : units) {
    if (unit.chosen >= 0) choice.emplace(unit.name, unit.options[unit.chosen].precision);
  }
  return choice;
}

ordered_json Mix::Json() const {
  ordered_json json = {
      {"tokens", tokens}, {"predicted_loss", loss}, {"bits_per_weight", bits},       {"bytes", bytes},
      {"exact", exact},   {"price", price},         {"units", ordered_json::array()}};
  for (const PrecisionGroup& unit : units) {
    ordered_json to = {{"name", unit.name},
                       {"layer", unit.layer},
                       {"weights", unit.weights},
                       {"measured", unit.measured},
                       {"chosen", unit.chosen < 0 ? "" : unit.options[unit.chosen].precision.Name()}};
    for (const MixOption& option : unit.options) {
      to["options"].push_back({{"precision", option.precision.Name()},
                               {"bytes", option.bytes},
                               {"loss", InfiniteJson(option.loss)},
                               {"flips", option.flips}});
      if (option.largest > 0) to["options"].back()["largest"] = InfiniteJson(option.largest);
    }
    json["units"].push_back(std::move(to));
  }
  for (const RouterFinding& router : routers) {
    json["routers"].push_back({{"layer", router.layer},
                               {"precision", router.precision.Name()},
                               {"loss", InfiniteJson(router.loss)},
                               {"flips", router.flips},
                               {"saved_bytes", router.saved},
                               {"kept", router.kept}});
  }
  return json;
}

StatusOr<Mix> Mix::FromJson(const ordered_json& json) {
  Mix mix;
  mix.tokens = static_cast<int64_t>(NumberIn(json, "tokens"));
  mix.loss = NumberIn(json, "predicted_loss");
  mix.bits = NumberIn(json, "bits_per_weight");
  mix.bytes = static_cast<int64_t>(NumberIn(json, "bytes"));
  mix.price = NumberIn(json, "price");
  mix.exact = BoolIn(json, "exact", false);
  for (const ordered_json& from : json.value("units", ordered_json::array())) {
    PrecisionGroup unit{.name = TextIn(from, "name"),
                        .layer = static_cast<int>(NumberIn(from, "layer")),
                        .weights = static_cast<int64_t>(NumberIn(from, "weights")),
                        .measured = BoolIn(from, "measured", false),
                        .options = {}};
    const std::string chosen = TextIn(from, "chosen");
    for (const ordered_json& option : from.value("options", ordered_json::array())) {
      ASSIGN_OR_RETURN(const Precision precision, ParsePrecision(TextIn(option, "precision")));
      if (precision.Name() == chosen) unit.chosen = static_cast<int>(unit.options.size());
      unit.options.push_back({.precision = precision,
                              .bytes = static_cast<int64_t>(NumberIn(option, "bytes")),
                              .loss = InfiniteIn(option, "loss"),
                              .flips = NumberIn(option, "flips"),
                              .largest = InfiniteIn(option, "largest")});
    }
    mix.units.push_back(std::move(unit));
  }
  for (const ordered_json& from : json.value("routers", ordered_json::array())) {
    ASSIGN_OR_RETURN(const Precision precision, ParsePrecision(TextIn(from, "precision")));
    mix.routers.push_back({.layer = static_cast<int>(NumberIn(from, "layer")),
                           .precision = precision,
                           .loss = InfiniteIn(from, "loss"),
                           .flips = NumberIn(from, "flips"),
                           .saved = static_cast<int64_t>(NumberIn(from, "saved_bytes")),
                           .kept = BoolIn(from, "kept", true)});
  }
  return mix;
}

std::string PrecisionGroupOf(const std::string& module) {
  const std::string prefix = models::LayerPrefix(LayerOf(module));
  const std::string rest = module.substr(std::min(prefix.size(), module.size()));
  if (rest.starts_with("mlp.experts.")) return prefix + "mlp.experts";
  if (rest.starts_with("mlp.shared_experts.")) return prefix + "mlp.shared_experts";
  if (rest.starts_with("mlp.")) return prefix + "mlp";
  if (rest == "self_attn.q_a_proj" || rest == "self_attn.kv_a_proj_with_mqa")
    return prefix + "self_attn.qkv_a_proj";
  if (rest == "self_attn.q_proj" || rest == "self_attn.k_proj" || rest == "self_attn.v_proj") {
    return prefix + "self_attn.qkv_proj";
  }
  return module;
}

std::vector<std::string> MixPatterns(std::span<const std::string> units) {
  std::map<std::string, std::vector<int>> layers;
  for (const std::string& unit : units) layers[KindOfGroup(unit)].push_back(LayerOf(unit));
  std::vector<std::string> patterns;
  for (auto& [kind, of_kind] : layers) {
    std::ranges::sort(of_kind);
    const auto known = std::ranges::find(kKinds, kind, [](const UnitKind& k) { return std::string(k.name); });
    std::string modules = known != std::end(kKinds) ? known->pattern : kind + "$";
    if (known == std::end(kKinds)) modules.replace(kind.find('.'), 1, "\\.");
    patterns.push_back(fmt::format("re:model\\.layers\\.({})\\.{}", fmt::join(of_kind, "|"), modules));
  }
  return patterns;
}

double NominalError(const Precision& precision) {
  if (precision.kept()) {
    // A uniform error of at most half a step, for 8, 11 and 24 significant bits.
    return precision.dtype == DType::kF32 ? 0x1p-50 : precision.dtype == DType::kF16 ? 0x1p-24 : 0x1p-18;
  }
  switch (*precision.scheme) {  // measured by `moesaic verify` on trained weights
    case Scheme::kW8A8:
      return 1e-4;
    case Scheme::kW8A16:
      return precision.group_size == 0 ? 6e-5 : precision.group_size <= 32 ? 3e-5 : 4e-5;
    case Scheme::kW4A16:
      return precision.group_size <= 32 ? 0.009 : precision.group_size <= 64 ? 0.011 : 0.013;
    case Scheme::kNvfp4:
      return 0.009;
    case Scheme::kFp8:
      break;
  }
  return 7e-4;
}

Status ChooseMix(const MixSettings& settings, const MixFixed& fixed, Mix* mix) {
  const MixBudget& budget = settings.budget;
  std::vector<KnapsackGroup> groups;
  std::vector<std::vector<int>> places;  // options of a group, as indices of the unit's options
  double weights = 0, least = 0;
  for (const PrecisionGroup& unit : mix->units) {
    KnapsackGroup group{unit.name, {}};
    std::vector<int> of_unit;
    double cheapest = kInfinity;
    for (size_t o = 0; o < unit.options.size(); ++o) {
      if (std::isfinite(unit.options[o].loss)) of_unit.push_back(static_cast<int>(o));
    }
    // MTP modules have no loss. Of such ties the first is taken.
    std::ranges::stable_sort(of_unit, {}, [&](int o) { return unit.options[o].bytes; });
    for (const int o : of_unit) {
      group.options.push_back(Cost(unit.options[o], budget));
      cheapest = std::min(cheapest, BytesOf(unit.options[o], budget));
    }
    if (group.options.empty()) {
      const std::vector<std::string> names = NamesOf(settings);
      return InvalidArgument("{}: none of {} is possible ({}); add bf16 or fp32 to --mix", unit.name,
                             fmt::join(names, ", "),
                             unit.options.empty() ? "none fits its shape"
                             : std::ranges::all_of(unit.options, &MixOption::overflows)
                                 ? "fp16 overflows"
                                 : "the model's predictions are not finite");
    }
    weights += static_cast<double>(unit.weights);
    least += cheapest;
    groups.push_back(std::move(group));
    places.push_back(std::move(of_unit));
  }
  if (groups.empty()) return InvalidArgument("--mix: the model has no linear whose precision can be chosen");
  const bool bits = budget.kind == MixBudget::Kind::kBitsPerWeight;
  const double outside = bits ? 0 : static_cast<double>(fixed.bytes);
  const double left = bits ? std::floor(budget.amount * weights / 8) : budget.amount - outside;
  if (least > left) return RefuseBudget(settings, outside, least, weights);
  ASSIGN_OR_RETURN(const KnapsackChoice choice, SolveKnapsack(groups, left));
  mix->loss = 0;
  mix->bytes = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    PrecisionGroup& unit = mix->units[g];
    unit.chosen = places[g][choice.options[g]];
    mix->loss += unit.options[unit.chosen].loss;
    mix->bytes += unit.options[unit.chosen].bytes;
  }
  mix->bits = 8 * static_cast<double>(mix->bytes) / weights;
  mix->exact = choice.exact;
  mix->price = PriceOf(*mix, budget);
  for (RouterFinding& router : mix->routers) {
    router.kept = router.loss > mix->price * static_cast<double>(router.saved);
  }
  return OkStatus();
}

}  // namespace moesaic::quantizer
