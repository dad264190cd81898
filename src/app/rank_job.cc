#include "app/rank_job.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "app/collective_tuning.h"
#include "app/input.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "base/checksum.h"
#include "comm/probe/host_topology.h"
#include "comm/transport/open_transport.h"
#include "parallel/placement/placement_file.h"
#include "runtime/topology.h"

namespace moesaic::app {
namespace {

constexpr double kMeetSeconds = 60;      // for all ranks to start and meet
constexpr double kFarewellSeconds = 60;  // for started ranks to free their memory and end after the engine
constexpr comm::Tag kFingerprintTag = 10;
constexpr comm::Tag kHostTag = 8;  // tags below parallel::kFirstGroupTag are free for single messages
constexpr comm::Tag kKernelTag = 12, kCoreTag = 14;

// A socket that listens on a free port of the loopback interface.
class LoopbackListener {
 public:
  LoopbackListener() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {}
  ~LoopbackListener() {
    if (fd_ >= 0) close(fd_);
  }
  LoopbackListener(const LoopbackListener&) = delete;
  LoopbackListener& operator=(const LoopbackListener&) = delete;

  /// Returns the port.
  StatusOr<uint16_t> Listen() const {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (fd_ < 0 || bind(fd_, generic, length) != 0 || listen(fd_, 1024) != 0 ||
        getsockname(fd_, generic, &length) != 0) {
      return IoError("can't listen on 127.0.0.1 for ranks: {}", std::strerror(errno));
    }
    return ntohs(address.sin_port);
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

StatusOr<std::string> RandomSecret() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) {
    return IoError("can't read random bytes for the job's secret: {}", std::strerror(errno));
  }
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

// Returns the number of tasks of this process's job step in Slurm; 1 without one.
int TasksOfStep() {
  constexpr long kMaxTasks = 1 << 20;
  const char* const text = std::getenv("SLURM_STEP_NUM_TASKS");
  if (text == nullptr) return 1;
  char* end = nullptr;
  const long tasks = std::strtol(text, &end, 10);
  return end != text && *end == '\0' && tasks >= 0 && tasks < kMaxTasks ? static_cast<int>(tasks) : 1;
}

// Ranks exchange texts of limited length, so that a digest of the whole text comes first.
std::string WithDigest(const std::string& text) { return fmt::format("{} {}", base::HexDigest(text), text); }
constexpr size_t kDigestCharacters = 17;

// A rank that does not answer makes the others wait until their time limit.
void ReportSilence(int rank, double silent_s) {
  if (silent_s > 0) {
    Tell(
        "rank {} has not answered for {:.1f} s: its process is stopped, or its host is overloaded or "
        "unreachable\n",
        rank, silent_s);
  } else {
    Tell("rank {} answers again\n", rank);
  }
}

// Refuses a number of processes that is surely a mistake.
Status CheckLocalRanks(int ranks) {
  constexpr int kRanksPerCpu = 4, kMinRanks = 16;
  const int most = std::max(kMinRanks, kRanksPerCpu * static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  const int tasks = TasksOfStep();
  if (tasks > 1) {
    return InvalidArgument(
        "srun started {} tasks that have no address to meet at, so each would start ranks of its own; set "
        "MOESAIC_RENDEZVOUS to HOST:PORT of the first task and MOESAIC_JOB_SECRET to a random text, as "
        "deploy/slurm/moesaic.sbatch does",
        tasks);
  }
  if (ranks <= most) return OkStatus();
  return InvalidArgument(
      "this machine runs at most {} ranks, found {}; start ranks on several machines by mpirun", most, ranks);
}

StatusOr<comm::Topology> ReadTopology(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadInput(path));
  return comm::Topology::Parse(text, path);
}

constexpr std::string_view kAuto = "auto";

constexpr std::string_view kMeasured = "measured";

// Parses "20,28". `wanted` says what the flag takes.
template <typename Number>
StatusOr<std::vector<Number>> NumbersOf(const char* flag, const char* wanted, const std::string& text) {
  std::vector<Number> numbers;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    Number number = 0;
    const auto [next, error] = std::from_chars(text.data() + at, text.data() + end, number);
    if (error != std::errc() || next != text.data() + end) {
      return InvalidArgument("{} must be {}, found \"{}\"", flag, wanted, text);
    }
    numbers.push_back(number);
    at = end + 1;
  }
  return numbers;
}

StatusOr<std::vector<int>> CountsOf(const char* flag, const std::string& text) {
  return NumbersOf<int>(flag, "numbers separated by commas", text);
}

comm::WireFormat SumFormat(const std::string& dtype) {
  if (dtype == "bf16") return comm::WireFormat::kBf16;
  return dtype == "int8" ? comm::WireFormat::kInt8 : comm::WireFormat::kExact;
}

// Sets the speeds of the ranks of an expert group to those of the devices. Stages may have other devices, but
// not other relative speeds.
Status SetSpeedsOf(const comm::Topology& topology, parallel::Layout& layout) {
  std::vector<double> speeds;
  for (int stage = 0; stage < layout.degrees().pipeline; ++stage) {
    const std::vector<int> ranks = layout.ExpertGroup(layout.RankAt({.stage = stage}));
    ASSIGN_OR_RETURN(const comm::Topology group, topology.Selected(ranks));
    std::vector<double> of_stage = parallel::SpeedsOf(group);
    if (stage > 0 && of_stage != speeds) {
      Tell(
          "the devices of stages 0 and {} have other relative speeds: tokens are divided as for equal ones; "
          "--rank-speeds sets them\n",
          stage);
      return OkStatus();
    }
    speeds = std::move(of_stage);
  }
  return speeds.empty() ? OkStatus() : layout.SetSpeeds(std::move(speeds));
}

}  // namespace

Status RankFlags::CheckLayoutHasNoSizes() const {
  std::vector<std::string> found;
  if (degrees != parallel::Degrees{}) found.push_back(parallel::Name(degrees));
  if (expert_parallel) found.emplace_back("--enable-expert-parallel");
  if (!layers.empty()) found.push_back("--layer-split " + layers);
  if (!experts.empty()) found.push_back("--expert-split " + experts);
  if (found.empty()) return OkStatus();
  return InvalidArgument("--layout {} excludes sizes, found {}; remove the layout or the sizes", layout,
                         fmt::join(found, ", "));
}

StatusOr<parallel::Layout> LayoutOf(const RankFlags& flags) {
  parallel::Degrees degrees = flags.degrees;
  if (flags.expert_parallel && degrees.expert == 1) degrees.expert = degrees.tensor * degrees.data;
  parallel::Split split = flags.split;
  if (!flags.layout.empty() && flags.layout != kAuto) {
    RETURN_IF_ERROR(flags.CheckLayoutHasNoSizes());
    ASSIGN_OR_RETURN(const parallel::Layout stated, parallel::Layout::Parse(flags.layout));
    degrees = stated.degrees();
    split = stated.split();
  }
  if (!flags.layers.empty() && flags.layers != kAuto) {
    ASSIGN_OR_RETURN(split.layers, CountsOf("--layer-split", flags.layers));
  }
  if (!flags.experts.empty()) {
    ASSIGN_OR_RETURN(split.experts, CountsOf("--expert-split", flags.experts));
  }
  StatusOr<parallel::Layout> layout = parallel::Layout::Create(degrees, std::move(split));
  if (!layout.ok()) return Annotate(layout.status(), "layout");
  if (flags.rebalance_s > 0) {
    if (!layout->exchanges_tokens()) {
      return InvalidArgument(
          "--rebalance-experts needs data parallel replicas that divide the experts (-dp N -ep), found {}",
          Name(degrees));
    }
    if (!flags.experts.empty() || !flags.placement.empty()) {
      return InvalidArgument(
          "--rebalance-experts excludes --expert-split and --expert-placement: its plans, and the memory for "
          "its moves, have equal numbers of experts on all ranks and in all layers, which these may exceed");
    }
    layout->LetExpertsMove();
  } else if (flags.redundant_experts > 0) {
    return InvalidArgument("--redundant-experts {} needs --rebalance-experts, which plans where they are",
                           flags.redundant_experts);
  } else if (flags.rebalance_min_gain != RankFlags().rebalance_min_gain) {
    return InvalidArgument("--rebalance-min-gain {} needs --rebalance-experts", flags.rebalance_min_gain);
  } else if (flags.rebalance_workloads != RankFlags().rebalance_workloads) {
    return InvalidArgument("--rebalance-workloads {} needs --rebalance-experts, whose plans consider them",
                           flags.rebalance_workloads);
  }
  parallel::BatchSplitOptions division = flags.spill;
  division.exact = flags.replica_split != "shares";
  if (division.spill_bytes > 0 && !(division.exact && layout->exchanges_tokens())) {
    return InvalidArgument(
        "--spill-experts needs --replica-split exact, and data parallel replicas that divide the experts "
        "(-dp N -ep), found {} and {}",
        flags.replica_split, Name(degrees));
  }
  if (division.spill_bytes == 0 && flags.spill.spill_tolerance != RankFlags().spill.spill_tolerance) {
    return InvalidArgument("--spill-tolerance {} needs --spill-experts", flags.spill.spill_tolerance);
  }
  if (!division.exact && !layout->exchanges_tokens()) {
    return InvalidArgument(
        "--replica-split shares needs data parallel replicas that divide the experts (-dp N -ep), found {}",
        Name(degrees));
  }
  layout->SetBatchSplit(division);
  if (flags.rank_speeds == kMeasured && flags.rebalance_s <= 0) {
    return InvalidArgument("--rank-speeds measured needs --rebalance-experts, whose plans measure them");
  }
  if (!flags.rank_speeds.empty() && flags.rank_speeds != kMeasured) {
    ASSIGN_OR_RETURN(std::vector<double> speeds,
                     NumbersOf<double>("--rank-speeds", "numbers separated by commas, or \"measured\"",
                                       flags.rank_speeds));
    RETURN_IF_ERROR(Annotate(layout->SetSpeeds(std::move(speeds)), "--rank-speeds"));
  }
  if (flags.tolerate_failures) {
    RETURN_IF_ERROR(Annotate(layout->TolerateFailures(), "--tolerate-rank-failure"));
  }
  if (flags.placement.empty()) return layout;
  if (!flags.experts.empty()) {
    return InvalidArgument("--expert-placement {} excludes --expert-split: both assign experts to ranks",
                           flags.placement);
  }
  ASSIGN_OR_RETURN(parallel::Placement placement,
                   parallel::ReadPlacement(flags.placement, degrees.tensor * degrees.data));
  RETURN_IF_ERROR(parallel::CheckPlacement(placement, flags.placement, /*distinct=*/true));
  RETURN_IF_ERROR(
      Annotate(layout->PlaceExperts(std::make_shared<const parallel::Placement>(std::move(placement))),
               flags.placement));
  return layout;
}

namespace {

// Flags of a model that changes while it answers requests.
void AddServingRankFlags(Verb& verb, RankFlags& flags) {
  const std::string group = "Several ranks";
  verb.AddOption(
          "--rebalance-experts", flags.rebalance_s,
          "Seconds between plans that move experts to other ranks while the model runs, where recent "
          "loads make that worth its cost; with -dp and -ep. A plan needs recent loads of 400 tokens of "
          "experts per rank in each layer. 0: experts stay")
      .Range(0.0, 86400.0)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--rebalance-min-gain", flags.rebalance_min_gain,
                 "Minimum reduction of the work of a layer's busiest rank for which its experts move, as "
                 "a fraction; 0: any, also if the move takes longer than it saves until the next plan")
      .Range(0.0, 1.0)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--redundant-experts", flags.redundant_experts,
                 "Replicas of experts in each layer that plans of --rebalance-experts may add")
      .Range(0, 1 << 16)
      .ShowDefault()
      .Group(group);
  verb.AddOption(
          "--rebalance-workloads", flags.rebalance_workloads,
          "Number of parts of the last 64 windows of loads that plans of --rebalance-experts consider, too; "
          "0: they consider recent loads only")
      .Range(0, 64)
      .ShowDefault()
      .Group(group);
  verb.AddFlag(
          "--tolerate-rank-failure", flags.tolerate_failures,
          "Continue without a rank, other than rank 0, that dies or exceeds --rank-time-limit; with -dp and "
          "-ep. Experts that no other rank has are left out, which /metrics, /state and the header "
          "x-moesaic-missing-experts report")
      .Group(group);
}

}  // namespace

