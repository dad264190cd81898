#!/usr/bin/env python3
"""Installs the Python package from the source tree and runs its tests, mypy and ruff.

Usage: package_test.py BUILD_FOLDER, in an environment that has requirements.txt.
"""
import pathlib
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"


def run(*command):
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, cwd=PACKAGE)


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    tools = pathlib.Path(sys.executable).parent
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation",
        "--no-deps", "--force-reinstall", f"-Cbuild-dir={build}", PACKAGE)
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    run(sys.executable, PACKAGE.parent / "examples" / "science" / "message_passing.py")
    run(tools / "mypy", f"--cache-dir={build / 'mypy'}")
    run(tools / "ruff", "check", "--no-cache", ".")
    run(tools / "ruff", "format", "--no-cache", "--check", ".")


if __name__ == "__main__":
    main()
