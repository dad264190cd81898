// Tokenizes long prompts segment by segment and remembers the ids of segments.
//
// Texts have the form of JSON strings without their quotes ("escaped"), as bodies have them, so that text
// whose ids are known is neither unescaped nor copied.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/tokenizer.h"

namespace moesaic::proxy {

/// Finds positions at which an escaped text may be cut so that the ids of the parts, joined, equal the ids of
/// the whole.
///
/// There are three kinds:
/// - Before a special token, because tokenizers match these before the model runs. Tokens that absorb spaces
///   on their left are excluded.
/// - Between a single line break and an ASCII letter, in byte-level vocabularies in which no token contains
///   both, so that no merge joins them.
/// - Before a space between two ASCII letters or digits, in byte-level vocabularies in which no token has a
///   letter or digit followed by a space.
/// Create() probes each kind with the tokenizer itself and leaves out the kind that fails.
class TextCutter {
 public:
  /// `byte_level` states that the vocabulary's pre-tokenizer is byte-level BPE.
  static StatusOr<TextCutter> Create(const text::Tokenizer& tokenizer, bool byte_level);

  /// Returns the length of the first segment of `rest`, which has at least `min_bytes` (2 or more) or is all
  /// of `rest`.
  size_t NextSegment(std::string_view rest, size_t min_bytes) const;
  /// Returns the length of the first word of `rest`: a segment that may also end before a space.
  size_t NextWord(std::string_view rest) const;
  bool cuts_lines() const { return lines_; }
  bool cuts_words() const { return words_; }
  size_t num_special() const { return special_.size(); }
  /// Maximum bytes of a text after a cut that decide about the cut.
  size_t lookahead() const { return lookahead_; }

 private:
  bool SpecialAt(std::string_view rest, size_t at) const;

  std::vector<std::string> special_;  // escaped tokens before which a text may be cut, the longest first
  size_t lookahead_ = 1;
  bool first_byte_[256] = {};  // bytes that begin one of them
  bool lines_ = false, words_ = false;
};

struct SegmentCacheStats {
  uint64_t hits = 0, misses = 0;
  uint64_t hit_bytes = 0, miss_bytes = 0;  ///< of text
  size_t bytes = 0;                        ///< memory in use
};

/// Least recently used segments of one tokenizer. All methods are thread-safe; the tokenizer runs without the
/// lock.
///
/// Segments have four sizes: long, medium, short, and words. Long segments are looked up first, so that a
/// long prompt takes few lookups. A long segment that is not known, and the end of the text, are divided into
/// medium segments, and these into short ones. So little text is tokenized after a known prefix: the
/// tokenizer takes about 0.5 us per byte, and a lookup 0.2 us. Short segments of the end are divided into
/// words: few words of a question are not known, and all prompts of a template have the same end. The medium
/// and short segments of a long one are kept only at the beginning of a text, where prompts with a common
/// system message diverge.
class SegmentCache {
 public:
  static constexpr size_t kLongSegment = 8 << 10, kMediumSegment = 1 << 10,
                          kShortSegment = 128;  ///< minimum bytes
  /// Maximum words that one prompt adds. More words are tokenized together, which is faster.
  static constexpr int kMaxNewWords = 8;
  /// Words that a call with a limit looks up, some 0.2 ms.
  static constexpr int kMaxLookups = 1024;

  SegmentCache(text::Tokenizer tokenizer, TextCutter cutter, size_t max_bytes);

  /// A text of which the ids of a first part are known.
  struct Progress {
    std::vector<int32_t> ids;
    size_t piece = 0, at = 0;  ///< first byte after that part
    bool begun = false;
  };

  /// Completes `progress->ids` to those of Tokenizer::Encode for the text that the escaped `pieces` are.
  /// ResourceExhausted: more than `max_unknown` bytes would have to be tokenized or, if it is below SIZE_MAX,
  /// more than kMaxLookups words looked up; another call continues. InvalidArgument: the text is no UTF-8, or
  /// has half of a surrogate pair.
  Status Encode(std::span<const std::string_view> pieces, bool add_special, Progress* progress,
                size_t max_unknown = SIZE_MAX);
  SegmentCacheStats stats() const;
  const text::Tokenizer& tokenizer() const { return tokenizer_; }

 private:
  struct Entry {
    std::string text;  // escaped
    std::vector<int32_t> ids;
  };
  using Ids = std::shared_ptr<const Entry>;
  struct Node {
    Ids entry;
    uint64_t hash;
  };
  struct Output {
    std::vector<int32_t>& ids;
    size_t max_unknown;  // bytes that may still be tokenized
    int new_words;       // number of words that were added
    int lookups;         // words that may still be looked up
  };

  /// Returns the next long segment, or the end of the text (`last`). `joined` holds it if it is in several
  /// pieces.
  std::string_view NextLong(std::span<const std::string_view> pieces, const Progress& progress,
                            std::string* joined, bool* last) const;

  uint64_t HashOf(std::string_view text) const;
  /// Returns the entry of a text and counts its use, or null. The caller holds the lock.
  const Ids* Touch(uint64_t hash, std::string_view text);
  Ids Find(uint64_t hash, std::string_view text);
  /// Appends the ids of a segment and returns true if it is in the cache.
  bool AppendKnown(uint64_t hash, std::string_view text, Output* out);
  void Insert(uint64_t hash, std::string_view text, std::vector<int32_t> ids);
  Status AppendSegment(std::string_view text, bool insert, Output* out);
  /// Appends the ids of a segment that is not in the cache.
  Status AppendUnknown(uint64_t hash, std::string_view text, bool insert, Output* out);
  /// Appends the ids of a segment. If it is not in the cache, `append` appends them by way of its parts, and
  /// the segment is inserted.
  template <typename Append>
  Status AppendWhole(std::string_view text, bool insert, Output* out, const Append& append);
  /// Appends the ids of a long segment by way of medium and short ones.
  Status AppendParts(std::string_view text, bool insert, Output* out);
  /// Appends the ids of the end of a text.
  Status AppendEnd(std::string_view text, Output* out);
  /// Appends the ids of a medium segment of the end by way of short ones. `last`: the text ends with it.
  Status AppendShort(std::string_view text, bool last, Output* out);
  Status AppendWords(std::string_view text, Output* out);

  const text::Tokenizer tokenizer_;
  const TextCutter cutter_;
  const size_t max_bytes_;
  const uint64_t seed_;
  std::optional<std::vector<int32_t>> leading_;  // special tokens of any text, if all of them come first
  mutable std::mutex mutex_;
  std::list<Node> recent_;  // the most recently used first
  absl::flat_hash_map<uint64_t, std::list<Node>::iterator> by_hash_;
  SegmentCacheStats stats_;
};

}  // namespace moesaic::proxy
