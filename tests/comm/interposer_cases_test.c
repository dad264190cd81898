// Rare cases of MPI programs under libmoesaic_mpi.so: operations and types that it passes through,
// communicators that are freed or not, intercommunicators, errors, threads and attributes. Results are
// compared with PMPI_*. Usage: mpirun -x LD_PRELOAD=... interposer_cases_test [huge | sends NUMBER |
// other-sends NUMBER | crosses once | crosses often].
//   huge                 sends parts of more than 2^31 bytes
//   sends, other-sends   expect this, or another, number of messages from each rank in an AllReduce of 16 KiB
//                        (0: and that the library says that it passes calls to MPI)
//   crosses              expects that an AllReduce of 1 MiB on 4 ranks sends the vector once, or more often,
//                        from each pair of ranks (0 and 1, 2 and 3) to the other pair
#define _GNU_SOURCE  // dladdr
#include <complex.h>
#include <dlfcn.h>
#include <mpi.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kMaxRanks = 16, kElements = 60, kMaxBytes = 1 << 16, kThreads = 3 };

static int rank, size, failures, checks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// The library sends with MPI_Isend, which the program may define: only calls that it took over send by it.
static _Atomic int sends;
static _Atomic long long crossing_bytes;  // to other nodes
static int nodes[kMaxRanks];              // of the ranks of the communicator in use; all 0 in most cases
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  int own, bytes;
  PMPI_Comm_rank(comm, &own);
  PMPI_Type_size(type, &bytes);
  ++sends;
  if (nodes[to] != nodes[own]) crossing_bytes += (long long)count * bytes;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

static void Expect(int is_true, const char* what) {
  pthread_mutex_lock(&lock);
  ++checks;
  if (!is_true && failures++ < 5) fprintf(stderr, "rank %d of %d: %s\n", rank, size, what);
  pthread_mutex_unlock(&lock);
}

typedef struct {
  double scale, offset;
} Affine;

// x -> f(g(x)): associative, not commutative.
static void Compose(void* left, void* right, int* count, MPI_Datatype* type) {
  (void)type;
  const Affine* const f = left;
  Affine* const g = right;
  for (int i = 0; i < *count; ++i) {
    g[i].offset = f[i].scale * g[i].offset + f[i].offset;
    g[i].scale *= f[i].scale;
  }
}

static void UserOperations(void) {
  MPI_Datatype affine;
  MPI_Op compose;
  MPI_Type_contiguous(2, MPI_DOUBLE, &affine);
  MPI_Type_commit(&affine);
  MPI_Op_create(Compose, 0, &compose);
  Affine in[kElements], ours[kElements], theirs[kElements];
  for (int i = 0; i < kElements; ++i) in[i] = (Affine){(rank + i) % 3 - 1, rank - i};
  memset(ours, 0, sizeof(ours)), memset(theirs, 0, sizeof(theirs));
  MPI_Allreduce(in, ours, kElements, affine, compose, MPI_COMM_WORLD);
  PMPI_Allreduce(in, theirs, kElements, affine, compose, MPI_COMM_WORLD);
  Expect(memcmp(ours, theirs, sizeof(ours)) == 0, "MPI_Allreduce with an operation that is not commutative");
  const int part = kElements / size;
  memset(ours, 0, sizeof(ours)), memset(theirs, 0, sizeof(theirs));
  MPI_Reduce_scatter_block(in, ours, part, affine, compose, MPI_COMM_WORLD);
  PMPI_Reduce_scatter_block(in, theirs, part, affine, compose, MPI_COMM_WORLD);
  Expect(memcmp(ours, theirs, sizeof(ours)) == 0, "MPI_Reduce_scatter_block with such an operation");
  MPI_Op_free(&compose);
  MPI_Type_free(&affine);
}

