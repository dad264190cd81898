#include "base/check.h"

namespace moesaic::base {

void CheckFailed(const char* file, int line, const char* condition, const std::string& values) {
  std::fprintf(stderr, "%s:%d: check failed: %s%s%s\n", file, line, condition, values.empty() ? "" : ": ",
               values.c_str());
  std::abort();
}

}  // namespace moesaic::base
