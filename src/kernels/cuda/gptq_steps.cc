#include "kernels/gptq_steps.h"

#include "kernels/cuda/gptq_args.h"

namespace moesaic::kernels {
namespace {

static_assert(kGptqBlockColumns == cuda::kBlockColumns && kGptqBlockRows == cuda::kBlockRows);

// Launches a kernel with one thread for each of `count` elements.
Status ForEach(GptqAccelerator& device, DeviceKernel kernel, int64_t count, const void* arguments) {
  return device.Launch(kernel, (count + cuda::kThreads - 1) / cuda::kThreads, cuda::kThreads, arguments);
}

}  // namespace

Status OrderMatrix(GptqAccelerator& device, const DeviceOrder& order) {
  const cuda::OrderMatrixArgs args = {.sums = order.sums,
                                      .order = order.order,
                                      .matrix = order.matrix,
                                      .k = order.k,
                                      .k_padded = order.k_padded,
                                      .scale = order.scale,
                                      .added = order.added};
  return ForEach(device, DeviceKernel::kOrderMatrix, int64_t{order.k_padded} * order.k_padded, &args);
}

Status ReverseFactor(GptqAccelerator& device, const DeviceReverse& reverse) {
  const cuda::ReverseFactorArgs args = {.matrix = reverse.matrix,
                                        .panels = reverse.panels,
                                        .diagonal_blocks = reverse.diagonal_blocks,
                                        .diagonal = reverse.diagonal,
                                        .k_padded = reverse.k_padded};
  return ForEach(device, DeviceKernel::kReverseFactor, int64_t{reverse.k_padded} * reverse.k_padded, &args);
}

Status CopyDiagonal(GptqAccelerator& device, const float* sums, int k, int k_padded, float* diagonal) {
  const cuda::CopyDiagonalArgs args = {.sums = sums, .diagonal = diagonal, .k = k, .k_padded = k_padded};
  return ForEach(device, DeviceKernel::kCopyDiagonal, k, &args);
}

Status GatherWeights(GptqAccelerator& device, const DeviceGather& gather) {
  const cuda::GatherWeightsArgs args = {.weights = gather.weights,
                                        .order = gather.order,
                                        .values = gather.values,
                                        .rows = gather.rows,
                                        .rows_padded = gather.rows_padded,
                                        .k = gather.k};
  return ForEach(device, DeviceKernel::kGatherWeights, int64_t{gather.k} * gather.rows_padded, &args);
}

Status RoundColumns(GptqAccelerator& device, const DeviceRound& round) {
  const cuda::RoundBlockArgs args = {.values = round.values,
                                     .corrections = round.corrections,
                                     .scales = round.scales,
                                     .order = round.order,
                                     .factor = round.factor,
                                     .errors = round.errors,
                                     .codes = round.codes,
                                     .losses = round.losses,
                                     .begin = round.begin,
                                     .columns = round.columns,
                                     .rows = round.rows,
                                     .rows_padded = round.rows_padded,
                                     .k = round.k,
                                     .group = round.group};
  const auto kernel =
      static_cast<DeviceKernel>(static_cast<int>(DeviceKernel::kRoundInt8) + static_cast<int>(round.grid));
  return device.Launch(kernel, round.rows_padded / cuda::kBlockRows, cuda::kBlockRows, &args);
}

}  // namespace moesaic::kernels