// Every predefined operation on every type that it takes.
static void PredefinedOperations(void) {
  const MPI_Op arithmetic[] = {MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX},
               logical[] = {MPI_LAND, MPI_LOR, MPI_LXOR}, bits[] = {MPI_BAND, MPI_BOR, MPI_BXOR},
               located[] = {MPI_MINLOC, MPI_MAXLOC};
  const MPI_Datatype integers[] = {
      MPI_SIGNED_CHAR, MPI_UNSIGNED_CHAR, MPI_SHORT,         MPI_UNSIGNED_SHORT, MPI_INT,
      MPI_UNSIGNED,    MPI_LONG,          MPI_UNSIGNED_LONG, MPI_LONG_LONG_INT,  MPI_UNSIGNED_LONG_LONG,
      MPI_INT8_T,      MPI_INT16_T,       MPI_INT32_T,       MPI_INT64_T,        MPI_UINT8_T,
      MPI_UINT16_T,    MPI_UINT32_T,      MPI_UINT64_T,      MPI_AINT,           MPI_OFFSET,
      MPI_COUNT};
  const MPI_Datatype pairs[] = {MPI_FLOAT_INT, MPI_DOUBLE_INT, MPI_LONG_INT,
                                MPI_2INT,      MPI_SHORT_INT,  MPI_LONG_DOUBLE_INT};
  const struct {
    const MPI_Datatype* types;
    int type_count;
    const MPI_Op* ops;
    int op_count;
  } groups[] = {
      {integers, sizeof(integers) / sizeof(*integers), arithmetic, 4},
      {integers, sizeof(integers) / sizeof(*integers), logical, 3},
      {integers, sizeof(integers) / sizeof(*integers), bits, 3},
      {(const MPI_Datatype[]){MPI_FLOAT, MPI_DOUBLE, MPI_LONG_DOUBLE}, 3, arithmetic, 4},
      {(const MPI_Datatype[]){MPI_C_BOOL}, 1, logical, 3},
      {(const MPI_Datatype[]){MPI_BYTE}, 1, bits, 3},
      {(const MPI_Datatype[]){MPI_C_FLOAT_COMPLEX, MPI_C_DOUBLE_COMPLEX}, 2, arithmetic, 2},
      {pairs, sizeof(pairs) / sizeof(*pairs), located, 2},
  };
  char in[kElements * 32], ours[sizeof(in)], theirs[sizeof(in)], what[100 + MPI_MAX_OBJECT_NAME];
  for (size_t g = 0; g < sizeof(groups) / sizeof(*groups); ++g) {
    for (int t = 0; t < groups[g].type_count; ++t) {
      const MPI_Datatype type = groups[g].types[t];
      char name[MPI_MAX_OBJECT_NAME];
      int length, bytes;
      MPI_Aint lower, extent;
      MPI_Type_get_name(type, name, &length);
      MPI_Type_get_extent(type, &lower, &extent);
      MPI_Type_size(type, &bytes);
      memset(in, 0, sizeof(in));
      for (int i = 0; i < kElements; ++i) {
        char* const at = in + i * extent;
        const int value = (i * 5 + rank * 3) % 4;
        if (type == MPI_FLOAT || type == MPI_C_FLOAT_COMPLEX || type == MPI_FLOAT_INT)
          *(float*)at = (float)value;
        else if (type == MPI_DOUBLE || type == MPI_C_DOUBLE_COMPLEX || type == MPI_DOUBLE_INT)
          *(double*)at = value;
        else if (type == MPI_LONG_DOUBLE || type == MPI_LONG_DOUBLE_INT)
          *(long double*)at = value;
        else if (type == MPI_C_BOOL)
          *(bool*)at = value % 2;
        else if (groups[g].ops == located || bytes == 1)  // Open MPI saturates some sums of 8 bits
          at[0] = (char)value;
        else  // all bits, so that the sign counts
          for (int b = 0; b < bytes; ++b) at[b] = (char)(i * 37 + rank * 91 + b * 13);
      }
      for (int o = 0; o < groups[g].op_count; ++o) {
        snprintf(what, sizeof(what), "MPI_Allreduce of %s, operation %d of group %zu", name, o, g);
        memset(ours, 0, sizeof(ours)), memset(theirs, 0, sizeof(theirs));
        MPI_Allreduce(in, ours, kElements, type, groups[g].ops[o], MPI_COMM_WORLD);
        PMPI_Allreduce(in, theirs, kElements, type, groups[g].ops[o], MPI_COMM_WORLD);
        const size_t shown = type == MPI_LONG_DOUBLE ? 10 : (size_t)bytes;  // the rest is padding
        int equal = 1;
        for (int i = 0; i < kElements; ++i)
          equal &= memcmp(ours + i * extent, theirs + i * extent, shown) == 0;
        Expect(equal, what);
      }
    }
  }
}

