"""PyTorch transcriptions of AlphaFold 2's layers (Jumper et al., 2021, supplement), with OpenFold's parameter names."""
import math

import torch
from torch import nn


class Heads(nn.Module):
    """Gated multi-head attention."""

    def __init__(self, c, heads, dim):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(c, heads * dim, bias=False) for _ in range(3))
        self.linear_g, self.linear_o = nn.Linear(c, heads * dim), nn.Linear(heads * dim, c)

    def forward(self, x, bias, mask):
        """x is [batch, positions, c], bias [positions, positions, heads] or None, mask [batch, positions]."""
        def split(linear):
            return linear(x).unflatten(-1, (self.heads, self.dim))

        scores = torch.einsum("bihd,bjhd->bijh", split(self.linear_q) / math.sqrt(self.dim), split(self.linear_k))
        if bias is not None:
            scores = scores + bias
        scores = scores + 1e9 * (mask[:, None, :, None] - 1)
        values = torch.einsum("bijh,bjhd->bihd", scores.softmax(2), split(self.linear_v)).flatten(-2)
        return self.linear_o(values * self.linear_g(x).sigmoid())


class TriangleAttention(nn.Module):
    def __init__(self, c, heads, dim, ending):
        super().__init__()
        self.ending = ending
        self.layer_norm, self.linear, self.mha = nn.LayerNorm(c), nn.Linear(c, heads, bias=False), Heads(c, heads, dim)

    def forward(self, z, mask):
        if self.ending:
            z, mask = z.transpose(0, 1), mask.T
        x = self.layer_norm(z)
        x = self.mha(x, self.linear(x), mask)
        return x.transpose(0, 1) if self.ending else x


class TriangleMultiplication(nn.Module):
    def __init__(self, c, hidden, incoming):
        super().__init__()
        self.incoming = incoming
        self.linear_a_p, self.linear_a_g, self.linear_b_p, self.linear_b_g = (nn.Linear(c, hidden) for _ in range(4))
        self.linear_g, self.linear_z = nn.Linear(c, c), nn.Linear(hidden, c)
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(c), nn.LayerNorm(hidden)

    def forward(self, z, mask):
        x = self.layer_norm_in(z)
        a = mask[..., None] * self.linear_a_g(x).sigmoid() * self.linear_a_p(x)
        b = mask[..., None] * self.linear_b_g(x).sigmoid() * self.linear_b_p(x)
        product = torch.einsum("kic,kjc->ijc" if self.incoming else "ikc,jkc->ijc", a, b)
        return self.linear_g(x).sigmoid() * self.linear_z(self.layer_norm_out(product))


class MsaAttention(nn.Module):
    def __init__(self, c_m, c_z, heads, dim, row):
        super().__init__()
        self.row = row
        self.layer_norm_m, self.mha = nn.LayerNorm(c_m), Heads(c_m, heads, dim)
        if row:
            self.layer_norm_z, self.linear_z = nn.LayerNorm(c_z), nn.Linear(c_z, heads, bias=False)

    def forward(self, m, z, mask):
        if self.row:
            return self.mha(self.layer_norm_m(m), self.linear_z(self.layer_norm_z(z)), mask)
        return self.mha(self.layer_norm_m(m).transpose(0, 1), None, mask.T).transpose(0, 1)


class OuterProductMean(nn.Module):
    def __init__(self, c_m, c_z, hidden):
        super().__init__()
        self.layer_norm = nn.LayerNorm(c_m)
        self.linear_1, self.linear_2, self.linear_out = nn.Linear(c_m, hidden), nn.Linear(c_m, hidden), nn.Linear(hidden * hidden, c_z)

    def forward(self, m, mask):
        x = self.layer_norm(m)
        a, b = self.linear_1(x) * mask[..., None], self.linear_2(x) * mask[..., None]
        outer = torch.einsum("sic,sjd->ijcd", a, b).flatten(-2)
        return self.linear_out(outer) / (torch.einsum("si,sj->ij", mask, mask)[..., None] + 1e-3)


class Transition(nn.Module):
    def __init__(self, c, factor):
        super().__init__()
        self.layer_norm, self.linear_1, self.linear_2 = nn.LayerNorm(c), nn.Linear(c, factor * c), nn.Linear(factor * c, c)

    def forward(self, x):
        return self.linear_2(self.linear_1(self.layer_norm(x)).relu())


class EvoformerBlock(nn.Module):
    def __init__(self, c_m, c_z, hidden, heads, dim):
        super().__init__()
        self.msa_att_row = MsaAttention(c_m, c_z, heads, dim, True)
        self.msa_att_col = MsaAttention(c_m, c_z, heads, dim, False)
        self.msa_transition, self.outer_product_mean = Transition(c_m, 4), OuterProductMean(c_m, c_z, hidden)
        self.tri_mul_out, self.tri_mul_in = (TriangleMultiplication(c_z, hidden, incoming) for incoming in (False, True))
        self.tri_att_start, self.tri_att_end = (TriangleAttention(c_z, heads, dim, ending) for ending in (False, True))
        self.pair_transition = Transition(c_z, 4)

    def forward(self, m, z, msa_mask, pair_mask):
        m = m + self.msa_att_row(m, z, msa_mask)
        m = m + self.msa_att_col(m, z, msa_mask)
        m = m + self.msa_transition(m)
        z = z + self.outer_product_mean(m, msa_mask)
        for layer in (self.tri_mul_out, self.tri_mul_in, self.tri_att_start, self.tri_att_end):
            z = z + layer(z, pair_mask)
        return m, z + self.pair_transition(z)


