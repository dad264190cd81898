#include "quantizer/mixed/mix_walk.h"

#include <algorithm>

#include "base/round.h"
#include "kernels/exec_context.h"
#include "quantizer/mixed/mix_gain.h"
#include "quantizer/mixed/mix_measurer.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::Checkpoint;

class Measuring {
 public:
  Measuring(const kernels::ExecContext& ctx, const Checkpoint& source, const models::DecoderSpec& spec,
            const std::vector<ModelItem>& items, const OutputSettings& settings,
            std::vector<PrecisionGroup> units, const std::vector<std::vector<int32_t>>& sequences, MixRun run)
      : ctx_(ctx),
        source_(source),
        spec_(spec),
        items_(items),
        settings_(settings),
        sequences_(sequences),
        sample_(MixSample(sequences, settings.mix.tokens)),
        progress_(std::move(run.progress)),
        store_(run.store != nullptr ? *run.store : nowhere_),
        state_(std::move(run.from)),
        units_(std::move(units)) {}

  StatusOr<Mix> Go(const std::vector<MixPass>& passes) {
    RETURN_IF_ERROR(TakeMeasured());
    RETURN_IF_ERROR(store_.RemoveOthers(state_));
    steps_ = settings_.gptq ? spec_.layers : 0;
    for (const MixPass& pass : passes) steps_ += spec_.layers - pass.first;
    if (settings_.gptq) RETURN_IF_ERROR(Gains());
    for (const MixPass& pass : passes) RETURN_IF_ERROR(Pass(pass));
    Mix mix{.units = std::move(units_),
            .routers = std::move(state_.measured.routers),
            .tokens = state_.measured.tokens};
    for (PrecisionGroup& unit : mix.units) {
      for (MixOption& option : unit.options) option.loss *= state_.gains.Of(unit.name, option.precision);
    }
    return mix;
  }

 private:
  // Applies earlier measurements to units. An option that was excluded there is excluded again.
  Status TakeMeasured() {
    for (const PrecisionGroup& from : state_.measured.units) {
      const auto to = std::ranges::find(units_, from.name, &PrecisionGroup::name);
      if (to == units_.end()) return OtherGroups(from.name);
      if (from.measured && from.options.size() != to->options.size()) return OtherGroups(from.name);
      std::vector<MixOption> options;
      for (const MixOption& option : from.options) {
        const auto same = [&](const MixOption& o) { return o.precision.Name() == option.precision.Name(); };
        const auto planned = std::ranges::find_if(to->options, same);
        if (planned == to->options.end()) return OtherGroups(from.name);
        options.push_back(*planned);
        options.back().loss = option.loss;
        options.back().flips = option.flips;
        options.back().largest = option.largest;
      }
      to->measured = from.measured;
      to->options = std::move(options);
    }
    return OkStatus();
  }

  bool Tell(int of_walk) const { return !progress_ || progress_(done_ + of_walk, steps_); }

  Status Gains() {
    if (state_.gain_layers < spec_.layers) {
      GainWalk walk{.tell = [this](int layers) { return Tell(layers); },
                    .layers = state_.gain_layers,
                    .gains = std::move(state_.gains),
                    .restore = {},
                    .save = {}};
      walk.restore = [this](CalibrationStream& stream) {
        return store_.Read(state_, MixStore::AllTokens(state_.gain_layers), stream.values());
      };
      walk.save = [this](int layers, const MixGains& gains, CalibrationStream& stream) -> Status {
        if (!store_.due()) return OkStatus();
        state_.gain_layers = layers;
        state_.gains = gains;
        return store_.Save(&state_, {{MixStore::AllTokens(layers), stream.values()}});
      };
      ASSIGN_OR_RETURN(state_.gains, MeasureGains(ctx_, source_, spec_, items_, settings_, units_, sequences_,
                                                  std::move(walk)));
      state_.gain_layers = spec_.layers;
      RETURN_IF_ERROR(store_.Save(&state_, {}));
    }
    done_ += spec_.layers;
    return OkStatus();
  }

  Status Pass(const MixPass& pass) {
    std::vector<PrecisionGroup> of_pass;
    std::vector<size_t> places;  // indices among all units
    for (size_t u = 0; u < units_.size(); ++u) {
      const int layer =
          std::min(units_[u].layer, spec_.layers - 1);  // unmeasured MTP modules count to the last layer
      if (layer < pass.first || layer >= pass.end) continue;
      of_pass.push_back(units_[u]);
      places.push_back(u);
    }
    ASSIGN_OR_RETURN(CalibrationStream stream, CalibrationStream::Create(source_, spec_, sample_, ctx_));
    RETURN_IF_ERROR(stream.ReserveVariants(static_cast<int>(pass.variants)));
    const auto measurer =
        MixMeasurer::Create(ctx_, source_, spec_, settings_, items_, pass, std::move(of_pass), stream);
    ASSIGN_OR_RETURN(int layer, Start(pass, stream, *measurer));
    const auto watch = [&]() -> Status { return Tell(layer - pass.first) ? OkStatus() : Stopped(); };
    stream.set_watch(watch);
    for (; layer < spec_.layers; ++layer) {
      if (layer == pass.end) next_.assign(stream.hidden(), stream.hidden() + VariantValues(stream));
      RETURN_IF_ERROR(watch());
      RETURN_IF_ERROR(WalkLayer(ctx_, source_, spec_, layer, nullptr, stream, *measurer));
      source_.ForgetMaps();
      if (store_.due()) RETURN_IF_ERROR(Save(pass, layer + 1, stream, *measurer));
    }
    layer = spec_.layers - 1;  // layer for progress reports
    ASSIGN_OR_RETURN(Mix measured, measurer->Finish());
    done_ += spec_.layers - pass.first;
    for (size_t i = 0; i < places.size(); ++i) units_[places[i]] = measured.units[i];
    std::ranges::move(measured.routers, std::back_inserter(state_.measured.routers));
    std::ranges::move(measured.units, std::back_inserter(state_.measured.units));
    state_.measured.tokens = measured.tokens;
    state_.layers = pass.end;
    state_.pass_end = 0;
    state_.variants = {};
    if (pass.end == spec_.layers) return store_.Save(&state_, {});  // kept in case the budget is too small
    return store_.Save(&state_, {{MixStore::FirstVariant(pass.end), next_, /*reuse=*/true}});
  }

