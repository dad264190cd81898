#include "quantizer/calibrate/calibrated_run.h"

#include <nlohmann/json.hpp>

#include <algorithm>

#include "base/check.h"
#include "base/checksum.h"
#include "kernels/exec_context.h"
#include "quantizer/io/hidden_state.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;

// Clears a pointer at the end of the scope.
class Reset {
 public:
  explicit Reset(CalibrationStream** stream) : stream_(stream) {}
  ~Reset() { *stream_ = nullptr; }
  Reset(const Reset&) = delete;
  Reset& operator=(const Reset&) = delete;

 private:
  CalibrationStream** stream_;
};

}  // namespace

CalibratedRun::CalibratedRun(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                             const QuantizePlan& plan, const QuantizeOptions& options,
                             const std::string& folder, Journal& journal, UnitStream& units,
                             UnitRounder& rounder, GptqStage& stage)
    : ctx_(ctx),
      source_(source),
      plan_(plan),
      options_(options),
      journal_(journal),
      units_(units),
      rounder_(rounder),
      gptq_(stage),
      store_(folder, kCalibrationStateFile, journal.header(), options.save_share) {
  for (size_t i = 0; i < plan.items.size(); ++i) {
    if (plan.items[i].linear) item_of_.emplace(plan.items[i].name, i);
  }
}

Status CalibratedRun::Go() {
  ASSIGN_OR_RETURN(CalibrationStream stream,
                   CalibrationStream::Create(source_, plan_.spec, options_.calibration, ctx_));
  stream.set_part_rows(plan_.limits.part_rows);
  stream.set_watch([this] { return units_.ReportProgress(stage_); });
  stream_ = &stream;
  const Reset reset(&stream_);
  source_.ForgetMaps();
  report_.resumed_layers = Restore(stream);
  RETURN_IF_ERROR(units_.Begin(report_.resumed_layers));
  const int layers = plan_.spec.layers + plan_.spec.mtp_layers;
  for (int layer = report_.resumed_layers; layer < layers; ++layer) {
    own_.reset();  // the next layer may not need it
    stand_ins_.reset();
    layer_.reset();
    gptq_.Release();
    {
      const Stopwatch watch(&report_.walk_seconds);
      if (layer >= plan_.spec.layers) {
        RETURN_IF_ERROR(stream.EnterMtp(ctx_, source_, layer - plan_.spec.layers));
      }
      RETURN_IF_ERROR(WalkLayer(ctx_, source_, plan_.spec, layer, options_.output.folding(), stream, *this));
    }
    // Rounds all items before the next layer, so that a state has no unfinished work before it.
    size_t end = units_.NextItem();
    while (end < plan_.items.size() && plan_.items[end].layer != layer + 1) ++end;
    RETURN_IF_ERROR(RoundUntil(units_, rounder_, end));
    source_.ForgetMaps();
    if (store_.due() || layer + 1 == layers) RETURN_IF_ERROR(SaveState(layer + 1, stream));
  }
  return RoundUntil(units_, rounder_, plan_.items.size());
}

Status RoundUntil(UnitStream& units, UnitRounder& rounder, size_t item) {
  while (units.NextItem() < item) {
    ASSIGN_OR_RETURN(const UnitStream::PieceIo place, units.Next());
    RETURN_IF_ERROR(rounder.Round(place.pieces, place.rows, place.out));
  }
  return OkStatus();
}

int64_t CalibratedRun::ScratchBytes(int layer) const {
  return GptqScratchBytes(plan_.spec, plan_.items, layer, options_.output.Roundings(), ctx_.pool->size(),
                          plan_.limits);
}

Status CalibratedRun::OnRouting(int layer, std::span<const int64_t> tokens_of_expert) {
  report_.routing.push_back({layer, {tokens_of_expert.begin(), tokens_of_expert.end()}});
  return OkStatus();
}

