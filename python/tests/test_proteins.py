"""ProteinMPNN at its published size on structures of the Protein Data Bank, against its PyTorch transcription."""

from __future__ import annotations

import gzip
import os
import pathlib
import sys

import numpy as np
import pytest

from moesaic import layers

ROOT = pathlib.Path(__file__).resolve().parents[2]
STRUCTURES = pathlib.Path(os.environ.get("MOESAIC_STRUCTURES", ROOT.parent / "shared" / "data" / "graphs"))
NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not STRUCTURES.is_dir(), reason=f"{STRUCTURES} has no structures; MOESAIC_STRUCTURES names them"
    ),
]


def unit(x):
    return x / np.linalg.norm(x)


def backbone(path):
    """Return residues with N, CA and C of the first model: xyz [n, 4, 3], index, chain and sequence [n]."""
    residues = {}
    with gzip.open(path, "rt") as file:
        for line in file:
            if line.startswith("ENDMDL"):
                break
            atom, name = line[12:16].strip(), line[17:20]
            if line.startswith("ATOM") and atom in ("N", "CA", "C", "O") and name in NAMES:
                place = residues.setdefault((line[21], int(line[22:26]), line[26]), (name, {}))
                place[1].setdefault(atom, [float(line[at : at + 8]) for at in (30, 38, 46)])
    kept = [(key[0], name, atoms) for key, (name, atoms) in residues.items() if {"N", "CA", "C"} <= set(atoms)]
    for (_, _, atoms), (_, _, following) in zip(kept, [*kept[1:], kept[-1]], strict=True):
        if "O" not in atoms:  # complex.pdb.gz has none: in the plane of the peptide bond, away from CA and the next N
            carbon = np.array(atoms["C"])
            away = sum(unit(carbon - near) for near in (atoms["CA"], following["N"]))
            atoms["O"] = carbon + 1.23 * unit(away)
    chains = list(dict.fromkeys(chain for chain, _, _ in kept))
    chain = np.array([chains.index(c) + 1 for c, _, _ in kept])
    xyz = np.array([[atoms[a] for a in ("N", "CA", "C", "O")] for _, _, atoms in kept])
    return xyz, np.arange(len(kept)) + 100 * (chain - 1), chain, np.array([NAMES.index(name) for _, name, _ in kept])


@pytest.mark.parametrize("name", ["5nmu.pdb.gz", "complex.pdb.gz"])
def test_published_size_matches_the_reference_on_structures(name):
    sys.path.insert(0, str(ROOT / "src" / "science" / "goldens"))
    try:
        import mpnn
    finally:
        sys.path.pop(0)
    xyz, index, chain, sequence = backbone(STRUCTURES / name)
    assert len(xyz) > 100
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        reference = mpnn.ProteinMpnn(hidden=128, layers=3, neighbors=48)
        order = torch.randperm(len(xyz))
        known = torch.ones(len(xyz))
        arrays = [torch.from_numpy(x) for x in (index, chain, sequence)]
        with torch.no_grad():
            want, neighbor, _, _ = reference(torch.from_numpy(xyz), known, *arrays, order)
    finally:
        torch.set_default_dtype(default)
    assert neighbor.shape == (len(xyz), 48)
    model = layers.ProteinMpnn(reference.state_dict(), 48)
    got = model.log_probabilities(torch.from_numpy(xyz), known, *arrays, order)
    assert (want - want.mean(0)).abs().max() > 0.1  # positions differ
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
