// Sums products of a linear layer's inputs over tokens. Hessians consist of these sums.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernels/exec_context.h"
#include "tensor/dtype.h"

namespace moesaic::quantizer {

/// A borrowed view of a linear layer's inputs, one row per token, in f32 or bf16.
struct TokenRows {
  const float* f32 = nullptr;
  const tensor::BF16* bf16 = nullptr;
  int64_t stride = 0;  // elements between tokens
  int count = 0;
};
using TokenSink = std::function<void(const TokenRows&)>;

/// Selects the sums and their location: (i, j) is row(i)[j].
struct ProductSums {
  enum class Region : uint8_t {
    kLower,     // j <= i
    kUpper,     // j >= i
    kDiagonal,  // only i in diagonal blocks of kDiagonalRows
  };
  int k = 0;
  Region region = Region::kLower;
  std::function<float*(int i)> row;
  std::function<int64_t(int i)> stride;  // floats between rows; constant in blocks of 512 (kDiagonal: of 128)
};

/// Rows of a diagonal block. Sums outside the selected part are computed in these as well.
inline constexpr int kDiagonalRows = 128;
/// Tokens that are multiplied at once. Calls that are split at multiples of it add up to the same bits.
inline constexpr int kProductTokens = 512;

/// Adds tokens to the sums. If there is an order, place i holds input order[i]. Values are rounded
/// to bf16; sums are f32. Bits depend neither on the order nor on the number of threads. They depend
/// on the split of tokens into calls.
void AddProducts(const kernels::ExecContext& ctx, const TokenRows& tokens, std::span<const int> order,
                 const ProductSums& sums);
/// Returns the scratch memory in bytes of AddProducts for calls of at most `tokens` tokens.
int64_t AddProductsBytes(int64_t k, int64_t tokens);

}  // namespace moesaic::quantizer
