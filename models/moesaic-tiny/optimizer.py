"""Muon for the matrices inside the blocks, AdamW for embeddings, head, router and norms."""

from collections import defaultdict

import torch


def orthogonalize(g: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz steps that push the singular values of each matrix of g [n, rows, columns] towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix, scaled so that an update has the size AdamW's would (arXiv 2502.16982).

    Parameters of one shape are updated as one batch; a stack of experts is a batch of matrices by itself.
    """

    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(parameters, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = defaultdict(list)
            for p in group["params"]:
                shapes[p.shape[-2:]].append(p)
            for (rows, columns), members in shapes.items():
                directions = []
                for p in members:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    directions.append(p.grad.lerp(buffer, group["momentum"]).view(-1, rows, columns))
                update = orthogonalize(torch.cat(directions)) * (0.2 * max(rows, columns) ** 0.5)
                for p, u in zip(members, update.split([len(d) for d in directions])):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(u.view_as(p), alpha=group["lr"])


def build(model, lr: float) -> list[torch.optim.Optimizer]:
    matrices, tables, others = [], [], []
    for name, p in model.named_parameters():
        if name.startswith(("embed_tokens", "lm_head")):
            tables.append(p)
        else:
            (matrices if p.dim() > 1 and not name.endswith("router") else others).append(p)
    adam = torch.optim.AdamW([dict(params=tables, lr=2 * lr, weight_decay=0.01),
                              dict(params=others, lr=lr, weight_decay=0.0)], lr=lr, betas=(0.9, 0.95), eps=1e-8)
    optimizers = [Muon(matrices, lr), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers
