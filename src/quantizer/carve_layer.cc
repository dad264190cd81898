#include "quantizer/carve_layer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "quantizer/balanced_clusters.h"

namespace moesaic::quantizer {
namespace {

constexpr int kChunk = 1024;          // tokens one task looks at
constexpr int kClusterTokens = 4096;  // tokens that describe a neuron to the clustering
constexpr int kClusterIterations = 10;
constexpr float kLeastShare = 1e-4F;  // keeps the logarithm of an idle expert's energy share finite
constexpr float kRouterRidge = 0.01F;
constexpr float kLargestTokenWeight =
    20;  // times the mean: a few near-zero outputs must not decide the refit

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

  StatusOr<CarvedFfn> Run(CarveLayerReport* report) {
    RETURN_IF_ERROR(ComputeDense());
    ChooseShared();
    ClusterRouted();
    RETURN_IF_ERROR(FitRouter());
    MaskInactive(report);
    RETURN_IF_ERROR(Refit(report));
    return std::move(result_);
  }

 private:
  float* H(int64_t token) const { return activations_.as<float>() + token * width_; }
  float* U(int64_t token) const { return inputs_.as<float>() + token * hidden_; }
  float* Y(int64_t token) const { return dense_.as<float>() + token * hidden_; }
  int chunks() const { return (tokens_ + kChunk - 1) / kChunk; }

  static StatusOr<runtime::Buffer> Floats(int64_t count) {
    return runtime::Buffer::Allocate(static_cast<size_t>(count) * sizeof(float), /*huge=*/true);
  }

  // Calls body(first token, count) for runs of tokens, one after another; the operators inside use all
  // threads.
  template <typename F>
  void ForRuns(const F& body) {
    constexpr int kRun = 8192;
    for (int first = 0; first < tokens_; first += kRun) body(first, std::min(kRun, tokens_ - first));
  }

  // out [count, n] = x [count, k] W^T for tokens from `first` on.
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

  // A neuron's part of the energy of one token's FFN output, as far as neurons can be told apart: (h_j
  // |W_down,j|)^2.
  float Energy(const float* h, int neuron) const { return h[neuron] * h[neuron] * squared_norm_[neuron]; }

  float TotalEnergy(const float* h) const {
    float total = 0;
    for (int j = 0; j < width_; ++j) total += Energy(h, j);
    return std::max(total, 1e-12F);
  }

