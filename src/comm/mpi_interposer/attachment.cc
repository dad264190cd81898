#include "comm/mpi_interposer/attachment.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>

#include "comm/topology/node_topology.h"
#include "comm/transport/mpi_transport.h"

namespace moesaic::comm {
namespace {

// MPI programs may wait for each other for any time.
constexpr double kNoLimitSeconds = 1e9;

// Attachments are freed by MPI: with their communicators, and the rest with MPI_COMM_SELF in MPI_Finalize,
// when MPI can still be called.
struct Registry {
  std::mutex mutex;
  int keyval = MPI_KEYVAL_INVALID;
  int final_keyval = MPI_KEYVAL_INVALID;
  bool is_final = false;                                 // calls are passed through from now on
  std::vector<std::unique_ptr<Attachment>> attachments;  // in the order of their creation
  std::vector<int> world_places;                         // device of each rank of MPI_COMM_WORLD
};

Registry& TheRegistry() {
  static Registry* const registry = new Registry;  // never freed: MPI_Finalize may run in a destructor
  return *registry;
}

// The transport is freed after the communicator that borrows it.
void Free(std::unique_ptr<Attachment> ended) {
  ended->communicator.reset();
  ended->transport.reset();
}

int DeleteAttachment(MPI_Comm, int, void* value, void*) {
  Registry& registry = TheRegistry();
  std::unique_ptr<Attachment> ended;
  {
    const std::lock_guard lock(registry.mutex);
    const auto found = std::ranges::find(registry.attachments, value, &std::unique_ptr<Attachment>::get);
    if (found == registry.attachments.end()) return MPI_SUCCESS;
    ended = std::move(*found);
    registry.attachments.erase(found);
  }
  Free(std::move(ended));
  return MPI_SUCCESS;
}

// Ranks free communicators in the order of creation. It is the same on all ranks unless several threads
// create some.
int DeleteAll(MPI_Comm, int, void*, void*) {
  Registry& registry = TheRegistry();
  std::vector<std::unique_ptr<Attachment>> ended;
  {
    const std::lock_guard lock(registry.mutex);
    registry.is_final = true;
    ended.swap(registry.attachments);
  }
  for (std::unique_ptr<Attachment>& each : ended) Free(std::move(each));
  return MPI_SUCCESS;
}

void MakeKeyvals(Registry& registry) {
  if (registry.keyval != MPI_KEYVAL_INVALID) return;
  PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, DeleteAttachment, &registry.keyval, nullptr);
  PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, DeleteAll, &registry.final_keyval, nullptr);
  PMPI_Comm_set_attr(MPI_COMM_SELF, registry.final_keyval, nullptr);
}

// Node of each rank, numbered in the order of their first ranks.
std::vector<int> NodesOf(MPI_Comm comm, int rank, int size) {
  MPI_Comm node = MPI_COMM_NULL;
  PMPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  int first = rank;
  PMPI_Allreduce(&rank, &first, 1, MPI_INT, MPI_MIN, node);
  PMPI_Comm_free(&node);
  std::vector<int> nodes(size);
  PMPI_Allgather(&first, 1, MPI_INT, nodes.data(), 1, MPI_INT, comm);
  std::vector<int> firsts = nodes;
  std::ranges::sort(firsts);
  firsts.erase(std::unique(firsts.begin(), firsts.end()), firsts.end());
  for (int& at : nodes) at = static_cast<int>(std::ranges::lower_bound(firsts, at) - firsts.begin());
  return nodes;
}

// Position of each rank when ranks are ordered by node, then by rank.
std::vector<int> PlacesOf(const std::vector<int>& nodes) {
  std::vector<int> order(nodes.size()), places(nodes.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int rank) { return nodes[rank]; });
  for (size_t i = 0; i < order.size(); ++i) places[order[i]] = static_cast<int>(i);
  return places;
}

constexpr char kTopologyVariable[] = "MOESAIC_TOPOLOGY", kTuningVariable[] = "MOESAIC_COLLECTIVE_TUNING";

