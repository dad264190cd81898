#!/usr/bin/env python3
"""Installs the Python package from the source tree and runs its tests, mypy and ruff.

Usage: package_test.py BUILD_FOLDER [LIBRARIES], in an environment that has requirements.txt.

LIBRARIES is the file python/libraries.cmake of a build folder: the package links that build's static libraries, and only
its bindings are compiled. Without it everything is compiled, as `pip install ./python` does in a clone; builds with sanitizers,
coverage or without optimization test the package that way. With LIBRARIES the other way is configured and planned only:
CMake finds all that it needs without the main build, and every source of a plan exists. The sources are the same.
"""
import pathlib
import re
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"
ROOMS = ["base", "runtime", "tensor", "kernels", "science"]


def run(*command):
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, cwd=PACKAGE)


def defines():
    """The CMake definitions of pyproject.toml, which Python 3.10 cannot parse."""
    found = re.findall(r'^cmake\.define\.(\w+) = "(\w+)"$', (PACKAGE / "pyproject.toml").read_text(), re.M)
    assert ("MOESAIC_PYTHON", "ON") in found, found
    return [f"-D{name}={value}" for name, value in found]


def plan_clean_build(build):
    """Configures a build of everything and lists its steps."""
    run("cmake", "-S", PACKAGE.parent, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}", *defines())
    steps = subprocess.run(["ninja", "-C", build, "-n", "-v", "moesaic_python"], check=True, capture_output=True, text=True).stdout
    for room in ROOMS:
        assert f"libmoesaic_{room}.a" in steps, f"a clean build makes no library of {room}:\n{steps[-4000:]}"


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    tools = pathlib.Path(sys.executable).parent
    options = [f"-Cbuild-dir={build}"]
    if len(sys.argv) > 2:
        options.append(f"-Ccmake.define.MOESAIC_PYTHON_LIBRARIES={pathlib.Path(sys.argv[2]).resolve()}")
        plan_clean_build(build / "clean")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation",
        "--no-deps", "--force-reinstall", *options, PACKAGE)
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    run(sys.executable, PACKAGE.parent / "examples" / "science" / "message_passing.py")
    run(tools / "mypy", f"--cache-dir={build / 'mypy'}")
    run(tools / "ruff", "check", "--no-cache", ".")
    run(tools / "ruff", "format", "--no-cache", "--check", ".")


if __name__ == "__main__":
    main()
