#include "quantizer/mixed/mix_measurer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>

#include "kernels/exec_context.h"
#include "models/weight_decl.h"
#include "quantizer/calibrate/calibration_report.h"
#include "quantizer/format/runtime_matrix.h"
#include "quantizer/format/weight_rows.h"
#include "quantizer/mixed/mix_state.h"
#include "quantizer/mixed/variant_losses.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::Checkpoint;
using nlohmann::ordered_json;
using tensor::DType;

constexpr double kInfiniteSum = std::numeric_limits<double>::infinity();
// Ratio of the squared errors of 11 and of 8 significant bits.
constexpr double kHalfOfBF16 = 1.0 / 64;

template <typename T>
std::vector<T> NumbersIn(const ordered_json& json, const char* key) {
  std::vector<T> numbers;
  for (const ordered_json& number : json.value(key, ordered_json::array())) {
    numbers.push_back(number.is_number() ? number.get<T>() : T{});
  }
  return numbers;
}

class Measurer : public MixMeasurer {
 public:
  Measurer(const kernels::ExecContext& ctx, const Checkpoint& source, const models::DecoderSpec& spec,
           const OutputSettings& settings, const std::vector<ModelItem>& items, const MixPass& pass,
           std::vector<PrecisionGroup> units, CalibrationStream& stream)
      : ctx_(ctx),
        source_(source),
        spec_(spec),
        settings_(settings),
        pass_(pass),
        exact_(MixExactType(settings.mix)),
        units_(std::move(units)),
        variants_(units_.size()),
        stream_(stream) {
    for (size_t u = 0; u < units_.size(); ++u) unit_of_[units_[u].name] = u;
    for (const ModelItem& item : items) {
      if (item.linear) rows_of_[item.name] = static_cast<int>(item.shape[0]);
    }
  }

  StatusOr<Mix> Finish() override {
    ASSIGN_OR_RETURN(const std::vector<double> losses,
                     VariantLosses(ctx_, source_, spec_, exact_, VariantLossRows(spec_), stream_));
    for (size_t u = 0; u < units_.size(); ++u) {
      PrecisionGroup& unit = units_[u];
      unit.measured = unit.layer < spec_.layers;
      for (size_t o = 0; o < unit.options.size(); ++o) {
        MixOption& option = unit.options[o];
        const int variant = unit.measured ? variants_[u].options[o] : 0;
        option.loss = losses[variant];
        option.flips = FlipsOf(variant);
        if (!unit.measured || !option.precision.kept() || option.precision.dtype != DType::kF16) continue;
        option.largest = variants_[u].largest;
        option.loss =
            option.overflows() ? kInfiniteSum : option.loss + kHalfOfBF16 * losses[variants_[u].bf16];
      }
      // The fp16 magnitudes of a module that was not walked are unknown.
      if (!unit.measured && unit.options.size() > 1) {
        std::erase_if(unit.options, [](const MixOption& option) {
          return option.precision.kept() && option.precision.dtype == DType::kF16;
        });
      }
    }
    for (size_t r = 0; r < routers_.size(); ++r) {
      routers_[r].loss = losses[router_variants_[r]];
      routers_[r].flips = FlipsOf(router_variants_[r]);
    }
    return Mix{
        .units = std::move(units_), .routers = std::move(routers_), .tokens = stream_.variant_tokens()};
  }

  ordered_json Json() const override {
    ordered_json units = ordered_json::array();
    for (size_t u = 0; u < units_.size(); ++u) {
      units.push_back({{"name", units_[u].name},
                       {"options", variants_[u].options},
                       {"bf16", variants_[u].bf16},
                       {"largest", InfiniteJson(variants_[u].largest)}});
    }
    return {{"variants", stream_.variants()},
            {"units", std::move(units)},
            {"found", Mix{.units = {}, .routers = routers_}.Json()},
            {"router_variants", router_variants_},
            {"flips", flips_},
            {"routed", routed_}};
  }

