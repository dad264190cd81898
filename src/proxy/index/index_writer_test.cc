#include "proxy/index/index_writer.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <limits>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "proxy/events/kv_decode.h"
#include "proxy/index/writers_lock.h"
#include "proxy/state/test_zone.h"
#include "text/test_data.h"

namespace moesaic::proxy {
namespace {

using Row = nlohmann::ordered_json;

std::string Base64Bytes(const std::string& text) {
  static const std::string kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = bits << 6 | static_cast<uint32_t>(kAlphabet.find(c));
    if ((count += 6) >= 8) bytes.push_back(static_cast<char>(bits >> (count -= 8)));
  }
  return bytes;
}

struct KvMessage {
  uint64_t sequence;
  KvBatch batch;
};

KvMessage Decoded(const Row& frames) {
  auto batch = DecodeKvBatch(Base64Bytes(frames[2]));
  EXPECT_TRUE(batch.ok()) << batch.status();
  return {*DecodeSequence(Base64Bytes(frames[1])), *std::move(batch)};
}

// A message of an engine that clears its cache.
KvBatch Cleared() {
  KvEvent event;
  event.type = KvEvent::Type::kCleared;
  return {.time = 1, .events = {event}, .dp_rank = {}};
}

// Replays messages whose numbers begin at `first`, and the end.
void Replay(IndexWriter& writer, uint64_t first, std::span<const KvBatch> batches) {
  for (const KvBatch& batch : batches) writer.ApplyReplay(first++, &batch);
  writer.ApplyReplay(kReplayEnd, nullptr);
}

class IndexWriterTest : public testing::Test {
 protected:
  IndexWriterTest() {
    EXPECT_TRUE(state_.Configure(std::vector<InstanceConfig>{{.url = "http://a"}}, 1).ok());
  }

  uint32_t Matched(const std::vector<int32_t>& tokens, uint32_t block_size, std::string_view salt = "",
                   std::string_view adapter = "") {
    std::vector<uint64_t> keys;
    KeyMaker(zone_.zone()).Append(tokens, {.salt = salt, .adapter = adapter}, block_size, keys);
    index_.Match(keys, result_);
    return result_.BlocksOf(0);
  }

  // Replays a session in order of receipt; counts requests whose cached tokens the index predicts. A
  // request's own messages may come before its line, so that the prediction is made at the line before it. A
  // simulator collects messages for up to a second: there the prediction must be right at one point up to
  // `late` rows later. The simulator ignores salts, and its subscriber missed the message before the second
  // request.
  void ReplaySession(const std::string& name, bool salted, size_t late, int requests, int wrong) {
    const auto path = text::SharedData() / "kv_events" / name;
    SKIP_WITHOUT(path);
    IndexWriter writer(state_, index_, 0);
    const std::vector<Row> rows = text::ReadRows(path);
    const uint32_t block_size = rows.at(0)["block_size"];
    struct Asked {
      size_t first, last;  // rows after which the prediction is made
      std::vector<int32_t> prompt;
      std::string salt;
      uint32_t cached;
      bool found = false;
    };
    std::vector<Asked> asked;
    size_t previous = 0;
    for (size_t i = 1; i < rows.size(); ++i) {
      if (rows[i]["kind"] != "request") continue;
      const Row& salt = rows[i]["cache_salt"];
      asked.push_back({.first = previous,
                       .last = late == 0 ? previous : i + late,
                       .prompt = rows[i]["prompt"].get<std::vector<int32_t>>(),
                       .salt = salt.is_null() || !salted ? "" : salt.get<std::string>(),
                       .cached = rows[i]["cached_tokens"]});
      previous = i;
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i]["kind"] == "event") {
        const KvMessage message = Decoded(rows[i]["frames"]);
        EXPECT_FALSE(writer.Apply(message.sequence, message.batch).replay_from.has_value());
      }
      for (Asked& request : asked) {
        if (i < request.first || i > request.last) continue;
        // An engine computes at least the last token of a prompt itself.
        const uint32_t most = (static_cast<uint32_t>(request.prompt.size()) - 1) / block_size;
        request.found |=
            std::min(Matched(request.prompt, block_size, request.salt), most) * block_size == request.cached;
      }
    }
    EXPECT_EQ(asked.size(), static_cast<size_t>(requests));
    int right = 0;
    for (const Asked& request : asked) right += request.found;
    EXPECT_EQ(right, requests - wrong);
    EXPECT_EQ(writer.state(), IndexState::kExact);
    EXPECT_EQ(writer.stats().unknown_parents, 0U);
  }

  TestZone zone_;
  State state_{zone_.zone()};
  BlockIndex index_{zone_.zone()};
  MatchResult result_;
};

