#include "cache/kv_segment.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::cache {
namespace {

static_assert(std::endian::native == std::endian::little, "segments are copies of memory");

constexpr std::array<char, 8> kMagic = {'m', 'o', 'e', 'k', 'v', 's', 'e', 'g'};
constexpr uint32_t kVersion = 2;
constexpr int64_t kSector = 512;  // bytes that disks write atomically
// Numbers of segments and records from here on are invalid: counting on from them could overflow.
constexpr uint64_t kMinInvalid = uint64_t{1} << 63;

struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t slots;
  uint64_t number;
  Fingerprint fingerprint;
  int64_t layer_bytes;
  uint32_t layers;
  uint32_t record_bytes;
  uint64_t checksum;  // of all members before
};
static_assert(sizeof(Header) == 64);
constexpr size_t kHeaderSummed = offsetof(Header, checksum);

struct RecordStart {
  uint64_t checksum;  // of all bytes after it, seeded with the place
  uint64_t id;
  uint64_t parent;
  uint32_t layers;
  uint32_t name_bytes;
  std::array<int32_t, kKvBlockTokens> tokens;
};  // followed by u64 [layers], the key summaries and the name
constexpr size_t kRecordSummedFrom = sizeof(uint64_t);

uint64_t SumOfRecord(std::span<const std::byte> used, uint64_t number, int slot) {
  const uint64_t place = number * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(slot);
  return XXH3_64bits_withSeed(&used[kRecordSummedFrom], used.size() - kRecordSummedFrom, place);
}

}  // namespace

