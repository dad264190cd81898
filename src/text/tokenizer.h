// Text to token ids and back, exactly as the model's own tokenizer does it.
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

/// A token of the vocabulary that has a role.
struct SpecialToken {
  int32_t id;
  std::string text;
};

/// The roles a checkpoint names; absent where it names none.
struct SpecialTokens {
  std::optional<SpecialToken> bos, eos, pad, unk;
  /// GGUF's end of a turn, where it differs from `eos`.
  std::optional<SpecialToken> end_of_turn;
};

/// The vocabulary inside a GGUF file: the arrays and numbers under its `tokenizer.ggml.` keys, as they are.
struct GgufVocab {
  std::string model;                // "gpt2" or "llama"
  std::string pre;                  // name of the pre-tokenizer, e.g. "qwen2"; gpt2 only
  std::vector<std::string> tokens;  // [vocab]
  std::vector<float> scores;        // [vocab] or empty; llama only
  std::vector<int32_t>
      token_types;  // [vocab] or empty: 1 normal, 2 unknown, 3 control, 4 user, 5 unused, 6 byte
  std::vector<std::string> merges;  // "left right", best first; gpt2 only
  std::optional<int32_t> bos_id, eos_id, unk_id, pad_id, eot_id;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
};

/// Whose rules go with a tiktoken vocabulary: the file holds no more than the ranks.
enum class TiktokenStyle {
  kKimi,  // Kimi-K2's tokenization_kimi.py
  kQwen,  // Qwen's tokenization_qwen.py
};

/// An immutable tokenizer. Copies share one vocabulary; every method may be called from any thread.
class Tokenizer {
 public:
  /// A folder in Hub layout: `tokenizer.json`, or `tiktoken.model` / `*.tiktoken`, with
  /// `tokenizer_config.json`.
  static StatusOr<Tokenizer> FromFolder(const std::filesystem::path& folder);

  /// The bytes of a `tokenizer.json`, and of a `tokenizer_config.json` (empty: none).
  static StatusOr<Tokenizer> FromJson(std::string_view tokenizer_json,
                                      std::string_view tokenizer_config_json);

  /// The bytes of a tiktoken vocabulary (a base64 token and its rank on each line) and of a
  /// `tokenizer_config.json`, whose `added_tokens_decoder` names the special tokens behind the ranks.
  static StatusOr<Tokenizer> FromTiktoken(std::string_view ranks, std::string_view tokenizer_config_json,
                                          TiktokenStyle style);

  /// An unknown `model` or `pre` is refused by name.
  static StatusOr<Tokenizer> FromGguf(const GgufVocab& vocab);

  /// Token ids of `text`, which must be UTF-8. Special tokens spelt in the text become their ids.
  /// `add_special`: with the tokens the model expects around a text, such as BOS.
  StatusOr<std::vector<int32_t>> Encode(std::string_view text, bool add_special) const;

  /// The text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids outside the vocabulary stand for nothing.
  StatusOr<std::string> Decode(std::span<const int32_t> ids, bool skip_special) const;

  /// The id of a token as the vocabulary spells it.
  std::optional<int32_t> TokenToId(std::string_view token) const;
  /// The spelling of a token in the vocabulary; empty for an id without one.
  std::string IdToToken(int32_t id) const;
  /// The bytes a token adds to a text: not always UTF-8 by themselves.
  std::string TokenBytes(int32_t id) const;
  /// The token is left out by `skip_special`.
  bool IsSpecial(int32_t id) const;

  /// One more than the largest id. The model's embedding may have more rows.
  int32_t vocab_size() const;
  const SpecialTokens& special_tokens() const;

  /// The bridge's object, for this room's own use.
  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// A GGUF file's text side as the two files of a Hub folder.
struct HubFiles {
  std::string tokenizer_json, tokenizer_config_json;
};

/// `chat_template`: empty when the file has none.
StatusOr<HubFiles> HubFilesFromGguf(const GgufVocab& vocab, std::string_view chat_template);

/// Decodes token by token. The pieces put together equal `Tokenizer::Decode` of all ids, and each is whole
/// UTF-8. Used by one thread at a time.
class StreamingDecoder {
 public:
  StreamingDecoder(const Tokenizer& tokenizer, bool skip_special);
  ~StreamingDecoder();
  StreamingDecoder(StreamingDecoder&&) noexcept;
  StreamingDecoder& operator=(StreamingDecoder&&) noexcept;

  /// The text that `id` settles: empty while a character is incomplete.
  StatusOr<std::string> Push(int32_t id);
  /// What is still held back. Afterwards the decoder is at the start of a new text.
  StatusOr<std::string> Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::text
