// Products of a linear layer's inputs, summed over tokens: what Hessians consist of.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernels/ops.h"
#include "tensor/dtype.h"

namespace moesaic::quantizer {

/// Inputs of a linear layer, one row a token, that somebody else owns: of either type.
struct TokenRows {
  const float* f32 = nullptr;
  const tensor::BF16* bf16 = nullptr;
  int64_t stride = 0;  // elements between tokens
  int count = 0;
  /// [count] or empty (all 1): what the layer's output is multiplied by, as an expert's by the router. Errors
  /// then count by its square.
  std::span<const float> gates;
};
using TokenSink = std::function<void(const TokenRows&)>;

/// How much tokens count together.
struct TokenWeight {
  int64_t tokens = 0;
  double weight = 0, fourth = 0;  // sums of gate^2 and gate^4

  void Add(const TokenRows& rows);
  void Add(const TokenWeight& other);
  /// As many tokens of equal gates would say as much: (sum of gate^2)^2 / sum of gate^4.
  double effective_tokens() const { return fourth > 0 ? weight * weight / fourth : 0; }
};

/// Which sums there are, and where: (i, j) is row(i)[j].
struct ProductSums {
  enum class Part : uint8_t {
    kLower,     // j <= i
    kUpper,     // j >= i
    kDiagonal,  // those with i in blocks of kDiagonalRows
  };
  int k = 0;
  Part part = Part::kLower;
  std::function<float*(int i)> row;
  std::function<int64_t(int i)> stride;  // floats between rows: the same in blocks of 512 (kDiagonal: of 128)
};

/// Rows of a block on the diagonal; some of what is beyond the part is summed up in these, too.
inline constexpr int kDiagonalRows = 128;
/// Tokens whose products are taken at once: calls that are cut at multiples of it add up to the same bits.
inline constexpr int kProductTokens = 512;

/// Adds tokens to the sums. Place i is that of input order[i], where there is an order. Values (times gates)
/// are rounded to bf16 on the way into the products, sums are f32. Bits depend neither on the order nor on
/// the number of threads; they do on how tokens are cut into calls.
void AddProducts(const kernels::ExecContext& ctx, const TokenRows& tokens, std::span<const int> order,
                 const ProductSums& sums);
/// Scratch memory of it, for calls of at most so many tokens.
int64_t AddProductsBytes(int64_t k, int64_t tokens);

}  // namespace moesaic::quantizer
