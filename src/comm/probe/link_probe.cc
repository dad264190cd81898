#include "comm/probe/link_probe.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/probe/rank_groups.h"
#include "comm/probe/rank_place.h"
#include "comm/transport/local_transport.h"
#include "runtime/topology.h"

namespace moesaic::comm {
namespace {

constexpr Tag kCommandTag = 1, kReportTag = 2, kDataTag = 3, kReplyTag = 4;
constexpr int64_t kSmallBytes = 8;
constexpr size_t kPieceBytes = 256 << 10;
constexpr int kMinMessages = 3, kMaxMessages = 2000;  // per measurement
constexpr int kBatchGrowth = 4;
// Largest numbers of measurements of MeasurePairs() per pair, and of MeasureGroups() per group. Batches of a
// pair have 10, 40, ... 2560 and 1, 4, ... 4096 messages.
constexpr double kMeasurementsPerPair = 5 + 7, kMeasurementsPerGroup = 3;

enum class Kind : int32_t {
  kPingPong,  // `messages` there and back
  kStream,    // `messages` there, then an empty answer
  kExchange,  // `messages` in both directions at once
  kStop,
};

struct Command {
  Kind kind = Kind::kStop;
  int32_t peer = 0;
  int32_t is_first = 0;  // the rank that sends first and reports
  int32_t messages = 0;
  int64_t bytes = 0;
};

struct PlaceRecord {
  char host[64] = {};
  int32_t socket = -1, numa_node = -1, cache = -1, core = -1;
  int64_t memory_bytes = 0;
};

template <typename T>
std::span<std::byte> BytesOf(T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_writable_bytes(std::span(&value, 1));
}

// One rank's part in measurements.
class Worker {
 public:
  Worker(Transport& transport, const ProbeOptions& options) : transport_(transport), options_(options) {}

  Status Send(int peer, Tag tag, std::span<const std::byte> data) {
    ASSIGN_OR_RETURN(const TransferId id, transport_.Send(peer, tag, data));
    return Wait(transport_, id, options_.time_limit_s);
  }
  Status Receive(int peer, Tag tag, std::span<std::byte> data) {
    ASSIGN_OR_RETURN(const TransferId id, transport_.Receive(peer, tag, data));
    return Wait(transport_, id, options_.time_limit_s);
  }

  // Median seconds of one message; of one in each direction for kExchange.
  StatusOr<double> Run(const Command& command) {
    out_.resize(command.bytes);
    in_.resize(command.bytes);
    std::vector<double> seconds;
    const bool sends = command.is_first != 0 || command.kind == Kind::kExchange;
    const bool receives = command.is_first == 0 || command.kind == Kind::kExchange;
    double begin = transport_.Now();
    // The first message warms up caches and connections.
    for (int i = 0; i <= command.messages; ++i) {
      if (i == 1) begin = transport_.Now();
      const double start = transport_.Now();
      if (command.kind != Kind::kPingPong) {
        RETURN_IF_ERROR(TransferPieces(command.peer, sends, receives));
      } else if (command.is_first != 0) {
        RETURN_IF_ERROR(Send(command.peer, kDataTag, out_));
        RETURN_IF_ERROR(Receive(command.peer, kReplyTag, in_));
      } else {
        RETURN_IF_ERROR(Receive(command.peer, kDataTag, in_));
        RETURN_IF_ERROR(Send(command.peer, kReplyTag, in_));
      }
      const double both = transport_.Now() - start;
      if (i > 0) seconds.push_back(command.kind == Kind::kPingPong ? both / 2 : both);
    }
    if (command.kind == Kind::kStream) {
      std::byte answer{};
      RETURN_IF_ERROR(command.is_first != 0 ? Receive(command.peer, kReplyTag, BytesOf(answer))
                                            : Send(command.peer, kReplyTag, BytesOf(answer)));
      return (transport_.Now() - begin) / command.messages;
    }
    std::nth_element(seconds.begin(), seconds.begin() + std::ssize(seconds) / 2, seconds.end());
    return seconds[seconds.size() / 2];
  }

