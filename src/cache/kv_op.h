// Operations on the bytes of a KV cache. The engine lists them; each KvStore applies them in order.
#pragma once

#include <cstdint>
#include <vector>

namespace moesaic::cache {

enum class KvOpKind : uint8_t {
  kCopy,        ///< Copies the first `tokens` tokens of block `from` to `block`.
  kSave,        ///< Copies `block` to `slot` of `area`.
  kRestore,     ///< Copies `slot` of `area` to `block`.
  kLoad,        ///< Starts to read the record `record` from disk into `block`, as a part of load `load`.
  kCancelLoad,  ///< Ends load `load`: its blocks are not written after this operation.
  kStore,       ///< Copies `block` to the write buffer of record `record`; it is written to disk later.
  kAttach,  ///< Fills the key summaries of `block` from `record`; its layers are read when rows need them.
  kDetach,  ///< Ends kAttach: `block` gets other contents.
  kBuildSummary,  ///< Builds the key summaries of `block` from its keys.
  kClear,         ///< Fills layer `layer` of `block` with zeros.
};
inline constexpr int kKvOpKinds = 10;

/// Memory for blocks outside the cache.
enum class KvArea : uint8_t {
  kSwap,  ///< Blocks of preempted requests, as they are.
  kWarm   ///< Evicted blocks, in WarmCodec's format.
};
inline constexpr int kKvAreas = 2;

/// One operation. Members that its kind does not name are 0.
struct KvOp {
  KvOpKind kind = KvOpKind::kCopy;
  KvArea area = KvArea::kSwap;
  int32_t block = 0;
  int32_t from = 0;
  int32_t slot = 0;
  int32_t tokens = 0;
  int32_t layer = 0;  // of a store; in a batch, of the model
  uint64_t record = 0;
  uint64_t load = 0;

  bool operator==(const KvOp&) const = default;
};
using KvOps = std::vector<KvOp>;

/// Assumed rate of copies to and from the swap area, by one core, until it has been measured.
inline constexpr double kAssumedSwapBytesPerSecond = 4e9;

/// Outcome of operations, and of the step that they belong to.
struct KvResult {
  std::vector<int32_t> rejected_slots;  ///< kWarm slots whose block was not finite: they hold nothing
  std::vector<int32_t> whole_blocks;    ///< attached blocks whose layers are all in memory now
  int32_t damaged_block = -1;           ///< attached block that could not be read: the step computed nothing
  double swap_copy_seconds = 0;  ///< recent mean time to copy a block to or from the swap area; 0: none
  double warm_save_seconds = 0, warm_restore_seconds = 0;
};

}  // namespace moesaic::cache
