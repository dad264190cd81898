#include "quantizer/calibrate/analysis.h"

#include <algorithm>
#include <filesystem>

#include "base/round.h"
#include "kernels/exec_context.h"
#include "models/weight_decl.h"
#include "quantizer/calibrate/activation.h"
#include "quantizer/calibrate/calibration_report.h"
#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/calibrate/smooth.h"
#include "quantizer/format/runtime_matrix.h"
#include "quantizer/io/hidden_state.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::Checkpoint;

// Tokens whose outputs are compared.
constexpr int64_t kSampleTokens = 256;
// Sampled outputs of a matrix, and sampled experts of a layer.
constexpr int kSampleRows = 256, kSampleExperts = 8;
// With fewer tokens of its own, an expert's activations are taken from tokens of the whole layer.
constexpr int64_t kFewTokens = 256;

// Evenly spaced rows of a matrix.
struct Rows {
  std::vector<float> values;
  int n = 0;
  WeightRows view() const { return {values.data(), n}; }
};

StatusOr<Rows> ReadSample(const Checkpoint& source, const std::string& module, int n, int k) {
  ASSIGN_OR_RETURN(const checkpoint::LinearSource linear, source.FindLinear(module, n, k));
  Rows rows{{}, std::min(n, kSampleRows)};
  rows.values.resize(static_cast<size_t>(rows.n) * k);
  for (int i = 0; i < rows.n; ++i) {
    const std::span<float> out(rows.values.data() + int64_t{i} * k, static_cast<size_t>(k));
    RETURN_IF_ERROR(source.ReadLinearRows(linear, int64_t{i} * n / rows.n, 1, out));
  }
  return rows;
}

// Statistics and a sample of the inputs of linears.
struct Seen {
  ActivationRange range;
  std::vector<float> tokens;  // [count, k]
  int count = 0;

  TokenSample sample(int k) const { return {tokens.data(), count, k}; }
};

class Analyst : public LayerVisitor {
 public:
  Analyst(const kernels::ExecContext& ctx, const Checkpoint& source, const models::DecoderSpec& spec,
          const AnalysisSettings& settings, const Grid& grid, const AnalyzedLinears& linears,
          const AnalysisProgress& progress, const CalibrationStream& stream)
      : ctx_(ctx),
        source_(source),
        spec_(spec),
        settings_(settings),
        grid_(grid),
        linears_(linears),
        progress_(progress),
        stream_(stream) {
    analysis_.folding = Folding(spec.sandwich_norm);
  }

  /// Decisions for the layers so far.
  const Analysis& analysis() const { return analysis_; }
  void ResumeFrom(Analysis analysis) { analysis_ = std::move(analysis); }
  Analysis Take() { return std::move(analysis_); }

  Status Tell(int layer) const {
    if (!progress_ || progress_(layer, spec_.layers + spec_.mtp_layers)) return OkStatus();
    return Stopped();
  }

 private:
  StatusOr<std::vector<OwnedMatrix>> Visit(const LinearGroup& group) override {
    RETURN_IF_ERROR(Tell(group.layer));
    // Reads the weights first, because this rejects non-finite ones.
    std::vector<OwnedMatrix> matrices;
    for (const std::string& module : group.modules) {
      const auto n = OutputsOf(module);
      ASSIGN_OR_RETURN(RuntimeMatrix kept, RuntimeMatrix::OfKept(tensor::DType::kBF16, n, group.inputs.k));
      RETURN_IF_ERROR(kept.ReadKept(*ctx_.pool, source_, module));
      matrices.push_back(kept.Take());
      source_.ForgetMaps();
    }
    if (!group.same_layer_inputs) {
      RETURN_IF_ERROR(Look(group, group.modules, UsableInputs(group)));
    } else if (layer_ != group.layer) {  // sampled once for all experts of the layer
      layer_ = group.layer;
      RETURN_IF_ERROR(Look(group, StandingForAll(group), group.layer_inputs));
    }
    if (group.same_layer_inputs && layer_scale_ > 0) Assign(group.modules, layer_scale_);
    return matrices;
  }

  Status OnRouting(int, std::span<const int64_t>) override { return OkStatus(); }

  // Returns the inputs of a linear, or an expert's stand-ins if few tokens reach it.
  static const LinearInputs& UsableInputs(const LinearGroup& group) {
    return group.expert >= 0 && group.inputs.tokens < kFewTokens ? group.layer_inputs : group.inputs;
  }

  // Returns sampled modules of a layer with experts: gate and up of the shared expert and of some others.
  std::vector<std::string> StandingForAll(const LinearGroup& group) const {
    const std::string prefix = models::LayerPrefix(group.layer) + "mlp.";
    std::vector<std::string> owners;
    if (spec_.moe.shared_intermediate > 0) owners.push_back(prefix + "shared_experts.");
    const int step = base::CeilDiv(spec_.moe.experts, kSampleExperts);
    for (int e = 0; e < spec_.moe.experts; e += step)
      owners.push_back(fmt::format("{}experts.{}.", prefix, e));
    std::vector<std::string> modules;
    for (const std::string& owner : owners) {
      modules.push_back(owner + "gate_proj");
      modules.push_back(owner + "up_proj");
    }
    return modules;
  }