  // Follows the commands of rank 0 until it stops.
  Status Serve() {
    PlaceRecord record = Record();
    ASSIGN_OR_RETURN(const TransferId report, transport_.Send(0, kReportTag, BytesOf(record)));
    RETURN_IF_ERROR(WaitForDirector(report, options_.time_limit_s));
    for (Command command;;) {
      ASSIGN_OR_RETURN(const TransferId next, transport_.Receive(0, kCommandTag, BytesOf(command)));
      RETURN_IF_ERROR(WaitForDirector(next, LongestProbeSeconds()));
      if (command.kind == Kind::kStop) return OkStatus();
      ASSIGN_OR_RETURN(double seconds, Run(command));
      RETURN_IF_ERROR(Send(0, kReportTag, BytesOf(seconds)));
    }
  }

  // Moves the buffers in pieces that are in flight together, as collectives do: some libraries do not use
  // both directions of a link for one large message each way.
  Status TransferPieces(int peer, bool sends, bool receives) {
    std::vector<TransferId> transfers;
    Status first = OkStatus();
    for (size_t at = 0; at < out_.size() && first.ok(); at += kPieceBytes) {
      const size_t size = std::min(kPieceBytes, out_.size() - at);
      if (receives)
        first = Keep(transport_.Receive(peer, kDataTag, std::span(in_).subspan(at, size)), &transfers);
      if (sends && first.ok())
        first = Keep(transport_.Send(peer, kDataTag, std::span(out_).subspan(at, size)), &transfers);
    }
    for (const TransferId transfer : transfers) {
      if (!first.ok()) {
        transport_.Cancel(transfer);
      } else {
        first = Wait(transport_, transfer, options_.time_limit_s);
      }
    }
    return first;
  }

  static Status Keep(const StatusOr<TransferId>& started, std::vector<TransferId>* transfers) {
    if (started.ok()) transfers->push_back(*started);
    return started.status();
  }

  static PlaceRecord Record() {
    const RankPlace place = PlaceOfThread();
    PlaceRecord record;
    place.host.copy(record.host, sizeof(record.host) - 1);
    record.socket = place.socket;
    record.numa_node = place.numa_node;
    record.cache = place.cache;
    record.core = place.core;
    record.memory_bytes = place.memory_bytes;
    return record;
  }

 private:
  // Seconds of a probe whose waits all take as long as they may. A job has fewer groups than ranks.
  double LongestProbeSeconds() const {
    const double ranks = transport_.size(), pairs = ranks * (ranks - 1) / 2;
    return (kMeasurementsPerPair * pairs + kMeasurementsPerGroup * ranks + 1) * options_.time_limit_s;
  }

  // Like Wait(), and ends when the caller is interrupted.
  Status WaitForDirector(TransferId id, double limit_s) {
    const double end = transport_.Now() + limit_s;
    for (Status result;;) {
      transport_.Progress();
      if (transport_.Test(id, &result)) return result;
      if (options_.interrupted && options_.interrupted()) {
        transport_.Cancel(id);
        return Cancelled("the probe was interrupted");
      }
      if (transport_.Now() >= end) {
        transport_.Cancel(id);
        return absl::DeadlineExceededError(
            fmt::format("probe: rank {} waited {:.3g} s for rank 0; check that rank 0 runs the probe, too",
                        transport_.rank(), limit_s));
      }
      transport_.Idle();
    }
  }

  Transport& transport_;
  const ProbeOptions& options_;
  std::vector<std::byte> out_, in_;
};

RankPlace PlaceOf(const PlaceRecord& record) {
  return {.host = std::string(record.host, strnlen(record.host, sizeof(record.host))),
          .socket = record.socket,
          .numa_node = record.numa_node,
          .cache = record.cache,
          .core = record.core,
          .memory_bytes = record.memory_bytes};
}

// Rank 0: commands measurements and collects their results.
class Director {
 public:
  Director(Transport& transport, const ProbeOptions& options)
      : transport_(transport), options_(options), worker_(transport, options), links_(transport.size()) {}

