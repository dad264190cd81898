#!/usr/bin/env python3
"""Tests evicted KV blocks that the warm tier stores in int8, through the server's API. They are restored and counted in
/metrics, those of an int8 cache are exact, and rounded blocks are not written to disk."""
import tempfile
import unittest

from serving import serving

PROMPTS = [[(i * i * 3 + 11 * i + k * 97) % 900 + 5 for i in range(1000)] for k in range(3)]
FLAGS = ("--kv-memory", "1MiB", "--ctx-size", 1200, "--max-sequences", 1)


def completion(server, prompt):
    """Returns (token ids, log-probabilities) and the number of cached tokens."""
    status, answer = server.json("POST", "/v1/completions", {
        "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True})
    assert status == 200, answer
    choice = answer["choices"][0]
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return (choice["token_ids"], choice["logprobs"]["token_logprobs"]), cached


def warm(server, name):
    return server.metric(f"moesaic:kv_warm_{name}")


class Warm(unittest.TestCase):
    def fill(self, server):
        """Requests all prompts, so that the cache evicts the first one."""
        said = [completion(server, prompt) for prompt in PROMPTS]
        self.assertEqual([cached for _, cached in said], [0] * len(PROMPTS))
        self.assertGreater(server.metric("moesaic:kv_evicted_blocks_total"), 10)
        return [answer for answer, _ in said]

    def test_evicted_blocks_are_restored(self):
        with serving("--kv-warm-memory", "4MiB", *FLAGS) as server:
            said = self.fill(server)
            self.assertGreater(warm(server, "stored_blocks_total"), 10)
            (tokens, logprobs), cached = completion(server, PROMPTS[0])
            self.assertEqual(cached, 960)
            self.assertEqual(tokens[0], said[0][0][0])
            # The error is 0.24 for a cache in int8, and 0.01 for one in f32. Keys of other tokens would give errors above 1.
            self.assertAlmostEqual(logprobs[0], said[0][1][0], delta=0.5)
            self.assertGreater(warm(server, "restored_blocks_total"), 5)
            self.assertLessEqual(warm(server, "bytes"), 4 << 20)
            self.assertLessEqual(warm(server, "blocks"), warm(server, "capacity_blocks"))
            self.assertGreater(warm(server, "restore_seconds_total"), 0)
            self.assertEqual(server.json("POST", "/reset_prefix_cache", {})[0], 200)
            self.assertEqual(completion(server, PROMPTS[0])[1], 0)

    def test_evicted_blocks_are_recomputed_without_the_tier(self):
        with serving(*FLAGS) as server:
            self.fill(server)
            self.assertLess(completion(server, PROMPTS[0])[1], 960)
            self.assertEqual(warm(server, "capacity_blocks"), 0)

    def test_an_int8_cache_stays_exact(self):
        flags = ("--kv-dtype", "int8", "--kv-memory", "512KiB", *FLAGS[2:])
        with serving(*flags) as server:
            completion(server, PROMPTS[0])
            in_memory = completion(server, PROMPTS[0])
        with serving("--kv-warm-memory", "4MiB", *flags) as server:
            self.fill(server)
            self.assertEqual(completion(server, PROMPTS[0]), in_memory)
            self.assertGreater(warm(server, "restored_blocks_total"), 0)

    def test_rounded_blocks_are_not_written_to_disk(self):
        with tempfile.TemporaryDirectory() as folder:
            with serving("--kv-warm-memory", "4MiB", "--kv-disk", folder, "--kv-disk-size", "64MiB", *FLAGS) as server:
                self.fill(server)
                longer = PROMPTS[0] + PROMPTS[1][:128]
                self.assertGreaterEqual(completion(server, longer)[1], 960)
            with serving("--kv-disk", folder, "--kv-disk-size", "64MiB", *FLAGS) as server:
                stored = server.metric("moesaic:kv_disk_blocks")
                self.assertEqual(stored, 15 * len(PROMPTS), "no block after a rounded one")


if __name__ == "__main__":
    unittest.main()
