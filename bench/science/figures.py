#!/usr/bin/env python3
"""Draws the ratios in the tables of docs/science.md as bars: docs/figures/science-*.svg.

Usage: figures.py [--check]. --check exits with 1 if a figure differs from its table.
"""
import argparse
import math
import pathlib
import re
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "science.md"
FIGURES = ROOT / "docs" / "figures"
WIDTH, ROW, TOP, RIGHT, LETTER = 320, 22, 34, 70, 6.8  # pixels: bars, a row, above the rows, values, a letter of a label

# File, first cells of the table's header, title. Bounds are no peers: their rows are left out.
TABLES = (
    ("science-operators", ("operator", "threads"), "PyTorch's time / ours, operators (A: 512 x 64 x 256, B: 50k, 1M x 64)"),
    ("science-layers", ("layer", "threads"), "PyTorch eager's time / ours, layers"),
    ("science-memory", ("layer, 512 residues, one thread",), "PyTorch eager's memory / ours"),
)

STYLE = """
  text { font: 12px sans-serif; fill: #1f2328; }
  .axis { stroke: #8c959f; stroke-width: 1; }
  .one { stroke: #1f2328; stroke-width: 1; }
  .faster { fill: #2f81b7; }
  .slower { fill: #c25b2a; }
  .spread { stroke: #1f2328; stroke-width: 1.5; }
  .target { stroke: #8250df; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .one, .spread { stroke: #e6edf3; }
  }
"""


def rows_of(page, header):
    """The cells of the table whose header begins with these cells."""
    lines = page.splitlines()
    for at, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or tuple(cells[:len(header)]) != header:
            continue
        for row in lines[at + 2:]:
            if not row.startswith("|"):
                return
            yield dict(zip(cells, (cell.strip() for cell in row.strip("|").split("|"))))
        return
    raise SystemExit(f"{PAGE.name} has no table whose header begins with {' | '.join(header)}")


def bars(page, header):
    """Yields label, ratio as the table has it, its quartiles (or none) and target (or none)."""
    before = {}
    for row in rows_of(page, header):
        for key, value in row.items():  # an empty first cell, or number of threads, repeats that of the row above
            if value == "" and key in header:
                row[key] = before[key]
        before = row
        label = row[header[0]]
        if "other" in row:
            if row["other"].startswith("bound"):
                continue
            label += f": {row['other']}"
        if "threads" in row:
            label += f", {row['threads']} thread{'' if row['threads'] == '1' else 's'}"
        numbers = re.match(r"([\d.]+)(?: \(([\d.]+) to ([\d.]+)\))?$", row["ratio"])
        if numbers is None:
            raise SystemExit(f"the ratio \"{row['ratio']}\" of \"{label}\" is not a number with a spread")
        target = re.match(r"[\d.]+(?! ?ms)(?=$|[:;])", row.get("target", ""))
        spread = (float(numbers[2]), float(numbers[3])) if numbers[2] else None
        yield label.replace("`", ""), numbers[1], spread, float(target[0]) if target else None


def draw(title, data):
    """Bars from 1 to each ratio, on an axis of logarithms."""
    values = [1, *(value for _, ratio, spread, target in data for value in (float(ratio), *(spread or ()), target) if value)]
    left = round(20 + LETTER * max(len(label) for label, *_ in data))
    low, high = 0.9 * min(values), 1.1 * max(values)

    def x(value):
        return left + WIDTH * math.log(value / low) / math.log(high / low)

    height = TOP + ROW * len(data) + 28
    width = left + WIDTH + RIGHT
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
           f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>']
    bottom = TOP + ROW * len(data)
    for tick in (0.5, 1, 2, 5, 10, 20, 50, 100):
        if low <= tick <= high:
            out.append(f'<line class="{"one" if tick == 1 else "axis"}" x1="{x(tick):.1f}" y1="{TOP}" x2="{x(tick):.1f}" y2="{bottom}"'
                       + ("" if tick == 1 else ' stroke-dasharray="2 3"') + "/>")
            out.append(f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}x</text>')
    for i, (label, shown, spread, target) in enumerate(data):
        ratio, y = float(shown), TOP + ROW * i
        middle = y + ROW / 2
        out.append(f'<text x="{left - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        begin, end = sorted((x(1), x(ratio)))
        out.append(f'<rect class="{"faster" if ratio >= 1 else "slower"}" x="{begin:.1f}" y="{y + 4}" width="{end - begin:.1f}" height="{ROW - 8}"/>')
        if spread:
            out.append(f'<line class="spread" x1="{x(spread[0]):.1f}" y1="{middle:.1f}" x2="{x(spread[1]):.1f}" y2="{middle:.1f}"/>')
        if target:
            out.append(f'<line class="target" x1="{x(target):.1f}" y1="{y + 1}" x2="{x(target):.1f}" y2="{y + ROW - 1}"/>')
        right = max(x(ratio), x(1), x(spread[1]) if spread else 0, x(target) if target else 0)
        out.append(f'<text x="{right + 6:.1f}" y="{middle + 4:.1f}">{shown}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    page, differ = PAGE.read_text(), []
    for name, header, title in TABLES:
        path, figure = FIGURES / f"{name}.svg", draw(title, list(bars(page, header)))
        if not options.check:
            path.write_text(figure)
        elif not path.is_file() or path.read_text() != figure:
            differ.append(str(path.relative_to(ROOT)))
    if differ:
        sys.exit(f"{', '.join(differ)} differ from {PAGE.relative_to(ROOT)}: run bench/science/figures.py")


if __name__ == "__main__":
    main()
