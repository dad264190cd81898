#!/usr/bin/env bash
# Simulates AllReduce, and dispatch and combine of MoE tokens, on the shipped topologies: SMPI runs this repository's
# collectives over the MPI transport, whose sources and those of the benchmarks are compiled by smpicxx. Computation
# takes no time. Prints markdown.
#
#   bench/comm/smpi.sh [all_reduce] [exchange]      both by default
#
# Vectors that need more than a gigabyte on all ranks are simulated with fewer bytes over links that are as many times slower:
# the same plan then takes about the same time (16 chips: 3.5% more), although its pieces and limits do not shrink.
#
# Needs libsimgrid-dev (smpicxx, smpirun), python3, ninja, 4 GB of memory, and a build folder with the benchmarks
#   ninja -C build/release comm_all_reduce_bench comm_exchange_bench comm_smpi_platform
#
# Environment:
#   BUILD       build folder (default build/release); its static libraries are linked
#   TOPOLOGIES  files (default: the 16-chip server, 4x8 and 8x8 accelerators)
#   BYTES       sizes of AllReduce (default 16 KiB, 1 MiB and 64 MiB)
#   TOKENS      tokens per rank of dispatch and combine (default 128)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build=$(realpath -m "${BUILD:-build/release}")
read -ra topologies <<< "${TOPOLOGIES:-topologies/accelerators-16-dual-chip.json topologies/accelerators-4x8-200gbit.json topologies/accelerators-8x8-200gbit.json}"
read -ra sizes <<< "${BYTES:-16384 1048576 67108864}"
tokens=${TOKENS:-128}
parts=("$@")
[ $# -gt 0 ] || parts=(all_reduce exchange)

fail() { printf 'smpi.sh: %s\n' "$1" >&2; exit 1; }
for program in smpicxx smpirun python3 ninja; do
  command -v "$program" > /dev/null || fail "$program is missing; install libsimgrid-dev, python3 and ninja-build"
done
for program in comm_all_reduce_bench comm_exchange_bench comm_smpi_platform; do
  [ -x "$build/bin/$program" ] || fail "$build/bin/$program is missing; build it by: ninja -C $build $program"
done
for part in "${parts[@]}"; do
  case "$part" in all_reduce | exchange) ;; *) fail "parts are all_reduce and exchange, found \"$part\"" ;; esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# simulated NAME: builds bench/comm/NAME.cc for SMPI.
simulated() { bench/comm/smpi_program.sh build "$build" "comm_$1" "$work/$1" "bench/comm/$1.cc"; }
simulate() { bench/comm/smpi_program.sh run "$build" "$@"; }

# narrowed TOPOLOGY DIVISOR: prints the topology with bandwidths of links and memory divided.
narrowed() {
  python3 - "$@" << 'END'
import json, sys
def divide(value, divisor):
    if isinstance(value, dict):
        return {key: member / divisor if key in ("gb_per_s", "memory_gb_per_s") else divide(member, divisor)
                for key, member in value.items()}
    return [divide(member, divisor) for member in value] if isinstance(value, list) else value
print(json.dumps(divide(json.load(open(sys.argv[1])), int(sys.argv[2]))))
END
}

# all_reduce_of TOPOLOGY BYTES: prints a row of the table.
all_reduce_of() {
  local topology=$1 size=$2 ranks divisor=1
  ranks=$("$build/bin/comm_smpi_platform" "$topology" | grep -c '<host ')
  while [ $((2 * ranks * size / divisor)) -gt $((1 << 30)) ]; do divisor=$((2 * divisor)); done
  narrowed "$topology" "$divisor" > "$work/topology.json"
  simulate "$work/topology.json" "$work/all_reduce_bench" --transport mpi --topology "$work/topology.json" \
    --bytes $((size / divisor)) --rounds 1 --calls 1 --no-warm-up --against flat-block,flat-round-robin > "$work/output"
  python3 - "$(basename "$topology" .json)" "$size" "$work/output" << 'END'
import sys
row = {}
for line in open(sys.argv[3]):
    kind, _, *rest = line.rstrip('\n').split(' ', 2)
    if kind == 'sample':
        contender, seconds = rest[0].split()
        row[contender] = float(seconds)
    else:
        row[kind] = rest[0] if kind == 'algorithm' else float(rest[0])
print(f"| {sys.argv[1]} | {sys.argv[2]} | {row['plan'] * 1e3:.3f} | {row['flat-block'] / row['plan']:.2f}x "
      f"| {row['flat-round-robin'] / row['plan']:.2f}x | {row['bound'] / row['plan']:.0%} | {row['algorithm']} |")
END
}

