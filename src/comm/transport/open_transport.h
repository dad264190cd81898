// Opens the transport that a flag or the environment names.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "comm/transport/opened_transport.h"
#include "comm/transport/rendezvous.h"

namespace moesaic::comm {

/// Value of a variable, or empty. Tests replace the environment.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
Environment ProcessEnvironment();

/// `spec` is one of:
///   ""                                      as the environment says, see below
///   "local"                                 a job of one rank
///   "mpi"                                   MPI_COMM_WORLD
///   "ucx://HOST:PORT?rank=R&size=N"         UCX; `&limit=SECONDS` replaces the time limit of 60 s. An IPv6
///   address is
///                                           written in brackets.
///
/// The environment selects UCX by MOESAIC_RENDEZVOUS=HOST:PORT with MOESAIC_RANK and MOESAIC_WORLD_SIZE, or
/// Slurm's SLURM_PROCID and SLURM_NTASKS without these, otherwise MPI when a launcher has set
/// OMPI_COMM_WORLD_SIZE or PMI_SIZE, and otherwise "local". UCX reads the job's secret from
/// MOESAIC_JOB_SECRET, or from the file that MOESAIC_JOB_SECRET_FILE names, without line ends at its end.
///
/// Over UCX, rank 0 watches the others if all ranks have an `on_silence` (RendezvousOptions).
///
/// InvalidArgument names the faulty part; Unimplemented for a transport that this build does not have.
StatusOr<OpenedTransport> OpenTransport(std::string_view spec,
                                        const Environment& environment = ProcessEnvironment(),
                                        SilenceReport on_silence = {});

/// UCX transport of a job whose data are known. Errors of Rendezvous(); Unimplemented without UCX.
StatusOr<OpenedTransport> OpenUcxTransport(const RendezvousOptions& options);

/// Returns whether a launcher started this process as one of several ranks: the variables of
/// OpenTransport("") say so.
bool IsRankOfJob(const Environment& environment = ProcessEnvironment());

}  // namespace moesaic::comm
