#!/usr/bin/env python3
"""Writes helix.pdb or helix.cif: the backbone of an ideal alpha helix, for the documentation and as a fuzzer's first inputs.

Usage: make_helix.py FILE; the format is that of its suffix. Atoms follow from ideal bond lengths and angles, and phi = -57, psi = -47, omega = 180 degrees.
"""
import math
import pathlib
import sys

SEQUENCE = "MAEELAKKLEELLKRAVEEAKRLG"
NAMES = {"A": "ALA", "E": "GLU", "G": "GLY", "K": "LYS", "L": "LEU", "M": "MET", "R": "ARG", "V": "VAL"}


def place(a, b, c, length, angle, torsion):
    """Returns the atom at a bond length from c, a bond angle at c and a torsion around b-c."""
    def minus(p, q):
        return [x - y for x, y in zip(p, q)]

    def unit(p):
        size = math.sqrt(sum(x * x for x in p))
        return [x / size for x in p]

    def cross(p, q):
        return [p[1] * q[2] - p[2] * q[1], p[2] * q[0] - p[0] * q[2], p[0] * q[1] - p[1] * q[0]]

    bond = unit(minus(c, b))
    normal = unit(cross(minus(b, a), bond))
    side = cross(normal, bond)
    angle, torsion = math.radians(angle), math.radians(torsion)
    local = (-math.cos(angle), math.sin(angle) * math.cos(torsion), math.sin(angle) * math.sin(torsion))
    return [c[i] + length * (local[0] * bond[i] + local[1] * side[i] + local[2] * normal[i]) for i in range(3)]


def main():
    n, ca = [0.0, 0.0, 0.0], [1.458, 0.0, 0.0]
    c = place([0.0, 1.0, 0.0], n, ca, 1.525, 111.0, -57.0)
    mmcif = sys.argv[1].endswith(".cif")
    columns = ("group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_seq_id "
               "pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy auth_seq_id auth_asym_id pdbx_PDB_model_num")
    lines = ["data_HELIX", "_entry.id HELIX", "loop_", *(f"_atom_site.{name}" for name in columns.split())] if mmcif else []
    serial = 0
    for number, letter in enumerate(SEQUENCE, 1):
        next_n = place(n, ca, c, 1.329, 117.2, -47.0)
        o = place(n, ca, c, 1.231, 120.5, 133.0)
        for name, xyz in (("N", n), ("CA", ca), ("C", c), ("O", o)):
            serial += 1
            if mmcif:
                lines.append(f"ATOM {serial} {name[0]} {name} . {NAMES[letter]} A {number} ? {xyz[0]:.3f} {xyz[1]:.3f} {xyz[2]:.3f} 1.00 "
                             f"{number} A 1")
                continue
            lines.append(f"ATOM  {serial:5}  {name:<3} {NAMES[letter]} A{number:4}    {xyz[0]:8.3f}{xyz[1]:8.3f}{xyz[2]:8.3f}  1.00  0.00           {name[0]}")
        next_ca = place(ca, c, next_n, 1.458, 121.7, 180.0)
        n, ca, c = next_n, next_ca, place(c, next_n, next_ca, 1.525, 111.0, -57.0)
    pathlib.Path(sys.argv[1]).write_text("\n".join([*lines, *(["#"] if mmcif else ["TER", "END"]), ""]))


if __name__ == "__main__":
    main()