  StatusOr<Topology> Run() {
    for (int rank = 0; rank < transport_.size(); ++rank) {
      PlaceRecord record = Worker::Record();
      if (rank > 0) RETURN_IF_ERROR(worker_.Receive(rank, kReportTag, BytesOf(record)));
      places_.push_back(PlaceOf(record));
    }
    RETURN_IF_ERROR(MeasurePairs());
    RankGroup root = GroupRanks(links_, places_);
    RETURN_IF_ERROR(MeasureGroups(&root));
    const std::string origin =
        fmt::format("measured between {} ranks by {} with messages of {} and {} bytes", transport_.size(),
                    transport_.name(), kSmallBytes, options_.large_bytes);
    return TopologyOf(root, links_, places_, options_.name, origin);
  }

  // Lets all other ranks return. Ranks that do not answer share one time limit.
  Status Stop() {
    Command stop;
    Status first = OkStatus();
    std::vector<TransferId> sends;
    for (int rank = 1; rank < transport_.size(); ++rank) {
      const Status started = Worker::Keep(transport_.Send(rank, kCommandTag, BytesOf(stop)), &sends);
      if (first.ok()) first = started;
    }
    const double end = transport_.Now() + options_.time_limit_s;
    for (const TransferId send : sends) {
      const Status sent = Wait(transport_, send, std::max(0.0, end - transport_.Now()));
      if (first.ok()) first = sent;
    }
    return first;
  }

 private:
  struct Pair {
    int from = 0, to = 0;
  };

  // Seconds of a message of each pair while all pairs are active. Pairs are disjoint.
  StatusOr<std::vector<double>> Measure(Kind kind, const std::vector<Pair>& pairs, int64_t bytes,
                                        int messages) {
    Command own{.kind = Kind::kStop};
    for (const Pair& pair : pairs) {
      for (const bool is_first : {false, true}) {
        const int rank = is_first ? pair.from : pair.to;
        Command command{kind, is_first ? pair.to : pair.from, is_first ? 1 : 0, messages, bytes};
        if (rank == 0) {
          own = command;
        } else {
          RETURN_IF_ERROR(worker_.Send(rank, kCommandTag, BytesOf(command)));
        }
      }
    }
    double own_seconds = 0;
    if (own.kind != Kind::kStop) {
      ASSIGN_OR_RETURN(own_seconds, worker_.Run(own));
    }
    std::vector<double> seconds;
    for (const Pair& pair : pairs) {
      double first = own_seconds, second = own_seconds;
      if (pair.from != 0) RETURN_IF_ERROR(worker_.Receive(pair.from, kReportTag, BytesOf(first)));
      if (pair.to != 0) RETURN_IF_ERROR(worker_.Receive(pair.to, kReportTag, BytesOf(second)));
      seconds.push_back(first);
    }
    return seconds;
  }

  // Seconds of a message of one pair: the least median of batches, which grow until pair_s has passed. A rank
  // of a busy host that waits for its core takes a thousand times as long, so no batch may be planned by the
  // median of the one before it.
  StatusOr<double> LatencyOf(const std::vector<Pair>& pair, int64_t bytes, int messages) {
    const double start = transport_.Now();
    double least = std::numeric_limits<double>::infinity(), now = start;
    for (int measured = 0;; messages *= kBatchGrowth) {
      ASSIGN_OR_RETURN(const std::vector<double> seconds, Measure(Kind::kPingPong, pair, bytes, messages));
      least = std::min(least, seconds[0]);
      measured += messages;
      const double before = std::exchange(now, transport_.Now());
      const double next_s = (now - before) * kBatchGrowth;
      if (measured >= kMinMessages && now - start + next_s > options_.pair_s) return least;
      if (measured >= kMaxMessages) return least;
    }
  }

  // The number of messages that fit into the time of a measurement.
  int Messages(double seconds) const {
    const double fitting = options_.pair_s / std::max(seconds, 1e-9);
    return static_cast<int>(
        std::clamp(fitting, static_cast<double>(kMinMessages), static_cast<double>(kMaxMessages)));
  }

