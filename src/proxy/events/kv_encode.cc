#include "proxy/events/kv_encode.h"

#include <bit>
#include <string_view>

#include "proxy/events/msgpack_reader.h"

namespace moesaic::proxy {
namespace {

class Writer {
 public:
  void Nil() { Byte(0xc0); }
  void Unsigned(uint64_t value) {
    if (value <= 0x7f) {
      Byte(value);
    } else if (value <= 0xff) {
      Byte(0xcc), Big(value, 1);
    } else if (value <= 0xffff) {
      Byte(0xcd), Big(value, 2);
    } else if (value <= 0xffffffff) {
      Byte(0xce), Big(value, 4);
    } else {
      Byte(0xcf), Big(value, 8);
    }
  }
  void Signed(int64_t value) {
    if (value >= 0) return Unsigned(static_cast<uint64_t>(value));
    if (value >= -32) return Byte(static_cast<uint64_t>(value));
    Byte(0xd3), Big(static_cast<uint64_t>(value), 8);
  }
  void Double(double value) { Byte(0xcb), Big(std::bit_cast<uint64_t>(value), 8); }
  void Text(std::string_view text) {
    if (text.size() < 32) {
      Byte(0xa0 | text.size());
    } else if (text.size() <= 0xff) {
      Byte(0xd9), Big(text.size(), 1);
    } else if (text.size() <= 0xffff) {
      Byte(0xda), Big(text.size(), 2);
    } else {
      Byte(0xdb), Big(text.size(), 4);
    }
    out.append(text);
  }
  void Array(size_t size) { Container(size, 0x90, 0xdc); }
  void Map(size_t size) { Container(size, 0x80, 0xde); }

  std::string out;

 private:
  void Byte(uint64_t byte) { out.push_back(static_cast<char>(byte)); }
  void Big(uint64_t value, int bytes) {
    for (int i = bytes - 1; i >= 0; --i) Byte(value >> (8 * i) & 0xff);
  }
  void Container(size_t size, uint8_t fix, uint8_t sized) {
    if (size < 16) {
      Byte(fix | size);
    } else if (size <= 0xffff) {
      Byte(sized), Big(size, 2);
    } else {
      Byte(sized + 1), Big(size, 4);
    }
  }
};

// Writes the fields of an event by name or by position.
class EventWriter {
 public:
  EventWriter(Writer& writer, KvEncoding encoding, std::string_view type, size_t fields)
      : w_(writer), map_(encoding == KvEncoding::kMap) {
    if (map_) {
      w_.Map(fields + 1);
      w_.Text("type");
    } else {
      w_.Array(fields + 1);
    }
    w_.Text(type);
  }
  Writer& Field(std::string_view name) {
    if (map_) w_.Text(name);
    return w_;
  }
  void Text(std::string_view name, std::string_view text) {
    Field(name);
    text.empty() ? w_.Nil() : w_.Text(text);
  }
  void Integer(std::string_view name, std::optional<int64_t> value) {
    Field(name);
    value ? w_.Signed(*value) : w_.Nil();
  }
  void Hashes(const std::vector<uint64_t>& hashes) {
    Field("block_hashes").Array(hashes.size());
    for (const uint64_t hash : hashes) w_.Unsigned(hash);
  }

 private:
  Writer& w_;
  bool map_;
};

// Number of MessagePack values in `encoded`.
size_t CountValues(std::string_view encoded) {
  MsgpackReader reader(encoded);
  size_t count = 0;
  while (!reader.at_end() && reader.Skip().ok()) ++count;
  return count;
}

void WriteExtraKeys(Writer& w, const KvEvent& event) {
  if (event.cache_salt.empty() && event.extra_keys.empty()) return w.Nil();
  w.Array(event.block_hashes.size());
  for (size_t i = 0; i < event.block_hashes.size(); ++i) {
    const bool salted = i == 0 && !event.parent && !event.cache_salt.empty();
    const size_t extra = i < event.extra_keys.size() ? CountValues(event.extra_keys[i]) : 0;
    if (!salted && extra == 0) {
      w.Nil();
      continue;
    }
    w.Array(size_t{salted} + extra);
    if (extra > 0) w.out.append(event.extra_keys[i]);  // already encoded
    if (salted) w.Text(event.cache_salt);
  }
}

void WriteEvent(Writer& w, const KvEvent& event, KvEncoding encoding) {
  switch (event.type) {
    case KvEvent::Type::kStored: {
      EventWriter out(w, encoding, "BlockStored", 10);
      out.Hashes(event.block_hashes);
      out.Field("parent_block_hash");
      event.parent ? w.Unsigned(*event.parent) : w.Nil();
      out.Field("token_ids").Array(event.tokens.size());
      for (const int32_t token : event.tokens) w.Signed(token);
      out.Field("block_size");  // decoders refuse a size of 0
      event.block_size > 0 ? w.Unsigned(event.block_size) : w.Nil();
      out.Integer("lora_id", event.lora_id);
      out.Text("medium", event.medium);
      out.Text("lora_name", event.lora_name);
      out.Field("extra_keys");
      WriteExtraKeys(w, event);
      out.Integer("group_idx", event.group);
      out.Text("kv_cache_spec_kind", event.spec_kind);
      return;
    }
    case KvEvent::Type::kRemoved: {
      EventWriter out(w, encoding, "BlockRemoved", 3);
      out.Hashes(event.block_hashes);
      out.Text("medium", event.medium);
      out.Integer("group_idx", event.group);
      return;
    }
    case KvEvent::Type::kCleared:
    case KvEvent::Type::kOther:
      EventWriter(w, encoding, "AllBlocksCleared", 0);
      return;
  }
}

}  // namespace

std::string EncodeKvBatch(const KvBatch& batch, KvEncoding encoding) {
  Writer writer;
  writer.Array(3);
  writer.Double(batch.time);
  writer.Array(batch.events.size());
  for (const KvEvent& event : batch.events) WriteEvent(writer, event, encoding);
  batch.dp_rank ? writer.Signed(*batch.dp_rank) : writer.Nil();
  return std::move(writer.out);
}

std::string EncodeSequence(uint64_t sequence) {
  std::string bytes(8, '\0');
  for (int i = 7; i >= 0; --i, sequence >>= 8) bytes[i] = static_cast<char>(sequence & 0xff);
  return bytes;
}

}  // namespace moesaic::proxy
