#!/usr/bin/env python3
"""Tests `moesaic chat` on a terminal with cursor control: editing, history, completion, pastes, UTF-8."""
import json
import os
import pathlib
import stat
import tempfile

import moesaic_cli as cli
from terminal import PASTE_ON, Terminal, needs_editor

FLAGS = ["--temperature", "0", "-n", "4", "--ignore-eos", "-q"]
LEFT, UP, HOME = "\x1b[D", "\x1b[A", "\x01"


@needs_editor
class EditingTest(cli.TalkingCase):
    def setUp(self):
        self.state = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        self.saved = self.state / "saved.json"
        os.environ.update({"XDG_STATE_HOME": str(self.state / "new" / "state"), "TERM": "xterm-256color", "LC_ALL": "C"})

    def start(self):
        terminal = Terminal("chat", self.model, *FLAGS)
        terminal.wait_for_prompt()
        return terminal

    def send(self, terminal, text):
        """Types a message and waits for the next prompt."""
        terminal.type(text)
        terminal.wait_for_prompt()

    def questions(self, terminal):
        """Returns the questions of a saved chat."""
        self.send(terminal, f"/save {self.saved}\r")
        terminal.type("/exit\r")
        self.assertEqual(terminal.leave(), 0)
        return [m["content"] for m in json.loads(self.saved.read_text())["messages"] if m["role"] == "user"]

    def test_lines_can_be_edited(self):
        terminal = self.start()
        self.send(terminal, "helo" + LEFT + "l" + HOME + "oh " + "\x05!\r")  # Ctrl-A, Ctrl-E
        self.send(terminal, "caf\u00e9 \u4f60\u597dx\x7f \U0001f600\r")
        self.assertEqual(self.questions(terminal), ["oh hello!", "caf\u00e9 \u4f60\u597d \U0001f600"])

    def test_history_persists_and_can_be_searched(self):
        terminal = self.start()
        self.send(terminal, "first message\r")
        self.send(terminal, "second one\r")
        self.send(terminal, UP + UP + "s\r")
        self.assertEqual(self.questions(terminal), ["first message", "second one", "first messages"])
        file = self.state / "new" / "state" / "moesaic" / "chat_history"
        self.assertEqual(file.read_text().splitlines()[1:-2], ["first\\040message", "second\\040one", "first\\040messages"])
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(file.parent.stat().st_mode), 0o700)
        terminal = self.start()
        self.send(terminal, "\x12cond o\x1b\r")  # Ctrl-R, Escape, Return
        self.assertEqual(self.questions(terminal), ["second one"])

    def test_multi_line_paste_is_one_message(self):
        terminal = self.start()
        terminal.type("see: \x1b[200~one\rtwo\rthree /exit\r\x1b[201~")
        self.send(terminal, " end\r")
        self.send(terminal, UP + "\r")
        self.assertEqual(self.questions(terminal), ["see: one\ntwo\nthree /exit\n end"] * 2)

    def test_tab_completes_commands_and_files(self):
        talk = self.state / "talk.json"
        talk.write_text(json.dumps({"messages": [{"role": "user", "content": "old"}, {"role": "assistant", "content": "x"}]}))
        terminal = self.start()
        terminal.type("/s\t")
        terminal.wait_for("/stats  /system")
        self.send(terminal, "et temp\t0.5\r")
        self.send(terminal, f"/lo\t{self.state}/ta\t\r")
        self.assertEqual(self.questions(terminal), ["old"])

    def test_ctrl_c_drops_the_line_and_then_exits(self):
        terminal = self.start()
        terminal.type("never sent\x03")
        terminal.wait_for("Ctrl-C again")
        terminal.wait_for_prompt()
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)

    def test_terminal_without_cursor_control_gets_plain_lines(self):
        os.environ["TERM"] = "dumb"
        terminal = Terminal("chat", self.model, *FLAGS)
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("> ")
        self.assertNotIn(PASTE_ON, terminal.text)
        terminal.type("\x04")
        self.assertEqual(terminal.leave(), 0)


if __name__ == "__main__":
    cli.main()
