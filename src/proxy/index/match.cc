// Match: the longest prefix of a prompt on every instance, in one walk that jumps over its keys.
//
// Dynamo's "flash indexer" (docs.nvidia.com/dynamo/digest/flash-indexer) jumps over positions in the same
// way.
#include <algorithm>
#include <bit>

#include "proxy/index/block_index.h"
#include "proxy/index/key_table.h"

namespace moesaic::proxy {
namespace {

// Probes ahead whose table lines are prefetched, and those whose words are read to prefetch their bit sets. A
// line from memory takes about 100 ns, a probe about 20 ns.
constexpr size_t kLinesAhead = 8, kSetsAhead = 4;
// After this many losses between two probes, the remaining keys there are walked one by one.
constexpr int kMaxSearches = 4;
// At most this many instances are walked one by one; more are intersected as bit sets.
constexpr int kMaxList = 8;
constexpr uint32_t kMaxWords = kMaxNumbers / 64;

struct Walker {
  int number;              // of an instance
  uint32_t device_blocks;  // kStillDevice while every block so far is in device memory
};
constexpr uint32_t kStillDevice = ~uint32_t{0};

using Bits = std::array<uint64_t, kMaxWords>;

// Reads the instances of a bit set, in any tier and in device memory. False when the set was reused
// meanwhile.
bool ReadSet(const KeyTable& table, SetWord word, const KeyBucket::Entry& entry, uint32_t tiers_used,
             Bits& any, Bits& device) {
  const uint32_t words = table.index().set_words;
  const std::atomic<uint64_t>* const planes = table.Planes(word.set_number());
  const uint64_t stride = table.tier_stride();
  for (uint32_t w = 0; w < words; ++w) any[w] = device[w] = 0;
  for (int t = 0; t < kNumTiers; ++t) {
    if ((tiers_used & 1U << t) == 0) continue;
    const bool on_device = (kDeviceTiers & 1U << t) != 0;
    for (uint32_t w = 0; w < words; ++w) {
      const uint64_t bits = planes[t * stride + w].load(std::memory_order_relaxed);
      any[w] |= bits;
      if (on_device) device[w] |= bits;
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return entry.set.load(std::memory_order_relaxed) == word.word();
}

class Walk {
 public:
  Walk(const KeyTable& table, std::span<const uint64_t> keys, MatchResult& result)
      : table_(table),
        keys_(keys),
        result_(result),
        tiers_used_(table.index().tiers_used.load(std::memory_order_relaxed)) {}

  void Run() {
    const auto size = static_cast<uint32_t>(keys_.size());
    uint32_t depth = 0;
    if (size > 0 && Step(0)) {
      for (size_t i = 1; i <= kLinesAhead; ++i) PrefetchLines(i * kJump - 1);
      PrefetchLines(size - 1);
      depth = 1;
      while (depth < size) {
        const uint32_t probe = std::min((depth / kJump + 1) * kJump, size) - 1;
        PrefetchLines(probe + kLinesAhead * kJump);
        PrefetchSets(probe + kSetsAhead * kJump);
        if (Unchanged(probe)) {
          depth = probe + 1;
        } else if (!WalkTo(depth, probe)) {
          break;
        }
      }
    }
    // The instances that are left hold all keys before `depth`.
    for (int i = 0; i < list_size_; ++i) Emit(list_[i].number, depth, list_[i].device_blocks);
    if (bits_mode_) {
      for (uint32_t w = 0; w < table_.index().set_words; ++w) {
        for (uint64_t rest = any_[w]; rest != 0; rest &= rest - 1) EmitBit(w, std::countr_zero(rest), depth);
      }
    }
  }

 private:
  static constexpr uint32_t kJump = BlockIndex::kJump;

  uint64_t Key(size_t depth) const { return keys_[depth] == 0 ? 1 : keys_[depth]; }
  void PrefetchLines(size_t depth) const {
    if (depth < keys_.size()) table_.Prefetch(Key(depth));
  }
  void PrefetchSets(size_t depth) const {
    if (depth >= keys_.size()) return;
    if (const SetWord word = table_.Load(Key(depth)); word.is_set()) table_.PrefetchSet(word.set_number());
  }

  // Advances `depth` beyond `probe`, where an instance is missing or has left device memory: searches the
  // keys at which this happens. False when no instance is left; `depth` is then the number of keys of the
  // last ones.
  bool WalkTo(uint32_t& depth, uint32_t probe) {
    for (int searches = 0; depth <= probe; ++searches) {
      uint32_t low = depth, high = probe;  // the first change is in [low, high]
      if (searches < kMaxSearches) {
        if (searches > 0 && Unchanged(probe)) {
          depth = probe + 1;
          return true;
        }
        while (low < high) {
          const uint32_t middle = low + (high - low) / 2;
          PrefetchLines((low + middle) / 2);
          PrefetchLines((middle + high + 1) / 2);
          if (Unchanged(middle)) {
            low = middle + 1;
          } else {
            high = middle;
          }
        }
      } else if (searches == kMaxSearches) {
        for (uint32_t i = low; i <= probe; ++i) PrefetchLines(i);
      }
      depth = low;
      if (!Step(low)) return false;
      ++depth;
    }
    return true;
  }

  // True when all instances that are left hold this key, and those with all keys in device memory hold it
  // there.
  bool Unchanged(uint32_t depth) const {
    const KeyBucket::Entry* const entry = table_.Find(Key(depth));
    if (entry == nullptr) return false;
    const SetWord word(entry->set.load(std::memory_order_acquire));
    if (entry->key.load(std::memory_order_acquire) != Key(depth)) return false;
    if (!word.is_set()) {
      if (bits_mode_) return false;  // they are more than a word holds
      return ListUnchanged([&](int i) { return word.TiersFor(list_[i].number); });
    }
    bool unchanged = true;
    if (bits_mode_) {
      Bits any, device;
      if (!ReadSet(table_, word, *entry, tiers_used_, any, device)) return false;
      for (uint32_t w = 0; w < table_.index().set_words; ++w)
        unchanged &= ((any_[w] & ~any[w]) | (device_[w] & ~device[w])) == 0;
      return unchanged;
    }
    unchanged = ListUnchanged([&](int i) { return TiersIn(word.set_number(), list_[i].number); });
    std::atomic_thread_fence(std::memory_order_acquire);
    return unchanged && entry->set.load(std::memory_order_relaxed) == word.word();
  }

  template <typename TiersAt>
  bool ListUnchanged(TiersAt tiers_at) const {
    for (int i = 0; i < list_size_; ++i) {
      const uint32_t tiers = tiers_at(i);
      if (tiers == 0 || (list_[i].device_blocks == kStillDevice && (tiers & kDeviceTiers) == 0)) return false;
    }
    return true;
  }

  uint32_t TiersIn(uint32_t set, int number) const {
    const std::atomic<uint64_t>* const planes = table_.Planes(set);
    uint32_t tiers = 0;
    for (int t = 0; t < kNumTiers; ++t) {
      if ((tiers_used_ & 1U << t) == 0) continue;
      const uint64_t word = planes[t * table_.tier_stride() + number / 64].load(std::memory_order_relaxed);
      tiers |= static_cast<uint32_t>((word >> (number % 64) & 1) << t);
    }
    return tiers;
  }

  void Emit(int number, uint32_t blocks, uint32_t device_blocks) {
    const int instance = table_.OwnerOf(number);
    if (blocks == 0 || instance < 0) return;  // the instance was cleared
    result_.matches.push_back({instance, blocks, std::min(blocks, device_blocks)});
  }
  void EmitBit(uint32_t w, int bit, uint32_t depth) {
    const int number = static_cast<int>(w) * 64 + bit;
    const bool device = (device_[w] >> bit & 1) != 0;
    Emit(number, depth, device ? depth : result_.scratch[number]);
  }

  // Intersects with the instances of the key at `depth`. False when none holds it; those that held all keys
  // before it are then still in the list or the bits, unless they were emitted.
  bool Step(uint32_t depth) {
    const KeyBucket::Entry* const entry = table_.Find(Key(depth));
    if (entry == nullptr) return false;
    for (;;) {
      const SetWord word(entry->set.load(std::memory_order_acquire));
      if (entry->key.load(std::memory_order_acquire) != Key(depth)) return false;
      if (!word.is_set()) return StepInline(word, depth);
      if (bits_mode_ || depth == 0) {
        Bits any, device;
        if (!ReadSet(table_, word, *entry, tiers_used_, any, device)) continue;
        return StepBits(any, device, depth);
      }
      std::array<uint32_t, kMaxList> tiers{};
      for (int i = 0; i < list_size_; ++i) tiers[i] = TiersIn(word.set_number(), list_[i].number);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (entry->set.load(std::memory_order_relaxed) != word.word()) continue;
      return StepList([&](int i) { return tiers[i]; }, depth);
    }
  }

  bool StepInline(SetWord word, uint32_t depth) {
    if (bits_mode_) {
      // Everyone that the word lacks drops out; the rest continues as a list.
      for (uint32_t w = 0; w < table_.index().set_words; ++w) {
        for (uint64_t rest = any_[w]; rest != 0; rest &= rest - 1) {
          const int bit = std::countr_zero(rest), number = static_cast<int>(w) * 64 + bit;
          const uint32_t tiers = word.TiersFor(number);
          if (tiers == 0) {
            EmitBit(w, bit, depth);
          } else {
            const uint32_t before = (device_[w] >> bit & 1) != 0 ? kStillDevice : result_.scratch[number];
            list_[list_size_++] = {number,
                                   before != kStillDevice || (tiers & kDeviceTiers) != 0 ? before : depth};
          }
        }
      }
      bits_mode_ = false;
      return list_size_ > 0;
    }
    if (depth == 0) {
      for (int i = 0; i < SetWord::kInline; ++i) {
        const uint32_t tiers = SetWord::TiersOf(word.field(i));
        if (tiers != 0)
          list_[list_size_++] = {SetWord::NumberOf(word.field(i)),
                                 (tiers & kDeviceTiers) != 0 ? kStillDevice : 0};
      }
      return list_size_ > 0;
    }
    return StepList([&](int i) { return word.TiersFor(list_[i].number); }, depth);
  }

  template <typename TiersAt>
  bool StepList(TiersAt tiers_at, uint32_t depth) {
    int kept = 0;
    for (int i = 0; i < list_size_; ++i) {
      const uint32_t tiers = tiers_at(i);
      if (tiers == 0) {
        Emit(list_[i].number, depth, list_[i].device_blocks);
        continue;
      }
      Walker walker = list_[i];
      if (walker.device_blocks == kStillDevice && (tiers & kDeviceTiers) == 0) walker.device_blocks = depth;
      list_[kept++] = walker;
    }
    list_size_ = kept;
    return kept > 0;
  }

  bool StepBits(const Bits& any, const Bits& device, uint32_t depth) {
    const uint32_t words = table_.index().set_words;
    if (!bits_mode_) {
      bits_mode_ = true;
      result_.scratch.assign(size_t{words} * 64, 0);
      for (uint32_t w = 0; w < words; ++w) {
        any_[w] = any[w];
        device_[w] = device[w];
      }
    } else {
      uint64_t changes = 0;
      for (uint32_t w = 0; w < words; ++w) changes |= (any_[w] & ~any[w]) | (device_[w] & ~device[w]);
      if (changes != 0) {
        for (uint32_t w = 0; w < words; ++w) {
          for (uint64_t left = device_[w] & ~device[w]; left != 0; left &= left - 1)
            result_.scratch[w * 64 + std::countr_zero(left)] = depth;
          device_[w] &= device[w];
          for (uint64_t left = any_[w] & ~any[w]; left != 0; left &= left - 1)
            EmitBit(w, std::countr_zero(left), depth);
          any_[w] &= any[w];
        }
      }
    }
    int count = 0;
    for (uint32_t w = 0; w < words; ++w) count += std::popcount(any_[w]);
    if (count == 0) {
      bits_mode_ = false;
      return false;
    }
    if (count > kMaxList) return true;
    for (uint32_t w = 0; w < words; ++w) {
      for (uint64_t rest = any_[w]; rest != 0; rest &= rest - 1) {
        const int bit = std::countr_zero(rest), number = static_cast<int>(w) * 64 + bit;
        list_[list_size_++] = {number, (device_[w] >> bit & 1) != 0 ? kStillDevice : result_.scratch[number]};
      }
    }
    bits_mode_ = false;
    return true;
  }

  const KeyTable& table_;
  const std::span<const uint64_t> keys_;
  MatchResult& result_;
  const uint32_t tiers_used_;
  std::array<Walker, kMaxList> list_;
  int list_size_ = 0;
  bool bits_mode_ = false;
  Bits any_, device_;
};

}  // namespace

void BlockIndex::Match(std::span<const uint64_t> keys, MatchResult& result) const {
  result.matches.clear();
  const KeyTable table(zone_);
  Walk(table, keys, result).Run();
  std::sort(result.matches.begin(), result.matches.end(), [](const InstanceMatch& a, const InstanceMatch& b) {
    return a.blocks != b.blocks ? a.blocks > b.blocks : a.instance < b.instance;
  });
  result.longest = result.matches.empty() ? 0 : result.matches.front().blocks;
}

uint32_t MatchResult::BlocksOf(int instance) const {
  for (const InstanceMatch& match : matches) {
    if (match.instance == instance) return match.blocks;
  }
  return 0;
}

uint32_t MatchResult::DeviceBlocksOf(int instance) const {
  for (const InstanceMatch& match : matches) {
    if (match.instance == instance) return match.device_blocks;
  }
  return 0;
}

}  // namespace moesaic::proxy
