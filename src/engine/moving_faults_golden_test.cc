// Faults while experts move between ranks: no output changes, nothing waits for ever, and moves that fail are
// rolled back. Ranks are threads here.
#include <gmock/gmock.h>

#include <atomic>
#include <map>
#include <random>
#include <stdexcept>

#include "comm/collectives/communicator.h"
#include "engine/ranked_engine.h"

namespace moesaic::engine {
namespace {

using comm::Tag;
using comm::TransferId;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

enum class Fault : uint8_t { kSendFails, kBytesChange, kPeerIsSlow, kMoveIsLate, kPlanFails, kRankDies };
constexpr int kFaults = 6;

struct Injection {
  Fault fault = Fault::kSendFails;
  int rank = 0;
  int at = 0;  // number of the message of a move
  std::atomic<bool> done = false;
};

// Injects a fault into one message of a move of experts.
class FaultyTransport : public comm::Transport {
 public:
  FaultyTransport(comm::LocalJob& job, int rank, Injection& injection)
      : job_(job), end_(job.end(rank)), injection_(injection) {}

  std::string_view name() const override { return end_.name(); }
  int rank() const override { return end_.rank(); }
  int size() const override { return end_.size(); }
  StatusOr<TransferId> Send(int peer, Tag tag, std::span<const std::byte> data) override {
    if (IsDue(tag, {Fault::kSendFails, Fault::kRankDies})) {
      if (injection_.fault == Fault::kSendFails) return absl::InternalError("injected failure of a send");
      job_.Kill(rank());
    }
    return end_.Send(peer, tag, data);
  }
  StatusOr<TransferId> Receive(int peer, Tag tag, std::span<std::byte> data) override {
    const bool due = IsDue(tag, {Fault::kBytesChange, Fault::kPeerIsSlow, Fault::kMoveIsLate});
    StatusOr<TransferId> id = end_.Receive(peer, tag, data);
    if (!due || !id.ok()) return id;
    if (injection_.fault == Fault::kBytesChange) {
      changed_[{id->slot, id->generation}] = data;
    } else {
      late_[{id->slot, id->generation}] = injection_.fault == Fault::kPeerIsSlow ? 300 : 1 << 30;
    }
    return id;
  }
  void Progress() override { end_.Progress(); }
  bool Test(TransferId id, Status* result) override {
    const std::pair<uint32_t, uint32_t> key = {id.slot, id.generation};
    if (const auto late = late_.find(key); late != late_.end() && --late->second > 0) return false;
    if (!end_.Test(id, result)) return false;
    if (const auto changed = changed_.find(key); changed != changed_.end() && result->ok()) {
      changed->second[changed->second.size() / 2] ^= std::byte{4};
      changed_.erase(changed);
    }
    return true;
  }
  void Cancel(TransferId id) override {
    changed_.erase({id.slot, id.generation});
    late_.erase({id.slot, id.generation});
    end_.Cancel(id);
  }
  bool failed(int peer) const override { return end_.failed(peer); }
  double Now() const override { return end_.Now(); }
  void Idle() override { end_.Idle(); }

 private:
  bool IsDue(Tag tag, std::initializer_list<Fault> faults) {
    const bool moves = tag >> comm::kCommunicatorTagBits == 3;
    if (!moves || rank() != injection_.rank || injection_.done) return false;
    if (std::find(faults.begin(), faults.end(), injection_.fault) == faults.end()) return false;
    if (messages_++ < injection_.at) return false;
    injection_.done = true;
    return true;
  }

  comm::LocalJob& job_;
  comm::Transport& end_;
  Injection& injection_;
  int messages_ = 0;
  std::map<std::pair<uint32_t, uint32_t>, std::span<std::byte>> changed_;
  std::map<std::pair<uint32_t, uint32_t>, int> late_;  // polls that find nothing
};

constexpr int kRequests = 3;
constexpr const char* kCheckpoint = "qwen3-moe-norm-tied";

parallel::Degrees DegreesOf(int ranks) { return {.data = ranks, .expert = ranks}; }

struct Round {
  std::vector<std::vector<float>> said =
      std::vector<std::vector<float>>(kRequests);  // tokens and their log-probabilities
  std::vector<FinishReason> finish = std::vector<FinishReason>(kRequests, FinishReason::kNone);
  Status status;
};

Round Run(Engine& engine, int number) {
  Round round;
  std::map<RequestId, int> index;
  for (int i = 0; i < kRequests; ++i) {
    Request request;
    for (int t = 0; t < 12; ++t) request.prompt.push_back(3 + (number * 7 + i * 5 + t * 3) % 60);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 5;
    request.sampling.logprobs = 1;
    index[*engine.Add(request)] = i;
  }
  while (!engine.idle() && round.status.ok()) {
    std::vector<TokenEvent> events;
    round.status = engine.Step(&events);
    for (const TokenEvent& event : events) {
      const int i = index.at(event.request);
      round.finish[i] = event.finish;
      if (!event.token.has_value()) continue;
      round.said[i].push_back(static_cast<float>(*event.token));
      round.said[i].push_back(event.logprobs.logprob);
    }
  }
  return round;
}

// Outputs without moves, round by round. They do not depend on the number of ranks.
class Reference {
 public:
  Reference() : ranks_(kCheckpoint, DegreesOf(2), {.experts_move = true}) {
    EXPECT_TRUE(ranks_.Start({.max_sequences = 4, .max_batch_tokens = 32}, 48).ok());
  }
  const Round& Get(int number) {
    while (std::ssize(rounds_) <= number) {
      rounds_.push_back(Run(ranks_.engine(), static_cast<int>(rounds_.size())));
    }
    return rounds_[number];
  }

