// Tables for decoding e4m3 to bf16 by 16-entry byte lookups. For a normal code s eeee mmm, the bf16's high
// byte follows from s and the upper three bits of the exponent; the low byte is the code's lower four bits,
// shifted. Codes with e = 0 (zeros and denormals, which are normal in bf16) are looked up by mmm.
#pragma once

#include <cstdint>

namespace moesaic::kernels::cpu {
namespace {

constexpr int kFp8Inputs = 128;
constexpr int kFp8ScaleBytes = 64;
constexpr int kFp8UnitBytes = kFp8ScaleBytes + 16 * kFp8Inputs;
constexpr int kFp8LineInputs = 4;   // inputs in a line of 64 bytes: a panel's 16 outputs
constexpr int kFp8Exponent = 0x78;  // exponent bits of a code

/// Indexed by the upper four bits of a code, as if e were not 0: the bf16's exponent is e + 120.
alignas(16) constexpr uint8_t kFp8High[16] = {0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43,
                                              0xbc, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc2, 0xc3};
/// Indexed by mmm where e = 0: low bytes of 0, 1, ... 7 times 2^-9, and the XOR of kFp8High with their high
/// bytes.
alignas(16) constexpr uint8_t kFp8SmallLow[16] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60};
alignas(16) constexpr uint8_t kFp8SmallFlip[16] = {0x3c, 0x07, 0x07, 0x07};

}  // namespace
}  // namespace moesaic::kernels::cpu