void AddRankFlags(Verb& verb, RankFlags& flags, bool answers) {
  const std::string group = "Several ranks";
  const auto degree = [&](const char* name, int& value, const char* help) {
    return verb.AddOption(name, value, help).Range(1, 16384).ShowDefault().Group(group);
  };
  degree(
      "--tensor-parallel-size", flags.degrees.tensor,
      "Ranks that divide the matrices of each layer; also -tp. Ranks are processes of this machine, or those "
      "of mpirun or MOESAIC_RENDEZVOUS");
  degree("--pipeline-parallel-size", flags.degrees.pipeline, "Stages that divide the layers; also -pp");
  degree("--data-parallel-size", flags.degrees.data,
         "Replicas of the model, each on ranks of its own; also -dp. They divide the requests");
  degree("--expert-parallel-size", flags.degrees.expert,
         "Parts into which the ranks of a stage divide the routed experts; 1: each rank has a slice of every "
         "expert");
  verb.AddFlag(
          "--enable-expert-parallel", flags.expert_parallel,
          "Divide the routed experts among all ranks of a stage, those of all replicas included; also -ep")
      .Group(group);
  if (answers) AddServingRankFlags(verb, flags);
  verb.AddOption(
          "--expert-placement", flags.placement,
          "File that assigns experts of each layer to the ranks of a stage, as moesaic placement plan writes "
          "it; with -dp and -ep")
      .ExistingFile()
      .Group(group);
  verb.AddOption(
          "--replica-split", flags.replica_split,
          "How tokens are divided over the replicas of an expert. exact: ranks exchange token counts for "
          "each batch and minimize the tokens of the busiest rank; batches of fewer than 33 tokens per "
          "rank use fixed shares. shares: always use fixed shares, which follow the loads of the "
          "placement")
      .OneOf({"exact", "shares"})
      .ShowDefault()
      .Group(group);
  verb.AddOption(
          "--spill-experts", flags.spill.spill_bytes,
          "Bytes of expert weights that busy ranks may send to others for one batch of a layer, if that "
          "takes less time than it saves; 0: none. Weights are sent ahead where recent batches tell which. "
          "Results are then summed as with replicas of experts")
      .Bytes()
      .ShowDefault()
      .Group(group);
  verb.AddOption("--spill-tolerance", flags.spill.spill_tolerance,
                 "Excess of the busiest rank over the mean up to which --spill-experts sends nothing")
      .Range(0.0, 100.0)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--rank-speeds", flags.rank_speeds,
                 "Relative speeds of the ranks that divide the experts, as in 1,1,0.5, for plans and the "
                 "division of tokens; measured: those that --rebalance-experts measures. Default: those "
                 "of the devices of --topology, otherwise equal ones")
      .Group(group);
  verb.AddOption(
          "--layer-split", flags.layers,
          "Decoder layers of each pipeline stage, as in 20,28, for ranks of different speed or memory; auto: "
          "by the speeds and memory of the devices of --topology. Default: equal numbers")
      .Group(group);
  verb.AddOption("--expert-split", flags.experts,
                 "Routed experts of each expert parallel part, as in 70,58. Default: equal numbers")
      .Group(group);
  verb.AddOption("--layout", flags.layout,
                 "The sizes above as one text, such as tp=2,pp=2 (also dp, ep, layers=20+28, experts=70+58), "
                 "as for convert --layout; auto: choose them for the devices of --topology, by the predicted "
                 "time of a decode step of 8 sequences, and print the best layouts")
      .Excludes("--tensor-parallel-size")
      .Excludes("--pipeline-parallel-size")
      .Excludes("--data-parallel-size")
      .Excludes("--expert-parallel-size")
      .Excludes("--enable-expert-parallel")
      .Excludes("--layer-split")
      .Excludes("--expert-split")
      .Group(group);
  verb.AddOption(
          "--topology", flags.topology,
          "Topology file with one device for each rank; default: equal links between ranks of a host, and "
          "between hosts")
      .ExistingFile()
      .Group(group);
  verb.AddOption(
          "--collective-tuning", flags.collective_tuning,
          "File of measured times, by which sums of tensor parallel ranks choose their algorithm where it "
          "has them; comm_all_reduce_bench --tune writes it, and all ranks read an equal one")
      .ExistingFile()
      .Group(group);
  verb.AddOption(
          "--tp-sum-dtype", flags.sum_dtype,
          "Type in which tensor parallel ranks send partial sums to other hosts, or to all ranks of a "
          "--topology without groups: bf16 and int8 (128 values share a scale) take a half and a quarter "
          "of the bytes and round each value")
      .OneOf({"f32", "bf16", "int8"})
      .ShowDefault()
      .Group(group);
  verb.AddOption("--rank-time-limit", flags.time_limit_s,
                 "Seconds after which a rank that does not answer has failed")
      .Range(1.0, 86400.0)
      .ShowDefault()
      .Group(group);
}

