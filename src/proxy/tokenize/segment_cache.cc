#include "proxy/tokenize/segment_cache.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <utility>

namespace moesaic::proxy {
namespace {

constexpr size_t kEntryOverhead = 232;  // list node, map node, control block and their heap headers

bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool IsBlankByte(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\v' || c == '\f'; }

// Returns whether the ids of `left` and `right` joined are the ids of both texts together.
StatusOr<bool> CutsWell(const text::Tokenizer& tokenizer, const std::string& left, const std::string& right) {
  ASSIGN_OR_RETURN(std::vector<int32_t> joined, tokenizer.Encode(left, /*add_special=*/false));
  ASSIGN_OR_RETURN(const std::vector<int32_t> tail, tokenizer.Encode(right, /*add_special=*/false));
  ASSIGN_OR_RETURN(const std::vector<int32_t> whole, tokenizer.Encode(left + right, /*add_special=*/false));
  joined.insert(joined.end(), tail.begin(), tail.end());
  return joined == whole;
}

constexpr std::array<const char*, 14> kEnds = {"word",
                                               "word.",
                                               "word ",
                                               "word\n",
                                               "word\n\n",
                                               "3.14",
                                               "...",
                                               "}",
                                               "Stra\xC3\x9F"
                                               "e",
                                               "\xE4\xB8\xAD\xE6\x96\x87",
                                               "\xF0\x9F\x98\x80",
                                               "word\xC2\xA0",      // no-break space
                                               "word\xE3\x80\x80",  // ideographic space
                                               "a\t"};
constexpr std::array<const char*, 9> kBegins = {"word", "I'm here", "s",  "x = 1",        "Word word",
                                                "re",   "ing",      "A1", "e\xCC\x81tude"};

// Whether a merge may join bytes on both sides of a cut between a line break and a letter.
bool HasTokenAcrossLines(const text::Tokenizer& tokenizer) {
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string bytes = tokenizer.TokenBytes(id);
    for (size_t at = bytes.find('\n'); at != std::string::npos; at = bytes.find('\n', at + 1)) {
      if (at + 1 < bytes.size() && IsLetter(bytes[at + 1])) return true;
    }
  }
  return false;
}

}  // namespace

StatusOr<TextCutter> TextCutter::Create(const text::Tokenizer& tokenizer, bool byte_level) {
  TextCutter cutter;
  cutter.lines_ = byte_level && !HasTokenAcrossLines(tokenizer);
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (!tokenizer.IsSpecial(id)) continue;
    std::string token = tokenizer.IdToToken(id);
    if (cutter.lines_ && !token.empty() && IsLetter(token[0])) {  // it may absorb the line break on its left
      ASSIGN_OR_RETURN(cutter.lines_, CutsWell(tokenizer, "word\n", token));
    }
    if (token.size() < 3) continue;  // it could be part of ordinary text
    bool good = true;
    for (const char* end : kEnds) {
      ASSIGN_OR_RETURN(const bool cuts, CutsWell(tokenizer, end, token + "word"));
      if (!(good = cuts)) break;
    }
    if (good) cutter.special_.push_back(std::move(token));
    if (cutter.special_.size() == 512) break;  // reserved tokens that no template uses
  }
  std::sort(cutter.special_.begin(), cutter.special_.end(),
            [](const auto& a, const auto& b) { return a.size() > b.size(); });
  for (const std::string& token : cutter.special_)
    cutter.first_byte_[static_cast<unsigned char>(token[0])] = true;
  for (const char* end : kEnds) {
    const std::string left = std::string(end) + "\n";
    if (!cutter.lines_ || IsBlankByte(left[left.size() - 2])) continue;
    for (const char* begin : kBegins) {
      ASSIGN_OR_RETURN(cutter.lines_, CutsWell(tokenizer, left, begin));
      if (!cutter.lines_) break;
    }
  }
  return cutter;
}

bool TextCutter::SpecialAt(std::string_view rest, size_t at) const {
  if (!first_byte_[static_cast<unsigned char>(rest[at])]) return false;
  const std::string_view tail = rest.substr(at);
  return std::any_of(special_.begin(), special_.end(),
                     [tail](const auto& token) { return tail.starts_with(token); });
}

size_t TextCutter::NextSegment(std::string_view rest, size_t min_bytes) const {
  for (size_t at = min_bytes; at < rest.size(); ++at) {
    const char c = rest[at];
    if (SpecialAt(rest, at)) return at;
    if (lines_ && rest[at - 1] == '\n' && IsLetter(c) && !IsBlankByte(rest[at - 2])) return at;
  }
  return rest.size();
}

