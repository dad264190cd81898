#include "quantizer/io/unit_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::quantizer {
namespace {

using runtime::kDirectBlock;

// A part of a tensor to read.
struct Wanted {
  size_t file;
  int64_t offset, bytes;
  checkpoint::TensorEntry* part;
};

}  // namespace

StatusOr<UnitReader> UnitReader::Create(const checkpoint::Checkpoint& source, bool direct,
                                        runtime::AsyncFiles& io) {
  UnitReader reader(source, direct, io);
  for (const auto& mapped : source.files()) {
    const auto bytes = static_cast<int64_t>(mapped->bytes().size());
    reader.by_address_[mapped->bytes().data()] = reader.files_.size();
    reader.files_.push_back({mapped->path(), -1, mapped->bytes().data(), bytes});
  }
  return reader;
}

UnitReader::UnitReader(UnitReader&& other) noexcept
    : source_(other.source_),
      direct_(other.direct_),
      io_(other.io_),
      files_(std::exchange(other.files_, {})),
      by_address_(std::move(other.by_address_)) {}

UnitReader::~UnitReader() {
  for (const File& file : files_) {
    if (file.fd >= 0) close(file.fd);
  }
}

Status UnitReader::OpenFile(size_t index) {
  File& file = files_[index];
  if (file.fd >= 0) return OkStatus();
  file.fd = open(file.path.c_str(), O_RDONLY | O_CLOEXEC | (direct_ ? O_DIRECT : 0));
  struct stat info = {};
  if (file.fd >= 0 && fstat(file.fd, &info) == 0 && info.st_size != file.bytes) {
    return DataLoss("{}: the file ends at byte {}, but had {} when it was opened", file.path, info.st_size,
                    file.bytes);
  }
  if (file.fd >= 0) return OkStatus();
  if (direct_ && errno == EINVAL) {
    return Unimplemented("{}: its file system does not take direct reads; use --io buffered", file.path);
  }
  return IoError("{}: cannot be opened: {}", file.path, std::strerror(errno));
}

StatusOr<LoadedUnit> UnitReader::Start(const std::vector<ModelItem>& items, std::span<const Piece> pieces,
                                       std::span<std::byte> buffer) {
  LoadedUnit unit;
  for (const Piece& piece : pieces) {
    ASSIGN_OR_RETURN(SourceRows rows, SourceRows::Find(*source_, items[piece.item], piece.first, piece.rows));
    unit.rows.push_back(std::move(rows));
  }
  std::vector<Wanted> wanted;
  for (SourceRows& rows : unit.rows) {
    for (checkpoint::TensorEntry& part : rows.parts()) {
      auto file = by_address_.upper_bound(part.bytes.data());
      if (file == by_address_.begin()) continue;  // memory of the caller of FromMemory
      const size_t index = (--file)->second;
      wanted.push_back(
          {index, part.bytes.data() - files_[index].mapped, static_cast<int64_t>(part.bytes.size()), &part});
    }
  }
  std::ranges::sort(wanted, [](const Wanted& a, const Wanted& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  std::vector<runtime::Transfer> transfers;
  int64_t used = 0;  // bytes of the buffer in use
  for (size_t i = 0; i < wanted.size();) {
    // Parts that are adjacent or share a block form one extent.
    const int64_t align = direct_ ? kDirectBlock : 1;
    const int64_t begin = wanted[i].offset / align * align;
    int64_t needed = begin, end = begin;
    const size_t first = i;
    for (; i < wanted.size() && wanted[i].file == wanted[first].file &&
           wanted[i].offset <= end + (i == first ? align : 0);
         ++i) {
      needed = std::max(needed, wanted[i].offset + wanted[i].bytes);
      end = std::max(end, base::RoundUp(needed, align));
    }
    MOESAIC_CHECK_LE(used + end - begin, static_cast<int64_t>(buffer.size()));
    RETURN_IF_ERROR(OpenFile(wanted[first].file));
    const File& file = files_[wanted[first].file];
    const auto bytes = buffer.subspan(static_cast<size_t>(used), static_cast<size_t>(end - begin));
    transfers.push_back(
        {.fd = file.fd, .offset = begin, .bytes = bytes, .path = &file.path, .needed = needed - begin});
    for (size_t j = first; j < i; ++j) {
      wanted[j].part->bytes =
          bytes.subspan(static_cast<size_t>(wanted[j].offset - begin), static_cast<size_t>(wanted[j].bytes));
    }
    unit.extents.push_back({wanted[first].file, begin, end - begin});
    unit.read_bytes += end - begin;
    used += base::RoundUp(end - begin, kDirectBlock);
  }
  unit.ticket = io_->Submit(transfers);
  return unit;
}

void UnitReader::Forget(const LoadedUnit& unit) const {
  for (const LoadedUnit::Extent& extent : unit.extents) {
    if (direct_) break;  // direct reads leave nothing in the page cache
    posix_fadvise(files_[extent.file].fd, extent.offset, extent.bytes, POSIX_FADV_DONTNEED);
  }
  source_->ForgetMaps();
}

}  // namespace moesaic::quantizer