  // The linear is part of the walk and therefore among the items.
  int OutputsOf(const std::string& module) const { return linears_.at(module).outputs; }
  bool IsRounded(const std::string& module) const { return linears_.at(module).rounded; }

  Seen See(const LinearInputs& inputs, std::span<const float> divisors) const {
    const int k = inputs.k;
    Seen seen{.range = ActivationRange(k), .tokens = {}};
    const int64_t step = std::max<int64_t>(1, base::CeilDiv(inputs.tokens, kSampleTokens));
    int64_t token = 0;
    inputs.visit([&](const TokenRows& rows) {
      seen.range.Add(ctx_, {rows.f32, rows.count, k}, divisors);
      for (int t = 0; t < rows.count; ++t, ++token) {
        if (token % step != 0) continue;
        for (int j = 0; j < k; ++j) {
          const float value = rows.f32[int64_t{t} * rows.stride + j];
          seen.tokens.push_back(divisors.empty() ? value : value / divisors[j]);
        }
        ++seen.count;
      }
    });
    return seen;
  }

  void Assign(std::span<const std::string> modules, float scale) {
    for (const std::string& module : modules) {
      if (IsRounded(module)) analysis_.input_scales[module] = scale;
    }
  }

  // Decides for the linears that read `inputs`. `modules` is a sample of them.
  Status Look(const LinearGroup& group, const std::vector<std::string>& modules, const LinearInputs& inputs) {
    if (group.same_layer_inputs) layer_scale_ = 0;
    std::vector<Rows> linears;
    for (const std::string& module : modules) {
      if (!IsRounded(module)) continue;
      ASSIGN_OR_RETURN(Rows rows, ReadSample(source_, module, OutputsOf(module), inputs.k));
      linears.push_back(std::move(rows));
    }
    if (linears.empty() || inputs.tokens == 0) return OkStatus();
    AnalysisFinding finding{.name = group.modules.front(), .layer = group.layer};
    finding.tokens = group.inputs.tokens;
    finding.stand_ins = !group.same_layer_inputs && &inputs != &group.inputs;
    Seen seen = See(inputs, {});
    RETURN_IF_ERROR(stream_.watched());  // fails if inputs are missing
    const std::string maker = Folding::MakerOf(group.modules.front(), spec_.sandwich_norm);
    std::vector<float> scales;
    if (settings_.smoothing && !maker.empty()) {
      std::vector<WeightRows> views;
      for (const Rows& rows : linears) views.push_back(rows.view());
      ASSIGN_OR_RETURN(
          Smoothing smoothing,
          SearchSmoothing(
              ctx_, seen.sample(inputs.k), seen.range.largest(), views,
              {.grid = grid_, .static_activations = settings_.static_activations, .powers_of_two = true}));
      finding.alpha = smoothing.alpha;
      finding.loss_before = smoothing.loss_without;
      finding.loss_after = smoothing.loss;
      if (smoothing.alpha > 0) {
        scales = std::move(smoothing.scales);
        for (Rows& rows : linears) MultiplyInputs(ctx_, scales, rows.n, rows.values.data());
        seen = See(inputs, scales);
        RETURN_IF_ERROR(stream_.watched());
      }
    }
    if (settings_.static_activations) {
      RETURN_IF_ERROR(ChooseScale(group, seen, inputs.k, linears, &finding));
    }
    if (!scales.empty()) analysis_.folding.Add(maker, std::move(scales));
    analysis_.findings.push_back(std::move(finding));
    return OkStatus();
  }

  Status ChooseScale(const LinearGroup& group, const Seen& seen, int k, const std::vector<Rows>& linears,
                     AnalysisFinding* finding) {
    std::vector<Rows> rounded;
    std::vector<WeightRows> exact_views, rounded_views;
    for (const Rows& rows : linears) {
      ASSIGN_OR_RETURN(const QuantizedMatrix matrix,
                       RoundToNearest(ctx_, grid_, rows.values.data(), rows.n, k, {}));
      rounded.push_back({std::vector<float>(rows.values.size()), rows.n});
      Dequantize(matrix, 0, rows.n, rounded.back().values.data());
    }
    for (size_t i = 0; i < linears.size(); ++i) {
      exact_views.push_back(linears[i].view());
      rounded_views.push_back(rounded[i].view());
    }
    ActivationChoice best;
    float scale = 0;
    for (const RangeRule rule : {RangeRule::kLargest, RangeRule::kSquaredError}) {
      const float candidate = seen.range.Scale(rule);
      const ActivationChoice choice = ChooseActivations(ctx_, seen.sample(k), exact_views, rounded_views,
                                                        candidate, settings_.static_tolerance);
      if (scale > 0 && choice.static_loss >= best.static_loss) continue;
      best = choice;
      scale = candidate;
    }
    finding->static_loss = best.static_loss;
    finding->dynamic_loss = best.dynamic_loss;
    if (!best.is_static) return OkStatus();
    finding->scale = scale;
    if (group.same_layer_inputs) layer_scale_ = scale;
    Assign(group.modules, scale);
    return OkStatus();
  }

