"""PyTorch transcription of the EGNN layer."""
import torch


class Egnn(torch.nn.Module):
    """Satorras et al., arXiv 2102.09844, equations 3 to 6, with the options of the authors' program."""

    def __init__(self, inputs, hidden, edge_inputs, attention):
        super().__init__()
        silu, linear = torch.nn.SiLU, torch.nn.Linear
        self.edge_mlp = torch.nn.Sequential(linear(2 * inputs + 1 + edge_inputs, hidden), silu(), linear(hidden, hidden), silu())
        self.node_mlp = torch.nn.Sequential(linear(hidden + inputs, hidden), silu(), linear(hidden, inputs))
        self.coord_mlp = torch.nn.Sequential(linear(hidden, hidden), silu(), linear(hidden, 1, bias=False))
        self.att_mlp = torch.nn.Sequential(linear(hidden, 1), torch.nn.Sigmoid()) if attention else None

    def forward(self, h, x, src, dst, edge, normalize=False, tanh=False, mean=True):
        difference = x[dst] - x[src]
        squared = (difference**2).sum(-1, keepdim=True)
        message = self.edge_mlp(torch.cat([h[dst], h[src], squared, edge], -1))
        if self.att_mlp is not None:
            message = message * self.att_mlp(message)
        if normalize:
            difference = difference / (squared.sqrt() + 1e-8)
        weight = self.coord_mlp(message)
        if tanh:
            weight = weight.tanh()
        shift = torch.zeros_like(x).index_add_(0, dst, difference * weight)
        if mean:
            shift = shift / torch.bincount(dst, minlength=len(x)).clamp(min=1)[:, None]
        total = torch.zeros(len(h), message.shape[1]).index_add_(0, dst, message)
        return h + self.node_mlp(torch.cat([h, total], -1)), x + shift
