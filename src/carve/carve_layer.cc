#include "carve/carve_layer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/round.h"
#include "carve/balanced_clusters.h"
#include "carve/router_fit.h"
#include "carve/slice_assignment.h"
#include "kernels/elementwise.h"
#include "kernels/exec_context.h"

namespace moesaic::carve {
namespace {

using quantizer::CalibrationStream;
using quantizer::DenseLayer;
using quantizer::OwnedMatrix;

constexpr int kChunk = 256;           // tokens per task
constexpr int kSampleTokens = 16384;  // tokens used to assign neurons
constexpr int kClusterTokens = 4096;  // tokens used as features of the first clustering
constexpr int kClusterIterations = 10;
// Rounds of moving neurons. Each round loses 10 to 15% less than the one before; the fifth gains under 1%.
constexpr int kRounds = 4;
// Gradient steps of the router: in a round, where it only predicts the inactive experts, and at the end.
constexpr int kRoundSteps = 8, kFinalSteps = 30;
constexpr float kLargestTokenWeight =
    20;  // times the mean, so that a few near-zero outputs do not dominate the refit

class FfnCarver {
 public:
  FfnCarver(const kernels::ExecContext& ctx, const models::DecoderSpec& spec, const DenseLayer& layer,
            const CarveOptions& options, CalibrationStream* stream)
      : ctx_(ctx),
        layer_(layer),
        options_(options),
        stream_(*stream),
        tokens_(stream->tokens()),
        hidden_(spec.hidden),
        width_(spec.intermediate),
        slice_(spec.intermediate / options.slices),
        routed_(options.slices - options.shared),
        eps_(spec.norm_eps) {}

  StatusOr<CarvedFfn> Run(const LayerPlan* given, CarveLayerReport* report) {
    RETURN_IF_ERROR(ComputeDense());
    WeighTokens();
    if (given != nullptr) {
      result_.plan = *given;
    } else {
      RETURN_IF_ERROR(SearchPlan());
    }
    MaskInactive(report);
    RETURN_IF_ERROR(Refit(report));
    return std::move(result_);
  }

 private:
  float* H(int64_t token) const { return activations_.as<float>() + token * width_; }
  float* U(int64_t token) const { return inputs_.as<float>() + token * hidden_; }
  float* Y(int64_t token) const { return dense_.as<float>() + token * hidden_; }
  int chunks() const { return base::CeilDiv(tokens_, kChunk); }

  static StatusOr<runtime::Buffer> Floats(int64_t count) {
    return runtime::Buffer::Allocate(static_cast<size_t>(count) * sizeof(float), /*huge=*/true);
  }

  // Calls body(first token, count) for runs of tokens, one after another. The operators inside use all
  // threads.
  template <typename F>
  void ForRuns(const F& body) {
    constexpr int kRun = 8192;
    for (int first = 0; first < tokens_; first += kRun) body(first, std::min(kRun, tokens_ - first));
  }

  // Computes out [count, n] = x [count, k] W^T.
  void Multiply(const OwnedMatrix& w, const float* x, int k, int count, float* out, int n, bool accumulate) {
    const layers::Linear linear{w.matrix};
    layers::Apply(ctx_, linear, x, k, count, out, n, accumulate);
  }

  Status ComputeDense() {
    ASSIGN_OR_RETURN(inputs_, Floats(int64_t{tokens_} * hidden_));
    ASSIGN_OR_RETURN(activations_, Floats(int64_t{tokens_} * width_));
    ASSIGN_OR_RETURN(dense_, Floats(int64_t{tokens_} * hidden_));
    ForRuns([&](int first, int count) {
      layers::ScratchScope scratch(ctx_);
      kernels::RmsNorm(ctx_, {.x = stream_.hidden() + int64_t{first} * hidden_,
                              .x_stride = hidden_,
                              .weight = layer_.post_attention_norm.data(),
                              .y = U(first),
                              .y_stride = hidden_,
                              .rows = count,
                              .n = hidden_,
                              .eps = eps_});
      auto* up = scratch.Take<float>(int64_t{count} * width_);
      Multiply(layer_.gate_packed, U(first), hidden_, count, H(first), width_, false);
      Multiply(layer_.up_packed, U(first), hidden_, count, up, width_, false);
      kernels::SiluMul(ctx_, {.gate = H(first),
                              .up = up,
                              .y = H(first),
                              .gate_stride = width_,
                              .up_stride = width_,
                              .y_stride = width_,
                              .rows = count,
                              .n = width_});
      Multiply(layer_.down_packed, H(first), width_, count, Y(first), hidden_, false);
    });
    squared_norm_.assign(static_cast<size_t>(width_), 0);
    for (int i = 0; i < hidden_; ++i) {
      for (int j = 0; j < width_; ++j) {
        const float w = layer_.down[static_cast<size_t>(i) * width_ + j];
        squared_norm_[j] += w * w;
      }
    }
    return OkStatus();
  }

