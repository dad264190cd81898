// The record of an interruptible run: its settings, and the units that are on disk.
// docs/contracts/quantize-journal.md is normative.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::quantizer {

inline constexpr char kJournalFile[] = "quantize.journal";

/// A file of JSON lines: a header, then one line for each finished unit. At most one process holds it.
class Journal {
 public:
  struct Entry {
    size_t unit = 0;
    uint64_t checksum = 0;  // XXH3 of the unit's output bytes in the order of their offsets
  };

  /// Opens and locks the journal of `folder`; creates an empty one if there is none. Removes an unfinished
  /// last line.
  static StatusOr<std::unique_ptr<Journal>> Open(const std::string& folder);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  /// Returns the header of a previous run; null if there is none.
  const nlohmann::ordered_json& header() const { return header_; }
  const std::vector<Entry>& entries() const { return entries_; }

  /// Writes the header of a new run.
  Status Begin(const nlohmann::ordered_json& header);
  /// Appends a unit whose bytes were written to the file system. `place` is its location for readers, added
  /// to the line.
  Status Append(const Entry& entry, const nlohmann::ordered_json& place);
  /// Flushes the journal to disk, before a state that relies on its units is saved.
  Status Sync() const;
  /// Removes the file after the run is complete.
  Status Remove();

 private:
  Journal(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  Status Read();
  Status WriteLine(const nlohmann::ordered_json& line);

  std::string path_;
  int fd_;
  int64_t end_ = 0;  // end of the last complete line
  nlohmann::ordered_json header_;
  std::vector<Entry> entries_;
};

/// Describes the first field of `now` that differs from `begun`: "settings: {...} then, {...} now". Empty if
/// nothing differs.
std::string FirstDifference(const nlohmann::ordered_json& begun, const nlohmann::ordered_json& now);

/// Fails if `header` differs from the header of `journal`. The error names the first such field with both
/// values.
Status CheckSameRun(const Journal& journal, const nlohmann::ordered_json& header);

}  // namespace moesaic::quantizer
