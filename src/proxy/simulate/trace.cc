#include "proxy/simulate/trace.h"

#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_set>

namespace moesaic::proxy {
namespace {

using TraceJson = nlohmann::json;

constexpr uint32_t kMooncakeBlock = 512;
constexpr uint32_t kSessionBlock = 64;
constexpr uint32_t kTextBlock = 64;
constexpr size_t kBytesPerToken = 4;
constexpr uint32_t kMaxTokens = 1 << 24;
constexpr size_t kMaxFileBytes = size_t{2} << 30;

uint64_t Mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return (x ^ x >> 31) | 1;
}

uint64_t HashText(std::string_view text, uint64_t seed) {
  uint64_t hash = Mixed(seed);
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ULL;
  return Mixed(hash);
}

StatusOr<std::string> ReadWhole(const std::string& path) {
  const gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) return NotFound("{}: the trace cannot be opened", path);
  std::string bytes;
  std::vector<char> buffer(1 << 20);
  int got = 0;
  while ((got = gzread(file, buffer.data(), static_cast<unsigned>(buffer.size()))) > 0 &&
         bytes.size() < kMaxFileBytes)
    bytes.append(buffer.data(), static_cast<size_t>(got));
  const bool failed = got < 0;
  gzclose(file);
  if (failed) return DataLoss("{}: the gzipped data are damaged", path);
  if (bytes.size() >= kMaxFileBytes)
    return ResourceExhausted("{}: a trace has at most {} bytes", path, kMaxFileBytes);
  return bytes;
}

// Calls fn(line, number) for each line that is not empty.
template <typename Fn>
Status ForEachLine(std::string_view text, Fn fn) {
  int number = 0;
  while (!text.empty()) {
    ++number;
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty()) continue;
    RETURN_IF_ERROR(fn(line, number));
  }
  return OkStatus();
}

StatusOr<uint32_t> TokensOf(const TraceJson& row, const char* field, const std::string& where) {
  const auto it = row.find(field);
  if (it == row.end() || !it->is_number()) return DataLoss("{}: no number \"{}\"", where, field);
  const double value = it->get<double>();
  if (!(value >= 0 && value <= kMaxTokens)) return DataLoss("{}: \"{}\" is {}", where, field, value);
  return static_cast<uint32_t>(value);
}

StatusOr<TraceJson> ParsedLine(std::string_view line, const std::string& where) {
  TraceJson row = TraceJson::parse(line, nullptr, false);
  if (row.is_discarded() || !row.is_object()) return DataLoss("{}: no JSON object", where);
  return row;
}

Status AddMooncake(const TraceJson& row, const std::string& where, Trace& trace) {
  TraceRequest request;
  const auto time = row.find("timestamp");
  if (time == row.end() || !time->is_number()) return DataLoss("{}: no number \"timestamp\"", where);
  request.arrival = static_cast<Nanos>(time->get<double>() * kMillisecond);
  ASSIGN_OR_RETURN(request.prompt_tokens, TokensOf(row, "input_length", where));
  ASSIGN_OR_RETURN(request.output_tokens, TokensOf(row, "output_length", where));
  const auto ids = row.find("hash_ids");
  if (ids == row.end() || !ids->is_array()) return DataLoss("{}: no array \"hash_ids\"", where);
  for (const TraceJson& id : *ids) {
    if (!id.is_number_integer()) return DataLoss("{}: a hash id is no integer", where);
    request.keys.push_back(Mixed(id.get<uint64_t>()));
  }
  trace.requests.push_back(std::move(request));
  return OkStatus();
}

Status AddSession(const TraceJson& row, const std::string& where, Trace& trace) {
  const uint64_t session = HashText(row.value("id", std::string()), 7);
  const auto requests = row.find("requests");
  if (requests == row.end() || !requests->is_array()) return DataLoss("{}: no array \"requests\"", where);
  for (const TraceJson& turn : *requests) {
    TraceRequest request;
    if (!turn.is_object() || !turn.contains("t") || !turn["t"].is_number())
      return DataLoss("{}: a turn without \"t\"", where);
    request.arrival = static_cast<Nanos>(turn["t"].get<double>() * kSecond);
    request.session = session;
    ASSIGN_OR_RETURN(request.prompt_tokens, TokensOf(turn, "in", where));
    ASSIGN_OR_RETURN(request.output_tokens, TokensOf(turn, "out", where));
    const auto runs = turn.find("hash_runs");
    if (runs == turn.end() || !runs->is_array()) return DataLoss("{}: a turn without \"hash_runs\"", where);
    for (const TraceJson& run : *runs) {
      if (!run.is_array() || run.size() != 2 || !run[0].is_number_integer() || !run[1].is_number_unsigned())
        return DataLoss("{}: a hash run is no pair of integers", where);
      const uint64_t first = run[0].get<uint64_t>(), count = run[1].get<uint64_t>();
      if (request.keys.size() + count > kMaxTokens / kSessionBlock)
        return DataLoss("{}: too many hash ids", where);
      for (uint64_t i = 0; i < count; ++i) request.keys.push_back(Mixed(session ^ Mixed(first + i)));
    }
    trace.requests.push_back(std::move(request));
  }
  return OkStatus();
}

