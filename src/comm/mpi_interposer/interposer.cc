// The MPI functions that libmoesaic_mpi.so replaces. A call is passed through to MPI by arguments that are
// equal on all ranks only, so that all ranks decide alike. Arguments that MPI must refuse are passed through,
// too.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "comm/mpi_interposer/attachment.h"
#include "comm/mpi_interposer/mpi_types.h"
#include "comm/mpi_interposer/packed_buffers.h"

#define MOESAIC_EXPORT extern "C" [[gnu::visibility("default")]] int

namespace moesaic::comm {
namespace {

// Reports an error of ours by the error handler of the MPI communicator.
int Report(MPI_Comm comm, const Status& status) {
  if (status.ok()) return MPI_SUCCESS;
  static std::mutex mutex;
  static int code = MPI_ERR_OTHER;
  {
    const std::lock_guard lock(mutex);
    if (code == MPI_ERR_OTHER) PMPI_Add_error_code(MPI_ERR_OTHER, &code);
    const std::string text =
        ("libmoesaic_mpi: " + moesaic::Message(status)).substr(0, MPI_MAX_ERROR_STRING - 1);
    PMPI_Add_error_string(code, text.c_str());
  }
  PMPI_Comm_call_errhandler(comm, code);
  return code;
}

bool IsOutput(const void* receive) { return receive != MPI_IN_PLACE; }

bool IsValid(MPI_Datatype type, int count) { return type != MPI_DATATYPE_NULL && count >= 0; }

bool AreValid(MPI_Datatype type, const int* counts, int size) {
  return counts != nullptr && type != MPI_DATATYPE_NULL &&
         std::all_of(counts, counts + size, [](int count) { return count >= 0; });
}

// Ranks of an intracommunicator; 0 for other ones, whose arrays of counts have the size of the other group.
int SizeOf(MPI_Comm comm) {
  int size = 0, is_inter = 0;
  if (comm == MPI_COMM_NULL || PMPI_Comm_test_inter(comm, &is_inter) != MPI_SUCCESS || is_inter != 0)
    return 0;
  return PMPI_Comm_size(comm, &size) == MPI_SUCCESS ? size : 0;
}

// Buffers that our kernels cannot use, because elements are not aligned, are copied.
bool IsAligned(const void* buffer, int bytes) { return reinterpret_cast<uintptr_t>(buffer) % bytes == 0; }

std::span<const std::byte> Copied(std::span<const std::byte> bytes, std::vector<std::byte>& into) {
  into.assign(bytes.begin(), bytes.end());
  return into;
}

int AllReduce(const void* send, void* receive, int count, const Reduction& reduction, Attachment& attachment,
              MPI_Comm comm) {
  const auto bytes = static_cast<size_t>(count) * reduction.element_bytes;
  const void* const from = send == MPI_IN_PLACE ? receive : send;
  std::span<const std::byte> input(static_cast<const std::byte*>(from), bytes);
  std::span<std::byte> output(static_cast<std::byte*>(receive), bytes);
  if (!IsAligned(from, reduction.element_bytes)) input = Copied(input, attachment.packed_input);
  const bool is_aligned = IsAligned(receive, reduction.element_bytes);
  if (!is_aligned) {
    attachment.packed_output.resize(bytes);
    output = attachment.packed_output;
  }
  const Status status = attachment.communicator->AllReduce(input, output, reduction.dtype, reduction.op);
  if (!is_aligned && status.ok()) std::ranges::copy(output, static_cast<std::byte*>(receive));
  return Report(comm, status);
}

int ReduceScatter(const void* send, void* receive, const std::vector<int64_t>& counts,
                  const Reduction& reduction, Attachment& attachment, MPI_Comm comm) {
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const void* const from = send == MPI_IN_PLACE ? receive : send;
  std::span<const std::byte> input(static_cast<const std::byte*>(from),
                                   static_cast<size_t>(total * reduction.element_bytes));
  if (send == MPI_IN_PLACE || !IsAligned(from, reduction.element_bytes))
    input = Copied(input, attachment.packed_input);
  const auto bytes = static_cast<size_t>(counts[attachment.communicator->rank()] * reduction.element_bytes);
  std::span<std::byte> output(static_cast<std::byte*>(receive), bytes);
  const bool is_aligned = IsAligned(receive, reduction.element_bytes);
  if (!is_aligned) {
    attachment.packed_output.resize(bytes);
    output = attachment.packed_output;
  }
  const Status status =
      attachment.communicator->ReduceScatter(input, output, counts, reduction.dtype, reduction.op);
  if (!is_aligned && status.ok()) std::ranges::copy(output, static_cast<std::byte*>(receive));
  return Report(comm, status);
}

// Data of any type is moved as bytes, so ranks may describe it by different types.
std::vector<int64_t> BytesOf(const PartList& parts) {
  const TypeLayout layout = LayoutOf(parts.type);
  std::vector<int64_t> bytes = parts.counts;
  for (int64_t& each : bytes) each *= layout.bytes;
  return bytes;
}

// Type and count of the input are ignored under MPI_IN_PLACE.
PartList SentBy(const void* send, MPI_Datatype type, int parts, int count) {
  return send == MPI_IN_PLACE ? PartList() : PartList::Equal(type, parts, count);
}

// The input of a call, copied if MPI_IN_PLACE makes it part of the output.
int InputOf(const void* send, const PartList& sent, const void* receive, const PartList& in_place,
            Attachment& attachment, MPI_Comm comm, std::span<const std::byte>& input) {
  if (send != MPI_IN_PLACE) return Pack(send, sent, comm, attachment.packed_input, input);
  const int code = Pack(receive, in_place, comm, attachment.packed_input, input);
  if (code == MPI_SUCCESS && input.data() != attachment.packed_input.data())
    input = Copied(input, attachment.packed_input);
  return code;
}

// Input and output of a call that moves data, and its end.
struct Movement {
  const void* send;
  const PartList& sent;
  void* receive;
  const PartList& received;
  const PartList& in_place;  // parts of `receive` that are the input under MPI_IN_PLACE
};

// Calls move(input, output) -> Status with consecutive bytes.
template <typename Move>
int Moved(const Movement& movement, Attachment& attachment, MPI_Comm comm, const Move& move) {
  std::span<const std::byte> input;
  std::span<std::byte> output;
  if (const int code =
          InputOf(movement.send, movement.sent, movement.receive, movement.in_place, attachment, comm, input);
      code != MPI_SUCCESS) {
    return code;
  }
  if (const int code =
          Destination(movement.receive, movement.received, comm, attachment.packed_output, output);
      code != MPI_SUCCESS) {
    return code;
  }
  if (const Status status = move(input, output); !status.ok()) return Report(comm, status);
  return Unpack(output, movement.receive, movement.received, comm);
}

int AllGather(const void* send, const PartList& sent, void* receive, const PartList& received,
              Attachment& attachment, MPI_Comm comm) {
  const int rank = attachment.communicator->rank();
  const PartList own{received.type, {received.counts[rank]}, {received.displacements[rank]}};
  return Moved({send, sent, receive, received, own}, attachment, comm, [&](auto input, auto output) {
    return attachment.communicator->AllGather(input, output, BytesOf(received), tensor::DType::kU8);
  });
}

int AllToAll(const void* send, const PartList& sent, void* receive, const PartList& received,
             Attachment& attachment, MPI_Comm comm) {
  return Moved({send, sent, receive, received, received}, attachment, comm, [&](auto input, auto output) {
    return attachment.communicator->AllToAll(input, output, tensor::DType::kU8);
  });
}

int AllToAllv(const void* send, const PartList& sent, void* receive, const PartList& received,
              Attachment& attachment, MPI_Comm comm) {
  return Moved(
      {send, sent, receive, received, received}, attachment, comm, [&](auto input, auto output) -> Status {
        const std::vector<int64_t> expected = BytesOf(received);
        std::vector<int64_t> arrived(expected.size());
        RETURN_IF_ERROR(attachment.communicator->AllToAllv(
            input, BytesOf(send == MPI_IN_PLACE ? received : sent), output, arrived, tensor::DType::kU8));
        for (size_t peer = 0; peer < expected.size(); ++peer) {
          if (arrived[peer] == expected[peer]) continue;
          return InvalidArgument("MPI_Alltoallv: rank {} expects {} bytes from rank {}, which sends {}",
                                 attachment.communicator->rank(), expected[peer], peer, arrived[peer]);
        }
        return OkStatus();
      });
}

}  // namespace
}  // namespace moesaic::comm

