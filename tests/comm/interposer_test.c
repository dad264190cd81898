// Compares the collectives of libmoesaic_mpi.so, which is preloaded, with those of MPI itself (PMPI_*): all
// types, operations, sizes, layouts and MPI_IN_PLACE. Usage: mpirun -x LD_PRELOAD=... interposer_test [brief]
// "brief" takes three of the eight sizes.
#define _GNU_SOURCE  // dladdr
#include <dlfcn.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMaxRanks = 16, kMaxBytes = 1 << 21 };

static int rank, size, failures, runs, is_brief;
static MPI_Comm comm;
static char *in, *ours, *theirs;

static void Compare(const char* what, size_t bytes) {
  ++runs;
  if (memcmp(ours, theirs, bytes) == 0) return;
  if (failures++ < 5) {
    size_t i = 0;
    while (ours[i] == theirs[i]) ++i;
    fprintf(stderr, "rank %d of %d: %s differs at byte %zu of %zu\n", rank, size, what, i, bytes);
  }
}

static void Check(const char* what, int code) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length;
  MPI_Error_string(code, text, &length);
  fprintf(stderr, "rank %d: %s returned %d: %s\n", rank, what, code, text);
  ++failures;
}

// Small integers, so that sums and products are exact in every type and order.
static void Fill(MPI_Datatype type, int count, int seed) {
  for (int i = 0; i < count; ++i) {
    const int value =
        (i * 7 + seed * 3 + rank * 5) % 3 - (type == MPI_UNSIGNED || type == MPI_UNSIGNED_CHAR ? 0 : 1);
    if (type == MPI_FLOAT)
      ((float*)in)[i] = (float)value;
    else if (type == MPI_DOUBLE)
      ((double*)in)[i] = value;
    else if (type == MPI_INT || type == MPI_UNSIGNED)
      ((int32_t*)in)[i] = value;
    else if (type == MPI_LONG || type == MPI_UNSIGNED_LONG)
      ((int64_t*)in)[i] = value;
    else if (type == MPI_SHORT)
      ((int16_t*)in)[i] = (int16_t)value;
    else
      ((int8_t*)in)[i] = (int8_t)value;
  }
}

static void Clear(void) {
  memset(ours, 0x5a, kMaxBytes);
  memset(theirs, 0x5a, kMaxBytes);
}

static void Reductions(MPI_Datatype type, const char* name, MPI_Op op, int count) {
  int bytes, counts[kMaxRanks], total = 0;
  char what[100];
  MPI_Type_size(type, &bytes);
  for (int i = 0; i < size; ++i) total += counts[i] = i % 3 == 1 ? 0 : count / (i + 1);
  for (int in_place = 0; in_place < 2; ++in_place) {
    Fill(type, count, 1);
    Clear();
    if (in_place) memcpy(ours, in, (size_t)count * bytes), memcpy(theirs, in, (size_t)count * bytes);
    snprintf(what, sizeof(what), "MPI_Allreduce of %d %s%s", count, name, in_place ? " in place" : "");
    Check(what, MPI_Allreduce(in_place ? MPI_IN_PLACE : in, ours, count, type, op, comm));
    PMPI_Allreduce(in_place ? MPI_IN_PLACE : in, theirs, count, type, op, comm);
    Compare(what, kMaxBytes);

    Fill(type, total, 2);
    Clear();
    if (in_place) memcpy(ours, in, (size_t)total * bytes), memcpy(theirs, in, (size_t)total * bytes);
    snprintf(what, sizeof(what), "MPI_Reduce_scatter of %d %s%s", total, name, in_place ? " in place" : "");
    Check(what, MPI_Reduce_scatter(in_place ? MPI_IN_PLACE : in, ours, counts, type, op, comm));
    PMPI_Reduce_scatter(in_place ? MPI_IN_PLACE : in, theirs, counts, type, op, comm);
    Compare(what, (size_t)counts[rank] * bytes);  // the rest of an in-place buffer is undefined

    const int part = count / size;
    Fill(type, part * size, 3);
    Clear();
    if (in_place)
      memcpy(ours, in, (size_t)part * size * bytes), memcpy(theirs, in, (size_t)part * size * bytes);
    snprintf(what, sizeof(what), "MPI_Reduce_scatter_block of %d %s%s", part, name,
             in_place ? " in place" : "");
    Check(what, MPI_Reduce_scatter_block(in_place ? MPI_IN_PLACE : in, ours, part, type, op, comm));
    PMPI_Reduce_scatter_block(in_place ? MPI_IN_PLACE : in, theirs, part, type, op, comm);
    Compare(what, (size_t)part * bytes);
  }
}

