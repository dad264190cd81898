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

/// A prompt on its way from a body to token ids. It refers to the body.
struct RenderedPrompt {
  RenderedPrompt() = default;
  RenderedPrompt(const RenderedPrompt&) = delete;  // `pieces` refer to its strings
  RenderedPrompt& operator=(const RenderedPrompt&) = delete;

  SegmentCache::Progress progress;
  /// The engine computes the same ids, so that they may replace its own tokenization. Otherwise they only
  /// serve to find cached prefixes: engines differ in how they pass tools, lists of content parts and earlier
  /// calls to templates.
  bool exact = false;
  bool tokenized = false;  ///< `progress.ids` are all ids

  std::vector<std::string_view> pieces;  ///< escaped text: strings of the body, and text between them
  std::string between;                   ///< text of the template, escaped
  std::string messages;                  ///< of the body, if they had to be edited
  bool add_special = false;
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
  StatusOr<std::unique_ptr<RenderedPrompt>> Render(const RequestBody& body);

  /// Computes the ids. ResourceExhausted: more than `max_unknown` bytes of text that were not seen before
  /// would have to be tokenized; another call continues.
  Status Tokenize(RenderedPrompt* prompt, size_t max_unknown = SIZE_MAX);

  const text::Tokenizer& tokenizer() const { return cache_->tokenizer(); }

 private:
  Status RenderChat(const RequestBody& body, RenderedPrompt* prompt);
  static Status RenderCompletion(const RequestBody& body, RenderedPrompt* prompt);

  PromptRenderer(Dialect dialect, std::unique_ptr<SegmentCache> cache, std::optional<text::ChatTemplate> chat)
      : dialect_(dialect), cache_(std::move(cache)), chat_(std::move(chat)) {}

  Dialect dialect_;
  std::unique_ptr<SegmentCache> cache_;
  std::optional<text::ChatTemplate> chat_;
};

}  // namespace moesaic::proxy
