#include "quantizer/io/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "checkpoint/json_text.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;

StatusOr<std::string> ReadAll(int fd, const std::string& path) {
  std::string text;
  char block[1 << 16];
  while (true) {
    const ssize_t bytes = pread(fd, block, sizeof(block), static_cast<off_t>(text.size()));
    if (bytes < 0) return IoError("{}: cannot be read: {}", path, std::strerror(errno));
    if (bytes == 0) return text;
    text.append(block, static_cast<size_t>(bytes));
  }
}

StatusOr<Journal::Entry> ParseEntry(const ordered_json& line, size_t number, const std::string& path) {
  const auto unit = line.find("unit"), checksum = line.find("xxh3");
  if (unit != line.end() && unit->is_number_unsigned() && checksum != line.end() && checksum->is_string()) {
    const auto text = checksum->get<std::string>();
    char* end = nullptr;
    const uint64_t value = std::strtoull(text.c_str(), &end, 16);
    if (text.size() == 16 && *end == '\0') return Journal::Entry{unit->get<size_t>(), value};
  }
  return DataLoss("{}: line {} must hold \"unit\" and \"xxh3\", found {}; empty the folder to start again",
                  path, number, checkpoint::ShownJson(nlohmann::json(line)));
}

}  // namespace

StatusOr<std::unique_ptr<Journal>> Journal::Open(const std::string& folder) {
  const std::string path = folder + "/" + kJournalFile;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return IoError("{}: cannot be opened: {}", path, std::strerror(errno));
  std::unique_ptr<Journal> journal(new Journal(path, fd));
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return InvalidArgument("{}: another process is writing to this folder", path);
  }
  RETURN_IF_ERROR(journal->Read());
  return journal;
}

Journal::~Journal() { close(fd_); }

Status Journal::Read() {
  ASSIGN_OR_RETURN(const std::string text, ReadAll(fd_, path_));
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    const std::string line = text.substr(begin, end - begin);
    const size_t number = header_.is_null() ? 1 : entries_.size() + 2;
    ordered_json value;
    if (checkpoint::IsShallowJson(line)) value = ordered_json::parse(line, nullptr, false);
    if (!value.is_object()) {
      return DataLoss("{}: line {} is not a JSON object; empty the folder to start again", path_, number);
    }
    if (header_.is_null()) {
      header_ = std::move(value);
    } else {
      ASSIGN_OR_RETURN(const Entry entry, ParseEntry(value, number, path_));
      entries_.push_back(entry);
    }
    begin = end + 1;
  }
  end_ = static_cast<int64_t>(begin);
  if (begin != text.size() && ftruncate(fd_, end_) != 0) {
    return IoError("{}: cannot truncate an unfinished line: {}", path_, std::strerror(errno));
  }
  return OkStatus();
}

Status Journal::WriteLine(const ordered_json& line) {
  const std::string text = line.dump() + '\n';
  const ssize_t written = pwrite(fd_, text.data(), text.size(), end_);
  if (written == static_cast<ssize_t>(text.size())) {
    end_ += written;
    return OkStatus();
  }
  const std::string reason = written < 0 ? std::strerror(errno) : "No space left on device";
  // A partly written line would be removed by the next run as well.
  if (ftruncate(fd_, end_) != 0) return IoError("{}: writing failed: {}", path_, reason);
  return IoError("{}: writing failed: {}; the journal keeps the finished units", path_, reason);
}

Status Journal::Begin(const ordered_json& header) {
  RETURN_IF_ERROR(WriteLine(header));
  header_ = header;
  return OkStatus();
}

Status Journal::Append(const Entry& entry, const ordered_json& place) {
  ordered_json line = {{"unit", entry.unit}};
  line.update(place);
  line["xxh3"] = fmt::format("{:016x}", entry.checksum);
  return WriteLine(line);
}

Status Journal::Sync() const {
  if (fdatasync(fd_) == 0) return OkStatus();
  return IoError("{}: cannot be flushed to disk: {}", path_, std::strerror(errno));
}

Status Journal::Remove() {
  if (unlink(path_.c_str()) == 0) return OkStatus();
  return IoError("{}: cannot be removed: {}", path_, std::strerror(errno));
}

std::string FirstDifference(const ordered_json& begun, const ordered_json& now) {
  for (const auto& [key, value] : now.items()) {
    const auto found = begun.find(key);
    if (found != begun.end() && *found == value) continue;
    return fmt::format("{}: {} then, {} now", key,
                       found == begun.end() ? "none" : checkpoint::ShownJson(nlohmann::json(*found)),
                       checkpoint::ShownJson(nlohmann::json(value)));
  }
  return "";
}

Status CheckSameRun(const Journal& journal, const ordered_json& header) {
  const std::string difference = FirstDifference(journal.header(), header);
  if (difference.empty()) return OkStatus();
  return InvalidArgument(
      "the folder has a run that started with another {}; repeat the command it started with, or empty "
      "the folder",
      difference);
}

}  // namespace moesaic::quantizer
