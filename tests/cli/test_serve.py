# SPDX-License-Identifier: Apache-2.0
"""`pkv serve` over 127.0.0.1: answers, streams, refusals, limits, hang-ups, the end.

usage: test_serve.py PKV MODEL   (tests that need the model are skipped, and counted, without it)
"""
import base64
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

from serve_harness import (ARGS, HAVE_MODEL, LIMIT_S, MODEL, PKV, Server, ServerCase, check, rest,
                           run_text)


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class Serve(ServerCase):
    def tearDown(self):
        """Whatever a test did, the server is whole after it."""
        self.assertEqual(self.server.request("GET", "/health")[0], 200)
        seen = self.server.wait_for(lambda m: m["num_requests_live"] == 0, "requests live")
        seen = self.server.wait_for(lambda m: m["kv_pages_in_use"] == 0, "pages in use")
        self.assertEqual(seen["num_requests_running"], 0)

    def refused(self, answer, status, param=None, code=None):
        self.assertEqual(answer[0], status, answer)
        error = answer[1]["error"]
        self.assertEqual(sorted(error), ["code", "message", "param", "type"])
        self.assertEqual(error["param"], param, error)
        if code:
            self.assertEqual(error["code"], code, error)

    def test_plain_routes(self):
        status, headers, body = self.server.request("GET", "/health")
        self.assertEqual((status, json.loads(body)), (200, {"status": "ok"}))
        self.assertEqual(headers["Content-Type"], "application/json")
        models = json.loads(self.server.request("GET", "/v1/models")[2])
        self.assertEqual(models["object"], "list")
        self.assertEqual(models["data"][0]["id"], "SmolLM2-135M-Instruct.Q4_1")
        self.assertEqual(models["data"][0]["max_model_len"], 512)
        self.assertIn("generation_tokens_total", self.server.metrics())
        for method, path, status in (("GET", "/nothing", 404), ("POST", "/health", 405),
                                     ("GET", "/v1/completions", 405),
                                     ("GET", "//v1/models", 404), ("GET", "/v1/../health", 404)):
            seen, headers, body = self.server.request(method, path)
            self.refused((seen, json.loads(body)), status)
            if status == 405:
                self.assertIn(headers["Allow"], ("GET", "POST"))

    def test_completion(self):
        text, whole = run_text("The capital of France is", 12)
        fields = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
        status, answer = self.server.post("/v1/completions", fields)
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["object"], "text_completion")
        choice = answer["choices"][0]
        self.assertEqual(choice["text"], text)
        self.assertEqual(choice["finish_reason"], whole["finish"])
        self.assertEqual(answer["usage"], {
            "prompt_tokens": whole["prompt_tokens"],
            "completion_tokens": whole["generated_tokens"],
            "total_tokens": whole["prompt_tokens"] + whole["generated_tokens"],
            "prompt_tokens_details": {"cached_tokens": answer["usage"]["prompt_tokens_details"]
                                      ["cached_tokens"]}})
        self.assertLess(abs(answer["created"] - time.time()), 3600)
        again = self.server.post("/v1/completions", dict(fields, prompt=[fields["prompt"]]))[1]
        self.assertEqual(again["choices"][0]["text"], text)
        self.assertNotEqual(again["id"], answer["id"])
        sampled = dict(fields, temperature=1.0, seed=7, top_p=0.9)
        texts = {self.server.post("/v1/completions", sampled)[1]["choices"][0]["text"]
                 for _ in range(2)}
        self.assertEqual(len(texts), 1, texts)

    def test_token_prompt(self):
        done = subprocess.run([PKV, "tokenize", "-m", MODEL, "--json", "-p", "Once upon a time"],
                              capture_output=True, timeout=LIMIT_S, check=True)
        ids = json.loads(done.stdout)["ids"]
        text = run_text("Once upon a time", 4)[0]
        for prompt in (ids, [ids]):
            status, answer = self.server.post(
                "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0})
            self.assertEqual(status, 200, answer)
            self.assertEqual(answer["usage"]["prompt_tokens"], len(ids))
            self.assertEqual(answer["choices"][0]["text"], text)

    def test_stream(self):
        text = run_text("Count: 1, 2, 3,", 16)[0]
        events = self.server.events("/v1/completions", {
            "prompt": "Count: 1, 2, 3,", "max_tokens": 16, "temperature": 0,
            "stream_options": {"include_usage": True}})
        self.assertEqual(events[-1], "[DONE]")
        chunks = [json.loads(event) for event in events[:-1]]
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertEqual(chunks[-1]["usage"]["completion_tokens"], 16)
        self.assertEqual([c["usage"] for c in chunks[:-1]], [None] * (len(chunks) - 1))
        self.assertEqual("".join(c["choices"][0]["text"] for c in chunks[:-1]), text)
        reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
        self.assertEqual(reasons, [None] * (len(reasons) - 1) + ["length"])
        self.assertGreater(len(chunks), 4)

    def test_chat(self):
        messages = [{"role": "system", "content": "Answer briefly."},
                    {"role": "user", "content": [{"type": "text", "text": "Say "},
                                                 {"type": "text", "text": "hello."}]}]
        fields = {"messages": messages, "max_completion_tokens": 12, "temperature": 0}
        status, answer = self.server.post("/v1/chat/completions", fields)
        self.assertEqual(status, 200, answer)
        message = answer["choices"][0]["message"]
        self.assertEqual(message["role"], "assistant")
        done = subprocess.run([PKV, "run", "-m", MODEL, "-p", "Say hello.", "-s", "Answer briefly.",
                               "--chat", "-n", "12", "--json", "--ctx", "512"],
                              capture_output=True, timeout=LIMIT_S, check=True)
        self.assertEqual(message["content"], json.loads(done.stdout)["text"])
        events = self.server.events("/v1/chat/completions", fields)
        chunks = [json.loads(event) for event in events[:-1]]
        self.assertEqual(chunks[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        self.assertEqual(chunks[-1]["choices"][0]["delta"], {})
        self.assertEqual("".join(c["choices"][0]["delta"].get("content", "") for c in chunks),
                         message["content"])
        self.assertEqual(answer["choices"][0]["finish_reason"],
                         chunks[-1]["choices"][0]["finish_reason"])

    def test_choices(self):
        """n answers are n seeded ones; a list of prompts is answered in its order (S12)."""
        prompts = ["The capital of France is", "Once upon a time"]
        fields = {"prompt": prompts, "max_tokens": 6, "temperature": 1, "seed": 7, "n": 3}
        status, answer = self.server.post("/v1/completions", fields)
        self.assertEqual(status, 200, answer)
        self.assertEqual([c["index"] for c in answer["choices"]], list(range(6)))
        texts = [c["text"] for c in answer["choices"]]
        for own in (texts[:3], texts[3:]):
            self.assertEqual(len(set(own)), 3, texts)
        again = self.server.post("/v1/completions", fields)[1]
        self.assertEqual([c["text"] for c in again["choices"]], texts)
        self.assertEqual(answer["usage"]["completion_tokens"], 36)
        chunks = [json.loads(e) for e in self.server.events("/v1/completions", fields)[:-1]]
        streamed = [""] * 6
        for chunk in chunks:
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        self.assertEqual(streamed, texts)
        greedy = self.server.post("/v1/completions", dict(fields, temperature=0))[1]
        self.assertEqual(len({c["text"] for c in greedy["choices"][:3]}), 1)

    def test_logprobs(self):
        fields = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0,
                  "logprobs": 2}
        choice = self.server.post("/v1/completions", fields)[1]["choices"][0]
        probs = choice["logprobs"]
        self.assertEqual("".join(probs["tokens"]), choice["text"])
        self.assertEqual([max(top.values()) for top in probs["top_logprobs"]],
                         probs["token_logprobs"])
        self.assertEqual(probs["text_offset"][0], 0)
        hot = self.server.post("/v1/completions", dict(fields, temperature=1.5, top_k=1))[1]
        self.assertEqual(hot["choices"][0]["logprobs"], probs)  # of the model, not of sampling
        echo = self.server.post("/v1/completions", dict(fields, echo=True, max_tokens=1))[1]
        scored = echo["choices"][0]["logprobs"]
        self.assertEqual(len(scored["tokens"]), echo["usage"]["prompt_tokens"] + 1)
        self.assertIsNone(scored["token_logprobs"][0])
        self.assertTrue(all(p <= 0 for p in scored["token_logprobs"][1:]))
        self.assertTrue(echo["choices"][0]["text"].startswith(fields["prompt"]))
        only = self.server.post("/v1/completions", dict(fields, echo=True, max_tokens=0))[1]
        self.assertEqual(only["choices"][0]["text"], fields["prompt"])
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4,
                "temperature": 0, "logprobs": True, "top_logprobs": 2}
        message = self.server.post("/v1/chat/completions", chat)[1]["choices"][0]
        content = message["logprobs"]["content"]
        self.assertEqual("".join(t["token"] for t in content), message["message"]["content"])
        self.assertEqual([len(t["top_logprobs"]) for t in content], [2] * len(content))
        self.assertEqual(bytes(content[0]["bytes"]).decode(), content[0]["token"])
        for more, param in (({"top_logprobs": 21}, "top_logprobs"),
                            ({"logprobs": False}, "top_logprobs")):
            self.refused(self.server.post("/v1/chat/completions", dict(chat, **more)), 400, param)

    def test_text_routes(self):
        text = "Hi <|im_start|> é"
        for name in ("content", "prompt"):
            status, answer = self.server.post("/tokenize", {name: text, "parse_special": False})
            self.assertEqual(status, 200, answer)
            back = self.server.post("/detokenize", {"tokens": answer["tokens"]})[1]
            self.assertEqual((back["content"], back["prompt"]), (text, text))
        fewer = self.server.post("/tokenize", {"content": text, "with_pieces": True})[1]
        self.assertLess(fewer["count"], answer["count"])
        self.assertIn("<|im_start|>", [t["piece"] for t in fewer["tokens"]])
        messages = [{"role": "user", "content": "Hi"}]
        prompt = self.server.post("/apply-template", {"messages": messages})[1]["prompt"]
        self.assertTrue(prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
                        prompt)
        for path, body, param in (("/tokenize", {}, "content"), ("/tokenize", {"content": 5},
                                  "content"), ("/detokenize", {"tokens": [10**9]}, "tokens"),
                                  ("/detokenize", {}, "tokens"), ("/apply-template", {},
                                  "messages")):
            self.refused(self.server.post(path, body), 400, param)

    def test_llama_route(self):
        text = run_text("Count: 1, 2, 3,", 8)[0]
        fields = {"prompt": "Count: 1, 2, 3,", "n_predict": 8, "temperature": 0,
                  "repeat_penalty": 1.0, "cache_prompt": True}
        status, answer = self.server.post("/completion", fields)
        self.assertEqual((status, answer["content"], answer["stop_type"]), (200, text, "limit"))
        self.assertEqual(answer["timings"]["predicted_n"], 8)
        events = [json.loads(e) for e in self.server.events("/completion", fields)]
        self.assertEqual("".join(e["content"] for e in events), text)
        self.assertEqual([e["stop"] for e in events], [False] * (len(events) - 1) + [True])
        word = self.server.post("/completion", dict(fields, stop=[text[3:6]]))[1]
        self.assertEqual((word["stop_type"], word["stopping_word"]), ("word", text[3:6]))

    def test_sampling_fields(self):
        fields = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        first = self.server.post("/tokenize", {"content": self.server.post(
            "/v1/completions", fields)[1]["choices"][0]["text"]})[1]["tokens"][0]
        other = dict(fields, logit_bias={str(first): -100})
        self.assertNotEqual(self.server.post("/v1/completions", other)[1]["choices"][0]["text"],
                            self.server.post("/v1/completions", fields)[1]["choices"][0]["text"])
        status, answer = self.server.post("/v1/completions", dict(
            fields, min_p=0.1, repetition_penalty=1.1, presence_penalty=1, frequency_penalty=-1,
            min_tokens=1, cache_salt="mine"))
        self.assertEqual(status, 200, answer)

    def test_cached_tokens(self):
        """K1: a prompt that is cached whole still computes its last token, and answers the same."""
        for count in (15, 16, 17, 32, 33):
            fields = {"prompt": [count + 50] * count, "max_tokens": 4, "temperature": 0}
            cold = self.server.post("/v1/completions", fields)[1]
            warm = self.server.post("/v1/completions", fields)[1]
            self.assertEqual(cold["choices"], warm["choices"])
            cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.assertEqual(cached, (count - 1) // 16 * 16)
            salted = self.server.post("/v1/completions", dict(fields, cache_salt="other"))[1]
            self.assertEqual(salted["usage"]["prompt_tokens_details"]["cached_tokens"], 0)

    def test_state_routes(self):
        props = json.loads(self.server.request("GET", "/props")[2])
        self.assertEqual(props["default_generation_settings"]["n_ctx"], 512)
        with self.open_stream() as link:
            link.recv(100)
            slots = json.loads(self.server.request("GET", "/slots")[2])
            self.assertEqual([s["is_processing"] for s in slots], [True] + [False] * 31)
            # An answer begins before the engine has taken its prompt, which then is in the tree.
            limit = time.monotonic() + LIMIT_S
            state = {"tree": []}
            while not state["tree"] and time.monotonic() < limit:
                state = json.loads(self.server.request("GET", "/dashboard/state")[2])
            self.assertEqual((state["phase"], state["live"], len(state["tree"])), ("ready", 1, 1))
        page = self.server.request("GET", "/")
        self.assertIn("default-src 'none'", page[1]["Content-Security-Policy"])
        ids = {"X-Request-Id": "mine-1"}
        self.assertEqual(self.server.request("GET", "/health", None, ids)[1]["X-Request-Id"],
                         "mine-1")
        bad = self.server.request("GET", "/health", None, {"X-Request-Id": 'a"b'})
        self.assertTrue(bad[1]["X-Request-Id"].startswith("req-"), bad)

    def test_stop_strings(self):
        text = run_text("A B C D E F G H I J K", 24)[0]
        self.assertGreater(len(text), 12, text)
        for stop in (text[5:9], text[3:4], text[2:12]):
            fields = {"prompt": "A B C D E F G H I J K", "max_tokens": 24, "temperature": 0,
                      "stop": ["never in this text", stop]}
            want = text[:text.index(stop)]
            choice = self.server.post("/v1/completions", fields)[1]["choices"][0]
            self.assertEqual((choice["text"], choice["finish_reason"]), (want, "stop"))
            chunks = [json.loads(e) for e in self.server.events("/v1/completions", fields)[:-1]]
            self.assertEqual("".join(c["choices"][0]["text"] for c in chunks), want)
        # The beginning of a stop string that does not come is not lost.
        fields["stop"] = text[-2:] + "\x01"
        choice = self.server.post("/v1/completions", fields)[1]["choices"][0]
        self.assertEqual(choice["text"], text)

    def test_bad_json(self):
        for body, code in ((b"", "invalid_json"), (b"{", "invalid_json"), (b"[]", None),
                           (b'{"prompt": "a", "prompt": "b"}', "invalid_json"),
                           (b'{"prompt": "\xff\xfe"}', "invalid_json"),
                           (b'{"prompt": "\\ud83d"}', "invalid_json"),
                           (b"[" * 3000, "json_too_deep"),
                           (b'{"tools": ' + b"[" * 65 + b"]" * 65 + b"}", "json_too_deep")):
            status, _, answer = self.server.request("POST", "/v1/completions", body)
            self.refused((status, json.loads(answer)), 400, code=code)

    def test_wrong_fields(self):
        good = {"prompt": "a", "max_tokens": 1, "temperature": 0}
        for name, values in (
                ("max_tokens", (0, -1, -2**31, 2**31, 2**53 + 1, "5", True, 1.5, [])),
                ("min_tokens", (2, -1, "1")),
                ("temperature", (-1, 101, "0", True, {})),
                ("top_p", (0, -0.1, 1.1, "1")), ("top_k", (-2, 2**40, 0.5)),
                ("seed", (1.5, "7", 1e30)), ("n", (0, 17, 10**9)), ("best_of", (2,)),
                ("stream", (1, "true")), ("stop", ("", 1, ["a", 2], ["x"] * 17, "y" * 257)),
                ("logit_bias", ({"a": 5}, {"-1": 5}, {"191222": 5}, 5)), ("tools", ([{}],)),
                ("model", (5,)),
                ("logprobs", (6, -1, True)),
                ("response_format", (5, {}, {"type": "xml"}, {"type": "json_schema"},
                                     {"type": "json_schema", "json_schema": {"schema": 5}},
                                     {"type": "json_schema", "json_schema": {"schema": {
                                         "properties": {str(i): {} for i in range(1000)},
                                         "allOf": [{}] * 1000}}})),
                ("grammar", (5, "root ::= root", "root ::= " + "(" * 60000)),
                ("json_schema", (5, {"type": "invalid"}, {"not": {}}, "{", {"pattern": "foo**"},
                                 {"pattern": "["})),
                ("guided_grammar", ("x",)), ("guided_json", ({"$ref": "http://a"},)),
                ("frequency_penalty", (2.5,)), ("stream_options", (5, {"include_usage": True})),
                ("ignore_eos", (1,)), ("prompt", (5, {}, [], "", [5, "b"], [""], [[]], [-1],
                                                  [10**9], [1, "a"]))):
            for value in values:
                answer = self.server.post("/v1/completions", dict(good, **{name: value}))
                self.refused(answer, 400, param=name)
        self.refused(self.server.post("/v1/completions", {}), 400, "prompt", "missing")
        for name in good:
            if name != "prompt":
                answer = self.server.post("/v1/completions", dict(good, **{name: None}))
                self.assertEqual(answer[0], 200, (name, answer))

    def test_constraints(self):
        """Answers under grammars and schemas, whole and streamed, beside a free one."""
        schema = {"type": "object", "additionalProperties": False, "required": ["name", "age"],
                  "properties": {"name": {"type": "string", "maxLength": 10},
                                 "age": {"type": "integer", "minimum": 1, "maximum": 20}}}
        chat = {"messages": [{"role": "user", "content": "A cat as JSON."}], "max_tokens": 80,
                "seed": 3}
        for asked in ({"response_format": {"type": "json_schema",
                                           "json_schema": {"name": "cat", "schema": schema}}},
                      {"response_format": {"type": "json_object", "schema": schema}},
                      {"json_schema": schema}, {"guided_json": json.dumps(schema)}):
            status, body = self.server.post("/v1/chat/completions", dict(chat, **asked))[:2]
            self.assertEqual(status, 200, body)
            choice = body["choices"][0]
            self.assertEqual(choice["finish_reason"], "stop", choice)
            value = json.loads(choice["message"]["content"])
            self.assertEqual(sorted(value), ["age", "name"])
            self.assertTrue(len(value["name"]) <= 10 and 1 <= value["age"] <= 20, value)
        whole = choice["message"]["content"]
        events = self.server.events("/v1/chat/completions", dict(chat, **asked))
        self.assertEqual("".join(json.loads(e)["choices"][0]["delta"].get("content", "")
                                 for e in events[:-1]), whole)
        body = self.server.post("/completion", {"prompt": "Is it?", "grammar":
                                                'root ::= ("yes" | "no") "\\n"'})[1]
        self.assertIn(body["content"], ("yes\n", "no\n"))
        self.assertEqual(body["stop_type"], "eos")
        body = self.server.post("/v1/completions", {"prompt": "{", "max_tokens": 60, "n": 3,
                                                    "response_format": {"type": "json_object"}})[1]
        for choice in body["choices"]:
            if choice["finish_reason"] == "stop":
                self.assertIsInstance(json.loads(choice["text"]), dict)
        answer = self.server.post("/v1/completions", {"prompt": "a", "grammar": 'root ::= "a"',
                                                      "json_schema": schema})
        self.refused(answer, 400, param="json_schema")
        answer = self.server.post("/v1/completions", {"prompt": "a", "json_schema": {
            "properties": {"secretname": {"items": {"uniqueItems": True}}}}})
        self.refused(answer, 400, param="json_schema", code="unsupported")
        message = answer[1]["error"]["message"]
        self.assertIn("uniqueItems", message)
        self.assertIn("properties[0]", message)
        self.assertNotIn("secretname", message)

    TOOLS = [{"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "required": ["city"], "additionalProperties": False,
                       "properties": {"city": {"type": "string", "maxLength": 12},
                                      "unit": {"$ref": "#/$defs/unit"}},
                       "$defs": {"unit": {"enum": ["C", "F"]}}}}},
             {"type": "function", "function": {"name": "now"}}]

    def test_min_tokens_of_a_constraint(self):
        answer = self.server.post("/v1/completions", {
            "prompt": "a", "max_tokens": 9, "min_tokens": 4, "grammar": 'root ::= "abc"'})
        self.refused(answer, 400, param="min_tokens", code="out_of_range")

    def test_tools(self):
        """Calls, demanded and free, whole and streamed (R12); results come back as messages."""
        user = {"role": "user", "content": "What is the weather in Paris?"}
        chat = {"messages": [user], "tools": self.TOOLS, "max_tokens": 80, "seed": 5}
        only = {"type": "function", "function": {"name": "now"}}
        for choice in ("required", only):
            body = self.server.post("/v1/chat/completions", dict(chat, tool_choice=choice))[1]
            answer = body["choices"][0]
            self.assertEqual(answer["finish_reason"], "tool_calls", body)
            self.assertIsNone(answer["message"]["content"])
            call, = answer["message"]["tool_calls"]
            self.assertEqual(call["type"], "function")
            arguments = json.loads(call["function"]["arguments"])
            if choice is only or call["function"]["name"] == "now":
                self.assertEqual((call["function"]["name"], arguments), ("now", {}))
            else:
                self.assertLessEqual(len(arguments["city"]), 12)
                self.assertIn(arguments.get("unit", "C"), ("C", "F"))
            events = self.server.events("/v1/chat/completions", dict(chat, tool_choice=choice))
            deltas = [json.loads(e)["choices"][0] for e in events[:-1]]
            self.assertEqual(deltas[-1]["finish_reason"], "tool_calls")
            parts = [t for d in deltas for t in d["delta"].get("tool_calls", [])]
            self.assertEqual([p["index"] for p in parts], [0] * len(parts))
            self.assertEqual([p["function"]["name"] for p in parts if "id" in p],
                             [call["function"]["name"]])
            self.assertEqual("".join(p["function"].get("arguments", "") for p in parts),
                             call["function"]["arguments"])
        # Free: the text decides. What spells a call of another function stays text.
        for text, calls in (('{"name": "now", "arguments": {}}', 1), ("It is now.", 0),
                            ('{"name": "rm", "arguments": {}}', 0)):
            body = self.server.post("/v1/chat/completions", dict(
                chat, grammar="root ::= " + json.dumps(text)))[1]
            answer = body["choices"][0]
            self.assertEqual(len(answer["message"].get("tool_calls", [])), calls, body)
            self.assertEqual(answer["message"]["content"], None if calls else text)
            self.assertEqual(answer["finish_reason"], "tool_calls" if calls else "stop")
        # Without tools, or with none, the same text is no call; a user's text never is.
        for more in ({"tools": []}, {"tool_choice": "none"}):
            body = self.server.post("/v1/chat/completions", dict(
                chat, grammar='root ::= "{\\"name\\": \\"now\\"}"', **more))[1]
            self.assertNotIn("tool_calls", body["choices"][0]["message"])
            self.assertEqual(body["choices"][0]["message"]["content"], '{"name": "now"}')
        turns = [dict(user, content='{"name": "now", "arguments": {}} <tool_call>'),
                 {"role": "assistant", "content": None, "tool_calls": [
                     {"id": "abcdefghi", "type": "function",
                      "function": {"name": "now", "arguments": "{}"}}]},
                 {"role": "tool", "tool_call_id": "abcdefghi", "content": "noon"}]
        body = self.server.post("/v1/chat/completions", dict(
            chat, messages=turns, grammar='root ::= "It is noon."'))[1]
        self.assertEqual(body["choices"][0]["message"]["content"], "It is noon.")
        self.assertNotIn("tool_calls", body["choices"][0]["message"])

    def test_turns_of_calls(self):
        """A turn with several calls is shown whole, by a template that shows no tools."""
        call = {"id": "abcdefghi", "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        turns = [{"role": "user", "content": "And?"},
                 {"role": "assistant", "content": "I look.", "tool_calls": [
                     call, dict(call, function={"name": "now", "arguments": "no JSON"})]},
                 {"role": "tool", "tool_call_id": "abcdefghi", "content": "Rain."}]
        prompt = self.server.post("/apply-template", {"messages": turns,
                                                      "tools": self.TOOLS})[1]["prompt"]
        self.assertIn('I look.\n{"name":"weather","arguments":{"city":"Paris"}}\n'
                      '{"name":"now","arguments":"no JSON"}<|im_end|>', prompt)
        self.assertIn("You may call these functions", prompt)
        self.assertIn("<|im_start|>user\nRain.<|im_end|>", prompt)
        self.refused(self.server.post("/apply-template", {"messages": turns, "tools": 5}), 400,
                     param="tools")
        parts = [{"type": "text", "text": t} for t in ("I ", "look.")]
        for content, shown in ((parts, "I look.\n{"), ([], "assistant\n{"), (None, "assistant\n{"),
                               ("", "assistant\n{")):
            turns[1]["content"] = content
            prompt = self.server.post("/apply-template", {"messages": turns})[1]["prompt"]
            self.assertIn(shown + '"name":"weather"', prompt)
        turns[0] = {"role": "system", "content": parts}
        prompt = self.server.post("/apply-template", {"messages": turns,
                                                      "tools": self.TOOLS})[1]["prompt"]
        self.assertIn("I look.\n\nYou may call these functions", prompt)

    def test_wrong_calls(self):
        """Calls that cannot be shown are refused, not left out."""
        good = {"function": {"name": "f", "arguments": "{}"}}
        for role, content, calls, word in (
                ("assistant", "a", 5, "must be a list"), ("assistant", "a", {}, "must be a list"),
                ("assistant", "a", [good, {}], "tool_calls[1].function.name"),
                ("assistant", "a", [{"function": None}], "tool_calls[0].function.name"),
                ("assistant", "a", [{"function": {"name": 5}}], "tool_calls[0].function.name"),
                ("assistant", "a", [{"function": {"name": "f", "arguments": 5}}], "arguments"),
                ("user", "a", [good], "only an assistant"),
                ("assistant", 5, [good], "content must be"),
                ("assistant", [{"type": "image"}], [good], "content[0] must be")):
            answer = self.server.post("/v1/chat/completions", {"max_tokens": 2, "messages": [
                {"role": "user", "content": "a"},
                {"role": role, "content": content, "tool_calls": calls}]})
            self.refused(answer, 400, param="messages")
            self.assertIn(word, answer[1]["error"]["message"])

    def test_wrong_tools(self):
        good = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        function = {"type": "function", "function": {"name": "f"}}
        for fields, param in (
                ({"tools": 5}, "tools"), ({"tools": [{}]}, "tools"),
                ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools"),
                ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
                ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools"),
                ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
                 "tools"),
                ({"tools": [function] * 129}, "tools"),
                ({"tools": [function], "tool_choice": "maybe"}, "tool_choice"),
                ({"tools": [function], "tool_choice": {"type": "function", "function": {
                    "name": "g"}}}, "tool_choice"),
                ({"tool_choice": "required"}, "tool_choice"),
                ({"tools": [function], "messages": []}, "messages"),
                ({"tools": [function], "parallel_tool_calls": 1}, "parallel_tool_calls"),
                ({"tools": [function], "tool_choice": "required",
                  "response_format": {"type": "json_object"}}, "tool_choice"),
                ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
                    "type": "invalid"}}}], "tool_choice": "required"}, "tools"),
                ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
                    "properties": {"a": {"pattern": "foo**"}}}}}], "tool_choice": "required"},
                 "tools")):
            answer = self.server.post("/v1/chat/completions", dict(good, **fields))
            self.refused(answer, 400, param=param)

    def test_wrong_messages(self):
        user = {"role": "user", "content": "a"}
        for messages, param in (([], "messages"), ("a", "messages"), ([5], "messages[0]"),
                                ([user, {"role": "robot", "content": "a"}], "messages[1].role"),
                                ([{"content": "a"}], "messages[0].role"),
                                ([{"role": "user"}], "messages[0].content"),
                                ([{"role": "user", "content": [{"type": "image_url"}]}],
                                 "messages[0].content")):
            answer = self.server.post("/v1/chat/completions", {"messages": messages})
            self.refused(answer, 400, param)

    def test_length_of_prompt(self):
        fields = {"prompt": [100] * 511, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        status, answer = self.server.post("/v1/completions", fields)
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertEqual(answer["usage"]["completion_tokens"], 1)
        for count in (512, 600):
            answer = self.server.post("/v1/completions", dict(fields, prompt=[100] * count))
            self.refused(answer, 400, "prompt", "context_length_exceeded")

    def test_limits_of_bodies(self):
        status, _, body = self.server.request("POST", "/v1/completions", b" " * 65537)
        self.refused((status, json.loads(body)), 413)
        # One that says it is far larger, or asks before it comes: refused before it is read.
        for more in ({"Content-Length": "1000000000000"},
                     {"Content-Length": "65537", "Expect": "100-continue"}):
            status, _, body = self.server.request("POST", "/v1/completions", b"", more)
            self.refused((status, json.loads(body)), 413)

        def pieces(count):
            for _ in range(count):
                yield b" " * 1024

        status, _, body = self.server.request("POST", "/v1/completions", pieces(80))  # chunked
        self.refused((status, json.loads(body)), 413)
        status, _, body = self.server.request(
            "POST", "/v1/completions", b"{}", {"Content-Encoding": "gzip"})
        self.refused((status, json.loads(body)), 415)
        status, _, body = self.server.request("GET", "/health", headers={"Host": "evil.example"})
        self.refused((status, json.loads(body)), 400, code="bad_host")
        fields = json.dumps({"prompt": "a 😸", "max_tokens": 1}, ensure_ascii=False).encode()
        status, _, body = self.server.request(
            "POST", "/v1/completions", iter([fields[i:i + 1] for i in range(len(fields))]))
        self.assertEqual(status, 200, body)

    def raw(self, *pieces, pause=0.0):
        """All that comes back for these bytes."""
        with self.server.connect() as link:
            got = b""
            try:
                for piece in pieces:
                    link.sendall(piece)
                    time.sleep(pause)
                while True:
                    more = link.recv(65536)
                    if not more:
                        break
                    got += more
            except (ConnectionResetError, BrokenPipeError):
                pass
            return got

    def test_limits_of_headers(self):
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        got = self.raw(head + b"X: " + b"a" * 100000 + b"\r\n\r\n")
        self.assertTrue(got == b"" or got.startswith(b"HTTP/1.1 4"), got[:100])
        got = self.raw(b"nonsense\r\n\r\n")
        self.assertTrue(got == b"" or got.startswith(b"HTTP/1.1 4"), got[:100])
        both = head + b"Connection: close\r\n\r\n"
        got = self.raw(head + b"\r\n" + both)  # pipelined
        self.assertEqual(got.count(b"HTTP/1.1 200"), 2, got)

    def test_slow_clients(self):
        """One byte now and then keeps no connection: the limits are on the whole."""
        begin = time.monotonic()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        slow = [bytes([b]) for b in head]
        body = head + b"Content-Length: 50\r\n\r\n"
        self.assertEqual(self.raw(*slow, pause=0.2), b"")
        self.assertEqual(self.raw(body, *[b" "] * 40, pause=0.2), b"")
        self.assertEqual(self.raw(), b"")
        link = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=LIMIT_S)
        for _ in range(2):  # a connection is kept, but not for ever
            link.request("GET", "/health")
            self.assertEqual(link.getresponse().read(), b'{"status":"ok"}')
        self.assertEqual(link.sock.recv(1), b"")
        link.close()
        self.assertLess(time.monotonic() - begin, 60)

    def open_stream(self, **more):
        """A socket on which a long answer has begun."""
        fields = dict({"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0,
                       "ignore_eos": True, "stream": True}, **more)
        body = json.dumps(fields).encode()
        link = self.server.connect()
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
                     b"\r\n" % len(body) + body)
        return link

    def test_hang_up(self):
        before = self.server.metrics()
        links = [self.open_stream() for _ in range(2)]
        for link in links:
            self.assertIn(b"200 OK", link.recv(4096))
        links.append(self.open_stream(stream=False))
        self.server.wait_for(lambda m: m["num_requests_running"] == 3, "three run")
        self.assertGreater(self.server.metrics()["kv_pages_in_use"], 0)
        links[0].close()
        for link in links[1:]:  # a reset
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.close()
        after = self.server.wait_for(lambda m: m["num_requests_live"] == 0, "all cancelled")
        name = 'request_success_total{finished_reason="abort"}'
        self.assertEqual(after[name] - before[name], 3)
        generated = after["generation_tokens_total"] - before["generation_tokens_total"]
        self.assertLess(generated, 600)

    def test_half_close(self):
        """FIN alone is no hang-up: the answer comes."""
        with self.open_stream(stream=False, max_tokens=4) as link:
            link.shutdown(socket.SHUT_WR)
            got = b""
            while b"usage" not in got:
                more = link.recv(4096)
                self.assertTrue(more, got)
                got += more
        self.assertIn(b"200 OK", got)

    def test_half_close_ends(self):
        """Where nothing more can come, a connection is not kept for its time limit: here 600 s."""
        ask = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n"
        body = b'{"content":"a"}'
        server = Server(*ARGS, "--header-timeout", "600", "--body-timeout", "600",
                        "--idle-timeout", "600")
        for sent, answers in ((ask + body, 1), ((ask + body) * 40, 40), (ask + body[:9], 0),
                              (ask[:30], 0), (b"", 0), ((ask + body) * 3 + ask[:50], 3)):
            with server.connect() as link:
                if sent:
                    link.sendall(sent)
                link.shutdown(socket.SHUT_WR)
                got = rest(link)
            self.assertEqual(got.count(b"200 OK"), answers, got)
        server.wait_for(lambda m: m["http_connections"] == 1, "all are closed")
        self.assertEqual(server.end(), (0, ""))

    def test_pipelined_while_pending(self):
        """A request that comes while another one is answered waits for its turn."""
        with self.open_stream(max_tokens=8) as link:
            link.recv(10)
            link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            got = rest(link)
        self.assertLess(got.index(b"[DONE]"), got.index(b'{"status":"ok"}'))

    def test_eight_at_once(self):
        prompts = ["The capital of France is", "Once upon a time", "Water boils at", "1 2 3 4",
                   "The sun is", "def main():", "Dear Sir,", "In the year 1969"]
        wanted = [run_text(p, 16)[0] for p in prompts]
        got = [None] * len(prompts)

        def ask(i):
            fields = {"prompt": prompts[i], "max_tokens": 16, "temperature": 0}
            if i % 2:
                chunks = [json.loads(e) for e in self.server.events("/v1/completions", fields)[:-1]]
                got[i] = "".join(c["choices"][0]["text"] for c in chunks)
            else:
                got[i] = self.server.post("/v1/completions", fields)[1]["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        self.assertEqual(got, wanted)

    def test_full_queue(self):
        links = [self.open_stream() for _ in range(8)]
        self.server.wait_for(lambda m: m["num_requests_live"] == 8, "eight are live")
        fields = json.dumps({"prompt": "a", "max_tokens": 1})
        status, headers, body = self.server.request("POST", "/v1/completions", fields)
        self.refused((status, json.loads(body)), 503, code="queue_full")
        self.assertEqual(headers["Retry-After"], "1")
        self.assertEqual(self.server.request("GET", "/health")[0], 200)
        for link in links:
            link.close()


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class SlowReaders(unittest.TestCase):
    """R17: who does not read is waited for, within bounds, and then cut; others do not notice."""
    FIELDS = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 320, "n": 2, "seed": 7,
              "temperature": 0.8, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}

    def open(self, server, **more):
        """A socket that reads nothing yet of a stream of several MiB."""
        body = json.dumps(dict(self.FIELDS, **dict({"stream": True}, **more))).encode()
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(LIMIT_S)
        link.connect(("127.0.0.1", server.port))
        link.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close"
                     b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return link

    def read(self, link):
        got = []
        while True:
            more = link.recv(1 << 16)
            if not more:
                return b"".join(got)
            got.append(more)

    @staticmethod
    def texts(stream):
        """Text and log-probabilities of each choice of a chunked stream."""
        head, rest = stream.split(b"\r\n\r\n", 1)
        check(head.startswith(b"HTTP/1.1 200"), head)
        body = b""
        while rest:
            size, rest = rest.split(b"\r\n", 1)
            body, rest = body + rest[:int(size, 16)], rest[int(size, 16) + 2:]
        events = [e for e in body.decode().split("\n\n") if e]
        check(events[-1] == "data: [DONE]", events[-1])
        out = [["", []] for _ in range(2)]
        for event in events[:-1]:
            for choice in json.loads(event[6:])["choices"]:
                out[choice["index"]][0] += choice["delta"].get("content", "")
                out[choice["index"]][1] += (choice["logprobs"] or {}).get("content", [])
        return out

    def test_waits(self):
        """The engine stands still for a slow reader, and the whole answer comes in the end."""
        server = Server("--ctx", "512", "--cache", "8192", "--stall-timeout", "120")
        link = self.open(server)
        server.wait_for(lambda m: m["num_requests_paused"] == 2, "the stream is paused")
        before = server.metrics()["generation_tokens_total"]
        self.assertLess(before, 2 * 320)
        status, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 8})
        self.assertEqual((status, len(answer["choices"])), (200, 1))  # others go on
        self.assertEqual(server.metrics()["generation_tokens_total"], before + 8)
        time.sleep(0.5)
        self.assertEqual(server.metrics()["generation_tokens_total"], before + 8)
        stream = self.read(link)
        self.assertGreater(len(stream), 1 << 20)
        self.assertGreaterEqual(server.metrics()["request_pauses_total"], 1)
        whole = server.post("/v1/chat/completions", self.FIELDS)[1]["choices"]
        for choice, (text, probs) in zip(whole, self.texts(stream)):
            self.assertEqual(choice["message"]["content"], text)
            self.assertEqual(choice["logprobs"]["content"], probs)
        self.assertEqual(server.end(), (0, ""))

    def test_is_cut(self):
        server = Server("--ctx", "512", "--cache", "8192", "--stall-timeout", "2", "--rows", "32")
        links = [self.open(server, seed=i) for i in range(2)]
        # Whole answers that nobody reads, too: larger than what the kernel takes.
        whole = self.open(server, stream=False)
        server.wait_for(lambda m: m["num_requests_live"] == 6, "all are there")
        begin, healthy = time.monotonic(), 0
        while server.metrics()['http_timeouts_total{for="write"}'] < 3:
            self.assertLess(time.monotonic() - begin, LIMIT_S)
            healthy += server.post("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 200
        self.assertGreater(healthy, 0)
        seen = server.wait_for(lambda m: m["num_requests_live"] == 0, "all ended")
        self.assertEqual(seen["num_requests_paused"], 0)
        self.assertEqual(seen["kv_pages_in_use"], 0)
        self.assertEqual(seen['http_timeouts_total{for="body"}'], 0)
        for link in links + [whole]:
            link.close()
        self.assertEqual(server.end(), (0, ""))

    @staticmethod
    def read_answer(link):
        """One whole answer: its head and its body may come apart."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += link.recv(4096)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: *(\d+)", head)[1])
        while len(body) < length:
            body += link.recv(4096)

    def test_deadlines_are_apart(self):
        """Each deadline counts for its own wait alone, and is the only one that cuts."""
        names = ("header", "body", "idle", "stall")
        for name in names[:3]:
            args = [a for n in names for a in ("--%s-timeout" % n, "3" if n == name else "60")]
            server = Server("--ctx", "512", *args)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
            links = {"header": head[:20], "body": head + b"\r\n{",
                     "idle": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"}
            for what in links:
                link = server.connect()
                link.sendall(links[what])
                links[what] = link
            self.read_answer(links["idle"])
            self.assertEqual(links[name].recv(1), b"")
            for what, link in links.items():
                if what != name:
                    link.settimeout(0.2)
                    with self.assertRaises(TimeoutError, msg="%s cut by %s" % (what, name)):
                        link.recv(1)
                link.close()
            seen = server.metrics()
            counts = {n: seen['http_timeouts_total{for="%s"}' % n]
                      for n in ("header", "body", "idle", "write")}
            self.assertEqual(counts, {n: int(n == name) for n in counts})
            self.assertEqual(server.end(), (0, ""))


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class LongTexts(unittest.TestCase):
    TEXT = ("amber basin cedar delta \u4e2d\u6587 " * 40000)[:1 << 20]

    def send(self, server, path, fields):
        body = json.dumps(fields).encode()
        link = server.connect()
        link.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
        return link

    def test_others_go_on(self):
        """O1: texts of a MiB are worked on while others are answered, and nobody waits for them."""
        server = Server("--ctx", "512")
        want = server.post("/tokenize", {"content": self.TEXT})[1]["count"]
        links = [self.send(server, "/tokenize", {"content": self.TEXT}) for _ in range(4)]
        links += [self.send(server, "/v1/completions", {"prompt": self.TEXT, "max_tokens": 1})
                  for _ in range(2)]
        links.append(self.send(server, "/v1/chat/completions", {"messages": [
            {"role": "user", "content": self.TEXT}], "max_tokens": 1}))
        answers, threads = [None] * len(links), []

        def read(i):
            got = b""
            while True:
                more = links[i].recv(1 << 20)
                if not more:
                    break
                got += more
            answers[i] = got

        for i in range(len(links)):
            threads.append(threading.Thread(target=read, args=(i,)))
            threads[-1].start()
        healthy = 0
        while any(thread.is_alive() for thread in threads):
            healthy += server.request("GET", "/health")[0] == 200
        for i, answer in enumerate(answers):
            head, body = answer.split(b"\r\n\r\n", 1)
            if i < 4:
                self.assertIn(b" 200 ", head.split(b"\r\n")[0])
                self.assertEqual(json.loads(body)["count"], want)
            else:
                self.assertIn(b" 400 ", head.split(b"\r\n")[0])
                self.assertEqual(json.loads(body)["error"]["code"], "context_length_exceeded")
        self.assertGreater(healthy, 10)
        self.assertEqual(server.end(), (0, ""))

    def test_arguments_have_bounds(self):
        """Arguments spell out what a body could hold; beyond that they stay a string."""
        server = Server("--ctx", "512")
        for text, spelt in (('{"a":' + "[" * 63 + "]" * 63 + "}", True),
                            ('{"a":' + "[" * 64 + "]" * 64 + "}", False),
                            ('{"a":[' + "1," * 262141 + "1]}", True),
                            ('{"a":[' + "1," * 262142 + "1]}", False)):
            body = server.post("/apply-template", {"messages": [
                {"role": "user", "content": "And?"},
                {"role": "assistant", "tool_calls": [
                    {"function": {"name": "f", "arguments": text}}]}]})[1]
            self.assertIn("prompt", body, text[:80])
            shown = '"arguments":' + (text if spelt else json.dumps(text)) + "}"
            self.assertTrue(shown in body["prompt"], text[:80])
        self.assertEqual(server.end(), (0, ""))

    def test_left_alone(self):
        """Clients that leave while their text is worked on, or waits for that; and the end."""
        server = Server("--ctx", "512")
        for _ in range(3):
            for link in [self.send(server, "/tokenize", {"content": self.TEXT})
                         for _ in range(4)]:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                link.close()
        self.assertEqual(server.post("/tokenize", {"content": "a"})[0], 200)
        links = [self.send(server, "/tokenize", {"content": self.TEXT}) for _ in range(6)]
        server.wait_for(lambda m: m["http_connections"] >= 6, "they are there")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        code, err = server.end(signal.SIGTERM)
        for link in links:
            link.close()
        self.assertIn((code, err.count(" error ")), ((0, 0), (1, 1)), err)


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class End(unittest.TestCase):
    def begin(self, server, tokens):
        """A stream that has begun; its events are read later."""
        link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
        link.request("POST", "/v1/completions", json.dumps(
            {"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "stream": True,
             "ignore_eos": True}))
        answer = link.getresponse()
        answer.read(10)
        return link, answer

    def test_drain(self):
        server = Server(*ARGS)
        link, answer = self.begin(server, 40)
        idle = server.connect()
        server.process.send_signal(signal.SIGTERM)
        self.assertTrue(answer.read().endswith(b"data: [DONE]\n\n"))
        link.close()
        self.assertEqual(server.end(), (0, ""))
        idle.close()

    def test_what_comes_too_late(self):
        """Requests that had begun to come when the end began: refused, not answered and not cut."""
        server = Server(*ARGS, "--header-timeout", "60", "--body-timeout", "60",
                        "--drain-timeout", "300")
        link, answer = self.begin(server, 450)
        body = b'{"prompt": "a", "max_tokens": 1}'
        heads = [b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                 b"Content-Length: %d\r\n" % len(body)]
        late = [server.connect() for _ in heads]
        for one, head in zip(late, heads):
            one.sendall(head)
        for _ in range(2):  # what was there before the first was read before the second
            server.metrics()
        server.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + LIMIT_S
        while not any("ending" in line for line in server.lines) and time.monotonic() < end:
            time.sleep(0.01)
        for one, more in zip(late, (b"\r\n", b"\r\n" + body)):
            with one:
                one.sendall(more)
                got = rest(one)  # head and body may come apart
                self.assertIn(b" 503 ", got[:20], got)
                self.assertIn(b"shutting_down", got)
        self.assertTrue(answer.read().endswith(b"data: [DONE]\n\n"))
        link.close()
        self.assertEqual(server.end(), (0, ""))

    def test_second_signal(self):
        server = Server(*ARGS)
        link, answer = self.begin(server, 500)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        code, err = server.end(signal.SIGINT)
        link.close()
        self.assertEqual(code, 1, err)
        self.assertIn("cancelled", err)
        self.assertTrue(answer)

    def test_port_in_use(self):
        server = Server(*ARGS)
        done = subprocess.run([PKV, "serve", MODEL, "--port", str(server.port)],
                              capture_output=True, timeout=LIMIT_S, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"cannot listen", done.stderr)
        self.assertEqual(server.end(), (0, ""))


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class Modes(unittest.TestCase):
    def test_ping(self):
        """A stream that waits for its turn says that it lives, and nothing that a client could take
        for its first token."""
        server = Server(*ARGS, "--rows", "1")
        body = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 320,
                "temperature": 0, "ignore_eos": True}
        got = [None] * 3

        def ask(i):
            got[i] = server.request("POST", "/v1/chat/completions",
                                    json.dumps(dict(body, stream=True)))[2]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(got))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        texts = set()
        for stream in got:
            events = [e for e in stream.decode().split("\n\n") if e]
            # As clients read that know no comments: what is no blank line is an event.
            self.assertEqual({line[:6] for line in stream.decode().split("\n") if line}, {"data: "})
            self.assertEqual(events[-1], "data: [DONE]")
            deltas = [json.loads(e[6:])["choices"][0]["delta"] for e in events[:-1]]
            self.assertEqual(deltas[0], {"role": "assistant", "content": ""})
            texts.add("".join(d.get("content", "") for d in deltas))
        self.assertEqual(len(texts), 1)
        self.assertTrue(any(stream.startswith(b"\n\n") for stream in got), [s[:99] for s in got])
        self.assertEqual(server.end(), (0, ""))

    def test_keys(self):
        with tempfile.NamedTemporaryFile("w") as keys:
            keys.write("# two keys\nfirst-key\n\nsecond-key\r\n")
            keys.flush()
            server = Server(*ARGS, "--api-key-file", keys.name, key="first-key")
        body = json.dumps({"prompt": "a", "max_tokens": 1})
        routes = (("GET", "/v1/models", None), ("GET", "/metrics", None),
                  ("POST", "/v1/completions", body), ("POST", "/v1/chat/completions", body))
        for header in (None, "", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-key2",
                       "first-key", "Basic first-key", "Bearer  first-key", "Bearer # two keys",
                       "Bearer " + "k" * 300):
            headers = {} if header is None else {"Authorization": header}
            for method, path, data in routes:
                status, answer, text = server.request(method, path, data, headers)
                self.assertEqual((status, answer.get("WWW-Authenticate")), (401, "Bearer"), header)
                self.assertEqual(json.loads(text)["error"]["code"], "invalid_api_key")
        for key in ("first-key", "second-key"):
            headers = {"Authorization": "Bearer " + key}
            self.assertEqual(server.request("GET", "/metrics", None, headers)[0], 200)
            self.assertEqual(server.request("POST", "/v1/completions", body, headers)[0], 200)
        self.assertEqual(server.request("GET", "/health")[0], 200)
        self.assertEqual(server.end(), (0, ""))

    def test_key_of_a_browser(self):
        """The page makes a browser ask; what it then sends by itself, also for other servers'
        pages, does not do for what those can post without asking first."""
        server = Server(*ARGS, "--api-keys", "first-key,a:b", key="first-key")
        status, answer, text = server.request("GET", "/")
        self.assertEqual((status, json.loads(text)["error"]["code"]), (401, "invalid_api_key"))
        self.assertRegex(answer["WWW-Authenticate"], "^Basic realm=")

        def basic(text, padded=True):
            code = base64.b64encode(text.encode("latin-1")).decode()
            return {"Authorization": "Basic " + (code if padded else code.rstrip("="))}

        for good in (basic("someone:first-key"), basic(":first-key"), basic("u:a:b"),
                     basic("ab:first-key", False), basic("\xe4" * 255 + ":first-key")):
            status, answer, text = server.request("GET", "/", None, good)
            self.assertEqual((status, b"</html>" in text), (200, True), good)
            self.assertEqual(server.request("GET", "/dashboard/state", None, good)[0], 200, good)
        code = basic("someone:first-key")["Authorization"]
        for bad in (basic("first-key"), basic("first-key:"), basic("someone:first-ke"), basic(""),
                    basic("someone:first-key\0"), basic("x\0:first-key"), basic("a:" + "k" * 600),
                    *({"Authorization": text} for text in (
                        "Basic", "Basic ", "Basic =", "Basic ====", code[:-2], code + "=",
                        code + "A", code.replace("Basic ", "Basic  "), code[:9] + "-" + code[10:],
                        "Basic c29tZW9uZTpmaXJzdC1rZXk\x80", "Basic " + "A" * 5000))):
            self.assertEqual(server.request("GET", "/", None, bad)[0], 401, bad)
        body = json.dumps({"prompt": "a", "max_tokens": 1})
        for kind, status in (("application/json", 200), ("application/json; charset=utf-8", 200),
                             ("Application/JSON", 200), ("text/plain", 415), (None, 415), ("", 415),
                             ("text/plain; a=application/json", 415),
                             ("application/x-www-form-urlencoded", 415)):
            for header, wanted in ((basic("x:first-key"), status), (server.headers, 200),
                                   (basic("x:no"), 401)):
                headers = dict(header, **({"Content-Type": kind} if kind is not None else {}))
                got = server.request("POST", "/v1/completions", body, headers)[0]
                self.assertEqual(got, wanted, headers)
        self.assertEqual(server.end(), (0, ""))
        server = Server(*ARGS)  # without keys nothing is asked for
        self.assertEqual(server.request("POST", "/v1/completions", body, basic("a:b"))[0], 200)
        self.assertEqual(server.request("GET", "/")[0], 200)
        self.assertEqual(server.end(), (0, ""))

    def test_keys_from_the_environment(self):
        with unittest.mock.patch.dict(os.environ, {"PKV_SERVE_API_KEYS": "one,two"}):
            server = Server(*ARGS, key="two")
            other = Server(*ARGS, "--api-keys", "three", key="three")
        self.assertEqual(server.request("GET", "/metrics")[0], 401)
        for of, key, status in ((server, "one", 200), (server, "three", 401),
                                (other, "three", 200), (other, "one", 401)):
            headers = {"Authorization": "Bearer " + key}
            self.assertEqual(of.request("GET", "/metrics", None, headers)[0], status, key)
        self.assertEqual((server.end(), other.end()), ((0, ""), (0, "")))

    def test_bad_key_files(self):
        for text, complaint in (("", "no key"), ("# nothing\n", "no key"), ("ok\na b\n", "line 2"),
                                ("k" * 256, "line 1"), ("key\n" * 257, "more than 256")):
            with tempfile.NamedTemporaryFile("w") as keys:
                keys.write(text)
                keys.flush()
                done = subprocess.run([PKV, "serve", MODEL, "--port", "0", "--api-key-file",
                                       keys.name], capture_output=True, timeout=LIMIT_S,
                                      check=False)
            self.assertEqual(done.returncode, 1, text)
            self.assertIn(complaint, done.stderr.decode())


class Loading(unittest.TestCase):
    def test_no_model(self):
        """O13, O14: the port is bound before the model is there; without one the process ends."""
        done = subprocess.run([PKV, "serve", "/no/such/file", "--port", "0"], capture_output=True,
                              timeout=LIMIT_S, check=False)
        lines = done.stderr.decode().splitlines()
        self.assertEqual(done.returncode, 1, lines)
        self.assertIn("listening on", lines[0])
        self.assertRegex(lines[1], " error serve: .*/no/such/file")

    @unittest.skipUnless(HAVE_MODEL, "the model is not there")
    def test_loading(self):
        """O13: a request that comes while the model is loaded is answered 503, or served."""
        server = Server(*ARGS, ready=False)
        body = json.dumps({"prompt": "a", "max_tokens": 1})
        status, headers, text = server.request("POST", "/v1/completions", body)
        if status != 200:
            self.assertEqual((status, headers["Retry-After"]), (503, "1"))
            self.assertEqual(json.loads(text)["error"]["code"], "loading")
        self.assertIn(json.loads(server.request("GET", "/health")[2])["status"], ("ok", "loading"))
        server.wait_ready()
        self.assertEqual(server.request("POST", "/v1/completions", body)[0], 200)
        self.assertEqual(server.end(), (0, ""))


class Arguments(unittest.TestCase):
    def test_arguments(self):
        for args, code, text in (((), 2, "MODEL is missing"),
                                 (("a", "--port", "70000"), 2, "--port"),
                                 (("a", "--name", ""), 2, "--name"),
                                 (("/no/such/file", "--port", "0"), 1, "/no/such/file")):
            done = subprocess.run([PKV, "serve", *args], capture_output=True, timeout=LIMIT_S,
                                  check=False)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(text, done.stderr.decode())


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[3:]])