 private:
  RankedEngine ranks_;
  std::deque<Round> rounds_;
};

// Compares the requests that have ended as they should; others ended with an error.
void ExpectSame(const Round& round, const Round& expected) {
  for (int i = 0; i < kRequests; ++i) {
    if (round.finish[i] != FinishReason::kLength) continue;
    ASSERT_EQ(round.said[i], expected.said[i]) << "request " << i;
  }
}

struct FaultOutcome {
  int moved = 0, rolled_back = 0, failed_plans = 0, deaths = 0;
};

// Runs rounds until the fault has happened and experts have moved after it.
void RunWithFault(const Injection& injection, RankedEngine& ranks, Reference& reference,
                  FaultOutcome* outcome) {
  constexpr int kMaxRounds = 400;
  const bool dies = injection.fault == Fault::kRankDies;
  int64_t before = 0;  // moves when the fault happened
  bool happened = false;
  for (int number = 0; number < kMaxRounds; ++number) {
    const Round round = Run(ranks.engine(), number);
    const EngineStats stats = ranks.engine().stats();
    const bool whole = stats.survival == nullptr || stats.survival->left_out_experts == 0;
    if (whole) ExpectSame(round, reference.Get(number));
    const ExpertBalanceStats& balance = *stats.balance;
    outcome->failed_plans = static_cast<int>(balance.failed_plans);
    outcome->rolled_back = static_cast<int>(balance.rolled_back);
    outcome->moved = static_cast<int>(balance.moved_layers);
    const bool now = injection.fault == Fault::kPlanFails ? balance.failed_plans > 0 : injection.done.load();
    if (now && !happened) before = balance.moved_layers;
    happened |= now;
    if (dies && stats.survival == nullptr && !round.status.ok()) {
      outcome->deaths = 1;
      EXPECT_THAT(Message(round.status), HasSubstr(fmt::format("rank {}", injection.rank)));
      return;
    }
    ASSERT_TRUE(round.status.ok()) << Message(round.status);
    if (dies && stats.survival != nullptr && stats.survival->alive < stats.survival->ranks) {
      outcome->deaths = 1;
      if (number > 3) return;
    }
    if (!happened || dies || balance.moved_layers == before) continue;
    if (injection.fault == Fault::kSendFails) {
      EXPECT_THAT(balance.history,
                  Contains(HasSubstr(fmt::format("rank {} could not gather its experts: injected failure",
                                                 injection.rank))));
    } else if (injection.fault == Fault::kBytesChange) {
      EXPECT_THAT(balance.history, Contains(AllOf(HasSubstr(fmt::format("rank {} could not", injection.rank)),
                                                  HasSubstr("has another checksum"))));
    }
    return;
  }
  ADD_FAILURE() << "the fault did not happen, or no experts moved after it";
}

// Layers that have changed after the balancer learned of a death. The step in which a rank dies may itself
// change some.
int64_t LayersChangedSinceDeath(const ExpertBalanceStats& balance) {
  const auto death = std::find_if(
      balance.history.begin(), balance.history.end(),
      [](const std::string& event) { return event.starts_with("later moves are among the other ranks"); });
  return std::count_if(death, balance.history.end(), [](const std::string& event) {
    return event.find(" changed by move ") != std::string::npos;
  });
}

// Every expert has two replicas when a rank dies amid the first move, so that no output changes.
TEST(MovingFaultsTest, ExpertsMoveAmongTheOtherRanksAfterADeath) {
  constexpr int kRanks = 4, kVictim = 2, kExperts = 8, kLayers = 4;
  parallel::LayerPlacement layer(kRanks);
  for (int expert = 0; expert < kExperts; ++expert) {
    for (const int rank : {expert % kRanks, (expert + 1) % kRanks}) layer[rank].push_back(expert);
  }
  for (std::vector<int>& experts : layer) std::ranges::sort(experts);
  Injection injection;
  injection.fault = Fault::kRankDies;
  injection.rank = kVictim;
  RankedEngine ranks(
      kCheckpoint, DegreesOf(kRanks),
      {.experts_move = true,
       .tolerates_failures = true,
       .placement = {.experts = kExperts, .layers = std::vector<parallel::LayerPlacement>(kLayers, layer)},
       .wrap = [&](int rank, comm::LocalJob& job) {
         return std::make_unique<FaultyTransport>(job, rank, injection);
       }});
  EngineOptions options = MovingOptions({.max_sequences = 4, .max_batch_tokens = 32});
  options.balance.redundant = kExperts;
  ASSERT_TRUE(ranks.Start(options, 48).ok());
  Reference reference;
  int64_t moved = -1;  // layers when the rank died; -1: it lives
  int rounds_after = 0;
  for (int number = 0; number < 400 && rounds_after < 3; ++number) {
    const Round round = engine::Run(ranks.engine(), number);
    ASSERT_TRUE(round.status.ok()) << Message(round.status);
    ExpectSame(round, reference.Get(number));
    const EngineStats stats = ranks.engine().stats();
    ASSERT_EQ(stats.survival->left_out_experts, 0);
    if (stats.survival->alive == kRanks) continue;
    EXPECT_EQ(stats.survival->failures, std::vector<std::string>{fmt::format("rank {} died", kVictim)});
    if (moved < 0) moved = stats.balance->moved_layers - LayersChangedSinceDeath(*stats.balance);
    rounds_after += stats.balance->moved_layers > moved ? 1 : 0;
  }
  EXPECT_EQ(rounds_after, 3) << "no experts moved after the death";
}

TEST(MovingFaultsTest, NoFaultChangesOutputsOrEndsMoves) {
  constexpr int kTrials = 50;
  Reference reference;
  std::map<Fault, FaultOutcome> sums;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::mt19937 random(trial);
    Injection injection;
    injection.fault = static_cast<Fault>(trial % kFaults);
    const bool dies = injection.fault == Fault::kRankDies;
    const int count = trial % 5 == 0 ? 3 : 2;
    injection.rank = static_cast<int>(dies ? 1 + random() % (count - 1) : random() % count);
    injection.at = static_cast<int>(random() % 6);
    SCOPED_TRACE(fmt::format("trial {}: fault {} of rank {} at message {}", trial, trial % kFaults,
                             injection.rank, injection.at));
    RankedEngine ranks(kCheckpoint, DegreesOf(count),
                       {.experts_move = true,
                        .tolerates_failures = dies && random() % 2 == 0,
                        .wrap = [&](int rank, comm::LocalJob& job) {
                          return std::make_unique<FaultyTransport>(job, rank, injection);
                        }});
    EngineOptions options = MovingOptions({.max_sequences = 4, .max_batch_tokens = 32});
    if (injection.fault == Fault::kMoveIsLate) options.balance.move_limit_s = 0.05;
    std::atomic<int> plans = 0;
    if (injection.fault == Fault::kPlanFails) {
      options.balance.before_plan = [&plans] {
        const int plan = plans++;
        if (plan == 1) throw std::runtime_error("injected failure of a plan");
        if (plan == 2) throw 7;  // NOLINT: not an exception
      };
    }
    ASSERT_TRUE(ranks.Start(options, 48).ok());
    FaultOutcome outcome;
    ASSERT_NO_FATAL_FAILURE(RunWithFault(injection, ranks, reference, &outcome));
    ranks.End();
    FaultOutcome& sum = sums[injection.fault];
    sum.moved += outcome.moved;
    sum.rolled_back += outcome.rolled_back;
    sum.failed_plans += outcome.failed_plans;
    sum.deaths += outcome.deaths;
  }
  for (const Fault fault : {Fault::kSendFails, Fault::kBytesChange, Fault::kMoveIsLate}) {
    EXPECT_GE(sums[fault].rolled_back, kTrials / kFaults) << static_cast<int>(fault);
  }
  EXPECT_EQ(sums[Fault::kPeerIsSlow].rolled_back, 0);
  EXPECT_GE(sums[Fault::kPlanFails].failed_plans, kTrials / kFaults);
  EXPECT_EQ(sums[Fault::kRankDies].deaths, kTrials / kFaults);
}

}  // namespace
}  // namespace moesaic::engine
