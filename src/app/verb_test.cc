#include "app/verb.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>

namespace moesaic::app {
namespace {

TEST(Guarded, ReturnsExceptionsAsErrors) {
  EXPECT_TRUE(Guarded([] { return OkStatus(); }).ok());
  EXPECT_EQ(Guarded([] { return InvalidArgument("no file"); }), InvalidArgument("no file"));
  EXPECT_EQ(Guarded([]() -> Status { throw std::bad_alloc(); }),
            ResourceExhausted("out of memory: std::bad_alloc"));
  EXPECT_EQ(Message(Guarded([]() -> Status { throw std::runtime_error("a bug"); })), "a bug");
}

}  // namespace
}  // namespace moesaic::app
