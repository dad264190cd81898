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

/// kToolCalls is a Lark grammar that the server makes from the schemas of tools.
enum class GrammarKind { kJsonSchema, kRegex, kLark, kToolCalls };

/// Bounds on one grammar. Larger or costlier ones are refused.
struct GrammarLimits {
  size_t regex_bytes = 16 << 10;      ///< of a regex
  size_t schema_bytes = 256 << 10;    ///< of a JSON schema, and of the schemas of all forced tools together
  size_t lark_bytes = 64 << 10;       ///< of a Lark grammar
  uint64_t compile_fuel = 1'000'000;  ///< nodes of regex syntax trees; llguidance builds about 1,000 a ms
  uint64_t mask_fuel = 1'000'000;     ///< likewise for one mask
  size_t lexer_states = 50'000;       ///< of one request, each about 1 KB; llguidance's default is 250,000
};

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

  /// Computes what ComputeMask needs, so that the first mask of each copy is cheap. Fails where it would
  /// fail.
  Status ComputeFirstMask();

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

  /// Ends a ComputeMask that is running, soon, and fails all later calls. Any thread, at any time.
  void Cancel() const;

  /// Estimated memory. ComputeFirstMask() adds the lexer states of the first mask; those of later masks are
  /// not counted.
  size_t bytes() const;

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
  static StatusOr<GrammarCompiler> Create(const Tokenizer& tokenizer, std::span<const int32_t> end_ids,
                                          const GrammarLimits& limits = {});

  /// A grammar at its start. What the grammar's language does not support is refused by name.
  StatusOr<Grammar> Compile(GrammarKind kind, std::string_view source) const;

  /// InvalidArgument if `source` is larger than the limits allow.
  Status CheckSize(GrammarKind kind, std::string_view source) const;
  const GrammarLimits& limits() const;

 private:
  struct Impl;
  explicit GrammarCompiler(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace moesaic::text
