#include "base/status.h"

#include <gtest/gtest.h>

namespace moesaic {
namespace {

StatusOr<int> Half(int value) {
  if (value % 2 != 0) return InvalidArgument("expected an even number, found {}", value);
  return value / 2;
}

Status CheckQuarter(int value, int* out) {
  ASSIGN_OR_RETURN(int half, Half(value));
  ASSIGN_OR_RETURN(*out, Half(half));
  return OkStatus();
}

TEST(Status, CarriesTheFaultyValue) {
  int quarter = 0;
  EXPECT_TRUE(CheckQuarter(8, &quarter).ok());
  EXPECT_EQ(quarter, 2);
  EXPECT_EQ(Message(CheckQuarter(6, &quarter)), "expected an even number, found 3");
}

TEST(Status, AnnotatePrefixesLocation) {
  const Status status = Annotate(Half(3).status(), "config.json");
  EXPECT_EQ(Message(status), "config.json: expected an even number, found 3");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Annotate(OkStatus(), "x").ok());
}

}  // namespace
}  // namespace moesaic