  // Energy of one neuron in the FFN output of one token, without cross terms: (h_j |W_down,j|)^2.
  float Energy(const float* h, int neuron) const { return h[neuron] * h[neuron] * squared_norm_[neuron]; }

  float TotalEnergy(const float* h) const {
    float total = 0;
    for (int j = 0; j < width_; ++j) total += Energy(h, j);
    return std::max(total, 1e-12F);
  }

  // Weighs each token's relative loss by the share of the FFN output in the hidden state after the addition,
  // because all later layers see that sum through a norm.
  void WeighTokens() {
    importance_.resize(static_cast<size_t>(tokens_));
    ForTokens(tokens_, [&](int64_t t) {
      const Eigen::Map<const Eigen::VectorXf> hidden(stream_.hidden() + t * hidden_, hidden_),
          out(Y(t), hidden_);
      importance_[t] = std::max(out.squaredNorm(), 1e-12F) / std::max((hidden + out).squaredNorm(), 1e-12F);
    });
    const double mean = std::accumulate(importance_.begin(), importance_.end(), 0.0) / tokens_;
    for (float& v : importance_) v = std::min(v / static_cast<float>(mean), kLargestTokenWeight);
  }

  // Calls body(i) for i in [0, count) on all threads.
  template <typename F>
  void ForTokens(int count, const F& body) const {
    ctx_.pool->Run(base::CeilDiv(count, kChunk), [&](int64_t chunk, int) {
      for (int64_t i = chunk * kChunk; i < std::min<int64_t>(count, (chunk + 1) * kChunk); ++i) body(i);
    });
  }

  Status SearchPlan() {
    SampleShares();
    ChooseShared();
    ClusterRouted();
    RETURN_IF_ERROR(MoveNeurons());
    return FitRouter();
  }

  // Samples every neuron's share of the energy at evenly spread tokens.
  void SampleShares() {
    step_ = std::max(1, tokens_ / kSampleTokens);
    sampled_.resize(tokens_ / step_, width_);
    const Eigen::Map<const Eigen::ArrayXf> norm(squared_norm_.data(), width_);
    ForTokens(static_cast<int>(sampled_.rows()), [&](int64_t i) {
      const float* h = H(i * step_);
      const Eigen::Map<const Eigen::ArrayXf> value(h, width_);
      sampled_.row(i) = value.square() * norm / TotalEnergy(h);
    });
  }

  // Puts the neurons with the largest mean share into the shared expert.
  void ChooseShared() {
    Eigen::RowVectorXd mean = Eigen::RowVectorXd::Zero(width_);
    for (int64_t i = 0; i < sampled_.rows(); ++i) {
      mean += importance_[i * step_] * sampled_.row(i).cast<double>();
    }
    std::vector<int> order(static_cast<size_t>(width_));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return mean[a] > mean[b]; });
    expert_of_.assign(static_cast<size_t>(width_), 0);
    for (int i = 0; i < options_.shared * slice_; ++i) expert_of_[order[i]] = -1;
  }

  // Clusters the other neurons by the tokens that use them.
  void ClusterRouted() {
    std::vector<int> others;
    for (int j = 0; j < width_; ++j) {
      if (expert_of_[j] >= 0) others.push_back(j);
    }
    const int stride = std::max<int>(1, static_cast<int>(sampled_.rows()) / kClusterTokens);
    RowMatrix features(std::ssize(others), sampled_.rows() / stride);
    for (int64_t d = 0; d < features.cols(); ++d) {
      for (int64_t i = 0; i < features.rows(); ++i)
        features(i, d) = std::sqrt(sampled_(d * stride, others[i]));
    }
    const std::vector<int> cluster =
        BalancedClusters(*ctx_.pool, std::move(features), routed_, kClusterIterations);
    for (size_t i = 0; i < others.size(); ++i) expert_of_[others[i]] = cluster[i];
  }

