#!/usr/bin/env python3
"""`cmake --install` and the Debian package hold a binary that runs, its man page, completions and systemd unit; other
projects find the installed libraries with find_package.

Environment: MOESAIC_BUILD, the build folder; MOESAIC_CPACK, the cpack program.
"""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

BUILD = os.environ["MOESAIC_BUILD"]
SOURCE = pathlib.Path(__file__).resolve().parents[2]
FILES = ["bin/moesaic", "share/man/man1/moesaic.1", "share/bash-completion/completions/moesaic",
         "share/zsh/vendor-completions/_moesaic", "share/fish/vendor_completions.d/moesaic.fish",
         "lib/systemd/system/moesaic.service", "lib/sysusers.d/moesaic.conf", "share/doc/moesaic/docs/server.md",
         "share/moesaic/topologies/h100-2x8-infiniband.json"]
MODULE = "ngx_http_moesaic_module.so"


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


class Tree(unittest.TestCase):
    """Assertions on a folder that holds an installation."""

    def check(self, root, prefix):
        for name in FILES:
            self.assertTrue((root / name).is_file(), name)
        if pathlib.Path(BUILD, "bin", MODULE).exists():
            self.assertTrue(list(root.glob(f"lib/**/moesaic/{MODULE}")), MODULE)
        moesaic = root / "bin/moesaic"
        version = run(moesaic, "--version").split()
        self.assertEqual(version[0], "moesaic")

        page = (root / "share/man/man1/moesaic.1").read_text()
        self.assertIn(f'"moesaic {version[1]}"', page)
        for verb in re.findall(r"^  (\w+) +\S", run(moesaic, "--help").split("Verbs:")[1].split("\n\n")[0], re.M):
            self.assertIn(f'.SS "moesaic {verb}"', page)
        if shutil.which("groff"):
            shown = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True)
            self.assertEqual((shown.returncode, shown.stderr), (0, ""))

        completion = root / "share/bash-completion/completions/moesaic"
        words = 'COMP_WORDS=(moesaic ser); COMP_CWORD=1; _moesaic; echo "${COMPREPLY[*]}"'
        self.assertEqual(run("bash", "-c", f'source "$1"; {words}', "bash", completion).strip(), "serve")

        unit = (root / "lib/systemd/system/moesaic.service").read_text()
        self.assertIn(f"\nExecStart={prefix}/bin/moesaic serve ", unit)


class InstallTest(Tree):
    def test_an_installation_is_complete_and_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            run("cmake", "--install", BUILD, "--prefix", folder)
            self.check(pathlib.Path(folder), folder)


class LibrariesTest(unittest.TestCase):
    def test_a_project_finds_the_installed_libraries(self):
        with tempfile.TemporaryDirectory() as folder:
            run("cmake", "--install", BUILD, "--prefix", f"{folder}/prefix")
            # An installation must not depend on the tree that it was built from.
            for name in pathlib.Path(folder, "prefix").rglob("moesaic*.cmake"):
                self.assertNotIn(str(SOURCE / "src"), name.read_text(), name)
            run("cmake", "-S", SOURCE / "tests/packaging/consumer", "-B", f"{folder}/build",
                f"-DCMAKE_PREFIX_PATH={folder}/prefix")
            built = subprocess.run(["cmake", "--build", f"{folder}/build"], capture_output=True, text=True)
            self.assertEqual(built.returncode, 0, built.stdout[-4000:] + built.stderr)
            model = SOURCE / "models/moesaic-tiny"
            printed = run(f"{folder}/build/consumer", model, "Hello world")
            ids = run(f"{folder}/prefix/bin/moesaic", "tokenize", model, "Hello world", "--no-special")
            self.assertRegex(printed, r"^vocabulary \d+:( \d+)+\n$")
            self.assertEqual(re.findall(r"\d+", printed.partition(":")[2]), re.findall(r"\d+", ids))


class PackageTest(Tree):
    @unittest.skipUnless(shutil.which("dpkg-shlibdeps"), "dpkg-shlibdeps (package dpkg-dev) is missing")
    def test_a_debian_package_names_its_libraries_and_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            run(os.environ["MOESAIC_CPACK"], "--config", f"{BUILD}/CPackConfig.cmake", "-B", folder, cwd=folder)
            (package,) = pathlib.Path(folder).glob("*.deb")
            depends = run("dpkg-deb", "--field", package, "Depends")
            for library in ["libc6", "libfmt", "libhwloc", "liburing", "libzmq"]:
                self.assertIn(library, depends)
            self.assertEqual(run("dpkg-deb", "--field", package, "Recommends").strip(), "libucx0")
            run("dpkg-deb", "--extract", package, f"{folder}/root")
            run("dpkg-deb", "--control", package, f"{folder}/control")
            for script in ("postinst", "prerm"):
                run("sh", "-n", f"{folder}/control/{script}")
            self.check(pathlib.Path(folder) / "root/usr", "/usr")


if __name__ == "__main__":
    unittest.main()