using namespace moesaic::comm;  // NOLINT(google-build-using-namespace): the functions below are MPI's

MOESAIC_EXPORT MPI_Init(int* argc, char*** argv) {
  const int code = PMPI_Init(argc, argv);
  if (code == MPI_SUCCESS) Prepare();
  return code;
}

MOESAIC_EXPORT MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  const int code = PMPI_Init_thread(argc, argv, required, provided);
  if (code == MPI_SUCCESS) Prepare();
  return code;
}

MOESAIC_EXPORT MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op op,
                             MPI_Comm comm) {
  const auto reduction = ReductionOf(type, op);
  Attachment* const attachment =
      reduction.has_value() && count > 0 && IsOutput(receive) ? AttachmentOf(comm) : nullptr;
  if (attachment == nullptr) return PMPI_Allreduce(send, receive, count, type, op, comm);
  return AllReduce(send, receive, count, *reduction, *attachment, comm);
}

MOESAIC_EXPORT MPI_Reduce_scatter(const void* send, void* receive, const int* counts, MPI_Datatype type,
                                  MPI_Op op, MPI_Comm comm) {
  const auto reduction = ReductionOf(type, op);
  const int size = SizeOf(comm);
  const bool is_ours = reduction.has_value() && IsOutput(receive) && AreValid(type, counts, size) &&
                       std::any_of(counts, counts + size, [](int count) { return count > 0; });
  Attachment* const attachment = is_ours ? AttachmentOf(comm) : nullptr;
  if (attachment == nullptr) return PMPI_Reduce_scatter(send, receive, counts, type, op, comm);
  return ReduceScatter(send, receive, {counts, counts + size}, *reduction, *attachment, comm);
}