  // Alternates between the experts that each token leaves out and the assignment of neurons with the lowest
  // cost. The first round uses the choice of least loss; later rounds use the best choice of a router.
  Status MoveNeurons() {
    const auto sample = static_cast<int>(sampled_.rows());
    const Rows inputs{U(0), int64_t{step_} * hidden_, sample, hidden_};
    std::optional<RouterFit> fit;
    if (options_.active < routed_) {
      ASSIGN_OR_RETURN(RouterFit created, RouterFit::Create(ctx_, inputs));
      fit.emplace(std::move(created));
    }
    std::vector<std::vector<int>> off(static_cast<size_t>(sample));
    std::vector<float> importance(static_cast<size_t>(sample));
    for (int i = 0; i < sample; ++i) importance[i] = importance_[i * step_];
    for (int round = 0; fit && round < kRounds; ++round) {
      RowMatrix costs(sample, routed_);
      ForTokens(sample, [&](int64_t i) { SumByExpert(sampled_.row(i).data(), costs.row(i).data()); });
      if (round == 0) {
        ForTokens(sample, [&](int64_t i) { off[i] = Cheapest(costs.row(i).data()); });
      } else {
        const LinearRouter router = fit->Fit(costs, importance, options_.active, kRoundSteps);
        ForTokens(sample, [&](int64_t i) { off[i] = router.Off(U(i * step_), options_.active); });
      }
      expert_of_ = ImproveSlices(sampled_, importance, off, routed_, expert_of_);
    }
    sampled_.resize(0, 0);
    result_.plan.experts.assign(static_cast<size_t>(routed_), {});
    for (int j = 0; j < width_; ++j) {
      (expert_of_[j] < 0 ? result_.plan.shared : result_.plan.experts[expert_of_[j]]).push_back(j);
    }
    return OkStatus();
  }

  void SumByExpert(const float* shares, float* sums) const {
    std::fill(sums, sums + routed_, 0.0F);
    for (int j = 0; j < width_; ++j) {
      if (expert_of_[j] >= 0) sums[expert_of_[j]] += shares[j];
    }
  }