  Status Restore(const ordered_json& json) override {
    const ordered_json units = json.value("units", ordered_json::array());
    for (size_t u = 0; u < std::max(units.size(), units_.size()); ++u) {
      if (u >= units_.size()) return OtherGroups(TextIn(units[u], "name"));
      if (u >= units.size() || TextIn(units[u], "name") != units_[u].name) return OtherGroups(units_[u].name);
      variants_[u] = {.options = NumbersIn<int>(units[u], "options"),
                      .bf16 = static_cast<int>(NumberIn(units[u], "bf16")),
                      .largest = static_cast<float>(InfiniteIn(units[u], "largest"))};
      const size_t variants = variants_[u].options.size();  // 0 if the unit's layer was not walked yet
      if (variants != 0 && variants != units_[u].options.size()) return OtherGroups(units_[u].name);
    }
    ASSIGN_OR_RETURN(Mix found, Mix::FromJson(json.value("found", ordered_json::object())));
    routers_ = std::move(found.routers);
    router_variants_ = NumbersIn<int>(json, "router_variants");
    flips_ = NumbersIn<int64_t>(json, "flips");
    routed_ = NumbersIn<int64_t>(json, "routed");
    const auto variants = static_cast<int64_t>(NumberIn(json, "variants"));
    if (variants > pass_.variants) return OtherGroups("all variants");
    while (stream_.variants() < variants) stream_.AddVariant();
    return OkStatus();
  }

 private:
  struct Variants {
    std::vector<int> options;  // [options] variant of each; 0: the first variant
    int bf16 = 0;
    float largest = 0;  // largest magnitude among inputs and outputs
  };

  StatusOr<std::vector<OwnedMatrix>> Visit(const LinearGroup& group) override {
    std::vector<OwnedMatrix> matrices;
    for (const std::string& module : group.modules) {
      ASSIGN_OR_RETURN(RuntimeMatrix kept,
                       RuntimeMatrix::OfKept(exact_, rows_of_.at(module), group.inputs.k));
      RETURN_IF_ERROR(kept.ReadKept(*ctx_.pool, source_, module));
      matrices.push_back(kept.Take());
      source_.ForgetMaps();
    }
    return matrices;
  }

  StatusOr<std::vector<VariantMatrix>> VisitVariants(const LinearGroup& group,
                                                     std::span<const OwnedMatrix> matrices) override {
    std::vector<VariantMatrix> variants;
    std::map<size_t, std::vector<size_t>> modules;  // linears by unit
    for (size_t m = 0; m < group.modules.size(); ++m) {
      const auto found = unit_of_.find(PrecisionGroupOf(group.modules[m]));
      if (found != unit_of_.end()) modules[found->second].push_back(m);
    }
    for (const auto& [unit, of_unit] : modules) {
      if (variants_[unit].options.empty()) AddVariants(unit);
      if (settings_.mix.Has(DType::kF16)) SeeMagnitudes(group, matrices, of_unit, &variants_[unit].largest);
      float largest = 0;  // maximum over linears that share an NVFP4 scale
      for (const size_t m : of_unit) {
        if (!WantsLargest(units_[unit])) break;
        ASSIGN_OR_RETURN(const float of_module,
                         LargestOf(group.modules[m], rows_of_.at(group.modules[m]), group.inputs.k));
        largest = std::max(largest, of_module);
      }
      for (const size_t m : of_unit) {
        RETURN_IF_ERROR(AddMatrices(unit, group.modules[m], m, group.inputs.k, largest, &variants));
      }
    }
    return variants;
  }

  StatusOr<std::vector<VariantMatrix>> VisitRouter(int layer) override {
    if (layer >= pass_.end) return std::vector<VariantMatrix>();
    for (const char* kind : {"mlp.experts", "mlp.shared_experts"}) {
      const auto found = unit_of_.find(models::LayerPrefix(layer) + kind);
      if (found != unit_of_.end()) AddVariants(found->second);
    }
    const std::string name = models::LayerPrefix(layer) + "mlp.gate";
    const int n = spec_.moe.experts, k = spec_.hidden;
    ASSIGN_OR_RETURN(const std::vector<float> rows, ReadRows(ctx_, source_, name, n, k, 0, n));
    ASSIGN_OR_RETURN(const checkpoint::LinearSource stored, source_.FindLinear(name, n, k));
    std::vector<VariantMatrix> variants;
    for (const Precision& precision : settings_.Roundings()) {
      RETURN_IF_ERROR(stream_.CheckWatch());
      const Grid grid = precision.grid();
      if (!CheckGrid(grid, k).ok()) continue;
      ASSIGN_OR_RETURN(
          const QuantizedMatrix rounded,
          RoundToNearest(ctx_, grid, rows.data(), n, k, {.by_error = settings_.search, .importance = {}}));
      std::vector<float> values(rows.size());
      Dequantize(rounded, 0, n, values.data());
      ASSIGN_OR_RETURN(RuntimeMatrix packed, RuntimeMatrix::OfKept(DType::kF32, n, k));
      packed.AddKept(*ctx_.pool, 0, n, values.data());
      variants.push_back({stream_.AddVariant(), 0, packed.Take()});
      RouterFinding& finding = routers_.emplace_back();
      finding.layer = layer;
      finding.precision = precision;
      finding.saved = static_cast<int64_t>(stored.weight->bytes.size());
      for (const StoredTensor& tensor : TensorsOf(grid, n, k)) finding.saved -= tensor.bytes();
      router_variants_.push_back(variants.back().variant);
    }
    source_.ForgetMaps();
    return variants;
  }

