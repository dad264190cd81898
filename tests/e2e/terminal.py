"""Runs moesaic on a pseudo-terminal."""
import fcntl
import json
import os
import pty
import select
import subprocess
import termios
import time
import unittest

import moesaic_cli as cli

HAS_EDITOR = json.loads(cli.run("doctor", "--quick", "--json").stdout)["libraries"]["libedit"] != "absent"
needs_editor = unittest.skipUnless(HAS_EDITOR, "this build has no libedit")
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"  # the line editor writes these around each line that it reads


class Terminal:
    """A moesaic process on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen([str(cli.BINARY), *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, preexec_fn=self._take_terminal, env={**os.environ, "NO_COLOR": "1"})
        self.text = ""

    def _take_terminal(self):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, part):
        """Reads until `part` appears after the previously awaited text. Returns the text between the two."""
        self._read_until(lambda: part in self.text, repr(part))
        before, self.text = self.text.split(part, 1)
        return before

    def wait_for_output(self):
        """Waits for the first character after the previously awaited text."""
        self._read_until(lambda: self.text, "output")

    def wait_for_prompt(self):
        """Waits for the prompt and, with a line editor, until it reads keys, which it does after printing it."""
        if not HAS_EDITOR:
            self.wait_for("> ")
            return
        self.wait_for(PASTE_ON)
        self.wait_for("> ")
        self._read_until(lambda: not termios.tcgetattr(self.slave)[3] & termios.ICANON, "key input", seconds=0.001)

    def enter(self, line):
        """Types a line at the prompt and waits until the line editor has read it."""
        self.type(line + "\n")
        self.wait_for(PASTE_OFF)

    def _read_until(self, is_done, awaited, seconds=1):
        """Reads until `is_done()`, which it asks after every output and at least after `seconds`."""
        deadline = time.monotonic() + cli.limit()
        while not is_done():
            if time.monotonic() > deadline or not self._read(seconds):
                raise AssertionError(f"{awaited} never came; last: {self.text[-500:]!r}")

    def _read(self, seconds):
        if not select.select([self.master], [], [], seconds)[0]:
            return self.process.poll() is None
        try:
            self.text += os.read(self.master, 65536).decode(errors="replace")
        except OSError:
            return False
        return True

    def leave(self):
        """Checks that the terminal mode is restored, and returns the exit code."""
        code = self.process.wait(timeout=cli.limit())
        assert termios.tcgetattr(self.slave) == self.before, "the terminal is in another mode"
        os.close(self.slave)
        os.close(self.master)
        return code
