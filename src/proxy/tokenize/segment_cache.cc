#include "proxy/tokenize/segment_cache.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <random>
#include <utility>

#include "proxy/protocol/json_members.h"

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

// Returns the number of backslashes that end with the one at `at`.
size_t RunOfBackslashes(std::string_view text, size_t at) {
  size_t run = 1;
  while (run <= at && text[at - run] == '\\') ++run;
  return run;
}

// Returns whether an escape begins at `at`, which an even number of backslashes then precedes.
bool BeginsEscape(std::string_view text, size_t at) {
  return text[at] == '\\' && RunOfBackslashes(text, at) % 2 == 1;
}

// Returns whether the byte at `at` of an escaped text belongs to an escape that begins before it.
bool InsideEscape(std::string_view text, size_t at) {
  constexpr size_t kShort = 2, kLong = 6;  // \n and \u0000
  for (size_t back = 1; back < kLong && back <= at; ++back) {
    const size_t begin = at - back;
    if (text[begin] != '\\') continue;
    if (RunOfBackslashes(text, begin) % 2 == 0) return false;  // the second one of an escaped backslash
    return back < (text[begin + 1] == 'u' ? kLong : kShort);
  }
  return false;
}

// Returns whether a single line break ends before `at`. A text whose character before the line break is
// written as \u0000 counts as more.
bool FollowsSingleBreak(std::string_view text, size_t at) {
  constexpr size_t kBreak = 2, kShort = 2, kLong = 6;
  if (at <= kBreak || text[at - 1] != 'n' || !BeginsEscape(text, at - kBreak)) return false;
  const size_t end = at - kBreak;  // of the character before
  if (end >= kShort && BeginsEscape(text, end - kShort)) {
    return std::string_view("nrtf").find(text[end - 1]) == std::string_view::npos;
  }
  if (end >= kLong && text[end - kLong + 1] == 'u' && BeginsEscape(text, end - kLong)) return false;
  return !IsBlankByte(text[end - 1]);
}

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

bool IsLetterOrDigit(char c) { return IsLetter(c) || (c >= '0' && c <= '9'); }

// Returns whether a token, of merges or special, has bytes on both sides of a cut between two words.
bool HasTokenAcrossWords(const text::Tokenizer& tokenizer) {
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string bytes = tokenizer.TokenBytes(id);
    for (size_t at = bytes.find(' ', 1); at != std::string::npos; at = bytes.find(' ', at + 1)) {
      if (IsLetterOrDigit(bytes[at - 1])) return true;
    }
  }
  return false;
}

// Returns whether a cut between `left` and `right` is good for all pairs of texts.
StatusOr<bool> CutsAllWords(const text::Tokenizer& tokenizer) {
  for (const char* left : {"word", "A", "s", "7", "2024", "I'm",
                           "\xC3\x9F"
                           "e",
                           "x1", ".word", " 12"}) {
    for (const char* right : {" word", " A", " s", " 7", " 2024", " I'm", " re", " x = 1", " ing", " 3.14"}) {
      ASSIGN_OR_RETURN(const bool cuts, CutsWell(tokenizer, left, right));
      if (!cuts) return false;
    }
  }
  return true;
}

}  // namespace

StatusOr<TextCutter> TextCutter::Create(const text::Tokenizer& tokenizer, bool byte_level) {
  TextCutter cutter;
  cutter.lines_ = byte_level && !HasTokenAcrossLines(tokenizer);
  cutter.words_ = byte_level && !HasTokenAcrossWords(tokenizer);
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (!tokenizer.IsSpecial(id)) continue;
    std::string token = tokenizer.IdToToken(id);
    if (cutter.lines_ && !token.empty() && IsLetter(token[0])) {  // it may absorb the line break on its left
      ASSIGN_OR_RETURN(cutter.lines_, CutsWell(tokenizer, "word\n", token));
    }
    if (cutter.words_ && !token.empty() &&
        IsLetterOrDigit(token.back())) {  // it may absorb the space after it
      ASSIGN_OR_RETURN(cutter.words_, CutsWell(tokenizer, token, " word"));
    }
    if (token.size() < 3) continue;               // it could be part of ordinary text
    if (cutter.special_.size() == 512) continue;  // reserved tokens that no template uses
    bool good = true;
    for (const char* end : kEnds) {
      ASSIGN_OR_RETURN(const bool cuts, CutsWell(tokenizer, end, token + "word"));
      if (!(good = cuts)) break;
    }
    if (good) cutter.special_.push_back(std::move(token));
  }
  for (std::string& token : cutter.special_) {
    std::string escaped;
    AppendJsonEscaped(token, &escaped);
    cutter.first_byte_[static_cast<unsigned char>(escaped[0])] = true;
    cutter.lookahead_ = std::max(cutter.lookahead_, escaped.size());
    token = std::move(escaped);
  }
  std::sort(cutter.special_.begin(), cutter.special_.end(),
            [](const auto& a, const auto& b) { return a.size() > b.size(); });
  for (const char* end : kEnds) {
    const std::string left = std::string(end) + "\n";
    if (!cutter.lines_ || IsBlankByte(left[left.size() - 2])) continue;
    for (const char* begin : kBegins) {
      ASSIGN_OR_RETURN(cutter.lines_, CutsWell(tokenizer, left, begin));
      if (!cutter.lines_) break;
    }
  }
  if (cutter.words_) {
    ASSIGN_OR_RETURN(cutter.words_, CutsAllWords(tokenizer));
  }
  return cutter;
}