// `sent` describes the same data as `type`: `per` elements of `type` are one of `sent`. All counts are
// multiples of `unit`. MPI itself is called with `type` only, because Open MPI's algorithm depends on the
// type of each rank, and it hangs.
static void Moves(MPI_Datatype type, const char* name, int count, MPI_Datatype sent, int per, int unit) {
  int bytes, counts[kMaxRanks], from[kMaxRanks], to[kMaxRanks], sends[kMaxRanks], receives[kMaxRanks];
  char what[100];
  MPI_Aint lower, extent;
  MPI_Type_get_extent(type, &lower, &extent);
  MPI_Type_size(type, &bytes);
  count -= count % unit;
  for (int in_place = 0; in_place < 2; ++in_place) {
    for (size_t i = 0; i < kMaxBytes; ++i) in[i] = (char)(i * 31 + rank * 101 + (i >> 9));
    Clear();
    if (in_place) memcpy(ours, in, kMaxBytes / 2), memcpy(theirs, in, kMaxBytes / 2);
    const void* const send = in_place ? MPI_IN_PLACE : in;
    snprintf(what, sizeof(what), "MPI_Allgather of %d %s%s", count, name, in_place ? " in place" : "");
    Check(what, MPI_Allgather(send, count / per, sent, ours, count, type, comm));
    PMPI_Allgather(send, count, type, theirs, count, type, comm);
    Compare(what, kMaxBytes);

    Clear();
    if (in_place) memcpy(ours, in, kMaxBytes / 2), memcpy(theirs, in, kMaxBytes / 2);
    snprintf(what, sizeof(what), "MPI_Alltoall of %d %s%s", count, name, in_place ? " in place" : "");
    Check(what, MPI_Alltoall(send, count / per, sent, ours, count, type, comm));
    PMPI_Alltoall(send, count, type, theirs, count, type, comm);
    Compare(what, kMaxBytes);

    for (int gaps = 0; gaps < 2; ++gaps) {
      int next = 0;
      for (int i = 0; i < size; ++i) {
        counts[i] = (i % 2 == 1 ? count / 2 : count) / unit * unit;
        to[i] = next;
        next += counts[i] + gaps * 2;
      }
      Clear();
      if (in_place) memcpy(ours, in, kMaxBytes / 2), memcpy(theirs, in, kMaxBytes / 2);
      snprintf(what, sizeof(what), "MPI_Allgatherv of %d %s%s%s", count, name, in_place ? " in place" : "",
               gaps ? " with gaps" : "");
      Check(what, MPI_Allgatherv(send, counts[rank] / per, sent, ours, counts, to, type, comm));
      PMPI_Allgatherv(send, counts[rank], type, theirs, counts, to, type, comm);
      Compare(what, kMaxBytes);

      int next_send = 0, next_receive = 0;
      for (int i = 0; i < size; ++i) {
        const int pair = in_place ? i + rank : i + 2 * rank, back = in_place ? i + rank : rank + 2 * i;
        sends[i] = count / (pair % 4 + 1) / unit * unit / per;
        receives[i] = count / (back % 4 + 1) / unit * unit;
        from[i] = next_send;
        to[i] = next_receive;
        next_send += sends[i] + gaps;
        next_receive += receives[i] + gaps;
      }
      Clear();
      if (in_place) memcpy(ours, in, kMaxBytes / 2), memcpy(theirs, in, kMaxBytes / 2);
      snprintf(what, sizeof(what), "MPI_Alltoallv of %d %s%s%s", count, name, in_place ? " in place" : "",
               gaps ? " with gaps" : "");
      Check(what, MPI_Alltoallv(send, sends, from, sent, ours, receives, to, type, comm));
      for (int i = 0; i < size; ++i) sends[i] *= per, from[i] *= per;
      PMPI_Alltoallv(send, sends, from, type, theirs, receives, to, type, comm);
      Compare(what, kMaxBytes);
    }
  }
}

