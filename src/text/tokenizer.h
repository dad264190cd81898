// Converts text to token ids and back, exactly like the model's own tokenizer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::text {

/// A vocabulary token with a role.
struct SpecialToken {
  int32_t id;
  std::string text;
};

/// Roles named by a checkpoint; nullopt if it does not name one.
struct SpecialTokens {
  std::optional<SpecialToken> bos, eos, pad, unk;
  /// GGUF's end-of-turn token, if it differs from `eos`.
  std::optional<SpecialToken> end_of_turn;
};

/// The vocabulary inside a GGUF file: the unchanged arrays and numbers of its `tokenizer.ggml.` keys.
struct GgufVocab {
  std::string model;                // "gpt2" or "llama"
  std::string pre;                  // name of the pre-tokenizer, e.g. "qwen2"; gpt2 only
  std::vector<std::string> tokens;  // [vocab]
  std::vector<float> scores;        // [vocab] or empty; llama only
  std::vector<int32_t>
      token_types;  // [vocab] or empty: 1 normal, 2 unknown, 3 control, 4 user, 5 unused, 6 byte
  std::vector<std::string> merges;  // "left right", highest priority first; gpt2 only
  std::optional<int32_t> bos_id, eos_id, unk_id, pad_id, eot_id;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
};

/// Model family whose rules apply to a tiktoken vocabulary, because its file contains only ranks.
enum class TiktokenStyle {
  kKimi,  // Kimi-K2's tokenization_kimi.py
  kQwen,  // Qwen's tokenization_qwen.py
};

/// An immutable tokenizer. Copies share one vocabulary; all methods are thread-safe.
class Tokenizer {
 public:
  /// Reads a folder in Hub layout: `tokenizer.json`, or `tiktoken.model` / `*.tiktoken`, with
  /// `tokenizer_config.json`.
  static StatusOr<Tokenizer> FromFolder(const std::filesystem::path& folder);

  /// Reads the bytes of a `tokenizer.json` and of a `tokenizer_config.json` (empty: none).
  static StatusOr<Tokenizer> FromJson(std::string_view tokenizer_json,
                                      std::string_view tokenizer_config_json);

  /// Reads the bytes of a tiktoken vocabulary (a base64 token and its rank per line) and of a
  /// `tokenizer_config.json`, whose `added_tokens_decoder` names the special tokens after the ranks.
  static StatusOr<Tokenizer> FromTiktoken(std::string_view ranks, std::string_view tokenizer_config_json,
                                          TiktokenStyle style);

  /// The error for an unknown `model` or `pre` names it.
  static StatusOr<Tokenizer> FromGguf(const GgufVocab& vocab);

  /// Returns the token ids of `text`, which must be UTF-8. Special tokens spelled in the text become their
  /// ids. `add_special` adds the tokens that the model expects around a text, such as BOS.
  StatusOr<std::vector<int32_t>> Encode(std::string_view text, bool add_special) const;

  /// Returns the text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are
  /// ignored.
  StatusOr<std::string> Decode(std::span<const int32_t> ids, bool skip_special) const;

  /// Returns the id of a token spelled as in the vocabulary.
  std::optional<int32_t> TokenToId(std::string_view token) const;
  /// Returns the spelling of a token in the vocabulary; empty for an id without one.
  std::string IdToToken(int32_t id) const;
  /// Returns the bytes that a token adds to a text; they may be an incomplete UTF-8 sequence.
  std::string TokenBytes(int32_t id) const;
  /// Returns whether `skip_special` omits the token.
  bool IsSpecial(int32_t id) const;

  /// Returns the largest id plus one. The model's embedding may have more rows.
  int32_t vocab_size() const;
  const SpecialTokens& special_tokens() const;

  /// The bridge's object, private to this room.
  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// The text files of a Hub folder, converted from a GGUF file.
struct HubFiles {
  std::string tokenizer_json, tokenizer_config_json;
};

/// `chat_template` is empty if the file has none.
StatusOr<HubFiles> HubFilesFromGguf(const GgufVocab& vocab, std::string_view chat_template);

/// Decodes token by token. The concatenated pieces equal `Tokenizer::Decode` of all ids, and each piece is
/// complete UTF-8. Use by one thread at a time.
class StreamingDecoder {
 public:
  StreamingDecoder(const Tokenizer& tokenizer, bool skip_special);
  ~StreamingDecoder();
  StreamingDecoder(StreamingDecoder&&) noexcept;
  StreamingDecoder& operator=(StreamingDecoder&&) noexcept;

  /// Returns the text completed by `id`; empty while a character is incomplete.
  StatusOr<std::string> Push(int32_t id);
  /// Returns the text that is still held back and resets the decoder for a new text.
  StatusOr<std::string> Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::text
