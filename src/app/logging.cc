#include "app/logging.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "app/output.h"

namespace moesaic::app {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kServeLogger = "serve";
constexpr const char* kAccessLogger = "access";  // messages are formatted as members of a JSON object

std::string Quoted(std::string_view text) {
  return Json(text).dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string_view LevelName(spdlog::level::level_enum level) {
  const auto name = spdlog::level::to_string_view(level);
  return {name.data(), name.size()};
}

// Formats one JSON object per line.
class JsonFormatter : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) override {
    const std::time_t seconds = std::chrono::system_clock::to_time_t(message.time);
    const auto millis =
        std::chrono::duration_cast<std::chrono::milliseconds>(message.time.time_since_epoch()).count() % 1000;
    std::tm utc{};
    gmtime_r(&seconds, &utc);
    const std::string_view text(message.payload.data(), message.payload.size());
    const bool members =
        std::string_view(message.logger_name.data(), message.logger_name.size()) == kAccessLogger;
    fmt::format_to(std::back_inserter(line), "{{\"time\":\"{:%Y-%m-%dT%H:%M:%S}.{:03}Z\",\"level\":\"{}\",",
                   utc, millis, LevelName(message.level));
    if (members) {
      fmt::format_to(std::back_inserter(line), "{}}}\n", text);
    } else {
      fmt::format_to(std::back_inserter(line), "\"message\":{}}}\n", Quoted(text));
    }
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<JsonFormatter>(); }
};

bool IsControl(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return (byte < 0x20 && c != '\t') || byte == 0x7F;
}

// Replaces control characters of ASCII, and those that UTF-8 writes as C2 80 to C2 9F, by escapes.
std::string WithoutControls(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool wide = text[i] == '\xC2' && i + 1 < text.size() && (text[i + 1] & 0xE0) == 0x80;
    if (wide) ++i;
    if (text[i] == '\n') {
      shown += "\\n";
    } else if (wide || IsControl(text[i])) {
      shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
    } else {
      shown += text[i];
    }
  }
  return shown;
}

// Formats lines in spdlog's form. Messages quote texts of clients, which must not forge lines or control the
// terminal.
class TextFormatter : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) override {
    const std::string text = WithoutControls({message.payload.data(), message.payload.size()});
    spdlog::details::log_msg shown = message;
    shown.payload = text;
    pattern_.format(shown, line);
    message.color_range_start = shown.color_range_start;
    message.color_range_end = shown.color_range_end;
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<TextFormatter>(); }

 private:
  spdlog::pattern_formatter pattern_;
};

Status OpenAppending(const std::string& path, int* file) {
  *file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
  if (*file >= 0) return OkStatus();
  return IoError("--log-file {}: {}", path, std::generic_category().message(errno));
}

// A file that can be reopened by its path, so that logrotate does not need copytruncate.
class FileSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  FileSink(std::string path, int file) : path_(std::move(path)), file_(file) {}
  ~FileSink() override { close(file_); }

  Status Reopen() {
    int file = -1;
    RETURN_IF_ERROR(OpenAppending(path_, &file));
    const std::lock_guard lock(mutex_);
    close(std::exchange(file_, file));
    return OkStatus();
  }

 private:
  // Writes each line with one call, so that lines of several processes stay intact. A full disk loses lines
  // but must not stop the server.
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    WriteAll(file_, {line.data(), line.size()});
  }
  void flush_() override {}

  const std::string path_;
  int file_;
};

// True for periodic requests of probes, scrapers and the web page.
bool IsPolled(const std::string& path) {
  constexpr std::array<std::string_view, 5> kPolled = {"/health", "/ready", "/metrics", "/state", "/version"};
  return std::find(kPolled.begin(), kPolled.end(), path) != kPolled.end();
}

std::string TextLine(const server::AccessRecord& record) {
  std::string line =
      fmt::format("{} {} {} {} {:.3f}s request={}", record.peer.empty() ? "-" : record.peer,
                  record.method.empty() ? "-" : record.method, record.path.empty() ? "-" : record.path,
                  record.status, record.seconds, record.request_id);
  if (!record.trace_id.empty()) line += fmt::format(" trace={}", record.trace_id);
  if (!record.key.empty()) line += fmt::format(" key={}", record.key);
  if (!record.refused.empty()) line += fmt::format(" refused={}", Quoted(record.refused));
  return line;
}

std::string JsonMembers(const server::AccessRecord& record) {
  Json json = {{"event", "request"},
               {"peer", record.peer},
               {"method", record.method},
               {"path", record.path},
               {"status", record.status},
               {"seconds", record.seconds},
               {"request_bytes", record.request_bytes},
               {"request_id", record.request_id}};
  if (!record.trace_id.empty()) json["trace_id"] = record.trace_id;
  if (!record.key.empty()) json["key"] = record.key;
  if (!record.refused.empty()) json["refused"] = record.refused;
  const std::string object = json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  return object.substr(1, object.size() - 2);
}

}  // namespace

StatusOr<ServerLog> OpenLog(const LogOptions& options) {
  ServerLog log;
  spdlog::sink_ptr sink;
  if (options.file.empty()) {
    sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  } else {
    int file = -1;
    RETURN_IF_ERROR(OpenAppending(options.file, &file));
    auto appending = std::make_shared<FileSink>(options.file, file);
    log.reopen = [appending] { return appending->Reopen(); };
    sink = std::move(appending);
  }
  if (options.format == "json") {
    sink->set_formatter(std::make_unique<JsonFormatter>());
  } else {
    sink->set_formatter(std::make_unique<TextFormatter>());
  }
  log.logger = std::make_shared<spdlog::logger>(kServeLogger, std::move(sink));
  log.logger->set_level(spdlog::level::from_str(options.level));
  return log;
}

server::AccessLog MakeAccessLog(const LogOptions& options, const ServerLog& log) {
  if (options.access == "off") return {};
  const bool json = options.format == "json";
  const bool polled_too = options.access == "all";
  // Without JSON the lines carry the name of the server's log, as its other lines do.
  auto logger = std::make_shared<spdlog::logger>(json ? kAccessLogger : kServeLogger,
                                                 log.logger->sinks().begin(), log.logger->sinks().end());
  logger->set_level(log.logger->level());
  return [logger = std::move(logger), json, polled_too](const server::AccessRecord& record) {
    const bool expected = record.status < 400 || record.status == 503;  // 503: loading or draining
    if (!polled_too && expected && IsPolled(record.path)) return;
    logger->info(json ? JsonMembers(record) : TextLine(record));
  };
}

}  // namespace moesaic::app
