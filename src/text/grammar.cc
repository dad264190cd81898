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
      return "lark";
  }
  return "lark";
}

Status Done(const StatusOr<bool>& done) { return done.status(); }

}  // namespace

struct Grammar::Impl {
  rust::Box<bridge::Matching> bridge;
};

Grammar::Grammar(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Grammar::~Grammar() = default;
Grammar::Grammar(Grammar&&) noexcept = default;
Grammar& Grammar::operator=(Grammar&&) noexcept = default;

Status Grammar::ComputeMask(std::span<uint32_t> mask) {
  // llguidance has a bit more than the vocabulary has tokens, never set, which may need a word of its own.
  std::vector<uint32_t> words(mask.size() + 1);
  RETURN_IF_ERROR(Done(Bridged([&] {
    impl_->bridge->mask(rust::Slice<uint32_t>(words.data(), words.size()));
    return true;
  })));
  std::copy_n(words.begin(), mask.size(), mask.begin());
  return OkStatus();
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
  return Bridged([&] { return Grammar(std::unique_ptr<Impl>(new Impl{impl_->bridge->fork()})); });
}

struct GrammarCompiler::Impl {
  rust::Box<bridge::GrammarFactory> bridge;
};

StatusOr<GrammarCompiler> GrammarCompiler::Create(const Tokenizer& tokenizer,
                                                  std::span<const int32_t> end_ids) {
  return Bridged([&] {
    const rust::Slice<const int32_t> ends(end_ids.data(), end_ids.size());
    return GrammarCompiler(
        std::shared_ptr<const Impl>(new Impl{bridge::new_grammar_factory(*tokenizer.impl().bridge, ends)}));
  });
}

StatusOr<Grammar> GrammarCompiler::Compile(GrammarKind kind, std::string_view source) const {
  return Bridged([&] {
    return Grammar(std::unique_ptr<Grammar::Impl>(
        new Grammar::Impl{impl_->bridge->compile(KindName(kind), Bytes(source))}));
  });
}

}  // namespace moesaic::text