MOESAIC_EXPORT MPI_Reduce_scatter_block(const void* send, void* receive, int count, MPI_Datatype type,
                                        MPI_Op op, MPI_Comm comm) {
  const auto reduction = ReductionOf(type, op);
  Attachment* const attachment =
      reduction.has_value() && count > 0 && IsOutput(receive) ? AttachmentOf(comm) : nullptr;
  if (attachment == nullptr) return PMPI_Reduce_scatter_block(send, receive, count, type, op, comm);
  return ReduceScatter(send, receive, std::vector<int64_t>(attachment->communicator->size(), count),
                       *reduction, *attachment, comm);
}

MOESAIC_EXPORT MPI_Allgather(const void* send, int send_count, MPI_Datatype send_type, void* receive,
                             int receive_count, MPI_Datatype receive_type, MPI_Comm comm) {
  const bool is_ours = IsOutput(receive) && IsValid(receive_type, receive_count) &&
                       (send == MPI_IN_PLACE || IsValid(send_type, send_count)) && receive_count > 0 &&
                       LayoutOf(receive_type).bytes > 0;
  Attachment* const attachment = is_ours ? AttachmentOf(comm) : nullptr;
  if (attachment == nullptr) {
    return PMPI_Allgather(send, send_count, send_type, receive, receive_count, receive_type, comm);
  }
  return AllGather(send, SentBy(send, send_type, 1, send_count), receive,
                   PartList::Equal(receive_type, attachment->communicator->size(), receive_count),
                   *attachment, comm);
}

MOESAIC_EXPORT MPI_Allgatherv(const void* send, int send_count, MPI_Datatype send_type, void* receive,
                              const int* receive_counts, const int* displacements, MPI_Datatype receive_type,
                              MPI_Comm comm) {
  const int size = SizeOf(comm);
  const bool is_ours =
      IsOutput(receive) && AreValid(receive_type, receive_counts, size) && displacements != nullptr &&
      (send == MPI_IN_PLACE || IsValid(send_type, send_count)) &&
      std::any_of(receive_counts, receive_counts + size, [](int count) { return count > 0; }) &&
      LayoutOf(receive_type).bytes > 0;
  Attachment* const attachment = is_ours ? AttachmentOf(comm) : nullptr;
  if (attachment == nullptr) {
    return PMPI_Allgatherv(send, send_count, send_type, receive, receive_counts, displacements, receive_type,
                           comm);
  }
  const auto ranks = static_cast<size_t>(size);
  return AllGather(send, SentBy(send, send_type, 1, send_count), receive,
                   PartList::Placed(receive_type, {receive_counts, ranks}, {displacements, ranks}),
                   *attachment, comm);
}

MOESAIC_EXPORT MPI_Alltoall(const void* send, int send_count, MPI_Datatype send_type, void* receive,
                            int receive_count, MPI_Datatype receive_type, MPI_Comm comm) {
  const bool is_ours = IsOutput(receive) && IsValid(receive_type, receive_count) &&
                       (send == MPI_IN_PLACE || IsValid(send_type, send_count)) && receive_count > 0 &&
                       LayoutOf(receive_type).bytes > 0;
  Attachment* const attachment = is_ours ? AttachmentOf(comm) : nullptr;
  if (attachment == nullptr) {
    return PMPI_Alltoall(send, send_count, send_type, receive, receive_count, receive_type, comm);
  }
  const int size = attachment->communicator->size();
  return AllToAll(send, SentBy(send, send_type, size, send_count), receive,
                  PartList::Equal(receive_type, size, receive_count), *attachment, comm);
}

MOESAIC_EXPORT MPI_Alltoallv(const void* send, const int* send_counts, const int* send_displacements,
                             MPI_Datatype send_type, void* receive, const int* receive_counts,
                             const int* receive_displacements, MPI_Datatype receive_type, MPI_Comm comm) {
  const int size = SizeOf(comm);
  const bool is_ours =
      IsOutput(receive) && AreValid(receive_type, receive_counts, size) && receive_displacements != nullptr &&
      (send == MPI_IN_PLACE || (AreValid(send_type, send_counts, size) && send_displacements != nullptr));
  Attachment* const attachment = is_ours ? AttachmentOf(comm) : nullptr;
  if (attachment == nullptr) {
    return PMPI_Alltoallv(send, send_counts, send_displacements, send_type, receive, receive_counts,
                          receive_displacements, receive_type, comm);
  }
  const auto ranks = static_cast<size_t>(size);
  const PartList sent = send == MPI_IN_PLACE
                            ? PartList()
                            : PartList::Placed(send_type, {send_counts, ranks}, {send_displacements, ranks});
  return AllToAllv(send, sent, receive,
                   PartList::Placed(receive_type, {receive_counts, ranks}, {receive_displacements, ranks}),
                   *attachment, comm);
}