static void OurCallsOnly(void) {
  int in[kElements] = {rank}, out[kElements * kMaxRanks];
  unsigned least = 0;
  sends = 0;
  MPI_Allreduce(in, out, kElements, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  Expect((sends > 0) == (size > 1), "MPI_Allreduce must be ours");
  sends = 0;
  MPI_Alltoall(in, 1, MPI_INT, out, 1, MPI_INT, MPI_COMM_WORLD);
  Expect((sends > 0) == (size > 1), "MPI_Alltoall must be ours");
  sends = 0;
  MPI_Allreduce(&rank, &least, 1, MPI_UNSIGNED, MPI_MIN, MPI_COMM_WORLD);
  MPI_Bcast(in, 1, MPI_INT, 0, MPI_COMM_WORLD);
  Expect(sends == 0, "MPI_MIN of unsigned numbers and MPI_Bcast must be passed through");
}

static void Empty(void) {
  int none[kMaxRanks] = {0}, out[kMaxRanks];
  memset(out, 0x5a, sizeof(out));
  int codes = MPI_Allreduce(none, out, 0, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  codes |= MPI_Allgather(NULL, 0, MPI_INT, NULL, 0, MPI_INT, MPI_COMM_WORLD);
  codes |= MPI_Allgatherv(NULL, 0, MPI_INT, NULL, none, none, MPI_INT, MPI_COMM_WORLD);
  codes |= MPI_Alltoall(NULL, 0, MPI_INT, NULL, 0, MPI_INT, MPI_COMM_WORLD);
  codes |= MPI_Alltoallv(NULL, none, none, MPI_INT, NULL, none, none, MPI_INT, MPI_COMM_WORLD);
  codes |= MPI_Reduce_scatter(none, out, none, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  codes |= MPI_Reduce_scatter_block(none, out, 0, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  Expect(codes == MPI_SUCCESS, "calls without elements");
  // One row, from the last rank to the first.
  int to[kMaxRanks] = {0}, from[kMaxRanks] = {0}, row = 42 + rank;
  if (rank == size - 1) to[0] = 1;
  if (rank == 0) from[size - 1] = 1;
  codes = MPI_Alltoallv(&row, to, none, MPI_INT, out, from, none, MPI_INT, MPI_COMM_WORLD);
  Expect(codes == MPI_SUCCESS && out[0] == (rank == 0 ? 42 + size - 1 : 0x5a5a5a5a),
         "MPI_Alltoallv of one row");
}

// Data at absolute addresses, and a type whose bounds differ from its data.
static void Addresses(void) {
  int first = rank, second = -rank, all[2 * kMaxRanks], spread[4 * kMaxRanks];
  const int lengths[] = {1, 1};
  const MPI_Aint addresses[] = {(MPI_Aint)&first, (MPI_Aint)&second}, places[] = {4, 12};
  MPI_Datatype absolute, inner, shifted;
  MPI_Type_create_hindexed(2, lengths, addresses, MPI_INT, &absolute);
  MPI_Type_commit(&absolute);
  MPI_Allgather(MPI_BOTTOM, 1, absolute, all, 2, MPI_INT, MPI_COMM_WORLD);
  MPI_Type_create_hindexed(2, lengths, places, MPI_INT, &inner);
  MPI_Type_create_resized(inner, -4, 16, &shifted);
  MPI_Type_commit(&shifted);
  memset(spread, 0x5a, sizeof(spread));
  MPI_Allgather(MPI_BOTTOM, 1, absolute, spread, 1, shifted, MPI_COMM_WORLD);
  for (int i = 0; i < size; ++i) {
    Expect(all[2 * i] == i && all[2 * i + 1] == -i, "MPI_Allgather from MPI_BOTTOM");
    Expect(spread[4 * i + 1] == i && spread[4 * i + 3] == -i && spread[4 * i] == 0x5a5a5a5a,
           "MPI_Allgather to a type with a lower bound");
  }
  MPI_Type_free(&absolute), MPI_Type_free(&inner), MPI_Type_free(&shifted);
}

static int ClassOf(int code) {
  int class = MPI_SUCCESS;
  MPI_Error_class(code, &class);
  return class;
}

static int handled;
static void Handler(MPI_Comm* comm, int* code, ...) {
  (void)comm, (void)code;
  ++handled;
}

static void Errors(void) {
  MPI_Comm comm;
  MPI_Errhandler handler;
  MPI_Datatype pending;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_create_errhandler(Handler, &handler);
  MPI_Comm_set_errhandler(comm, handler);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);  // Open MPI calls it for wrong output buffers
  MPI_Type_vector(2, 1, 2, MPI_INT, &pending);
  int in[4 * kMaxRanks] = {0}, out[4 * kMaxRanks];
  const struct {
    int ours, theirs;
  } codes[] = {
      {MPI_Allreduce(in, out, -1, MPI_INT, MPI_SUM, comm),
       PMPI_Allreduce(in, out, -1, MPI_INT, MPI_SUM, comm)},
      {MPI_Allreduce(in, MPI_IN_PLACE, 1, MPI_INT, MPI_SUM, comm),
       PMPI_Allreduce(in, MPI_IN_PLACE, 1, MPI_INT, MPI_SUM, comm)},
      {MPI_Allreduce(in, out, 1, MPI_DATATYPE_NULL, MPI_SUM, comm),
       PMPI_Allreduce(in, out, 1, MPI_DATATYPE_NULL, MPI_SUM, comm)},
      {MPI_Allreduce(in, out, 1, MPI_INT, MPI_OP_NULL, comm),
       PMPI_Allreduce(in, out, 1, MPI_INT, MPI_OP_NULL, comm)},
      {MPI_Allgather(in, 1, pending, out, 1, pending, comm),
       PMPI_Allgather(in, 1, pending, out, 1, pending, comm)},
      {MPI_Alltoall(in, 1, pending, out, 1, pending, comm),
       PMPI_Alltoall(in, 1, pending, out, 1, pending, comm)},
      {MPI_Alltoallv(in, NULL, NULL, MPI_INT, out, NULL, NULL, MPI_INT, comm),
       PMPI_Alltoallv(in, NULL, NULL, MPI_INT, out, NULL, NULL, MPI_INT, comm)},
  };
  const int count = sizeof(codes) / sizeof(*codes);
  for (int i = 0; i < count; ++i) {
    char what[100];
    snprintf(what, sizeof(what), "error %d is %d, but MPI's is %d", i, codes[i].ours, codes[i].theirs);
    Expect(ClassOf(codes[i].ours) == ClassOf(codes[i].theirs) && codes[i].ours != MPI_SUCCESS, what);
  }
  Expect(handled == 2 * count, "the error handler is called once for each error");
  // An error of ours calls the handler once, too. A later call works.
  if (size > 1) {
    int one[kMaxRanks], two[kMaxRanks], zero[kMaxRanks] = {0};
    for (int i = 0; i < size; ++i) one[i] = 1, two[i] = 2;
    const int code = MPI_Alltoallv(in, one, zero, MPI_INT, out, two, zero, MPI_INT, comm);
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    if (code != MPI_SUCCESS) MPI_Error_string(code, text, &length);
    Expect(strstr(text, "expects 8 bytes from rank 0, which sends 4") != NULL, "text of an error of ours");
    Expect(handled == 2 * count + 1, "the error handler is called once for an error of ours");
  }
  in[0] = 1;
  Expect(MPI_Allreduce(in, out, 1, MPI_INT, MPI_SUM, comm) == MPI_SUCCESS && out[0] == size,
         "call after errors");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  MPI_Type_free(&pending);
  MPI_Errhandler_free(&handler);
  MPI_Comm_free(&comm);
}

static int copies, deletions;
static int CopyAttribute(MPI_Comm comm, int key, void* extra, void* in, void* out, int* flag) {
  (void)comm, (void)key, (void)extra;
  ++copies;
  *(void**)out = in;
  *flag = 1;
  return MPI_SUCCESS;
}
static int DeleteAttribute(MPI_Comm comm, int key, void* value, void* extra) {
  (void)comm, (void)key, (void)value, (void)extra;
  ++deletions;
  return MPI_SUCCESS;
}

static void Attributes(void) {
  MPI_Comm comm, copy;
  int key, sum;
  MPI_Comm_create_keyval(CopyAttribute, DeleteAttribute, &key, NULL);
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_set_attr(comm, key, &key);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, comm);
  Expect(copies == 0, "a collective copies no attributes");
  MPI_Comm_dup(comm, &copy);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, copy);
  Expect(copies == 1 && sum == size * (size - 1) / 2, "MPI_Comm_dup copies attributes once");
  MPI_Comm_free(&comm);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, copy);
  MPI_Comm_disconnect(&copy);
  Expect(deletions == 2 && sum == size * (size - 1) / 2, "a copy outlives its origin");
  MPI_Comm_free_keyval(&key);
}

