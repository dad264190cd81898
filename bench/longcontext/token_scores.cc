#include "token_scores.h"

// Tiles by attributes of functions: the program runs on processors without them too.
#include <immintrin.h>

#include <cstring>

#include "runtime/cpu_features.h"

namespace moesaic::bench {
namespace {

constexpr int kKeys = 64, kStep = 32;  // dimensions of a tile's row

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

__attribute__((target("amx-tile,amx-bf16"))) void ScoreByTiles(const TokenScores& t) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t tile = 16 * t.stride;
  for (int s = 0; s < t.key_dim / kStep; ++s) {
    const std::byte* keys = t.keys + int64_t{64} * s;
    _tile_loadd(4, t.packed + int64_t{1024} * s, 64);
    _tile_loadd(5, keys, t.stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, keys + tile, t.stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(5, keys + 2 * tile, t.stride);
    _tile_dpbf16ps(2, 5, 4);
    _tile_loadd(6, keys + 3 * tile, t.stride);
    _tile_dpbf16ps(3, 6, 4);
  }
  _tile_stored(0, t.scores, 64);
  _tile_stored(1, t.scores + 16 * kScoreRows, 64);
  _tile_stored(2, t.scores + 32 * kScoreRows, 64);
  _tile_stored(3, t.scores + 48 * kScoreRows, 64);
  _tile_release();
}

bool ByTiles(const TokenScores& t) {
  static const bool has = runtime::DetectCpu().Has(runtime::Isa::kAmx);
  return has && t.dtype == tensor::DType::kBF16 && t.key_dim % kStep == 0;
}

float At(const TokenScores& t, int key, int d) {
  const std::byte* row = t.keys + key * t.stride;
  if (t.dtype == tensor::DType::kBF16) return tensor::ToFloat(reinterpret_cast<const tensor::BF16*>(row)[d]);
  return static_cast<float>(reinterpret_cast<const int8_t*>(row)[d]);
}

}  // namespace

void PackTokenQueries(const TokenScores& t) {
  std::memset(t.packed, 0, size_t(t.key_dim) * 2 * kScoreRows);
  auto* to = reinterpret_cast<tensor::BF16*>(t.packed);  // [pair of dimensions][row][2]
  for (int r = 0; r < t.rows; ++r) {
    for (int d = 0; d < t.key_dim; ++d) {
      to[(d / 2 * kScoreRows + r) * 2 + d % 2] = tensor::ToBF16(t.q[size_t(r) * t.key_dim + d]);
    }
  }
}

void ScoreTokens(const TokenScores& t) {
  if (ByTiles(t)) return ScoreByTiles(t);
  std::memset(t.scores, 0, sizeof(float) * kKeys * kScoreRows);
  for (int key = 0; key < kKeys; ++key) {
    for (int r = 0; r < t.rows; ++r) {
      float sum = 0;
      for (int d = 0; d < t.key_dim; ++d) sum += At(t, key, d) * t.q[size_t(r) * t.key_dim + d];
      t.scores[key * kScoreRows + r] = sum;
    }
  }
}

}  // namespace moesaic::bench
