// Time of prompts of one domain on several ranks, before and after experts have moved, as if each rank had a
// processor of its own: ranks are threads in virtual time (local_transport.h), which the processor time of
// each thread between its messages advances. Messages take the time of equal links. Answers must be equal.
//
//   engine_expert_moves_bench MODEL TOKENS [RANKS [REDUNDANT [MAX_TOKENS [ROUNDS]]]]
//
// TOKENS is a file with the ids of one prompt in each line, separated by commas.
#include <time.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/ranked_engine.h"

namespace moesaic::engine {
namespace {

// Shorter times between two calls are those of a rank that waits.
constexpr double kMinSeconds = 3e-6;

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Charges the processor time between calls to the rank.
class ChargedTransport : public comm::Transport {
 public:
  ChargedTransport(comm::LocalJob& job, int rank, const std::atomic<bool>& charges)
      : job_(job), end_(job.end(rank)), charges_(charges) {}

  std::string_view name() const override { return end_.name(); }
  int rank() const override { return end_.rank(); }
  int size() const override { return end_.size(); }
  StatusOr<comm::TransferId> Send(int peer, comm::Tag tag, std::span<const std::byte> data) override {
    const Call call(*this);
    return end_.Send(peer, tag, data);
  }
  StatusOr<comm::TransferId> Receive(int peer, comm::Tag tag, std::span<std::byte> data) override {
    const Call call(*this);
    return end_.Receive(peer, tag, data);
  }
  void Progress() override {
    const Call call(*this);
    computed_ = false;
    end_.Progress();
  }
  bool Test(comm::TransferId id, Status* result) override { return end_.Test(id, result); }
  void Cancel(comm::TransferId id) override { end_.Cancel(id); }
  bool failed(int peer) const override { return end_.failed(peer); }
  double Now() const override {
    const Call call(const_cast<ChargedTransport&>(*this));  // NOLINT: time has passed
    return end_.Now();
  }
  // A message may have arrived while the rank computed.
  void Idle() override {
    const Call call(*this);
    if (!std::exchange(computed_, false)) end_.Idle();
  }

 private:
  class Call {
   public:
    explicit Call(ChargedTransport& of) : of_(of) {
      const double seconds = ThreadSeconds() - of.left_;
      if (!of.charges_ || of.left_ <= 0 || seconds < kMinSeconds) return;
      of.job_.Compute(of.rank(), seconds);
      of.computed_ = true;
    }
    ~Call() { of_.left_ = ThreadSeconds(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    ChargedTransport& of_;
  };

  comm::LocalJob& job_;
  comm::Transport& end_;
  const std::atomic<bool>& charges_;
  double left_ = 0;        // processor time when the last call returned
  bool computed_ = false;  // since the last Progress()
};

std::vector<std::vector<int32_t>> ReadPrompts(const char* path) {
  std::vector<std::vector<int32_t>> prompts;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::vector<int32_t>& prompt = prompts.emplace_back();
    std::istringstream ids(line);
    for (std::string id; std::getline(ids, id, ',');) prompt.push_back(std::stoi(id));
  }
  return prompts;
}

struct Answered {
  double seconds = 0;
  std::vector<float> said;  // tokens and their log-probabilities
};

class Served {
 public:
  Served(const std::string& model, int ranks, const EngineOptions& options)
      : ranks_(model, {.data = ranks, .expert = ranks},
               {.experts_move = true,
                .virtual_time = true,
                .wrap = [this](int rank, comm::LocalJob& job) -> std::unique_ptr<comm::Transport> {
                  return std::make_unique<ChargedTransport>(job, rank, charges_);
                }}) {
    const Status started = ranks_.Start(options, 1024);
    if (!started.ok()) {
      fmt::print(stderr, "{}\n", Message(started));
      std::exit(1);
    }
    charges_ = true;
  }
  Answered Run(const std::vector<std::vector<int32_t>>& prompts, int max_tokens) {
    std::map<RequestId, std::vector<float>> said;
    const double begin = ranks_.job().end(0).Now();
    for (const std::vector<int32_t>& prompt : prompts) {
      Request request;
      request.prompt = prompt;
      request.sampling.temperature = 0;
      request.sampling.max_tokens = max_tokens;
      request.sampling.ignore_eos = true;
      request.sampling.logprobs = 1;
      said[*ranks_.engine().Add(request)] = {};
    }
    while (!ranks_.engine().idle()) {
      std::vector<TokenEvent> events;
      const Status status = ranks_.engine().Step(&events);
      if (!status.ok()) {
        fmt::print(stderr, "{}\n", Message(status));
        std::exit(1);
      }
      for (const TokenEvent& event : events) {
        if (!event.token.has_value()) continue;
        said[event.request].push_back(static_cast<float>(*event.token));
        said[event.request].push_back(event.logprobs.logprob);
      }
    }
    Answered answered = {.seconds = ranks_.job().end(0).Now() - begin, .said = {}};
    for (const auto& [id, values] : said)
      answered.said.insert(answered.said.end(), values.begin(), values.end());
    return answered;
  }
  EngineStats stats() { return ranks_.engine().stats(); }

