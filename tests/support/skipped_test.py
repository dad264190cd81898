#!/usr/bin/env python3
"""The summary of skipped tests finds the cases of GoogleTest, unittest and scripts in a CTest log."""
import unittest

import skipped

LOG = """\
1/4 Testing: kernels_test.1of2
Output:
[ RUN      ] Cards.Compile
/a folder/src/a_test.cc:11: Skipped
no card: install
  the driver
[  SKIPPED ] Cards.Compile (3 ms)
[ RUN      ] Cards.Link
/a folder/src/a_test.cc:21: Skipped
no linker
[  SKIPPED ] Cards.Link (0 ms)
[ RUN      ] Cards.Run
[       OK ] Cards.Run (0 ms)
[  SKIPPED ] 2 tests, listed below:
[  SKIPPED ] Cards.Compile
[  SKIPPED ] Cards.Link
<end of output>
2/4 Testing: e2e_output
test_read_only (__main__.FileTest.test_read_only) ... skipped 'root may write everywhere'
test_documented (__main__.FileTest.test_documented)
A folder is kept. ... skipped "it's root"
test_written (__main__.FileTest.test_written) ... ok
OK (skipped=2)
3/4 Testing: server_tls
SKIPPED: there is no openssl
4/4 Testing: old
OK (skipped=3)
"""


class SkippedTest(unittest.TestCase):
    def test_each_kind_of_output_is_read(self):
        self.assertEqual(skipped.skipped(LOG), [
            ("kernels_test.1of2", "Cards.Compile", "no card: install the driver"),
            ("kernels_test.1of2", "Cards.Link", "no linker"),
            ("e2e_output", "test_read_only", "root may write everywhere"),
            ("e2e_output", "test_documented", "it's root"),
            ("server_tls", None, "there is no openssl"),
            *[("old", None, "without a reason in the log")] * 3])

    def test_cases_of_one_reason_share_a_line(self):
        self.assertEqual(skipped.summary([("a", "x", "no card"), ("b", None, "no card"), ("c", "y", "root")]), [
            "Skipped: 3 test cases", "     2  no card (a: x, b)", "     1  root (c: y)"])
        self.assertEqual(skipped.summary([]), ["No test was skipped."])


if __name__ == "__main__":
    unittest.main()
