// Constants of the vector exponential in exp-inl.h.
#pragma once

namespace moesaic::kernels {

// x is reduced to r = x - n ln 2 with |r| <= ln 2 / 2 plus a small error. ln 2 is split so that n * kLn2High
// is exact: 15 significant bits times the 8 bits of n <= 128.
constexpr float kLog2E = 1.44269504F;
constexpr float kLn2High = 0.693145751953125F;
constexpr float kLn2Low = 1.428606765e-6F;

// exp(r) = 1 + r + r^2 (c0 + c1 r + ... + c4 r^4), a minimax fit on |r| <= 0.34665. With these rounded
// coefficients the maximum relative error is 3.8e-9 = 2^-28.
constexpr float kExp0 = 0.49999994039535522F;
constexpr float kExp1 = 0.16666521131992340F;
constexpr float kExp2 = 0.041668388992547989F;
constexpr float kExp3 = 0.0083687249571084976F;
constexpr float kExp4 = 0.0013814581325277686F;

// Arguments below this are clamped to it: exp(kExpLowest) is the smallest normal float, 2^-126 = 1.2e-38.
constexpr float kExpLowest = -87.3365402F;

}  // namespace moesaic::kernels
