#include "proxy/events/kv_decode.h"

#include <array>

#include "proxy/events/msgpack_reader.h"

namespace moesaic::proxy {
namespace {

// Tokens in one event: a context of 16 M tokens is beyond every engine.
constexpr uint32_t kMaxTokens = 1 << 24;

enum class Field : uint8_t {
  kBlockHashes,
  kParent,
  kTokenIds,
  kBlockSize,
  kLoraId,
  kMedium,
  kLoraName,
  kExtraKeys,
  kGroup,
  kSpecKind,
  kMetadata,
  kCacheSalt,
  kIgnored,
};

struct FieldName {
  std::string_view name;
  Field field;
};
constexpr FieldName kFieldNames[] = {
    {"block_hashes", Field::kBlockHashes}, {"parent_block_hash", Field::kParent},
    {"token_ids", Field::kTokenIds},       {"block_size", Field::kBlockSize},
    {"lora_id", Field::kLoraId},           {"medium", Field::kMedium},
    {"lora_name", Field::kLoraName},       {"extra_keys", Field::kExtraKeys},
    {"group_idx", Field::kGroup},          {"kv_cache_spec_kind", Field::kSpecKind},
    {"metadata", Field::kMetadata},        {"cache_salt", Field::kCacheSalt}};

// Fields of array events in their order. SGLang has a map of metadata in the place of vLLM's LoRA name.
constexpr std::array kStoredFields = {
    Field::kBlockHashes, Field::kParent,   Field::kTokenIds,  Field::kBlockSize, Field::kLoraId,
    Field::kMedium,      Field::kLoraName, Field::kExtraKeys, Field::kGroup,     Field::kSpecKind};
constexpr std::array kRemovedFields = {Field::kBlockHashes, Field::kMedium, Field::kGroup};

KvEvent::Type TypeNamed(std::string_view name) {
  if (name == "BlockStored") return KvEvent::Type::kStored;
  if (name == "BlockRemoved") return KvEvent::Type::kRemoved;
  if (name == "AllBlocksCleared") return KvEvent::Type::kCleared;
  return KvEvent::Type::kOther;
}

// The low 64 bits of a digest, as vLLM cuts it when it publishes integers.
uint64_t FoldedHash(std::string_view digest) {
  uint64_t value = 0;
  for (const char c : digest.substr(digest.size() < 8 ? 0 : digest.size() - 8))
    value = value << 8 | static_cast<uint8_t>(c);
  return value;
}

class EventReader {
 public:
  explicit EventReader(MsgpackReader& reader) : r_(reader) {}

  StatusOr<KvEvent> Read() {
    ASSIGN_OR_RETURN(const MsgpackType type, r_.Peek());
    if (type == MsgpackType::kMap) return ReadMapEvent();
    return ReadArrayEvent();
  }

 private:
  StatusOr<KvEvent> ReadArrayEvent() {
    ASSIGN_OR_RETURN(const uint32_t size, r_.ReadArray());
    KvEvent event;
    if (size == 0) return event;
    ASSIGN_OR_RETURN(const std::string_view name, r_.ReadBytes());
    event.type = TypeNamed(name);
    for (uint32_t i = 0; i + 1 < size; ++i) {
      Field field = Field::kIgnored;
      if (event.type == KvEvent::Type::kStored && i < kStoredFields.size()) field = kStoredFields[i];
      if (event.type == KvEvent::Type::kRemoved && i < kRemovedFields.size()) field = kRemovedFields[i];
      if (event.type == KvEvent::Type::kStored && i >= 6) {
        ASSIGN_OR_RETURN(const MsgpackType next, r_.Peek());
        if (next == MsgpackType::kMap) field = Field::kMetadata;
      }
      RETURN_IF_ERROR(ReadField(field, event));
    }
    return Checked(std::move(event));
  }

