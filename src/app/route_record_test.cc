#include "app/route_record.h"

#include <gtest/gtest.h>

namespace moesaic::app {
namespace {

models::RouteTap Tap(int layer, int top_k, std::vector<int32_t> ids) {
  models::RouteTap tap;
  tap.layers.push_back({.layer = layer, .top_k = top_k, .ids = std::move(ids)});
  return tap;
}

TEST(RouterFlipsTest, CountsTokensWithAnotherSetOfExperts) {
  RouteRecord reference, model;
  reference.Append(Tap(3, 2, {9, 9, 1, 2, 4, 3}), 1);  // skips the first row
  reference.Append(Tap(3, 2, {5, 6, 7, 8}), 0);
  model.Append(Tap(3, 2, {3, 4, 5, 7, 8, 7}), 0);
  RouterFlips flips;
  flips.Count(reference, 1, model);  // {3,4} and {7,8} are equal, {5,7} differs from {5,6}
  ASSERT_EQ(flips.layers().size(), 1U);
  EXPECT_EQ(flips.layers()[0].layer, 3);
  EXPECT_EQ(flips.layers()[0].tokens, 3);
  EXPECT_EQ(flips.layers()[0].flipped, 1);
  flips.Count(reference, 1, model);
  EXPECT_EQ(flips.layers()[0].tokens, 6);
  EXPECT_DOUBLE_EQ(flips.share(), 1.0 / 3);
}

TEST(RouterFlipsTest, SkipsLayersThatCannotBeCompared) {
  RouteRecord reference, other_layer, other_top_k, none;
  reference.Append(Tap(1, 2, {1, 2}), 0);
  other_layer.Append(Tap(2, 2, {1, 2}), 0);
  other_top_k.Append(Tap(1, 1, {1}), 0);
  none.Append({}, 0);
  RouterFlips flips;
  for (const RouteRecord* model : {&other_layer, &other_top_k, &none}) flips.Count(reference, 0, *model);
  EXPECT_TRUE(flips.layers().empty());
  EXPECT_EQ(flips.share(), 0);
}

}  // namespace
}  // namespace moesaic::app
