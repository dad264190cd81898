// How KV blocks stand in files: segments of equal slots, each with a record that says what its block is.
// docs/contracts/kv-tiers.md is the law.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/block_pool.h"

namespace moesaic::cache {

/// XXH3, 64 bits.
uint64_t ChecksumOf(std::span<const std::byte> bytes);

/// What blocks are to be the same for: a hash of 128 bits.
using Fingerprint = std::array<uint64_t, 2>;
/// Of blocks of this layout that were computed by what `maker` names.
Fingerprint FingerprintOf(const KvLayout& layout, std::string_view maker);

inline constexpr size_t kMaxNameBytes = 512;  ///< of a namespace whose blocks are kept in files

/// What one slot holds.
struct SlotRecord {
  uint64_t id = 0;      // rises with time, never 0; no two records of a folder share one
  uint64_t parent = 0;  // id of the record of the block before; 0: none, it is the first of its sequence
  std::array<int32_t, kKvBlockTokens> tokens = {};
  std::vector<uint64_t> layer_sums = {};  // [layers] checksums of the block's layers
  std::vector<std::byte> summaries = {};  // [layers * summary_bytes] of its keys
  std::string name = {};                  // its namespace
};

/// Bytes and offsets of segments of one layout and maker:
///   header (4096) | slots x record_bytes | up to a multiple of 4096 | slots x slot_bytes
/// A slot has its block's layers, at a multiple of 4096; the summaries are in the record. Numbers are
/// little-endian.
class SegmentFormat {
 public:
  static constexpr int64_t kHeaderBytes = 4096;
  static constexpr int64_t kAlignment = 4096;  // a page, and what the largest sectors have
  /// Of a segment of more than one slot: large enough for a disk's rate.
  static constexpr int64_t kMaxBytes = 256 << 20;

  SegmentFormat(const KvLayout& layout, const Fingerprint& fingerprint);

  int layers() const { return layers_; }
  int64_t layer_bytes() const { return layer_bytes_; }
  int64_t block_bytes() const { return layers_ * layer_bytes_; }
  int64_t record_bytes() const { return record_bytes_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t RecordOffset(int slot) const { return kHeaderBytes + slot * record_bytes_; }
  int64_t BlockOffset(int slots, int slot) const;
  int64_t SegmentBytes(int slots) const { return BlockOffset(slots, slots); }

  /// [kHeaderBytes] of segment `number` with `slots` slots.
  std::vector<std::byte> EncodeHeader(uint64_t number, int slots) const;
  /// Slots of the segment whose file begins with `bytes` and is called `number`. DataLoss: damaged or no
  /// segment; FailedPrecondition: one of another model, type, layout or version.
  StatusOr<int> DecodeHeader(std::span<const std::byte> bytes, uint64_t number) const;

  /// [record_bytes()], bound to its place: it is valid nowhere else.
  std::vector<std::byte> EncodeRecord(const SlotRecord& record, uint64_t number, int slot) const;
  /// What stands there, if it is whole. bytes: [record_bytes()].
  std::optional<SlotRecord> DecodeRecord(std::span<const std::byte> bytes, uint64_t number, int slot) const;

  /// [layers] checksums of so many layers of a block that stand at `from`.
  std::vector<uint64_t> LayerSums(const std::byte* from, int layers) const;
  /// [layers * summary_bytes] of a block.
  std::vector<std::byte> SummariesOf(const KvBlockView& block) const;
  /// Puts them back to where they stand beside a block.
  void PutSummaries(std::span<const std::byte> summaries, const KvBlockView& block) const;

 private:
  const int layers_;
  const int64_t layer_bytes_;
  const int64_t summary_bytes_;  // of one layer
  const int64_t record_bytes_, slot_bytes_;
  const Fingerprint fingerprint_;
};

/// "kv-000000000000002a.segment"
std::string SegmentName(uint64_t number);
/// The number in such a name.
std::optional<uint64_t> SegmentNumber(std::string_view name);

}  // namespace moesaic::cache
