// Replays a recorded trace of block names against the radix tree and prints the hit rate of each policy. The
// ceiling is the hit rate of an unlimited cache; Belady's rule evicts the block whose next use is farthest,
// at the ends of prefixes. Columns after "cost" are the cost-aware policy with hints of clients (HintDetail):
// exact, with errors in the time ("when~"), and with half of the clients giving no hint or (mixed) kWhether
// only. A trace is JSON lines with "hash_ids": equal ids are equal blocks with equal prefixes (Mooncake's
// format).
#include <fmt/format.h>
#include <zlib.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "cache/radix_tree.h"

namespace moesaic::bench {
namespace {

using Trace = std::vector<std::vector<int32_t>>;  // [requests][blocks] names

constexpr int64_t kAttentionTokens = 8000;
constexpr double kSpread = 0.5;  // two thirds of the "when~" hints are within a factor of 1.65

Trace ReadTrace(const std::string& path) {
  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) throw CLI::ValidationError(path, "cannot be read");
  std::string text(1 << 20, '\0'), all;
  for (int got; (got = gzread(file, text.data(), static_cast<unsigned>(text.size()))) > 0;)
    all.append(text, 0, got);
  gzclose(file);
  Trace trace;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find('\n', at), all.size());
    const auto line = nlohmann::json::parse(std::string_view(all).substr(at, end - at));
    trace.push_back(line.at("hash_ids").get<std::vector<int32_t>>());
    at = end + 1;
  }
  return trace;
}

int64_t BlocksOf(const Trace& trace) {
  int64_t blocks = 0;
  for (const auto& request : trace) blocks += static_cast<int64_t>(request.size());
  return blocks;
}

constexpr int kNever = std::numeric_limits<int>::max();

// Returns, for [requests][blocks], the next request that has the block.
std::vector<std::vector<int>> NextUses(const Trace& trace) {
  std::vector<std::vector<int>> next(trace.size());
  std::unordered_map<int32_t, int> later;
  for (size_t i = trace.size(); i-- > 0;) {
    for (const int32_t name : trace[i]) {
      const auto it = later.find(name);
      next[i].push_back(it == later.end() ? kNever : it->second);
    }
    for (const int32_t name : trace[i]) later[name] = static_cast<int>(i);
  }
  return next;
}

// Amount of information in clients' hints about later requests.
enum class HintDetail { kNothing, kWhether, kHowMuch, kAndWhen };

// Returns the hints of clients that know later requests. kWhether: whether any new block of the request is
// used again. kHowMuch: up to which block it is. kAndWhen: also that block's next use in requests, times
// e^(spread x a normal number). A client gives this hint with probability `share`; others give kNothing or
// kWhether.
std::vector<cache::SessionHint> HintsOf(const Trace& trace, HintDetail detail, double spread = 0,
                                        double share = 1, HintDetail others = HintDetail::kNothing) {
  const std::vector<std::vector<int>> next = NextUses(trace);
  std::unordered_set<int32_t> seen;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  std::vector<cache::SessionHint> hints;
  for (size_t i = 0; i < trace.size(); ++i) {
    cache::SessionHint& hint = hints.emplace_back();
    bool again = false;
    size_t blocks = 0;
    for (size_t k = 0; k < trace[i].size(); ++k) {
      const bool used = next[i][k] != kNever;
      again |= seen.insert(trace[i][k]).second && used;
      if (used) blocks = k + 1;
    }
    const double error = std::exp(spread * normal(random));
    const bool gives_detail = std::generate_canonical<double, 32>(random) < share;
    if (!gives_detail && others == HintDetail::kNothing) continue;
    hint.session = cache::Session::kContinues;
    if (!gives_detail || detail == HintDetail::kWhether) {
      if (!again) hint.session = cache::Session::kEnds;
      continue;
    }
    hint.tokens = static_cast<int64_t>(blocks) * tensor::kKvBlockTokens;
    if (detail == HintDetail::kHowMuch || blocks == 0) continue;
    const auto now = static_cast<double>(i + 1);  // RadixTree::now during that request
    hint.returns_at = now + error * (next[i][blocks - 1] + 1 - now);
  }
  return hints;
}

// Uses the real tree. A block of the trace becomes one of its blocks, filled with the name. hints: [requests]
// or empty.
int64_t TreeHits(const Trace& trace, int room, std::unique_ptr<cache::EvictionPolicy> policy,
                 const std::vector<cache::SessionHint>& hints = {}) {
  cache::BlockPool pool(room);
  cache::RadixTree tree(pool, std::move(policy), nullptr);
  int64_t hits = 0;
  for (size_t i = 0; i < trace.size(); ++i) {
    const auto& request = trace[i];
    std::vector<int32_t> tokens;
    for (const int32_t name : request) tokens.insert(tokens.end(), tensor::kKvBlockTokens, name);
    std::vector<cache::BlockRef> blocks = std::move(tree.Find("", tokens).blocks);
    hits += static_cast<int64_t>(blocks.size());
    tree.Use(blocks);
    const int known = static_cast<int>(blocks.size());
    const int wanted = static_cast<int>(request.size());
    if (const int missing = wanted - known - pool.free_blocks(); missing > 0) tree.Evict(missing);
    for (int b = known; b < wanted && pool.free_blocks() > 0; ++b) blocks.push_back(*pool.Allocate());
    tree.Insert("", std::span(tokens).first(blocks.size() * tensor::kKvBlockTokens), blocks, known);
    tree.Touch(blocks, hints.empty() ? cache::SessionHint() : hints[i]);
  }
  return hits;
}