all_reduce() {
  local topology size
  simulated all_reduce_bench
  printf '\n## AllReduce of f32\n\nThe bound is that of docs/communication.md; flat rings in the order of the tree, and dealt to its topmost groups.\n\n'
  printf '| topology | bytes | ms | over flat block | over flat round-robin | of bound | algorithm |\n|---|---|---|---|---|---|---|\n'
  for topology in "${topologies[@]}"; do
    for size in "${sizes[@]}"; do all_reduce_of "$topology" "$size"; done
  done
}

# exchange_of TOPOLOGY: prints a row of the table.
exchange_of() {
  simulate "$1" "$work/exchange_bench" --transport mpi --topology "$1" --experts 256 --top-k 8 --hidden 7168 --tokens "$tokens" \
    --levels-by-cost --segment 8 --direct-segment "$tokens" --against direct,direct-round-robin --rounds 1 --no-warm-up > "$work/output"
  python3 - "$(basename "$1" .json)" "$work/output" << 'END'
import re, sys
text = open(sys.argv[2]).read()
def number(pattern):
    return float(re.search(pattern, text, re.M)[1])
ms = {name: number(rf'^{name} +dispatch .* both ([0-9.]+) ms') for name in ('forwarded', 'direct', 'direct-round-robin')}
bound = number(r'^bound ([0-9.]+) ms')
print(f"| {sys.argv[1]} | {re.search('forwarded at (.*)', text)[1]} | {ms['forwarded']:.3f} | {ms['direct'] / ms['forwarded']:.2f}x "
      f"| {ms['direct-round-robin'] / ms['forwarded']:.2f}x | {bound / ms['forwarded']:.0%} | {ms['direct'] / bound:.2f}x "
      f"| {number(r'^forwarded +dispatch .* messages .* rows +([0-9.]+) MB rows .* by the formula'):.3f} "
      f"| {number(r'^forwarded +dispatch .*, by the formula ([0-9.]+) MB'):.3f} | {number(r'^forwarded +dispatch .*ratio ([0-9.]+)'):.4f} "
      f"| {number(r'^forwarded +combine .* rows +([0-9.]+) MB rows .* by the formula'):.3f} "
      f"| {number(r'^forwarded +combine .*ratio ([0-9.]+)'):.4f} |")
END
}

exchange() {
  local topology
  simulated exchange_bench
  printf '\n## Dispatch and combine, 256 experts, top-8, hidden 7168, %s tokens per rank\n\n' "$tokens"
  printf 'At most: over flat block, if forwarding took the time of the bound. MB: rows of a dispatch between topmost groups, counted, and by the formula of one row per token and topmost group that forwards. Combine MB: rows of sums on the way back, whose formula is the same, and the ratio of both.\n\n'
  printf '| topology | forwarded at | ms | over flat block | over flat round-robin | of bound | at most | MB | formula | ratio | combine MB | ratio |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n'
  for topology in "${topologies[@]}"; do exchange_of "$topology"; done
}

printf '# Simulated collectives, %s\n\n%s; %s\n' "$(git describe --always --dirty 2> /dev/null || echo 'an exported tree')" \
  "$(smpicxx --version)" 'network model CM02 without factors; ranks wait for messages, and a look for ended ones takes '"${POLL_US:-0.0001} us"
for part in "${parts[@]}"; do "$part"; done
