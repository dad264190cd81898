#!/usr/bin/env python3
"""Tests that the KV events which a router receives describe the contents of the cache, in both of vLLM's forms."""
import struct
import tempfile
import unittest

import msgspec
import zmq

from serving import WAIT_SECONDS, chat, serving, until

CHAT = "/v1/chat/completions"
END = b"\xff" * 8


def decoder(form):
    """The type with which vLLM's subscribers decode a batch. Any other content of a message is an error."""
    made = dict(array_like=form == "array", tag=True)
    stored = msgspec.defstruct("BlockStored", [
        ("block_hashes", list[int]), ("parent_block_hash", int | None), ("token_ids", list[int]), ("block_size", int),
        ("lora_id", int | None), ("medium", str | None), ("lora_name", str | None), ("extra_keys", list[list[str] | None] | None)],
        **made)
    removed = msgspec.defstruct("BlockRemoved", [("block_hashes", list[int]), ("medium", str | None)], **made)
    batch = msgspec.defstruct("KVEventBatch", [("ts", float), ("events", list[stored | removed]), ("data_parallel_rank", int)],
                              array_like=True)
    return msgspec.msgpack.Decoder(batch)


def kinds(events, kind):
    return [event for event in events if type(event).__name__ == kind]


def chain(events, salt):
    """Returns (hashes, tokens, block sizes) of the stored blocks of the prompt with that salt."""
    hashes, tokens, sizes = [], [], set()
    for event in kinds(events, "BlockStored"):
        first = event.parent_block_hash is None and event.extra_keys is not None and event.extra_keys[0] == [salt]
        if first or event.parent_block_hash in hashes:
            hashes += event.block_hashes
            tokens += event.token_ids
            sizes.add(event.block_size)
    return hashes, tokens, sizes


class KvEvents(unittest.TestCase):
    def hears(self, server, listener, asker, decode):
        heard = []

        def ask(salt):
            self.assertEqual(server.request("POST", CHAT, chat("word " * 200, max_tokens=1, cache_salt=salt))[0], 200)

        def hear():
            while listener.poll(50):
                heard.extend(decode(listener.recv_multipart()[2]).events)
            return heard

        def subscribed():  # the subscription takes a while to arrive
            ask("early")
            server.request("POST", "/reset_prefix_cache")
            return hear()
        until(subscribed)
        ask("mine")
        ids = server.json("POST", CHAT + "/render", chat("word " * 200))[1]["prompt_token_ids"]
        whole = ids[:len(ids) // 64 * 64]
        until(lambda: len(chain(hear(), "mine")[1]) >= len(whole))
        hashes, tokens, sizes = chain(heard, "mine")
        self.assertEqual((tokens, sizes), (whole, {64}))

        def removed():
            return {block for event in kinds(hear(), "BlockRemoved") for block in event.block_hashes}
        self.assertFalse(removed() & set(hashes))
        server.request("POST", "/reset_prefix_cache")
        until(lambda: set(hashes) <= removed())

        asker.send_multipart([b"", struct.pack(">Q", 0)])
        numbers, again = [], []
        while asker.poll(WAIT_SECONDS * 1000):
            _, number, payload = asker.recv_multipart()
            if number == END:
                break
            numbers.append(struct.unpack(">Q", number)[0])
            again += decode(payload).events
        self.assertEqual((number, numbers), (END, list(range(len(numbers)))))
        self.assertEqual(chain(again, "mine")[0], hashes)

    def test_describe_the_contents_of_the_cache(self):
        for form in ("array", "map"):
            with self.subTest(form=form), tempfile.TemporaryDirectory() as folder, \
                    serving("--kv-events", f"ipc://{folder}/events", "--kv-events-replay", f"ipc://{folder}/replay",
                            "--kv-events-topic", "kv@me", "--kv-events-format", form) as server, \
                    zmq.Context() as context, context.socket(zmq.SUB) as listener, context.socket(zmq.DEALER) as asker:
                context.linger = listener.linger = asker.linger = 0
                listener.connect(f"ipc://{folder}/events")
                listener.subscribe(b"kv@me")
                asker.connect(f"ipc://{folder}/replay")
                self.hears(server, listener, asker, decoder(form).decode)


if __name__ == "__main__":
    unittest.main()
