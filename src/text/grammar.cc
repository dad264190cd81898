#include "text/grammar.h"

#include "text/bridge.h"
#include "text/tokenizer_impl.h"

namespace moesaic::text {
namespace {

const char* KindName(GrammarKind kind) {
  switch (kind) {
    case GrammarKind::kJsonSchema:
      return "json_schema";
    case GrammarKind::kRegex:
      return "regex";
    case GrammarKind::kLark:
    case GrammarKind::kToolCalls:
      return "lark";
  }
  return "lark";
}

Status Done(const StatusOr<bool>& done) { return done.status(); }

}  // namespace

struct Grammar::Impl {
  explicit Impl(rust::Box<bridge::Matching> matching)
      : bridge(std::move(matching)), canceller(bridge->canceller()) {}
  rust::Box<bridge::Matching> bridge;
  rust::Box<bridge::Canceller> canceller;
};

Grammar::Grammar(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Grammar::~Grammar() = default;
Grammar::Grammar(Grammar&&) noexcept = default;
Grammar& Grammar::operator=(Grammar&&) noexcept = default;

Status Grammar::ComputeMask(std::span<uint32_t> mask) {
  // llguidance's mask has a few more bits than the vocabulary has tokens. They are never set, but may need
  // one more word.
  std::vector<uint32_t> words(mask.size() + 1);
  RETURN_IF_ERROR(Done(Bridged([&] {
    impl_->bridge->mask(rust::Slice<uint32_t>(words.data(), words.size()));
    return true;
  })));
  std::copy_n(words.begin(), mask.size(), mask.begin());
  return OkStatus();
}

Status Grammar::ComputeFirstMask() {
  return Done(Bridged([&] {
    impl_->bridge->first_mask();
    return true;
  }));
}

Status Grammar::Commit(int32_t id) {
  return Done(Bridged([&] {
    impl_->bridge->commit(id);
    return true;
  }));
}

StatusOr<size_t> Grammar::CountValid(std::span<const int32_t> ids) {
  return Bridged(
      [&] { return impl_->bridge->count_valid(rust::Slice<const int32_t>(ids.data(), ids.size())); });
}

StatusOr<bool> Grammar::IsAccepting() {
  return Bridged([&] { return impl_->bridge->accepting(); });
}

bool Grammar::IsStopped() const { return impl_->bridge->stopped(); }

StatusOr<Grammar> Grammar::Fork() const {
  return Bridged([&] { return Grammar(std::unique_ptr<Impl>(new Impl(impl_->bridge->fork()))); });
}

void Grammar::Cancel() const { impl_->canceller->cancel(); }

size_t Grammar::bytes() const { return impl_->bridge->bytes(); }

struct GrammarCompiler::Impl {
  rust::Box<bridge::GrammarFactory> bridge;
  GrammarLimits limits;
};

StatusOr<GrammarCompiler> GrammarCompiler::Create(const Tokenizer& tokenizer,
                                                  std::span<const int32_t> end_ids,
                                                  const GrammarLimits& limits) {
  return Bridged([&] {
    const rust::Slice<const int32_t> ends(end_ids.data(), end_ids.size());
    const bridge::GrammarLimits bounds{.regex_bytes = limits.regex_bytes,
                                       .compile_fuel = limits.compile_fuel,
                                       .mask_fuel = limits.mask_fuel,
                                       .lexer_states = limits.lexer_states};
    return GrammarCompiler(std::shared_ptr<const Impl>(
        new Impl{bridge::new_grammar_factory(*tokenizer.impl().bridge, ends, bounds), limits}));
  });
}

StatusOr<Grammar> GrammarCompiler::Compile(GrammarKind kind, std::string_view source) const {
  RETURN_IF_ERROR(CheckSize(kind, source));
  return Bridged([&] {
    return Grammar(std::unique_ptr<Grammar::Impl>(
        new Grammar::Impl(impl_->bridge->compile(KindName(kind), Bytes(source)))));
  });
}

Status GrammarCompiler::CheckSize(GrammarKind kind, std::string_view source) const {
  const GrammarLimits& limits = impl_->limits;
  size_t most = limits.schema_bytes;
  const char* name = kind == GrammarKind::kToolCalls ? "grammar of the tools' schemas" : "JSON schema";
  if (kind == GrammarKind::kRegex) most = limits.regex_bytes, name = "regex";
  if (kind == GrammarKind::kLark) most = limits.lark_bytes, name = "Lark grammar";
  if (source.size() <= most) return OkStatus();
  return InvalidArgument("the {} has {} bytes; at most {} are allowed", name, source.size(), most);
}

const GrammarLimits& GrammarCompiler::limits() const { return impl_->limits; }

}  // namespace moesaic::text
