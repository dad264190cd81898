#include "cache/kv_store.h"

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "base/check.h"
#include "cache/disk_store.h"

namespace moesaic::cache {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Operations that run as one loop over the thread pool, or as one request to the disk.
bool IsGrouped(const KvOp& op) {
  switch (op.kind) {
    case KvOpKind::kSave:
    case KvOpKind::kRestore:
      return op.area == KvArea::kWarm;
    case KvOpKind::kLoad:
    case KvOpKind::kBuildSummary:
      return true;
    default:
      return false;
  }
}

}  // namespace

StatusOr<int> KvStore::BlocksFor(const tensor::KvLayout& layout, int64_t bytes) {
  MOESAIC_CHECK(layout.dtype == tensor::DType::kF32 || layout.dtype == tensor::DType::kBF16 ||
                layout.dtype == tensor::DType::kI8);
  MOESAIC_CHECK_LT(0, layout.block_bytes());
  const int64_t blocks = std::min<int64_t>(bytes / layout.total_bytes(),
                                           std::numeric_limits<int32_t>::max() / tensor::kKvBlockTokens);
  if (blocks < 1) {
    return ResourceExhausted("the KV cache needs at least {} bytes, one block of {} tokens; its budget is {}",
                             layout.total_bytes(), tensor::kKvBlockTokens, bytes);
  }
  return static_cast<int>(blocks);
}

StatusOr<std::unique_ptr<KvStore>> KvStore::Create(const KvStoreOptions& options,
                                                   runtime::ThreadPool& threads) {
  const tensor::KvLayout& layout = options.layout;
  const int64_t blocks = options.blocks;
  MOESAIC_CHECK_LT(0, blocks);
  ASSIGN_OR_RETURN(runtime::Buffer memory,
                   runtime::Buffer::Allocate(blocks * layout.block_bytes(), /*huge=*/true));
  runtime::Buffer summaries;
  if (layout.summary_bytes > 0) {
    ASSIGN_OR_RETURN(summaries, runtime::Buffer::Allocate(blocks * layout.layers * layout.summary_stride(),
                                                          /*huge=*/true));
  }
  std::array<runtime::Buffer, kKvAreas> areas;
  const WarmCodec codec(layout, options.warm_exact);
  const int64_t swap_bytes = options.swap_slots * layout.total_bytes();
  const int64_t warm_bytes = options.warm_slots * codec.block_bytes();
  if (swap_bytes > 0) {
    ASSIGN_OR_RETURN(areas[0], runtime::Buffer::Allocate(swap_bytes, /*huge=*/true));
  }
  if (warm_bytes > 0) {
    ASSIGN_OR_RETURN(areas[1], runtime::Buffer::Allocate(warm_bytes, /*huge=*/true));
  }
  return std::unique_ptr<KvStore>(
      new KvStore(options, threads, std::move(memory), std::move(summaries), std::move(areas)));
}

KvStore::KvStore(const KvStoreOptions& options, runtime::ThreadPool& threads, runtime::Buffer memory,
                 runtime::Buffer summaries, std::array<runtime::Buffer, kKvAreas> areas)
    : options_(options),
      codec_(options.layout, options.warm_exact),
      threads_(threads),
      memory_(std::move(memory)),
      summaries_(std::move(summaries)),
      areas_(std::move(areas)) {}

KvStore::~KvStore() = default;

std::byte* KvStore::summaries(int layer) const {
  if (options_.layout.summary_bytes == 0) return nullptr;
  return summaries_.data() + int64_t{layer} * blocks() * options_.layout.summary_stride();
}

tensor::KvBlockView KvStore::ViewOf(int32_t block) const {
  const int64_t stride = options_.layout.summary_stride();
  if (stride == 0) return {.data = At(block)};
  return {.data = At(block), .summaries = summaries(0) + block * stride, .summary_step = blocks() * stride};
}

uint64_t KvStore::Checksum(int32_t block) const {
  std::vector<std::byte> bytes(static_cast<size_t>(options_.layout.total_bytes()));
  options_.layout.Copy(ViewOf(block), options_.layout.Flat(bytes.data()));
  return ChecksumOf(bytes);
}

std::byte* KvStore::SlotAt(KvArea area, int32_t slot) const {
  MOESAIC_CHECK(0 <= slot && slot < slots(area));
  const int64_t bytes = area == KvArea::kSwap ? options_.layout.total_bytes() : codec_.block_bytes();
  return areas_[static_cast<size_t>(area)].data() + slot * bytes;
}

// Number of leading operations that may run at the same time. The same slot is never written twice in a
// group.
size_t KvStore::CountGroup(std::span<const KvOp> ops) const {
  const KvOp& first = ops.front();
  if (!IsGrouped(first)) return 1;
  absl::flat_hash_set<int32_t> slots;
  size_t count = 0;
  for (; count < ops.size(); ++count) {
    const KvOp& op = ops[count];
    if (op.kind != first.kind || op.area != first.area || op.load != first.load) break;
    if (op.kind == KvOpKind::kSave && !slots.insert(op.slot).second) break;
  }
  return count;
}

