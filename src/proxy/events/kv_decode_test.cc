#include "proxy/events/kv_decode.h"

#include <gtest/gtest.h>

#include <random>

#include "proxy/events/kv_encode.h"
#include "proxy/events/msgpack_reader.h"
#include "text/test_data.h"

namespace moesaic::proxy {
namespace {

using Row = nlohmann::ordered_json;

std::string FromBase64(const std::string& text) {
  static const std::string kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = bits << 6 | static_cast<uint32_t>(kAlphabet.find(c));
    if ((count += 6) >= 8) bytes.push_back(static_cast<char>(bits >> (count -= 8)));
  }
  return bytes;
}

// The fixtures write integers as decimal strings and digests as hex.
uint64_t ExpectedHash(const Row& hash) {
  if (hash.contains("int")) {
    const auto text = hash["int"].get<std::string>();
    return text[0] == '-' ? static_cast<uint64_t>(std::stoll(text)) : std::stoull(text);
  }
  const auto hex = hash["bytes"].get<std::string>();
  return std::stoull(hex.substr(hex.size() - 16), nullptr, 16);
}

void ExpectEvent(const KvEvent& event, const Row& expect) {
  const auto type = expect["type"].get<std::string>();
  const KvEvent::Type wanted = type == "BlockStored"    ? KvEvent::Type::kStored
                               : type == "BlockRemoved" ? KvEvent::Type::kRemoved
                                                        : KvEvent::Type::kCleared;
  ASSERT_EQ(event.type, wanted) << type;
  if (expect.contains("block_hashes")) {
    ASSERT_EQ(event.block_hashes.size(), expect["block_hashes"].size());
    for (size_t i = 0; i < event.block_hashes.size(); ++i)
      EXPECT_EQ(event.block_hashes[i], ExpectedHash(expect["block_hashes"][i]));
  }
  EXPECT_EQ(event.parent.has_value(), expect.contains("parent_block_hash"));
  if (event.parent) {
    EXPECT_EQ(*event.parent, ExpectedHash(expect["parent_block_hash"]));
  }
  if (expect.contains("token_ids")) {
    EXPECT_EQ(event.tokens, expect["token_ids"].get<std::vector<int32_t>>());
  }
  if (expect.contains("block_size")) {
    EXPECT_EQ(event.block_size, expect["block_size"].get<uint32_t>());
  }
  EXPECT_EQ(event.lora_id,
            expect.contains("lora_id") ? std::optional(expect["lora_id"].get<int64_t>()) : std::nullopt);
  EXPECT_EQ(event.group,
            expect.contains("group_idx") ? std::optional(expect["group_idx"].get<int64_t>()) : std::nullopt);
  EXPECT_EQ(event.medium, expect.value("medium", ""));
  EXPECT_EQ(event.lora_name, expect.value("lora_name", ""));
  EXPECT_EQ(event.spec_kind, expect.value("kv_cache_spec_kind", ""));
  if (expect.contains("metadata")) {
    EXPECT_EQ(event.cache_salt, expect["metadata"]["cache_salt"].get<std::string>());
  }
  if (expect.contains("cache_salt")) {
    EXPECT_EQ(event.cache_salt, expect["cache_salt"].get<std::string>());
  }
}

TEST(KvDecode, ReadsEveryFixtureOfElevenEngineVersions) {
  const auto path = text::SharedData() / "kv_events" / "kv_events_fixtures.jsonl.gz";
  SKIP_WITHOUT(path);
  int count = 0;
  for (const Row& row : text::ReadRows(path)) {
    SCOPED_TRACE(row["engine"].get<std::string>() + " " + row["version"].get<std::string>() + " " +
                 row["name"].get<std::string>());
    const Row& expect = row["expect"];
    const auto sequence = DecodeSequence(FromBase64(row["frames"][1]));
    ASSERT_TRUE(sequence.ok());
    EXPECT_EQ(*sequence, expect["seq"].get<uint64_t>());
    const auto batch = DecodeKvBatch(FromBase64(row["frames"][2]));
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_DOUBLE_EQ(batch->time, expect["ts"].get<double>());
    EXPECT_EQ(batch->dp_rank,
              expect["rank"].is_null() ? std::nullopt : std::optional(expect["rank"].get<int64_t>()));
    ASSERT_EQ(batch->events.size(), expect["events"].size());
    for (size_t i = 0; i < batch->events.size(); ++i) ExpectEvent(batch->events[i], expect["events"][i]);
    ++count;
  }
  EXPECT_EQ(count, 193);
}

KvBatch Sample() {
  KvEvent stored;
  stored.type = KvEvent::Type::kStored;
  stored.block_hashes = {1, 0xfedcba9876543210};
  stored.tokens = {1, 2, 300, 70'000, 5, 6, 7, 2'000'000'000};
  stored.block_size = 4;
  stored.medium = "GPU";
  stored.cache_salt = "tenant";
  KvEvent child = stored;
  child.parent = stored.block_hashes.back();
  child.cache_salt.clear();
  child.group = 2;
  // Hash and offset of two images in the first block: ["a", 1] and ["b", 2].
  child.extra_keys = {
      "\x92\xa1"
      "a\x01\x92\xa1"
      "b\x02",
      ""};
  child.spec_kind = "full_attention";
  KvEvent unsized = stored;  // an engine may leave the size out
  unsized.block_size = 0;
  KvEvent removed;
  removed.type = KvEvent::Type::kRemoved;
  removed.block_hashes = {1};
  removed.medium = "CPU";
  KvEvent cleared;
  cleared.type = KvEvent::Type::kCleared;
  return {.time = 12.5, .events = {stored, child, unsized, removed, cleared}, .dp_rank = 3};
}

TEST(KvDecode, ReadsBackBothEncodings) {
  const KvBatch batch = Sample();
  for (const KvEncoding encoding : {KvEncoding::kArray, KvEncoding::kMap}) {
    const auto decoded = DecodeKvBatch(EncodeKvBatch(batch, encoding));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    ASSERT_EQ(decoded->events.size(), batch.events.size());
    EXPECT_EQ(decoded->dp_rank, 3);
    for (size_t i = 0; i < batch.events.size(); ++i) {
      const KvEvent &a = decoded->events[i], &b = batch.events[i];
      EXPECT_EQ(a.type, b.type);
      EXPECT_EQ(a.block_hashes, b.block_hashes);
      EXPECT_EQ(a.parent, b.parent);
      EXPECT_EQ(a.tokens, b.tokens);
      EXPECT_EQ(a.block_size, b.block_size);
      EXPECT_EQ(a.medium, b.medium);
      EXPECT_EQ(a.cache_salt, b.cache_salt);
      EXPECT_EQ(a.extra_keys, b.extra_keys);
      EXPECT_EQ(a.group, b.group);
      EXPECT_EQ(a.spec_kind, b.spec_kind);
    }
  }
}

TEST(KvDecode, EveryCutIsAnErrorThatNamesTheByte) {
  for (const KvEncoding encoding : {KvEncoding::kArray, KvEncoding::kMap}) {
    const std::string bytes = EncodeKvBatch(Sample(), encoding);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const auto cut = DecodeKvBatch(std::string_view(bytes).substr(0, size));
      ASSERT_FALSE(cut.ok()) << size;
      EXPECT_EQ(cut.status().code(), StatusCode::kDataLoss);
    }
    EXPECT_FALSE(DecodeKvBatch(bytes + "x").ok());
  }
}

