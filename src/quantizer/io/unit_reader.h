// Reads the source bytes of a unit from the checkpoint's files into a buffer, without touching its maps.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "quantizer/io/work_plan.h"
#include "runtime/async_file.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {

/// Rows of a unit's pieces, in order. Valid until its buffer is reused.
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

  /// Starts to read the pieces into `buffer`, which must be page-aligned.
  StatusOr<LoadedUnit> Start(const std::vector<ModelItem>& items, std::span<const Piece> pieces,
                             std::span<std::byte> buffer);
  Status Wait(LoadedUnit& unit) { return io_->Wait(unit.ticket); }
  /// Releases the unit's pages in the page cache and all pages of the source's maps. The maps are used for
  /// rows that cannot be cut out, and for the small tensors of a linear.
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
