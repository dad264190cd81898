// The bytes of a KV cache: one store per rank. docs/contracts/cache-blocks.md is normative.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "cache/kv_op.h"
#include "cache/warm_codec.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"
#include "tensor/kv_layout.h"

namespace moesaic::cache {

class DiskStore;

struct KvStoreOptions {
  tensor::KvLayout layout = {};
  int blocks = 0;           ///< blocks of the cache
  int swap_slots = 0;       ///< slots of KvArea::kSwap
  int warm_slots = 0;       ///< slots of KvArea::kWarm
  bool warm_exact = false;  ///< the warm area keeps blocks as they are
  int pageable_layers = 0;  ///< leading layers that attached blocks have on disk; later ones stay as they are
};

/// Owns the memory of blocks, key summaries and slots, and applies operations to it. Does not know why a
/// block is copied. Memory is reserved in huge pages and becomes resident when it is first written. Only
/// the thread of its executor may call it. Kernels also read and write blocks during a step.
class KvStore {
 public:
  /// Builds the key summaries of blocks, in all layers that have them, from the keys in the blocks.
  using SummaryBuilder = std::function<void(std::span<const int32_t> blocks)>;

  /// `threads` are borrowed.
  static StatusOr<std::unique_ptr<KvStore>> Create(const KvStoreOptions& options,
                                                   runtime::ThreadPool& threads);
  ~KvStore();
  KvStore(const KvStore&) = delete;
  KvStore& operator=(const KvStore&) = delete;

  /// Returns the number of whole blocks that fit `bytes`. ResourceExhausted if not even one fits.
  static StatusOr<int> BlocksFor(const tensor::KvLayout& layout, int64_t bytes);

  /// Must be called before the first kBuildSummary.
  void SetSummaryBuilder(SummaryBuilder builder) { build_summaries_ = std::move(builder); }
  /// Must be called before the first operation that names a record. `disk` is borrowed.
  void SetDisk(DiskStore* disk) { disk_ = disk; }

  /// Applies the operations in order and adds their outcome to `result`.
  void Apply(std::span<const KvOp> ops, KvResult* result);

  /// Returns whether rows may find layers of a block on disk.
  bool pages() const { return !attached_.empty(); }
  /// Reads the missing layers `layer` of `blocks` from disk and waits for them. The first block that cannot
  /// be read is reported by TakePaged; the step must then be dropped.
  void Page(int layer, std::span<const int32_t> blocks);
  /// Moves the blocks that Page has completed, or failed to read, since the last call into `result`.
  void TakePaged(KvResult* result);

  /// Returns the XXH3 of a block with its key summaries.
  uint64_t Checksum(int32_t block) const;

  const tensor::KvLayout& layout() const { return options_.layout; }
  int blocks() const { return options_.blocks; }
  int slots(KvArea area) const { return area == KvArea::kSwap ? options_.swap_slots : options_.warm_slots; }
  std::byte* base() const { return memory_.data(); }
  std::byte* At(int32_t block) const { return base() + block * options_.layout.block_bytes(); }
  /// Returns the key summaries of block 0 in `layer`, or null if there are none. They are stored as
  /// [layer][block][summary_stride()], so that reading those of one layer touches few pages.
  std::byte* summaries(int layer) const;
  tensor::KvBlockView ViewOf(int32_t block) const;

 private:
  // An attached block: the layers that are still on disk.
  struct Attached {
    uint64_t record;
    std::vector<bool> missing;  // [pageable_layers]
    int left;                   // of them
  };

  KvStore(const KvStoreOptions& options, runtime::ThreadPool& threads, runtime::Buffer memory,
          runtime::Buffer summaries, std::array<runtime::Buffer, kKvAreas> areas);
  std::byte* SlotAt(KvArea area, int32_t slot) const;
  size_t CountGroup(std::span<const KvOp> ops) const;
  void CopySwap(const KvOp& op, KvResult* result);
  void SaveWarm(std::span<const KvOp> ops, KvResult* result);
  void RestoreWarm(std::span<const KvOp> ops, KvResult* result);

  const KvStoreOptions options_;
  const WarmCodec codec_;
  runtime::ThreadPool& threads_;
  runtime::Buffer memory_, summaries_;
  std::array<runtime::Buffer, kKvAreas> areas_;  // by KvArea
  SummaryBuilder build_summaries_;
  DiskStore* disk_ = nullptr;
  double swap_copy_seconds_ = 0;
  absl::flat_hash_map<int32_t, Attached> attached_;  // by block
  KvResult paged_;
};

}  // namespace moesaic::cache