// "2023-11-16 18:17:03.9799600" to nanoseconds within its month.
StatusOr<Nanos> TimeOf(std::string_view text, const std::string& where) {
  int year = 0, month = 0, day = 0, hour = 0, minute = 0;
  double second = 0;
  if (std::sscanf(std::string(text).c_str(), "%d-%d-%d %d:%d:%lf", &year, &month, &day, &hour, &minute,
                  &second) != 6)
    return DataLoss("{}: no time: {}", where, text);
  return ((day * 24LL + hour) * 60 + minute) * 60 * kSecond + static_cast<Nanos>(second * kSecond);
}

Status AddAzure(std::string_view line, const std::string& where, Trace& trace) {
  const size_t first = line.find(','), second = line.find(',', first + 1);
  if (first == std::string_view::npos || second == std::string_view::npos)
    return DataLoss("{}: three columns are expected", where);
  TraceRequest request;
  ASSIGN_OR_RETURN(request.arrival, TimeOf(line.substr(0, first), where));
  const auto number = [&](std::string_view text, uint32_t& value) {
    return std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc() &&
           value <= kMaxTokens;
  };
  if (!number(line.substr(first + 1, second - first - 1), request.prompt_tokens) ||
      !number(line.substr(second + 1), request.output_tokens)) {
    return DataLoss("{}: no numbers of tokens", where);
  }
  trace.requests.push_back(std::move(request));
  return OkStatus();
}

std::string ContentOf(const TraceJson& message) {
  const auto it = message.find("content");
  if (it == message.end()) return "";
  return it->is_string() ? it->get<std::string>() : it->dump();
}

// One request per answer of the assistant, with everything before it as the prompt.
Status AddTrajectory(std::string_view text, const std::string& where, Nanos start, Trace& trace) {
  const TraceJson run = TraceJson::parse(text, nullptr, false);
  const auto history = run.is_object() ? run.find("history") : run.end();
  if (run.is_discarded() || !run.is_object() || history == run.end() || !history->is_array())
    return DataLoss("{}: no SWE-agent trajectory with a \"history\"", where);
  const uint64_t session = HashText(where, 11);
  std::string prompt;
  std::vector<uint64_t> keys;
  Nanos time = start;
  for (const TraceJson& message : *history) {
    if (!message.is_object()) return DataLoss("{}: a message is no object", where);
    const std::string role = message.value("role", std::string("user"));
    const std::string content = ContentOf(message);
    if (role == "assistant" && !prompt.empty()) {
      constexpr size_t kBlockBytes = kTextBlock * kBytesPerToken;
      while ((keys.size() + 1) * kBlockBytes <= prompt.size()) {
        const uint64_t parent = keys.empty() ? 1 : keys.back();
        keys.push_back(
            HashText(std::string_view(prompt).substr(keys.size() * kBlockBytes, kBlockBytes), parent));
      }
      TraceRequest request;
      request.arrival = time;
      request.session = session;
      request.prompt_tokens = static_cast<uint32_t>(prompt.size() / kBytesPerToken) + 1;
      request.output_tokens = static_cast<uint32_t>(content.size() / kBytesPerToken) + 1;
      request.keys = keys;
      time += 2 * kSecond + request.output_tokens * 20 * kMillisecond;
      trace.requests.push_back(std::move(request));
    }
    prompt.append("<|").append(role).append("|>").append(content);
  }
  return OkStatus();
}

// Members of a tar archive (ustar): 512-byte headers with name, octal size and type.
Status AddArchive(std::string_view bytes, const std::string& path, Trace& trace) {
  constexpr size_t kRecord = 512;
  Nanos start = 0;
  for (size_t at = 0; at + kRecord <= bytes.size() && bytes[at] != 0;) {
    const std::string_view header = bytes.substr(at, kRecord);
    const std::string name(header.data(), strnlen(header.data(), 100));
    const std::string_view octal = header.substr(124, 11);
    size_t size = 0;
    for (const char c : octal) {
      if (c >= '0' && c <= '7') size = size * 8 + static_cast<size_t>(c - '0');
    }
    if (size > bytes.size() - at - kRecord) return DataLoss("{}: the member {} is cut off", path, name);
    const bool is_file = header[156] == '0' || header[156] == 0;
    const bool is_long_name = header[156] == 'L';  // GNU: the next member's name
    const std::string_view data = bytes.substr(at + kRecord, size);
    // A trajectory is a JSON object; licences and demonstrations in YAML are not.
    if (is_file && !is_long_name && !data.empty() && data.front() == '{') {
      RETURN_IF_ERROR(AddTrajectory(data, path + ":" + std::to_string(at), start, trace));
      start += 7 * kSecond;
    }
    at += kRecord + (size + kRecord - 1) / kRecord * kRecord;
  }
  return OkStatus();
}

