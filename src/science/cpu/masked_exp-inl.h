// Exponentials of masked scores over the lanes of lanes_<isa>-inl.h, which must be included first.
#pragma once

namespace moesaic::graph::cpu {
namespace {

/// Returns e^x; 0 for -inf, where Exp() returns its smallest result. NaN stays.
inline V Weight(V x) { return Sub(Exp(x), Exp(Set(-__builtin_inff()))); }

}  // namespace
}  // namespace moesaic::graph::cpu