TEST_F(IndexWriterTest, PredictsCachedTokensOfARealVllm) {
  ReplaySession("real_vllm_0.32.0_session.jsonl.gz", true, 0, 119, 1);
}
TEST_F(IndexWriterTest, PredictsCachedTokensOfASimulatorWithArrays) {
  ReplaySession("real_llmd_sim_array_session.jsonl.gz", false, 12, 120, 1);
}
TEST_F(IndexWriterTest, PredictsCachedTokensOfASimulatorWithMaps) {
  ReplaySession("real_llmd_sim_map_session.jsonl.gz", false, 12, 120, 1);
}

TEST_F(IndexWriterTest, MatchesResidentBlocksOfRecordedStreams) {
  const auto path = text::SharedData() / "kv_events" / "kv_events_streams.jsonl.gz";
  SKIP_WITHOUT(path);
  int queries = 0;
  for (const Row& stream : text::ReadRows(path)) {
    SCOPED_TRACE(stream["engine"].get<std::string>() + " " + stream["version"].get<std::string>());
    IndexWriter writer(state_, index_, 0);
    writer.Reset();
    const uint32_t block_size = stream["block_size"];
    size_t next = 0;
    for (const Row& check : stream["checks"]) {
      for (; next < stream["batches"].size(); ++next) {
        const KvMessage message = Decoded(stream["batches"][next]["frames"]);
        if (message.sequence > check["after_seq"].get<uint64_t>()) break;
        writer.Apply(message.sequence, message.batch);
      }
      for (const Row& query : check["queries"]) {
        EXPECT_EQ(Matched(query["tokens"].get<std::vector<int32_t>>(), block_size),
                  query["matched_blocks"].get<uint32_t>());
        ++queries;
      }
    }
    EXPECT_EQ(writer.stats().unknown_parents, 0U);
  }
  EXPECT_GT(queries, 500);
}

// --- Loss, duplication and order ---

constexpr uint32_t kBlock = 4;

KvBatch StoreOf(uint64_t first_hash, std::optional<uint64_t> parent, const std::vector<int32_t>& tokens) {
  KvEvent event;
  event.type = KvEvent::Type::kStored;
  for (size_t i = 0; i < tokens.size() / kBlock; ++i) event.block_hashes.push_back(first_hash + i);
  event.parent = parent;
  event.tokens = tokens;
  event.block_size = kBlock;
  event.medium = "GPU";
  return {.time = 1, .events = {event}, .dp_rank = {}};
}

KvBatch RemoveOf(std::vector<uint64_t> hashes) {
  KvEvent event;
  event.type = KvEvent::Type::kRemoved;
  event.block_hashes = std::move(hashes);
  event.medium = "GPU";
  return {.time = 1, .events = {event}, .dp_rank = {}};
}

const std::vector<int32_t> kPrompt = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

// Three messages that store the first three blocks, one each.
std::vector<KvBatch> ThreeStores() {
  return {StoreOf(101, std::nullopt, {1, 2, 3, 4}), StoreOf(102, 101, {5, 6, 7, 8}),
          StoreOf(103, 102, {9, 10, 11, 12})};
}

TEST_F(IndexWriterTest, FollowsParentsAcrossEvents) {
  IndexWriter writer(state_, index_, 0);
  uint64_t sequence = 0;
  for (const KvBatch& batch : ThreeStores()) EXPECT_TRUE(writer.Apply(sequence++, batch).applied);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
  EXPECT_EQ(writer.state(), IndexState::kExact);
  writer.Apply(sequence++, RemoveOf({103, 102}));  // the end goes first
  EXPECT_EQ(Matched(kPrompt, kBlock), 1U);
}

