#!/usr/bin/env python3
"""The server as its operator sees it: signals, logs, process metrics, the service manager."""
import signal
import unittest

from serving import chat, serving, until

CHAT = "/v1/chat/completions"


class Signals(unittest.TestCase):
    def test_a_hang_up_reloads_and_does_not_stop_the_server(self):
        with serving() as server:
            for round in range(1, 4):  # three signals in a row would end a process that takes them for interrupts
                server.process.send_signal(signal.SIGHUP)
                until(lambda: server.read_log().count("SIGHUP: ") >= round)
            self.assertEqual(server.json("POST", CHAT, chat("Hi", max_tokens=4))[0], 200)


if __name__ == "__main__":
    unittest.main()