void KvStore::Apply(std::span<const KvOp> ops, KvResult* result) {
  const tensor::KvLayout& layout = options_.layout;
  while (!ops.empty()) {
    const std::span<const KvOp> group = ops.first(CountGroup(ops));
    ops = ops.subspan(group.size());
    const KvOp& first = group.front();
    switch (first.kind) {
      case KvOpKind::kSave:
        first.area == KvArea::kWarm ? SaveWarm(group, result) : CopySwap(first, result);
        break;
      case KvOpKind::kRestore:
        first.area == KvArea::kWarm ? RestoreWarm(group, result) : CopySwap(first, result);
        break;
      case KvOpKind::kLoad: {
        std::vector<DiskStore::Target> targets;
        for (const KvOp& op : group) targets.push_back({op.record, ViewOf(op.block)});
        disk_->Read(first.load, targets);
        break;
      }
      case KvOpKind::kBuildSummary: {
        std::vector<int32_t> blocks;
        for (const KvOp& op : group) blocks.push_back(op.block);
        build_summaries_(blocks);
        break;
      }
      case KvOpKind::kCopy:
        layout.CopyTokens({.data = At(first.from)}, {.data = At(first.block)}, first.tokens);
        break;
      case KvOpKind::kClear:
        std::memset(At(first.block) + first.layer * layout.layer_bytes(), 0, layout.layer_bytes());
        break;
      case KvOpKind::kStore:
        disk_->Write(first.record, ViewOf(first.block));
        break;
      case KvOpKind::kCancelLoad:
        disk_->Cancel(first.load);
        break;
      case KvOpKind::kAttach: {
        disk_->FillSummaries(first.record, ViewOf(first.block));
        const auto layers = static_cast<size_t>(options_.pageable_layers);
        attached_[first.block] = {.record = first.record,
                                  .missing = std::vector<bool>(layers, true),
                                  .left = options_.pageable_layers};
        break;
      }
      case KvOpKind::kDetach:
        attached_.erase(first.block);
        break;
    }
  }
}

void KvStore::CopySwap(const KvOp& op, KvResult* result) {
  const tensor::KvLayout& layout = options_.layout;
  const tensor::KvBlockView slot = layout.Flat(SlotAt(op.area, op.slot)), block = ViewOf(op.block);
  const Clock::time_point start = Clock::now();
  const bool saves = op.kind == KvOpKind::kSave;
  layout.Copy(saves ? block : slot, saves ? slot : block);
  // The mean follows the machine's load, and not a single page fault.
  if (swap_copy_seconds_ == 0) {
    swap_copy_seconds_ = static_cast<double>(layout.total_bytes()) / kAssumedSwapBytesPerSecond;
  }
  swap_copy_seconds_ += (SecondsSince(start) - swap_copy_seconds_) / 8;
  result->swap_copy_seconds = swap_copy_seconds_;
}

void KvStore::SaveWarm(std::span<const KvOp> ops, KvResult* result) {
  const Clock::time_point start = Clock::now();
  const int64_t layers = codec_.layers();
  std::vector<std::atomic<bool>> finite(ops.size());
  std::ranges::for_each(finite, [](std::atomic<bool>& each) { each = true; });
  threads_.Run(std::ssize(ops) * layers, [&](int64_t task, int) {
    const KvOp& op = ops[task / layers];
    const auto layer = static_cast<int>(task % layers);
    const tensor::KvBlockView block = ViewOf(op.block);
    if (codec_.IsFinite(block, layer)) {
      codec_.Encode(block, layer, SlotAt(op.area, op.slot));
    } else {
      finite[task / layers] = false;
    }
  });
  for (size_t i = 0; i < ops.size(); ++i) {
    if (!finite[i]) result->rejected_slots.push_back(ops[i].slot);
  }
  result->warm_save_seconds += SecondsSince(start);
}

void KvStore::RestoreWarm(std::span<const KvOp> ops, KvResult* result) {
  const Clock::time_point start = Clock::now();
  const int64_t layers = codec_.layers();
  threads_.Run(std::ssize(ops) * layers, [&](int64_t task, int) {
    const KvOp& op = ops[task / layers];
    codec_.Decode(SlotAt(op.area, op.slot), static_cast<int>(task % layers), ViewOf(op.block));
  });
  result->warm_restore_seconds += SecondsSince(start);
}

void KvStore::Page(int layer, std::span<const int32_t> blocks) {
  if (attached_.empty() || paged_.damaged_block >= 0) return;
  MOESAIC_CHECK_LT(layer, options_.pageable_layers);
  std::vector<DiskStore::LayerRead> reads;
  std::vector<int32_t> missing;
  for (const int32_t block : blocks) {
    const auto it = attached_.find(block);
    if (it == attached_.end() || !it->second.missing[layer]) continue;
    it->second.missing[layer] = false;  // a block may be listed twice
    reads.push_back({it->second.record, layer, At(block) + layer * options_.layout.layer_bytes()});
    missing.push_back(block);
  }
  if (reads.empty()) return;
  const size_t read = disk_->ReadLayers(reads);
  for (size_t i = 0; i < missing.size(); ++i) {
    Attached& attached = attached_.at(missing[i]);
    if (i >= read) {
      attached.missing[layer] = true;
    } else if (--attached.left == 0) {
      attached_.erase(missing[i]);
      paged_.whole_blocks.push_back(missing[i]);
    }
  }
  if (read < reads.size()) paged_.damaged_block = missing[read];
}

void KvStore::TakePaged(KvResult* result) {
  std::ranges::move(paged_.whole_blocks, std::back_inserter(result->whole_blocks));
  if (paged_.damaged_block >= 0) result->damaged_block = paged_.damaged_block;
  paged_ = {};
}

}  // namespace moesaic::cache