TEST_F(IndexWriterTest, ReplaysAGapAndIsExactAgain) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  const auto result = writer.Apply(2, batches[2]);
  EXPECT_FALSE(result.applied);
  ASSERT_EQ(result.replay_from, 1U);
  EXPECT_EQ(writer.state(), IndexState::kReplaying);
  EXPECT_EQ(Matched(kPrompt, kBlock), 1U);  // the known part stays usable
  Replay(writer, 1, std::span(batches).subspan(1));
  EXPECT_EQ(writer.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
}

TEST_F(IndexWriterTest, ClearsAndDegradesWhenHistoryWasEvicted) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  ASSERT_EQ(writer.Apply(5, batches[2]).replay_from, 1U);
  Replay(writer, 4, std::vector{StoreOf(201, std::nullopt, {1, 2, 3, 4, 5, 6, 7, 8})});  // 1 to 3 are lost
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
  EXPECT_EQ(Matched(kPrompt, kBlock), 2U);
  writer.Apply(5, Cleared());
  EXPECT_EQ(writer.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
}

TEST_F(IndexWriterTest, DegradesWithoutAReplaySocket) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  ASSERT_TRUE(writer.Apply(2, batches[2]).replay_from.has_value());
  writer.OnReplayFailed();
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
  EXPECT_TRUE(writer.Apply(3, batches[0]).applied);
  EXPECT_EQ(Matched(kPrompt, kBlock), 1U);
}

// Stores whose hashes begin at 201, one block each.
std::vector<KvBatch> OtherStores(int number) {
  std::vector<KvBatch> stores;
  for (int i = 0; i < number; ++i)
    stores.push_back(StoreOf(201 + static_cast<uint64_t>(i), std::nullopt, {100 + i, 2, 3, 4}));
  return stores;
}

TEST_F(IndexWriterTest, StaysDegradedWhenALaterGapIsReplayed) {
  const auto batches = ThreeStores();
  const auto others = OtherStores(5);
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  ASSERT_TRUE(writer.Apply(2, batches[2]).replay_from.has_value());
  writer.OnReplayFailed();  // block 101 is lost, although the engine has it
  writer.Apply(3, others[0]);
  ASSERT_EQ(writer.Apply(6, others[3]).replay_from, 4U);
  Replay(writer, 4, std::span(others).subspan(1, 3));
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
  EXPECT_EQ(Matched(others[3].events[0].tokens, kBlock), 1U);
  // The subscription fails during the replay of another gap.
  ASSERT_EQ(writer.Apply(8, others[4]).replay_from, 7U);
  writer.OnFeedFailed();
  EXPECT_EQ(writer.Begin().replay_from, 7U);
  Replay(writer, 7, std::span(others).subspan(4));
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
  // Everything.
  EXPECT_EQ(writer.Retry().replay_from, 0U);
  for (uint64_t sequence = 0; sequence < 3; ++sequence) writer.ApplyReplay(sequence, &batches[sequence]);
  Replay(writer, 3, others);
  EXPECT_EQ(writer.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
}

TEST_F(IndexWriterTest, IsExactWhenTheReplayOfALaterGapClearsTheCache) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  ASSERT_TRUE(writer.Apply(2, batches[2]).replay_from.has_value());
  writer.OnReplayFailed();
  writer.Apply(3, OtherStores(1)[0]);
  ASSERT_EQ(writer.Apply(6, batches[0]).replay_from, 4U);
  Replay(writer, 4, std::vector{Cleared(), batches[0], batches[1]});
  EXPECT_EQ(writer.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 2U);
}

TEST_F(IndexWriterTest, IsDegradedWhenTheSubscriptionFailsDuringAReplayThatLacksMessages) {
  const auto batches = ThreeStores();
  const auto others = OtherStores(2);
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  ASSERT_EQ(writer.Apply(5, others[1]).replay_from, 1U);
  writer.ApplyReplay(4, &others[0]);  // 1 to 3 are lost
  writer.OnFeedFailed();
  EXPECT_EQ(writer.Begin().replay_from, 5U);
  Replay(writer, 5, std::span(others).subspan(1));
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
}