TEST(KvDecode, MutatedMessagesEndWithoutACrash) {
  std::mt19937 random(1);
  const std::string bytes = EncodeKvBatch(Sample(), KvEncoding::kMap);
  for (int i = 0; i < 20'000; ++i) {
    std::string mutated = bytes;
    for (int k = 0; k < 3; ++k) mutated[random() % mutated.size()] = static_cast<char>(random());
    const auto decoded = DecodeKvBatch(mutated);
    if (decoded.ok()) {
      EXPECT_LE(decoded->events.size(), mutated.size());
    }
  }
}

TEST(KvDecode, RefusesDeepNesting) {
  // [0, [[BlockStored with an unknown field of nested arrays]]]
  const std::string bytes = std::string(
                                "\x92\x00\x91\x82\xa4type\xab"
                                "BlockStored\xa1x",
                                23) +
                            std::string(100, '\x91') + "\xc0";
  const auto decoded = DecodeKvBatch(bytes);
  ASSERT_FALSE(decoded.ok());
  EXPECT_NE(Message(decoded.status()).find("nested"), std::string::npos) << decoded.status();
}

TEST(KvDecode, SequenceFrameHasEightBytes) {
  EXPECT_EQ(*DecodeSequence(EncodeSequence(0x0102030405060708)), 0x0102030405060708U);
  EXPECT_FALSE(DecodeSequence("1234567").ok());
}

TEST(MsgpackReader, ReadsNumbersOfAllWidths) {
  const std::string bytes("\x7f\xff\xcc\x80\xcd\x01\x00\xd0\x80\xd1\xff\x00\xca\x3f\x80\x00\x00", 17);
  MsgpackReader reader(bytes);
  EXPECT_EQ(*reader.ReadInteger(), 127U);
  EXPECT_EQ(static_cast<int64_t>(*reader.ReadInteger()), -1);
  EXPECT_EQ(*reader.ReadInteger(), 128U);
  EXPECT_EQ(*reader.ReadInteger(), 256U);
  EXPECT_EQ(static_cast<int64_t>(*reader.ReadInteger()), -128);
  EXPECT_EQ(static_cast<int64_t>(*reader.ReadInteger()), -256);
  EXPECT_EQ(*reader.ReadNumber(), 1.0);
  EXPECT_TRUE(reader.at_end());
}

}  // namespace
}  // namespace moesaic::proxy
