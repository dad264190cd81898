// Checks that abort on a bug of this program. Invalid user input returns a Status instead.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace moesaic::base {

/// Prints the failed condition with its values and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition, const std::string& values);

}  // namespace moesaic::base

#define MOESAIC_CHECK(cond)                                        \
  do {                                                             \
    if (!(cond)) [[unlikely]]                                      \
      ::moesaic::base::CheckFailed(__FILE__, __LINE__, #cond, ""); \
  } while (false)

#define MOESAIC_CHECK_OP(op, a, b)                                                    \
  do {                                                                                \
    const auto& moesaic_a_ = (a);                                                     \
    const auto& moesaic_b_ = (b);                                                     \
    if (!(moesaic_a_ op moesaic_b_)) [[unlikely]]                                     \
      ::moesaic::base::CheckFailed(__FILE__, __LINE__, #a " " #op " " #b,             \
                                   fmt::format("{} vs. {}", moesaic_a_, moesaic_b_)); \
  } while (false)

#define MOESAIC_CHECK_EQ(a, b) MOESAIC_CHECK_OP(==, a, b)
#define MOESAIC_CHECK_LE(a, b) MOESAIC_CHECK_OP(<=, a, b)
#define MOESAIC_CHECK_LT(a, b) MOESAIC_CHECK_OP(<, a, b)
#define MOESAIC_CHECK_GE(a, b) MOESAIC_CHECK_OP(>=, a, b)