bool TextCutter::SpecialAt(std::string_view rest, size_t at) const {
  if (!first_byte_[static_cast<unsigned char>(rest[at])]) return false;
  const std::string_view tail = rest.substr(at);
  return std::any_of(special_.begin(), special_.end(),
                     [tail](const auto& token) { return tail.starts_with(token); }) &&
         !InsideEscape(rest, at);
}

size_t TextCutter::NextSegment(std::string_view rest, size_t min_bytes) const {
  for (size_t at = min_bytes; at < rest.size(); ++at) {
    if (SpecialAt(rest, at)) return at;
    if (lines_ && IsLetter(rest[at]) && FollowsSingleBreak(rest, at)) return at;
  }
  return rest.size();
}

size_t TextCutter::NextWord(std::string_view rest) const {
  for (size_t at = 1; at < rest.size(); ++at) {
    if (SpecialAt(rest, at)) return at;
    if (lines_ && IsLetter(rest[at]) && FollowsSingleBreak(rest, at)) return at;
    if (words_ && rest[at] == ' ' && at + 1 < rest.size() && IsLetterOrDigit(rest[at + 1]) &&
        IsLetterOrDigit(rest[at - 1]) && !InsideEscape(rest, at - 1)) {
      return at;
    }
  }
  return rest.size();
}

SegmentCache::SegmentCache(text::Tokenizer tokenizer, TextCutter cutter, size_t max_bytes)
    : tokenizer_(std::move(tokenizer)), cutter_(std::move(cutter)), max_bytes_(max_bytes), seed_([] {
        std::random_device random;
        return static_cast<uint64_t>(random()) << 32 | random();
      }()) {
  const auto around = tokenizer_.Encode("", /*add_special=*/true),
             with = tokenizer_.Encode("word", /*add_special=*/true),
             plain = tokenizer_.Encode("word", /*add_special=*/false);
  if (!around.ok() || !with.ok() || !plain.ok()) return;
  std::vector<int32_t> led = *around;
  led.insert(led.end(), plain->begin(), plain->end());
  if (led == *with) leading_ = *around;
}

const SegmentCache::Ids* SegmentCache::Touch(uint64_t hash, std::string_view text) {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end() || found->second->entry->text != text) {
    ++stats_.misses;
    stats_.miss_bytes += text.size();
    return nullptr;
  }
  recent_.splice(recent_.begin(), recent_, found->second);
  ++stats_.hits;
  stats_.hit_bytes += text.size();
  return &found->second->entry;
}

SegmentCache::Ids SegmentCache::Find(uint64_t hash, std::string_view text) {
  const std::lock_guard lock(mutex_);
  const Ids* entry = Touch(hash, text);
  return entry == nullptr ? nullptr : *entry;
}

