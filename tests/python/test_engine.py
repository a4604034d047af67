# SPDX-License-Identifier: Apache-2.0
"""`Engine`: generate, stream, chat; many threads on one; what is refused; its end."""

import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time

import persistentkv as pkv
import pytest
from persistentkv import _engine_lib, _engine_text
from persistentkv import engine as binding

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, ".cache", "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
STORY = "Once upon a time, in a village by the sea,"


def why_not():
    try:
        _engine_lib.engine_lib()
    except pkv.NotSupported as e:
        return str(e)
    return "" if os.access(MODEL, os.R_OK) else "the model is not there (./run fetch-model)"


REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")


def make(**options):
    return pkv.Engine(MODEL, **{"max_seq_len": 256, "cache_tokens": 4096, "max_rows": 8, **options})


@pytest.fixture(scope="module")
def engine():
    with make() as e:
        yield e
        assert e.stats["pages_in_use"] == 0  # after all that the tests did


def test_model_and_tokens(engine):
    info = engine.model
    assert (info.architecture, info.layers, info.vocab, info.context) == ("llama", 30, 49152, 8192)
    ids = engine.tokenize("Hello  wörld 😸")
    assert engine.detokenize(ids) == "Hello  wörld 😸"
    special = engine.tokenize("<|im_start|>user", parse_special=True)
    assert len(special) == 2 and len(engine.tokenize("<|im_start|>user")) > 2
    assert engine.detokenize(special, special=True) == "<|im_start|>user"
    assert len(engine.tokenize("a " * 3000)) >= 3000
    assert engine.tokenize("") == []