// Belady's rule, restricted to blocks without cached successors.
class Belady {
 public:
  Belady(const Trace& trace, int room) : trace_(trace), room_(room), next_(NextUses(trace)) {}

  int64_t Hits() {
    int64_t hits = 0;
    for (size_t i = 0; i < trace_.size(); ++i) {
      const auto& request = trace_[i];
      const std::unordered_set<int32_t> held(request.begin(), request.end());
      size_t known = 0;
      while (known < request.size() && cached_.contains(request[known])) ++known;
      hits += static_cast<int64_t>(known);
      for (size_t k = known; k < request.size(); ++k) {
        if (static_cast<int>(cached_.size()) == room_ && !EvictOne(held)) break;
        Block& block = cached_[request[k]];
        block.parent = k > 0 ? request[k - 1] : -1;
        if (k > 0) AddChild(request[k - 1]);
      }
      for (size_t k = 0; k < request.size() && cached_.contains(request[k]); ++k)
        Renew(request[k], next_[i][k]);
    }
    return hits;
  }

 private:
  struct Block {
    int32_t parent = -1;
    int children = 0;
    int next = 0;
  };

  void AddChild(int32_t name) {
    Block& block = cached_[name];
    if (block.children++ == 0) leaves_.erase({-block.next, name});
  }

  void Renew(int32_t name, int next) {
    Block& block = cached_[name];
    leaves_.erase({-block.next, name});
    block.next = next;
    if (block.children == 0) leaves_.insert({-next, name});
  }

  bool EvictOne(const std::unordered_set<int32_t>& held) {
    for (auto it = leaves_.begin(); it != leaves_.end(); ++it) {
      const int32_t name = it->second;
      if (held.contains(name)) continue;
      const Block block = cached_[name];
      leaves_.erase(it);
      cached_.erase(name);
      if (block.parent >= 0 && --cached_[block.parent].children == 0) {
        leaves_.insert({-cached_[block.parent].next, block.parent});
      }
      return true;
    }
    return false;
  }

  const Trace& trace_;
  const int room_;
  const std::vector<std::vector<int>> next_;
  std::unordered_map<int32_t, Block> cached_;
  std::set<std::pair<int, int32_t>> leaves_;  // by next use, the farthest first
};

void Play(const std::string& path, const std::vector<double>& shares) {
  const Trace trace = ReadTrace(path);
  std::set<int32_t> names;
  for (const auto& request : trace) names.insert(request.begin(), request.end());
  const auto all = static_cast<double>(BlocksOf(trace));
  const double ceiling = 1 - static_cast<double>(names.size()) / all;
  fmt::print("{}: {} requests, {} blocks, {} of them different; ceiling {:.4f}\n", path, trace.size(),
             BlocksOf(trace), names.size(), ceiling);
  const struct {
    const char* name;
    std::vector<cache::SessionHint> hints;
  } hint_sets[] = {{"whether", HintsOf(trace, HintDetail::kWhether)},
                   {"how much", HintsOf(trace, HintDetail::kHowMuch)},
                   {"and when", HintsOf(trace, HintDetail::kAndWhen)},
                   {"when~", HintsOf(trace, HintDetail::kAndWhen, kSpread)},
                   {"half hint", HintsOf(trace, HintDetail::kAndWhen, kSpread, 0.5)},
                   {"mixed", HintsOf(trace, HintDetail::kAndWhen, kSpread, 0.5, HintDetail::kWhether)}};
  fmt::print("{:>9} {:>8} {:>8} {:>8}", "cache", "blocks", "lru", "cost");
  for (const auto& hints : hint_sets) fmt::print(" {:>9}", hints.name);
  fmt::print(" {:>8} {:>9} {:>12}\n", "belady", "cost/lru", "cost/belady");
  for (const double share : shares) {
    const int room = std::max(1, static_cast<int>(share * static_cast<double>(names.size())));
    const auto lru = static_cast<double>(TreeHits(trace, room, cache::MakeLruPolicy()));
    const auto cost =
        static_cast<double>(TreeHits(trace, room, cache::MakeCostAwarePolicy(kAttentionTokens, room)));
    fmt::print("{:>8.0f}% {:>8} {:>8.4f} {:>8.4f}", share * 100, room, lru / all, cost / all);
    for (const auto& hints : hint_sets) {
      const auto hits = static_cast<double>(
          TreeHits(trace, room, cache::MakeCostAwarePolicy(kAttentionTokens, room), hints.hints));
      fmt::print(" {:>9.4f}", hits / all);
    }
    const auto best = static_cast<double>(Belady(trace, room).Hits());
    fmt::print(" {:>8.4f} {:>9.3f} {:>12.3f}\n", best / all, cost / lru, cost / best);
  }
}

int Main(int argc, char** argv) {
  CLI::App app("Hit rates of the KV cache's policies on recorded traces");
  std::vector<std::string> traces;
  std::vector<double> shares = {0.05, 0.1, 0.2, 0.3, 0.5, 1.0};
  app.add_option("traces", traces, "JSON lines with hash_ids, gzipped or not")->required();
  app.add_option("--share", shares, "Room, as a share of all different blocks; may be repeated")
      ->allow_extra_args(false)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  for (const std::string& trace : traces) Play(trace, shares);
  return 0;
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) { return moesaic::bench::Main(argc, argv); }