void SegmentCache::Insert(uint64_t hash, std::string_view text, std::vector<int32_t> ids) {
  const auto size_of = [](const Entry& e) {
    return e.text.size() + e.ids.size() * sizeof(int32_t) + kEntryOverhead;
  };
  const Ids entry = std::make_shared<const Entry>(Entry{std::string(text), std::move(ids)});
  const size_t bytes = size_of(*entry);
  if (bytes > max_bytes_ / 4) return;
  const std::lock_guard lock(mutex_);
  const auto erase = [&](auto found) {
    stats_.bytes -= size_of(*found->second->entry);
    recent_.erase(found->second);
    by_hash_.erase(found);
  };
  // Another thread has inserted the text meanwhile, or another text has its hash.
  if (const auto found = by_hash_.find(hash); found != by_hash_.end()) erase(found);
  while (stats_.bytes + bytes > max_bytes_) erase(by_hash_.find(recent_.back().hash));
  recent_.push_front({entry, hash});
  by_hash_.emplace(hash, recent_.begin());
  stats_.bytes += bytes;
}

uint64_t SegmentCache::HashOf(std::string_view text) const {
  return XXH3_64bits_withSeed(text.data(), text.size(), seed_);
}

bool SegmentCache::AppendKnown(uint64_t hash, std::string_view text, Output* out) {
  const std::lock_guard lock(mutex_);
  const Ids* entry = Touch(hash, text);
  if (entry == nullptr) return false;
  out->ids.insert(out->ids.end(), (*entry)->ids.begin(), (*entry)->ids.end());
  return true;
}

Status SegmentCache::AppendSegment(std::string_view text, bool insert, Output* out) {
  const uint64_t hash = HashOf(text);
  if (AppendKnown(hash, text, out)) return OkStatus();
  return AppendUnknown(hash, text, insert, out);
}

Status SegmentCache::AppendUnknown(uint64_t hash, std::string_view text, bool insert, Output* out) {
  if (text.size() > out->max_unknown) return ResourceExhausted("more text is not known than was allowed");
  out->max_unknown -= text.size();
  const std::optional<std::string> plain = JsonUnescaped(text);
  if (!plain) return InvalidArgument("the text has half of a surrogate pair");
  ASSIGN_OR_RETURN(std::vector<int32_t> ids, tokenizer_.Encode(*plain, /*add_special=*/false));
  out->ids.insert(out->ids.end(), ids.begin(), ids.end());
  if (insert) Insert(hash, text, std::move(ids));
  return OkStatus();
}

template <typename Append>
Status SegmentCache::AppendWhole(std::string_view text, bool insert, Output* out, const Append& append) {
  const uint64_t hash = HashOf(text);
  if (AppendKnown(hash, text, out)) return OkStatus();
  const auto before = static_cast<ptrdiff_t>(out->ids.size());
  RETURN_IF_ERROR(append());
  if (insert) Insert(hash, text, {out->ids.begin() + before, out->ids.end()});
  return OkStatus();
}

Status SegmentCache::AppendParts(std::string_view text, bool insert, Output* out) {
  while (!text.empty()) {
    const std::string_view medium = text.substr(0, cutter_.NextSegment(text, kMediumSegment));
    RETURN_IF_ERROR(AppendWhole(medium, insert, out, [&]() -> Status {
      for (std::string_view rest = medium; !rest.empty();) {
        const std::string_view part = rest.substr(0, cutter_.NextSegment(rest, kShortSegment));
        RETURN_IF_ERROR(AppendSegment(part, insert, out));
        rest.remove_prefix(part.size());
      }
      return OkStatus();
    }));
    text.remove_prefix(medium.size());
  }
  return OkStatus();
}

Status SegmentCache::AppendEnd(std::string_view text, Output* out) {
  while (!text.empty()) {
    const size_t length = cutter_.NextSegment(text, kMediumSegment);
    if (length == text.size()) return AppendShort(text, /*last=*/true, out);
    const std::string_view medium = text.substr(0, length);
    RETURN_IF_ERROR(
        AppendWhole(medium, /*insert=*/true, out, [&] { return AppendShort(medium, /*last=*/false, out); }));
    text.remove_prefix(length);
  }
  return OkStatus();
}

Status SegmentCache::AppendShort(std::string_view text, bool last, Output* out) {
  while (!text.empty()) {
    const size_t length = cutter_.NextSegment(text, kShortSegment);
    if (last && length == text.size()) return AppendWords(text, out);
    const std::string_view part = text.substr(0, length);
    RETURN_IF_ERROR(AppendWhole(part, /*insert=*/true, out, [&] { return AppendWords(part, out); }));
    text.remove_prefix(length);
  }
  return OkStatus();
}

