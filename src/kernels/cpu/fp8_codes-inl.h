// From e4m3 codes to bf16, with 16-entry byte tables. Of a normal code s eeee mmm the bf16's high byte
// follows from s and the upper three bits of its exponent, and the low byte is its lower four bits, shifted.
// Codes with e = 0 (zeros and denormals, which are normal bf16s) are looked up by mmm.
#pragma once

#include <cstdint>

namespace moesaic::kernels::cpu {
namespace {

constexpr int kFp8Inputs = 128;
constexpr int kFp8ScaleBytes = 64;
constexpr int kFp8UnitBytes = kFp8ScaleBytes + 16 * kFp8Inputs;
constexpr int kFp8LineInputs = 4;   // of a line of 64 bytes: a panel's 16 outputs
constexpr int kFp8Exponent = 0x78;  // bits of a code

/// By the upper four bits of a code, as if e were not 0: 120 more than e is the bf16's exponent.
alignas(16) constexpr uint8_t kFp8High[16] = {0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43,
                                              0xbc, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc2, 0xc3};
/// By mmm where e = 0: low bytes of 0, 1, ... 7 times 2^-9, and what turns kFp8High into their high bytes.
alignas(16) constexpr uint8_t kFp8SmallLow[16] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60};
alignas(16) constexpr uint8_t kFp8SmallFlip[16] = {0x3c, 0x07, 0x07, 0x07};

}  // namespace
}  // namespace moesaic::kernels::cpu