  StatusOr<KvEvent> ReadMapEvent() {
    ASSIGN_OR_RETURN(const uint32_t size, r_.ReadMap());
    KvEvent event;
    for (uint32_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const std::string_view name, r_.ReadBytes());
      if (name == "type") {
        ASSIGN_OR_RETURN(const std::string_view type, r_.ReadBytes());
        event.type = TypeNamed(type);
        continue;
      }
      Field field = Field::kIgnored;
      for (const FieldName& known : kFieldNames) {
        if (known.name == name) field = known.field;
      }
      RETURN_IF_ERROR(ReadField(field, event));
    }
    return Checked(std::move(event));
  }

  // The extra keys can be sorted out only when the LoRA name is known.
  StatusOr<KvEvent> Checked(KvEvent event) {
    if (event.type != KvEvent::Type::kStored) return event;
    if (event.parent == uint64_t{0}) event.parent.reset();  // some engines write 0 for a root
    RETURN_IF_ERROR(SortExtraKeys(event));
    return event;
  }

  Status ReadField(Field field, KvEvent& event) {
    ASSIGN_OR_RETURN(const MsgpackType type, r_.Peek());
    if (type == MsgpackType::kNil || field == Field::kIgnored) return r_.Skip();
    switch (field) {
      case Field::kBlockHashes:
        return ReadHashes(event);
      case Field::kTokenIds:
        return ReadTokens(event);
      case Field::kParent: {
        ASSIGN_OR_RETURN(event.parent, ReadHash());
        return OkStatus();
      }
      case Field::kBlockSize: {
        ASSIGN_OR_RETURN(const uint64_t value, r_.ReadInteger());
        if (value == 0 || value > kMaxTokens) return DataLoss("KV event: block_size is {}", value);
        event.block_size = static_cast<uint32_t>(value);
        return OkStatus();
      }
      case Field::kLoraId:
        return ReadOptionalInteger(event.lora_id);
      case Field::kGroup:
        return ReadOptionalInteger(event.group);
      case Field::kMedium:
        return ReadText(event.medium);
      case Field::kLoraName:
        return ReadText(event.lora_name);
      case Field::kSpecKind:
        return ReadText(event.spec_kind);
      case Field::kCacheSalt:
        return ReadText(event.cache_salt);
      case Field::kExtraKeys: {
        ASSIGN_OR_RETURN(extra_keys_, r_.ReadRaw());
        return OkStatus();
      }
      case Field::kMetadata:
        return ReadMetadata(event);
      case Field::kIgnored:
        break;
    }
    return r_.Skip();
  }

  Status ReadText(std::string& text) {
    ASSIGN_OR_RETURN(const MsgpackType type, r_.Peek());
    if (type != MsgpackType::kString && type != MsgpackType::kBinary) return r_.Skip();
    ASSIGN_OR_RETURN(text, r_.ReadBytes());
    return OkStatus();
  }

  Status ReadOptionalInteger(std::optional<int64_t>& value) {
    ASSIGN_OR_RETURN(const MsgpackType type, r_.Peek());
    if (type != MsgpackType::kInteger) return r_.Skip();
    ASSIGN_OR_RETURN(value, r_.ReadInteger());
    return OkStatus();
  }

  StatusOr<uint64_t> ReadHash() {
    ASSIGN_OR_RETURN(const MsgpackType type, r_.Peek());
    if (type == MsgpackType::kInteger) return r_.ReadInteger();
    ASSIGN_OR_RETURN(const std::string_view digest, r_.ReadBytes());
    return FoldedHash(digest);
  }

  Status ReadHashes(KvEvent& event) {
    ASSIGN_OR_RETURN(const uint32_t count, r_.ReadArray());
    event.block_hashes.clear();
    event.block_hashes.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
      ASSIGN_OR_RETURN(const uint64_t hash, ReadHash());
      event.block_hashes.push_back(hash);
    }
    return OkStatus();
  }

