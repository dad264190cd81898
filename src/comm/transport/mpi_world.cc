#include "comm/transport/mpi_world.h"

#include <mpi.h>

#include "comm/transport/mpi_transport.h"

namespace moesaic::comm {
namespace {

struct MpiSession {
  MpiSession() = default;
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  ~MpiSession() {
    transport.reset();
    if (initialized_here) MPI_Finalize();
  }
  bool initialized_here = false;
  std::unique_ptr<Transport> transport;
};

// The thread that uses the transport need not be the one that initializes MPI. SimGrid simulates the threads
// of a process one at a time, but reports MPI_THREAD_SINGLE.
#ifdef SMPI_H
constexpr int kNeededThreads = MPI_THREAD_SINGLE;
#else
constexpr int kNeededThreads = MPI_THREAD_SERIALIZED;
#endif

}  // namespace

StatusOr<OpenedTransport> OpenMpiWorld() {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized != 0)
    return InvalidArgument("MPI was finalized in this process and cannot be initialized again");
  const auto session = std::make_shared<MpiSession>();
  if (initialized == 0) {
    int provided = 0;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS) {
      return FormatStatus(StatusCode::kUnavailable, "MPI_Init_thread failed; start the program by mpirun",
                          {});
    }
    session->initialized_here = true;
    if (provided < kNeededThreads) {
      return Unimplemented("MPI must support MPI_THREAD_SERIALIZED, found level {}", provided);
    }
  }
  ASSIGN_OR_RETURN(session->transport, MakeMpiTransport(MPI_COMM_WORLD));
  return OpenedTransport(session, session->transport.get());
}

}  // namespace moesaic::comm
