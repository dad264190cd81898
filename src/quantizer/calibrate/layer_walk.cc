#include "quantizer/calibrate/layer_walk.h"

#include <algorithm>
#include <list>
#include <numeric>

#include "base/round.h"
#include "kernels/attention.h"
#include "kernels/exec_context.h"
#include "models/decoder_weights.h"
#include "quantizer/format/runtime_matrix.h"

namespace moesaic::quantizer {
namespace {

using layers::ScratchScope;
using layers::Step;

// Maximum number of an expert's tokens that are processed at once.
constexpr int kRun = 1024;

// The tokens of an expert, with the weights of its output.
struct Routed {
  std::vector<int32_t> tokens;
  std::vector<float> gates;  // empty: 1
  size_t first_variant = 0;  // number of tokens of the first variant, which come first
};

class Walker {
 public:
  Walker(const kernels::ExecContext& ctx, const models::DecoderSpec& spec, int index,
         layers::DecoderLayer layer, CalibrationStream& stream, LayerVisitor& visitor)
      : ctx_(ctx),
        spec_(spec),
        index_(index),
        prefix_(models::LayerPrefix(index)),
        layer_(std::move(layer)),
        stream_(stream),
        visitor_(visitor),
        zeros_(kRun, 0) {}

  Status Attention() {
    if (auto* gqa = std::get_if<layers::GqaAttention>(&layer_.attention)) {
      RETURN_IF_ERROR(Visit({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
                            Normed(layer_.attention_norm), {&gqa->q, &gqa->k, &gqa->v}));
      RETURN_IF_ERROR(VisitOutput(*gqa));
    } else {
      auto& mla = std::get<layers::MlaAttention>(layer_.attention);
      if (spec_.attention.q_lora_rank > 0) {
        RETURN_IF_ERROR(Visit({"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"},
                              Normed(layer_.attention_norm), {&mla.q_a, &mla.kv_a}));
        RETURN_IF_ERROR(Visit({"self_attn.q_b_proj"}, LowQueries(mla), {&mla.q_b}));
      } else {
        RETURN_IF_ERROR(Visit({"self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"},
                              Normed(layer_.attention_norm), {&mla.q, &mla.kv_a}));
      }
      RETURN_IF_ERROR(VisitOutput(mla));
    }
    ForBatches(
        [&](const Step& step, const kernels::KvLayer& kv, float* x) { layer_.AddAttention(step, kv, x); });
    DropSwaps(0);
    owned_.clear();  // never run again
    return OkStatus();
  }

  Status Ffn() {
    if (std::holds_alternative<layers::MoeLayer>(layer_.ffn)) return Moe();
    auto& mlp = std::get<layers::Mlp>(layer_.ffn);
    RETURN_IF_ERROR(Visit({"mlp.gate_proj", "mlp.up_proj"}, Normed(layer_.ffn_norm), {&mlp.gate, &mlp.up}));
    RETURN_IF_ERROR(Visit({"mlp.down_proj"}, Gated(mlp), {&mlp.down}));
    ForParts([&](const Step& step, float* x) { layer_.AddFfn(step, x); });
    return OkStatus();
  }

 private:
  // Replacement of a linear on one variant.
  struct Swap {
    layers::Linear* linear;
    int variant;
    OwnedMatrix matrix;
  };

  // Calls `body` for the batches of all variants, each with the matrices of its variant.
  void ForBatches(const CalibrationStream::Body& body) {
    stream_.ForBatches(ctx_, [&](const Step& step, const kernels::KvLayer& kv, float* x) {
      UseVariant(stream_.VariantOf(x));
      body(step, kv, x);
    });
    UseVariant(0);
  }

  // The same for functions of single tokens.
  void ForParts(const CalibrationStream::PartBody& body) {
    stream_.ForParts(ctx_, [&](const Step& step, float* x) {
      UseVariant(stream_.VariantOf(x));
      body(step, x);
    });
    UseVariant(0);
  }

  bool HasSwaps(int variant) const {
    return std::ranges::any_of(swaps_, [variant](const Swap& swap) { return swap.variant == variant; });
  }

  void UseVariant(int variant) {
    if (variant == variant_) return;
    variant_ = variant;
    for (const auto& [linear, weight] : first_variant_) linear->weight = weight;
    for (const Swap& swap : swaps_) {
      if (swap.variant == variant) swap.linear->weight = swap.matrix.matrix;
    }
  }

  void AddSwaps(std::vector<VariantMatrix> matrices, std::span<layers::Linear* const> linears) {
    for (VariantMatrix& matrix : matrices) {
      layers::Linear* linear = linears[matrix.module];
      first_variant_.emplace_back(linear, linear->weight);
      swaps_.push_back({linear, matrix.variant, std::move(matrix.matrix)});
    }
  }

  // Drops all but the first `count` swaps.
  void DropSwaps(size_t count) {
    UseVariant(0);
    swaps_.resize(count);
    first_variant_.resize(count);
  }

  Status VisitGroup(LinearGroup group, std::vector<layers::Linear*> linears) {
    group.layer = index_;
    for (std::string& module : group.modules) module.insert(0, prefix_);
    ASSIGN_OR_RETURN(std::vector<OwnedMatrix> matrices, visitor_.Visit(group));
    ASSIGN_OR_RETURN(std::vector<VariantMatrix> variants, visitor_.VisitVariants(group, matrices));
    for (size_t i = 0; i < linears.size(); ++i) {
      linears[i]->weight = matrices[i].matrix;
      owned_.push_back(std::move(matrices[i]));
    }
    AddSwaps(std::move(variants), linears);
    return OkStatus();
  }

  Status Visit(std::vector<std::string> modules, LinearInputs inputs, std::vector<layers::Linear*> linears) {
    return VisitGroup({.modules = std::move(modules), .inputs = std::move(inputs), .layer_inputs = {}},
                      std::move(linears));
  }

  template <typename Attention>
  Status VisitOutput(Attention& attention) {
    const int width = attention.mixed_dim();
    return Visit(
        {"self_attn.o_proj"},
        OverBatches(width,
                    [this, &attention, width](const Step& step, const kernels::KvLayer& kv, float* x) {
                      auto* mixed = Floats(int64_t{step.rows()} * width);
                      ScratchScope scratch(ctx_);
                      attention.Mix(step, Norm(scratch, step, layer_.attention_norm, x), kv, mixed);
                      return mixed;
                    }),
        {&attention.o});
  }

  float* Norm(ScratchScope& scratch, const Step& step, const float* weight, const float* x) const {
    auto* normed = scratch.Take<float>(int64_t{step.rows()} * spec_.hidden);
    layer_.Norm(step, weight, x, normed);
    return normed;
  }

  // Returns inputs [rows, k] that `make` computes from a batch's hidden states in scratch memory.
  template <typename Make>
  LinearInputs OverBatches(int k, const Make& make) {
    return {.k = k, .tokens = stream_.variant_tokens(), .visit = [this, k, make](const TokenSink& sink) {
              stream_.ForFirstVariant(ctx_, [&](const Step& step, const kernels::KvLayer& kv, float* x) {
                const ScratchScope scratch(ctx_);
                sink({.f32 = make(step, kv, x), .stride = k, .count = step.rows()});
              });
            }};
  }

  // The same for functions of single tokens.
  template <typename Make>
  LinearInputs OverParts(int k, const Make& make) {
    return {.k = k, .tokens = stream_.variant_tokens(), .visit = [this, k, make](const TokenSink& sink) {
              stream_.ForFirstParts(ctx_, [&](const Step& step, float* x) {
                const ScratchScope scratch(ctx_);
                sink({.f32 = make(step, x), .stride = k, .count = step.rows()});
              });
            }};
  }

  LinearInputs Normed(const float* weight) {
    return OverParts(spec_.hidden, [this, weight](const Step& step, float* x) {
      auto* normed = Floats(int64_t{step.rows()} * spec_.hidden);
      layer_.Norm(step, weight, x, normed);
      return normed;
    });
  }

  LinearInputs LowQueries(const layers::MlaAttention& mla) {
    return OverParts(spec_.attention.q_lora_rank, [this, &mla](const Step& step, float* x) {
      auto* low = Floats(int64_t{step.rows()} * mla.q_a.n());
      ScratchScope scratch(ctx_);
      mla.LowQueries(step, Norm(scratch, step, layer_.attention_norm, x), low);
      return low;
    });
  }

  // Returns the inputs of down.
  LinearInputs Gated(const layers::Mlp& mlp) {
    return OverParts(mlp.gate.n(), [this, &mlp](const Step& step, float* x) {
      auto* gated = Floats(int64_t{step.rows()} * mlp.gate.n());
      ScratchScope scratch(ctx_);
      mlp.Gated(step, Norm(scratch, step, layer_.ffn_norm, x), gated);
      return gated;
    });
  }

  float* Floats(int64_t count) const { return ctx_.scratch->Take<float>(static_cast<size_t>(count)).data(); }

  // Mixtures of experts.

  Status Moe() {
    auto& moe = std::get<layers::MoeLayer>(layer_.ffn);
    ASSIGN_OR_RETURN(std::vector<VariantMatrix> routers, visitor_.VisitRouter(index_));
    layers::Linear* const gates[] = {&moe.router.gate};
    AddSwaps(std::move(routers), gates);
    RETURN_IF_ERROR(Route(moe.router));
    DropSwaps(0);
    ASSIGN_OR_RETURN(sums_, runtime::Buffer::Allocate(
                                sizeof(float) * static_cast<size_t>(stream_.tokens()) * spec_.hidden, true));
    for (int expert = 0; expert < spec_.moe.experts; ++expert) RETURN_IF_ERROR(Expert(expert));
    if (spec_.moe.shared_intermediate > 0) RETURN_IF_ERROR(SharedExperts());
    auto* sums = sums_.as<float>();
    ForParts([&](const Step& step, float* x) {
      layer_.JoinFfn(step, sums, x);
      sums += int64_t{step.rows()} * spec_.hidden;
    });
    return OkStatus();
  }

  // Chooses experts for all tokens.
  Status Route(const layers::Router& router) {
    routed_.assign(static_cast<size_t>(spec_.moe.experts), {});
    int32_t token = 0;
    ForParts([&](const Step& step, float* x) {
      ScratchScope scratch(ctx_);
      const float* normed = Norm(scratch, step, layer_.ffn_norm, x);
      const int64_t count = int64_t{step.rows()} * router.top_k;
      auto* ids = scratch.Take<int32_t>(count);
      auto* weights = scratch.Take<float>(count);
      router.Route(step, normed, ids, weights);
      visitor_.OnRoutes(index_, token, step.rows(), router.top_k, ids);
      for (int64_t i = 0; i < count; ++i) {
        Routed& expert = routed_[ids[i]];
        expert.tokens.push_back(token + static_cast<int32_t>(i / router.top_k));
        expert.gates.push_back(weights[i]);
        expert.first_variant += stream_.VariantOf(x) == 0 ? 1 : 0;
      }
      token += step.rows();
    });
    std::vector<int64_t> counts;
    for (const Routed& expert : routed_) counts.push_back(std::ssize(expert.tokens));
    stand_ins_ = {};
    const int step = base::CeilDiv(stream_.variant_tokens(), kStandIns);
    for (int t = 0; t < stream_.variant_tokens(); t += step) stand_ins_.tokens.push_back(t);
    stand_ins_.first_variant = stand_ins_.tokens.size();
    return visitor_.OnRouting(index_, counts);
  }

  // Returns the number of `routed` tokens in [first, end) that run on the same matrices: those of one variant
  // if it has its own.
  size_t RunOf(const Routed& routed, size_t first, size_t end) const {
    const size_t most = std::min(static_cast<size_t>(std::min(kRun, stream_.part_rows())), end - first);
    if (swaps_.empty()) return most;
    const auto variant_of = [&](size_t i) { return routed.tokens[i] / stream_.variant_tokens(); };
    const auto swapped = [&](int variant) { return HasSwaps(variant) ? variant : 0; };
    size_t count = 1;
    int variant = variant_of(first);
    const int matrices = swapped(variant);
    for (; count < most; ++count) {
      const int next = variant_of(first + count);
      if (next != variant && swapped(next) != matrices) break;
      variant = next;
    }
    return count;
  }

  // Calls body(step, normed inputs [rows, hidden], tokens, gates) for runs of `routed` tokens before `end`.
  template <typename Body>
  void ForRuns(const Routed& routed, size_t end, const Body& body) {
    for (size_t first = 0, count = 0; first < end && stream_.Continues(); first += count) {
      count = RunOf(routed, first, end);
      UseVariant(routed.tokens[first] / stream_.variant_tokens());
      const std::span<const int32_t> tokens = std::span(routed.tokens).subspan(first, count);
      const std::span<const float> gates =
          routed.gates.empty() ? std::span<const float>() : std::span(routed.gates).subspan(first, count);
      ScratchScope scratch(ctx_);
      auto* rows = scratch.Take<float>(static_cast<int64_t>(count) * spec_.hidden);
      for (size_t i = 0; i < count; ++i) {
        std::copy_n(stream_.hidden() + int64_t{tokens[i]} * spec_.hidden, spec_.hidden,
                    rows + static_cast<int64_t>(i) * spec_.hidden);
      }
      const Step step{.ctx = ctx_, .sequences = {}, .positions = std::span(zeros_).first(count)};
      layer_.Norm(step, layer_.ffn_norm, rows, rows);
      body(step, rows, tokens, gates);
    }
    UseVariant(0);
  }

  LinearInputs RunsOf(const Routed& routed) {
    return {.k = spec_.hidden,
            .tokens = static_cast<int64_t>(routed.first_variant),
            .visit = [this, &routed](const TokenSink& sink) {
              ForRuns(routed, routed.first_variant, [&](const Step& step, const float* rows, auto, auto) {
                sink({.f32 = rows, .stride = spec_.hidden, .count = step.rows()});
              });
            }};
  }

  LinearInputs GatedRunsOf(const Routed& routed, const layers::Mlp& mlp) {
    return {.k = mlp.gate.n(),
            .tokens = static_cast<int64_t>(routed.first_variant),
            .visit = [this, &routed, &mlp](const TokenSink& sink) {
              ForRuns(routed, routed.first_variant, [&](const Step& step, const float* rows, auto, auto) {
                auto* gated = Floats(int64_t{step.rows()} * mlp.gate.n());
                mlp.Gated(step, rows, gated);
                sink({.f32 = gated, .stride = mlp.gate.n(), .count = step.rows()});
              });
            }};
  }

  Status Expert(int expert) {
    const Routed& routed = routed_[expert];
    const std::string name = fmt::format("mlp.experts.{}.", expert);
    layers::Mlp mlp;
    const size_t owned = owned_.size(), swaps = swaps_.size();
    RETURN_IF_ERROR(VisitGroup({.modules = {name + "gate_proj", name + "up_proj"},
                                .inputs = RunsOf(routed),
                                .expert = expert,
                                .layer_inputs = Normed(layer_.ffn_norm),
                                .same_layer_inputs = true},
                               {&mlp.gate, &mlp.up}));
    RETURN_IF_ERROR(VisitGroup({.modules = {name + "down_proj"},
                                .inputs = GatedRunsOf(routed, mlp),
                                .expert = expert,
                                .layer_inputs = GatedRunsOf(stand_ins_, mlp)},
                               {&mlp.down}));
    ForRuns(routed, routed.tokens.size(),
            [&](const Step& step, const float* rows, std::span<const int32_t> tokens,
                std::span<const float> gates) {
              const int hidden = spec_.hidden;
              auto* out = Floats(int64_t{step.rows()} * hidden);
              mlp.Forward(step, rows, out, /*accumulate=*/false);
              ctx_.pool->Run(step.rows(), [&](int64_t i, int) {
                float* sum = sums_.as<float>() + int64_t{tokens[i]} * hidden;
                for (int c = 0; c < hidden; ++c) sum[c] += gates[i] * out[i * hidden + c];
              });
            });
    DropSwaps(swaps);
    owned_.resize(owned);
    return OkStatus();
  }

  Status SharedExperts() {
    layers::Mlp mlp;
    const size_t swaps = swaps_.size();
    RETURN_IF_ERROR(VisitGroup({.modules = {"mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"},
                                .inputs = Normed(layer_.ffn_norm),
                                .layer_inputs = Normed(layer_.ffn_norm),
                                .same_layer_inputs = true},
                               {&mlp.gate, &mlp.up}));
    RETURN_IF_ERROR(Visit({"mlp.shared_experts.down_proj"}, Gated(mlp), {&mlp.down}));
    auto* sums = sums_.as<float>();
    ForParts([&](const Step& step, float* x) {
      ScratchScope scratch(ctx_);
      mlp.Forward(step, Norm(scratch, step, layer_.ffn_norm, x), sums, /*accumulate=*/true);
      sums += int64_t{step.rows()} * spec_.hidden;
    });
    DropSwaps(swaps);
    return OkStatus();
  }

  const kernels::ExecContext& ctx_;
  const models::DecoderSpec& spec_;
  const int index_;
  const std::string prefix_;
  layers::DecoderLayer layer_;
  CalibrationStream& stream_;
  LayerVisitor& visitor_;
  std::vector<OwnedMatrix> owned_;  // matrices of layer_'s linears and of the current expert
  std::vector<Swap> swaps_;
  std::vector<std::pair<layers::Linear*, tensor::PackedMatrix>>
      first_variant_;           // [swaps], matrices of the first variant
  int variant_ = 0;             // variant whose matrices are in place
  std::vector<int32_t> zeros_;  // positions for steps that do not use them
  std::vector<Routed> routed_;  // [experts]
  Routed stand_ins_;
  runtime::Buffer sums_;  // [tokens, hidden], sums of experts' outputs
};

// Folded norms, biases and router of a layer, in memory of their own.
class FoldedFrame {
 public:
  FoldedFrame(const kernels::ExecContext& ctx, const models::DecoderSpec& spec, const Folding& folding,
              const std::string& prefix, const checkpoint::Checkpoint& source)
      : ctx_(ctx), spec_(spec), folding_(folding), prefix_(prefix), source_(source) {}