  void ChooseShared() {
    // Sums by chunk, then in order: the same whatever thread takes which chunk.
    std::vector<float> shares(static_cast<size_t>(chunks()) * width_, 0);
    ctx_.pool->Run(chunks(), [&](int64_t chunk, int) {
      float* sum = shares.data() + chunk * width_;
      for (int64_t t = chunk * kChunk; t < std::min<int64_t>(tokens_, (chunk + 1) * kChunk); ++t) {
        const float scale = 1 / TotalEnergy(H(t));
        for (int j = 0; j < width_; ++j) sum[j] += Energy(H(t), j) * scale;
      }
    });
    std::vector<double> rate(static_cast<size_t>(width_), 0);
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      for (int j = 0; j < width_; ++j) rate[j] += shares[static_cast<size_t>(chunk) * width_ + j];
    }
    std::vector<int> order(static_cast<size_t>(width_));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rate[a] > rate[b]; });
    const int shared = options_.shared * slice_;
    result_.shared.assign(order.begin(), order.begin() + shared);
    others_.assign(order.begin() + shared, order.end());
    std::sort(result_.shared.begin(), result_.shared.end());
    std::sort(others_.begin(), others_.end());
  }

  void ClusterRouted() {
    const int step = std::max(1, tokens_ / kClusterTokens);
    const int dims = tokens_ / step;
    RowMatrix features(static_cast<int64_t>(others_.size()), dims);
    ctx_.pool->Run((dims + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
      for (int64_t d = chunk * kChunk; d < std::min<int64_t>(dims, (chunk + 1) * kChunk); ++d) {
        const float* h = H(d * step);
        const float scale = 1 / TotalEnergy(h);
        for (size_t i = 0; i < others_.size(); ++i) {
          features(static_cast<int64_t>(i), d) = std::sqrt(Energy(h, others_[i]) * scale);
        }
      }
    });
    const std::vector<int> cluster =
        BalancedClusters(*ctx_.pool, std::move(features), routed_, kClusterIterations);
    result_.experts.assign(static_cast<size_t>(routed_), {});
    expert_of_.assign(static_cast<size_t>(width_), -1);
    for (size_t i = 0; i < others_.size(); ++i) {
      result_.experts[cluster[i]].push_back(others_[i]);
      expert_of_[others_[i]] = cluster[i];
    }
  }

  // Each routed expert's share of a token's energy; returns the shared expert's.
  float Shares(const float* h, float* shares) const {
    std::fill(shares, shares + routed_, 0.0F);
    float shared = 0;
    const float scale = 1 / TotalEnergy(h);
    for (int j = 0; j < width_; ++j) {
      const float share = Energy(h, j) * scale;
      (expert_of_[j] < 0 ? shared : shares[expert_of_[j]]) += share;
    }
    return shared;
  }

  // Least squares of every expert's log share on the layer's input, with an intercept.
  Status FitRouter() {
    RowMatrix target(tokens_, routed_), centered(tokens_, hidden_);
    ctx_.pool->Run(chunks(), [&](int64_t chunk, int) {
      for (int64_t t = chunk * kChunk; t < std::min<int64_t>(tokens_, (chunk + 1) * kChunk); ++t) {
        Shares(H(t), target.row(t).data());
        target.row(t) = (target.row(t).array() + kLeastShare).log();
        centered.row(t) = Eigen::Map<const Eigen::RowVectorXf>(U(t), hidden_);
      }
    });
    const Eigen::RowVectorXf mean_target = target.cast<double>().colwise().mean().cast<float>();
    const Eigen::RowVectorXf mean_input = centered.cast<double>().colwise().mean().cast<float>();
    target.rowwise() -= mean_target;
    centered.rowwise() -= mean_input;
    RowMatrix gram = RowMatrix::Zero(hidden_, hidden_), right = RowMatrix::Zero(hidden_, routed_);
    const Rows inputs{centered.data(), hidden_, tokens_, hidden_};
    AddProducts(ctx_, inputs, inputs, {}, &gram);
    AddProducts(ctx_, inputs, {target.data(), routed_, tokens_, routed_}, {}, &right);
    ASSIGN_OR_RETURN(const RowMatrix weights, SolveRidge(*ctx_.pool, gram, right, kRouterRidge));
    result_.router = weights.transpose();
    const Eigen::RowVectorXf bias = mean_target - mean_input * weights;
    result_.bias.assign(bias.data(), bias.data() + routed_);
    return OkStatus();
  }

  // Zeroes the activations of experts that the router leaves out.
  void MaskInactive(CarveLayerReport* report) {
    std::vector<double> kept(static_cast<size_t>(chunks()), 0);
    ctx_.pool->Run(chunks(), [&](int64_t chunk, int) {
      std::vector<float> score(static_cast<size_t>(routed_)), shares(static_cast<size_t>(routed_));
      std::vector<int> order(static_cast<size_t>(routed_));
      for (int64_t t = chunk * kChunk; t < std::min<int64_t>(tokens_, (chunk + 1) * kChunk); ++t) {
        Eigen::Map<Eigen::VectorXf> scores(score.data(), routed_);
        scores.noalias() = result_.router * Eigen::Map<const Eigen::VectorXf>(U(t), hidden_);
        for (int e = 0; e < routed_; ++e) score[e] += result_.bias[e];
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return score[a] > score[b]; });
        double sum = Shares(H(t), shares.data());
        for (int i = 0; i < routed_; ++i) {
          if (i < options_.active) {
            sum += shares[order[i]];
            continue;
          }
          for (const int neuron : result_.experts[order[i]]) H(t)[neuron] = 0;
        }
        kept[chunk] += sum;
      }
    });
    report->kept_energy = std::accumulate(kept.begin(), kept.end(), 0.0) / tokens_;
  }

  // Refits down so that the active neurons alone give the dense output, and moves the stream on.
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
    ASSIGN_OR_RETURN(const OwnedMatrix down, PackMatrix(*ctx_.pool, result_.down.data(), hidden_, width_));
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
    // Tokens count alike however large their output is.
    std::vector<float> weight(energy.size());
    double mean = 0;
    for (size_t t = 0; t < energy.size(); ++t) {
      weight[t] = 1 / std::max(energy[t], 1e-6F);
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
  runtime::Buffer inputs_;           // [tokens, hidden] after the norm
  runtime::Buffer activations_;      // [tokens, width], later masked
  runtime::Buffer dense_;            // [tokens, hidden]
  std::vector<float> squared_norm_;  // [width] of down's columns
  std::vector<int> others_;          // neurons outside the shared expert
  std::vector<int> expert_of_;       // [width], -1: shared
  CarvedFfn result_;
};

}  // namespace

StatusOr<CarvedFfn> CarveFfn(const kernels::ExecContext& ctx, const models::DecoderSpec& spec,
                             const DenseLayer& layer, const CarveOptions& options, CalibrationStream* stream,
                             CarveLayerReport* report) {
  return FfnCarver(ctx, spec, layer, options, stream).Run(report);
}

}  // namespace moesaic::quantizer