// Ids of communicators are reused when ours are freed with the program's.
static void FreedCommunicators(void) {
  int highest = 0;
  for (int i = 0; i < 200; ++i) {
    MPI_Comm comm;
    int sum;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Allreduce(&i, &sum, 1, MPI_INT, MPI_SUM, comm);
    Expect(sum == i * size, "communicator that is used once");
    const int id = MPI_Comm_c2f(comm);
    MPI_Comm_free(&comm);
    if (i == 20) highest = id;
    Expect(i <= 20 || id <= highest + 2, "communicators are freed");
  }
}

static void Intercommunicators(void) {
  if (size < 2) return;
  MPI_Comm half, inter;
  const int is_first = rank == 0, others = is_first ? size - 1 : 1;
  MPI_Comm_split(MPI_COMM_WORLD, is_first, rank, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, is_first, 7, &inter);
  int sum = 0, all[kMaxRanks], in[kMaxRanks], counts[kMaxRanks], places[kMaxRanks], ones[kMaxRanks];
  for (int i = 0; i < kMaxRanks; ++i)
    in[i] = 100 * rank + i, counts[i] = i < others ? 1 : -1, places[i] = i, ones[i] = 1;
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, inter);
  Expect(sum == (is_first ? size * (size - 1) / 2 : 0), "MPI_Allreduce of an intercommunicator");
  MPI_Allgather(&rank, 1, MPI_INT, all, 1, MPI_INT, inter);
  Expect(all[0] == is_first && all[others - 1] == (is_first ? size - 1 : 0), "MPI_Allgather of one");
  memset(all, 0, sizeof(all));
  MPI_Allgatherv(&rank, 1, MPI_INT, all, counts, places, MPI_INT, inter);
  Expect(all[0] == is_first && all[others - 1] == (is_first ? size - 1 : 0), "MPI_Allgatherv of one");
  MPI_Alltoallv(in, counts, places, MPI_INT, all, ones, places, MPI_INT, inter);
  Expect(all[0] == (is_first ? 100 : rank - 1), "MPI_Alltoallv of one");
  MPI_Alltoall(in, 1, MPI_INT, all, 1, MPI_INT, inter);
  Expect(all[0] == (is_first ? 100 : rank - 1), "MPI_Alltoall of one");
  MPI_Comm merged;
  MPI_Intercomm_merge(inter, is_first, &merged);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, merged);
  Expect(sum == size * (size - 1) / 2, "MPI_Allreduce of a merged communicator");
  MPI_Comm_free(&merged), MPI_Comm_free(&inter), MPI_Comm_free(&half);
}

