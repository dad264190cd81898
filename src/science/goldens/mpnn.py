"""A PyTorch transcription of ProteinMPNN (Dauparas et al., 2022) with the parameter names of its checkpoints."""
import torch
from torch import nn
from torch.nn import functional

PAIRS = ("N-N C-C O-O Cb-Cb Ca-N Ca-C Ca-O Ca-Cb N-C N-O N-Cb Cb-C Cb-O O-C N-Ca C-Ca O-Ca Cb-Ca C-N O-N Cb-N C-Cb "
         "O-Cb C-O").split()


class Features(nn.Module):
    def __init__(self, hidden, neighbors):
        super().__init__()
        self.neighbors = neighbors
        self.embeddings = nn.ModuleDict({"linear": nn.Linear(66, 16)})
        self.edge_embedding = nn.Linear(16 + 25 * 16, hidden, bias=False)
        self.norm_edges = nn.LayerNorm(hidden)

    @staticmethod
    def rbf(distance):
        centers = torch.linspace(2.0, 22.0, 16)
        return torch.exp(-(((distance[..., None] - centers) / 1.25) ** 2))

    def forward(self, xyz, known, index, chain):
        n, ca, c, o = xyz.unbind(1)
        b, d = ca - n, c - ca
        a = torch.linalg.cross(b, d)
        atoms = {"N": n, "Ca": ca, "C": c, "O": o, "Cb": -0.58273431 * a + 0.56802827 * b - 0.54067466 * d + ca}

        def distances(first, second):
            return ((atoms[first][:, None] - atoms[second][None]).square().sum(-1) + 1e-6).sqrt()

        both = known[:, None] * known[None]
        near = both * distances("Ca", "Ca")
        near = near + (1 - both) * near.max(-1, keepdim=True).values
        near, neighbor = torch.topk(near, min(self.neighbors, len(ca)), largest=False)
        parts = [self.rbf(near)]
        for pair in PAIRS:
            first, second = pair.split("-")
            parts.append(self.rbf(distances(first, second).gather(1, neighbor)))
        offset = (index[:, None] - index[None]).gather(1, neighbor)
        same = (chain[:, None] == chain[None]).long().gather(1, neighbor)
        offset = (offset + 32).clamp(0, 64) * same + (1 - same) * 65
        position = self.embeddings["linear"](functional.one_hot(offset, 66).to(xyz.dtype))
        return self.norm_edges(self.edge_embedding(torch.cat([position, *parts], -1))), neighbor


class FeedForward(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.W_in, self.W_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.W_out(functional.gelu(self.W_in(x)))


class Layer(nn.Module):
    def __init__(self, hidden, inputs, encoder):
        super().__init__()
        self.W1, self.W2, self.W3 = nn.Linear(hidden + inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.dense = FeedForward(hidden)
        if encoder:
            self.W11, self.W12, self.W13 = nn.Linear(hidden + inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
            self.norm3 = nn.LayerNorm(hidden)

    def update(self, nodes, edges, known, attend=None):
        wide = torch.cat([nodes[:, None].expand(-1, edges.shape[1], -1), edges], -1)
        message = self.W3(functional.gelu(self.W2(functional.gelu(self.W1(wide)))))
        if attend is not None:
            message = message * attend[..., None]
        nodes = self.norm1(nodes + message.sum(1) / 30)
        return known[:, None] * self.norm2(nodes + self.dense(nodes))

    def encode(self, nodes, edges, neighbor, known):
        nodes = self.update(nodes, torch.cat([edges, nodes[neighbor]], -1), known, known[:, None] * known[neighbor])
        wide = torch.cat([nodes[:, None].expand(-1, edges.shape[1], -1), edges, nodes[neighbor]], -1)
        message = self.W13(functional.gelu(self.W12(functional.gelu(self.W11(wide)))))
        return nodes, self.norm3(edges + message)


class ProteinMpnn(nn.Module):
    def __init__(self, hidden, layers, neighbors):
        super().__init__()
        self.features = Features(hidden, neighbors)
        self.W_e, self.W_s, self.W_out = nn.Linear(hidden, hidden), nn.Embedding(21, hidden), nn.Linear(hidden, 21)
        self.encoder_layers = nn.ModuleList(Layer(hidden, 2 * hidden, True) for _ in range(layers))
        self.decoder_layers = nn.ModuleList(Layer(hidden, 3 * hidden, False) for _ in range(layers))

    def forward(self, xyz, known, index, chain, sequence, order):
        edges, neighbor = self.features(xyz, known, index, chain)
        edges = self.W_e(edges)
        nodes = torch.zeros(len(xyz), edges.shape[-1])
        for layer in self.encoder_layers:
            nodes, edges = layer.encode(nodes, edges, neighbor, known)
        encoded = nodes, edges
        rank = torch.argsort(order)
        before = (rank[neighbor] < rank[:, None]).to(xyz.dtype)[..., None]
        letters = self.W_s(sequence)
        waiting = torch.cat([edges, torch.zeros_like(letters)[neighbor], nodes[neighbor]], -1)
        for layer in self.decoder_layers:
            decoded = torch.cat([edges, letters[neighbor], nodes[neighbor]], -1)
            nodes = layer.update(nodes, known[:, None, None] * (before * decoded + (1 - before) * waiting), known)
        return functional.log_softmax(self.W_out(nodes), -1), neighbor, *encoded


def random_backbone(size, unknown):
    """Coordinates [size, 4, 3] of a random chain and which residues are known."""
    step = torch.randn(size, 3)
    ca = torch.cumsum((3.6 + 0.4 * torch.rand(size, 1)) * step / step.norm(dim=-1, keepdim=True), 0)  # no equal distances
    xyz = ca[:, None] + torch.randn(size, 4, 3)
    xyz[:, 1] = ca
    known = torch.ones(size)
    known[unknown] = 0
    return xyz * known[:, None, None], known


def goldens(state):
    """A random backbone of two chains with unknown residues."""
    size, hidden = 44, 16
    model = ProteinMpnn(hidden, 2, 12)
    xyz, known = random_backbone(size, [5, 6, 30])
    chain = torch.tensor([1] * 25 + [2] * 19)
    index = torch.arange(size) + 100 * (chain - 1)
    sequence, order = torch.randint(0, 21, (size,)), torch.randperm(size)
    with torch.no_grad():
        logs, neighbor, nodes, edges = model(xyz, known, index, chain, sequence, order)
    arrays = {"xyz": xyz, "known": known.int(), "index": index, "chain": chain, "sequence": sequence, "order": order,
              "log_probabilities": logs, "neighbor": neighbor, "nodes": nodes, "edges": edges}
    return {name: value.numpy() for name, value in arrays.items()} | state(model, "weights.")
