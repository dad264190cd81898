#!/usr/bin/env python3
"""./run and its scripts reject invalid arguments at once in one line, and break nothing when they
fail; nothing here installs or builds."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from moesaic_cli import ROOT, patient


def ask(*arguments):
    return subprocess.run([str(ROOT / "run"), *arguments], capture_output=True, text=True, timeout=patient(60))


def presets():
    """Returns the names of the configure presets that are not hidden."""
    return [preset["name"] for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
            if not preset.get("hidden")]


class RunTest(unittest.TestCase):
    def test_superfluous_arguments_are_rejected(self):
        for arguments, part in ((["check", "now"], '"now"'), (["setup", "x"], '"x"'), (["format", "src"], '"src"'),
                                (["help", "me"], '"me"'), (["fuzz", "1", "2"], '"2"'), (["fuzz", "a"], '"a"'),
                                (["bench", "--fast"], '"--fast"'), (["bench", "--quick", "x"], '"x"'),
                                (["build", "relase"], '"relase"'), (["demo", "--foo"], "--foo"),
                                (["demo", "a", "b"], "one question"), (["frobnicate"], '"frobnicate"')):
            with self.subTest(arguments=arguments):
                result = ask(*arguments)
                self.assertEqual((result.returncode, result.stdout), (2, ""))
                self.assertEqual(len(result.stderr.splitlines()), 1)
                self.assertIn(part, result.stderr)
                self.assertIn("./run help", result.stderr)

    def test_help_names_every_command(self):
        text = ask("help").stdout
        for command in ("demo", "chat", "test", "check", "fuzz", "bench", "setup", "build", "format"):
            self.assertRegex(text, rf"(?m)^  {command}\b")
        self.assertEqual(ask().stdout, text)
        described = re.search(r"^  build (.*?)^  \w", text, re.MULTILINE | re.DOTALL)[1]
        for preset in presets():
            self.assertRegex(described, rf"\b{preset}\b")

    def test_an_unknown_preset_is_rejected_with_the_known_ones(self):
        for name in ("relase", "base"):  # "base" is hidden
            result = ask("build", name)
            self.assertEqual((result.returncode, result.stdout), (2, ""))
            self.assertEqual(result.stderr, f'[run] there is no preset "{name}"; CMakePresets.json has {", ".join(presets())}; '
                                            "see ./run help\n")

    def test_the_client_checks_its_arguments_first(self):
        # -S hides all packages, including the required one.
        result = subprocess.run([sys.executable, "-S", str(ROOT / "models" / "ask.py")], capture_output=True, text=True)
        self.assertEqual((result.returncode, result.stderr), (2, "usage: ask.py URL QUESTION\n"))


class StandIns(unittest.TestCase):
    """A folder whose `bin` has stand-ins for programs."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="moesaic-e2e-"))
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "bin").mkdir()

    def stand_in(self, name, script):
        path = self.folder / "bin" / name
        path.write_text("#!/bin/sh\n" + script + "\n")
        path.chmod(0o755)