static void* Worker(void* argument) {
  MPI_Comm comm = *(MPI_Comm*)argument;
  enum { kRows = 3000 };
  int *in = malloc(kRows * sizeof(int)), *out = malloc(kRows * kMaxRanks * sizeof(int));
  for (int round = 0; round < 8; ++round) {
    for (int i = 0; i < kRows; ++i) in[i] = rank + i + round;
    MPI_Allreduce(in, out, kRows, MPI_INT, MPI_SUM, comm);
    int equal = 1;
    for (int i = 0; i < kRows; ++i) equal &= out[i] == size * (size - 1) / 2 + size * (i + round);
    MPI_Allgather(in, kRows, MPI_INT, out, kRows, MPI_INT, comm);
    for (int i = 0; i < kRows * size; ++i) equal &= out[i] == i / kRows + i % kRows + round;
    Expect(equal, "collectives of a thread");
    MPI_Comm copy;
    MPI_Comm_dup(comm, &copy);
    MPI_Allreduce(in, out, 1, MPI_INT, MPI_MAX, copy);
    Expect(out[0] == size - 1 + round, "collective of a thread's communicator");
    MPI_Comm_free(&copy);
  }
  free(in), free(out);
  return NULL;
}

static void Threads(void) {
  pthread_t threads[kThreads];
  MPI_Comm comms[kThreads];
  for (int i = 0; i < kThreads; ++i) MPI_Comm_dup(MPI_COMM_WORLD, &comms[i]);
  for (int i = 0; i < kThreads; ++i) pthread_create(&threads[i], NULL, Worker, &comms[i]);
  for (int i = 0; i < kThreads; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < kThreads; ++i) MPI_Comm_free(&comms[i]);
}

