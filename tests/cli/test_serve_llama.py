# SPDX-License-Identifier: Apache-2.0
"""What clients of llama-server rely on, as its own suite of tests lists it (docs/compatibility.md).

usage: test_serve_llama.py PKV MODEL   (as test_serve.py)
"""
import json
import socket
import struct
import sys
import threading
import time
import unittest

from serve_harness import ARGS, HAVE_MODEL, LIMIT_S, Server, ServerCase

PROMPTS = ["I believe the meaning of life is", "Write another poem.", "The sky is blue and",
           "What is an engine?", "Once upon a time there was a cat", "1, 2, 3, 4,"]


def at_once(calls):
    """Results of functions that run beside each other."""
    results = [None] * len(calls)

    def run(i):
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return results


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class One(ServerCase):
    def complete(self, **fields):
        status, answer = self.server.post("/completion", fields)
        self.assertEqual(status, 200, answer)
        return answer

    def test_names(self):
        """Routes under the names without /v1, and the other way round."""
        for path in ("/health", "/v1/health"):
            self.assertEqual(json.loads(self.server.request("GET", path)[2]), {"status": "ok"})
        models = [json.loads(self.server.request("GET", p)[2])["data"][0]["id"]
                  for p in ("/models", "/v1/models")]
        self.assertEqual(models[0], models[1])
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        texts = [self.server.post(p, chat)[1]["choices"][0]["message"]["content"]
                 for p in ("/chat/completions", "/v1/chat/completions")]
        self.assertEqual(texts[0], texts[1])
        plain = {"prompt": "Hi", "n_predict": 4, "temperature": 0}
        texts = [self.server.post(p, plain)[1]["content"] for p in ("/completion", "/completions")]
        self.assertEqual(texts[0], texts[1])
        page = self.server.request("GET", "/")
        self.assertEqual((page[0], b"<!doctype html>" in page[2].lower()), (200, True))

    def test_counts(self):
        answer = self.complete(prompt=PROMPTS[0], n_predict=8, temperature=0)
        tokens = self.server.post("/tokenize", {"content": PROMPTS[0]})[1]["tokens"]
        self.assertEqual(answer["tokens_evaluated"], len(tokens))
        timings = answer["timings"]
        self.assertEqual(timings["prompt_n"] + timings["cache_n"], len(tokens))
        self.assertEqual((timings["predicted_n"], answer["tokens_predicted"]), (8, 8))
        self.assertEqual((answer["truncated"], answer["stop"]), (False, True))
        self.assertTrue(all(isinstance(v, (int, float)) and v >= 0 for v in timings.values()))
        one = self.complete(prompt=PROMPTS[0], n_predict=1)["timings"]  # no division by nothing
        self.assertTrue(all(isinstance(v, (int, float)) and v < 1e9 for v in one.values()), one)

    def test_tokens_as_prompt(self):
        tokens = self.server.post("/tokenize", {"content": PROMPTS[0], "add_special": True})[1]
        self.assertEqual(
            self.complete(prompt=tokens["tokens"], n_predict=8, temperature=0)["content"],
            self.complete(prompt=PROMPTS[0], n_predict=8, temperature=0)["content"])

    def test_seeds(self):
        same = [self.complete(prompt=PROMPTS[0], n_predict=12, seed=42, temperature=1.0)["content"]
                for _ in range(3)]
        self.assertEqual(len(set(same)), 1, same)
        other = [self.complete(prompt=PROMPTS[0], n_predict=12, seed=i, temperature=1.0)["content"]
                 for i in range(4)]
        self.assertGreater(len(set(other)), 2, other)
        free = [self.complete(prompt=PROMPTS[0], n_predict=12, seed=-1, temperature=1.5)["content"]
                for _ in range(4)]  # -1: another one each time
        self.assertGreater(len(set(free)), 1, free)

    def test_cache_changes_nothing(self):
        """Their suite skips this one; here it holds for sampled text too."""
        fields = {"prompt": PROMPTS[0] * 6, "n_predict": 16, "seed": 42, "temperature": 1.0}
        first = self.complete(**fields, cache_salt="nobody-else")
        again = self.complete(**fields, cache_salt="nobody-else")
        self.assertEqual(first["timings"]["cache_n"], 0)
        self.assertGreater(again["timings"]["cache_n"], 0)
        self.assertEqual(first["content"], again["content"])

    def test_too_long(self):
        """400 before anything else, also where a stream was asked for."""
        for stream in (False, True):
            for path, fields in (("/completion", {"prompt": PROMPTS[0] * 200}),
                                 ("/chat/completions", {"messages": [
                                     {"role": "user", "content": "What is the best?"}] * 100})):
                status, headers, body = self.server.request(
                    "POST", path, json.dumps(dict(fields, stream=stream)))
                self.assertEqual((status, headers["Content-Type"]), (400, "application/json"))
                self.assertEqual(json.loads(body)["error"]["code"], "context_length_exceeded")

    def test_end_of_context(self):
        """No shift: an answer that reaches the end of the context ends there."""
        for n_predict in (-1, 5000):
            answer = self.complete(prompt=[100] * 480, n_predict=n_predict, ignore_eos=True)
            self.assertEqual((answer["stop_type"], answer["tokens_predicted"]), ("limit", 32))
        events = [json.loads(e) for e in self.server.events("/completion", {
            "prompt": [100] * 500, "n_predict": -1, "ignore_eos": True})]
        self.assertEqual((events[-1]["stop_type"], events[-1]["tokens_predicted"]), ("limit", 12))

    def test_probabilities(self):
        fields = {"prompt": PROMPTS[0], "n_probs": 10, "temperature": 0, "n_predict": 5}
        whole = self.complete(**fields)["completion_probabilities"]
        events = [json.loads(e) for e in self.server.events("/completion", fields)]
        streamed = [p for e in events[:-1] for p in e["completion_probabilities"]]
        self.assertEqual((len(whole), streamed), (5, whole))
        for entry in whole:
            self.assertEqual(len(entry["top_logprobs"]), 10)
            for one in [entry, *entry["top_logprobs"]]:
                self.assertEqual(bytes(one["bytes"]).decode(errors="replace"), one["token"])
                self.assertLessEqual(one["logprob"], 0)
                self.assertIsInstance(one["id"], int)
            self.assertEqual(entry["top_logprobs"][0]["id"], entry["id"])  # greedy

    def test_bias(self):
        plain = self.complete(prompt=PROMPTS[0], n_predict=1, temperature=0)["content"]
        token = self.server.post("/tokenize", {"content": plain})[1]["tokens"][0]
        for bias in ([[token, False]], [[token, -100]], {str(token): -100}):
            answer = self.complete(prompt=PROMPTS[0], n_predict=1, temperature=0, logit_bias=bias)
            self.assertNotEqual(answer["content"], plain)

    def test_wrong_chats(self):
        for messages in (None, "string", [123], [{}], [{"role": 123}],
                         [{"role": "system", "content": 123}], [{"content": "hello"}],
                         [{"role": "system", "content": "test"}, {}]):
            status, answer = self.server.post("/chat/completions", {"messages": messages})
            self.assertEqual(status, 400, (messages, answer))
            self.assertIn("messages", answer["error"]["param"])

    def test_pieces(self):
        text = "This is a test string with unicode \u5abd and emoji \U0001f917"
        tokens = self.server.post("/tokenize", {"content": text, "with_pieces": True})[1]["tokens"]
        joined = b""
        for token in tokens:
            self.assertGreaterEqual(token["id"], 0)
            piece = token["piece"]
            self.assertTrue(piece)
            joined += piece.encode() if isinstance(piece, str) else bytes(piece)
        self.assertEqual(joined.decode(), text)

    def test_metrics_follow(self):
        before = self.server.metrics()
        answer = self.complete(prompt=PROMPTS[4] * 4, n_predict=6, cache_salt="metrics")
        again = self.complete(prompt=PROMPTS[4] * 4, n_predict=6, cache_salt="metrics")
        after = self.server.metrics()
        grown = {k: after[k] - before[k] for k in before if k in after}
        self.assertEqual(grown["prompt_tokens_total"], 2 * answer["tokens_evaluated"])
        self.assertEqual(grown["prompt_tokens_cached_total"], again["timings"]["cache_n"])
        self.assertEqual(grown["generation_tokens_total"],
                         answer["tokens_predicted"] + again["tokens_predicted"])
        for name in ("request_queue_time_seconds", "request_prefill_time_seconds",
                     "request_decode_time_seconds", "request_inference_time_seconds",
                     "time_to_first_token_seconds"):
            self.assertEqual(grown[name + "_count"], 2, name)

    def test_metrics_of_choices(self):
        """Answers count each on their own, a request's n once (vLLM's meanings)."""
        before = self.server.metrics()
        status, answer = self.server.post("/v1/completions", {
            "prompt": PROMPTS[2], "n": 3, "max_tokens": 4, "seed": 1, "temperature": 1.0,
            "ignore_eos": True})
        self.assertEqual(status, 200, answer)
        after = self.server.metrics()
        grown = {k: after[k] - before[k] for k in before if k in after}
        prompt = answer["usage"]["prompt_tokens"]
        self.assertEqual(grown["prompt_tokens_total"], 3 * prompt)
        for name, count, total in (("prompt_tokens", 3, 3 * prompt), ("params_max_tokens", 3, 12),
                                   ("generation_tokens", 3, 12), ("params_n", 1, 3)):
            self.assertEqual((grown["request_%s_count" % name], grown["request_%s_sum" % name]),
                             (count, total), name)
        # Also of a request whose client leaves: it has ended, and none of its answers has.
        with self.server.connect() as link:
            body = json.dumps({"prompt": PROMPTS[2], "n": 2, "max_tokens": 400, "stream": True,
                               "ignore_eos": True}).encode()
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                         b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            link.recv(1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left = self.server.wait_for(lambda m: m["num_requests_live"] == 0, "a request is left")
        for name, count, total in (("params_n", 1, 2), ("params_max_tokens", 0, 0)):
            self.assertEqual((left["request_%s_count" % name] - after["request_%s_count" % name],
                              left["request_%s_sum" % name] - after["request_%s_sum" % name]),
                             (count, total), name)


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class Rows(unittest.TestCase):
    def test_why_they_wait(self):
        server = Server("--ctx", "512", "--cache", "4096", "--rows", "1")
        fields = {"prompt": PROMPTS[0], "n_predict": 60, "ignore_eos": True}
        threads = [threading.Thread(target=server.post, args=("/completion", fields))
                   for _ in range(3)]
        for thread in threads:
            thread.start()
        seen = server.wait_for(lambda m: m["num_requests_waiting"] == 2, "two wait")
        name = 'num_requests_waiting_by_reason{reason="%s"}'
        self.assertEqual((seen[name % "capacity"], seen[name % "deferred"]), (2, 0))
        for thread in threads:
            thread.join(LIMIT_S)
        self.assertEqual(server.end(), (0, ""))

    def test_more_requests_than_rows(self):
        """Each has the text it has alone, whatever runs beside it; /slots shows who is busy."""
        server = Server("--ctx", "256", "--cache", "4096")
        def ask(prompt, where):
            return where.post("/completion", {"prompt": prompt, "n_predict": 24, "seed": 42,
                                              "temperature": 1.0})[1]["content"]
        alone = [ask(p, server) for p in PROMPTS]
        self.assertEqual(server.end(), (0, ""))
        for rows in (1, 2, 4):
            server = Server("--ctx", "256", "--cache", "4096", "--rows", str(rows), "--chunk",
                            str(8 * rows))
            got = at_once([lambda p=p: ask(p, server) for p in PROMPTS])
            self.assertEqual(got, alone)
            slots = json.loads(server.request("GET", "/slots")[2])
            self.assertEqual([s["is_processing"] for s in slots], [False] * rows)
            self.assertEqual(server.end(), (0, ""))

    def test_one_pool(self):
        """Requests that fit alone are all answered, however little the pool holds of them at once:
        theirs are dropped when the slots together want more than there is."""
        server = Server("--ctx", "128", "--cache", "256", "--rows", "4")
        got = at_once([lambda i=i: server.post("/completion", {
            "prompt": PROMPTS[i], "n_predict": 100, "ignore_eos": True}) for i in range(4)])
        self.assertEqual([(s, a["tokens_predicted"]) for s, a in got], [(200, 100)] * 4)
        self.assertEqual(server.end(), (0, ""))

    def test_client_that_leaves(self):
        """The only row is free again at once."""
        server = Server("--ctx", "512", "--rows", "1")
        body = json.dumps({"prompt": PROMPTS[0], "n_predict": 500, "ignore_eos": True,
                           "stream": True}).encode()
        link = server.connect()
        link.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                     % len(body) + body)
        server.wait_for(lambda m: m["num_requests_running"] == 1, "it runs")
        link.close()
        begin = time.monotonic()
        self.assertEqual(server.post("/completion", {"prompt": "Hi", "n_predict": 1})[0], 200)
        seen = server.metrics()
        self.assertLess(seen["generation_tokens_total"], 400)
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(server.end(), (0, ""))


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class Keys(unittest.TestCase):
    def test_keys(self):
        server = Server(*ARGS, "--api-keys", "the-secret", key="the-secret")
        body = json.dumps({"prompt": "a", "n_predict": 1})
        for path, status in (("/health", 200), ("/v1/health", 200), ("/", 401)):
            self.assertEqual(server.request("GET", path)[0], status)
        for headers, status in (({}, 401), ({"Authorization": "Bearer invalid"}, 401),
                                ({"X-Api-Key": "invalid"}, 401), ({"X-Api-Key": ""}, 401),
                                ({"X-Api-Key": "k" * 5000}, 401),
                                ({"X-Api-Key": "the-secret"}, 200),
                                # What Authorization says counts, where it is there.
                                ({"X-Api-Key": "the-secret", "Authorization": "Bearer no"}, 401),
                                ({"Authorization": "Bearer the-secret"}, 200)):
            for path in ("/completion", "/completions"):
                got, _, answer = server.request("POST", path, body, headers)
                self.assertEqual(got, status, (headers, answer))
        self.assertEqual(server.end(), (0, ""))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[3:]])
