#!/usr/bin/env python3
"""The proxy against clients that mean harm, and against operators' mistakes and signals."""
import json
import signal
import socket
import threading

from proxying import HOST, WAIT_SECONDS, ProxyTest, main, together, tokens, until


class Pipelining:
    """An engine that answers every request of a connection, those inside a body included if it has no length."""

    def __init__(self):
        self.seen = []
        self.listener = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        stream = client.makefile("rb")
        while line := stream.readline():
            length = 0
            while (header := stream.readline().strip()):
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.seen.append((line.decode().strip(), stream.read(length)))
            body = b"" if line.startswith(b"HEAD") else b"{}"
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n" + body)

    def stop(self):
        self.listener.close()


class Requests(ProxyTest):
    def pipelining(self):
        engine = Pipelining()
        self.addCleanup(engine.stop)
        return engine, self.proxy(f"engine {engine.url}; health off;", workers=1)

    def test_bodies_of_get_and_head_are_not_parsed_as_requests(self):
        engine, proxy = self.pipelining()
        smuggled = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        for method in ("GET", "HEAD", "DELETE"):
            self.assertEqual(proxy.request(method, "/v1/models", smuggled)[0], 200)
            self.assertEqual(proxy.request("GET", "/v1/models")[0], 200)
        self.assertEqual(len(engine.seen), 6, engine.seen)
        self.assertEqual([body for line, body in engine.seen[::2]], [smuggled] * 3)

    def test_head_ends_with_its_headers(self):
        engine, proxy = self.pipelining()
        for _ in range(3):
            status, headers, body = proxy.request("HEAD", "/v1/models")
            self.assertEqual((status, headers["content-length"], body), (200, "2", b""))
        self.assertEqual([line for line, _ in engine.seen], ["HEAD /v1/models HTTP/1.1"] * 3)

    def test_other_spellings_of_paths_are_scheduled_or_refused(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url}; pass /v1/embeddings;")
        body = {"model": "mock", "prompt": "a", "max_tokens": 1}
        for path in ("/v1/completion%73", "//v1/completions", "/v1/./completions", "/x/../v1/completions?a=b"):
            self.assertEqual(proxy.request("POST", path, body)[0], 200, path)
        self.assertEqual(proxy.idle()["outcomes"]["completed"], 4)
        self.assertEqual({r[0].split("?")[0] for r in engine.requests()}, {"/v1/completions"})
        for path in ("/v1/completions/", "/reset_prefix_cache", "/generate", "/v1/responses", "/mock/state", "/v1/models%0d%0aX:y"):
            status, _, answer = proxy.request("POST", path, body)
            self.assertEqual(status, 404, path)
        self.assertEqual(json.loads(proxy.request("POST", "/sleep", {})[2])["error"]["message"], "there is no such path")
        self.assertEqual(json.loads(proxy.request("POST", "/v1/embeddings", {})[2])["error"]["message"], "no such endpoint")

    def test_transfer_fields_of_clients_reach_no_engine(self):
        prefill = self.mock("--transfer", "nixl", "--role", "prefill")
        decode = self.mock("--transfer", "nixl", "--role", "decode")
        proxy = self.proxy(f"transfer nixl; skip_prefill 256; engine {prefill.url} role=prefill; engine {decode.url} role=decode;")
        status, _ = proxy.complete(prompt=tokens(1, 20), max_tokens=1, bootstrap_host="evil",
                                   kv_transfer_params={"do_remote_prefill": True, "remote_host": "evil"})
        self.assertEqual(status, 200)
        self.assertNotIn("evil", json.dumps(decode.requests()[0][2]))
        self.assertEqual(prefill.state()["served"], 0)

    def test_a_request_that_fails_everywhere_closes_no_engine(self):
        engines = [self.mock() for _ in range(3)]
        proxy = self.proxy("".join(f"engine {e.url};" for e in engines) + "retries 2 1ms; breaker 2 1h 1h; health off;")
        for i in range(6):
            self.assertEqual(proxy.complete({"x-mock-status": "500"}, prompt=tokens(i, 64))[0], 500)
        self.assertEqual([e["state"] for e in proxy.state()["engines"]], ["enabled"] * 3)
        self.assertEqual(proxy.complete(prompt="a", max_tokens=1)[0], 200)

    def test_large_bodies_are_refused(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url}; max_body 100k; body_memory 250k;")
        for size, wanted in ((50_000, 200), (99_000, 200), (110_000, 413), (1_000_000, 413)):
            status, _, text = proxy.request("POST", "/v1/completions", {"model": "m", "prompt": "a" * size, "max_tokens": 1})
            self.assertEqual(status, wanted, text)
        self.assertEqual(json.loads(text)["error"]["type"], "invalid_request_error")
        # nginx refuses what is above client_max_body_size by its head, before it reads the body.
        client = socket.create_connection((HOST, proxy.port), timeout=WAIT_SECONDS)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        self.assertIn(b" 413 ", client.recv(100))
        client.close()
        proxy.idle()

    def test_large_bodies_are_checked(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        filler = "b" * 100_000  # it is read in a thread
        for body in (b'{"model":"m","prompt":"' + filler.encode(), b'{"x":"' + filler.encode() + b'"}',
                     json.dumps({"prompt": filler, "stream": "yes"}).encode(), json.dumps({"prompt": filler, "max_tokens": -1}).encode()):
            status, _, text = proxy.request("POST", "/v1/completions", body)
            self.assertEqual((status, json.loads(text)["error"]["type"]), (400, "invalid_request_error"))
        status, _, text = proxy.request("POST", "/v1/completions", {"prompt": filler, "ec_transfer_params": {"a": 1}})
        self.assertEqual(status, 501)
        self.assertEqual(proxy.complete(prompt=filler, max_tokens=1)[0], 200)
        self.assertEqual(proxy.idle()["outcomes"]["completed"], 1)

    def test_the_metaserver_answers_listed_addresses_only(self):
        engine = self.mock()
        for allowed, wanted in (("", 404), ("metaserver_allow 10.0.0.0/8;", 403), ("metaserver_allow 10.0.0.0/8 127.0.0.1;", 404),
                                ("metaserver_allow all;", 404)):
            proxy = self.proxy(f"engine {engine.url}; {allowed}")
            self.assertEqual(proxy.request("POST", "/v1/metaserver", {"request_id": "moesaic-0-1-1-0123456789abcdef"})[0], wanted, allowed)

    def test_forged_messages_to_the_metaserver_are_refused(self):
        engine = self.mock()
        proxy = self.proxy(f"engine {engine.url};")
        for name in ("", "moesaic-0-1-1-", "moesaic-0-1-1-0123456789abcdef", "moesaic-9999-1-1-0123456789abcdef"):
            self.assertEqual(proxy.request("POST", "/v1/metaserver", {"request_id": name, "remote_host": "evil"})[0], 404)


class Signals(ProxyTest):
    def queue(self, proxy, count, begun=0):
        """Streams that one slow engine serves one after another; returns a function that waits for their answers. `begun` requests
        came before."""
        results = [None] * count

        def ask(i):
            with proxy.streaming(prompt=tokens(i, 32), max_tokens=40) as answer:
                results[i] = answer.read().endswith(b"[DONE]\n\n")
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        until(lambda: proxy.state()["stages"][0]["entered"] == begun + count, what=proxy.state)

        def wait():
            for thread in threads:
                thread.join(WAIT_SECONDS)
            return results
        return wait

    def test_a_daemon_keeps_its_wakeups_over_reloads(self):
        engine = self.mock()
        pool = f"engine {engine.url}; queue_timeout 1h;"
        proxy = self.proxy(pool, daemon=True)
        for i in range(3):
            self.assertEqual(together(8, lambda n: proxy.complete(prompt=tokens(8 * i + n, 64), max_tokens=3)[0]), [200] * 8)
            proxy.reload(pool)
        proxy.idle()

    def test_a_graceful_stop_serves_the_queue(self):
        engine = self.mock("--step-ms", "20")
        proxy = self.proxy(f"engine {engine.url} max_requests=1; queue_timeout 1h;")
        wait = self.queue(proxy, 6)
        proxy.process.send_signal(signal.SIGQUIT)
        self.assertEqual(wait(), [True] * 6)
        proxy.process.wait(WAIT_SECONDS)

    def test_a_reload_with_another_zone_serves_the_old_queue(self):
        engine = self.mock("--step-ms", "20")
        pool = f"engine {engine.url} max_requests=1; queue_timeout 1h;"
        proxy = self.proxy(pool)
        wait = self.queue(proxy, 6)
        config = proxy.folder / "nginx.conf"
        old = set(proxy.workers())
        config.write_text(config.read_text().replace("zone 32m", "zone 48m"))
        proxy.process.send_signal(signal.SIGHUP)
        until(lambda: len(set(proxy.workers()) - old) == 2, what=proxy.log)
        self.assertEqual(wait(), [True] * 6)

    def test_a_wrong_value_in_a_reload_changes_nothing(self):
        engine, other = self.mock(), self.mock()
        pool = f"max_engines 2; engine {engine.url};"
        proxy = self.proxy(pool)
        many = "".join(f"engine http://127.0.0.1:{i};" for i in range(1, 5))
        for wrong in (f"max_engines 2; engine {engine.url} class=16;", f"max_engines 2; engine {engine.url} weight=1000000;",
                      f"max_engines 8; engine {engine.url}; {many}"):
            before = proxy.log().count("[emerg]")
            proxy.write(wrong)
            proxy.process.send_signal(signal.SIGHUP)
            until(lambda: proxy.log().count("[emerg]") > before, what=proxy.log)
            self.assertIsNone(proxy.process.poll())
            self.assertEqual(proxy.complete(prompt="a", max_tokens=1)[0], 200)
        proxy.reload(f"max_engines 2; engine {engine.url}; engine {other.url};")
        self.assertEqual(len(proxy.state()["engines"]), 2)
        proxy.log_path.write_text(proxy.log().replace("[emerg]", "[expected]"))

    def test_old_workers_know_engines_of_a_reload(self):
        old, new = self.mock("--step-ms", "30"), self.mock()
        proxy = self.proxy(f"engine {old.url} max_requests=1; breaker 1 1h 1h; queue_timeout 1h; health off;")
        with proxy.streaming(prompt=tokens(99, 32), max_tokens=20000) as held:  # the old engine takes no other request
            held.readline()
            wait = self.queue(proxy, 5, begun=1)
            proxy.reload(f"engine {old.url} max_requests=1; engine {new.url}; breaker 1 1h 1h; health off;")
            self.assertEqual(wait(), [True] * 5)
        self.assertEqual([e["state"] for e in proxy.state()["engines"]], ["enabled"] * 2)
        self.assertEqual(new.state()["served"], 5)

    def test_a_reload_works_with_many_workers(self):
        engine = self.mock()
        pool = f"engine {engine.url}; max_live 256;"
        proxy = self.proxy(pool, workers=40)
        proxy.reload(pool)
        self.assertEqual(together(8, lambda n: proxy.complete(prompt=tokens(n, 64), max_tokens=3)[0]), [200] * 8)
        self.assertNotIn("answers 503 until", proxy.log())


if __name__ == "__main__":
    main()
