#!/usr/bin/env bash
# Measures AllReduce, and dispatch and combine of MoE tokens, between two nodes: network namespaces of this machine
# whose links are shaped to 1 Gbit/s in both directions. Prints markdown.
#
#   bench/comm/two_nodes.sh [all_reduce] [exchange]      both by default
#
# Needs root, iproute2 (ip, tc), util-linux (unshare, chrt), openmpi-bin, python3, and the programs
#   cmake -DMOESAIC_BENCH=ON ... && ninja -C build/release comm_all_reduce_bench comm_exchange_bench
#
# Environment:
#   BUILD     build folder (default build/release)
#   LAUNCHES  launches of every setting, in alternation (default 3)
#   ROUNDS    rounds per launch (default 15)
#   PRIORITY  command prefix that starts the ranks of all contenders (default "chrt --rr 1": real-time priority, so that
#             other programs of the machine do not delay them; "nice -n 0" for none)
#   RAW       folder that keeps the output of every launch (default: a temporary one, which is removed)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build=$(realpath -m "${BUILD:-build/release}")
launches=${LAUNCHES:-3}
rounds=${ROUNDS:-15}
priority=${PRIORITY:-chrt --rr 1}
parts=("$@")
[ $# -gt 0 ] || parts=(all_reduce exchange)

fail() { printf 'two_nodes.sh: %s\n' "$1" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail 'network namespaces need root'
for program in ip tc unshare mpirun python3 chrt; do
  command -v "$program" > /dev/null || fail "$program is missing; install iproute2, util-linux, openmpi-bin and python3"
done
for program in comm_all_reduce_bench comm_exchange_bench; do
  [ -x "$build/bin/$program" ] || fail "$build/bin/$program is missing; build it by: ninja -C $build $program"
done
for part in "${parts[@]}"; do
  case "$part" in all_reduce | exchange) ;; *) fail "parts are all_reduce and exchange, found \"$part\"" ;; esac
done

# Names end in this shell's process number, so that two runs do not share anything.
id=$((BASHPID % 10000))
nodes=("moe${id}a" "moe${id}b")
bridge="moe${id}"
subnet="10.$((id / 100 + 100)).$((id % 100 + 100))"
work=$(mktemp -d)
raw=${RAW:-$work/raw}
mkdir -p "$raw"