Status ReadLines(std::string_view text, const std::string& path, Trace& trace) {
  return ForEachLine(text, [&](std::string_view line, int number) -> Status {
    const std::string where = fmt::format("{}:{}", path, number);
    ASSIGN_OR_RETURN(const TraceJson row, ParsedLine(line, where));
    if (row.contains("hash_ids")) {
      trace.block_size = kMooncakeBlock;
      return AddMooncake(row, where, trace);
    }
    if (row.contains("requests")) {
      trace.block_size = kSessionBlock;
      return AddSession(row, where, trace);
    }
    return DataLoss("{}: neither a Mooncake request nor a session", where);
  });
}

}  // namespace

StatusOr<Trace> ReadTrace(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadWhole(path));
  Trace trace;
  trace.name = std::filesystem::path(path).filename().string();
  trace.name = trace.name.substr(0, trace.name.find('.'));
  const std::string_view text = bytes;
  if (text.size() > 262 && text.substr(257, 5) == "ustar") {
    trace.block_size = kTextBlock;
    RETURN_IF_ERROR(AddArchive(text, path, trace));
  } else if (text.starts_with("TIMESTAMP,")) {
    RETURN_IF_ERROR(ForEachLine(text, [&](std::string_view line, int number) {
      return number == 1 ? OkStatus() : AddAzure(line, fmt::format("{}:{}", path, number), trace);
    }));
  } else if (path.ends_with(".traj") || path.ends_with(".traj.gz")) {
    trace.block_size = kTextBlock;
    RETURN_IF_ERROR(AddTrajectory(text, path, 0, trace));
  } else {
    RETURN_IF_ERROR(ReadLines(text, path, trace));
  }
  std::erase_if(trace.requests, [](const TraceRequest& r) { return r.prompt_tokens == 0; });
  if (trace.requests.empty()) return DataLoss("{}: the trace has no requests", path);
  for (TraceRequest& request : trace.requests) {
    request.output_tokens = std::max<uint32_t>(request.output_tokens, 1);
    // The last block of a prompt is often partial and cannot be shared.
    request.keys.resize(std::min<size_t>(request.keys.size(), request.prompt_tokens / trace.block_size));
  }
  std::stable_sort(trace.requests.begin(), trace.requests.end(),
                   [](const TraceRequest& a, const TraceRequest& b) { return a.arrival < b.arrival; });
  const Nanos first = trace.requests.front().arrival;
  for (TraceRequest& request : trace.requests) request.arrival -= first;
  return trace;
}

uint64_t Trace::prompt_tokens() const {
  uint64_t sum = 0;
  for (const TraceRequest& request : requests) sum += request.prompt_tokens;
  return sum;
}

uint64_t Trace::output_tokens() const {
  uint64_t sum = 0;
  for (const TraceRequest& request : requests) sum += request.output_tokens;
  return sum;
}

std::vector<uint32_t> Trace::ReusableTokens() const {
  std::unordered_set<uint64_t> seen;
  std::vector<uint32_t> tokens;
  tokens.reserve(requests.size());
  for (const TraceRequest& request : requests) {
    size_t known = 0;
    while (known < request.keys.size() && seen.contains(request.keys[known])) ++known;
    // The last token of a prompt is always computed.
    tokens.push_back(
        static_cast<uint32_t>(std::min<uint64_t>(known * block_size, request.prompt_tokens - 1)));
    seen.insert(request.keys.begin(), request.keys.end());
  }
  return tokens;
}

double Trace::reusable() const {
  uint64_t reused = 0;
  for (const uint32_t tokens : ReusableTokens()) reused += tokens;
  return static_cast<double>(reused) / static_cast<double>(std::max<uint64_t>(prompt_tokens(), 1));
}

void Trace::ScaleTo(double requests_per_second) {
  if (span() == 0) return;
  const double factor =
      static_cast<double>(requests.size()) / requests_per_second / (static_cast<double>(span()) / kSecond);
  for (TraceRequest& request : requests)
    request.arrival = static_cast<Nanos>(static_cast<double>(request.arrival) * factor);
}

void Trace::Replicate(int copies) {
  const size_t count = requests.size();
  const Nanos whole = span();
  for (int copy = 1; copy < copies; ++copy) {
    for (size_t i = 0; i < count; ++i) {
      TraceRequest request = requests[i];
      // Shifted around the end, so that the copies together have the same span.
      request.arrival = (request.arrival + whole / copies * copy) % (whole + 1);
      if (request.session != 0) request.session = Mixed(request.session + static_cast<uint64_t>(copy));
      for (uint64_t& key : request.keys) key = Mixed(key ^ Mixed(static_cast<uint64_t>(copy)));
      requests.push_back(std::move(request));
    }
  }
  std::stable_sort(requests.begin(), requests.end(),
                   [](const TraceRequest& a, const TraceRequest& b) { return a.arrival < b.arrival; });
}

void Trace::Truncate(size_t count) {
  if (requests.size() > count) requests.resize(count);
}

}  // namespace moesaic::proxy
