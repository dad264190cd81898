#include "app/logprob_file.h"

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

namespace moesaic::app {
namespace {

constexpr const char* kFormat = "moesaic-logprobs-1";
constexpr int64_t kMaxHeader = 1 << 20;

nlohmann::json TensorJson(const char* dtype, std::vector<int64_t> shape, int64_t begin, int64_t bytes) {
  return {{"dtype", dtype}, {"shape", std::move(shape)}, {"data_offsets", {begin, begin + bytes}}};
}

double LogSumExp(std::span<const float> values) {
  float greatest = values[0];
  for (const float value : values) greatest = std::max(greatest, value);
  double sum = 0;
  for (const float value : values) sum += std::exp(value - greatest);
  return greatest + std::log(sum);
}

// Reads the header's fields. Throws nlohmann::json exceptions for missing or mistyped ones.
Status ReadHeader(const nlohmann::json& header, int64_t data_bytes, ScoredText* text, std::string* dtype) {
  const nlohmann::json& metadata = header.at("__metadata__");
  if (metadata.at("format") != kFormat) return InvalidArgument("not a file of saved log-probabilities");
  text->window = std::stoi(metadata.at("window").get<std::string>());
  text->stride = std::stoi(metadata.at("stride").get<std::string>());
  const nlohmann::json& tokens = header.at("tokens");
  const nlohmann::json& rows = header.at("logprobs");
  const int64_t count = tokens.at("shape").at(0).get<int64_t>();
  text->rows = rows.at("shape").at(0).get<int64_t>();
  text->vocab = rows.at("shape").at(1).get<int>();
  *dtype = rows.at("dtype").get<std::string>();
  const int64_t element = *dtype == "F16" ? 2 : 4;
  const int64_t least = 1, most = int64_t{1} << 31;
  if ((*dtype != "F16" && *dtype != "F32") || count < least || count > most || text->rows < least ||
      text->rows >= count || text->vocab < least ||
      data_bytes != count * 4 + text->rows * text->vocab * element ||
      rows.at("data_offsets") != nlohmann::json({count * 4, data_bytes})) {
    return DataLoss("shapes and sizes of \"tokens\" and \"logprobs\" do not fit together");
  }
  text->tokens.resize(count);
  return OkStatus();
}

}  // namespace

StatusOr<LogprobWriter> LogprobWriter::Create(const std::string& path, const ScoredText& text,
                                              tensor::DType dtype) {
  LogprobWriter writer;
  ASSIGN_OR_RETURN(writer.file_, runtime::AtomicFile::Create(path));
  writer.dtype_ = dtype;
  writer.row_bytes_ = tensor::BytesOf(dtype, text.vocab);
  const auto token_bytes = static_cast<int64_t>(text.tokens.size() * sizeof(int32_t));
  const nlohmann::json header = {
      {"__metadata__",
       {{"format", kFormat},
        {"window", std::to_string(text.window)},
        {"stride", std::to_string(text.stride)}}},
      {"tokens", TensorJson("I32", {static_cast<int64_t>(text.tokens.size())}, 0, token_bytes)},
      {"logprobs", TensorJson(dtype == tensor::DType::kF16 ? "F16" : "F32", {text.rows, text.vocab},
                              token_bytes, text.rows * writer.row_bytes_)}};
  std::string json = header.dump();
  json.append((8 - json.size() % 8) % 8, ' ');
  const uint64_t length = json.size();
  RETURN_IF_ERROR(writer.file_->Write(&length, sizeof(length)));
  RETURN_IF_ERROR(writer.file_->Write(json.data(), json.size()));
  RETURN_IF_ERROR(writer.file_->Write(text.tokens.data(), token_bytes));
  return writer;
}

void LogprobWriter::Encode(std::span<const float> logprobs, std::byte* out) const {
  if (dtype_ == tensor::DType::kF32) {
    std::memcpy(out, logprobs.data(), logprobs.size_bytes());
    return;
  }
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const uint16_t half = tensor::FloatToHalf(logprobs[i]);
    std::memcpy(out + i * sizeof(half), &half, sizeof(half));
  }
}

StatusOr<LogprobFile> LogprobFile::Open(const std::string& path) {
  LogprobFile saved;
  ASSIGN_OR_RETURN(saved.file_, runtime::MappedFile::Open(path));
  const std::span<const std::byte> bytes = saved.file_->bytes();
  uint64_t length = 0;
  if (bytes.size() >= sizeof(length)) std::memcpy(&length, bytes.data(), sizeof(length));
  if (length == 0 || length > kMaxHeader || length > bytes.size() - sizeof(length)) {
    return InvalidArgument("{}: not a file of saved log-probabilities", path);
  }
  const std::span<const std::byte> data = bytes.subspan(sizeof(length) + length);
  std::string dtype;
  try {
    const char* text = reinterpret_cast<const char*>(bytes.data() + sizeof(length));
    const Status status = ReadHeader(nlohmann::json::parse(text, text + length),
                                     static_cast<int64_t>(data.size()), &saved.text_, &dtype);
    if (!status.ok()) return Annotate(status, path);
  } catch (const std::exception& error) {
    return DataLoss("{}: the header cannot be parsed: {}", path, error.what());
  }
  saved.dtype_ = dtype == "F16" ? tensor::DType::kF16 : tensor::DType::kF32;
  const size_t token_bytes = saved.text_.tokens.size() * sizeof(int32_t);
  std::memcpy(saved.text_.tokens.data(), data.data(), token_bytes);
  saved.rows_ = data.subspan(token_bytes);
  return saved;
}

void LogprobFile::Read(int64_t row, std::span<float> out) const {
  const std::byte* source = rows_.data() + row * tensor::BytesOf(dtype_, text_.vocab);
  if (dtype_ == tensor::DType::kF32) {
    std::memcpy(out.data(), source, out.size_bytes());
  } else {
    for (size_t i = 0; i < out.size(); ++i) {
      uint16_t half;
      std::memcpy(&half, source + i * sizeof(half), sizeof(half));
      out[i] = tensor::HalfToFloat(half);
    }
  }
  const auto normalizer = static_cast<float>(LogSumExp(out));
  for (float& value : out) value -= normalizer;
}

}  // namespace moesaic::app