  Status Fold(layers::DecoderLayer* layer) {
    const char* ffn_norm =
        spec_.sandwich_norm ? "pre_mlp_layernorm.weight" : "post_attention_layernorm.weight";
    Replace("input_layernorm.weight", spec_.hidden, &layer->attention_norm);
    Replace(ffn_norm, spec_.hidden, &layer->ffn_norm);
    auto* mla = std::get_if<layers::MlaAttention>(&layer->attention);
    if (mla != nullptr && mla->q_a_norm != nullptr) {
      Replace("self_attn.q_a_layernorm.weight", spec_.attention.q_lora_rank, &mla->q_a_norm);
    }
    if (auto* mlp = std::get_if<layers::Mlp>(&layer->ffn)) {
      if (mlp->up.bias != nullptr) Replace("mlp.up_proj.bias", spec_.intermediate, &mlp->up.bias);
      return OkStatus();
    }
    return FoldRouter(&std::get<layers::MoeLayer>(layer->ffn).router);
  }

 private:
  void Replace(const std::string& item, int count, const float** values) {
    if (!folding_.Touches(prefix_ + item)) return;
    vectors_.emplace_back(*values, *values + count);
    folding_.Apply(ctx_, prefix_ + item, 0, 1, count, vectors_.back().data());
    *values = vectors_.back().data();
  }