class InvariantPointAttention(nn.Module):
    """Algorithm 22."""

    def __init__(self, c_s, c_z, heads, dim, query_points, value_points):
        super().__init__()
        self.heads, self.dim, self.query_points, self.value_points = heads, dim, query_points, value_points
        self.linear_q, self.linear_kv = nn.Linear(c_s, heads * dim), nn.Linear(c_s, 2 * heads * dim)
        self.linear_q_points = nn.Linear(c_s, 3 * heads * query_points)
        self.linear_kv_points = nn.Linear(c_s, 3 * heads * (query_points + value_points))
        self.linear_b, self.head_weights = nn.Linear(c_z, heads), nn.Parameter(torch.randn(heads))
        self.linear_out = nn.Linear(heads * (dim + 4 * value_points + c_z), c_s)

    def points(self, x, rotation, translation):
        """[n, 3 p] with x, y and z one after another as global points [n, p, 3]."""
        local = torch.stack(torch.split(x, x.shape[-1] // 3, -1), -1)
        return torch.einsum("nij,npj->npi", rotation, local) + translation[:, None]

    def forward(self, s, z, rotation, translation, mask):
        q = self.linear_q(s).unflatten(-1, (self.heads, -1))
        k, v = self.linear_kv(s).unflatten(-1, (self.heads, -1)).split(self.dim, -1)
        q_points = self.points(self.linear_q_points(s), rotation, translation).unflatten(1, (self.heads, -1))
        kv_points = self.points(self.linear_kv_points(s), rotation, translation).unflatten(1, (self.heads, -1))
        k_points, v_points = kv_points.split([self.query_points, self.value_points], 2)
        scores = torch.einsum("ihd,jhd->ijh", q, k) * math.sqrt(1 / (3 * self.dim)) + math.sqrt(1 / 3) * self.linear_b(z)
        distance = (q_points[:, None] - k_points[None]).square().sum((-1, -2))
        weight = nn.functional.softplus(self.head_weights) * math.sqrt(1 / (3 * self.query_points * 9 / 2))
        scores = (scores - 0.5 * weight * distance + 1e5 * (mask[:, None, None] * mask[None, :, None] - 1)).softmax(1)
        out = torch.einsum("ijh,jhd->ihd", scores, v).flatten(1)
        points = torch.einsum("ijh,jhpx->ihpx", scores, v_points).flatten(1, 2) - translation[:, None]
        points = torch.einsum("nji,npj->npi", rotation, points)
        pair = torch.einsum("ijh,ijc->ihc", scores, z).flatten(1)
        norm = (points.square().sum(-1) + 1e-8).sqrt()
        return self.linear_out(torch.cat([out, *points.unbind(-1), norm, pair], -1))


def randomize(module):
    """Weights that let every term matter."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.5)
    return module


def goldens(state):
    sequences, residues, c_m, c_z = 7, 19, 12, 10
    m, z = torch.randn(sequences, residues, c_m), torch.randn(residues, residues, c_z)
    msa_mask, pair_mask = (torch.rand(sequences, residues) > 0.2).double(), (torch.rand(residues, residues) > 0.2).double()
    msa_mask[:, 0] = msa_mask[0] = pair_mask[:, 0] = pair_mask[0] = 1  # no row or column without a key
    block = randomize(EvoformerBlock(c_m, c_z, 8, 2, 6))
    arrays = {"m": m, "z": z, "msa_mask": msa_mask, "pair_mask": pair_mask}
    with torch.no_grad():
        for name, layer in block.named_children():
            if name.startswith("tri"):
                arrays[f"{name}.out"] = layer(z, pair_mask)
            elif name.startswith("msa_att"):
                arrays[f"{name}.out"] = layer(m, z, msa_mask)
            elif name == "outer_product_mean":
                arrays[f"{name}.out"] = layer(m, msa_mask)
            else:
                arrays[f"{name}.out"] = layer(m if name.startswith("msa") else z)
        arrays["m_out"], arrays["z_out"] = block(m, z, msa_mask, pair_mask)
        ipa = randomize(InvariantPointAttention(14, c_z, 3, 5, 4, 6))
        s, mask = torch.randn(residues, 14), torch.ones(residues)
        mask[-2:] = 0
        rotation = torch.linalg.qr(torch.randn(residues, 3, 3))[0]
        rotation = rotation * torch.linalg.det(rotation)[:, None, None]
        translation = 3 * torch.randn(residues, 3) + 100
        arrays |= {"ipa.s": s, "ipa.rotation": rotation, "ipa.translation": translation, "ipa.mask": mask,
                   "ipa.out": ipa(s, z, rotation, translation, mask)}
    return {name: value.numpy() for name, value in arrays.items()} | state(block, "weights.") | state(ipa, "ipa.weights.")
