// Constrained decoding: computes the tokens that a JSON schema, a regex or a Lark grammar allows next.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/tokenizer.h"

namespace moesaic::text {

/// kToolCalls is a Lark grammar that the server generates from the schemas of tools.
enum class GrammarKind { kJsonSchema, kRegex, kLark, kToolCalls };

/// Limits of one grammar. Larger or more expensive ones are rejected.
struct GrammarLimits {
  size_t regex_bytes = 16 << 10;  ///< size of a regex
  /// size of a JSON schema, and of the schemas of all forced tools together
  size_t schema_bytes = 256 << 10;
  size_t lark_bytes = 64 << 10;       ///< size of a Lark grammar
  uint64_t compile_fuel = 1'000'000;  ///< nodes of regex syntax trees; llguidance builds about 1,000 per ms
  uint64_t mask_fuel = 1'000'000;     ///< same unit, for one mask
  size_t lexer_states = 50'000;       ///< per request, about 1 KB each; llguidance's default is 250,000
};

/// Matcher state of one text in a grammar. Use by one thread at a time.
class Grammar {
 public:
  ~Grammar();
  Grammar(Grammar&&) noexcept;
  Grammar& operator=(Grammar&&) noexcept;

  /// Sets bit `id % 32` of `mask[id / 32]` for each token allowed next and clears all others. If the text is
  /// complete and cannot be continued, only end-of-text tokens are set. `mask` has [ceil(vocab_size / 32)]
  /// words or more.
  Status ComputeMask(std::span<uint32_t> mask);

  /// Precomputes the state for ComputeMask, so that the first mask of each copy is cheap. Fails under the
  /// same conditions.
  Status ComputeFirstMask();

  /// Advances by token `id`. A token that is not allowed is an error and makes the grammar unusable.
  Status Commit(int32_t id);

  /// Returns the length of the longest prefix of `ids` that is allowed; commits nothing.
  StatusOr<size_t> CountValid(std::span<const int32_t> ids);

  /// Returns whether the text so far is complete.
  StatusOr<bool> IsAccepting();

  /// Returns whether no token may follow: an end-of-text token was committed, or the grammar ended.
  bool IsStopped() const;

  /// Returns a copy with the same state.
  StatusOr<Grammar> Fork() const;

  /// Interrupts a running ComputeMask and makes all later calls fail. Thread-safe.
  void Cancel() const;

  /// Returns the estimated memory in bytes. ComputeFirstMask() adds the lexer states of the first mask; those
  /// of later masks are not counted.
  size_t bytes() const;

 private:
  friend class GrammarCompiler;
  struct Impl;
  explicit Grammar(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Compiles grammars for one tokenizer. Creation walks the whole vocabulary, so keep one per model. `Compile`
/// is thread-safe.
class GrammarCompiler {
 public:
  /// `end_ids`: tokens that end a text, at least one.
  static StatusOr<GrammarCompiler> Create(const Tokenizer& tokenizer, std::span<const int32_t> end_ids,
                                          const GrammarLimits& limits = {});

  /// Returns a grammar in its initial state. Errors name unsupported constructs of the grammar's language.
  StatusOr<Grammar> Compile(GrammarKind kind, std::string_view source) const;

  /// Returns InvalidArgument if `source` exceeds the limits.
  Status CheckSize(GrammarKind kind, std::string_view source) const;
  const GrammarLimits& limits() const;

 private:
  struct Impl;
  explicit GrammarCompiler(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace moesaic::text