  Status FoldRouter(layers::Router* router) {
    const std::string name = prefix_ + "mlp.gate";
    if (!folding_.Touches(name)) return OkStatus();
    const int n = spec_.moe.experts, k = spec_.hidden;
    ASSIGN_OR_RETURN(std::vector<float> rows, ReadWeight(source_, name, n, k));
    folding_.Apply(ctx_, name, 0, n, k, rows.data());
    ASSIGN_OR_RETURN(RuntimeMatrix packed, RuntimeMatrix::OfKept(tensor::DType::kF32, n, k));
    packed.AddKept(*ctx_.pool, 0, n, rows.data());
    router_ = packed.Take();
    router->gate.weight = router_.matrix;
    return OkStatus();
  }

  const kernels::ExecContext& ctx_;
  const models::DecoderSpec& spec_;
  const Folding& folding_;
  const std::string prefix_;
  const checkpoint::Checkpoint& source_;
  std::list<std::vector<float>> vectors_;
  OwnedMatrix router_;
};

// Replaces the scratch memory, so that its peak is that of one half of a layer and not of both. One chunk for
// all allocations has no unused parts. Its pages are not touched here.
void RenewScratch(const kernels::ExecContext& ctx, int64_t bytes) {
  *ctx.scratch = runtime::Arena();
  const ScratchScope scope(ctx);
  ctx.scratch->TakeBytes(static_cast<size_t>(bytes));
}

}  // namespace

Status WalkLayer(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                 const models::DecoderSpec& spec, int layer, const Folding* folding,
                 CalibrationStream& stream, LayerVisitor& visitor) {
  ASSIGN_OR_RETURN(models::WeightPlan plan, models::PlanFrame(spec, source, layer));
  ASSIGN_OR_RETURN(const models::WeightMap weights,
                   models::WeightMap::Pack(source, std::move(plan), {}, {}, *ctx.pool));
  source.ForgetMaps();
  layers::DecoderLayer frame = models::AssembleFrame(spec, weights, stream.rope(), layer);
  const Folding none;
  FoldedFrame folded(ctx, spec, folding != nullptr ? *folding : none, models::LayerPrefix(layer), source);
  RETURN_IF_ERROR(folded.Fold(&frame));
  Walker walker(ctx, spec, layer, std::move(frame), stream, visitor);
  const WalkScratch scratch = WalkScratchOf(spec, stream.tokens(), stream.longest(), stream.part_rows());
  const int64_t of_visitor = visitor.ScratchBytes(layer);
  RenewScratch(ctx, std::max(scratch.attention, of_visitor));
  RETURN_IF_ERROR(walker.Attention());
  RETURN_IF_ERROR(stream.watched());
  RenewScratch(ctx, std::max(scratch.ffn, of_visitor));
  RETURN_IF_ERROR(walker.Ffn());
  return stream.watched();
}

}  // namespace moesaic::quantizer
