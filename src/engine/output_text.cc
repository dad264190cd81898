#include "engine/output_text.h"

#include <utility>

namespace moesaic::engine {

OutputText::OutputText(const text::Tokenizer& tokenizer, bool skip_special, std::vector<std::string> stops)
    : decoder_(tokenizer, skip_special), stops_(std::move(stops)) {}

StatusOr<std::string> OutputText::Push(int32_t id) {
  ASSIGN_OR_RETURN(const std::string piece, decoder_.Push(id));
  return stops_.Feed(piece);
}

StatusOr<std::string> OutputText::Finish() {
  ASSIGN_OR_RETURN(const std::string piece, decoder_.Finish());
  std::string text = stops_.Feed(piece);
  return text + stops_.Finish();
}

}  // namespace moesaic::engine
