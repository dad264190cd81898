#include "comm/transport/open_transport.h"

#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>

#include "comm/transport/local_transport.h"
#include "comm/transport/rendezvous.h"
#if MOESAIC_HAVE_MPI
#include "comm/transport/mpi_world.h"
#endif
#if MOESAIC_HAVE_UCX
#include "comm/transport/ucx_transport.h"
#endif

namespace moesaic::comm {
namespace {

constexpr std::string_view kUcxScheme = "ucx://";

template <typename Number>
StatusOr<Number> ParseNumber(std::string_view name, std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return InvalidArgument("transport: {} must be a number, found \"{}\"", name, text);
  }
  return value;
}

[[maybe_unused]] StatusOr<std::string> JobSecret(const Environment& environment) {
  if (const auto secret = environment("MOESAIC_JOB_SECRET"); secret.has_value() && !secret->empty())
    return *secret;
  const auto path = environment("MOESAIC_JOB_SECRET_FILE");
  if (!path.has_value()) {
    return InvalidArgument(
        "transport: UCX needs the job's secret in MOESAIC_JOB_SECRET, or the name of a file that "
        "contains it in MOESAIC_JOB_SECRET_FILE");
  }
  std::ifstream file(*path, std::ios::binary);
  std::string secret((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
  if (secret.empty())
    return InvalidArgument("transport: MOESAIC_JOB_SECRET_FILE must name a file with text, found {}", *path);
  return secret;
}

Status ParseAddress(std::string_view text, RendezvousOptions& options) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) {
    return InvalidArgument("transport: rendezvous must be HOST:PORT, found \"{}\"", text);
  }
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  options.host = host;
  ASSIGN_OR_RETURN(options.port, ParseNumber<uint16_t>("port", text.substr(colon + 1)));
  if (options.port == 0) return InvalidArgument("transport: port must be between 1 and 65535, found 0");
  return OkStatus();
}

StatusOr<RendezvousOptions> ParseUcx(std::string_view spec) {
  std::string_view rest = spec.substr(kUcxScheme.size());
  RendezvousOptions options;
  options.rank = options.size = -1;
  const size_t question = rest.find('?');
  RETURN_IF_ERROR(ParseAddress(rest.substr(0, question), options));
  rest = question == std::string_view::npos ? std::string_view() : rest.substr(question + 1);
  while (!rest.empty()) {
    const std::string_view part = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    const size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : part.substr(equals + 1);
    if (key == "rank") {
      ASSIGN_OR_RETURN(options.rank, ParseNumber<int>(key, value));
    } else if (key == "size") {
      ASSIGN_OR_RETURN(options.size, ParseNumber<int>(key, value));
    } else if (key == "limit") {
      ASSIGN_OR_RETURN(options.time_limit_s, ParseNumber<double>(key, value));
    } else {
      return InvalidArgument("transport: ucx:// takes rank, size and limit, found \"{}\"", part);
    }
  }
  if (options.rank < 0 || options.size < 0) {
    return InvalidArgument("transport: ucx:// needs rank and size, found \"{}\"", spec);
  }
  return options;
}

// The variable, or the one that Slurm's srun sets to the same value.
std::string OwnOrSlurm(const Environment& environment, const char* own, const char* slurm) {
  if (const auto value = environment(own); value.has_value()) return *value;
  return environment(slurm).value_or("");
}

StatusOr<RendezvousOptions> UcxFromEnvironment(const std::string& address, const Environment& environment) {
  RendezvousOptions options;
  RETURN_IF_ERROR(Annotate(ParseAddress(address, options), "MOESAIC_RENDEZVOUS"));
  ASSIGN_OR_RETURN(options.rank,
                   ParseNumber<int>("MOESAIC_RANK", OwnOrSlurm(environment, "MOESAIC_RANK", "SLURM_PROCID")));
  ASSIGN_OR_RETURN(
      options.size,
      ParseNumber<int>("MOESAIC_WORLD_SIZE", OwnOrSlurm(environment, "MOESAIC_WORLD_SIZE", "SLURM_NTASKS")));
  return options;
}

StatusOr<OpenedTransport> OpenLocal() {
  auto job = std::make_shared<LocalJob>(1);
  Transport& end = job->end(0);
  return OpenedTransport(std::move(job), &end);
}

#if MOESAIC_HAVE_MPI
StatusOr<OpenedTransport> OpenMpi() { return OpenMpiWorld(); }
#else
StatusOr<OpenedTransport> OpenMpi() {
  return Unimplemented(
      "transport: this build has no MPI; install openmpi-bin and libopenmpi-dev and configure again, or "
      "use another transport than \"{}\"",
      "mpi");
}
#endif

StatusOr<OpenedTransport> OpenUcx(RendezvousOptions options,
                                  [[maybe_unused]] const Environment& environment) {
#if MOESAIC_HAVE_UCX
  ASSIGN_OR_RETURN(options.secret, JobSecret(environment));
#endif
  return OpenUcxTransport(options);
}

bool HasSeveralRanks(const std::optional<std::string>& size) { return size.has_value() && *size != "1"; }

}  // namespace

Environment ProcessEnvironment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* const value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

StatusOr<OpenedTransport> OpenUcxTransport(const RendezvousOptions& options) {
#if MOESAIC_HAVE_UCX
  ASSIGN_OR_RETURN(auto made, MakeUcxTransport(options));
  Transport* const transport = made.get();
  return OpenedTransport(std::shared_ptr<Transport>(std::move(made)), transport);
#else
  return Unimplemented(
      "transport: this build has no UCX; install libucx-dev and configure again, or use another "
      "transport than \"ucx://{}:{}\"",
      options.host, options.port);
#endif
}

bool IsRankOfJob(const Environment& environment) {
  if (environment("MOESAIC_RENDEZVOUS").has_value())
    return HasSeveralRanks(OwnOrSlurm(environment, "MOESAIC_WORLD_SIZE", "SLURM_NTASKS"));
  return HasSeveralRanks(environment("OMPI_COMM_WORLD_SIZE")) || HasSeveralRanks(environment("PMI_SIZE"));
}

StatusOr<OpenedTransport> OpenTransport(std::string_view spec, const Environment& environment,
                                        SilenceReport on_silence) {
  if (spec == "local") return OpenLocal();
  if (spec == "mpi") return OpenMpi();
  if (spec.starts_with(kUcxScheme)) {
    ASSIGN_OR_RETURN(RendezvousOptions options, ParseUcx(spec));
    options.on_silence = std::move(on_silence);
    return OpenUcx(std::move(options), environment);
  }
  if (!spec.empty())
    return InvalidArgument("transport must be local, mpi or ucx://HOST:PORT?rank=R&size=N, found \"{}\"",
                           spec);
  if (const auto address = environment("MOESAIC_RENDEZVOUS"); address.has_value()) {
    ASSIGN_OR_RETURN(RendezvousOptions options, UcxFromEnvironment(*address, environment));
    options.on_silence = std::move(on_silence);
    return OpenUcx(std::move(options), environment);
  }
  if (environment("OMPI_COMM_WORLD_SIZE").has_value() || environment("PMI_SIZE").has_value())
    return OpenMpi();
  return OpenLocal();
}

}  // namespace moesaic::comm