TEST_F(IndexWriterTest, IsExactWhenAReplayThatLacksMessagesClearsTheCache) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  ASSERT_EQ(writer.Apply(7, batches[1]).replay_from, 1U);
  writer.ApplyReplay(4, &OtherStores(1)[0]);  // 1 to 3 are lost
  Replay(writer, 5, std::vector{Cleared(), batches[0], batches[1]});
  EXPECT_EQ(writer.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 2U);
}

TEST_F(IndexWriterTest, ASuccessorRepeatsTheReplayOfEverything) {
  const auto batches = ThreeStores();
  IndexWriter first(state_, index_, 0);
  first.Apply(0, batches[0]);
  // A block whose parent is not known.
  ASSERT_EQ(first.Apply(1, StoreOf(300, 299, {9, 9, 9, 9})).replay_from, 0U);
  IndexWriter successor(state_, index_, 0);
  EXPECT_EQ(successor.state(), IndexState::kDegraded);
  EXPECT_EQ(successor.Begin().replay_from, 0U);
}

TEST_F(IndexWriterTest, ASuccessorFinishesTheReplayOfEverything) {
  const auto batches = ThreeStores();
  IndexWriter first(state_, index_, 0);
  first.Apply(0, batches[0]);
  ASSERT_TRUE(first.Apply(2, batches[2]).replay_from.has_value());
  first.OnReplayFailed();
  ASSERT_EQ(first.Retry().replay_from, 0U);
  first.ApplyReplay(0, &batches[0]);
  IndexWriter successor(state_, index_, 0);
  EXPECT_EQ(successor.Begin().replay_from, 1U);
  Replay(successor, 1, std::span(batches).subspan(1));
  EXPECT_EQ(successor.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
}

TEST_F(IndexWriterTest, ASubscriptionThatMissedNothingIsExactAgain) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  writer.OnFeedFailed();
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
  EXPECT_TRUE(writer.Apply(1, batches[1]).applied);
  EXPECT_EQ(writer.state(), IndexState::kExact);
}

TEST_F(IndexWriterTest, ASuccessorFinishesTheReplayOfADeadProcess) {
  const auto batches = ThreeStores();
  IndexWriter first(state_, index_, 0);
  first.Apply(0, batches[0]);
  ASSERT_EQ(first.Apply(2, batches[2]).replay_from, 1U);
  IndexWriter successor(state_, index_, 0);
  EXPECT_EQ(successor.state(), IndexState::kDegraded);
  EXPECT_EQ(successor.Begin().replay_from, 1U);
  Replay(successor, 1, std::span(batches).subspan(1));
  EXPECT_EQ(successor.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
  // History that the process had lost stays lost.
  ASSERT_EQ(successor.Apply(5, batches[0]).replay_from, 3U);
  successor.OnReplayFailed();
  successor.Apply(6, batches[0]);
  ASSERT_EQ(successor.Apply(9, batches[2]).replay_from, 7U);
  IndexWriter third(state_, index_, 0);
  EXPECT_EQ(third.Begin().replay_from, 7U);
  Replay(third, 7, batches);
  EXPECT_EQ(third.state(), IndexState::kDegraded);
}

TEST_F(IndexWriterTest, AReplayThatFailedCanBeTriedAgain) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  EXPECT_EQ(writer.Begin().replay_from, 0U);
  writer.OnReplayFailed();
  EXPECT_TRUE(writer.Apply(2, batches[2]).applied);  // without its parents
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
  EXPECT_EQ(writer.Retry().replay_from, 0U);
  Replay(writer, 0, batches);
  EXPECT_EQ(writer.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
  EXPECT_FALSE(writer.Retry().replay_from);  // there is no reason
  EXPECT_EQ(writer.state(), IndexState::kExact);
}

TEST_F(IndexWriterTest, IgnoresDuplicatesAndLateMessages) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  writer.Apply(1, batches[1]);
  EXPECT_FALSE(writer.Apply(1, RemoveOf({101})).applied);
  EXPECT_EQ(Matched(kPrompt, kBlock), 2U);
  EXPECT_EQ(writer.stats().duplicates, 1U);
}

