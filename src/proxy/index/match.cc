// Match: the longest prefix of a prompt on every instance, in one walk over its keys.
#include <algorithm>
#include <bit>

#include "proxy/index/block_index.h"
#include "proxy/index/key_table.h"

namespace moesaic::proxy {
namespace {

// Keys ahead whose table lines are prefetched. A line from memory takes about 100 ns, a step of the walk
// about 6 ns.
constexpr size_t kAhead = 20;
// Keys ahead whose words are read to prefetch their bit sets.
constexpr size_t kSetAhead = 8;
// At most this many instances are walked one by one; more are intersected as bit sets.
constexpr int kMaxList = 8;
constexpr uint32_t kMaxWords = kMaxInstances / 64;

struct Walker {
  int instance;
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
    for (size_t j = 0; j < std::min(kAhead, keys_.size()); ++j) table_.Prefetch(keys_[j]);
    uint32_t depth = 0;
    for (; depth < keys_.size(); ++depth) {
      if (depth + kAhead < keys_.size()) table_.Prefetch(keys_[depth + kAhead]);
      if (!Step(depth)) break;
    }
    // The instances that are left hold all keys.
    for (int i = 0; i < list_size_; ++i) Emit(list_[i].instance, depth, list_[i].device_blocks);
    if (bits_mode_ && depth > 0) {
      for (uint32_t w = 0; w < table_.index().set_words; ++w) {
        for (uint64_t rest = any_[w]; rest != 0; rest &= rest - 1) EmitBit(w, std::countr_zero(rest), depth);
      }
    }
  }

 private:
  void Emit(int instance, uint32_t blocks, uint32_t device_blocks) {
    if (blocks == 0) return;
    result_.matches.push_back({instance, blocks, std::min(blocks, device_blocks)});
  }
  void EmitBit(uint32_t w, int bit, uint32_t depth) {
    const int instance = static_cast<int>(w) * 64 + bit;
    const bool device = (device_[w] >> bit & 1) != 0;
    Emit(instance, depth, device ? depth : result_.scratch[instance]);
  }

  // Intersects with the instances of the next key. False when none is left.
  bool Step(uint32_t depth) {
    const KeyBucket::Entry* const entry = table_.Find(keys_[depth] == 0 ? 1 : keys_[depth]);
    if (entry == nullptr) return Drop(depth);
    for (;;) {
      const SetWord word(entry->set.load(std::memory_order_acquire));
      if (entry->key.load(std::memory_order_acquire) != (keys_[depth] == 0 ? 1 : keys_[depth]))
        return Drop(depth);
      if (!word.is_set()) return StepInline(word, depth);
      if (bits_mode_ || depth == 0) {
        Bits any, device;
        if (!ReadSet(table_, word, *entry, tiers_used_, any, device)) continue;
        return StepBits(any, device, depth);
      }
      std::array<uint32_t, kMaxList> tiers{};
      const std::atomic<uint64_t>* const planes = table_.Planes(word.set_number());
      const uint64_t stride = table_.tier_stride();
      for (int i = 0; i < list_size_; ++i) {
        const int instance = list_[i].instance;
        for (int t = 0; t < kNumTiers; ++t) {
          if ((tiers_used_ & 1U << t) == 0) continue;
          tiers[i] |= static_cast<uint32_t>(
              (planes[t * stride + instance / 64].load(std::memory_order_relaxed) >> (instance % 64) & 1)
              << t);
        }
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (entry->set.load(std::memory_order_relaxed) != word.word()) continue;
      return StepList([&](int i) { return tiers[i]; }, depth);
    }
  }

  bool Drop(uint32_t) { return false; }  // Run emits those that are left with the depth so far

  bool StepInline(SetWord word, uint32_t depth) {
    if (bits_mode_) {
      // Everyone that the word lacks drops out; the rest continues as a list.
      for (uint32_t w = 0; w < table_.index().set_words; ++w) {
        for (uint64_t rest = any_[w]; rest != 0; rest &= rest - 1) {
          const int bit = std::countr_zero(rest), instance = static_cast<int>(w) * 64 + bit;
          const uint32_t tiers = word.TiersFor(instance);
          if (tiers == 0) {
            EmitBit(w, bit, depth);
          } else {
            const uint32_t before = (device_[w] >> bit & 1) != 0 ? kStillDevice : result_.scratch[instance];
            list_[list_size_++] = {instance,
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
          list_[list_size_++] = {SetWord::InstanceOf(word.field(i)),
                                 (tiers & kDeviceTiers) != 0 ? kStillDevice : 0};
      }
      return list_size_ > 0;
    }
    return StepList([&](int i) { return word.TiersFor(list_[i].instance); }, depth);
  }

  template <typename TiersAt>
  bool StepList(TiersAt tiers_at, uint32_t depth) {
    int kept = 0;
    for (int i = 0; i < list_size_; ++i) {
      const uint32_t tiers = tiers_at(i);
      if (tiers == 0) {
        Emit(list_[i].instance, depth, list_[i].device_blocks);
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
        const int bit = std::countr_zero(rest), instance = static_cast<int>(w) * 64 + bit;
        list_[list_size_++] = {instance,
                               (device_[w] >> bit & 1) != 0 ? kStillDevice : result_.scratch[instance]};
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
