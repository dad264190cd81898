// Brings the bytes that a unit needs from the checkpoint's files into a buffer, without touching its maps.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "quantizer/io/work_plan.h"
#include "runtime/async_file.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {

/// What was found of a unit, in the order of its pieces; valid until the buffer it was read to is used again.
struct LoadedUnit {
  std::vector<SourceRows> rows;
  runtime::AsyncFiles::Ticket ticket = 0;
  int64_t read_bytes = 0;
  struct Extent {
    size_t file;
    int64_t offset, bytes;
  };
  std::vector<Extent> extents;
};

class UnitReader {
 public:
  /// `direct`: O_DIRECT, past the page cache.
  static StatusOr<UnitReader> Create(const checkpoint::Checkpoint& source, bool direct,
                                     runtime::AsyncFiles& io);
  ~UnitReader();
  UnitReader(UnitReader&& other) noexcept;
  UnitReader& operator=(UnitReader&&) = delete;

  /// Starts to read the pieces into `buffer`, whose start is page-aligned.
  StatusOr<LoadedUnit> Start(const std::vector<ModelItem>& items, std::span<const Piece> pieces,
                             std::span<std::byte> buffer);
  Status Wait(LoadedUnit& unit) { return io_->Wait(unit.ticket); }
  /// Gives back the memory that the unit's pages take in the page cache, and all that the source's maps take:
  /// rows that are read through them, and the small tensors beside a weight that finding it looks at.
  void Forget(const LoadedUnit& unit) const;

 private:
  struct File {
    std::string path;
    int fd = -1;
    const std::byte* mapped = nullptr;
    int64_t bytes = 0;
  };
  UnitReader(const checkpoint::Checkpoint& source, bool direct, runtime::AsyncFiles& io)
      : source_(&source), direct_(direct), io_(&io) {}
  Status OpenFile(size_t file);

  const checkpoint::Checkpoint* source_;
  bool direct_;
  runtime::AsyncFiles* io_;
  std::vector<File> files_;
  std::map<const std::byte*, size_t> by_address_;
};

}  // namespace moesaic::quantizer