StatusOr<std::shared_ptr<RankJob>> RankJob::Start(const RankFlags& flags, const std::string& fingerprint,
                                                  const std::string& kernels) {
  ASSIGN_OR_RETURN(parallel::Layout layout, LayoutOf(flags));
  const bool launched = comm::IsRankOfJob();
  if (!launched && layout.ranks() == 1) {
    if (flags.expert_parallel) Tell("--enable-expert-parallel has no effect on one rank\n");
    if (!flags.topology.empty()) Tell("--topology has no effect on one rank\n");
    if (!flags.collective_tuning.empty()) Tell("--collective-tuning has no effect on one rank\n");
    return std::shared_ptr<RankJob>();
  }
  if (!launched) RETURN_IF_ERROR(CheckLocalRanks(layout.ranks()));
  std::optional<comm::Topology> topology;
  std::vector<parallel::LinkLevel> levels;
  if (!flags.topology.empty()) {
    ASSIGN_OR_RETURN(topology, ReadTopology(flags.topology));
    if (topology->ranks() != layout.ranks()) {
      return InvalidArgument("{}: the topology must have one device for each of {} ranks, found {}",
                             flags.topology, layout.ranks(), topology->ranks());
    }
    if (layout.exchanges_tokens()) {
      ASSIGN_OR_RETURN(const comm::Topology group, topology->Selected(layout.ExpertGroup(0)));
      levels = parallel::LinkLevelsOf(group);
      if (flags.rank_speeds.empty()) RETURN_IF_ERROR(SetSpeedsOf(*topology, layout));
    }
  }
  ASSIGN_OR_RETURN(std::shared_ptr<const comm::TuningTable> tuning,
                   ReadCollectiveTuning(flags.collective_tuning));
  std::unique_ptr<LocalRanks> children;
  std::optional<comm::OpenedTransport> transport;
  if (launched) {
    ASSIGN_OR_RETURN(transport, comm::OpenTransport("", comm::ProcessEnvironment(), ReportSilence));
    if (layout.tolerates_failures() && (*transport)->name() != "ucx") {
      return InvalidArgument(
          "--tolerate-rank-failure needs ranks that meet over UCX, but these use {}, which ends the whole "
          "job with a rank; start them by MOESAIC_RENDEZVOUS instead of mpirun",
          (*transport)->name());
    }
    if ((*transport)->size() != layout.ranks()) {
      return InvalidArgument(
          "the job has {} ranks, but --tensor-parallel-size {}, --pipeline-parallel-size {} and "
          "--data-parallel-size {} need {}",
          (*transport)->size(), layout.degrees().tensor, layout.degrees().pipeline, layout.degrees().data,
          layout.ranks());
    }
  } else {
    const LoopbackListener listener;
    ASSIGN_OR_RETURN(const uint16_t port, listener.Listen());
    ASSIGN_OR_RETURN(const std::string secret, RandomSecret());
    setenv("UCX_NET_DEVICES", "lo", /*overwrite=*/0);  // the ranks are on this machine
    ASSIGN_OR_RETURN(children,
                     LocalRanks::Start({.ranks = layout.ranks(),
                                        .environment = {fmt::format("MOESAIC_RENDEZVOUS=127.0.0.1:{}", port),
                                                        "MOESAIC_JOB_SECRET=" + secret},
                                        .output = [](const std::string& line) { WriteNotice(line); }}));
    auto met = comm::OpenUcxTransport({.host = "127.0.0.1",
                                       .port = port,
                                       .rank = 0,
                                       .size = layout.ranks(),
                                       .secret = secret,
                                       .listener = listener.fd(),
                                       .check = [&children] { return children->Failure(); },
                                       .on_silence = ReportSilence,
                                       .time_limit_s = kMeetSeconds});
    if (!met.ok()) {
      const Status failure = children->Failure();
      return failure.ok() ? met.status() : failure;
    }
    transport = *std::move(met);
  }
  std::shared_ptr<RankJob> job(new RankJob(flags, layout, *std::move(transport)));
  job->children_ = std::move(children);
  // Plans of collectives follow from the topology and the measured times.
  const std::string links = topology.has_value() ? base::HexDigest(topology->ToJson()) : "none";
  const std::string times = tuning != nullptr ? base::HexDigest(tuning->ToJson()) : "none";
  RETURN_IF_ERROR(job->CheckFingerprints(
      fmt::format("{}, sums in {}, {}, topology {}, collective tuning {}, speeds [{}]", layout.Name(),
                  flags.sum_dtype, fingerprint, links, times, fmt::join(layout.speeds(), ", "))));
  if (tuning != nullptr && layout.degrees().tensor == 1 && job->rank() == 0) {
    Tell("--collective-tuning has no effect without tensor parallel ranks\n");
  }
  job->tuning_ = std::move(tuning);
  RETURN_IF_ERROR(job->CheckKernels(kernels));
  ASSIGN_OR_RETURN(job->hosts_, comm::HostsOfRanks(job->transport(), kHostTag, kMeetSeconds));
  job->link_levels_ = std::move(levels);
  job->topology_ = topology.has_value() ? *std::move(topology) : comm::TopologyOfHosts(job->hosts_);
  job->local_size_ = static_cast<int>(std::ranges::count(job->hosts_, job->hosts_[job->rank()]));
  RETURN_IF_ERROR(job->BindToCores());
  return job;
}

