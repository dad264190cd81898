#include "comm/mpi_interposer/packed_buffers.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

namespace moesaic::comm {
namespace {

// Offset in bytes of the first part if the buffer has all parts as consecutive bytes. It may be negative.
std::optional<int64_t> ConsecutiveFrom(const PartList& parts, const TypeLayout& layout) {
  if (!layout.is_contiguous) return std::nullopt;
  std::optional<int64_t> first;
  int64_t next = 0;
  for (size_t i = 0; i < parts.counts.size(); ++i) {
    if (parts.counts[i] == 0) continue;
    if (!first.has_value()) first = next = parts.displacements[i];
    if (parts.displacements[i] != next) return std::nullopt;
    next += parts.counts[i];
  }
  return first.value_or(0) * layout.bytes;
}

// Elements of one call of MPI_Pack, whose sizes are ints.
int64_t ElementsPerCall(const TypeLayout& layout) {
  return std::max<int64_t>(1, (std::numeric_limits<int>::max() / 2) / std::max<int64_t>(1, layout.bytes));
}

// Calls move(user address, packed offset, elements) for pieces of every part, until one returns an error.
template <typename Move>
int ForEachPiece(const PartList& parts, const TypeLayout& layout, const Move& move) {
  int64_t packed = 0;
  for (size_t i = 0; i < parts.counts.size(); ++i) {
    for (int64_t done = 0; done < parts.counts[i];) {
      const int64_t elements = std::min(parts.counts[i] - done, ElementsPerCall(layout));
      const int code =
          move((parts.displacements[i] + done) * layout.extent, packed, static_cast<int>(elements));
      if (code != MPI_SUCCESS) return code;
      packed += elements * layout.bytes;
      done += elements;
    }
  }
  return MPI_SUCCESS;
}

// MPI_Pack takes at most 2^31-1 bytes at once.
int CheckElement(const TypeLayout& layout, MPI_Comm comm) {
  const bool is_packable = layout.bytes >= 0 && layout.bytes <= std::numeric_limits<int>::max();
  if (layout.is_contiguous || is_packable) return MPI_SUCCESS;
  PMPI_Comm_call_errhandler(comm, MPI_ERR_TYPE);
  return MPI_ERR_TYPE;
}

}  // namespace

PartList PartList::Equal(MPI_Datatype type, int parts, int64_t count) {
  PartList made{type, std::vector<int64_t>(parts, count), std::vector<int64_t>(parts)};
  for (int i = 0; i < parts; ++i) made.displacements[i] = i * count;
  return made;
}

PartList PartList::Placed(MPI_Datatype type, std::span<const int> counts,
                          std::span<const int> displacements) {
  return {type, {counts.begin(), counts.end()}, {displacements.begin(), displacements.end()}};
}

int64_t PartList::Elements() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

int Pack(const void* buffer, const PartList& parts, MPI_Comm comm, std::vector<std::byte>& staging,
         std::span<const std::byte>& packed) {
  const TypeLayout layout = LayoutOf(parts.type);
  if (const int code = CheckElement(layout, comm); code != MPI_SUCCESS) return code;
  const auto bytes = static_cast<size_t>(parts.Elements() * layout.bytes);
  const auto* const start = static_cast<const std::byte*>(buffer);
  if (const auto first = ConsecutiveFrom(parts, layout); first.has_value()) {
    packed = {start + *first, bytes};
    return MPI_SUCCESS;
  }
  staging.resize(bytes);
  packed = staging;
  return ForEachPiece(parts, layout, [&](int64_t from, int64_t to, int elements) {
    if (layout.is_contiguous) {
      std::memcpy(&staging[to], start + from, static_cast<size_t>(elements * layout.bytes));
      return MPI_SUCCESS;
    }
    int position = 0;
    return PMPI_Pack(start + from, elements, parts.type, staging.data() + to,
                     static_cast<int>(elements * layout.bytes), &position, comm);
  });
}

int Destination(void* buffer, const PartList& parts, MPI_Comm comm, std::vector<std::byte>& staging,
                std::span<std::byte>& packed) {
  const TypeLayout layout = LayoutOf(parts.type);
  if (const int code = CheckElement(layout, comm); code != MPI_SUCCESS) return code;
  const auto bytes = static_cast<size_t>(parts.Elements() * layout.bytes);
  if (const auto first = ConsecutiveFrom(parts, layout); first.has_value()) {
    packed = {static_cast<std::byte*>(buffer) + *first, bytes};
    return MPI_SUCCESS;
  }
  staging.resize(bytes);
  packed = staging;
  return MPI_SUCCESS;
}

int Unpack(std::span<const std::byte> packed, void* buffer, const PartList& parts, MPI_Comm comm) {
  const TypeLayout layout = LayoutOf(parts.type);
  if (ConsecutiveFrom(parts, layout).has_value()) return MPI_SUCCESS;
  auto* const start = static_cast<std::byte*>(buffer);
  return ForEachPiece(parts, layout, [&](int64_t to, int64_t from, int elements) {
    if (layout.is_contiguous) {
      std::memcpy(start + to, &packed[from], static_cast<size_t>(elements * layout.bytes));
      return MPI_SUCCESS;
    }
    int position = 0;
    return PMPI_Unpack(packed.data() + from, static_cast<int>(elements * layout.bytes), &position, start + to,
                       elements, parts.type, comm);
  });
}

}  // namespace moesaic::comm
