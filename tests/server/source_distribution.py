"""Source distributions of Python packages, whose tests are not in the installed packages."""
import hashlib
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

FETCH_SECONDS = 900


def fetch(package, version, sha256, sources):
    """Returns the folder of a package's sources below `sources`. pip fetches them once and checks their hash."""
    folder = sources / f"{package}-{version}"
    archive = folder.with_name(folder.name + ".tar.gz")
    if not archive.exists():
        sources.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=sources) as fresh:
            wanted = pathlib.Path(fresh) / "wanted.txt"
            wanted.write_text(f"{package}=={version} --hash=sha256:{sha256}\n")
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--retries", "10",
                            "--no-deps", "--no-binary", ":all:", "--require-hashes", "-r", wanted, "-d", fresh],
                           check=True, capture_output=True, text=True, timeout=FETCH_SECONDS)
            os.replace(pathlib.Path(fresh) / archive.name, archive)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
        raise AssertionError(f"{archive} is not the pinned source distribution: delete it")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=sources) as fresh, tarfile.open(archive) as packed:
            packed.extractall(fresh, filter="data")
            os.replace(pathlib.Path(fresh) / folder.name, folder)
    return folder
