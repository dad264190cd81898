#!/usr/bin/env python3
"""`moesaic chat` through a pipe and on a terminal, Ctrl-C included."""
import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
import unittest

import moesaic_cli as cli
from moesaic_cli import run

FLAGS = ["--temperature", "0", "-n", "12", "--ignore-eos"]


class PipeTest(cli.TalkingCase):
    def test_one_question(self):
        result = run("chat", self.model, "-p", "Hello?", *FLAGS)
        self.assertRegex(result.stderr, r"\[12 tokens, first after [\d.]+ s \(\d+ prompt tokens\), [\d.]+ tok/s")
        quiet = run("chat", self.model, "-p", "Hello?", "-q", *FLAGS)
        self.assertEqual(quiet.stderr, "")
        self.assertEqual(quiet.stdout, result.stdout)
        # The same through the template by hand.
        by_hand = run("generate", self.model, "--no-special", "--prompt", "<s><|user|>Hello?\n<|assistant|>", *FLAGS)
        self.assertEqual(by_hand.stdout, result.stdout)

    def test_every_line_is_a_message_and_the_answers_stay(self):
        saved = self.folder / "saved.json"
        talk = run("chat", self.model, "-q", "--system", "Be brief.", *FLAGS,
                   stdin=f'one \\\ntwo\n"""three\nfour"""\n/save {saved}\n')
        messages = json.loads(saved.read_text())["messages"]
        self.assertEqual([m["role"] for m in messages], ["system", "user", "assistant", "user", "assistant"])
        self.assertEqual([messages[1]["content"], messages[3]["content"]], ["one \ntwo", "three\nfour"])
        self.assertEqual(talk.stdout, messages[2]["content"] + "\n" + messages[4]["content"] + "\n")
        prompt = "<s>" + "".join(f"<|{m['role']}|>{m['content']}\n" for m in messages[:4]) + "<|assistant|>"
        by_hand = run("generate", self.model, "--no-special", "--prompt", prompt, *FLAGS)
        self.assertEqual(by_hand.stdout, messages[4]["content"] + "\n")
        # A loaded conversation goes on where it was.
        again = run("chat", self.model, "-q", *FLAGS, stdin=f"/load {saved}\n/regenerate\n")
        self.assertEqual(again.stdout, messages[4]["content"] + "\n")

    def test_commands(self):
        commands = "/help\n/system Be kind.\n/set temperature 0.5\n/set\n/stats\nhi\n/reset\n/exit\nnever asked\n"
        result = run("chat", self.model, "-q", *FLAGS, stdin=commands)
        self.assertEqual(len(result.stdout.splitlines()), len(result.stdout.strip("\n").splitlines()))
        for part in ("/regenerate", "system: Be kind.", "temperature 0.5", "parameters"):
            self.assertIn(part, result.stderr)

    def test_faults_end_a_script(self):
        self.assertIn("no command /nonsense", run("chat", self.model, stdin="/nonsense\n", code=1).stderr)
        self.assertIn("luck", run("chat", self.model, stdin="/set luck 1\n", code=1).stderr)
        self.assertIn("no answer yet", run("chat", self.model, stdin="/regenerate\n", code=1).stderr)

    def test_a_full_context_forgets_the_oldest_turns(self):
        lines = "".join(f"question number {i} with some words in it\n" for i in range(8))
        result = run("chat", self.model, "-c", "128", *FLAGS, stdin=lines)
        self.assertIn("earlier turns are forgotten", result.stderr)
        self.assertIn("leaves no room", run("chat", self.model, "-c", "128", stdin="x" * 200, code=1).stderr)


class Terminal:
    """moesaic on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen([str(cli.BINARY), *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, preexec_fn=self._take_terminal, env={**os.environ, "NO_COLOR": "1"})
        self.text = ""

    def _take_terminal(self):
        import fcntl
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, part):
        """Reads until `part` has appeared after what was waited for before."""
        deadline = time.monotonic() + cli.TIMEOUT
        while part not in self.text:
            if time.monotonic() > deadline or not self._read(1):
                raise AssertionError(f"{part!r} never came; last: {self.text[-500:]!r}")
        self.text = self.text.split(part, 1)[1]

    def _read(self, seconds):
        if not select.select([self.master], [], [], seconds)[0]:
            return self.process.poll() is None
        try:
            self.text += os.read(self.master, 65536).decode(errors="replace")
        except OSError:
            return False
        return True

    def leave(self):
        """The exit code, once the terminal is seen to be as it was."""
        code = self.process.wait(timeout=cli.TIMEOUT)
        assert termios.tcgetattr(self.slave) == self.before, "the terminal is in another mode"
        os.close(self.slave)
        os.close(self.master)
        return code


class TerminalTest(cli.TalkingCase):
    LONG = ["-n", "100000", "--ignore-eos", "-q"]

    def test_ctrl_d_leaves(self):
        terminal = Terminal("chat", self.model, *FLAGS)
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("12 tokens")
        terminal.wait_for("> ")
        terminal.type("\x04")
        self.assertEqual(terminal.leave(), 0)

    def test_ctrl_c_at_the_prompt_asks_and_then_leaves(self):
        terminal = Terminal("chat", self.model, *FLAGS)
        terminal.wait_for("> ")
        terminal.type("\x03")
        terminal.wait_for("Ctrl-C again")
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)

    def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(self):
        terminal = Terminal("chat", self.model, *FLAGS)
        terminal.wait_for("> ")
        terminal.type("/set max_tokens 100000\n")
        terminal.wait_for("max_tokens 100000")
        terminal.type("hi\n")
        terminal.wait_for("hi\r\n")
        time.sleep(0.05)
        terminal.type("\x03")
        terminal.wait_for("tok")  # the speed line, stopped or cut by the context
        terminal.wait_for("> ")
        terminal.type("/set max_tokens 12\n")
        terminal.wait_for("> ")
        terminal.type("again\n")
        terminal.wait_for("12 tokens")
        terminal.type("/exit\n")
        self.assertEqual(terminal.leave(), 0)

    def test_ctrl_c_ends_other_verbs(self):
        terminal = Terminal("bench", self.model, "-p", "0", "-n", "400", "-r", "10000", "-t", "1")
        terminal.wait_for("GB/s")
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)


class SignalTest(cli.TalkingCase):
    def test_an_interrupted_perplexity_leaves_no_file(self):
        text, saved = self.folder / "long.txt", self.folder / "out" / "saved.safetensors"
        text.write_text("to be or not to be " * 20000)
        saved.parent.mkdir()
        process = subprocess.Popen([str(cli.BINARY), "perplexity", str(self.model), str(text), "--save-logits", str(saved)],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + cli.TIMEOUT
        while not any(saved.parent.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=cli.TIMEOUT)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(errors.strip(), "moesaic perplexity: interrupted")
        self.assertEqual(list(saved.parent.iterdir()), [])


if __name__ == "__main__":
    cli.main()
