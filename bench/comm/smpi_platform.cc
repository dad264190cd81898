// Writes a topology file as a platform for SimGrid: one host per rank, "rank0", "rank1", ... Ports have the
// bandwidth of their channels and no latency; the latency of a message is that of the smallest common group.
//
//   comm_smpi_platform TOPOLOGY.json > platform.xml
#include <fmt/format.h>

#include "bench/comm/bench_rank.h"
#include "comm/topology/topology.h"

namespace moesaic::bench {
namespace {

void WritePlatform(const comm::Topology& topology) {
  fmt::print(
      "<?xml version='1.0'?>\n<!DOCTYPE platform SYSTEM \"https://simgrid.org/simgrid.dtd\">\n"
      "<platform version=\"4.1\">\n<zone id=\"job\" routing=\"Full\">\n");
  for (int rank = 0; rank < topology.ranks(); ++rank)
    fmt::print("<host id=\"rank{}\" speed=\"1Gf\"/>\n", rank);
  for (size_t i = 0; i < topology.channels().size(); ++i) {
    fmt::print("<link id=\"port{}\" bandwidth=\"{:.17g}Bps\" latency=\"0s\" sharing_policy=\"SHARED\"/>\n", i,
               topology.channels()[i].bytes_per_s);
  }
  for (size_t i = 0; i < topology.groups().size(); ++i) {
    if (topology.groups()[i].children.empty()) continue;
    // Shared, but never full. The solver visits all flows of a FATPIPE link for each flow whose rate it
    // finds.
    fmt::print(
        "<link id=\"group{}\" bandwidth=\"1e16Bps\" latency=\"{:.17g}s\" sharing_policy=\"SHARED\"/>\n", i,
        topology.groups()[i].link.latency_s);
  }
  for (int from = 0; from < topology.ranks(); ++from) {
    for (int to = 0; to < topology.ranks(); ++to) {
      if (from == to) continue;
      fmt::print("<route src=\"rank{}\" dst=\"rank{}\" symmetrical=\"NO\"><link_ctn id=\"group{}\"/>", from,
                 to, topology.CommonGroup(from, to));
      for (const int channel : topology.Path(from, to)) fmt::print("<link_ctn id=\"port{}\"/>", channel);
      fmt::print("</route>\n");
    }
  }
  fmt::print("</zone>\n</platform>\n");
}

}  // namespace
}  // namespace moesaic::bench

int main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: comm_smpi_platform TOPOLOGY.json > platform.xml\n");
    return 2;
  }
  moesaic::bench::WritePlatform(moesaic::bench::ReadTopology(argv[1]));
  return 0;
}
