"""Network namespaces of this machine whose links have the bandwidths of a topology file. Needs root and iproute2."""
import os
import secrets
import socket
import subprocess


# Of a dilated connection: one with more bytes on their way would fill queues, in which other messages wait.
SOCKET_BYTES = 1 << 20


def expanded(node):
    """Returns the node's children, one element each, where the file has counts."""
    return [child for child in node.get("children", []) for _ in range(child.get("count", 1))]


class NamespaceTree:
    """One namespace per device and one bridge per group. A child's port carries the group's bandwidth in each direction.

    `topology`: the content of a topology file, whose links are shared. Latencies are those of this machine. Links are slower
    by `dilation`; their packets are then larger, because a packet's way through the bridges takes the machine's own time.
    """

    def __init__(self, topology, dilation=1):
        self.name = f"moe{os.getpid() % 10000}"
        self.subnet = f"10.{os.getpid() // 100 % 100 + 100}.{os.getpid() % 100 + 100}"
        self.nodes, self.addresses, self.bridges = [], [], []
        self.dilation, self.mtu = dilation, 1500 if dilation == 1 else 9000
        try:
            self.add_group(topology["tree"])
        except BaseException:
            self.close()
            raise

    def add_group(self, node):
        bridge = f"{self.name}g{len(self.bridges)}"
        self.run(f"ip link add {bridge} type bridge")
        self.bridges.append(bridge)
        self.run(f"ip link set {bridge} up")
        rate = int(node["link"]["gb_per_s"] * 8e9 / self.dilation)
        for child in expanded(node):
            if "device" in child:
                self.add_device(bridge, rate)
                continue
            below = self.add_group(child)
            self.run(f"ip link add {below}u mtu {self.mtu} type veth peer name {below}d mtu {self.mtu}")
            self.run(f"ip link set {below}u master {below} up")
            self.run(f"ip link set {below}d master {bridge} up")
            for port in (f"{below}u", f"{below}d"):
                self.shape("", port, rate)
        return bridge

    def add_device(self, bridge, rate):
        node = f"{self.name}n{len(self.nodes)}"
        address = f"{self.subnet}.{len(self.nodes) + 2}"
        self.run(f"ip netns add {node}")
        self.nodes.append(node)
        self.addresses.append(address)
        self.run(f"ip link add {node} mtu {self.mtu} type veth peer name eth0 mtu {self.mtu} netns {node}")
        self.run(f"ip link set {node} master {bridge} up")
        self.run(f"ip -n {node} address add {address}/24 dev eth0")
        self.run(f"ip -n {node} link set eth0 up")
        self.run(f"ip -n {node} link set lo up")
        if self.dilation > 1:
            self.set_tcp(node, "slow_start_after_idle", "0")
            for name in ("wmem", "rmem"):
                self.set_tcp(node, name, f"4096 {SOCKET_BYTES} {SOCKET_BYTES}")
        self.shape(f"ip netns exec {node} ", "eth0", rate)
        self.shape("", node, rate)

    def shape(self, prefix, port, rate):
        # A busy machine sends late: what a port may send within 1 ms (5 ms if dilated) it sends at once then.
        burst = max(32768, rate // 8 // (1000 if self.dilation == 1 else 200))
        self.run(f"{prefix}tc qdisc add dev {port} root tbf rate {rate}bit burst {burst} latency 50ms")

    @staticmethod
    def set_tcp(node, name, value):
        subprocess.run(["ip", "netns", "exec", node, "sysctl", "-qw", f"net.ipv4.tcp_{name}={value}"], check=True)

    @staticmethod
    def run(command, check=True):
        subprocess.run(command.split(), check=check, stderr=None if check else subprocess.DEVNULL)

    def launch(self, command, environment=None):
        """Runs one rank in each namespace over UCX, and returns the output of rank 0; RuntimeError if a rank fails."""
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        environment = {**os.environ, "MOESAIC_RENDEZVOUS": f"{self.addresses[0]}:{port}",
                       "MOESAIC_WORLD_SIZE": str(len(self.nodes)), "MOESAIC_JOB_SECRET": secrets.token_hex(16),
                       "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", **(environment or {})}
        ranks = [subprocess.Popen(["ip", "netns", "exec", node, *map(str, command)], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, env={**environment, "MOESAIC_RANK": str(rank)})
                 for rank, node in enumerate(self.nodes)]
        outputs = [rank.communicate() for rank in ranks]
        if any(rank.returncode != 0 for rank in ranks):
            raise RuntimeError("\n".join(error for _, error in outputs if error))
        return outputs[0][0]

    def close(self):
        for node in self.nodes:
            self.run(f"ip link delete {node}", check=False)
            self.run(f"ip netns delete {node}", check=False)
        for bridge in reversed(self.bridges):
            self.run(f"ip link delete {bridge}d", check=False)  # its peer goes with it
            self.run(f"ip link delete {bridge}", check=False)