TEST_F(IndexWriterTest, ForgetsBlocksWhenTheEngineCountsFromZeroAgain) {
  IndexWriter writer(state_, index_, 0);
  uint64_t sequence = 0;
  for (const KvBatch& batch : ThreeStores()) writer.Apply(sequence++, batch);
  // The same tokens with hashes of another seed.
  EXPECT_TRUE(writer.Apply(0, StoreOf(7001, std::nullopt, {1, 2, 3, 4})).applied);
  EXPECT_EQ(Matched(kPrompt, kBlock), 1U);
  EXPECT_EQ(writer.state(), IndexState::kExact);
}

TEST_F(IndexWriterTest, RequestsAFullReplayWhenItStartsInTheMiddle) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  ASSERT_EQ(writer.Apply(2, batches[2]).replay_from, 0U);
  Replay(writer, 0, batches);
  EXPECT_EQ(writer.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
}

TEST_F(IndexWriterTest, AnotherProcessContinuesAtTheStoredNumber) {
  const auto batches = ThreeStores();
  {
    IndexWriter writer(state_, index_, 0);
    writer.Apply(0, batches[0]);
  }
  IndexWriter successor(state_, index_, 0);
  EXPECT_TRUE(successor.Apply(1, batches[1]).applied);
  EXPECT_EQ(Matched(kPrompt, kBlock), 2U);
  EXPECT_EQ(successor.Apply(4, batches[2]).replay_from, 2U);
}

TEST_F(IndexWriterTest, BeginsWithAReplayOfMissedMessages) {
  const auto batches = ThreeStores();
  {
    IndexWriter first(state_, index_, 0);
    EXPECT_EQ(first.Begin().replay_from, 0U);
    first.ApplyReplay(0, &batches[0]);
    first.ApplyReplay(kReplayEnd, nullptr);
    EXPECT_EQ(first.state(), IndexState::kExact);
  }
  IndexWriter successor(state_, index_, 0);
  EXPECT_EQ(successor.Begin().replay_from, 1U);
  EXPECT_EQ(successor.state(), IndexState::kReplaying);
  Replay(successor, 1, std::span(batches).subspan(1));
  EXPECT_EQ(successor.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
  // Nothing was missed.
  IndexWriter third(state_, index_, 0);
  third.Begin();
  third.ApplyReplay(kReplayEnd, nullptr);
  EXPECT_EQ(third.state(), IndexState::kExact);
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
}

TEST_F(IndexWriterTest, IsDegradedWhileThereIsNoSubscription) {
  const auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, batches[0]);
  writer.OnFeedFailed();
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
  EXPECT_EQ(writer.Begin().replay_from, 1U);
  writer.ApplyReplay(1, &batches[1]);
  writer.ApplyReplay(kReplayEnd, nullptr);
  EXPECT_EQ(writer.state(), IndexState::kExact);
}

TEST_F(IndexWriterTest, ReplaysARestartedEngineWhoseFirstMessagesWereMissed) {
  auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  for (uint64_t i = 0; i < 3; ++i) {
    batches[i].time = 100 + static_cast<double>(i);
    writer.Apply(i, batches[i]);
  }
  KvBatch late = batches[1];
  EXPECT_FALSE(writer.Apply(1, late).replay_from);  // an old message, not a new engine
  EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
  KvBatch fresh = StoreOf(7002, std::nullopt, {9, 9, 9, 9});
  fresh.time = 200;
  EXPECT_EQ(writer.Apply(2, fresh).replay_from, 0U);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
  for (uint64_t i = 0; i < 3; ++i) writer.ApplyReplay(i, &fresh);
  writer.ApplyReplay(kReplayEnd, nullptr);
  EXPECT_EQ(writer.state(), IndexState::kExact);
  EXPECT_TRUE(writer.Apply(3, fresh).applied);
}

TEST_F(IndexWriterTest, AMessageWithoutAValidTimeIsNotTakenForARestart) {
  auto batches = ThreeStores();
  IndexWriter writer(state_, index_, 0);
  for (uint64_t i = 0; i < 3; ++i) writer.Apply(i, batches[i]);
  for (const double time : {std::numeric_limits<double>::quiet_NaN(), -1.0}) {
    batches[1].time = time;
    EXPECT_FALSE(writer.Apply(1, batches[1]).replay_from);
    EXPECT_EQ(Matched(kPrompt, kBlock), 3U);
  }
}