// Displacements count from an address within the buffer.
static void NegativeDisplacements(void) {
  int counts[kMaxRanks], places[kMaxRanks], own[2 * kMaxRanks], buffer[6 * kMaxRanks];
  for (int back = 0; back <= 2 * size; ++back) {
    for (int i = 0; i < size; ++i) counts[i] = 2, places[i] = 2 * i - back;
    for (int in_place = 0; in_place < 2; ++in_place) {
      memset(buffer, 0x5a, sizeof(buffer));
      own[0] = 10 * rank, own[1] = 10 * rank + 1;
      if (in_place) memcpy(buffer + 2 * rank, own, 2 * sizeof(int));
      MPI_Allgatherv(in_place ? MPI_IN_PLACE : own, 2, MPI_INT, buffer + back, counts, places, MPI_INT,
                     MPI_COMM_WORLD);
      int equal = 1;
      for (int i = 0; i < 2 * size; ++i) equal &= buffer[i] == i / 2 * 10 + i % 2;
      for (int i = 2 * size; i < 6 * kMaxRanks; ++i) equal &= buffer[i] == 0x5a5a5a5a;
      Expect(equal, "MPI_Allgatherv with negative displacements");
    }
    for (int i = 0; i < 2 * size; ++i) own[i] = 100 * rank + i;
    memset(buffer, 0x5a, sizeof(buffer));
    MPI_Alltoallv(own + back, counts, places, MPI_INT, buffer + back, counts, places, MPI_INT,
                  MPI_COMM_WORLD);
    int equal = 1;
    for (int i = 0; i < 2 * size; ++i) equal &= buffer[i] == i / 2 * 100 + 2 * rank + i % 2;
    for (int i = 2 * size; i < 6 * kMaxRanks; ++i) equal &= buffer[i] == 0x5a5a5a5a;
    Expect(equal, "MPI_Alltoallv with negative displacements");
  }
}

