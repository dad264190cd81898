// The format of files of KV blocks: segments of equal slots, each with a record that identifies its block.
// docs/contracts/kv-tiers.md, K5, is normative.
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

/// Returns the 64-bit XXH3 of `bytes`.
uint64_t ChecksumOf(std::span<const std::byte> bytes);

/// Hash of everything that decides the values of blocks, 128 bits.
using Fingerprint = std::array<uint64_t, 2>;
/// Returns the fingerprint of blocks of this layout. `computation` identifies everything else that decides
/// their values.
Fingerprint FingerprintOf(const KvLayout& layout, std::string_view computation);

inline constexpr size_t kMaxNameBytes = 512;  ///< Longest namespace whose blocks are stored.

/// The record of one slot.
struct SlotRecord {
  uint64_t id = 0;      // rises with time, never 0, unique in a folder
  uint64_t parent = 0;  // id of the record of the block before; 0: it is the first of its sequence
  std::array<int32_t, kKvBlockTokens> tokens = {};
  std::vector<uint64_t> layer_sums = {};  // [layers] checksums of the block's layers
  std::vector<std::byte> summaries = {};  // [layers * summary_bytes]
  std::string name = {};                  // its namespace
};

/// Bytes and offsets of segments of one layout and fingerprint:
///   header (4096) | slots x record_bytes | up to a multiple of 4096 | slots x slot_bytes
/// A slot has its block's layers, at a multiple of 4096; the summaries are in the record. Numbers are
/// little-endian.
class SegmentFormat {
 public:
  static constexpr int64_t kHeaderBytes = 4096;
  static constexpr int64_t kAlignment = 4096;  // a page, and the largest sector of disks
  /// Maximum size of a segment of more than one slot: large enough for a disk's full rate.
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

  /// The header of segment `number` with `slots` slots: [kHeaderBytes].
  std::vector<std::byte> EncodeHeader(uint64_t number, int slots) const;
  /// Returns the number of slots of segment `number`, whose file begins with `bytes`. DataLoss if the file is
  /// damaged or no segment; FailedPrecondition if it is of another model, type, layout or version.
  StatusOr<int> DecodeHeader(std::span<const std::byte> bytes, uint64_t number) const;

  /// The record as bytes: [record_bytes()]. They are valid in this slot only.
  std::vector<std::byte> EncodeRecord(const SlotRecord& record, uint64_t number, int slot) const;
  /// The record in `bytes` [record_bytes()], if it is intact.
  std::optional<SlotRecord> DecodeRecord(std::span<const std::byte> bytes, uint64_t number, int slot) const;

  /// Returns the checksums of `layers` consecutive layers at `from`: [layers].
  std::vector<uint64_t> LayerSums(const std::byte* from, int layers) const;
  /// Returns the key summaries of a block: [layers * summary_bytes].
  std::vector<std::byte> SummariesOf(const KvBlockView& block) const;
  /// Copies key summaries to those of `block`.
  void PutSummaries(std::span<const std::byte> summaries, const KvBlockView& block) const;

 private:
  const int layers_;
  const int64_t layer_bytes_;
  const int64_t summary_bytes_;  // of one layer
  const int64_t record_bytes_, slot_bytes_;
  const Fingerprint fingerprint_;
};

/// Returns the name of a segment's file, such as "kv-000000000000002a.segment".
std::string SegmentName(uint64_t number);
/// The number in such a name; none: it is no such name.
std::optional<uint64_t> SegmentNumber(std::string_view name);

}  // namespace moesaic::cache