Status RankJob::CheckFingerprints(const std::string& own) const {
  ASSIGN_OR_RETURN(const std::vector<std::string> all,
                   comm::TextsOfRanks(*transport_, kFingerprintTag, WithDigest(own), kMeetSeconds));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto text = [&](size_t of) { return all[of].substr(std::min(kDigestCharacters, all[of].size())); };
    return InvalidArgument(
        "all ranks must load the same model in the same way; rank {} has \"{}\", rank 0 \"{}\"{}", rank,
        text(rank), text(0), text(rank) == text(0) ? ", and they differ after this beginning" : "");
  }
  return OkStatus();
}

Status RankJob::CheckKernels(const std::string& own) const {
  if (layout_.degrees().tensor == 1) return OkStatus();
  ASSIGN_OR_RETURN(const std::vector<std::string> all,
                   comm::TextsOfRanks(*transport_, kKernelTag, own, kMeetSeconds));
  for (int rank = 0; rank < layout_.ranks(); ++rank) {
    const int first = layout_.TensorGroup(rank).front();
    if (all[rank] == all[first]) continue;
    return InvalidArgument(
        "the ranks of a tensor parallel group must compute alike, because each of them chooses the "
        "experts of all rows; rank {} has kernels for {}, rank {} for {}: set MOESAIC_ISA on all ranks to "
        "one that they have in common",
        rank, all[rank], first, all[first]);
  }
  return OkStatus();
}

