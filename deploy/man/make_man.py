#!/usr/bin/env python3
"""Writes the man page of moesaic from the program's own help.

Usage: make_man.py MOESAIC OUTPUT.1
"""
import os
import re
import subprocess
import sys


def run(*command):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOESAIC_")}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def escape(text):
    """Protects backslashes, hyphens and leading dots or quotes from troff."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in ".'" else line for line in text.split("\n"))


def verbs(help_text):
    """The (name, summary) pairs that `moesaic --help` lists under "Verbs:"."""
    block = re.search(r"^Verbs:\n((?: +\S.*\n)+)", help_text, re.MULTILINE)
    if not block:
        sys.exit("make_man.py: moesaic --help lists no verbs")
    return re.findall(r"^  (\S+) +(\S.*)$", block[1], re.MULTILINE)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    moesaic, output = sys.argv[1:]
    version = run(moesaic, "--version").split()[-1]
    overview = run(moesaic, "--help")
    page = [f'.TH MOESAIC 1 "" "moesaic {version}" "User Commands"', ".SH NAME",
            "moesaic \\- run mixture\\-of\\-experts language models from their published checkpoints", ".SH SYNOPSIS",
            ".B moesaic\n.I VERB\n[\n.I ARGUMENTS\n]", ".SH VERBS"]
    for name, summary in verbs(overview):
        page += [".TP", f".B {escape(name)}", escape(summary)]
    for name, _ in verbs(overview):
        page += [f'.SS "moesaic {escape(name)}"', ".nf", escape(run(moesaic, name, "--help").strip("\n")), ".fi"]
    page += [".SH EXIT STATUS",
             "0 after success, 1 after a failure, 2 for wrong usage, and 128 plus the number of the signal that ended "
             "the run. SIGINT and SIGTERM drain", ".B serve", "and", ".BR proxy ,", "which then exit with 0.",
             ".SH FILES", ".TP", ".I ~/.cache/moesaic", "Kernel choices that", ".B moesaic tune", "measured.",
             ".TP", ".I ~/.local/state/moesaic/chat_history",
             "Lines that were entered in", ".B moesaic chat.", ".TP", ".I ~/.cache/huggingface/hub",
             "Models that are named by their id.", ".TP", ".I share/doc/moesaic/docs",
             "Pages that the help names, below the prefix of the installation.", ".TP", ".I share/moesaic/topologies",
             "Topology files, below the prefix.", ".SH SEE ALSO", ".BR nginx (8)"]
    with open(output, "w", encoding="utf-8") as file:
        file.write("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