  const kernels::ExecContext& ctx_;
  const Checkpoint& source_;
  const models::DecoderSpec& spec_;
  const AnalysisSettings& settings_;
  const Grid grid_;
  const AnalyzedLinears& linears_;
  const AnalysisProgress& progress_;
  const CalibrationStream& stream_;
  Analysis analysis_;
  int layer_ = -1;         // layer whose experts' shared inputs were sampled
  float layer_scale_ = 0;  // their static scale; 0: dynamic
};

// Saves the progress: the decisions and the hidden states after `layers` layers.
Status SaveWalk(StateStore* store, const Analysis& analysis, int layers, CalibrationStream& stream,
                StateStore::Files* files) {
  const std::string decided = StateFile(kDecidedState, layers);
  RETURN_IF_ERROR(analysis.Save(store->PathOf(decided), ""));
  return store->Save({{"layers", layers}}, {{StateFile(kAnalysisState, layers), stream.values()}}, {decided},
                     files);
}

// Returns the number of layers that an earlier run of the same key has done; 0 without a complete state.
StatusOr<int> RestoreWalk(StateStore* store, const models::DecoderSpec& spec, CalibrationStream& stream,
                          Analyst* analyst, StateStore::Files* files) {
  std::optional<StateStore::Saved> saved = store->Load();
  const int layers = saved ? static_cast<int>(NumberIn(saved->state, "layers")) : 0;
  if (layers > 0 && layers < spec.layers + spec.mtp_layers && saved->key == store->key()) {
    const std::string decided = StateFile(kDecidedState, layers);
    if (store->IsWhole(saved->files, decided) &&
        store->Read(saved->files, StateFile(kAnalysisState, layers), stream.values())) {
      StatusOr<Analysis> found = Analysis::Load(store->PathOf(decided), "", spec.sandwich_norm);
      if (found.ok()) {
        analyst->ResumeFrom(*std::move(found));
        *files = std::move(saved->files);
        return layers;
      }
    }
  }
  RETURN_IF_ERROR(RemoveStates(store->folder(), States::kAnalysis));
  return 0;
}

}  // namespace

StatusOr<Analysis> Analyze(const kernels::ExecContext& ctx, const Checkpoint& source,
                           const models::DecoderSpec& spec, const AnalysisSettings& settings,
                           const Grid& grid, const std::vector<std::vector<int32_t>>& sequences,
                           const AnalyzedLinears& linears, const AnalysisRun& run) {
  ASSIGN_OR_RETURN(CalibrationStream stream, CalibrationStream::Create(source, spec, sequences, ctx));
  stream.set_part_rows(run.part_rows);
  Analyst analyst(ctx, source, spec, settings, grid, linears, run.progress, stream);
  int layer = 0;
  stream.set_watch([&] { return analyst.Tell(layer); });
  int done = 0;
  StateStore::Files files;
  if (run.store != nullptr) {
    ASSIGN_OR_RETURN(done, RestoreWalk(run.store, spec, stream, &analyst, &files));
    if (done > 0 && run.resumed != nullptr) *run.resumed = true;
  }
  const int layers = spec.layers + spec.mtp_layers;
  for (layer = done; layer < layers; ++layer) {
    RETURN_IF_ERROR(analyst.Tell(layer));
    if (layer >= spec.layers) RETURN_IF_ERROR(stream.EnterMtp(ctx, source, layer - spec.layers));
    RETURN_IF_ERROR(WalkLayer(ctx, source, spec, layer, nullptr, stream, analyst));
    if (run.store == nullptr || layer + 1 == layers || !run.store->due()) continue;
    RETURN_IF_ERROR(SaveWalk(run.store, analyst.analysis(), layer + 1, stream, &files));
  }
  return analyst.Take();
}

int64_t AnalysisBytes(const models::DecoderSpec& spec) {
  const models::AttentionSpec& a = spec.attention;
  const int64_t mixed = int64_t{a.heads} * std::max(a.v_dim, a.head_dim);
  const int64_t width = std::max<int64_t>(
      {spec.hidden, mixed, spec.intermediate, spec.moe.intermediate, spec.moe.shared_intermediate});
  // Sampled tokens and rows, each with the working memory of a search.
  const int64_t linears = spec.moe.experts > 0 ? 2 * (kSampleExperts + 2) : 3;
  return (kSampleTokens * 4 + linears * kSampleRows * 3) * width * 4 +
         linears * kSampleRows * kSampleTokens * 8;
}

}  // namespace moesaic::quantizer