// Parts of more than 2^31 bytes, from the first rank to the second and back.
static void Huge(void) {
  const int count = 550 * 1000 * 1000, peer = 1 - rank;
  float *in = malloc(sizeof(float) * count), *out = malloc(sizeof(float) * count);
  for (int i = 0; i < count; ++i) in[i] = (float)(i % 1000 + rank);
  int counts[2] = {0}, places[2] = {0};
  counts[peer] = count;
  sends = 0;
  Expect(MPI_Alltoallv(in, counts, places, MPI_FLOAT, out, counts, places, MPI_FLOAT, MPI_COMM_WORLD) == 0,
         "huge");
  int equal = sends > 0;
  for (int i = 0; i < count; ++i) equal &= out[i] == (float)(i % 1000 + peer);
  Expect(equal, "MPI_Alltoallv of a huge part");
  MPI_Datatype whole;  // one element of more than 2^31 bytes
  MPI_Type_contiguous(count, MPI_FLOAT, &whole);
  MPI_Type_commit(&whole);
  memset(out, 0, sizeof(float) * count);
  counts[peer] = 1;
  sends = 0;
  MPI_Alltoallv(in, counts, places, whole, out, counts, places, whole, MPI_COMM_WORLD);
  equal = sends > 0;
  for (int i = 0; i < count; ++i) equal &= out[i] == (float)(i % 1000 + peer);
  Expect(equal, "MPI_Alltoallv of a huge element");
  MPI_Type_free(&whole);
  MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  equal = 1;
  for (int i = 0; i < count; ++i) equal &= out[i] == (float)(2 * (i % 1000) + 1);
  Expect(equal, "MPI_Allreduce of a huge buffer");
  free(in), free(out);
}

