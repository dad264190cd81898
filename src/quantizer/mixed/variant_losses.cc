#include "quantizer/mixed/variant_losses.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/elementwise.h"
#include "kernels/exec_context.h"
#include "models/weight_decl.h"
#include "quantizer/format/grid.h"
#include "quantizer/format/runtime_matrix.h"
#include "quantizer/format/weight_rows.h"

namespace moesaic::quantizer {
namespace {

constexpr double kInfiniteLoss = std::numeric_limits<double>::infinity();
constexpr int64_t kHeadValues = int64_t{1} << 24;
// Rows of predictions at a time.
constexpr int kPredicted = 64;

// The logarithm of a sum of exponentials, relative to the largest term.
struct LogSum {
  double largest = -kInfiniteLoss, sum = 0;

  // Raises the maximum to at least `more`. Returns the factor for all previous sums.
  double Raise(double more) {
    if (!(more > largest)) return 1;
    const double factor = std::exp(largest - more);
    largest = more;
    sum *= factor;
    return factor;
  }
  double value() const { return largest + std::log(sum); }
};

// Sums of a token on a variant: sum of exp(p - largest p) (p - q) over the first variant's logits p and its
// own logits q.
struct TokenSums {
  LogSum own;
  double difference = 0;
};

class Losses {
 public:
  Losses(const kernels::ExecContext& ctx, const models::DecoderSpec& spec, std::vector<float> norm, int rows,
         CalibrationStream& stream)
      : ctx_(ctx),
        spec_(spec),
        norm_(std::move(norm)),
        stream_(stream),
        sums_(static_cast<size_t>(stream.tokens())),
        normed_(size_t{kPredicted} * spec.hidden),
        exact_(size_t{kPredicted} * rows),
        other_(exact_.size()),
        shares_(exact_.size()),
        factors_(kPredicted) {}

  // Adds the logits of some rows of the head.
  void Add(const tensor::PackedMatrix& head) {
    const int tokens = stream_.variant_tokens(), vocab = head.n();
    for (int first = 0; first < tokens && stream_.Continues(); first += kPredicted) {
      const int count = std::min(kPredicted, tokens - first);
      Predict(head, 0, first, count, exact_.data());
      ctx_.pool->Run(count, [&](int64_t row, int) {
        const float* p = exact_.data() + row * vocab;
        double* shares = shares_.data() + row * vocab;
        LogSum& sum = sums_[first + row].own;
        factors_[row] = sum.Raise(*std::max_element(p, p + vocab));
        for (int i = 0; i < vocab; ++i) sum.sum += shares[i] = std::exp(p[i] - sum.largest);
      });
      for (int variant = 1; variant < stream_.variants(); ++variant) {
        Predict(head, variant, first, count, other_.data());
        ctx_.pool->Run(count, [&](int64_t row, int) {
          const float *p = exact_.data() + row * vocab, *q = other_.data() + row * vocab;
          const double* shares = shares_.data() + row * vocab;
          TokenSums& sums = sums_[int64_t{variant} * tokens + first + row];
          sums.own.Raise(*std::max_element(q, q + vocab));
          double difference = 0;
          for (int i = 0; i < vocab; ++i) {
            sums.own.sum += std::exp(q[i] - sums.own.largest);
            difference += shares[i] * (static_cast<double>(p[i]) - q[i]);
          }
          sums.difference = sums.difference * factors_[row] + difference;
        });
      }
    }
  }

  // Returns sum p (log p - log q), where log p = p - P and log q = q - Q for the log-sums P and Q.
  std::vector<double> Finish() const {
    const int tokens = stream_.variant_tokens();
    std::vector<double> losses(static_cast<size_t>(stream_.variants()));
    for (int variant = 1; variant < stream_.variants(); ++variant) {
      for (int token = 0; token < tokens; ++token) {
        const LogSum& p = sums_[token].own;
        const TokenSums& q = sums_[int64_t{variant} * tokens + token];
        const double divergence = q.difference / p.sum - p.value() + q.own.value();
        losses[variant] += (std::isfinite(divergence) ? std::max(divergence, 0.0) : kInfiniteLoss) / tokens;
      }
    }
    return losses;
  }

 private:
  void Predict(const tensor::PackedMatrix& head, int variant, int first, int count, float* logits) {
    const int hidden = spec_.hidden;
    kernels::RmsNorm(ctx_,
                     {.x = stream_.hidden() + (int64_t{variant} * stream_.variant_tokens() + first) * hidden,
                      .x_stride = hidden,
                      .weight = norm_.data(),
                      .y = normed_.data(),
                      .y_stride = hidden,
                      .rows = count,
                      .n = hidden,
                      .eps = spec_.norm_eps});
    layers::Apply(ctx_, {head}, normed_.data(), hidden, count, logits, head.n());
  }

  const kernels::ExecContext& ctx_;
  const models::DecoderSpec& spec_;
  const std::vector<float> norm_;
  CalibrationStream& stream_;
  std::vector<TokenSums> sums_;                // [variants, tokens]
  std::vector<float> normed_, exact_, other_;  // [kPredicted, hidden]; logits: [kPredicted, rows]
  std::vector<double> shares_, factors_;       // exp(p - largest p) of exact_; [kPredicted]
};

}  // namespace

int VariantLossRows(const models::DecoderSpec& spec) {
  const int64_t rows = kHeadValues / spec.hidden / tensor::kPanelRows * tensor::kPanelRows;
  return static_cast<int>(std::min<int64_t>(std::max<int64_t>(rows, tensor::kPanelRows), spec.vocab));
}

StatusOr<std::vector<double>> VariantLosses(const kernels::ExecContext& ctx,
                                            const checkpoint::Checkpoint& source,
                                            const models::DecoderSpec& spec, tensor::DType exact, int rows,
                                            CalibrationStream& stream) {
  const int64_t shape[] = {spec.hidden};
  ASSIGN_OR_RETURN(std::vector<float> norm, source.ReadF32(models::kFinalNorm, shape));
  const std::string module = spec.tied ? models::kEmbedding : models::kHead;
  Losses losses(ctx, spec, std::move(norm), rows, stream);
  for (int first = 0; first < spec.vocab; first += rows) {
    const int count = std::min(rows, spec.vocab - first);
    ASSIGN_OR_RETURN(RuntimeMatrix packed, RuntimeMatrix::OfKept(exact, count, spec.hidden));
    {
      ASSIGN_OR_RETURN(const std::vector<float> values,
                       ReadRows(ctx, source, module, spec.vocab, spec.hidden, first, count));
      const StatusOr<float> largest = LargestMagnitude(ctx, values.data(), count, spec.hidden);
      if (!largest.ok()) {
        return Annotate(largest.status(),
                        fmt::format("{}: {}, from output {}", source.path(), module, first));
      }
      packed.AddKept(*ctx.pool, 0, count, values.data());
    }
    const OwnedMatrix head = packed.Take();
    losses.Add(head.matrix);
    RETURN_IF_ERROR(stream.watched());
  }
  return losses.Finish();
}

int64_t VariantLossBytes(const models::DecoderSpec& spec, tensor::DType exact, int64_t tokens) {
  const int64_t rows = VariantLossRows(spec), values = rows * spec.hidden;
  return values * (4 + (exact == tensor::DType::kF32 ? 4 : 2)) +
         kPredicted * (rows * int64_t{16} + spec.hidden * int64_t{12}) +
         tokens * static_cast<int64_t>(sizeof(TokenSums));
}

}  // namespace moesaic::quantizer