SegmentCache::SegmentCache(text::Tokenizer tokenizer, TextCutter cutter, size_t max_bytes)
    : tokenizer_(std::move(tokenizer)), cutter_(std::move(cutter)), max_bytes_(max_bytes), seed_([] {
        std::random_device random;
        return static_cast<uint64_t>(random()) << 32 | random();
      }()) {}

uint64_t SegmentCache::HashOf(std::string_view text, bool special) const {
  return XXH3_64bits_withSeed(text.data(), text.size(), seed_ + (special ? 1 : 0));
}

SegmentCache::Ids SegmentCache::Find(uint64_t hash, std::string_view text, bool special) {
  const std::lock_guard lock(mutex_);
  const auto [begin, end] = by_hash_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Ids& entry = it->second->entry;
    if (entry->text != text || entry->special != special) continue;
    recent_.splice(recent_.begin(), recent_, it->second);
    ++stats_.hits;
    stats_.hit_bytes += text.size();
    return entry;
  }
  ++stats_.misses;
  stats_.miss_bytes += text.size();
  return nullptr;
}

void SegmentCache::Insert(uint64_t hash, Ids entry) {
  const auto size_of = [](const Entry& e) {
    return e.text.size() + e.ids.size() * sizeof(int32_t) + kEntryOverhead;
  };
  const size_t bytes = size_of(*entry);
  if (bytes > max_bytes_ / 4) return;
  const std::lock_guard lock(mutex_);
  while (stats_.bytes + bytes > max_bytes_) {
    const auto last = std::prev(recent_.end());
    const auto [begin, end] = by_hash_.equal_range(last->hash);
    by_hash_.erase(std::find_if(begin, end, [last](const auto& item) { return item.second == last; }));
    stats_.bytes -= size_of(*last->entry);
    recent_.erase(last);
  }
  recent_.push_front({std::move(entry), hash});
  by_hash_.emplace(hash, recent_.begin());
  stats_.bytes += bytes;
}

Status SegmentCache::AppendShort(std::string_view text, bool special, std::vector<int32_t>* ids) {
  do {
    const std::string_view part = text.substr(0, cutter_.NextSegment(text, kShortSegment));
    const uint64_t hash = HashOf(part, special);
    Ids entry = Find(hash, part, special);
    if (entry == nullptr) {
      ASSIGN_OR_RETURN(std::vector<int32_t> part_ids, tokenizer_.Encode(part, special));
      entry = std::make_shared<const Entry>(Entry{std::string(part), std::move(part_ids), special});
      Insert(hash, entry);
    }
    ids->insert(ids->end(), entry->ids.begin(), entry->ids.end());
    text.remove_prefix(part.size());
    special = false;
  } while (!text.empty());
  return OkStatus();
}

StatusOr<std::vector<int32_t>> SegmentCache::Encode(std::string_view text, bool add_special) {
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 8);
  // Tokens after a text, such as EOS, belong to its last segment. A template of one segment is the general
  // case.
  const size_t first = cutter_.NextSegment(text, kShortSegment);
  if (add_special && first < text.size()) {
    ASSIGN_OR_RETURN(const std::vector<int32_t> around, tokenizer_.Encode("", true));
    ASSIGN_OR_RETURN(const std::vector<int32_t> before, tokenizer_.Encode(text.substr(0, first), true));
    ASSIGN_OR_RETURN(const std::vector<int32_t> plain, tokenizer_.Encode(text.substr(0, first), false));
    // Only tokens before the text: their ids are a prefix of the first segment's.
    const bool leads =
        before.size() == plain.size() + around.size() &&
        std::equal(around.begin(), around.end(), before.begin()) &&
        std::equal(plain.begin(), plain.end(), before.begin() + static_cast<ptrdiff_t>(around.size()));
    if (!leads) return tokenizer_.Encode(text, true);
  }
  bool special = add_special;
  do {
    const std::string_view part = text.substr(0, cutter_.NextSegment(text, kLongSegment));
    text.remove_prefix(part.size());
    if (text.empty()) {  // a longer prompt will continue it, so that it is no segment yet
      RETURN_IF_ERROR(AppendShort(part, special, &ids));
      return ids;
    }
    const uint64_t hash = HashOf(part, special);
    if (const Ids entry = Find(hash, part, special)) {
      ids.insert(ids.end(), entry->ids.begin(), entry->ids.end());
    } else {
      const size_t before = ids.size();
      RETURN_IF_ERROR(AppendShort(part, special, &ids));
      Insert(hash,
             std::make_shared<const Entry>(Entry{
                 std::string(part), {ids.begin() + static_cast<ptrdiff_t>(before), ids.end()}, special}));
    }
    special = false;
  } while (true);
}

SegmentCacheStats SegmentCache::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace moesaic::proxy
