#!/usr/bin/env bash
# Builds and runs benchmarks under SMPI, which simulates the links of a topology file.
#
#   smpi_program.sh build BUILD TARGET OUT SOURCE...   compiles the sources and the MPI transport by smpicxx, and links the
#                                                      libraries of the native TARGET of the build folder, except transports
#   smpi_program.sh run BUILD TOPOLOGY PROGRAM ...     one rank per device; messages take the latency of their group and share
#                                                      ports fairly; computation takes no time
# Needs libsimgrid-dev (smpicxx, smpirun) and ninja; `run` needs BUILD/bin/comm_smpi_platform.
#
# Environment:
#   POLL_US     virtual microseconds of a look for ended messages by a rank that has other work (default 0.0001: computation
#               takes no time, and a rank looks some hundred times). Ranks without work wait for the end of a message.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { printf 'smpi_program.sh: %s\n' "$1" >&2; exit 1; }
for program in smpicxx smpirun ninja; do
  command -v "$program" > /dev/null || fail "$program is missing; install libsimgrid-dev and ninja-build"
done
[ $# -ge 4 ] || fail "usage: smpi_program.sh build BUILD TARGET OUT SOURCE... | run BUILD TOPOLOGY PROGRAM ..."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build_program() {
  local build=$1 target=$2 out=$3 file libraries
  shift 3
  printf '#undef exit\n' > "$work/no_exit.h"  # SMPI's macro breaks a member of CLI11
  mapfile -t libraries < <(ninja -C "$build" -t commands "$target" | tail -1 | tr ' ' '\n' | grep -E '\.(a|so[.0-9]*)$' |
    grep -vE 'comm_(mpi|open|ucx|rendezvous)\.a|/openmpi/|/lib(mpi|crypto|ucp|uct|ucs|ucm)\.so')
  for file in "$@" src/comm/transport/{mpi_transport,mpi_world,open_transport}.cc; do
    smpicxx -include "$work/no_exit.h" -std=c++20 -O2 -DNDEBUG -DMOESAIC_SMPI -DMOESAIC_HAVE_MPI=1 -DMOESAIC_HAVE_UCX=0 -DFMT_SHARED -Isrc -I. \
      -c "$file" -o "$work/$(basename "$file" .cc).o"
  done
  (cd "$build" && smpicxx -o "$out" "$work"/*.o "${libraries[@]}" -Wl,--as-needed -latomic)
}

run_program() {
  local build=$1 topology=$2 ranks
  shift 2
  [ -x "$build/bin/comm_smpi_platform" ] || fail "$build/bin/comm_smpi_platform is missing; build it by: ninja -C $build comm_smpi_platform"
  "$build/bin/comm_smpi_platform" "$topology" > "$work/platform.xml"
  ranks=$(grep -c '<host ' "$work/platform.xml")
  seq -f 'rank%g' 0 $((ranks - 1)) > "$work/hosts"
  smpirun -np "$ranks" -platform "$work/platform.xml" -hostfile "$work/hosts" --cfg=smpi/simulate-computation:no \
    --cfg=network/model:CM02 --cfg=network/TCP-gamma:0 --cfg=network/crosstraffic:no --cfg=smpi/test:"${POLL_US:-0.0001}e-6" --cfg=smpi/wtime:0 \
    --cfg=smpi/grow-injected-times:no --log=root.thres:critical "$@" 2> "$work/errors" ||
    { cat "$work/errors" >&2; fail "smpirun ended with an error on $topology"; }
}

verb=$1 build=$(realpath -m "$2")
shift 2
case "$verb" in
  build) build_program "$build" "$1" "$(realpath -m "$2")" "${@:3}" ;;
  run) run_program "$build" "$@" ;;
  *) fail "the first argument is build or run, found \"$verb\"" ;;
esac
