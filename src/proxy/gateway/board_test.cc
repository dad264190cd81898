#include "proxy/gateway/board.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "proxy/gateway/timers.h"

namespace moesaic::proxy {
namespace {

std::unique_ptr<Board> EmptyBoard() { return std::make_unique<Board>(); }

TEST(Board, MessagesNameTheRequest) {
  const auto board = EmptyBoard();
  board->Join(3, 100, 1);
  ASSERT_TRUE(board->Send(200, 3, 7, 9, "moesaic-3-7-9-abc", "{}"));
  int taken = 0;
  board->Receive(2, [&](uint32_t, uint32_t, const std::string&, const std::string&) { ++taken; });
  EXPECT_EQ(taken, 0);
  board->Receive(3, [&](uint32_t slot, uint32_t generation, const std::string& id, const std::string& text) {
    ++taken;
    EXPECT_EQ(slot, 7U);
    EXPECT_EQ(generation, 9U);
    EXPECT_EQ(id, "moesaic-3-7-9-abc");
    EXPECT_EQ(text, "{}");
  });
  EXPECT_EQ(taken, 1);
  EXPECT_FALSE(board->Send(200, 3, 7, 9, std::string(500, 'x'), "{}"));
}

TEST(Board, KeepsTheLastRequestsThatEnded) {
  const auto board = EmptyBoard();
  for (uint32_t i = 0; i < Board::kKeptEnded + 10; ++i)
    board->AddEnded(
        {.worker = 3, .slot = i, .prompt_tokens = i + 1, .output_tokens = 2, .entered = {i, 0, 7}});
  std::vector<uint32_t> slots;
  board->ForEachEnded([&](const Board::Ended& ended) {
    slots.push_back(ended.slot);
    EXPECT_EQ(ended.worker, 3);
    EXPECT_EQ(ended.prompt_tokens, ended.slot + 1);
    EXPECT_EQ(ended.output_tokens, 2U);
    EXPECT_EQ(ended.entered[0], ended.slot);
    EXPECT_EQ(ended.entered[2], 7);
  });
  EXPECT_EQ(slots.size(), Board::kKeptEnded);
  EXPECT_EQ(*std::min_element(slots.begin(), slots.end()), 10U);
}

TEST(Board, DeathFreesTheNumberAndTheMessages) {
  const auto board = EmptyBoard();
  board->Join(0, 100, 1);
  board->Join(1, 200, 2);
  while (board->Send(100, 1, 1, 1, "a", "b")) {
  }
  // A process that died while it wrote.
  board->messages[0].phase = uint64_t{100} << 32 | Board::Message::kWriting;
  EXPECT_FALSE(board->Send(100, 0, 1, 1, "a", "b"));
  board->Forget(100);
  EXPECT_EQ(board->Pid(0), 0);
  EXPECT_TRUE(board->Send(200, 1, 1, 1, "a", "b"));
  board->Forget(200);  // the receiver of the messages
  EXPECT_EQ(board->NumberOf(200), -1);
  for (const Board::Message& message : board->messages)
    EXPECT_EQ(message.phase.load(), Board::Message::kFree);
}

TEST(Board, RetiringWorkersAreNoSuccessors) {
  const auto board = EmptyBoard();
  board->Join(0, 100, 1);
  EXPECT_FALSE(board->HasSuccessor(0));
  board->Join(kMaxWorkers - 1, 200, 2);
  EXPECT_TRUE(board->HasSuccessor(0));
  board->workers[kMaxWorkers - 1].retiring = 1;
  EXPECT_FALSE(board->HasSuccessor(0));
  board->Join(kMaxWorkers - 1, 300, 3);  // a new process under the number
  EXPECT_TRUE(board->HasSuccessor(0));
}

TEST(Timers, ATimerThatSetsItselfRunsOnceInATurn) {
  Timers timers([] {});
  Timer busy(timers), other(timers);
  int turns = 0;
  std::function<void()> again = [&] {
    ++turns;
    busy.At(0, again);
  };
  bool ran = false;
  busy.At(0, again);
  other.At(5, [&] { ran = true; });
  timers.Run(10);
  EXPECT_EQ(turns, 1);
  EXPECT_TRUE(ran);
  EXPECT_EQ(timers.Next(), 0);
  timers.Run(10);
  EXPECT_EQ(turns, 2);
}

}  // namespace
}  // namespace moesaic::proxy