  std::vector<int> Cheapest(const float* costs) const {
    std::vector<int> order(static_cast<size_t>(routed_));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return costs[a] < costs[b]; });
    order.resize(static_cast<size_t>(routed_ - options_.active));
    return order;
  }

  Status FitRouter() {
    RowMatrix costs(tokens_, routed_);
    ForTokens(tokens_, [&](int64_t t) {
      const float scale = 1 / TotalEnergy(H(t));
      for (int e = 0; e < routed_; ++e) {
        float sum = 0;
        for (const int neuron : result_.plan.experts[e]) sum += Energy(H(t), neuron);
        costs(t, e) = sum * scale;
      }
    });
    ASSIGN_OR_RETURN(const RouterFit fit, RouterFit::Create(ctx_, {U(0), hidden_, tokens_, hidden_}));
    result_.plan.router = fit.Fit(costs, importance_, options_.active, kFinalSteps);
    return OkStatus();
  }

  // Zeroes the activations of experts that the router leaves out.
  void MaskInactive(CarveLayerReport* report) {
    std::vector<double> lost(static_cast<size_t>(chunks()), 0);
    ctx_.pool->Run(chunks(), [&](int64_t chunk, int) {
      for (int64_t t = chunk * kChunk; t < std::min<int64_t>(tokens_, (chunk + 1) * kChunk); ++t) {
        const float scale = 1 / TotalEnergy(H(t));
        for (const int e : result_.plan.router.Off(U(t), options_.active)) {
          for (const int neuron : result_.plan.experts[e]) {
            lost[chunk] += Energy(H(t), neuron) * scale;
            H(t)[neuron] = 0;
          }
        }
      }
    });
    report->kept_energy = 1 - std::accumulate(lost.begin(), lost.end(), 0.0) / tokens_;
  }

  // Refits the down projection so that the active neurons alone give the dense output. Then adds the carved
  // output to the stream.
  Status Refit(CarveLayerReport* report) {
    ASSIGN_OR_RETURN(runtime::Buffer missing_memory, Floats(int64_t{tokens_} * hidden_));
    auto* missing = missing_memory.as<float>();  // dense output minus carved output
    ForRuns([&](int first, int count) {
      Multiply(layer_.down_packed, H(first), width_, count, missing + int64_t{first} * hidden_, hidden_,
               false);
    });
    std::vector<float> energy(static_cast<size_t>(tokens_));
    double error = 0, total = 0;
    for (int t = 0; t < tokens_; ++t) {
      Eigen::Map<Eigen::VectorXf> gap(missing + int64_t{t} * hidden_, hidden_);
      const Eigen::Map<const Eigen::VectorXf> dense(Y(t), hidden_);
      gap = dense - gap;
      energy[t] = dense.squaredNorm();
      error += gap.squaredNorm();
      total += energy[t];
    }
    report->error_before = error / total;
    result_.down = Eigen::Map<const RowMatrix>(layer_.down.data(), hidden_, width_);
    if (options_.refit) RETURN_IF_ERROR(SolveDown(missing, energy));
    ASSIGN_OR_RETURN(const OwnedMatrix down,
                     quantizer::PackMatrix(*ctx_.pool, result_.down.data(), hidden_, width_));
    error = 0;
    ForRuns([&](int first, int count) {
      float* out = missing + int64_t{first} * hidden_;
      Multiply(down, H(first), width_, count, out, hidden_, false);
      kernels::Add(ctx_, out, int64_t{count} * hidden_, stream_.hidden() + int64_t{first} * hidden_);
      const int64_t values = int64_t{count} * hidden_;
      error += (Eigen::Map<const Eigen::VectorXf>(out, values) -
                Eigen::Map<const Eigen::VectorXf>(Y(first), values))
                   .squaredNorm();
    });
    report->error_after = error / total;
    return OkStatus();
  }

  Status SolveDown(const float* missing, const std::vector<float>& energy) {
    std::vector<float> weight(energy.size());
    double mean = 0;
    for (size_t t = 0; t < energy.size(); ++t) {
      weight[t] = importance_[t] / std::max(energy[t], 1e-6F);
      mean += weight[t] / static_cast<double>(energy.size());
    }
    for (float& w : weight) w = std::min(w / static_cast<float>(mean), kLargestTokenWeight);
    RowMatrix gram = RowMatrix::Zero(width_, width_), right = RowMatrix::Zero(width_, hidden_);
    const Rows active{H(0), width_, tokens_, width_};
    AddProducts(ctx_, active, active, weight, &gram);
    AddProducts(ctx_, active, {missing, hidden_, tokens_, hidden_}, weight, &right);
    ASSIGN_OR_RETURN(const RowMatrix change, SolveRidge(*ctx_.pool, gram, right, options_.ridge));
    result_.down += change.transpose();
    return OkStatus();
  }

  const kernels::ExecContext& ctx_;
  const DenseLayer& layer_;
  const CarveOptions& options_;
  CalibrationStream& stream_;
  const int tokens_, hidden_, width_, slice_, routed_;
  const float eps_;
  runtime::Buffer inputs_;           // [tokens, hidden], normalized FFN inputs
  runtime::Buffer activations_;      // [tokens, width]; inactive experts are zeroed later
  runtime::Buffer dense_;            // [tokens, hidden]
  std::vector<float> squared_norm_;  // [width], of the columns of down
  std::vector<float> importance_;    // [tokens], with mean 1
  int step_ = 1;                     // distance between sampled tokens
  RowMatrix sampled_;                // [tokens / step, width] shares of energy
  std::vector<int> expert_of_;       // [width], -1: shared
  CarvedFfn result_;
};

}  // namespace

StatusOr<CarvedFfn> CarveFfn(const kernels::ExecContext& ctx, const models::DecoderSpec& spec,
                             const quantizer::DenseLayer& layer, const CarveOptions& options,
                             const LayerPlan* given, quantizer::CalibrationStream* stream,
                             CarveLayerReport* report) {
  return FfnCarver(ctx, spec, layer, options, stream).Run(given, report);
}

}  // namespace moesaic::carve
