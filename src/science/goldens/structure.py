"""PyTorch transcription of AlphaFold 2's structure module (Jumper et al., 2021, supplementary algorithms 20 to 24), with OpenFold's
parameter names and results."""
import torch
from torch import nn

import evoformer


class TransitionLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.linear_1, self.linear_2, self.linear_3 = (nn.Linear(c, c) for _ in range(3))

    def forward(self, s):
        return s + self.linear_3(self.linear_2(self.linear_1(s).relu()).relu())


class Transition(nn.Module):
    def __init__(self, c, layers):
        super().__init__()
        self.layers, self.layer_norm = nn.ModuleList(TransitionLayer(c) for _ in range(layers)), nn.LayerNorm(c)

    def forward(self, s):
        for layer in self.layers:
            s = layer(s)
        return self.layer_norm(s)


class BackboneUpdate(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.linear = nn.Linear(c, 6)

    def forward(self, s):
        return self.linear(s)


class AngleBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, a):
        return a + self.linear_2(self.linear_1(a.relu()).relu())


class AngleResnet(nn.Module):
    def __init__(self, c, hidden, blocks):
        super().__init__()
        self.linear_in, self.linear_initial, self.linear_out = nn.Linear(c, hidden), nn.Linear(c, hidden), nn.Linear(hidden, 14)
        self.layers = nn.ModuleList(AngleBlock(hidden) for _ in range(blocks))

    def forward(self, s, initial):
        a = self.linear_in(s.relu()) + self.linear_initial(initial.relu())
        for layer in self.layers:
            a = layer(a)
        a = self.linear_out(a.relu()).unflatten(-1, (7, 2))
        return a, a / a.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()


def rotation_of(q):
    w, x, y, z = q.unbind(-1)
    rows = [w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y), 2 * (x * y + w * z), w * w - x * x + y * y - z * z,
            2 * (y * z - w * x), 2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z]
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


def product(q, p):
    """Hamilton's product of quaternions."""
    a, u = q[..., :1], q[..., 1:]
    b, v = p[..., :1], p[..., 1:]
    return torch.cat([a * b - (u * v).sum(-1, keepdim=True), a * v + b * u + torch.linalg.cross(u, v)], -1)


class StructureModule(nn.Module):
    """Algorithm 20. geometry has default_frames, group_idx, atom_mask and lit_positions."""

    def __init__(self, c_s, c_z, heads, dim, query_points, value_points, hidden, angle_blocks, geometry, blocks=8, transitions=1):
        super().__init__()
        self.blocks = blocks
        self.layer_norm_s, self.layer_norm_z, self.layer_norm_ipa = nn.LayerNorm(c_s), nn.LayerNorm(c_z), nn.LayerNorm(c_s)
        self.linear_in = nn.Linear(c_s, c_s)
        self.ipa = evoformer.InvariantPointAttention(c_s, c_z, heads, dim, query_points, value_points)
        self.transition, self.bb_update = Transition(c_s, transitions), BackboneUpdate(c_s)
        self.angle_resnet = AngleResnet(c_s, hidden, angle_blocks)
        for name, value in geometry.items():
            self.register_buffer(name, value)

    def groups(self, rotation, translation, angles, types):
        """Algorithm 24: frames [n, 8, 4, 4] of the rigid groups."""
        n = len(types)
        backbone = torch.eye(4).repeat(n, 1, 1)
        backbone[:, :3, :3], backbone[:, :3, 3] = rotation, translation
        none = torch.tensor([0.0, 1.0]).expand(n, 1, 2)
        sine, cosine = torch.cat([none, angles], 1).unbind(-1)
        turn = torch.eye(4).repeat(n, 8, 1, 1)
        turn[..., 1, 1], turn[..., 1, 2], turn[..., 2, 1], turn[..., 2, 2] = cosine, -sine, sine, cosine
        frames = self.default_frames[types] @ turn
        chain = list(frames.unbind(1))
        for g in (5, 6, 7):
            chain[g] = chain[g - 1] @ chain[g]
        return backbone[:, None] @ torch.stack(chain, 1)

    def atoms(self, groups, types):
        frames = torch.gather(groups, 1, self.group_idx[types].long()[..., None, None].expand(-1, -1, 4, 4))
        places = self.lit_positions[types]
        return ((frames[..., :3, :3] @ places[..., None])[..., 0] + frames[..., :3, 3]) * self.atom_mask[types][..., None]

    def forward(self, single, pair, types, mask, stop_rotations=False):
        """With stop_rotations, rotations pass no gradients from one iteration to the next, as in algorithm 20."""
        initial, z = self.layer_norm_s(single), self.layer_norm_z(pair)
        s = self.linear_in(initial)
        quaternion, translation = torch.tensor([1.0, 0, 0, 0]).repeat(len(s), 1), torch.zeros(len(s), 3)
        found = []
        for _ in range(self.blocks):
            s = self.layer_norm_ipa(s + self.ipa(s, z, rotation_of(quaternion), translation, mask))
            s = self.transition(s)
            update = self.bb_update(s)
            translation = translation + (rotation_of(quaternion) @ update[:, 3:, None])[..., 0]
            quaternion = quaternion + product(quaternion, torch.cat([torch.zeros(len(s), 1), update[:, :3]], -1))
            quaternion = quaternion / quaternion.norm(dim=-1, keepdim=True)
            unnormalized, angles = self.angle_resnet(s, initial)
            groups = self.groups(rotation_of(quaternion), 10 * translation, angles, types)
            found.append({"frames": torch.cat([quaternion, 10 * translation], -1), "angles": angles, "unnormalized": unnormalized,
                          "groups": groups, "positions": self.atoms(groups, types)})
            if stop_rotations:
                quaternion = quaternion.detach()
        return {name: torch.stack([step[name] for step in found]) for name in found[0]} | {"single": s}


def random_geometry(types=21):
    """Rigid groups and atoms of made-up residues, of the sizes of real ones."""
    frames = torch.eye(4).repeat(types, 8, 1, 1)
    rotation = torch.linalg.qr(torch.randn(types, 7, 3, 3))[0]
    frames[:, 1:, :3, :3] = rotation * torch.linalg.det(rotation)[..., None, None]
    frames[:, 1:, :3, 3] = torch.randn(types, 7, 3)
    return {"default_frames": frames, "group_idx": torch.randint(0, 8, (types, 14)).to(frames.dtype),
            "atom_mask": (torch.rand(types, 14) > 0.3).to(frames.dtype), "lit_positions": 1.5 * torch.randn(types, 14, 3)}


def goldens(state):
    residues, c_s, c_z = 17, 16, 12
    module = evoformer.randomize(StructureModule(c_s, c_z, 3, 5, 4, 6, 10, 2, random_geometry(), blocks=3))
    single, pair = torch.randn(residues, c_s), torch.randn(residues, residues, c_z)
    types, mask = torch.randint(0, 21, (residues,)), torch.ones(residues)
    mask[-1] = 0
    with torch.no_grad():
        out = module(single, pair, types, mask)
    arrays = {"single": single, "pair": pair, "types": types, "mask": mask} | {f"out.{name}": value for name, value in out.items()}
    return {name: value.numpy() for name, value in arrays.items()} | state(module, "weights.")