  Status ReadTokens(KvEvent& event) {
    ASSIGN_OR_RETURN(const uint32_t count, r_.ReadArray());
    if (count > kMaxTokens) return DataLoss("KV event: {} token ids", count);
    event.tokens.clear();
    event.tokens.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
      ASSIGN_OR_RETURN(const uint64_t token, r_.ReadInteger());
      event.tokens.push_back(static_cast<int32_t>(token));
    }
    return OkStatus();
  }

  Status ReadMetadata(KvEvent& event) {
    ASSIGN_OR_RETURN(const MsgpackType type, r_.Peek());
    if (type != MsgpackType::kMap) return r_.Skip();
    ASSIGN_OR_RETURN(const uint32_t size, r_.ReadMap());
    for (uint32_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const std::string_view name, r_.ReadBytes());
      if (name == "cache_salt") {
        RETURN_IF_ERROR(ReadText(event.cache_salt));
      } else {
        RETURN_IF_ERROR(r_.Skip());
      }
    }
    return OkStatus();
  }

  // Per block nil or an array of: the LoRA name, the cache salt (first block of a sequence), and [hash,
  // offset] of images. Names and salts are strings; everything else is kept encoded.
  Status SortExtraKeys(KvEvent& event) {
    if (extra_keys_.empty()) return OkStatus();
    MsgpackReader keys(extra_keys_);
    ASSIGN_OR_RETURN(const MsgpackType outer, keys.Peek());
    if (outer != MsgpackType::kArray) return OkStatus();
    ASSIGN_OR_RETURN(const uint32_t blocks, keys.ReadArray());
    std::vector<ExtraKeys> per_block(blocks);
    bool any = false;
    for (uint32_t i = 0; i < blocks; ++i) {
      ASSIGN_OR_RETURN(const MsgpackType type, keys.Peek());
      if (type != MsgpackType::kArray) {
        RETURN_IF_ERROR(keys.Skip());
        continue;
      }
      ASSIGN_OR_RETURN(const uint32_t size, keys.ReadArray());
      for (uint32_t k = 0; k < size; ++k) {
        ASSIGN_OR_RETURN(const MsgpackType element, keys.Peek());
        if (element == MsgpackType::kString) {
          ASSIGN_OR_RETURN(const std::string_view text, keys.ReadBytes());
          if (text != event.lora_name && i == 0 && !event.parent) event.cache_salt = text;
          continue;
        }
        ASSIGN_OR_RETURN(const std::string_view raw, keys.ReadRaw());
        if (element == MsgpackType::kNil) continue;
        per_block[i].append(raw);
        any = true;
      }
    }
    if (any) event.extra_keys = std::move(per_block);
    return OkStatus();
  }

  MsgpackReader& r_;
  std::string_view extra_keys_;
};

}  // namespace

StatusOr<KvBatch> DecodeKvBatch(std::string_view payload) {
  MsgpackReader reader(payload);
  ASSIGN_OR_RETURN(const uint32_t size, reader.ReadArray());
  if (size < 2)
    return DataLoss("KV event batch: an array of {} elements instead of time, events, rank", size);
  KvBatch batch;
  ASSIGN_OR_RETURN(batch.time, reader.ReadNumber());
  ASSIGN_OR_RETURN(const uint32_t events, reader.ReadArray());
  for (uint32_t i = 0; i < events; ++i) {
    ASSIGN_OR_RETURN(KvEvent event, EventReader(reader).Read());
    batch.events.push_back(std::move(event));
  }
  for (uint32_t i = 2; i < size; ++i) {
    ASSIGN_OR_RETURN(const MsgpackType type, reader.Peek());
    if (i == 2 && type == MsgpackType::kInteger) {
      ASSIGN_OR_RETURN(batch.dp_rank, reader.ReadInteger());
    } else {
      RETURN_IF_ERROR(reader.Skip());
    }
  }
  if (!reader.at_end())
    return DataLoss("KV event batch: {} bytes follow its end", payload.size() - reader.position());
  return batch;
}

StatusOr<uint64_t> DecodeSequence(std::string_view frame) {
  if (frame.size() != 8)
    return DataLoss("the sequence frame of a KV event message has 8 bytes, not {}", frame.size());
  return FoldedHash(frame);
}

}  // namespace moesaic::proxy