static void All(MPI_Comm on) {
  comm = on;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  const struct {
    MPI_Datatype type;
    const char* name;
  } types[] = {{MPI_FLOAT, "float"},
               {MPI_DOUBLE, "double"},
               {MPI_INT, "int"},
               {MPI_LONG, "long"},
               {MPI_SIGNED_CHAR, "signed char"},
               {MPI_UNSIGNED_CHAR, "unsigned char"},
               {MPI_UNSIGNED, "unsigned"},
               {MPI_UNSIGNED_LONG, "unsigned long"},
               {MPI_SHORT, "short"}};
  const MPI_Op ops[] = {MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX};
  const int counts[] = {0, 1, 2, 7, 100, 1023, 4096, 20001};
  for (size_t c = is_brief; c < sizeof(counts) / sizeof(*counts); c += is_brief ? 3 : 1) {
    for (size_t t = 0; t < sizeof(types) / sizeof(*types); ++t) {
      for (size_t o = 0; o < 4; ++o) Reductions(types[t].type, types[t].name, ops[o], counts[c]);
      Moves(types[t].type, types[t].name, counts[c], types[t].type, 1, 1);
    }
    MPI_Datatype strided, pairs;
    MPI_Type_vector(2, 1, 2, MPI_INT, &strided);
    MPI_Type_create_resized(strided, 0, 16, &pairs);
    MPI_Type_commit(&pairs);
    Moves(pairs, "strided pairs", counts[c] / 2, pairs, 1, 1);
    // Ranks describe equal data by different types.
    MPI_Datatype triples;
    MPI_Type_contiguous(3, MPI_INT, &triples);
    MPI_Type_commit(&triples);
    if (rank % 2 == 0)
      Moves(MPI_INT, "int, as triples", counts[c], triples, 3, 3);
    else
      Moves(MPI_INT, "int", counts[c], MPI_INT, 1, 3);
    MPI_Type_free(&strided);
    MPI_Type_free(&pairs);
    MPI_Type_free(&triples);
  }
  struct {
    float f;
    int i;
  } located = {(float)(rank % 3), rank}, best[2];
  MPI_Allreduce(&located, &best[0], 1, MPI_FLOAT_INT, MPI_MAXLOC, comm);
  PMPI_Allreduce(&located, &best[1], 1, MPI_FLOAT_INT, MPI_MAXLOC, comm);
  if (best[0].i != best[1].i) ++failures;
}

// The library that the name is bound to.
static const char* LibraryOf(void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 ? info.dli_fname : "unknown";
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  is_brief = argc > 1 && strcmp(argv[1], "brief") == 0;
  in = malloc(kMaxBytes), ours = malloc(kMaxBytes), theirs = malloc(kMaxBytes);
  if (strstr(LibraryOf(dlsym(RTLD_DEFAULT, "MPI_Allreduce")), "libmoesaic_mpi") == NULL) {
    fprintf(stderr, "libmoesaic_mpi.so is not preloaded\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  int world_rank, world_size;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  All(MPI_COMM_WORLD);
  // Communicators with other orders and sizes, each used again after one is freed.
  for (int round = 0; round < 2; ++round) {
    MPI_Comm split;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, -world_rank, &split);
    All(split);
    MPI_Comm_free(&split);
  }
  All(MPI_COMM_SELF);
  // Errors are those of the communicator's handler.
  MPI_Comm strict;
  MPI_Comm_dup(MPI_COMM_WORLD, &strict);
  MPI_Comm_set_errhandler(strict, MPI_ERRORS_RETURN);
  if (world_size > 1) {
    int counts[kMaxRanks], expected[kMaxRanks], places[kMaxRanks] = {0};
    for (int i = 0; i < world_size; ++i) counts[i] = 1, expected[i] = 2;
    if (MPI_Alltoallv(in, counts, places, MPI_INT, ours, expected, places, MPI_INT, strict) == MPI_SUCCESS) {
      fprintf(stderr, "rank %d: sizes that differ are no error\n", world_rank);
      ++failures;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    memset(in, 1, 4);
    comm = strict;
    Check("after an error", MPI_Allreduce(in, ours, 1, MPI_INT, MPI_SUM, strict));
  }
  MPI_Comm_free(&strict);
  int all = 0;
  PMPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (world_rank == 0) printf("%d calls on %d ranks, %d failures\n", runs, world_size, all);
  MPI_Finalize();
  free(in), free(ours), free(theirs);
  return all != 0;
}