clean_up() {
  local node
  for node in "${nodes[@]}"; do
    ip netns pids "$node" 2> /dev/null | xargs -r kill -9 2> /dev/null || true
    ip link delete "$node" 2> /dev/null || true  # its peer goes with it
    ip netns delete "$node" 2> /dev/null || true
  done
  ip link delete "$bridge" 2> /dev/null || true
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

ip link add "$bridge" type bridge
ip address add "$subnet.1/24" dev "$bridge"
ip link set "$bridge" up
for i in 0 1; do
  node=${nodes[$i]}
  ip netns add "$node"
  ip link add "$node" type veth peer name eth0 netns "$node"
  ip link set "$node" master "$bridge" up
  ip -n "$node" address add "$subnet.$((i + 2))/24" dev eth0
  ip -n "$node" link set eth0 up
  ip -n "$node" link set lo up
  # The port of the node: 1 Gbit/s out at its own end, and in at the bridge's.
  ip netns exec "$node" tc qdisc add dev eth0 root tbf rate 1gbit burst 128kb latency 50ms
  tc qdisc add dev "$node" root tbf rate 1gbit burst 128kb latency 50ms
done

# mpirun starts its daemons by this instead of ssh. The host name makes each namespace a node of its own; the IPC
# namespace keeps its shared memory apart.
cat > "$work/rsh" << END
#!/usr/bin/env bash
node=\$1
shift
exec ip netns exec "\$node" unshare --uts --ipc $priority bash -c "hostname \$node; \$*"
END
chmod +x "$work/rsh"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# launch RANKS_PER_NODE ORDER COLL PROGRAM ...: ORDER is block or round-robin, COLL is tuned or han.
launch() {
  local ranks=$1 order=$2 coll=$3 options=(--map-by slot)
  shift 3
  [ "$order" = block ] || options=(--map-by node)
  [ "$coll" = tuned ] || options+=(--mca coll_han_priority 60)
  timeout -k 5 300 mpirun --mca plm_rsh_agent "$work/rsh" --mca pml ob1 --mca btl tcp,vader,self \
    --mca btl_tcp_if_include "$subnet.0/24" --mca oob_tcp_if_include "$subnet.0/24" --mca btl_vader_single_copy_mechanism none \
    --bind-to none --mca mpi_yield_when_idle 1 "${options[@]}" -H "${nodes[0]}:$ranks,${nodes[1]}:$ranks" -np $((2 * ranks)) "$@" \
    2> "$work/errors" || { cat "$work/errors" >&2; fail "mpirun ended with an error: $order, $coll"; }
}

# Topology of the two nodes. A full frame has 1448 bytes of data and 1514 bytes on the line; 10 us is the time of an
# empty message between the namespaces.
write_topology() {
  cat > "$work/nodes.json" << END
{"name": "two network namespaces on one machine", "source": "tbf at 1 Gbit/s; inside a node assumed",
 "devices": {"core": {}},
 "tree": {"level": "cluster", "link": {"latency_us": 10, "gb_per_s": 0.1195},
  "children": [{"count": 2, "level": "node", "link": {"latency_us": 2, "gb_per_s": 5},
   "children": [{"count": 2, "device": "core"}]}]}}
END
}

all_reduce() {
  local run order coll
  write_topology
  for run in $(seq "$launches"); do
    for order in block round-robin; do
      for coll in tuned han; do
        launch 2 "$order" "$coll" "$build/bin/comm_all_reduce_bench" --topology "$work/nodes.json" --order "$order" \
          --against mpi --bytes 65536,1048576,4194304 --calls 8 --rounds "$rounds" > "$raw/all_reduce.$order.$coll.$run"
      done
    done
  done
  printf '\n## AllReduce of f32, 2 nodes x 2 ranks\n\nMilliseconds: median [quartiles] of rounds, %s launches of %s rounds of 8 calls.\n\n' \
    "$launches" "$rounds"
  python3 - "$raw" << 'END'
import glob, statistics, sys
samples = {}
for path in sorted(glob.glob(sys.argv[1] + '/all_reduce.*')):
    _, order, coll, _ = path.rsplit('/', 1)[1].split('.')
    for line in open(path):
        words = line.split()
        if words[0] == 'sample':
            key = (int(words[1]), order, 'ours' if words[2] == 'plan' else coll)
            samples.setdefault(key, []).append(float(words[3]) * 1e3)
def text(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return f'{middle:.2f} [{low:.2f}, {high:.2f}]'
print('| bytes | order of ranks | ours | tuned | HAN | tuned / ours | HAN / ours | line rate | of line rate |')
print('|---|---|---|---|---|---|---|---|---|')
for size in sorted({key[0] for key in samples}):
    for order in ('block', 'round-robin'):
        ours, tuned, han = (samples[size, order, name] for name in ('ours', 'tuned', 'han'))
        middle = statistics.median(ours)
        # Each node sends and receives the vector once: 2 (n - 1) / n vectors for n = 2.
        bound = size * 8 / 1e9 * 1e3
        print(f'| {size} | {order} | {text(ours)} | {text(tuned)} | {text(han)} | {statistics.median(tuned) / middle:.2f}x '
              f'| {statistics.median(han) / middle:.2f}x | {bound:.2f} | {bound / middle:.0%} |')
END
}

exchange() {
  local run
  printf '\n## Dispatch and combine, 2 nodes x 4 ranks\n\n```\n'
  for run in $(seq "$launches"); do
    launch 4 block tuned "$build/bin/comm_exchange_bench" --transport mpi --nodes 2 --experts 256 --top-k 8 --hidden 7168 \
      --tokens 128 --segment 4 --direct-segment 128 --rounds "$rounds" | tee "$raw/exchange.$run"
  done
  printf '```\n'
}

printf '# Two nodes on 1 Gbit/s, %s\n\n' "$(git describe --always --dirty 2> /dev/null || echo 'an exported tree')"
printf -- '- %s, %s vCPU; Linux %s; %s; congestion control %s\n' "$(lscpu | sed -n 's/^Model name: *//p' | head -1)" "$(nproc)" \
  "$(uname -r)" "$(mpirun --version | head -1)" "$(cat /proc/sys/net/ipv4/tcp_congestion_control)"
printf -- '- ranks start by: %s; load average %s\n' "${priority:-no prefix}" "$(cut -d' ' -f1-3 /proc/loadavg)"
for part in "${parts[@]}"; do "$part"; done
printf '\nLoad average at the end: %s\n' "$(cut -d' ' -f1-3 /proc/loadavg)"