// --- Writers whose process was stopped ---

TEST_F(IndexWriterTest, AWriterWhoseLeaseWasTakenChangesNothing) {
  const auto batches = ThreeStores();
  const LeaseToken lost = *state_.lease().Acquire(1001, 1);
  IndexWriter old(state_, index_, 0, lost);
  EXPECT_TRUE(old.Apply(0, batches[0]).applied);
  const LeaseToken held = *state_.lease().Acquire(1002, 2, {}, /*dead=*/1001);
  const auto late = old.Apply(1, RemoveOf({101}));
  EXPECT_FALSE(late.applied);
  EXPECT_TRUE(late.fenced);
  EXPECT_TRUE(old.Apply(7, batches[1]).fenced);  // no replay for a gap
  EXPECT_TRUE(old.Begin().fenced);
  EXPECT_TRUE(old.ApplyReplay(1, &batches[1]).fenced);
  old.OnFeedFailed();
  old.OnReplayFailed();
  old.Reset();
  IndexWriter(state_, index_, 0, lost).OnFeedFailed();
  EXPECT_EQ(Matched(kPrompt, kBlock), 1U);
  EXPECT_EQ(old.state(), IndexState::kExact);
  IndexWriter successor(state_, index_, 0, held);
  EXPECT_TRUE(successor.Apply(1, batches[1]).applied);
  EXPECT_EQ(Matched(kPrompt, kBlock), 2U);
}

TEST_F(IndexWriterTest, AWriterOfAReusedEntryChangesNothing) {
  const auto batches = ThreeStores();
  IndexWriter old(state_, index_, 0);
  EXPECT_TRUE(old.Apply(0, batches[0]).applied);
  const uint32_t generation = state_.Version(0)->generation;
  ASSERT_TRUE(state_.Configure(std::vector<InstanceConfig>{{.url = "http://b"}}, 2).ok());
  ASSERT_EQ(state_.FindInstance("http://b", 0), 0);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
  EXPECT_TRUE(old.Apply(1, batches[1]).fenced);
  IndexWriter late(state_, index_, 0, {}, generation);  // made for the engine before
  EXPECT_TRUE(late.Apply(0, batches[0]).fenced);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
}

TEST_F(IndexWriterTest, AWriterThatIsCreatedDuringABatchOfAnotherContinuesLater) {
  const auto batches = ThreeStores();
  EXPECT_TRUE(IndexWriter(state_, index_, 0).Apply(0, batches[0]).applied);
  std::optional<WritersLock> stopped(std::in_place, zone_.zone());
  IndexWriter successor(state_, index_, 0);
  EXPECT_FALSE(successor.Ready());
  stopped.reset();
  EXPECT_TRUE(successor.Ready());
  EXPECT_TRUE(successor.Ready());  // the call before has kept no lock
  EXPECT_EQ(successor.Apply(2, batches[2]).replay_from, 1U);
}

TEST_F(IndexWriterTest, AWriterContinuesWhenAProcessThatStoppedInsideABatchIsKilled) {
  const auto batches = ThreeStores();
  EXPECT_TRUE(IndexWriter(state_, index_, 0).Apply(0, batches[0]).applied);
  const pid_t stopped = fork();
  ASSERT_GE(stopped, 0);
  if (stopped == 0) {
    const WritersLock lock(zone_.zone());
    raise(SIGSTOP);
    _exit(0);
  }
  int state = 0;
  ASSERT_EQ(waitpid(stopped, &state, WUNTRACED), stopped);
  ASSERT_TRUE(WIFSTOPPED(state));
  IndexWriter successor(state_, index_, 0);
  EXPECT_FALSE(successor.Ready());
  ASSERT_EQ(kill(stopped, SIGKILL), 0);
  ASSERT_EQ(waitpid(stopped, &state, 0), stopped);
  EXPECT_TRUE(successor.Ready());
  EXPECT_TRUE(successor.Apply(1, batches[1]).applied);
  EXPECT_EQ(Matched(kPrompt, kBlock), 2U);
}

