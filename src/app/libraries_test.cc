#include "app/libraries.h"

#include <gtest/gtest.h>

#include <cctype>

namespace moesaic::app {
namespace {

TEST(Libraries, EachHasAVersion) {
  const auto libraries = Libraries();
  EXPECT_GE(libraries.size(), 10U);
  bool tokenizers = false, hwloc = false;
  for (const auto& [name, version] : libraries) {
    EXPECT_FALSE(name.empty());
    EXPECT_TRUE(std::isdigit(static_cast<unsigned char>(version[0])) ||
                (name == "libedit" && version == "absent"))
        << name << " " << version;
    tokenizers |= name == "tokenizers";
    hwloc |= name == "hwloc";
  }
  EXPECT_TRUE(tokenizers);
  EXPECT_TRUE(hwloc);
}

}  // namespace
}  // namespace moesaic::app