def test_generate_is_repeatable(engine):
    first = engine.generate(STORY, max_tokens=12)
    assert first.finish_reason == "length" and len(first.choices[0].tokens) == 12
    assert first.prompt_tokens == len(engine.tokenize(STORY))
    assert first.text == engine.detokenize([t.token for t in first.choices[0].tokens])
    assert all(t.logprob is None and not t.top for t in first.choices[0].tokens)
    again, other = engine.generate([STORY, "The sea is"], max_tokens=12)
    assert again.choices == first.choices and other.text != first.text
    assert engine.generate(engine.tokenize(STORY), max_tokens=12).choices == first.choices
    hot = [engine.generate(STORY, max_tokens=12, temperature=1.0, seed=s).text for s in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_several_answers(engine):
    done = engine.generate(STORY, max_tokens=8, n=3, temperature=1.0, seed=4)
    assert [c.index for c in done.choices] == [0, 1, 2]
    assert len({c.text for c in done.choices}) == 3
    assert engine.generate(STORY, max_tokens=8, temperature=1.0, seed=4).text == done.text


def test_streams_say_what_generate_says(engine):
    whole = engine.generate("Three cats: 😸", max_tokens=24, temperature=0.7, seed=3)
    pieces = list(engine.stream("Three cats: 😸", max_tokens=24, temperature=0.7, seed=3))
    assert "".join(p.text for p in pieces) == whole.text
    assert [p.finish_reason for p in pieces][-1] == whole.finish_reason
    assert tuple(p.token for p in pieces)[:3] != () and all(p.token for p in pieces)


def test_stop_strings_across_tokens(engine):
    free = engine.generate(STORY, max_tokens=20).text
    stop = free[7:12]
    done = engine.generate(STORY, max_tokens=20, stop=["never there", stop])
    assert (done.text, done.finish_reason) == (free[: free.index(stop)], "stop")
    assert done.choices[0].stop == stop
    pieces = list(engine.stream(STORY, max_tokens=20, stop=stop))
    assert "".join(p.text for p in pieces) == done.text
    late = engine.generate(STORY, max_tokens=20, min_tokens=19, stop=stop)
    assert len(late.choices[0].tokens) >= 19


def test_logprobs_echo_bias(engine):
    done = engine.generate("One two three", max_tokens=0, echo=True, logprobs=True)
    tokens = done.choices[0].tokens
    assert [t.token for t in tokens] == engine.tokenize("One two three")
    assert tokens[0].logprob is None and all(t.logprob < 0 for t in tokens[1:])
    done = engine.generate(STORY, max_tokens=3, top_logprobs=5)
    for token in done.choices[0].tokens:
        assert len(token.top) == 5 and token.top[0][0] == token.token
        assert token.top == tuple(sorted(token.top, key=lambda t: -t[1]))
    banned = done.choices[0].tokens[0].token
    other = engine.generate(STORY, max_tokens=1, logit_bias={banned: -100})
    assert other.choices[0].tokens[0].token != banned


def draw_settings(draw):
    """Settings of one request, each option with some chance."""
    chances = {
        "top_k": lambda: draw.randint(1, 80),
        "top_p": lambda: draw.uniform(0.5, 1.0),
        "min_p": lambda: draw.uniform(0.0, 0.2),
        "repetition_penalty": lambda: draw.uniform(0.9, 1.4),
        "presence_penalty": lambda: draw.uniform(-1.0, 1.5),
        "frequency_penalty": lambda: draw.uniform(-1.0, 1.5),
        "logit_bias": lambda: {draw.randrange(49152): draw.uniform(-100.0, 8.0) for _ in range(4)},
        "stop": lambda: draw.sample([" the", ". ", "ing", "\n", "e a", " \u00e9"], 2),
        "min_tokens": lambda: draw.randint(1, 6),
        "ignore_end": lambda: draw.random() < 0.5,
        "top_logprobs": lambda: draw.randint(1, 20),
        "n": lambda: draw.randint(2, 3),
        "cache_salt": lambda: draw.randint(0, 1),
        "priority": lambda: draw.randint(0, 2),
    }
    settings = {name: make() for name, make in chances.items() if draw.random() < 0.3}
    settings.update(max_tokens=draw.randint(12, 24), seed=draw.randrange(2**40))
    settings["temperature"] = draw.choice([0.0, 0.7, 1.3])
    kind = draw.random()
    if kind < 0.2:
        settings["grammar"] = 'root ::= [a-z]{2,9} (", " [a-z]{2,9}){1,3} "."'
    elif kind < 0.3:
        settings["schema"] = {"type": "object", "properties": {"far": {"type": "boolean"}}}
    if kind < 0.3:
        settings.pop("min_tokens", None)
    return settings


def ask_all(engine, cases, together):
    """Completions of all cases; together: from threads, every third one as a stream."""
    got = [None] * len(cases)

    def ask(i):
        call, prompt, settings = cases[i]
        if together and i % 3 == 0 and settings.get("n", 1) == 1:
            stream = engine.stream if call == "generate" else engine.stream_chat
            pieces = list(stream(prompt, **settings))
            tokens = tuple(p.token for p in pieces if p.token is not None)
            got[i] = [("".join(p.text for p in pieces), tokens, pieces[-1].finish_reason)]
        else:
            done = getattr(engine, call)(prompt, **settings)
            got[i] = [(c.text, c.tokens, c.finish_reason) for c in done.choices]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.parametrize("kv_dtype", ["f16", "fp8"])
def test_same_answers_in_any_engine(kv_dtype):
    """Alone and cold, among others, in chunks, preempted, warm: equal to the last log-probability.
    (The engine's own test draws many more: tests/unit/test_engine_matrix.c.)"""
    draw = random.Random(kv_dtype)
    shared = "You are a guide to the harbour and the river. " * 6
    cases = []
    for i in range(12):
        text = (shared if i % 2 else "") + f"Case {i}: tell of the {draw.choice(['sea', 'hill'])}."
        chat = [{"role": "user", "content": text}]
        settings = draw_settings(draw)
        cases.append(("chat", chat, settings) if i % 4 == 3 else ("generate", text, settings))
    with make(kv_dtype=kv_dtype, prefix_sharing=0, prefix_cache=0) as engine:
        want = ask_all(engine, cases, together=False)
    preemptions = cached = 0
    for order, admission in (("tree", "marginal"), ("lpm", "always")):
        with make(kv_dtype=kv_dtype, order=order, admission=admission, prefill_chunk=24,
                  cache_tokens=draw.randint(160, 168), max_seq_len=160, page_tokens=4) as engine:
            for times in range(1, 9):  # from the second on warm; how many meet, threads decide
                got = ask_all(engine, cases, together=True)
                for i, case in enumerate(cases):
                    assert got[i] == want[i], (order, case)
                if times > 1 and engine.stats["preemptions"] > 0:
                    break
            preemptions += engine.stats["preemptions"]
            cached += engine.stats["prompt_tokens_reused"]
    assert preemptions > 0 and cached > 0


def test_chat_and_constraints(engine):
    messages = [{"role": "user", "content": "Name a colour, as JSON."}]
    schema = {
        "type": "object",
        "properties": {"colour": {"type": "string", "maxLength": 12}},
        "required": ["colour"],
    }
    for _ in range(2):  # the second from what was compiled
        done = engine.chat(messages, schema=schema, max_tokens=60)
        assert done.finish_reason == "stop" and list(json.loads(done.text)) == ["colour"]
    assert engine.chat(messages, grammar='root ::= "red" | "blue"').text in ("red", "blue")
    said = "".join(p.text for p in engine.stream_chat(messages, max_tokens=9))
    assert said == engine.chat(messages, max_tokens=9).text
    assert len(engine.chat_tokens(messages)) > len(engine.tokenize("Name a colour, as JSON."))
    many = [engine.generate("a", grammar=f'root ::= "{i}"').text for i in range(70)]
    assert many == [str(i) for i in range(70)]  # more than an engine, or this class, keeps
    with pytest.raises(pkv.NotSupported, match="tools"):  # this model's template shows none
        tool = {"type": "function", "function": {"name": "now"}}
        engine.chat(messages, tools=[tool], max_tokens=5)


def test_threads_share_one_engine(engine):
    """O11: 8 threads, one object: everybody has the text of a run alone, in one batch."""
    prompts = [f"{STORY} number {i} was" for i in range(8)]
    alone = [engine.generate(p, max_tokens=16).choices for p in prompts]
    before, together = engine.stats, [None] * 8

    def work(i):
        together[i] = engine.generate(prompts[i], max_tokens=16).choices

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == alone
    after = engine.stats
    steps = after["decode_steps"] - before["decode_steps"]
    assert steps < 8 * 16 / 2  # several rows a step


def test_the_lock_of_the_interpreter_is_released(engine):
    counted, done = 0, threading.Event()

    def generate():
        engine.generate(STORY, max_tokens=40)
        done.set()

    thread = threading.Thread(target=generate)
    thread.start()
    while not done.is_set():
        counted += 1
        time.sleep(0)
    thread.join()
    assert counted > 200


def test_streams_that_are_left_are_cancelled(engine):
    before = engine.stats["cancelled"]
    stream = engine.stream(STORY, ignore_end=True)
    next(stream)
    stream.close()
    never_begun = engine.stream(STORY, ignore_end=True)
    del never_begun
    gc.collect()
    limit = time.monotonic() + 30
    while engine.stats["cancelled"] < before + 2 or engine.stats["pages_in_use"]:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_prefix_cache_and_its_file(tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 6
    with make() as one:
        cold = one.generate(text, max_tokens=8)
        warm = one.generate(text, max_tokens=8)
        assert cold.cached_tokens == 0 and warm.cached_tokens > 40
        assert one.generate(text, max_tokens=8, cache_salt=9).cached_tokens == 0
        one.clear_cache()
        assert one.generate(text, max_tokens=8).cached_tokens == 0
        pages = one.save_cache(tmp_path / "cache")
        assert pages > 3
    with make() as two:
        assert two.load_cache(tmp_path / "cache") == pages
        again = two.generate(text, max_tokens=8)
        assert again.cached_tokens == warm.cached_tokens and again.choices == cold.choices
    with make(kv_dtype="fp8") as other, pytest.raises(pkv.InvalidArgument, match="type"):
        other.load_cache(tmp_path / "cache")


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "fp8"])
def test_element_types_of_the_cache(kv_dtype):
    with make(kv_dtype=kv_dtype, order="tree", admission="marginal") as e:
        assert len(e.generate(STORY, max_tokens=6).text) > 6