// The writer is inside a batch at the moment at which its lease is taken, or between two.
TEST_F(IndexWriterTest, ASuccessorSeesNoChangeByItsPredecessor) {
  std::vector<int32_t> tokens(200 * kBlock, 7);
  for (int round = 0; round < 100; ++round) {
    const auto now = static_cast<Nanos>(round + 1);
    const LeaseToken lost = *state_.lease().Acquire(2000 + round, now, {}, /*dead=*/1999 + round);
    std::atomic<int> applied = 0;
    std::thread stalled([&] {
      IndexWriter writer(state_, index_, 0, lost);
      writer.Reset();
      for (uint64_t sequence = 0;; ++sequence) {
        const auto result = writer.Apply(sequence, StoreOf(1 + 1000 * sequence, std::nullopt, tokens));
        if (result.fenced) return;
        if (result.replay_from) writer.OnReplayFailed();
        ++applied;
      }
    });
    while (applied.load() < 2) std::this_thread::yield();
    const LeaseToken held = *state_.lease().Acquire(2001 + round, now, {}, /*dead=*/2000 + round);
    IndexWriter successor(state_, index_, 0, held);
    successor.Reset();
    while (index_.Sweep(100'000)) {
    }
    const IndexStats cleared = index_.Stats();
    stalled.join();
    EXPECT_EQ(cleared.memberships, 0U) << round;
    EXPECT_EQ(index_.Stats().memberships, 0U) << round;
    EXPECT_EQ(index_.Stats().engine_blocks, 0U) << round;
    EXPECT_EQ(successor.state(), IndexState::kNone);
    state_.lease().Release(held);
  }
}

TEST_F(IndexWriterTest, RequestsAFullReplayWhenAParentIsUnknown) {
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, StoreOf(101, std::nullopt, {1, 2, 3, 4}));
  ASSERT_EQ(writer.Apply(1, StoreOf(300, 299, {5, 6, 7, 8})).replay_from, 0U);
  EXPECT_EQ(writer.stats().unknown_parents, 1U);
  writer.OnReplayFailed();
  EXPECT_EQ(writer.state(), IndexState::kDegraded);
}

TEST_F(IndexWriterTest, SeparatesAdapters) {
  IndexWriter writer(state_, index_, 0);
  KvBatch batch = StoreOf(101, std::nullopt, {1, 2, 3, 4});
  batch.events[0].lora_name = "a";
  writer.Apply(0, batch);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
  EXPECT_EQ(Matched(kPrompt, kBlock, "", "a"), 1U);
  EXPECT_EQ(Matched(kPrompt, kBlock, "", "b"), 0U);
  EXPECT_EQ(Matched(kPrompt, kBlock, "a"), 0U);  // a salt of the same name
}

TEST_F(IndexWriterTest, SeparatesSalts) {
  IndexWriter writer(state_, index_, 0);
  KvBatch batch = StoreOf(101, std::nullopt, {1, 2, 3, 4});
  batch.events[0].cache_salt = "a";
  writer.Apply(0, batch);
  EXPECT_EQ(Matched(kPrompt, kBlock), 0U);
  EXPECT_EQ(Matched(kPrompt, kBlock, "a"), 1U);
  EXPECT_EQ(Matched(kPrompt, kBlock, "b"), 0U);
}

TEST_F(IndexWriterTest, KeepsABlockInHostMemoryAfterItLeftTheDevice) {
  IndexWriter writer(state_, index_, 0);
  writer.Apply(0, StoreOf(101, std::nullopt, {1, 2, 3, 4}));
  KvBatch offloaded = StoreOf(101, std::nullopt, {1, 2, 3, 4});
  offloaded.events[0].medium = "CPU";
  writer.Apply(1, offloaded);
  writer.Apply(2, RemoveOf({101}));
  EXPECT_EQ(Matched(kPrompt, kBlock), 1U);
  EXPECT_EQ(result_.DeviceBlocksOf(0), 0U);
}

}  // namespace
}  // namespace moesaic::proxy
