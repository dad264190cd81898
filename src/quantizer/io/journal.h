// The record of a run that may be killed: what it is doing, which units are on disk, and where a calibrated
// run has saved what it would have to compute again.
// docs/contracts/quantize-journal.md is the law.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::quantizer {

inline constexpr char kJournalFile[] = "quantize.journal";

/// A file of JSON lines: a header, then one for each finished unit and each saved state. One process holds it
/// at a time.
class Journal {
 public:
  struct Entry {
    size_t unit = 0;
    uint64_t checksum = 0;  // XXH3 of the unit's output bytes in the order of their place in the file
  };

  /// Opens the journal of `folder` and locks it; makes an empty one where there is none. A last line that was
  /// not finished is cut off.
  static StatusOr<std::unique_ptr<Journal>> Open(const std::string& folder);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  /// The header that a run before this one wrote; null when none has.
  const nlohmann::ordered_json& header() const { return header_; }
  const std::vector<Entry>& entries() const { return entries_; }
  /// Lines with a "state", the oldest first, as they are.
  const std::vector<nlohmann::ordered_json>& states() const { return states_; }

  /// Writes the header of a new run.
  Status Begin(const nlohmann::ordered_json& header);
  /// Adds a unit whose bytes were given to the file system. `place` tells readers where: added to the line.
  Status Append(const Entry& entry, const nlohmann::ordered_json& place);
  /// Adds a state: an object with the key "state".
  Status AppendState(const nlohmann::ordered_json& state);
  /// Removes the file: the run is complete.
  Status Remove();

 private:
  Journal(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  Status Read();
  Status WriteLine(const nlohmann::ordered_json& line);

  std::string path_;
  int fd_;
  int64_t end_ = 0;  // of the last whole line
  nlohmann::ordered_json header_;
  std::vector<Entry> entries_;
  std::vector<nlohmann::ordered_json> states_;
};

/// What differs first in `now` from what `begun` has: "settings: {...} then, {...} now"; empty: nothing.
std::string FirstDifference(const nlohmann::ordered_json& begun, const nlohmann::ordered_json& now);

/// Refuses to go on where `header` differs from the one that `journal` began with: names the first field that
/// does, with both values.
Status CheckSameRun(const Journal& journal, const nlohmann::ordered_json& header);

}  // namespace moesaic::quantizer