// Calls MPI_Allreduce and returns whether it printed that calls are passed to MPI.
static bool TellsThatCallsArePassed(const int* in, int* out, int count) {
  FILE* const printed = tmpfile();
  if (printed == NULL) return false;
  const int standard_error = dup(STDERR_FILENO);
  dup2(fileno(printed), STDERR_FILENO);
  MPI_Allreduce(in, out, count, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  dup2(standard_error, STDERR_FILENO);
  close(standard_error);
  char text[4096];
  rewind(printed);
  text[fread(text, 1, sizeof(text) - 1, printed)] = '\0';
  fclose(printed);
  fputs(text, stderr);
  char expected[100];
  snprintf(expected, sizeof(expected), "libmoesaic_mpi: rank %d passes calls to MPI: ", rank);
  return strstr(text, expected) != NULL;
}

// The number of messages tells which algorithm the library has chosen.
static void SendsOfAllReduce(int expected, bool is_equal) {
  enum { kCount = 4096 };
  static int in[kCount], out[kCount];
  for (int i = 0; i < kCount; ++i) in[i] = i + rank;
  sends = 0;
  if (is_equal && expected == 0) {
    Expect(TellsThatCallsArePassed(in, out, kCount), "the reason why calls are passed to MPI");
  } else {
    MPI_Allreduce(in, out, kCount, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  }
  Expect(is_equal ? sends == expected : sends != expected && sends > 0, "messages of MPI_Allreduce");
  int equal = 1;
  for (int i = 0; i < kCount; ++i) equal &= out[i] == size * i + size * (size - 1) / 2;
  Expect(equal, "result of MPI_Allreduce");
}

// Bytes that all ranks send to the other node in an AllReduce of `count` numbers. Ranks of the world are two
// to a node.
static long long CrossingBytes(MPI_Comm comm, int count) {
  int *in = malloc(sizeof(int) * count), *out = malloc(sizeof(int) * count);
  PMPI_Allgather(&rank, 1, MPI_INT, nodes, 1, MPI_INT, comm);
  for (int i = 0; i < size; ++i) nodes[i] /= 2;
  for (int i = 0; i < count; ++i) in[i] = i % 1000 + rank;
  crossing_bytes = 0;
  MPI_Allreduce(in, out, count, MPI_INT, MPI_SUM, comm);
  long long own = crossing_bytes, all = 0;
  memset(nodes, 0, sizeof(nodes));
  PMPI_Allreduce(&own, &all, 1, MPI_LONG_LONG, MPI_SUM, comm);
  int equal = 1;
  for (int i = 0; i < count; ++i) equal &= out[i] == size * (i % 1000) + size * (size - 1) / 2;
  Expect(equal, "result of MPI_Allreduce");
  free(in), free(out);
  return all;
}

// No plan sends less than one vector from each node. A quarter is room for records of calls in debug builds.
static void Crosses(bool is_once) {
  const int count = 1 << 18;
  const long long least = 2LL * count * (long long)sizeof(int);
  const long long bytes = CrossingBytes(MPI_COMM_WORLD, count);
  Expect(bytes >= least, "bytes between nodes are fewer than possible");
  Expect(is_once ? bytes < least + least / 4 : bytes >= least + least / 4, "bytes between nodes");
  if (!is_once) return;
  // Ranks of another order keep their devices.
  MPI_Comm dealt;
  MPI_Comm_split(MPI_COMM_WORLD, 0, rank % 2 * 2 + rank / 2, &dealt);
  Expect(CrossingBytes(dealt, count) < least + least / 4, "bytes between nodes in another order of ranks");
  MPI_Comm_free(&dealt);
}

// MPI_Finalize calls this before it ends: collectives still work.
static MPI_Comm kept;
static int AtFinalize(MPI_Comm comm, int key, void* value, void* extra) {
  (void)comm, (void)key, (void)value, (void)extra;
  int sum = 0;
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  Expect(sum == size * (size - 1) / 2, "MPI_Allreduce in MPI_Finalize");
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_MAX, kept);
  Expect(sum == size - 1, "MPI_Allreduce in MPI_Finalize on a communicator that is never freed");
  return MPI_SUCCESS;
}

static const char* LibraryOf(void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 ? info.dli_fname : "unknown";
}

int main(int argc, char** argv) {
  int provided, key, all = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (strstr(LibraryOf(dlsym(RTLD_DEFAULT, "MPI_Allreduce")), "libmoesaic_mpi") == NULL) {
    fprintf(stderr, "libmoesaic_mpi.so is not preloaded\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, AtFinalize, &key, NULL);
  MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
  if (argc > 1 && strcmp(argv[1], "huge") == 0) {
    if (size == 2) Huge();
  } else if (argc > 2 && strcmp(argv[1], "crosses") == 0) {
    if (size == 4) Crosses(strcmp(argv[2], "once") == 0);
  } else if (argc > 2) {
    SendsOfAllReduce(atoi(argv[2]), strcmp(argv[1], "sends") == 0);
  } else {
    OurCallsOnly();
    UserOperations();
    PredefinedOperations();
    Empty();
    Addresses();
    NegativeDisplacements();
    Errors();
    Attributes();
    FreedCommunicators();
    Intercommunicators();
    Expect(provided == MPI_THREAD_MULTIPLE, "MPI must support threads");
    if (provided == MPI_THREAD_MULTIPLE) Threads();
  }
  MPI_Comm_dup(MPI_COMM_WORLD, &kept);
  MPI_Allreduce(&rank, &all, 1, MPI_INT, MPI_MAX, kept);
  PMPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) printf("%d checks per rank on %d ranks, %d failures\n", checks, size, all);
  MPI_Finalize();
  return failures != 0 || all != 0;
}