StatusOr<std::vector<OwnedMatrix>> CalibratedRun::Visit(const LinearGroup& group) {
  const size_t first = item_of_.at(group.modules.front());
  std::vector<OwnedMatrix> matrices;
  const HessianFactor* factor = nullptr;
  bool looked = false;  // true once the inputs were examined
  LinearFinding finding;
  finding.layer = group.layer;
  finding.tokens = group.inputs.tokens;
  stage_ = fmt::format("layer {} of {}{}", group.layer + 1, plan_.spec.layers + plan_.spec.mtp_layers,
                       group.expert < 0 ? "" : fmt::format(", expert {}", group.expert));
  RETURN_IF_ERROR(stream_->watched());
  RETURN_IF_ERROR(units_.ReportProgress(stage_));
  for (size_t i = 0; i < group.modules.size(); ++i) {
    // Items have the order of a forward pass, as groups have.
    MOESAIC_CHECK_EQ(item_of_.at(group.modules[i]), first + i);
    RETURN_IF_ERROR(RoundUntil(units_, rounder_, first + i));
    const bool rounded = plan_.output.items[first + i].form == Form::kRounded;
    if (rounded && !looked) {
      ASSIGN_OR_RETURN(factor, Factor(group, &finding));
      finding.nearest = factor == nullptr;
      looked = true;
    }
    ASSIGN_OR_RETURN(OwnedMatrix matrix, RoundLinear(first + i, factor, rounded ? &finding : nullptr));
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

StatusOr<OwnedMatrix> CalibratedRun::RoundLinear(size_t item, const HessianFactor* factor,
                                                 const LinearFinding* finding) {
  const Stopwatch watch(&report_.round_seconds);
  const std::vector<int64_t>& shape = plan_.items[item].shape;
  const auto n = static_cast<int>(shape[0]), k = static_cast<int>(shape[1]);
  GptqReport gptq;
  base::Xxh3 codes;
  ASSIGN_OR_RETURN(RuntimeMatrix runtime,
                   finding != nullptr
                       ? RuntimeMatrix::OfRounded(plan_.output.items[item].precision.grid(), n, k)
                       : RuntimeMatrix::OfKept(plan_.output.items[item].tensors[0].stored.dtype, n, k));
  while (units_.NextItem() == item) {
    ASSIGN_OR_RETURN(const UnitStream::PieceIo place, units_.Next());
    RETURN_IF_ERROR(rounder_.Round(place.pieces, place.rows, place.out,
                                   {.factor = factor,
                                    .stage = &gptq_,
                                    .report = &gptq,
                                    .slab_values = plan_.limits.slab_values,
                                    .runtime = &runtime}));
    const int64_t bytes = PlaceOf(plan_.output.items[item].tensors[0], place.pieces.front()).bytes;
    codes.Add(place.out[0], static_cast<size_t>(bytes));
  }
  if (finding != nullptr) {
    LinearFinding& mine = report_.linears.emplace_back(*finding);
    mine.name = plan_.items[item].name;
    mine.loss = gptq.loss;
    mine.of_nearest = gptq.of_nearest;
    mine.xxh3 = codes.Hex();
  }
  return runtime.Take();
}

StatusOr<Hessian*> CalibratedRun::Gather(std::optional<Hessian>& hessian, const LinearInputs& inputs) {
  const Stopwatch watch(&report_.hessian_seconds);
  if (!hessian) {
    ASSIGN_OR_RETURN(hessian, Hessian::Create(inputs.k));
  } else {
    RETURN_IF_ERROR(hessian->Restart(ctx_, inputs.k));
  }
  RETURN_IF_ERROR(gptq_.Gather(ctx_, SourceOf(inputs), &*hessian));
  return &*hessian;
}

InputSource CalibratedRun::SourceOf(const LinearInputs& inputs) {
  return [this, &inputs](const TokenSink& sink) {
    inputs.visit(sink);
    return stream_->watched();  // inputs are missing
  };
}

Status CalibratedRun::ShrinkToLayer(const LinearGroup& group, Hessian* own, LinearFinding* finding) {
  Hessian* layer = layer_ ? &*layer_ : nullptr;
  if (!group.same_layer_inputs) {
    if (own->tokens() >= int64_t{kPlenty} * own->k()) return OkStatus();
    ASSIGN_OR_RETURN(layer, Gather(stand_ins_, group.layer_inputs));
  }
  finding->shrinkage = ShrinkTowards(ctx_, *layer, own);
  return OkStatus();
}

StatusOr<const HessianFactor*> CalibratedRun::Factor(const LinearGroup& group, LinearFinding* finding) {
  if (group.same_layer_inputs && layer_index_ != group.layer) {
    RETURN_IF_ERROR(Gather(layer_, group.layer_inputs).status());
    layer_index_ = group.layer;
  }
  const bool routed = group.expert >= 0;
  const FactorOptions options{.watch = [this] { return stream_->CheckWatch(); }};
  if (plan_.limits.GathersInOrder(group.inputs.k, routed)) return FactorInOrder(group, options, finding);
  Hessian* hessian = nullptr;
  if (group.same_layer_inputs && !routed) {
    hessian = &*layer_;
  } else {
    ASSIGN_OR_RETURN(hessian, Gather(own_, group.inputs));
  }
  if (routed) RETURN_IF_ERROR(ShrinkToLayer(group, hessian, finding));
  const Stopwatch watch(&report_.factor_seconds);
  if (!hessian->any()) return nullptr;
  StatusOr<const HessianFactor*> factor = gptq_.Factor(ctx_, *hessian, options);
  if (!factor.ok()) return Annotate(factor.status(), group.modules.front());
  finding->damping = (*factor)->damping;
  return *factor;
}

// Makes the factor of a linear whose Hessian is too large to exist besides it.
StatusOr<const HessianFactor*> CalibratedRun::FactorInOrder(const LinearGroup& group,
                                                            const FactorOptions& options,
                                                            LinearFinding* finding) {
  own_.reset();
  gptq_.Release();
  const Clock::time_point start = Clock::now();
  double gathering = 0;
  const InputSource inputs = SourceOf(group.inputs);
  StatusOr<Factorizer::FromInputs> made = gptq_.Factor(
      ctx_, group.inputs.k,
      [&](const TokenSink& sink) {
        const Stopwatch watch(&gathering);
        return inputs(sink);
      },
      options);
  RETURN_IF_ERROR(stream_->watched());
  report_.hessian_seconds += gathering;
  report_.factor_seconds += Since(start) - gathering;
  if (!made.ok()) return Annotate(made.status(), group.modules.front());
  if (made->factor != nullptr) finding->damping = made->factor->damping;
  return made->factor;
}

Status CalibratedRun::SaveState(int layer, CalibrationStream& stream) {
  RETURN_IF_ERROR(units_.Sync());
  ordered_json state = {{"layers", layer}};
  state.update(report_.Json());
  return store_.Save(state, {{StateFile(kCalibrationState, layer), stream.values()}}, {}, &files_);
}

int CalibratedRun::Restore(CalibrationStream& stream) {
  std::optional<StateStore::Saved> saved = store_.Load();
  if (!saved || saved->key != store_.key()) return 0;
  const auto layer = static_cast<int>(NumberIn(saved->state, "layers"));
  if (layer < 1 || layer > plan_.spec.layers + plan_.spec.mtp_layers || !units_.IsDoneBefore(layer)) return 0;
  if (!store_.Read(saved->files, StateFile(kCalibrationState, layer), stream.values())) return 0;
  CalibrationReport part = CalibrationReport::FromJson(saved->state);
  report_.linears = std::move(part.linears);
  report_.routing = std::move(part.routing);
  files_ = std::move(saved->files);
  return layer;
}

}  // namespace moesaic::quantizer
