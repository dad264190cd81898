// Configuration of the AMX tile registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moesaic::kernels::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 1024;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// Sets the rows of each tile and their bytes.
inline void Configure(const int (&rows)[8], const int (&row_bytes)[8]) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = static_cast<uint16_t>(row_bytes[i]);
    config.rows[i] = static_cast<uint8_t>(rows[i]);
  }
  // Inline assembly instead of _tile_loadconfig: GCC 12's declares 8 bytes of input and lets the compiler
  // drop the rest.
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/// Sets the rows of each tile, with 64 bytes each.
inline void Configure(const int (&rows)[8]) { Configure(rows, {64, 64, 64, 64, 64, 64, 64, 64}); }

}  // namespace
}  // namespace moesaic::kernels::cpu