  Status OnRouting(int, std::span<const int64_t>) override { return OkStatus(); }

  void OnRoutes(int, int64_t first, int rows, int top_k, const int32_t* ids) override {
    const int64_t tokens = stream_.variant_tokens();
    flips_.resize(static_cast<size_t>(stream_.variants()));
    routed_.resize(flips_.size());
    first_routes_.resize(static_cast<size_t>(tokens * top_k));
    std::vector<int32_t> mine(static_cast<size_t>(top_k));
    for (int r = 0; r < rows; ++r) {
      const int64_t variant = (first + r) / tokens, token = (first + r) % tokens;
      mine.assign(ids + int64_t{r} * top_k, ids + int64_t{r + 1} * top_k);
      std::ranges::sort(mine);
      int32_t* exact = first_routes_.data() + token * top_k;
      if (variant == 0) std::ranges::copy(mine, exact);
      flips_[variant] += std::ranges::equal(mine, std::span(exact, static_cast<size_t>(top_k))) ? 0 : 1;
      ++routed_[variant];
    }
  }

  double FlipsOf(int variant) const {
    if (static_cast<size_t>(variant) >= routed_.size() || routed_[variant] == 0) return 0;
    return static_cast<double>(flips_[variant]) / static_cast<double>(routed_[variant]);
  }

  void AddVariants(size_t unit) {
    Variants& variants = variants_[unit];
    for (const MixOption& option : units_[unit].options) {
      const bool own = NeedsVariant(option.precision, exact_);
      variants.options.push_back(own ? stream_.AddVariant() : 0);
      if (option.precision.kept() && option.precision.dtype == DType::kBF16)
        variants.bf16 = variants.options.back();
    }
    if (HalfAlone(settings_.mix)) variants.bf16 = stream_.AddVariant();
  }

  static bool WantsLargest(const PrecisionGroup& unit) {
    return std::ranges::any_of(unit.options,
                               [](const MixOption& o) { return o.precision.is(Scheme::kNvfp4); });
  }

  // Adds matrices for all variants of a unit that replace one of its modules.
  Status AddMatrices(size_t unit, const std::string& module, size_t place, int k, float largest,
                     std::vector<VariantMatrix>* to) {
    const int n = rows_of_.at(module);
    std::vector<std::pair<int, Precision>> made;
    for (size_t o = 0; o < units_[unit].options.size(); ++o) {
      const int variant = variants_[unit].options[o];
      if (variant > 0) made.emplace_back(variant, units_[unit].options[o].precision);
    }
    if (HalfAlone(settings_.mix)) made.emplace_back(variants_[unit].bf16, Precision{});
    std::vector<RuntimeMatrix> matrices;
    for (const auto& [variant, precision] : made) {
      ASSIGN_OR_RETURN(
          RuntimeMatrix matrix,
          precision.kept()
              ? RuntimeMatrix::OfKept(precision.dtype == DType::kBF16 ? DType::kBF16 : DType::kF32, n, k)
              : RuntimeMatrix::OfRounded(precision.grid(), n, k));
      matrices.push_back(std::move(matrix));
    }
    const auto step = static_cast<int>(std::max<int64_t>(kMixSlabValues / k / kRowStep * kRowStep, kRowStep));
    for (int first = 0; first < n; first += step) {
      RETURN_IF_ERROR(stream_.CheckWatch());
      const int count = std::min(step, n - first);
      ASSIGN_OR_RETURN(std::vector<float> rows, ReadRows(ctx_, source_, module, n, k, first, count));
      for (size_t i = 0; i < made.size(); ++i) {
        if (made[i].second.kept()) {
          AddKeptRows(made[i].second.dtype, first, count, rows, &matrices[i], &variants_[unit].largest);
          continue;
        }
        RETURN_IF_ERROR(AddRounded(
            ctx_, made[i].second, n, k, first, count, rows.data(),
            {.by_error = settings_.search,
             .importance = {},
             .global_scale =
                 made[i].second.is(Scheme::kNvfp4) ? Nvfp4GlobalScale(largest, settings_.search) : 0},
            &matrices[i]));
      }
    }
    for (size_t i = 0; i < made.size(); ++i) to->push_back({made[i].first, place, matrices[i].Take()});
    return OkStatus();
  }

