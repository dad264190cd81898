// Counts the calls of MPI_Allreduce and MPI_Alltoall of a program that libmoesaic_mpi.so carries out. It is
// preloaded before that library, which sends by MPI_Isend. Collectives of MPI itself do not call this
// function. MPI_Finalize prints the calls of both functions: the fewest of a rank that were carried out, and
// the most of a rank that were passed to MPI. The program calls MPI from one thread.
#define _GNU_SOURCE  // RTLD_NEXT
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*AllReduce)(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm);
typedef int (*AllToAll)(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm);

typedef struct {
  long carried_out, passed;
} Calls;
static Calls all_reduces, all_to_alls;
static long sends;

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  ++sends;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

static void Count(Calls* calls, long sends_before) {
  if (sends > sends_before) {
    ++calls->carried_out;
  } else {
    ++calls->passed;
  }
}

// The definition of libmoesaic_mpi.so.
static void* Next(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  if (found == NULL) {
    fprintf(stderr, "call_counter: no library has %s\n", name);
    abort();
  }
  return found;
}

int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  static AllReduce next;
  if (next == NULL) next = (AllReduce)Next("MPI_Allreduce");
  const long before = sends;
  const int code = next(send, receive, count, type, op, comm);
  Count(&all_reduces, before);
  return code;
}

int MPI_Alltoall(const void* send, int send_count, MPI_Datatype send_type, void* receive, int receive_count,
                 MPI_Datatype receive_type, MPI_Comm comm) {
  static AllToAll next;
  if (next == NULL) next = (AllToAll)Next("MPI_Alltoall");
  const long before = sends;
  const int code = next(send, send_count, send_type, receive, receive_count, receive_type, comm);
  Count(&all_to_alls, before);
  return code;
}

static void Print(const char* name, const Calls* calls) {
  long fewest = 0, most = 0;
  int rank = 0;
  PMPI_Reduce(&calls->carried_out, &fewest, 1, MPI_LONG, MPI_MIN, 0, MPI_COMM_WORLD);
  PMPI_Reduce(&calls->passed, &most, 1, MPI_LONG, MPI_MAX, 0, MPI_COMM_WORLD);
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) fprintf(stderr, "%s: %ld calls carried out, %ld passed to MPI\n", name, fewest, most);
}

int MPI_Finalize(void) {
  Print("MPI_Allreduce", &all_reduces);
  Print("MPI_Alltoall", &all_to_alls);
  return PMPI_Finalize();
}