// The file that a variable names, or null.
const char* FileOf(const char* variable) {
  const char* const path = std::getenv(variable);
  return path == nullptr || *path == 0 ? nullptr : path;
}

StatusOr<std::string> TextOf(const char* variable, const char* path) {
  std::ifstream file(path);
  if (!file) return NotFound("{} must name a file that can be read, found {}", variable, path);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

StatusOr<Topology> TopologyOfFile(const char* path, MPI_Comm comm, int size) {
  ASSIGN_OR_RETURN(const std::string text, TextOf(kTopologyVariable, path));
  ASSIGN_OR_RETURN(const Topology whole, Topology::Parse(text, path));
  int world_rank = 0, world_size = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &world_size);
  if (whole.ranks() != world_size) {
    return InvalidArgument("MOESAIC_TOPOLOGY={} must have one device for each of {} ranks, found {}", path,
                           world_size, whole.ranks());
  }
  const std::vector<int>& world_places = TheRegistry().world_places;
  if (world_places.empty()) {
    return InvalidArgument(
        "MOESAIC_TOPOLOGY needs a program that calls MPI_Init or MPI_Init_thread from C; {} does not apply",
        path);
  }
  MPI_Group group = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  PMPI_Comm_group(comm, &group);
  PMPI_Comm_group(MPI_COMM_WORLD, &world);
  std::vector<int> ranks(size), world_ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  PMPI_Group_translate_ranks(group, size, ranks.data(), world, world_ranks.data());
  PMPI_Group_free(&group);
  PMPI_Group_free(&world);
  for (int& at : world_ranks) {
    if (at == MPI_UNDEFINED)
      return InvalidArgument("MOESAIC_TOPOLOGY does not describe ranks of other jobs ({} found)", size);
    at = world_places[at];
  }
  return whole.Selected(world_ranks);
}

// A communicator of the same ranks without the program's attributes, whose callbacks MPI_Comm_dup would call.
MPI_Comm Bare(MPI_Comm comm, int rank) {
  MPI_Comm bare = MPI_COMM_NULL;
  PMPI_Comm_split(comm, 0, rank, &bare);
  return bare;
}

bool AllAgree(MPI_Comm comm, bool is_ok) {
  int ok = is_ok ? 1 : 0, all_ok = 0;
  PMPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, comm);
  return all_ok != 0;
}

bool AllHaveEqual(MPI_Comm comm, const std::string& text) {
  const uint64_t hash = std::hash<std::string>()(text);
  const std::array<uint64_t, 2> own = {hash, ~hash};
  std::array<uint64_t, 2> least{};
  PMPI_Allreduce(own.data(), least.data(), 2, MPI_UINT64_T, MPI_MIN, comm);
  return least[0] == ~least[1];
}

// The topology of the ranks of `comm`. All ranks get one, or all get an error.
StatusOr<Topology> AgreedTopology(MPI_Comm comm, int rank, int size) {
  Topology topology = TopologyOfNodes(NodesOf(comm, rank, size), "mpi", "nodes by MPI; links are assumed");
  Status status = OkStatus();
  if (const char* const path = FileOf(kTopologyVariable); path != nullptr) {
    StatusOr<Topology> read = TopologyOfFile(path, comm, size);
    status = read.status();
    if (read.ok()) topology = *std::move(read);
  }
  if (!AllAgree(comm, status.ok())) {
    return status.ok() ? NotFound("MOESAIC_TOPOLOGY must name a file that all {} ranks can use", size)
                       : status;
  }
  if (!AllHaveEqual(comm, topology.ToJson())) {
    return InvalidArgument("MOESAIC_TOPOLOGY must be the same topology on all {} ranks", size);
  }
  return topology;
}

StatusOr<TuningTable> TuningOfFile(const char* path) {
  ASSIGN_OR_RETURN(const std::string text, TextOf(kTuningVariable, path));
  return TuningTable::Parse(text, path);
}