  void AddKeptRows(DType dtype, int first, int count, const std::vector<float>& rows, RuntimeMatrix* matrix,
                   float* largest) const {
    if (dtype != DType::kF16) {
      matrix->AddKept(*ctx_.pool, first, count, rows.data());
      return;
    }
    const auto k = std::ssize(rows) / count;
    *largest = std::max(*largest, LargestIn(rows.data(), count, static_cast<int>(k), k));
    std::vector<float> halves(rows.size());
    ctx_.pool->Run(count, [&](int64_t r, int) {
      const float* row = rows.data() + r * k;
      for (int64_t i = 0; i < k; ++i) {
        // Infinite weights would produce NaN; the unit has an infinite loss already.
        halves[r * k + i] =
            std::fabs(row[i]) > kLargestHalf ? 0 : tensor::HalfToFloat(tensor::FloatToHalf(row[i]));
      }
    });
    matrix->AddKept(*ctx_.pool, first, count, halves.data());
  }

  StatusOr<float> LargestOf(const std::string& module, int n, int k) const {
    const auto step = static_cast<int>(std::max<int64_t>(kMixSlabValues / k, 1));
    float largest = 0;
    for (int first = 0; first < n; first += step) {
      RETURN_IF_ERROR(stream_.CheckWatch());
      const int count = std::min(step, n - first);
      ASSIGN_OR_RETURN(const std::vector<float> rows, ReadRows(ctx_, source_, module, n, k, first, count));
      ASSIGN_OR_RETURN(const float of_rows, LargestMagnitude(ctx_, rows.data(), count, k));
      largest = std::max(largest, of_rows);
    }
    return largest;
  }

  void SeeMagnitudes(const LinearGroup& group, std::span<const OwnedMatrix> matrices,
                     std::span<const size_t> modules, float* largest) {
    const int k = group.inputs.k;
    group.inputs.visit([&](const TokenRows& rows) {
      layers::ScratchScope scratch(ctx_);
      *largest = std::max(*largest, LargestIn(rows.f32, rows.count, k, rows.stride));
      for (const size_t m : modules) {
        const int n = matrices[m].matrix.n();
        auto* out = scratch.Take<float>(int64_t{rows.count} * n);
        layers::Apply(ctx_, {matrices[m].matrix}, rows.f32, rows.stride, rows.count, out, n);
        *largest = std::max(*largest, LargestIn(out, rows.count, n, n));
      }
    });
  }

  // Returns the largest magnitude; a NaN counts as infinite.
  float LargestIn(const float* rows, int count, int n, int64_t stride) const {
    return std::bit_cast<float>(std::min(LargestBits(ctx_, rows, count, n, stride),
                                         std::bit_cast<uint32_t>(std::numeric_limits<float>::infinity())));
  }

  const kernels::ExecContext& ctx_;
  const Checkpoint& source_;
  const models::DecoderSpec& spec_;
  const OutputSettings& settings_;
  const MixPass pass_;
  const DType exact_;
  std::vector<PrecisionGroup> units_;
  std::vector<Variants> variants_;  // [units]
  std::map<std::string, size_t> unit_of_;
  std::map<std::string, int> rows_of_;  // number of outputs by linear
  CalibrationStream& stream_;
  std::vector<RouterFinding> routers_;
  std::vector<int> router_variants_;     // [routers]
  std::vector<int32_t> first_routes_;    // of the layer, on the first variant, sorted: [tokens, top_k]
  std::vector<int64_t> flips_, routed_;  // [variants]
};

}  // namespace

std::unique_ptr<MixMeasurer> MixMeasurer::Create(const kernels::ExecContext& ctx, const Checkpoint& source,
                                                 const models::DecoderSpec& spec,
                                                 const OutputSettings& settings,
                                                 const std::vector<ModelItem>& items, const MixPass& pass,
                                                 std::vector<PrecisionGroup> units,
                                                 CalibrationStream& stream) {
  return std::make_unique<Measurer>(ctx, source, spec, settings, items, pass, std::move(units), stream);
}

}  // namespace moesaic::quantizer
