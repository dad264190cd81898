// Setting up the AMX tile registers.
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

/// Gives each tile its rows and their bytes.
inline void Configure(const int (&rows)[8], const int (&row_bytes)[8]) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = static_cast<uint16_t>(row_bytes[i]);
    config.rows[i] = static_cast<uint8_t>(rows[i]);
  }
  // Not _tile_loadconfig: GCC 12's names 8 bytes as its input and lets the compiler drop the rest.
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/// Gives each tile its rows, of 64 bytes.
inline void Configure(const int (&rows)[8]) { Configure(rows, {64, 64, 64, 64, 64, 64, 64, 64}); }

}  // namespace
}  // namespace moesaic::kernels::cpu