@pytest.mark.parametrize(
    "settings, error, text",
    [
        ({"max_tokens": 0}, pkv.InvalidArgument, "echo"),
        ({"max_tokens": -1}, pkv.InvalidArgument, "max_tokens is -1"),
        ({"max_tokens": 2**40}, pkv.InvalidArgument, "max_tokens"),
        ({"max_tokens": "a"}, pkv.InvalidArgument, "max_tokens"),
        ({"temperature": -1.0}, pkv.OutOfRange, "temperature"),
        ({"temperature": math.nan}, pkv.InvalidArgument, "temperature"),
        ({"top_p": 2}, pkv.OutOfRange, "top_p"),
        ({"stop": ""}, pkv.OutOfRange, "no bytes"),
        ({"stop": ["a"] * 17}, pkv.OutOfRange, "stop_count is 17"),
        ({"stop": 5}, pkv.InvalidArgument, "stop"),
        ({"stop": "a\0b"}, pkv.InvalidArgument, "zero byte"),
        ({"logit_bias": {99999999: 1}}, pkv.OutOfRange, "vocabulary"),
        ({"logit_bias": {"x": 1}}, pkv.InvalidArgument, "logit_bias"),
        ({"logit_bias": {2**40: 1}}, pkv.InvalidArgument, "logit_bias"),
        ({"n": 200}, pkv.OutOfRange, "n is 200"),
        ({"top_logprobs": 21}, pkv.OutOfRange, "top_logprobs is 21"),
        ({"grammar": "root ::= root"}, pkv.InvalidArgument, "left recursive"),
        ({"schema": {"type": "invalid"}}, pkv.InvalidArgument, "type"),
        ({"schema": {"type": {1}}}, pkv.InvalidArgument, "JSON"),
        ({"json": True, "grammar": "x"}, pkv.InvalidArgument, "at once"),
        ({"grammar": 5}, pkv.InvalidArgument, "grammar must be a text"),
        ({"min_tokens": 9, "grammar": 'root ::= "a"', "max_tokens": 20}, pkv.InvalidArgument,
         "longest"),
        ({"max_token": 5}, pkv.InvalidArgument, "no setting is called 'max_token'"),
    ],
)
def test_settings_are_refused_by_name(engine, settings, error, text):
    with pytest.raises(error, match=text):
        engine.generate("a", **{"max_tokens": 4, **settings})


