// Observes an engine's answer on its way to the client, and corrects the few fields that the proxy owns.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::proxy {

/// Token counts of an answer; -1: not reported.
struct AnswerUsage {
  int64_t prompt_tokens = -1;
  int64_t cached_tokens = -1;
  int64_t completion_tokens = -1;
};

/// Answer of P to its half of a request.
struct PrefillAnswer {
  std::string transfer_params;  ///< text of kv_transfer_params; empty: none, or null
  AnswerUsage usage;
};
StatusOr<PrefillAnswer> ReadPrefillAnswer(std::string_view json);

struct AnswerOptions {
  bool stream = false;  ///< server-sent events; otherwise one JSON object
  /// Replaces usage.prompt_tokens_details.cached_tokens: D of a pair reports blocks that came from P as
  /// cached.
  std::optional<int64_t> cached_tokens = std::nullopt;
};

/// Passes an answer on. Whole lines of a stream leave at once; an incomplete line is held until its end
/// arrives. Bytes that need no correction leave as they came.
class AnswerStream {
 public:
  explicit AnswerStream(const AnswerOptions& options) : options_(options) {}

  /// Consumes bytes of the body and appends bytes for the client to `out`.
  void Push(std::string_view bytes, std::string* out);
  /// The body is complete: appends the held bytes.
  void Finish(std::string* out);
  /// The body ends here although it is incomplete, and an error event follows: drops an incomplete line, and
  /// ends an event of which lines have left.
  void Abandon(std::string* out);

  bool first_token() const { return chunks_ > 0; }
  /// Chunks with text so far, an estimate of the output tokens while the answer runs.
  int64_t chunks() const { return chunks_; }
  const AnswerUsage& usage() const { return usage_; }
  bool saw_end() const { return saw_end_; }  ///< "data: [DONE]", or the end of a JSON answer

 private:
  void Line(std::string_view line, std::string* out);
  void Correct(std::string_view json, std::string* corrected);

  /// Longer lines and answers pass without inspection.
  static constexpr size_t kMaxInspected = 4 << 20;

  AnswerOptions options_;
  std::string held_;
  bool in_event_ = false;  // the last line that left did not end an event
  bool passing_ = false;   // the rest of the held line, or of the answer, passes
  int64_t chunks_ = 0;
  AnswerUsage usage_;
  bool saw_end_ = false;
};

/// An error in the form of OpenAI's API.
std::string ErrorBody(int status, std::string_view type, std::string_view message);
/// The same as an event of a stream that has begun.
std::string ErrorEvent(int status, std::string_view type, std::string_view message);

}  // namespace moesaic::proxy
