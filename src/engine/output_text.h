// The text of one request's output as it grows: decoded token by token, cut at stop strings.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/stop_strings.h"
#include "text/tokenizer.h"

namespace moesaic::engine {

/// One thread at a time. The pieces put together are the answer.
class OutputText {
 public:
  /// `tokenizer` is shared, not borrowed.
  OutputText(const text::Tokenizer& tokenizer, bool skip_special, std::vector<std::string> stops);

  /// The text that `id` settles; empty while a character or a stop string may be incomplete.
  StatusOr<std::string> Push(int32_t id);
  /// What was held back, once no more tokens come.
  StatusOr<std::string> Finish();
  bool stopped() const { return stops_.matched(); }  ///< a stop string was met: cancel the request

 private:
  text::StreamingDecoder decoder_;
  StopStrings stops_;
};

}  // namespace moesaic::engine