CoreShare CoresOfRank(int rank, std::span<const std::string> hosts, std::span<const std::string> masks) {
  CoreShare share = {.index = 0, .count = 0};
  for (size_t other = 0; other < hosts.size(); ++other) {
    if (hosts[other] != hosts[rank] || masks[other] != masks[rank]) continue;
    if (static_cast<int>(other) < rank) ++share.index;
    ++share.count;
  }
  return share;
}

Status RankJob::BindToCores() const {
  const runtime::Topology topology = runtime::DetectTopology();
  std::vector<int> cpus = topology.cpus;
  std::ranges::sort(cpus);
  ASSIGN_OR_RETURN(const std::vector<std::string> masks,
                   comm::TextsOfRanks(*transport_, kCoreTag,
                                      WithDigest(fmt::format("{}", fmt::join(cpus, ","))), kMeetSeconds));
  const CoreShare share = CoresOfRank(rank(), hosts_, masks);
  if (share.count > 1) runtime::BindToCpus(runtime::ShareOfCpus(topology, share.index, share.count));
  return OkStatus();
}

std::string RankJob::Describe() const {
  std::vector<std::string> hosts = hosts_;
  std::ranges::sort(hosts);
  const auto machines = std::unique(hosts.begin(), hosts.end()) - hosts.begin();
  const std::string where = machines == 1 ? "this machine" : fmt::format("{} machines", machines);
  return fmt::format("{} on {} processes of {} ({})", layout_.Name(), layout_.ranks(), where,
                     transport_->name());
}