Status SegmentCache::AppendWords(std::string_view text, Output* out) {
  size_t unknown = 0;  // bytes before `at` that are tokenized together
  for (size_t at = 0; at < text.size();) {
    if (unknown > out->max_unknown || --out->lookups < 0)
      return ResourceExhausted("more text is not known than was allowed");
    const std::string_view word = text.substr(at, cutter_.NextWord(text.substr(at)));
    const uint64_t hash = HashOf(word);
    const Ids entry = Find(hash, word);
    if (entry != nullptr) {
      if (unknown > 0)
        RETURN_IF_ERROR(AppendUnknown(0, text.substr(at - unknown, unknown), /*insert=*/false, out));
      unknown = 0;
      out->ids.insert(out->ids.end(), entry->ids.begin(), entry->ids.end());
    } else if (unknown == 0 && out->new_words < kMaxNewWords) {
      ++out->new_words;
      RETURN_IF_ERROR(AppendUnknown(hash, word, /*insert=*/true, out));
    } else {
      unknown += word.size();
    }
    at += word.size();
  }
  if (unknown == 0) return OkStatus();
  return AppendUnknown(0, text.substr(text.size() - unknown), /*insert=*/false, out);
}

std::string_view SegmentCache::NextLong(std::span<const std::string_view> pieces, const Progress& progress,
                                        std::string* joined, bool* last) const {
  *last = true;
  if (progress.piece == pieces.size()) return {};
  const std::string_view rest = pieces[progress.piece].substr(progress.at);
  const size_t length = cutter_.NextSegment(rest, kLongSegment);
  *last = length == rest.size() && progress.piece + 1 == pieces.size();
  if (length < rest.size() || *last) return rest.substr(0, length);
  *joined = rest;
  for (size_t piece = progress.piece + 1, at = 0; piece < pieces.size();) {
    // Without the bytes that follow, no cut was seen near the end.
    const size_t seen = joined->size() - std::min(joined->size(), cutter_.lookahead());
    const std::string_view more = pieces[piece].substr(at, kLongSegment);
    *joined += more;
    at += more.size();
    if (at == pieces[piece].size()) ++piece, at = 0;
    const size_t cut = cutter_.NextSegment(*joined, std::max(kLongSegment, seen));
    if (cut < joined->size()) return std::string_view(*joined).substr(0, cut);
  }
  *last = true;
  return *joined;
}

Status SegmentCache::Encode(std::span<const std::string_view> pieces, bool add_special, Progress* progress,
                            size_t max_unknown) {
  size_t bytes = 0;
  for (const std::string_view piece : pieces) bytes += piece.size();
  if (add_special && !leading_) {  // such as EOS after the text
    if (bytes > max_unknown) return ResourceExhausted("the text is longer than was allowed");
    std::string escaped;
    for (const std::string_view piece : pieces) escaped += piece;
    const std::optional<std::string> plain = JsonUnescaped(escaped);
    if (!plain) return InvalidArgument("the text has half of a surrogate pair");
    ASSIGN_OR_RETURN(progress->ids, tokenizer_.Encode(*plain, /*add_special=*/true));
    return OkStatus();
  }
  if (!std::exchange(progress->begun, true)) {
    progress->ids.reserve(bytes / 3 + 8);  // most texts have fewer, so that ids are not moved
    if (add_special) progress->ids = *leading_;
  }
  Output out{.ids = progress->ids,
             .max_unknown = max_unknown,
             .new_words = 0,
             .lookups = max_unknown == SIZE_MAX ? INT_MAX : kMaxLookups};
  std::string joined;
  for (bool last = false; !last;) {
    const std::string_view segment = NextLong(pieces, *progress, &joined, &last);
    const size_t before = out.ids.size();
    const bool first = progress->piece == 0 && progress->at == 0;
    const Status status = last ? AppendEnd(segment, &out)  // a longer prompt will continue it
                               : AppendWhole(segment, /*insert=*/true, &out,
                                             [&] { return AppendParts(segment, /*insert=*/first, &out); });
    if (!status.ok()) {
      out.ids.resize(before);
      return status;
    }
    for (size_t left = segment.size(); left > 0;) {
      const size_t step = std::min(left, pieces[progress->piece].size() - progress->at);
      left -= step;
      progress->at += step;
      if (progress->at == pieces[progress->piece].size()) ++progress->piece, progress->at = 0;
    }
  }
  return OkStatus();
}

SegmentCacheStats SegmentCache::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace moesaic::proxy
