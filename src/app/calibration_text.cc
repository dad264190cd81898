#include "app/calibration_text.h"

#include <algorithm>
#include <optional>
#include <sstream>

#include "app/chat_request.h"
#include "app/input.h"
#include "app/model_text.h"
#include "models/model_info.h"
#include "quantizer/calibrate/calibration_tokens.h"

namespace moesaic::app {
namespace {

using Sequences = std::vector<std::vector<int32_t>>;

// Splits texts into sequences until there are enough tokens.
class Cutter {
 public:
  explicit Cutter(const CalibrationFile& file) : length_(file.sequence_length), left_(file.max_tokens) {}

  bool full() const { return left_ < 2; }
  void Add(const std::vector<int32_t>& ids) {
    for (size_t first = 0; first + 1 < ids.size() && !full(); first += static_cast<size_t>(length_)) {
      const auto count = std::min<int64_t>({std::ssize(ids) - static_cast<int64_t>(first), length_, left_});
      if (count < 2) return;
      sequences_.emplace_back(ids.begin() + static_cast<int64_t>(first),
                              ids.begin() + static_cast<int64_t>(first) + count);
      left_ -= count;
    }
  }
  Sequences Take() { return std::move(sequences_); }

 private:
  int64_t length_, left_;
  Sequences sequences_;
};

// `chat` is null if the model has no template.
StatusOr<std::string> TextOf(const std::string& line, const ModelText& model,
                             const server::PromptTemplate* chat) {
  const server::Json record = server::ParseJson(line).value_or(server::Json());
  if (record.is_object() && record.contains("text") && record["text"].is_string()) {
    return record["text"].get<std::string>();
  }
  if (!record.is_object() || !record.contains("messages") || !record["messages"].is_array()) {
    return InvalidArgument("a line must be a JSON object with a \"text\" or \"messages\", found {}",
                           line.substr(0, 80));
  }
  RETURN_IF_ERROR(model.chat.status());
  return RenderRequest(*chat, record, /*add_generation_prompt=*/false);
}

Status ReadLines(const CalibrationFile& file, const std::string& contents, const ModelText& model,
                 Cutter* cutter) {
  std::optional<server::PromptTemplate> chat;
  if (model.chat.ok()) chat.emplace(*model.chat);
  std::istringstream lines(contents);
  std::string line;
  for (int number = 1; !cutter->full() && std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = fmt::format("{}:{}", file.path, number);
    const StatusOr<std::string> text = TextOf(line, model, chat ? &*chat : nullptr);
    if (!text.ok()) return Annotate(text.status(), where);
    const StatusOr<std::vector<int32_t>> ids = model.tokenizer->Encode(*text, /*add_special=*/false);
    if (!ids.ok()) return Annotate(ids.status(), where);
    cutter->Add(*ids);
  }
  return OkStatus();
}

}  // namespace

StatusOr<Sequences> ReadCalibrationFile(const CalibrationFile& file, const checkpoint::Checkpoint& source) {
  const auto ends_with = [&](const char* ending) { return file.path.ends_with(ending); };
  Cutter cutter(file);
  if (ends_with(".safetensors")) {
    ASSIGN_OR_RETURN(const models::DecoderSpec spec,
                     models::SpecFromConfig(source.config(), models::ConfigFile(source)));
    ASSIGN_OR_RETURN(const Sequences stored, quantizer::ReadCalibrationTokens(
                                                 file.path, spec.vocab, static_cast<int>(file.max_tokens)));
    for (const std::vector<int32_t>& ids : stored) cutter.Add(ids);
  } else {
    ASSIGN_OR_RETURN(const std::string contents, ReadInput(file.path));
    ASSIGN_OR_RETURN(const ModelText model, OpenModelText(source.path()));
    RETURN_IF_ERROR(model.tokenizer.status());
    if (ends_with(".jsonl")) {
      RETURN_IF_ERROR(ReadLines(file, contents, model, &cutter));
    } else {
      const StatusOr<std::vector<int32_t>> ids = model.tokenizer->Encode(contents, /*add_special=*/false);
      if (!ids.ok()) return Annotate(ids.status(), file.path);
      cutter.Add(*ids);
    }
  }
  Sequences sequences = cutter.Take();
  if (sequences.empty()) return InvalidArgument("{}: the file has no text of 2 tokens or more", file.path);
  return sequences;
}

}  // namespace moesaic::app