 private:
  std::atomic<bool> charges_ = false;
  RankedEngine ranks_;
};

// Mean over layers of the busiest rank's recent rows over the mean.
double Busiest(const EngineStats& stats) {
  const RankLoads& loads = *stats.rank_loads;
  double sum = 0;
  for (size_t layer = 0; layer < loads.layers.size(); ++layer)
    sum += std::ranges::max(std::span(loads.over_mean).subspan(layer * loads.ranks, loads.ranks));
  return sum / static_cast<double>(loads.layers.size());
}

// Time of the experts of the rank that takes longest, since `begin`.
double ExpertSeconds(const EngineStats& begin, const EngineStats& end) {
  double most = 0;
  for (size_t i = 0; i < end.ranks.size(); ++i)
    most = std::max(most, end.ranks[i].timed_seconds - begin.ranks[i].timed_seconds);
  return most;
}

std::string Quartiles(std::vector<double> values, double scale) {
  std::ranges::sort(values);
  const auto at = [&](double share) {
    return values[static_cast<size_t>(share * (values.size() - 1))] * scale;
  };
  return fmt::format("{:.2f} ({:.2f} to {:.2f})", at(0.5), at(0.25), at(0.75));
}

int Compare(int argc, char** argv) {
  const auto number = [&](int at, int otherwise) { return argc > at ? std::atoi(argv[at]) : otherwise; };
  const std::vector<std::vector<int32_t>> prompts = ReadPrompts(argv[2]);
  const int ranks = number(3, 4), redundant = number(4, 2), max_tokens = number(5, 1), rounds = number(6, 15);
  EngineOptions options{.max_sequences = 16, .max_batch_tokens = 512, .prefix_cache = false};
  options.expert_load.window_s = 1e-3;
  Served before(argv[1], ranks, options);
  options.balance = {.interval_s = 0.05, .redundant = redundant, .move_bytes_per_s = 1e12};
  Served after(argv[1], ranks, options);
  int settling = 0;
  for (uint64_t epoch = 1, without_gain = 0; settling < 200; ++settling) {  // until two plans gain nothing
    after.Run(prompts, max_tokens);
    const ExpertBalanceStats balance = *after.stats().balance;
    const auto plans = static_cast<uint64_t>(balance.plans_without_gain);
    if (balance.epoch != std::exchange(epoch, balance.epoch)) without_gain = plans;
    if (balance.epoch > 0 && plans >= without_gain + 2) break;
  }
  before.Run(prompts, max_tokens);
  const EngineStats begin[] = {before.stats(), after.stats()};
  std::vector<double> seconds[2], ratios;
  bool equal = true;
  for (int round = 0; round < rounds; ++round) {
    const Answered first = before.Run(prompts, max_tokens), second = after.Run(prompts, max_tokens);
    seconds[0].push_back(first.seconds);
    seconds[1].push_back(second.seconds);
    ratios.push_back(first.seconds / second.seconds);
    equal &= first.said == second.said;
  }
  fmt::print("{} prompts, {} tokens each, {} ranks, {} rounds in turns, after {} rounds of settling\n",
             prompts.size(), max_tokens, ranks, rounds, settling);
  Served* const served[] = {&before, &after};
  double experts[2];
  for (int i = 0; i < 2; ++i) {
    const EngineStats end = served[i]->stats();
    experts[i] = ExpertSeconds(begin[i], end) / rounds;
    fmt::print(
        "{}: {} ms, of which experts {:.2f} ms on the slowest rank, with {:.3f} times the mean of rows\n",
        i == 0 ? "before" : "after", Quartiles(seconds[i], 1e3), experts[i] * 1e3, Busiest(end));
  }
  fmt::print("{} experts moved; experts take 1/{:.2f} of the time\n", after.stats().balance->moved_experts,
             experts[0] / experts[1]);
  fmt::print("ratio {}; answers {}\n", Quartiles(ratios, 1), equal ? "equal" : "DIFFER");
  return equal ? 0 : 1;
}

}  // namespace
}  // namespace moesaic::engine

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "usage: {} MODEL TOKENS [RANKS [REDUNDANT [MAX_TOKENS [ROUNDS]]]]\n", argv[0]);
    return 2;
  }
  return moesaic::engine::Compare(argc, argv);
}