class SetupTest(StandIns):
    """Tests a copy of ./run, for a user without root, with stand-ins for the programs that it calls."""

    OPTIONAL = "chromium|nginx*|etcd-server|*openmpi*|libucx-dev|npm|hpcc|libsimgrid-dev|python3-jsonschema"

    def setUp(self):
        super().setUp()
        for name in ("run", "CMakePresets.json"):
            shutil.copy(ROOT / name, self.folder)
        for name in ("bash", "dirname", "nproc", "grep", "sed", "awk", "sort", "head", "mkdir", "cat", "cut"):
            (self.folder / "bin" / name).symlink_to(shutil.which(name))
        self.stand_in("uname", "echo x86_64")
        self.stand_in("id", "echo 1000")
        self.stand_in("cargo", "echo cargo 1.99.0")
        self.stand_in("dpkg-query", f"""for name; do :; done
case "$name" in {self.OPTIONAL}) exit 1 ;; esac
echo install ok installed""")
        self.stand_in("apt-cache", "exit 0")
        self.stand_in("cmake", 'echo "$HOME" >home; exit 3')

    def ask(self, *arguments, **environment):
        return subprocess.run([str(self.folder / "run"), *arguments], capture_output=True, text=True, timeout=patient(60),
                              env={"PATH": str(self.folder / "bin"), "HOME": str(self.folder), **environment})

    def test_optional_packages_need_no_root(self):
        result = self.ask("test", "-N")
        self.assertEqual(result.returncode, 3, result.stderr)  # of cmake
        self.assertIn("no Chromium", result.stderr)
        self.assertIn("no hpcc: the tests that need it will be skipped", result.stderr)
        self.assertIn("cannot install libucx-dev: the build may lack ranks", result.stderr)

    def test_packages_that_a_release_lacks_are_not_requested(self):
        self.stand_in("apt-cache", 'test "$1" = policy && echo "500 http://deb.example.org main amd64 Packages"')
        self.stand_in("sudo", f': >"{self.folder}/asked"; exit 1')
        result = self.ask("test", "-N")
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertIn("no Chromium", result.stderr)
        self.assertFalse((self.folder / "asked").exists(), result.stderr)

    def test_a_build_reports_the_parts_that_it_lacks(self):
        self.stand_in("cmake", 'echo "-- MPI not found: no MPI"; echo "-- Done"; exit 3')
        result = self.ask("build")
        self.assertEqual(result.returncode, 3)
        self.assertIn("MPI not found", result.stderr)
        self.assertNotIn("Done", result.stderr + result.stdout)

    def test_every_preset_can_be_built(self):
        self.stand_in("cmake", f'echo "$*" >>"{self.folder}/called"')
        self.stand_in("npm", "exit 0")
        for name in ("clang", "nginx"):
            self.stand_in(name, "echo 14.0.6")
        self.stand_in("dpkg-query", "echo install ok installed")
        for preset in presets():
            with self.subTest(preset=preset):
                (self.folder / "called").write_text("")
                result = self.ask("build", preset)
                self.assertEqual(result.returncode, 0, result.stderr)
                configure, compile_ = (self.folder / "called").read_text().splitlines()
                self.assertEqual(configure, f"--preset {preset} -Wno-dev")
                folder = "release" if preset == "ci" else preset
                self.assertRegex(compile_, f"^--build build/{folder} ")

    def test_ci_makes_warnings_errors_in_the_folder_of_release(self):
        self.stand_in("cmake", f'echo "$*" >>"{self.folder}/called"')
        self.stand_in("npm", "exit 0")
        self.stand_in("dpkg-query", "echo install ok installed")
        release = self.folder / "build" / "release"
        release.mkdir(parents=True)
        (release / "build.ninja").write_text("")
        for cache, calls in (("MOESAIC_WERROR:BOOL=OFF\n", 2), ("MOESAIC_WERROR:BOOL=ON\n", 1)):
            (release / "CMakeCache.txt").write_text(cache)
            (self.folder / "called").write_text("")
            self.assertEqual(self.ask("build", "ci").returncode, 0)
            self.assertEqual(len((self.folder / "called").read_text().splitlines()), calls)

    def test_required_packages_need_root(self):
        self.stand_in("dpkg-query", "exit 1")
        result = self.ask("setup")
        self.assertEqual(result.returncode, 1)
        self.assertIn("needs root", result.stderr)

    def test_a_home_that_cannot_be_written_is_replaced(self):
        for home, used in ((self.folder, self.folder), ("/nonexistent", self.folder / "build" / "home")):
            self.assertEqual(self.ask("build", HOME=str(home)).returncode, 3)
            self.assertEqual((self.folder / "home").read_text(), f"{used}\n")

    def test_a_home_that_is_not_named_is_looked_up(self):
        self.stand_in("getent", f'echo "user:x:1000:1000::{self.folder}:/bin/sh"')
        self.assertEqual(self.ask("build", HOME="").returncode, 3)
        self.assertEqual((self.folder / "home").read_text(), f"{self.folder}\n")

    def test_the_runtime_of_clang_is_found_without_lists_of_packages(self):
        result = self.ask("build", "fuzz")
        self.assertEqual(result.returncode, 1)
        self.assertIn("clang is missing", result.stderr)
        self.stand_in("clang", "echo 14.0.6")
        self.stand_in("npm", "exit 0")
        self.stand_in("dpkg-query", 'for name; do :; done; test "$name" != libclang-rt-14-dev && echo install ok installed')
        lists = self.folder / "lists"
        self.stand_in("apt-cache", f'test -e "{lists}" && echo "500 http://deb.example.org main amd64 Packages"')
        self.stand_in("apt-get", "exit 0")
        self.stand_in("sudo", f'case "$*" in *update*) : >"{lists}" ;; *) echo "$*" >"{self.folder}/asked" ;; esac')
        self.assertEqual(self.ask("build", "fuzz").returncode, 3)  # of cmake
        self.assertIn("libclang-rt-14-dev", (self.folder / "asked").read_text())

    def test_other_processors_are_refused(self):
        self.stand_in("uname", "echo aarch64")
        result = self.ask("setup")
        self.assertEqual((result.returncode, len(result.stderr.splitlines())), (1, 1))
        self.assertIn("aarch64", result.stderr)


