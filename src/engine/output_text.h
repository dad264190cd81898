// The output text of one request: decoded token by token, cut at stop strings.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/stop_strings.h"
#include "text/tokenizer.h"

namespace moesaic::engine {

/// Decodes tokens to pieces of text, whose concatenation is the answer. One thread at a time.
class OutputText {
 public:
  /// `tokenizer` is shared, not borrowed.
  OutputText(const text::Tokenizer& tokenizer, bool skip_special, std::vector<std::string> stops);

  /// Returns the text that `id` completes; empty while a character or a stop string may be incomplete.
  StatusOr<std::string> Push(int32_t id);
  /// Returns the text that is still held back, after the last token.
  StatusOr<std::string> Finish();
  bool stopped() const {
    return stops_.matched();
  }  ///< Returns whether a stop string was found, so that the request must be cancelled.

 private:
  text::StreamingDecoder decoder_;
  StopStrings stops_;
};

}  // namespace moesaic::engine