def test_prompts_are_refused_by_name(engine):
    for prompt, error, text in (
        ([], pkv.InvalidArgument, None), ([[1, 2], [3, 999999]], pkv.OutOfRange, "999999"),
        (5, pkv.InvalidArgument, "prompt"), ([1, -1], pkv.OutOfRange, "-1"),
        ([1] * 300, pkv.OutOfRange, "300 tokens"), ("", pkv.InvalidArgument, "at least 1"),
        ([1, 2**40], pkv.InvalidArgument, "token ids"),
    ):
        if text is None:
            assert engine.generate(prompt, max_tokens=2) == []
            continue
        with pytest.raises(error, match=text):
            engine.generate(prompt, max_tokens=2)
    for messages in ([], [{"role": "user"}], "a"):
        with pytest.raises(pkv.PkvError):
            engine.chat(messages, max_tokens=2)


def test_engines_are_refused_by_name(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    for arguments, error, text in (
        ((bad,), pkv.InvalidArgument, ""), ((tmp_path / "none",), pkv.PkvError, ""),
        ((MODEL, {"kv_dtype": "q8"}), pkv.InvalidArgument, "known are f32"),
        ((MODEL, {"order": "best"}), pkv.InvalidArgument, "order is 'best'"),
        ((MODEL, {"max_row": 5}), pkv.InvalidArgument, "no option is called 'max_row'"),
        ((MODEL, {"max_rows": -5}), pkv.OutOfRange, "max_rows is -5"),
        ((MODEL, {"page_tokens": 1.5}), pkv.InvalidArgument, "page_tokens"),
    ):
        options = arguments[1] if len(arguments) > 1 else {}
        with pytest.raises(error, match=text or "."):
            pkv.Engine(arguments[0], **options)


def test_more_requests_than_it_takes():
    with make(max_requests=2) as e:
        streams = [e.stream(STORY, ignore_end=True) for _ in range(2)]
        with pytest.raises(pkv.OutOfRange, match="2 requests"):
            e.generate("a", max_tokens=1)
        for s in streams:
            s.close()
        del streams, s
        gc.collect()
        limit = time.monotonic() + 30
        while e.stats["rows_running"] + e.stats["rows_waiting"]:
            assert time.monotonic() < limit
        assert e.generate("a", max_tokens=1).finish_reason == "length"


def test_after_close_everything_says_so():
    e = make()
    stream = e.stream(STORY, ignore_end=True)
    next(stream)
    ended = []

    def wait():
        try:
            e.generate(STORY, ignore_end=True)
        except pkv.WrongState as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while e.stats["rows_running"] < 2:
        time.sleep(0.01)
    e.close()
    thread.join(30)
    assert ended == ["this engine was closed"]
    with pytest.raises(pkv.WrongState, match="closed"):
        for _ in stream:
            pass
    for call in (
        lambda: e.generate("a"), lambda: e.tokenize("a"), lambda: e.stats, lambda: e.model,
        lambda: list(e.stream("a")), lambda: e.detokenize([5]), e.clear_cache,
    ):
        with pytest.raises(pkv.WrongState, match="closed"):
            call()
    e.close()  # once more is no error


class Watched:
    """The library, with what is called in order; one function waits until it may go on."""

    def __init__(self, held=None, answers=None):
        self._lib, self._held, self._answers = _engine_lib.engine_lib(), held, answers or {}
        self.log, self.entered, self.go = [], threading.Event(), threading.Event()
        self.failure = self._lib.failure

    def _around(self, name, function):
        def call(*arguments):
            if name == self._held:
                self.entered.set()
                assert self.go.wait(30), f"{name} was not let go on"
            value = self._answers[name] if name in self._answers else function(*arguments)
            self.log.append((name, arguments))
            return value

        return call

    def function(self, name):
        return self._around(name, self._lib.function(name))

    def call(self, name, *arguments):
        self._around(name, lambda *a: self._lib.call(name, *a))(*arguments)

    def names(self, begin=""):
        return [name for name, _ in self.log if name.startswith(begin)]

    def shares(self):
        """(made, destroyed) of the constraints."""
        made = self.names("pkv_constraint_create")
        gone = [a for name, a in self.log if name == "pkv_constraint_destroy" and a[0]]
        return len(made), len(gone)


def watch(monkeypatch, held=None, answers=None):
    lib = Watched(held, answers)
    monkeypatch.setattr(binding, "engine_lib", lambda: lib)
    return lib


def attempt(call, results):
    try:
        results.append(call())
    except pkv.PkvError as e:
        results.append(e)


@pytest.mark.parametrize(
    "held, call",
    [
        ("pkv_tokenize", lambda e: e.tokenize("a")),
        ("pkv_token_text", lambda e: e.detokenize([5])),
        ("pkv_model_get_info", lambda e: e.model),
        ("pkv_model_tool_style", lambda e: e._tool_style()),
        ("pkv_chat_tokenize_json", lambda e: e.chat_tokens([{"role": "user", "content": "a"}])),
        ("pkv_constraint_create_grammar", lambda e: e.generate([5], grammar='root ::= "a"')),
        ("pkv_constraint_create_json", lambda e: e.generate([5], json=True)),
        ("pkv_constraint_create_schema", lambda e: e.generate([5], schema={"type": "object"})),
    ],
)
def test_close_waits_for_threads_that_use_the_model(monkeypatch, held, call):
    lib, results = watch(monkeypatch, held), []
    e = make()
    user = threading.Thread(target=attempt, args=(lambda: call(e), results), daemon=True)
    user.start()
    assert lib.entered.wait(30)
    closer = threading.Thread(target=e.close, daemon=True)
    closer.start()
    limit = time.monotonic() + 30
    while "pkv_engine_destroy" not in lib.names():
        assert time.monotonic() < limit
        time.sleep(0.001)
    closer.join(0.05)
    assert closer.is_alive() and "pkv_model_close" not in lib.names()
    for refused in (lambda: e.tokenize("b"), lambda: e.model, lambda: e.generate([5], json=True)):
        with pytest.raises(pkv.WrongState, match="closed"):
            refused()
    lib.go.set()
    user.join(30)
    closer.join(30)
    assert not user.is_alive() and not closer.is_alive()
    assert isinstance(results[0], pkv.WrongState) == ("constraint" in held)
    assert lib.names()[-1] == "pkv_model_close" and held in lib.names()
    made, destroyed = lib.shares()
    assert made == destroyed == ("constraint" in held)


def test_ctrl_c_behind_a_constraint(monkeypatch):
    """Nobody knows of it yet, and it is destroyed all the same."""
    lib = watch(monkeypatch)
    create = lib.call

    def interrupted(name, *arguments):
        create(name, *arguments)
        if name.startswith("pkv_constraint_create"):
            raise KeyboardInterrupt

    with make() as e:
        monkeypatch.setattr(lib, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            e.generate([5], json=True)
        monkeypatch.setattr(lib, "call", create)
        e.generate([5], json=True, max_tokens=1)
        assert lib.shares() == (2, 1)  # the next request's end has seen to the first
        for _ in range(3):
            with pytest.raises(pkv.InvalidArgument):
                e.generate([5], grammar="root ::= (")
        assert [c.users for c in e._core.constraints._all] == [0]  # the kept one alone
    assert lib.shares() == (2, 2)


def test_an_answer_that_ends_before_anybody_waits_for_it(monkeypatch):
    with make() as e:
        ask = e._core.ask

        def late(call):
            value = ask(call)
            while e._core._live:
                time.sleep(0.001)
            return value

        monkeypatch.setattr(e._core, "ask", late)
        assert [len(e.generate("a", max_tokens=1, n=n).choices) for n in (1, 3)] == [1, 3]
        assert [p.finish_reason for p in e.stream("a", max_tokens=1)] == ["length"]


def test_constraints_end_before_the_model(monkeypatch):
    lib = watch(monkeypatch)
    with make() as e:
        for i in range(40):  # more than are kept
            e.generate("a", grammar=f'root ::= "{i % 36}"')
        assert lib.shares()[0] == lib.shares()[1] + 32
    assert lib.names()[-33:] == ["pkv_constraint_destroy"] * 32 + ["pkv_model_close"]
    assert lib.shares()[0] == lib.shares()[1]


def test_ctrl_c_while_a_request_is_submitted(monkeypatch):
    """It has its constraint to the end of the call, and is cancelled then."""
    lib = watch(monkeypatch, "pkv_engine_submit")

    interrupted = threading.Event()

    def once(*_):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def interrupt():
        lib.entered.wait(30)
        while not interrupted.wait(0.05):  # one that comes just before a wait does not end it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before, other = signal.signal(signal.SIGINT, once), threading.Thread(target=interrupt)
    with make() as e:
        other.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                e.generate(STORY, ignore_end=True, grammar="root ::= [a-z ]*")
        finally:
            interrupted.set()
            other.join(30)
            signal.signal(signal.SIGINT, before)
        (constraint,) = e._core.constraints._all
        assert lib.shares() == (1, 0) and constraint.users == 1  # not freed beneath the call
        lib.go.set()
        limit = time.monotonic() + 30
        while e.stats["cancelled"] < 1 or e.stats["pages_in_use"]:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert lib.shares() == (1, 0) and constraint.users == 0  # kept for the next
        assert e.generate("a", max_tokens=1).finish_reason == "length"
    assert lib.shares() == (1, 1)


def test_no_thread_for_the_engine(monkeypatch):
    lib = watch(monkeypatch)

    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="start new thread"):
            make()
    assert lib.names()[-2:] == ["pkv_engine_destroy", "pkv_model_close"]


def test_a_signal_that_closes_in_the_midst_of_a_use(monkeypatch):
    """It cannot wait for the thread that it interrupted."""
    lib = watch(monkeypatch)
    e = make()
    with e._core.using():
        e.close()
        assert "pkv_model_close" not in lib.names()
    e._core._thread.join(30)
    assert lib.names()[-1] == "pkv_model_close"


CALLS = {"plain": '{"name": ["now"]}', "call": '{"name": "now", "parameters": {}}'}


@pytest.mark.parametrize("kind", CALLS)
def test_tools_lose_no_answer(monkeypatch, kind):
    """What a tool's call is read from is known before the answer begins."""
    lib = watch(monkeypatch, answers={"pkv_model_tool_style": _engine_text.LLAMA})
    messages, text = [{"role": "user", "content": "a"}], CALLS[kind]
    tools = [{"type": "function", "function": {"name": "now"}}]
    with make() as e:
        # This model's template shows no tools.
        monkeypatch.setattr(e, "chat_tokens", lambda *_, tools: list(tools) and e.tokenize("a"))
        done = e.chat(messages, tools=iter(tools), grammar=f"root ::= {json.dumps(text)}")
        calls = ((("now", {}),), "") if kind == "call" else ((), text)
        assert (done.tool_calls, done.text) == calls
        pieces = list(e.stream_chat(messages, tools=tools, grammar=f"root ::= {json.dumps(text)}"))
        assert (pieces[-1].tool_calls, "".join(p.text for p in pieces)) == calls
        assert len(pieces) == len(done.choices[0].tokens)
        for bad in ([{"type": "function"}], [{"function": {"name": ["a"]}}], ["now"], [None], 5,
                    "now", {"function": {"name": "now"}}, [{"function": "now"}]):
            for method in (e.chat, e.stream_chat):
                with pytest.raises(pkv.InvalidArgument, match="tools"):
                    method(messages, tools=bad)
        assert lib.names("pkv_engine_submit") == 2 * ["pkv_engine_submit"]  # the first two


def test_an_engine_that_nobody_holds_ends():
    for _ in range(3):
        e = make()
        e.generate("a", max_tokens=1)
        del e
        gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "persistentkv"][1:]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("e = make(); print(e.generate('a', max_tokens=2).finish_reason)", "length\n"),
        ("e = make(); s = e.stream('a', ignore_end=True); next(s); print('ends')", "ends\n"),
        (
            "e = make(); next(e.stream('a', ignore_end=True))\n"
            "pid = os.fork()\n"
            "if pid == 0:\n"
            "    try: e.generate('a')\n"
            "    except pkv.WrongState as error: print('before a fork' in str(error), flush=True)\n"
            "    os._exit(0)\n"
            "os.waitpid(pid, 0); print(e.generate('a', max_tokens=1).finish_reason)",
            "True\nlength\n",
        ),
    ],
    ids=["unclosed", "in a stream", "fork"],
)
def test_how_a_process_ends(text, wanted):
    program = (
        "import os, persistentkv as pkv\n"
        f"def make(): return pkv.Engine({MODEL!r}, max_seq_len=64, cache_tokens=256)\n{text}\n"
    )
    done = subprocess.run(
        # From 3.12 on Python warns of fork() beside threads: this is what is tried here.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True, text=True, timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, wanted, "")


def test_texts_of_any_split():
    """R4, R5: what is sent never changes; characters and stop strings may be cut anywhere."""
    data = "A 世世ab😸 stop here".encode()
    for cut in range(1, 6):
        stream = _engine_text.TextStream((b"stop", b"here!"))
        parts = [data[i : i + cut] for i in range(0, len(data), cut)]
        out = [stream.add(p) for p in parts[:-1]] + [stream.end(parts[-1], 0)]
        assert "".join(out) == data.decode() and "\ufffd" not in "".join(out)
    stream = _engine_text.TextStream((b"OPQ",))
    assert [stream.add(b"NO"), stream.add(b"P"), stream.end(b"Q", 3)] == ["N", "", ""]
    assert _engine_text.TextStream(()).end("世".encode()[:2], 0) == "\ufffd"


@pytest.mark.parametrize(
    "style, text, content, calls",
    [
        (_engine_text.TAGGED, 'I look.\n<tool_call>\n{"name": "now"}\n</tool_call>\n<tool_call>'
         '{"name": "find", "arguments": {"q": "}"}}</tool_call>', "I look.",
         [("now", {}), ("find", {"q": "}"})]),
        (_engine_text.TAGGED, '<tool_call>{"name": "rm"}</tool_call>',
         '<tool_call>{"name": "rm"}</tool_call>', []),
        (_engine_text.LLAMA, '{"name": "now", "parameters": {}}; {"name": "now"}', "",
         [("now", {}), ("now", {})]),
        (_engine_text.LLAMA, 'See {"name": "now"}', 'See {"name": "now"}', []),
        (_engine_text.MISTRAL, '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "find", '
         '"arguments": "{\\"q\\": 1}"}]', "", [("now", {}), ("find", {"q": 1})]),
        (_engine_text.SHOWN, '{"name": "now", "argum', '{"name": "now", "argum', []),
        (_engine_text.TAGGED, ' Of <tool_call>{"name": "rm"}</tool_call> \n<tool_call>'
         '{"name": "now"}</tool_call>\nlater ',
         'Of <tool_call>{"name": "rm"}</tool_call> \nlater', [("now", {})]),
        (_engine_text.PLAIN, "", "", []),
    ],
)
def test_tool_calls(style, text, content, calls):
    assert _engine_text.tool_calls(text, style, {"now", "find"}) == (content, tuple(calls))
    pick = random.Random(3)
    for _ in range(50):  # as it comes, in any pieces
        stream, shown, at = _engine_text.CallStream(style, {"now", "find"}), "", 0
        while at < len(text) and pick.random() < 0.95:
            step = pick.randrange(6)
            shown += stream.add(text[at : at + step])
            assert content.strip().startswith(shown.strip()), shown
            at += step
        rest, found = stream.end(text[at:])
        assert ((shown + rest).strip(), found) == (content.strip(), tuple(calls))
        if not calls:
            assert shown + rest == text


def test_text_goes_out_before_calls():
    stream = _engine_text.CallStream(_engine_text.TAGGED, {"now"})
    said = [stream.add(t) for t in ("I look", ". ", "<tool", "> is", " a tag <tool_call>", "{")]
    assert said == ["I look", ".", "", " <tool> is", " a tag", ""]
    assert stream.end('"name": "now"}') == ("", (("now", {}),))


DEEP = 100000


@pytest.mark.parametrize(
    "text",
    [
        '{"name": {"first": "now"}}',
        '{"name": ["now"]}',
        '{"name": null}',
        "{" + '"a":{' * DEEP,
        '{"name": "now", "arguments": ' + "[" * DEEP,
        '{"name": "now", "arguments": "' + "[" * DEEP + '"}',
        '{"name": "now", "arguments": {"n": ' + "9" * 5000 + "}}",
    ],
    ids=["object", "array", "null", "deep", "deep arguments", "deep text", "digits"],
)
def test_what_a_model_writes_instead_of_a_call_stays_text(text):
    for style, whole in (
        (_engine_text.LLAMA, text),
        (_engine_text.SHOWN, text),
        (_engine_text.TAGGED, f"<tool_call>{text}</tool_call>"),
        (_engine_text.MISTRAL, f"[TOOL_CALLS] [{text}]"),
    ):
        assert _engine_text.tool_calls(whole, style, {"now"}) == (whole, ())


def test_options_are_the_headers():
    assert "max_rows" in binding.OPTIONS and "cache_tokens" in binding.OPTIONS
    assert not set(binding.SETTINGS) - {name for name, *_ in pkv._abi.Request._fields_}