  int64_t VariantValues(const CalibrationStream& stream) const {
    return int64_t{stream.variant_tokens()} * spec_.hidden;
  }

  // Positions the stream at the start of the pass or at its saved layer. Returns the next layer.
  StatusOr<int> Start(const MixPass& pass, CalibrationStream& stream, MixMeasurer& measurer) {
    const auto read_variant = [&](int layer) {
      next_.resize(static_cast<size_t>(VariantValues(stream)));
      return store_.Read(state_, MixStore::FirstVariant(layer), next_);
    };
    if (pass.first == state_.layers && pass.end == state_.pass_end) {
      RETURN_IF_ERROR(measurer.Restore(state_.variants));
      RETURN_IF_ERROR(store_.Read(state_, MixStore::Variants(state_.pass_layer), stream.values()));
      if (state_.pass_layer > pass.end) RETURN_IF_ERROR(read_variant(pass.end));
      return state_.pass_layer;
    }
    if (pass.first == 0) return 0;
    if (next_.empty()) RETURN_IF_ERROR(read_variant(pass.first));  // an earlier run made the previous pass
    std::ranges::copy(next_, stream.hidden());
    return pass.first;
  }

  Status Save(const MixPass& pass, int layer, CalibrationStream& stream, const MixMeasurer& measurer) {
    state_.pass_end = pass.end;
    state_.pass_layer = layer;
    state_.variants = measurer.Json();
    std::vector<MixStore::Values> hidden = {{MixStore::Variants(layer), stream.values()}};
    if (pass.first > 0) hidden.push_back({MixStore::FirstVariant(pass.first), {}, /*reuse=*/true});
    if (layer > pass.end) hidden.push_back({MixStore::FirstVariant(pass.end), next_, /*reuse=*/true});
    return store_.Save(&state_, hidden);
  }

  const kernels::ExecContext& ctx_;
  const Checkpoint& source_;
  const models::DecoderSpec& spec_;
  const std::vector<ModelItem>& items_;
  const OutputSettings& settings_;
  const std::vector<std::vector<int32_t>>& sequences_;
  const std::vector<std::vector<int32_t>> sample_;
  const AnalysisProgress progress_;
  MixStore nowhere_{"", {}, 1};
  MixStore& store_;
  MixState state_;
  std::vector<PrecisionGroup> units_;
  std::vector<float> next_;  // first variant at the start of the next pass
  int done_ = 0, steps_ = 0;
};

}  // namespace

std::vector<std::vector<int32_t>> MixSample(const std::vector<std::vector<int32_t>>& sequences,
                                            int64_t tokens) {
  std::vector<std::vector<int32_t>> sample;
  const size_t wanted = static_cast<size_t>(base::CeilDiv(tokens, kMixSampleLength));
  const size_t step = std::max<size_t>(sequences.size() / std::max<size_t>(wanted, 1), 1);
  const auto take = [&](const std::vector<int32_t>& sequence, int64_t first) {
    const auto count = std::min<int64_t>({std::ssize(sequence) - first, kMixSampleLength, tokens});
    if (count <= 0) return;
    sample.emplace_back(sequence.begin() + first, sequence.begin() + first + count);
    tokens -= count;
  };
  int64_t longest = 0;
  for (const std::vector<int32_t>& sequence : sequences) longest = std::max(longest, std::ssize(sequence));
  for (int64_t first = 0; first < longest && tokens > 0; first += kMixSampleLength) {
    for (size_t offset = 0; offset < step; ++offset) {
      for (size_t i = offset; i < sequences.size(); i += step) take(sequences[i], first);
    }
  }
  return sample;
}

StatusOr<Mix> MeasureMix(const kernels::ExecContext& ctx, const Checkpoint& source,
                         const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, const std::vector<MixPass>& passes,
                         std::vector<PrecisionGroup> units,
                         const std::vector<std::vector<int32_t>>& sequences, MixRun run) {
  return Measuring(ctx, source, spec, items, settings, std::move(units), sequences, std::move(run))
      .Go(passes);
}

}  // namespace moesaic::quantizer
