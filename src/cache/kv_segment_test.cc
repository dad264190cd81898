#include "cache/kv_segment.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

namespace moesaic::cache {
namespace {

constexpr KvLayout kSegmentLayout = {.layers = 3, .heads = 2, .key_dim = 5, .value_dim = 7};

SegmentFormat Format(std::string_view maker = "model", const KvLayout& layout = kSegmentLayout) {
  return {layout, FingerprintOf(layout, maker)};
}

SlotRecord Record() {
  SlotRecord record = {.id = 7, .parent = 3, .layer_sums = {1, 2, 3}, .name = "salt"};
  std::iota(record.tokens.begin(), record.tokens.end(), 100);
  return record;
}

TEST(KvSegment, RecordsAndBlocksDoNotOverlap) {
  const SegmentFormat format = Format();
  EXPECT_EQ(format.block_bytes(), kSegmentLayout.block_bytes());
  for (int slots = 1; slots < 20; ++slots) {
    EXPECT_LE(format.RecordOffset(slots), format.BlockOffset(slots, 0));
    for (int slot = 0; slot < slots; ++slot) {
      EXPECT_EQ(format.BlockOffset(slots, slot) % 4096, 0);
      EXPECT_LE(format.BlockOffset(slots, slot) + format.block_bytes(), format.BlockOffset(slots, slot + 1));
    }
    EXPECT_EQ(format.SegmentBytes(slots), format.BlockOffset(slots, slots));
  }
}

TEST(KvSegment, HeadersIdentifyModelLayoutAndSegment) {
  const SegmentFormat format = Format();
  const std::vector<std::byte> header = format.EncodeHeader(42, 9);
  EXPECT_EQ(header.size(), size_t{SegmentFormat::kHeaderBytes});
  EXPECT_EQ(*format.DecodeHeader(header, 42), 9);
  EXPECT_EQ(format.DecodeHeader(header, 43).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(Format("another").DecodeHeader(header, 42).status().code(), StatusCode::kFailedPrecondition);
  for (KvLayout other :
       {KvLayout{.layers = 3, .heads = 2, .key_dim = 7, .value_dim = 5},
        KvLayout{.layers = 3, .heads = 2, .key_dim = 5, .value_dim = 7, .dtype = tensor::DType::kBF16},
        KvLayout{.layers = 3, .heads = 2, .key_dim = 5, .value_dim = 7, .summary_bytes = 84}}) {
    EXPECT_EQ(Format("model", other).DecodeHeader(header, 42).status().code(),
              StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(format.DecodeHeader(std::span(header).first(63), 42).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(format.DecodeHeader({}, 42).status().code(), StatusCode::kDataLoss);
}

// Version 1 stored the summaries in the slots.
TEST(KvSegment, OtherVersionsAreRefused) {
  const SegmentFormat format = Format();
  std::vector<std::byte> header = format.EncodeHeader(42, 9);
  for (const int version : {1, 3}) {
    header[8] = static_cast<std::byte>(version);
    EXPECT_EQ(format.DecodeHeader(header, 42).status().code(), StatusCode::kFailedPrecondition);
  }
}

TEST(KvSegment, InvalidSlotCountsAndIdsAreRefused) {
  const SegmentFormat format = Format();
  const auto most = static_cast<int>(SegmentFormat::kMaxBytes / format.slot_bytes());
  EXPECT_TRUE(format.DecodeHeader(format.EncodeHeader(1, most - most / 10), 1).ok());
  for (const int slots : {0, most, 1 << 20, -1}) {
    EXPECT_EQ(format.DecodeHeader(format.EncodeHeader(1, slots), 1).status().code(), StatusCode::kDataLoss);
  }
  // A slot may exceed the maximum size of a segment.
  const SegmentFormat large =
      Format("model", {.layers = 1000, .heads = 128, .key_dim = 128, .value_dim = 128});
  EXPECT_GT(large.SegmentBytes(1), SegmentFormat::kMaxBytes);
  EXPECT_TRUE(large.DecodeHeader(large.EncodeHeader(1, 1), 1).ok());
  EXPECT_FALSE(large.DecodeHeader(large.EncodeHeader(1, 2), 1).ok());
  for (const uint64_t id : {uint64_t{1} << 63, ~uint64_t{0}}) {
    SlotRecord record = Record();
    record.id = id;
    EXPECT_FALSE(format.DecodeRecord(format.EncodeRecord(record, 1, 0), 1, 0));
    EXPECT_FALSE(SegmentNumber(SegmentName(id)));
    EXPECT_TRUE(SegmentNumber(SegmentName(id >> 1)));
  }
}

TEST(KvSegment, AnyFlippedBitOfAHeaderIsRefused) {
  const SegmentFormat format = Format();
  std::vector<std::byte> header = format.EncodeHeader(1, 2);
  for (size_t bit = 0; bit < 64 * 8; ++bit) {
    header[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_FALSE(format.DecodeHeader(header, 1).ok()) << bit;
    header[bit / 8] ^= std::byte{1} << bit % 8;
  }
}

TEST(KvSegment, RecordsAreValidOnlyInTheirSlot) {
  const SegmentFormat format = Format();
  const std::vector<std::byte> bytes = format.EncodeRecord(Record(), 4, 5);
  EXPECT_EQ(static_cast<int64_t>(bytes.size()), format.record_bytes());
  const std::optional<SlotRecord> back = format.DecodeRecord(bytes, 4, 5);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->id, 7U);
  EXPECT_EQ(back->parent, 3U);
  EXPECT_EQ(back->tokens, Record().tokens);
  EXPECT_EQ(back->layer_sums, Record().layer_sums);
  EXPECT_EQ(back->name, "salt");
  EXPECT_FALSE(format.DecodeRecord(bytes, 4, 6));
  EXPECT_FALSE(format.DecodeRecord(bytes, 5, 5));
  EXPECT_FALSE(format.DecodeRecord(std::vector<std::byte>(bytes.size()), 4, 5)) << "the slot is empty";
  EXPECT_FALSE(format.DecodeRecord(std::span(bytes).first(100), 4, 5));
}

TEST(KvSegment, TheLongestNameFits) {
  const SegmentFormat format = Format();
  SlotRecord record = Record();
  record.name.assign(kMaxNameBytes, 'x');
  record.name[3] = '\0';
  EXPECT_EQ(format.DecodeRecord(format.EncodeRecord(record, 1, 0), 1, 0)->name, record.name);
}

TEST(KvSegment, AnyFlippedBitOfARecordIsRefused) {
  const SegmentFormat format = Format();
  std::vector<std::byte> bytes = format.EncodeRecord(Record(), 1, 0);
  const size_t used = 8 * 3 + 8 + 64 * 4 + 3 * 8 + 4;
  for (size_t bit = 0; bit < used * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_FALSE(format.DecodeRecord(bytes, 1, 0)) << bit;
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
  }
}

TEST(KvSegment, EachLayerHasItsChecksum) {
  const SegmentFormat format = Format();
  std::vector<std::byte> block(format.block_bytes());
  for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>(i * i / 7);
  const std::vector<uint64_t> sums = format.LayerSums(block.data(), 3);
  ASSERT_EQ(sums.size(), 3U);
  block[format.layer_bytes() + 5] ^= std::byte{1};
  const std::vector<uint64_t> others = format.LayerSums(block.data(), 3);
  EXPECT_EQ(others[0], sums[0]);
  EXPECT_NE(others[1], sums[1]);
  EXPECT_EQ(others[2], sums[2]);
}

TEST(KvSegment, RecordsContainKeySummaries) {
  KvLayout layout = kSegmentLayout;
  layout.summary_bytes = 84;
  const SegmentFormat format = Format("model", layout);
  EXPECT_EQ(format.slot_bytes(), Format().slot_bytes()) << "summaries are stored only in the records";
  std::vector<std::byte> block(layout.total_bytes());
  for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>(i * i / 7);
  SlotRecord record = Record();
  record.summaries = format.SummariesOf(layout.Flat(block.data()));
  ASSERT_EQ(record.summaries.size(), size_t{3 * 84});
  const std::optional<SlotRecord> back = format.DecodeRecord(format.EncodeRecord(record, 1, 0), 1, 0);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->summaries, record.summaries);
  EXPECT_EQ(back->name, "salt");
  std::vector<std::byte> other(block.size());
  format.PutSummaries(back->summaries, layout.Flat(other.data()));
  EXPECT_EQ(format.SummariesOf(layout.Flat(other.data())), record.summaries);
  for (int layer = 0; layer < 3; ++layer) {
    const int64_t at = layout.block_bytes() + layer * layout.summary_stride();
    EXPECT_TRUE(std::equal(&block[at], &block[at] + 84, &other[at]));
    EXPECT_EQ(other[at - 1], std::byte{0});
  }
}

TEST(KvSegment, ParsesOnlyValidSegmentNames) {
  EXPECT_EQ(SegmentName(0x2a), "kv-000000000000002a.segment");
  EXPECT_EQ(SegmentNumber("kv-000000000000002a.segment"), 0x2aU);
  for (const char* other :
       {"", "lock", "kv-2a.segment", "kv-000000000000002A.segment", "kv-00000000000000-1.segment",
        "kv-000000000000002a.segment.partial", "kv-000000000000002g.segment"}) {
    EXPECT_FALSE(SegmentNumber(other)) << other;
  }
}

}  // namespace
}  // namespace moesaic::cache
