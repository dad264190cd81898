// Constrained decoding: which tokens may come next under a JSON schema, a regex or a Lark grammar.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/tokenizer.h"

namespace moesaic::text {

enum class GrammarKind { kJsonSchema, kRegex, kLark };

/// One text's way through a grammar. Used by one thread at a time.
class Grammar {
 public:
  ~Grammar();
  Grammar(Grammar&&) noexcept;
  Grammar& operator=(Grammar&&) noexcept;

  /// Sets bit `id % 32` of `mask[id / 32]` for each token that may come next, and clears all others. When the
  /// text is complete and cannot go on, only end-of-text tokens are set. `mask`: [ceil(vocab_size / 32)] or
  /// longer.
  Status ComputeMask(std::span<uint32_t> mask);

  /// Goes on by `id`. A token that may not come next is an error, and the grammar is of no further use.
  Status Commit(int32_t id);

  /// How many of `ids` may follow one after the other; nothing is committed.
  StatusOr<size_t> CountValid(std::span<const int32_t> ids);

  /// The text so far is complete.
  StatusOr<bool> IsAccepting();

  /// Nothing may follow: an end-of-text token was committed, or the grammar ended.
  bool IsStopped() const;

  /// A copy at the same place.
  StatusOr<Grammar> Fork() const;

 private:
  friend class GrammarCompiler;
  struct Impl;
  explicit Grammar(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Compiles grammars for one tokenizer. Building it walks the whole vocabulary; keep one a model. `Compile`
/// may be called from any thread.
class GrammarCompiler {
 public:
  /// `end_ids`: tokens that end a text, at least one.
  static StatusOr<GrammarCompiler> Create(const Tokenizer& tokenizer, std::span<const int32_t> end_ids);

  /// A grammar at its start. What the grammar's language does not support is refused by name.
  StatusOr<Grammar> Compile(GrammarKind kind, std::string_view source) const;

 private:
  struct Impl;
  explicit GrammarCompiler(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace moesaic::text
