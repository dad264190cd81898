#include "quantizer/gptq/accelerated_gptq.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/round.h"
#include "kernels/exec_context.h"
#include "kernels/gptq_accelerator.h"
#include "kernels/gptq_steps.h"

namespace moesaic::quantizer {
namespace {

using kernels::kGptqBlockRows;

constexpr int kStageBlock = kFactorBlock;
constexpr int kLossRows = 2 * kOfNearestRows;
// Rows of sums of one product. Only the columns of the triangle are computed.
constexpr int kStripe = 2048;
// Rows of sums per transfer. This takes less memory than a factorization on the CPU.
constexpr int kRowsAtOnce = 128;
// Device memory of the driver and the libraries, estimated high.
constexpr int64_t kLibraryBytes = int64_t{512} << 20;

// Grid of shapes without rows, which have no scales.
constexpr Grid kAnyGrid{GridKind::kInt8Channel, 0};

static_assert(kStageBlock == kernels::kGptqBlockColumns);

int PaddedRows(int k) { return base::RoundUp(k, kStageBlock); }

// Scratch memory, released at the end of the scope.
class Scratch {
 public:
  explicit Scratch(const kernels::ExecContext& ctx) : ctx_(ctx), mark_(ctx.scratch->Mark()) {}
  ~Scratch() { ctx_.scratch->Rewind(mark_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <typename T>
  std::span<T> Take(int64_t count) {
    return ctx_.scratch->Take<T>(static_cast<size_t>(count));
  }

 private:
  const kernels::ExecContext& ctx_;
  size_t mark_;
};

}  // namespace

StatusOr<AcceleratedGptq::Sizes> AcceleratedGptq::SizesOf(kernels::GptqAccelerator& device,
                                                          const Shape& shape) {
  constexpr int64_t kFloat = sizeof(float), kHalf = sizeof(uint16_t);
  const int64_t k = shape.k, padded = PaddedRows(shape.k), rows = base::RoundUp(shape.n, kGptqBlockRows);
  if (padded > kernels::kMaxCholesky) {
    return Unimplemented(
        "a linear of {} inputs is too wide for {}, whose library factors up to {}; omit --device", k,
        device.info().name, kernels::kMaxCholesky / kStageBlock * kStageBlock);
  }
  Sizes sizes = {};
  sizes[kSums] = sizes[kMatrix] = padded * padded * kFloat;
  ASSIGN_OR_RETURN(sizes[kWork], device.CholeskyBytes(static_cast<int>(padded)));
  sizes[kInputs] = kProductTokens * padded * kHalf;
  sizes[kOrder] = k * int64_t{sizeof(int)};
  sizes[kPanels] = padded * padded * kHalf;
  sizes[kBlocks] = padded * kStageBlock * kFloat;
  sizes[kDiagonal] = padded * kFloat;
  sizes[kWeights] = shape.n * k * kFloat;
  sizes[kValues] = k * rows * kFloat;
  sizes[kScales] = shape.grid.scale_columns(shape.k) * rows * kFloat;
  sizes[kErrors] = padded * std::max<int64_t>(rows, kLossRows) * kHalf;
  sizes[kAsked] = std::max(kStageBlock * rows, padded * kLossRows) * kFloat;
  sizes[kCodes] = shape.n * k;
  sizes[kLosses] = rows * kFloat;
  return sizes;
}

StatusOr<std::unique_ptr<GptqStage>> AcceleratedGptq::Create(kernels::GptqAccelerator& device,
                                                             std::span<const Shape> shapes) {
  Sizes most = {};
  for (const Shape& shape : shapes) {
    ASSIGN_OR_RETURN(const Sizes sizes, SizesOf(device, shape));
    for (int kind = 0; kind < kBufferKinds; ++kind) most[kind] = std::max(most[kind], sizes[kind]);
  }
  const int64_t needed = std::accumulate(most.begin(), most.end(), int64_t{0});
  ASSIGN_OR_RETURN(const int64_t free, device.FreeBytes());
  if (needed + kLibraryBytes > free) {
    return ResourceExhausted(
        "{}: GPTQ of these linears needs {} bytes and {} for its libraries; end other programs on it, or or "
        "omit --device; {} bytes are free",
        device.info().name, needed, kLibraryBytes, free);
  }
  std::unique_ptr<AcceleratedGptq> stage(new AcceleratedGptq(device));
  stage->bytes_ = most;
  for (int kind = 0; kind < kBufferKinds; ++kind) {
    if (most[kind] == 0) continue;
    ASSIGN_OR_RETURN(stage->memory_[kind], kernels::DeviceBuffer::Allocate(device, most[kind]));
  }
  return stage;
}

Status AcceleratedGptq::CheckFits(const Shape& shape) const {
  ASSIGN_OR_RETURN(const Sizes sizes, SizesOf(device_, shape));
  for (int kind = 0; kind < kBufferKinds; ++kind) {
    if (sizes[kind] > bytes_[kind]) {
      return Status(StatusCode::kInternal,
                    fmt::format("{} rows of {} inputs need {} bytes on {}, but {} are allocated", shape.n,
                                shape.k, sizes[kind], device_.info().name, bytes_[kind]));
    }
  }
  return OkStatus();
}

Status AcceleratedGptq::AddTokens(const kernels::ExecContext& ctx, int k, const TokenRows& tokens) {
  const int padded = PaddedRows(k);
  // Products are split as on the CPU, so that bits do not depend on the number of tokens per call.
  for (int first = 0; first < tokens.count; first += kProductTokens) {
    const int count = std::min(kProductTokens, tokens.count - first), depth = base::RoundUp(count, 64);
    Scratch scratch(ctx);
    const auto rounded = scratch.Take<uint16_t>(int64_t{depth} * padded);
    ctx.pool->Run(depth, [&](int64_t t, int) {
      uint16_t* row = rounded.data() + t * padded;
      const int live = t < count ? k : 0;
      const int64_t at = (first + t) * tokens.stride;
      for (int i = 0; i < live; ++i) {
        const float value =
            tokens.bf16 != nullptr ? tensor::ToFloat(tokens.bf16[at + i]) : tokens.f32[at + i];
        row[i] = tensor::ToBF16(value).bits;
      }
      std::fill(row + live, row + padded, uint16_t{0});
    });
    RETURN_IF_ERROR(Upload(kInputs, rounded.data(), std::ssize(rounded) * int64_t{sizeof(uint16_t)}));
    for (int row = 0; row < padded; row += kStripe) {
      const int rows = std::min(kStripe, padded - row);
      RETURN_IF_ERROR(device_.Gemm({.transpose_a = true,
                                    .m = rows,
                                    .n = row + rows,
                                    .depth = depth,
                                    .a = at<uint16_t>(kInputs) + row,
                                    .b = at<uint16_t>(kInputs),
                                    .c = at<float>(kSums) + int64_t{row} * padded,
                                    .a_stride = padded,
                                    .b_stride = padded,
                                    .c_stride = padded,
                                    .accumulate = true}));
    }
  }
  return OkStatus();
}

Status AcceleratedGptq::SumUp(const kernels::ExecContext& ctx, int k, const InputSource& inputs,
                              int64_t* seen) {
  const int64_t padded = PaddedRows(k);
  RETURN_IF_ERROR(CheckFits({kAnyGrid, 0, k}));
  RETURN_IF_ERROR(device_.Zero(at<void>(kSums), padded * padded * int64_t{sizeof(float)}));
  Status failed;
  RETURN_IF_ERROR(inputs([&](const TokenRows& tokens) {
    if (!failed.ok()) return;
    failed = AddTokens(ctx, k, tokens);
    *seen += tokens.count;
  }));
  return failed;
}

Status AcceleratedGptq::Gather(const kernels::ExecContext& ctx, const InputSource& inputs, Hessian* hessian) {
  const int k = hessian->k(), padded = PaddedRows(k);
  int64_t seen = 0;
  RETURN_IF_ERROR(SumUp(ctx, k, inputs, &seen));
  Scratch scratch(ctx);
  const auto rows = scratch.Take<float>(int64_t{kRowsAtOnce} * padded);
  for (int first = 0; first < k; first += kRowsAtOnce) {
    const int count = std::min(kRowsAtOnce, k - first);
    const int64_t values = int64_t{count} * padded;
    RETURN_IF_ERROR(device_.Download(rows.data(), at<float>(kSums) + int64_t{first} * padded,
                                     values * int64_t{sizeof(float)}));
    hessian->AddSums(ctx, first, count, rows.data(), padded);
  }
  hessian->AddTokens(seen);
  return OkStatus();
}

StatusOr<const HessianFactor*> AcceleratedGptq::Factor(const kernels::ExecContext& ctx,
                                                       const Hessian& hessian, const FactorOptions& options) {
  const int k = hessian.k(), padded = PaddedRows(k);
  RETURN_IF_ERROR(CheckFits({kAnyGrid, 0, k}));
  ASSIGN_OR_RETURN(const float mean,
                   BeginFactor(
                       k, hessian.tokens(), options, [&](int i) { return hessian.sums(i)[i]; }, &factor_));
  {
    Scratch scratch(ctx);
    const auto rows = scratch.Take<float>(int64_t{kRowsAtOnce} * padded);
    for (int first = 0; first < k; first += kRowsAtOnce) {
      const int count = std::min(kRowsAtOnce, k - first);
      const int64_t values = int64_t{count} * padded;
      ctx.pool->Run(count, [&](int64_t row, int) {
        const int i = first + static_cast<int>(row);
        float* const to = rows.data() + row * padded;
        std::copy_n(hessian.sums(i), i + 1, to);
        std::fill(to + i + 1, to + padded, 0.0F);
      });
      RETURN_IF_ERROR(device_.Upload(at<float>(kSums) + int64_t{first} * padded, rows.data(),
                                     values * int64_t{sizeof(float)}));
    }
  }
  RETURN_IF_ERROR(FactorSums(hessian.tokens(), mean, options));
  return &factor_;
}

StatusOr<Factorizer::FromInputs> AcceleratedGptq::Factor(const kernels::ExecContext& ctx, int k,
                                                         const InputSource& inputs,
                                                         const FactorOptions& options) {
  Factorizer::FromInputs result;
  RETURN_IF_ERROR(SumUp(ctx, k, inputs, &result.tokens));
  RETURN_IF_ERROR(kernels::CopyDiagonal(device_, at<float>(kSums), k, PaddedRows(k), at<float>(kDiagonal)));
  std::vector<float> squares(k);
  RETURN_IF_ERROR(device_.Download(squares.data(), at<void>(kDiagonal), k * int64_t{sizeof(float)}));
  if (std::ranges::all_of(squares, [](float square) { return square == 0; })) return result;
  ASSIGN_OR_RETURN(const float mean,
                   BeginFactor(
                       k, result.tokens, options, [&](int i) { return squares[i]; }, &factor_));
  RETURN_IF_ERROR(FactorSums(result.tokens, mean, options));
  result.factor = &factor_;
  return result;
}

Status AcceleratedGptq::FactorSums(int64_t tokens, float mean, const FactorOptions& options) {
  RETURN_IF_ERROR(Upload(kOrder, factor_.order.data(), factor_.k * int64_t{sizeof(int)}));
  return FactorDamped(
      options, mean, [&](float added) { return Attempt(tokens, added, options); }, &factor_);
}

StatusOr<bool> AcceleratedGptq::Attempt(int64_t tokens, float added, const FactorOptions& options) {
  if (options.watch) RETURN_IF_ERROR(options.watch());
  const int64_t size = factor_.k_padded;
  RETURN_IF_ERROR(kernels::OrderMatrix(device_, {.sums = at<float>(kSums),
                                                 .order = at<int>(kOrder),
                                                 .matrix = at<float>(kMatrix),
                                                 .k = factor_.k,
                                                 .k_padded = factor_.k_padded,
                                                 .scale = static_cast<float>(1 / static_cast<double>(tokens)),
                                                 .added = added}));
  ASSIGN_OR_RETURN(const bool positive,
                   device_.Cholesky(at<float>(kMatrix), factor_.k_padded, at<void>(kWork)));
  if (!positive) return false;
  RETURN_IF_ERROR(kernels::ReverseFactor(device_, {.matrix = at<float>(kMatrix),
                                                   .panels = at<uint16_t>(kPanels),
                                                   .diagonal_blocks = at<float>(kBlocks),
                                                   .diagonal = at<float>(kDiagonal),
                                                   .k_padded = factor_.k_padded}));
  // A library may accept NaN as a root.
  std::vector<float> diagonal(static_cast<size_t>(size));
  RETURN_IF_ERROR(device_.Download(diagonal.data(), at<void>(kDiagonal), size * int64_t{sizeof(float)}));
  return std::ranges::all_of(diagonal, [](float root) { return root > 0 && std::isfinite(root); });
}

StatusOr<QuantizedMatrix> AcceleratedGptq::Round(const kernels::ExecContext& ctx, const Grid& grid,
                                                 const float* rows, int n, int k, const HessianFactor& factor,
                                                 const ScaleSearch& search, GptqReport* report) {
  MOESAIC_CHECK(&factor == &factor_ && factor.k == k);
  RETURN_IF_ERROR(CheckFits({grid, n, k}));
  ASSIGN_OR_RETURN(QuantizedMatrix result, ChooseScales(ctx, grid, rows, n, k, search));
  result.codes.resize(static_cast<size_t>(n) * k);
  const int padded = base::RoundUp(n, kGptqBlockRows);
  {
    const std::vector<float> scales = ScalesByGroup(result, padded);
    RETURN_IF_ERROR(Upload(kScales, scales.data(), std::ssize(scales) * int64_t{sizeof(float)}));
  }
  RETURN_IF_ERROR(Upload(kWeights, rows, int64_t{n} * k * int64_t{sizeof(float)}));
  RETURN_IF_ERROR(device_.Zero(at<void>(kLosses), padded * int64_t{sizeof(float)}));
  // Before the first column there are no errors. Values of padding rows are ignored.
  RETURN_IF_ERROR(device_.Zero(at<void>(kAsked), int64_t{kStageBlock} * padded * int64_t{sizeof(float)}));
  RETURN_IF_ERROR(kernels::GatherWeights(device_, {.weights = at<float>(kWeights),
                                                   .order = at<int>(kOrder),
                                                   .values = at<float>(kValues),
                                                   .rows = n,
                                                   .rows_padded = padded,
                                                   .k = k}));
  for (int begin = 0; begin < k; begin += kStageBlock) {
    if (begin > 0) {
      RETURN_IF_ERROR(device_.Gemm({.m = kStageBlock,
                                    .n = padded,
                                    .depth = begin,
                                    .a = at<uint16_t>(kPanels) + int64_t{begin} * factor.k_padded,
                                    .b = at<uint16_t>(kErrors),
                                    .c = at<float>(kAsked),
                                    .a_stride = factor.k_padded,
                                    .b_stride = padded,
                                    .c_stride = padded}));
    }
    RETURN_IF_ERROR(
        kernels::RoundColumns(device_, {.grid = grid.numbers(),
                                        .values = at<float>(kValues),
                                        .corrections = at<float>(kAsked),
                                        .scales = at<float>(kScales),
                                        .order = at<int>(kOrder),
                                        .factor = at<float>(kBlocks) + int64_t{begin} * kStageBlock,
                                        .errors = at<uint16_t>(kErrors),
                                        .codes = at<uint8_t>(kCodes),
                                        .losses = at<float>(kLosses),
                                        .begin = begin,
                                        .columns = std::min(kStageBlock, k - begin),
                                        .rows = n,
                                        .rows_padded = padded,
                                        .k = k,
                                        .group = grid.group_inputs(k)}));
  }
  std::vector<float> losses(n);
  RETURN_IF_ERROR(device_.Download(result.codes.data(), at<void>(kCodes), int64_t{n} * k));
  RETURN_IF_ERROR(device_.Download(losses.data(), at<void>(kLosses), n * int64_t{sizeof(float)}));
  report->loss = std::accumulate(losses.begin(), losses.end(), 0.0);
  ASSIGN_OR_RETURN(report->of_nearest, LossOfNearest(ctx, rows, result, [&](const float* errors, int count) {
                     return RowLosses(ctx, errors, count);
                   }));
  return result;
}

// Returns the sum of squares of e R for each of `count` rows e [k] by input.
StatusOr<std::vector<double>> AcceleratedGptq::RowLosses(const kernels::ExecContext& ctx, const float* errors,
                                                         int count) {
  MOESAIC_CHECK_LE(count, kLossRows);
  const int k = factor_.k, padded = factor_.k_padded;
  Scratch scratch(ctx);
  const auto turned = scratch.Take<uint16_t>(int64_t{padded} * kLossRows);
  const auto products = scratch.Take<float>(int64_t{padded} * kLossRows);
  ctx.pool->Run(padded, [&](int64_t p, int) {
    uint16_t* const row = turned.data() + p * kLossRows;
    std::fill_n(row, kLossRows, uint16_t{0});
    if (p >= k) return;
    for (int r = 0; r < count; ++r) row[r] = tensor::ToBF16(errors[int64_t{r} * k + factor_.order[p]]).bits;
  });
  RETURN_IF_ERROR(Upload(kErrors, turned.data(), std::ssize(turned) * int64_t{sizeof(uint16_t)}));
  RETURN_IF_ERROR(device_.Gemm({.m = padded,
                                .n = kLossRows,
                                .depth = padded,
                                .a = at<uint16_t>(kPanels),
                                .b = at<uint16_t>(kErrors),
                                .c = at<float>(kAsked),
                                .a_stride = padded,
                                .b_stride = kLossRows,
                                .c_stride = kLossRows}));
  RETURN_IF_ERROR(
      device_.Download(products.data(), at<void>(kAsked), std::ssize(products) * int64_t{sizeof(float)}));
  std::vector<double> losses(count);
  for (int p = 0; p < padded; ++p) {
    for (int r = 0; r < count; ++r) {
      const double product = products[int64_t{p} * kLossRows + r];
      losses[r] += product * product;
    }
  }
  return losses;
}

}  // namespace moesaic::quantizer