StatusOr<std::shared_ptr<parallel::RankGroups>> RankJob::MakeGroups() const {
  ASSIGN_OR_RETURN(std::unique_ptr<parallel::RankGroups> groups,
                   parallel::RankGroups::Create(*transport_, *topology_, layout_, flags_.time_limit_s,
                                                SumFormat(flags_.sum_dtype), tuning_));
  return std::shared_ptr<parallel::RankGroups>(std::move(groups));
}

Status RankJob::Failure() const {
  return children_ == nullptr || tolerates_failures_ ? OkStatus() : children_->Failure();
}

void RankJob::KillRank(int rank) {
  if (children_ != nullptr) children_->KillRank(rank);
}

void RankJob::Abandon(const Status& status) {
  if (transport_->name() == "mpi") Tell("rank {}: {}\n", rank(), Message(status));
  transport_->EndJob();
}

Status RankJob::End(Status status) {
  if (children_ == nullptr) return status;
  if (!status.ok()) {
    // Errors of messages follow from the end of a rank, and so does the end of loading without a signal.
    const bool follows = status.code() == StatusCode::kUnavailable ||
                         status.code() == StatusCode::kDeadlineExceeded ||
                         (status.code() == StatusCode::kCancelled && !Interrupted());
    const Status cause = children_->Failure();
    children_->Kill();
    return follows && !cause.ok() ? cause : status;
  }
  status = children_->Wait(kFarewellSeconds);
  return tolerates_failures_ ? OkStatus() : status;
}

}  // namespace moesaic::app
