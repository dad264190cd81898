#!/usr/bin/env python3
"""Runs a JavaScript test against a server with the packages of its package-lock.json. Installs them once.

Usage: with_node.py BUILD_FOLDER SCRIPT [--chromium]. The script finds the server in MOESAIC_URL, the model in
MOESAIC_MODEL, the browser, if it needs one, in CHROMIUM, and the time limit of a step in MOESAIC_PATIENCE_MS. It may write
files to MOESAIC_OUT. When Node.js, the packages or the browser are missing, this program prints the reason. It then fails if the
environment has CI, and else exits with status 77 (skipped).
"""
import fcntl
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

from serving import MODEL, patient, serving
from with_clients import missing

INSTALL_SECONDS = 900
MIN_NODE = 18  # has node:test and fetch
TEST_SECONDS = patient(600)
STEP_SECONDS = patient(60)


def install(folder, source):
    """Installs the packages of `source` into `folder`."""
    files = [source / "package.json", source / "package-lock.json"]
    modules = list(source.glob("*.mjs"))  # modules search packages in their own folder
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    mark = folder / "packages.sha256"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for module in modules:  # writes changed modules only, since other tests may run them now
            copy = folder / module.name
            if not copy.exists() or copy.read_bytes() != module.read_bytes():
                shutil.copy(module, copy)
        if mark.exists() and mark.read_text() == wanted:
            return
        for file in files:
            shutil.copy(file, folder)
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries", "5"], cwd=folder, check=True,
                       capture_output=True, text=True, timeout=INSTALL_SECONDS)
        mark.write_text(wanted)


def main():
    folder, script = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    browser = shutil.which("chromium") or ""
    if "--chromium" in sys.argv and not browser:
        return missing("Chromium", "no chromium on PATH (Debian's package chromium)")
    try:
        version = subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout.strip()
        if int(version.lstrip("v").split(".")[0]) < MIN_NODE:
            return missing(f"Node.js {MIN_NODE} or newer", f"found {version}")
        install(folder, script.parent)
    except (subprocess.SubprocessError, OSError) as error:
        return missing("Node.js, npm, or a package", error)
    with serving() as server:
        test = subprocess.Popen(["node", folder / script.name], start_new_session=True,
                                env={**os.environ, "MOESAIC_URL": server.url, "MOESAIC_MODEL": str(MODEL), "MOESAIC_OUT": str(folder),
                                     "CHROMIUM": browser, "MOESAIC_PATIENCE_MS": str(round(1000 * STEP_SECONDS))})
        try:
            return test.wait(TEST_SECONDS)
        finally:
            if test.poll() is None:
                os.killpg(test.pid, signal.SIGTERM)  # programs that it started end too, and the nginx of a proxy with it
                try:
                    test.wait(patient(10))
                except subprocess.TimeoutExpired:
                    test.kill()


if __name__ == "__main__":
    sys.exit(main())
