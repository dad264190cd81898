#include "engine/rank_reply.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::engine {
namespace {

using models::MoveState;
using models::RouteTap;
using testing::HasSubstr;

/// Parses a reply without logits that has these routes and this state of a move.
StatusOr<RankReply> Sent(std::vector<RouteTap::Layer> routes, MoveState state = MoveState::kNone) {
  RankReply reply;
  reply.result.routes.layers = std::move(routes);
  reply.result.move.state = state;
  MessageWriter writer;
  PutReply(OkStatus(), reply, &writer);
  return ParseReply(/*rank=*/3, writer.bytes(), /*rows=*/0, /*columns=*/{});
}

TEST(RankReply, HasTheRoutesOfTheRank) {
  const auto reply =
      Sent({{.layer = 2, .top_k = 2, .ids = {0, 5, 3, 1}}, {.layer = 4, .top_k = 1, .ids = {}}},
           MoveState::kReady);
  ASSERT_TRUE(reply.ok()) << Message(reply.status());
  ASSERT_EQ(reply->result.routes.layers.size(), 2U);
  EXPECT_EQ(reply->result.routes.layers[0].ids, (std::vector<int32_t>{0, 5, 3, 1}));
  EXPECT_EQ(reply->result.routes.layers[1].layer, 4);
  EXPECT_EQ(reply->result.move.state, MoveState::kReady);
  EXPECT_EQ(reply->result.ranks.front().rank, 3);
}

TEST(RankReply, HasTheReasonOfAFailedMove) {
  RankReply reply;
  reply.result.move = {.number = 7,
                       .state = MoveState::kFailed,
                       .sent_bytes = 1000,
                       .step_seconds = 0.25,
                       .failure = std::string(2000, 'x')};
  MessageWriter writer;
  PutReply(OkStatus(), reply, &writer);
  const auto parsed = ParseReply(/*rank=*/3, writer.bytes(), /*rows=*/0, /*columns=*/{});
  ASSERT_TRUE(parsed.ok()) << Message(parsed.status());
  const models::ExpertMoveReport& move = parsed->result.move;
  EXPECT_EQ(move.number, 7U);
  EXPECT_EQ(move.state, MoveState::kFailed);
  EXPECT_EQ(move.sent_bytes, 1000);
  EXPECT_EQ(move.step_seconds, 0.25);
  EXPECT_EQ(move.rank, 3);
  EXPECT_EQ(move.failure, reply.result.move.failure);
}

TEST(RankReply, MalformedPartsAreRefusedWithTheRank) {
  for (const RouteTap::Layer& layer : {RouteTap::Layer{.layer = -1, .top_k = 1, .ids = {0}},
                                       RouteTap::Layer{.layer = 0, .top_k = 0, .ids = {0}},
                                       RouteTap::Layer{.layer = 0, .top_k = 2, .ids = {0, 1, 2}},
                                       RouteTap::Layer{.layer = 0, .top_k = 1, .ids = {-1}}}) {
    EXPECT_THAT(Message(Sent({layer}).status()), HasSubstr("rank 3"));
  }
  EXPECT_THAT(Message(Sent({}, static_cast<MoveState>(9)).status()), HasSubstr("rank 3 reports state 9"));
  EXPECT_THAT(Message(ParseReply(3, "short", 0, {}).status()), HasSubstr("rank 3"));
}

}  // namespace
}  // namespace moesaic::engine