  Status MeasurePairs() {
    const int ranks = transport_.size();
    const int total = ranks * (ranks - 1) / 2;
    int done = 0;
    for (int a = 0; a < ranks; ++a) {
      for (int b = a + 1; b < ranks; ++b) {
        if (options_.progress && !options_.progress(done, total))
          return Cancelled("the probe was interrupted");
        const std::vector<Pair> pair = {{a, b}};
        ASSIGN_OR_RETURN(const double small, LatencyOf(pair, kSmallBytes, 10));
        ASSIGN_OR_RETURN(const double large, LatencyOf(pair, options_.large_bytes, 1));
        const double transfer = std::max(large - small, large * 1e-3);
        links_.Set(a, b, small, static_cast<double>(options_.large_bytes) / transfer);
        ++done;
      }
    }
    if (options_.progress) options_.progress(total, total);
    return OkStatus();
  }

  // Whether messages between the children of a group share a port, and whether ports are full-duplex.
  Status MeasureGroups(RankGroup* group) {
    for (RankGroup& child : group->children) RETURN_IF_ERROR(MeasureGroups(&child));
    if (group->children.size() < 2) return OkStatus();
    // Children of several ranks come first.
    std::vector<const RankGroup*> children;
    for (const RankGroup& child : group->children) children.push_back(&child);
    std::stable_sort(children.begin(), children.end(), [](const RankGroup* a, const RankGroup* b) {
      return a->ranks.size() > b->ranks.size();
    });
    const std::vector<int>&a = children[0]->ranks, &b = children[1]->ranks;
    const int64_t bytes = options_.large_bytes;
    const int messages = Messages(static_cast<double>(bytes) / links_.bandwidth(a[0], b[0]));
    ASSIGN_OR_RETURN(const std::vector<double> alone,
                     Measure(Kind::kStream, {{a[0], b[0]}}, bytes, messages));
    ASSIGN_OR_RETURN(const std::vector<double> both,
                     Measure(Kind::kExchange, {{a[0], b[0]}}, bytes, messages));
    group->duplex_ratio = 2 * alone[0] / both[0];
    int other = -1;  // receiver of the second message
    if (b.size() > 1) {
      other = b[1];
    } else if (children.size() > 2) {
      other = children[2]->ranks[0];
    }
    if (a.size() < 2 || other < 0) return OkStatus();
    ASSIGN_OR_RETURN(const std::vector<double> two,
                     Measure(Kind::kStream, {{a[0], b[0]}, {a[1], other}}, bytes, messages));
    group->shared_ratio = alone[0] / two[0] + alone[0] / two[1];
    return OkStatus();
  }

  Transport& transport_;
  const ProbeOptions& options_;
  Worker worker_;
  LinkMatrix links_;
  std::vector<RankPlace> places_;
};

}  // namespace

StatusOr<std::optional<Topology>> ProbeLinks(Transport& transport, const ProbeOptions& options) {
  if (transport.rank() != 0) {
    RETURN_IF_ERROR(Worker(transport, options).Serve());
    return std::optional<Topology>();
  }
  Director director(transport, options);
  StatusOr<Topology> topology = director.Run();
  const Status stopped = director.Stop();
  RETURN_IF_ERROR(topology.status());
  RETURN_IF_ERROR(stopped);
  return std::optional<Topology>(*std::move(topology));
}

StatusOr<Topology> ProbeThreads(int ranks, const ProbeOptions& options) {
  const std::vector<int> cpus = runtime::DetectTopology().cpus;
  if (ranks < 1 || ranks > std::ssize(cpus)) {
    return InvalidArgument("this process may use {} hardware threads; ranks to probe: {}", cpus.size(),
                           ranks);
  }
  StatusOr<std::optional<Topology>> result = std::optional<Topology>();
  RunRanks(ranks, [&](Transport& transport) {
    // A thread that the system does not bind is measured where it runs.
    runtime::BindToCpus({cpus[transport.rank()]});
    StatusOr<std::optional<Topology>> probed = ProbeLinks(transport, options);
    if (transport.rank() == 0) result = std::move(probed);
  });
  RETURN_IF_ERROR(result.status());
  return **std::move(result);
}

}  // namespace moesaic::comm