class MakeModelTest(StandIns):
    """Tests make.sh of moesaic-smol with stand-ins for the programs that it calls."""

    OLD = {"hf/old": "old", "moesaic-smol.moesaic": "old", "recipe": "old\n"}
    MADE = {"hf/new": "new\n", "hf/generation_config.json": "defaults", "moesaic-smol.moesaic": "new\n",
            "recipe": "new, calibration 0123456789abcdef, plan 0123456789abcdef\n"}

    def setUp(self):
        super().setUp()
        shutil.copy(ROOT / "models" / "moesaic-smol" / "make.sh", self.folder)
        for name in ("calibration", "plan"):
            (self.folder / f"{name}.safetensors").write_text("")
        (self.folder / "generation_config.json").write_text("defaults")
        for name, text in self.OLD.items():
            (self.folder / "build" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "build" / name).write_text(text)
        self.stand_in("sha256sum", "cat >/dev/null; echo 0123456789abcdef")
        self.stand_in("python3", "exit 1")

    def moesaic(self, carve, convert="exit 1"):
        self.stand_in("moesaic", f"""case "$1 $2" in
  "carve --print-recipe") echo new; exit ;;
  carve*) for out; do :; done; {carve} ;;
  convert*) for out; do :; done; {convert} ;;
esac""")

    def start(self, *flags, gguf=True):
        if gguf:
            (self.folder / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_text("")
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        return subprocess.Popen([str(self.folder / "make.sh"), str(self.folder / "bin" / "moesaic"), *flags],
                                env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def left(self):
        build = self.folder / "build"
        return {str(path.relative_to(build)): path.read_text() for path in build.rglob("*")
                if not path.is_dir() and path.suffix != ".gguf"}

    def test_failure_keeps_the_old_model(self):
        self.moesaic("exit 1")
        for gguf in (False, True):
            self.assertNotEqual(self.start(gguf=gguf).wait(patient(60)), 0)
            self.assertEqual(self.left(), self.OLD)
        self.moesaic('mkdir "$out"')
        self.assertNotEqual(self.start().wait(patient(60)), 0)
        self.assertEqual(self.left(), self.OLD)
        self.assertEqual(list((self.folder / "build").glob("*.??????")), [])

    def test_interrupt_keeps_the_old_model(self):
        marker = self.folder / "started"
        self.moesaic(f'mkdir "$out"; touch "{marker}"; exec sleep 60')
        process = self.start()
        while process.poll() is None and not marker.exists():
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        self.assertNotEqual(process.wait(patient(60)), 0)
        self.assertEqual(self.left(), self.OLD)
        self.assertEqual(list((self.folder / "build").glob("*.??????")), [])

    def test_success_replaces_the_old_model(self):
        self.moesaic('mkdir "$out"; echo new >"$out/new"', 'echo new >"$out"')
        self.assertEqual(self.start().wait(patient(60)), 0)
        self.assertEqual(self.left(), self.MADE)

    def test_new_sampling_defaults_are_packed_without_carving(self):
        self.moesaic('mkdir "$out"; echo new >"$out/new"', 'echo new >"$out"')
        self.assertEqual(self.start().wait(patient(60)), 0)
        (self.folder / "generation_config.json").write_text("others")
        self.moesaic("exit 1")  # carve and convert fail: the old model is kept
        self.assertNotEqual(self.start().wait(patient(60)), 0)
        self.assertEqual(self.left(), self.MADE)
        self.moesaic("exit 1", 'cat "$2/generation_config.json" >"$out"')
        self.assertEqual(self.start().wait(patient(60)), 0)
        self.assertEqual(self.left(), {**self.MADE, "hf/generation_config.json": "others", "moesaic-smol.moesaic": "others"})
        self.moesaic("exit 1")  # up to date: nothing is called
        self.assertEqual(self.start().wait(patient(60)), 0)

    def test_fetch_only_needs_no_moesaic(self):
        (self.folder / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_text("")
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        fetch = [str(self.folder / "make.sh"), "--fetch-only"]
        self.assertEqual(subprocess.run(fetch, env=environment, timeout=patient(60), stdout=subprocess.DEVNULL).returncode, 0)
        (self.folder / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf").unlink()  # the stand-in for python3 does not download
        self.assertNotEqual(subprocess.run(fetch, env=environment, timeout=patient(60), stdout=subprocess.DEVNULL,
                                           stderr=subprocess.DEVNULL).returncode, 0)
        self.assertEqual(self.left(), self.OLD)

    def test_search_replaces_the_plan_together_with_the_model(self):
        plan = self.folder / "plan.safetensors"
        carve = ('case "$*" in *"--save-plan new."*"/plan.safetensors "*) echo new >"${out%/hf}/plan.safetensors" ;; esac; '
                 'mkdir "$out"')
        self.moesaic(carve)
        self.assertNotEqual(self.start("--search").wait(patient(60)), 0)
        self.assertEqual((self.left(), plan.read_text()), (self.OLD, ""))
        self.moesaic(carve, 'echo new >"$out"')
        self.assertEqual(self.start("--search").wait(patient(60)), 0)
        self.assertEqual((self.left()["moesaic-smol.moesaic"], plan.read_text()), ("new\n", "new\n"))

    def test_other_arguments_are_rejected(self):
        self.moesaic("exit 0")
        for flags in (["--serach"], ["--search", "more"], ["--fetch-only"]):
            self.assertEqual(self.start(*flags).wait(patient(60)), 2)


if __name__ == "__main__":
    unittest.main()
