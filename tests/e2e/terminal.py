"""Runs moesaic on a pseudo-terminal."""
import fcntl
import os
import pty
import select
import subprocess
import termios
import time

import moesaic_cli as cli


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
        deadline = time.monotonic() + cli.limit()
        while part not in self.text:
            if time.monotonic() > deadline or not self._read(1):
                raise AssertionError(f"{part!r} never came; last: {self.text[-500:]!r}")
        before, self.text = self.text.split(part, 1)
        return before

    def wait_for_prompt(self):
        """Waits until the line editor reads a line."""
        self.wait_for("\x1b[?2004h")
        self.wait_for("> ")
        deadline = time.monotonic() + cli.limit()
        while termios.tcgetattr(self.slave)[3] & termios.ICANON:  # set after the prompt is printed
            if time.monotonic() > deadline:
                raise AssertionError("the line editor does not read keys")
            time.sleep(0.001)

    def enter(self, line):
        """Types a line at the prompt and waits until the line editor has read it."""
        self.type(line + "\n")
        self.wait_for("\x1b[?2004l")

    def wait_for_output(self):
        """Waits for the first character after the previously awaited text."""
        deadline = time.monotonic() + cli.limit()
        while not self.text:
            if time.monotonic() > deadline or not self._read(1):
                raise AssertionError("no output came")

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