// Measured times, which correct the planner's. All ranks get the same table, or all get an error.
StatusOr<std::shared_ptr<const TuningTable>> AgreedTuning(MPI_Comm comm, int size) {
  StatusOr<TuningTable> table = TuningTable();
  if (const char* const path = FileOf(kTuningVariable); path != nullptr) table = TuningOfFile(path);
  if (!AllAgree(comm, table.ok())) {
    return table.ok() ? NotFound("{} must name a file that all {} ranks can use", kTuningVariable, size)
                      : table.status();
  }
  if (!AllHaveEqual(comm, table->ToJson())) {
    return InvalidArgument("{} must be the same table on all {} ranks", kTuningVariable, size);
  }
  return std::make_shared<const TuningTable>(*std::move(table));
}

StatusOr<std::unique_ptr<Attachment>> Attach(MPI_Comm comm, int rank, int size) {
  auto made = std::make_unique<Attachment>();
  ASSIGN_OR_RETURN(Topology topology, AgreedTopology(comm, rank, size));
  CommunicatorOptions options;
  options.time_limit_s = kNoLimitSeconds;
  ASSIGN_OR_RETURN(options.planner.tuning, AgreedTuning(comm, size));
  MPI_Comm bare = Bare(comm, rank);
  StatusOr<std::unique_ptr<Transport>> transport =
      MakeMpiTransport(bare, {.tag_limit = Tag{1} << kCommunicatorTagBits});
  PMPI_Comm_free(&bare);
  RETURN_IF_ERROR(transport.status());
  made->transport = *std::move(transport);
  ASSIGN_OR_RETURN(made->communicator, Communicator::Create(*made->transport, std::move(topology), options));
  return made;
}

}  // namespace

void Prepare() {
  int rank = 0, size = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  Registry& registry = TheRegistry();
  registry.world_places = PlacesOf(NodesOf(MPI_COMM_WORLD, rank, size));
  const std::lock_guard lock(registry.mutex);
  MakeKeyvals(registry);
}

Attachment* AttachmentOf(MPI_Comm comm) {
  int initialized = 0, finalized = 0;
  PMPI_Initialized(&initialized);
  PMPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0 || comm == MPI_COMM_NULL) return nullptr;
  Registry& registry = TheRegistry();
  {
    const std::lock_guard lock(registry.mutex);
    if (registry.is_final) return nullptr;
    MakeKeyvals(registry);
  }
  void* value = nullptr;
  int found = 0;
  if (PMPI_Comm_get_attr(comm, registry.keyval, static_cast<void*>(&value), &found) != MPI_SUCCESS)
    return nullptr;
  if (found != 0) return static_cast<Attachment*>(value);

  std::unique_ptr<Attachment> made;
  int is_inter = 0, rank = 0, size = 0;
  PMPI_Comm_test_inter(comm, &is_inter);
  PMPI_Comm_size(comm, &size);
  PMPI_Comm_rank(comm, &rank);
  if (is_inter == 0 && size > kMaxCommunicatorRanks) {
    if (rank == 0) {
      std::fprintf(stderr, "libmoesaic_mpi: calls of %d ranks, more than %d, are passed to MPI\n", size,
                   kMaxCommunicatorRanks);
    }
  } else if (is_inter == 0 && size > 1) {
    StatusOr<std::unique_ptr<Attachment>> attached = Attach(comm, rank, size);
    const bool is_ours = AllAgree(comm, attached.ok());
    if (!attached.ok()) {
      std::fprintf(stderr, "libmoesaic_mpi: rank %d passes calls to MPI: %s\n", rank,
                   attached.status().ToString().c_str());
    }
    if (is_ours) made = *std::move(attached);
  }
  Attachment* const kept = made.get();
  if (made != nullptr) {
    const std::lock_guard lock(registry.mutex);
    registry.attachments.push_back(std::move(made));
  }
  PMPI_Comm_set_attr(comm, registry.keyval, kept);
  return kept;
}

}  // namespace moesaic::comm
