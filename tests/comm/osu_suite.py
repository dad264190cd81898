#!/usr/bin/env python3
"""Runs osu_validation.sh on the OSU micro-benchmarks. Fetches their sources once, and checks their hash.

Usage: osu_suite.py FOLDER LIBRARY. FOLDER keeps the sources and the programs. MOESAIC_OSU_SOURCES names a folder with unpacked
sources instead, for machines without access to the server. When the sources cannot be had, the script prints the reason and exits
with status 77 (skipped).
"""
import hashlib
import http.client
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
NAME = "osu-micro-benchmarks-7.4"
URL = f"https://mvapich.cse.ohio-state.edu/download/mvapich/{NAME}.tar.gz"
SHA256 = "1edd0c2efa61999409bfb28740a7f39689a5b42b1a1b4c66d1656e5637f7cefc"
CONNECT_SECONDS = 20
SKIPPED = 77


def sources(folder):
    """Returns the folder of the sources."""
    given = os.environ.get("MOESAIC_OSU_SOURCES")
    if given:
        if not (pathlib.Path(given) / "configure").exists():
            raise SystemExit(f"FAILED: MOESAIC_OSU_SOURCES must name a folder with OSU's configure script, found {given}")
        return pathlib.Path(given).resolve()
    unpacked = folder / NAME
    if unpacked.exists():
        return unpacked
    with urllib.request.urlopen(URL, timeout=CONNECT_SECONDS) as response:
        archive = response.read()
    if hashlib.sha256(archive).hexdigest() != SHA256:
        raise SystemExit(f"FAILED: {URL} does not have the SHA-256 hash {SHA256}")
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        packed = pathlib.Path(fresh) / "sources.tar.gz"
        packed.write_bytes(archive)
        with tarfile.open(packed) as opened:  # its hash is known
            opened.extractall(fresh)
        os.replace(pathlib.Path(fresh) / NAME, unpacked)
    return unpacked


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        unpacked = sources(folder)
    except (OSError, http.client.HTTPException) as error:
        print(f"SKIPPED: the OSU micro-benchmarks cannot be fetched from {URL}: {error}; MOESAIC_OSU_SOURCES may name their folder")
        return SKIPPED
    return subprocess.run(["bash", HERE / "osu_validation.sh", unpacked, sys.argv[2], folder / "programs"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
