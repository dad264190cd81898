#include "text/tokenizer.h"

#include "text/tokenizer_impl.h"

namespace moesaic::text {
namespace {

rust::Slice<const int32_t> Ids(std::span<const int32_t> ids) { return {ids.data(), ids.size()}; }

}  // namespace

StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text, bool add_special) const {
  return Bridged([&] {
    const rust::Vec<int32_t> ids = impl_->bridge->encode(Bytes(text), add_special);
    return std::vector<int32_t>(ids.begin(), ids.end());
  });
}

StatusOr<std::string> Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  return Bridged([&] { return ToString(impl_->bridge->decode(Ids(ids), skip_special)); });
}

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  const int32_t id = impl_->bridge->token_to_id(Bytes(token));
  if (id < 0) return std::nullopt;
  return id;
}

std::string Tokenizer::IdToToken(int32_t id) const { return ToString(impl_->bridge->token_spelling(id)); }

std::string Tokenizer::TokenBytes(int32_t id) const { return ToString(impl_->bridge->token_bytes(id)); }

bool Tokenizer::IsSpecial(int32_t id) const { return impl_->bridge->is_special(id); }

int32_t Tokenizer::vocab_size() const { return impl_->bridge->vocab_size(); }

const SpecialTokens& Tokenizer::special_tokens() const { return impl_->special; }

struct StreamingDecoder::Impl {
  rust::Box<bridge::StreamDecoder> bridge;
};

StreamingDecoder::StreamingDecoder(const Tokenizer& tokenizer, bool skip_special)
    : impl_(new Impl{bridge::new_stream_decoder(*tokenizer.impl().bridge, skip_special)}) {}
StreamingDecoder::~StreamingDecoder() = default;
StreamingDecoder::StreamingDecoder(StreamingDecoder&&) noexcept = default;
StreamingDecoder& StreamingDecoder::operator=(StreamingDecoder&&) noexcept = default;

StatusOr<std::string> StreamingDecoder::Push(int32_t id) {
  return Bridged([&] { return ToString(impl_->bridge->push(id)); });
}

StatusOr<std::string> StreamingDecoder::Finish() {
  return Bridged([&] { return ToString(impl_->bridge->finish()); });
}

}  // namespace moesaic::text
