// Renders a request's prompt to token ids, as the engine would.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.h"
#include "proxy/protocol/request_body.h"
#include "proxy/tokenize/segment_cache.h"
#include "text/chat_template.h"

namespace moesaic::proxy {

struct RenderedPrompt {
  std::vector<int32_t> ids;
  /// The engine computes the same ids, so that they may replace its own tokenization. Otherwise they only
  /// serve to find cached prefixes: engines differ in how they pass tools, lists of content parts and earlier
  /// calls to templates.
  bool exact = false;
};

/// The text part of a model. Thread-safe.
class PromptRenderer {
 public:
  /// Reads a folder in Hub layout. A model without a chat template renders completions only.
  static StatusOr<std::unique_ptr<PromptRenderer>> Open(const std::filesystem::path& folder, Dialect dialect,
                                                        size_t cache_bytes);

  /// Unimplemented for prompts that only the engine can render: images and other media, a template or a
  /// truncation of the request's own, several prompts. InvalidArgument for a message that the template
  /// refuses. In both cases the request passes untouched, and the engine answers it.
  /// ResourceExhausted: more than `max_unknown` bytes of text that were not seen before had to be tokenized.
  StatusOr<RenderedPrompt> Render(const RequestBody& body, size_t max_unknown = SIZE_MAX);

  const text::Tokenizer& tokenizer() const { return cache_->tokenizer(); }

 private:
  StatusOr<RenderedPrompt> RenderChat(const RequestBody& body, size_t max_unknown);
  StatusOr<RenderedPrompt> RenderCompletion(const RequestBody& body, size_t max_unknown);

  PromptRenderer(Dialect dialect, std::unique_ptr<SegmentCache> cache, std::optional<text::ChatTemplate> chat)
      : dialect_(dialect), cache_(std::move(cache)), chat_(std::move(chat)) {}

  Dialect dialect_;
  std::unique_ptr<SegmentCache> cache_;
  std::optional<text::ChatTemplate> chat_;
};

}  // namespace moesaic::proxy
