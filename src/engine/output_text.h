// The output text of one request: decoded token by token, cut at stop strings.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/stop_strings.h"
#include "text/tokenizer.h"

namespace moesaic::engine {

/// The concatenated pieces are the answer. One thread at a time.
class OutputText {
 public:
  /// `tokenizer` is shared, not borrowed.
  OutputText(const text::Tokenizer& tokenizer, bool skip_special, std::vector<std::string> stops);

  /// The text that `id` completes; empty while a character or a stop string may be incomplete.
  StatusOr<std::string> Push(int32_t id);
  /// The held-back rest, after the last token.
  StatusOr<std::string> Finish();
  bool stopped() const { return stops_.matched(); }  ///< A stop string was found: cancel the request.

 private:
  text::StreamingDecoder decoder_;
  StopStrings stops_;
};

}  // namespace moesaic::engine