uint64_t ChecksumOf(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

Fingerprint FingerprintOf(const KvLayout& layout, std::string_view computation) {
  std::string all =
      fmt::format("{};{};{};{};{};{};{};", layout.layers, layout.heads, layout.key_dim, layout.value_dim,
                  layout.shared, layout.summary_bytes, static_cast<int>(layout.dtype));
  all += computation;
  const XXH128_hash_t hash = XXH3_128bits(all.data(), all.size());
  return {hash.low64, hash.high64};
}

SegmentFormat::SegmentFormat(const KvLayout& layout, const Fingerprint& fingerprint)
    : layers_(layout.layers),
      layer_bytes_(layout.layer_bytes()),
      summary_bytes_(layout.summary_bytes),
      record_bytes_(
          base::RoundUp(static_cast<int64_t>(sizeof(RecordStart) + layout.layers * sizeof(uint64_t) +
                                             layout.layers * layout.summary_bytes + kMaxNameBytes),
                        kSector)),
      slot_bytes_(base::RoundUp(layout.block_bytes(), kAlignment)),
      fingerprint_(fingerprint) {}

int64_t SegmentFormat::BlockOffset(int slots, int slot) const {
  return base::RoundUp(RecordOffset(slots), kAlignment) + slot * slot_bytes_;
}

std::vector<std::byte> SegmentFormat::EncodeHeader(uint64_t number, int slots) const {
  Header header = {.magic = kMagic,
                   .version = kVersion,
                   .slots = static_cast<uint32_t>(slots),
                   .number = number,
                   .fingerprint = fingerprint_,
                   .layer_bytes = layer_bytes_,
                   .layers = static_cast<uint32_t>(layers_),
                   .record_bytes = static_cast<uint32_t>(record_bytes_),
                   .checksum = 0};
  header.checksum = XXH3_64bits(&header, kHeaderSummed);
  std::vector<std::byte> bytes(kHeaderBytes);
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

StatusOr<int> SegmentFormat::DecodeHeader(std::span<const std::byte> bytes, uint64_t number) const {
  Header header;
  if (bytes.size() < sizeof(header)) return DataLoss("the file ends at byte {}, in its header", bytes.size());
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != kMagic) return DataLoss("no segment of KV blocks");
  if (header.version != kVersion) {
    return absl::FailedPreconditionError(
        fmt::format("version {} of the format; this build reads {}", header.version, kVersion));
  }
  if (header.checksum != XXH3_64bits(&header, kHeaderSummed) || header.number != number) {
    return DataLoss("its header is damaged");
  }
  if (header.fingerprint != fingerprint_ || header.layer_bytes != layer_bytes_ ||
      header.layers != static_cast<uint32_t>(layers_) ||
      header.record_bytes != static_cast<uint32_t>(record_bytes_)) {
    return absl::FailedPreconditionError("its blocks are of another model, KV type or build");
  }
  constexpr uint32_t kMaxSlots = 1 << 20;  // so that the next line does not overflow
  if (header.slots == 0 || header.slots > kMaxSlots ||
      SegmentBytes(static_cast<int>(header.slots)) > std::max(kMaxBytes, SegmentBytes(1))) {
    return DataLoss("its header is damaged: {} slots", header.slots);
  }
  return static_cast<int>(header.slots);
}

std::vector<std::byte> SegmentFormat::EncodeRecord(const SlotRecord& record, uint64_t number,
                                                   int slot) const {
  MOESAIC_CHECK_EQ(static_cast<int>(record.layer_sums.size()), layers_);
  MOESAIC_CHECK_LE(record.name.size(), kMaxNameBytes);
  RecordStart start = {.checksum = 0,
                       .id = record.id,
                       .parent = record.parent,
                       .layers = static_cast<uint32_t>(layers_),
                       .name_bytes = static_cast<uint32_t>(record.name.size()),
                       .tokens = record.tokens};
  std::vector<std::byte> bytes(record_bytes_);
  const size_t sums = record.layer_sums.size() * sizeof(uint64_t);
  const size_t summaries = record.summaries.size();
  MOESAIC_CHECK_EQ(static_cast<int64_t>(summaries), layers_ * summary_bytes_);
  const size_t used = sizeof(start) + sums + summaries + record.name.size();
  std::memcpy(bytes.data(), &start, sizeof(start));
  std::memcpy(&bytes[sizeof(start)], record.layer_sums.data(), sums);
  std::ranges::copy(record.summaries, bytes.begin() + static_cast<int64_t>(sizeof(start) + sums));
  std::ranges::copy(std::as_bytes(std::span(record.name)),
                    bytes.begin() + static_cast<int64_t>(sizeof(start) + sums + summaries));
  start.checksum = SumOfRecord(std::span(bytes).first(used), number, slot);
  std::memcpy(bytes.data(), &start.checksum, sizeof(start.checksum));
  return bytes;
}

std::optional<SlotRecord> SegmentFormat::DecodeRecord(std::span<const std::byte> bytes, uint64_t number,
                                                      int slot) const {
  RecordStart start;
  if (static_cast<int64_t>(bytes.size()) < record_bytes_) return std::nullopt;
  std::memcpy(&start, bytes.data(), sizeof(start));
  if (start.id == 0 || start.id >= kMinInvalid || start.parent >= start.id ||
      start.layers != static_cast<uint32_t>(layers_) || start.name_bytes > kMaxNameBytes) {
    return std::nullopt;
  }
  const size_t sums = static_cast<size_t>(layers_) * sizeof(uint64_t);
  const auto summaries = static_cast<size_t>(layers_ * summary_bytes_);
  const size_t used = sizeof(start) + sums + summaries + start.name_bytes;
  if (SumOfRecord(bytes.first(used), number, slot) != start.checksum) return std::nullopt;
  SlotRecord record = {.id = start.id, .parent = start.parent, .tokens = start.tokens};
  record.layer_sums.resize(layers_);
  std::memcpy(record.layer_sums.data(), &bytes[sizeof(start)], sums);
  const auto summary_bytes = bytes.subspan(sizeof(start) + sums, summaries);
  record.summaries.assign(summary_bytes.begin(), summary_bytes.end());
  const auto* name = reinterpret_cast<const char*>(bytes.data() + sizeof(start) + sums + summaries);
  record.name.assign(name, start.name_bytes);
  return record;
}

std::vector<uint64_t> SegmentFormat::LayerSums(const std::byte* from, int layers) const {
  std::vector<uint64_t> sums(layers);
  for (int i = 0; i < layers; ++i) {
    sums[i] = XXH3_64bits(from + i * layer_bytes_, static_cast<size_t>(layer_bytes_));
  }
  return sums;
}

std::vector<std::byte> SegmentFormat::SummariesOf(const KvBlockView& block) const {
  std::vector<std::byte> summaries(layers_ * summary_bytes_);
  for (int i = 0; i < layers_ && summary_bytes_ > 0; ++i) {
    std::memcpy(&summaries[i * summary_bytes_], block.summaries + i * block.summary_step, summary_bytes_);
  }
  return summaries;
}

void SegmentFormat::PutSummaries(std::span<const std::byte> summaries, const KvBlockView& block) const {
  MOESAIC_CHECK_EQ(static_cast<int64_t>(summaries.size()), layers_ * summary_bytes_);
  for (int i = 0; i < layers_ && summary_bytes_ > 0; ++i) {
    std::memcpy(block.summaries + i * block.summary_step, &summaries[i * summary_bytes_], summary_bytes_);
  }
}

std::string SegmentName(uint64_t number) { return fmt::format("kv-{:016x}.segment", number); }

std::optional<uint64_t> SegmentNumber(std::string_view name) {
  constexpr std::string_view kStart = "kv-", kEnd = ".segment";
  constexpr size_t kDigits = 16;
  if (name.size() != kStart.size() + kDigits + kEnd.size() || !name.starts_with(kStart) ||
      !name.ends_with(kEnd)) {
    return std::nullopt;
  }
  uint64_t number = 0;
  const char* end = name.data() + kStart.size() + kDigits;
  const auto read = std::from_chars(name.data() + kStart.size(), end, number, 16);
  if (read.ec != std::errc() || read.ptr != end || SegmentName(number) != name) return std::nullopt;
  if (number >= kMinInvalid) return std::nullopt;
  return number;
}

}  // namespace moesaic::cache
