#!/usr/bin/env python3
"""Tests `moesaic chat` through a pipe and on a terminal, including Ctrl-C."""
import json
import os
import shutil

import moesaic_cli as cli
from moesaic_cli import run
from terminal import Terminal, needs_editor

FLAGS = ["--temperature", "0", "-n", "12", "--ignore-eos"]


class PipeTest(cli.TalkingCase):
    def test_answers_one_question(self):
        result = run("chat", self.model, "-p", "Hello?", *FLAGS)
        self.assertRegex(result.stderr, r"\[12 tokens, first after [\d.]+ s \(\d+ prompt tokens\), [\d.]+ tok/s")
        quiet = run("chat", self.model, "-p", "Hello?", "-q", *FLAGS)
        self.assertEqual(quiet.stderr, "")
        self.assertEqual(quiet.stdout, result.stdout)
        # Renders the same prompt with the template.
        by_hand = run("generate", self.model, "--no-special", "--prompt", "<s><|user|>Hello?\n<|assistant|>", *FLAGS)
        self.assertEqual(by_hand.stdout, result.stdout)

    def test_every_line_is_a_message_and_answers_are_kept(self):
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
        # A loaded conversation continues.
        again = run("chat", self.model, "-q", *FLAGS, stdin=f"/load {saved}\n/regenerate\n")
        self.assertEqual(again.stdout, messages[4]["content"] + "\n")

    def test_commands_change_the_settings(self):
        commands = "/help\n/system Be kind.\n/set temperature 0.5\n/set\n/stats\nhi\n/reset\n/exit\nnever asked\n"
        result = run("chat", self.model, "-q", "--seed", "1", *FLAGS, stdin=commands)
        self.assertEqual(len(result.stdout.splitlines()), len(result.stdout.strip("\n").splitlines()))
        for part in ("/regenerate", "system: Be kind.", "temperature 0.5", "parameters"):
            self.assertIn(part, result.stderr)

    def test_errors_end_a_script(self):
        self.assertIn("unknown command /nonsense", run("chat", self.model, stdin="/nonsense\n", code=1).stderr)
        self.assertIn("luck", run("chat", self.model, stdin="/set luck 1\n", code=1).stderr)
        self.assertIn("no answer yet", run("chat", self.model, stdin="/regenerate\n", code=1).stderr)

    def test_full_context_drops_the_oldest_turns(self):
        lines = "".join(f"question number {i} with some words in it\n" for i in range(8))
        result = run("chat", self.model, "-c", "128", *FLAGS, stdin=lines)
        self.assertIn("earlier turns are forgotten", result.stderr)
        self.assertIn("leaves no room", run("chat", self.model, "-c", "128", stdin="x" * 200, code=1).stderr)


class TerminalTest(cli.TalkingCase):
    def setUp(self):
        os.environ["TERM"] = "xterm-256color"  # else there is no line editor

    def test_ctrl_d_exits(self):
        terminal = Terminal("chat", self.model, *FLAGS)
        terminal.wait_for_prompt()
        terminal.type("hi\n")
        terminal.wait_for("12 tokens")
        terminal.wait_for_prompt()
        terminal.type("\x04")
        self.assertEqual(terminal.leave(), 0)

    def test_ctrl_c_at_the_prompt_asks_and_then_exits(self):
        terminal = Terminal("chat", self.model, *FLAGS)
        terminal.wait_for_prompt()
        terminal.type("\x03")
        terminal.wait_for("Ctrl-C again")
        terminal.type("\x03")
        self.assertEqual(terminal.leave(), 130)

    @needs_editor
    def test_ctrl_c_stops_an_answer_and_the_chat_continues(self):
        # The context is so long that the answer cannot end before Ctrl-C.
        config = json.loads((self.model / "config.json").read_text())
        long_model = self.folder / "long"
        shutil.copytree(self.model, long_model)
        (long_model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200000}))
        terminal = Terminal("chat", long_model, *FLAGS)
        terminal.wait_for_prompt()
        terminal.enter("/set max_tokens 200000")
        terminal.wait_for_prompt()
        terminal.enter("hi")
        terminal.wait_for_output()
        terminal.type("\x03")
        terminal.wait_for("prompt tokens")  # the speed line
        terminal.wait_for_prompt()
        terminal.enter("/set max_tokens 12")
        terminal.wait_for_prompt()
        terminal.enter("again")
        terminal.wait_for("12 tokens")
        terminal.wait_for_prompt()
        terminal.type("/exit\n")
        self.assertEqual(terminal.leave(), 0)


if __name__ == "__main__":
    cli.main()
