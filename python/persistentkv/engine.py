# SPDX-License-Identifier: Apache-2.0
"""A model that answers many requests at once: the engine of pkv/engine.h.

    with pkv.Engine("model.gguf") as engine:
        print(engine.generate("Once upon a time", max_tokens=32).text)
        for piece in engine.stream("A haiku about rain:", temperature=0.8, seed=7):
            print(piece.text, end="", flush=True)
        answer = engine.chat([{"role": "user", "content": "Name a colour, as JSON."}],
                             schema={"type": "object", "properties": {"colour": {"type": "string"}},
                                     "required": ["colour"]}, max_tokens=40)

Any number of threads may use one engine: their requests run in one batch, and read what their
prompts share once. The interpreter's lock is released while the engine computes.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from . import _abi
from ._engine_core import Core, Event, Live
from ._engine_lib import engine_lib
from ._engine_text import MARKERS, CallStream, TextStream, ToolCall, tool_calls
from ._lib import sized
from ._options import index_of, set_options
from .errors import InvalidArgument
from .sched import ORDERS, POLICIES

FINISH_REASONS = ("", "stop", "length", "cancelled", "error")
WEIGHTS = ("auto", "mapped", "copied")  # as pkv_weights counts them
KV_TYPES = {
    "f32": _abi.DTYPE_F32,
    "f16": _abi.DTYPE_F16,
    "bf16": _abi.DTYPE_BF16,
    "fp8": _abi.DTYPE_FP8_E4M3,
}
UNBOUNDED = 2**31 - 1

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class Token(NamedTuple):
    """A token with the model's own log-probability, before temperature; None where it was not asked
    for, and for the first of an echoed prompt.

    Attributes:
        top: the best ones, (token, logprob), best first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Choice(NamedTuple):
    """One answer.

    Attributes:
        text: without the stop string that ended it and without control tokens; with `echo` the
            prompt's text comes first.
        tokens: that were sampled; with `echo` the prompt's come first.
        finish_reason: "stop" (the model's end, a stop string, or a constraint that is complete),
            "length", "cancelled" or "error" (logits that are not finite).
        stop: the stop string that ended it.
        tool_calls: of a chat with tools; what is no call stays in `text`.
    """

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    stop: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class Completion(NamedTuple):
    """The answers to one prompt.

    Attributes:
        cached_tokens: of the prompt, whose K and V were there already.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls


class Piece(NamedTuple):
    """What is new of one answer: whole characters, nothing that a stop string could take back.

    Attributes:
        token: the one that came, or None where only held text comes.
        finish_reason: "" as long as it goes on.
        tool_calls: of a chat with tools, all with the last piece.
    """

    index: int
    text: str
    token: Token | None
    finish_reason: str
    tool_calls: tuple[ToolCall, ...] = ()


class ModelInfo(NamedTuple):
    architecture: str
    name: str
    layers: int
    width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    parameters: int
    weight_bytes: int
    bos: int
    eos: int


# Set by name from Engine's keyword arguments; the others of the struct have their own.
OPTIONS = tuple(
    name
    for name, _ in _abi.EngineOptions._fields_
    if name not in ("struct_size", "device", "kv_dtype", "order", "admission", "allocator")
)
# 0 is not their default.
_ON = ("batch_invariant", "prefix_sharing", "prefix_cache")


class Engine:
    """A model, its cache of keys and values, and the thread that computes.

    Args:
        model: a GGUF file (of several: any) or a folder of safetensors.
        device: "cpu" or "cuda".
        kv_dtype: elements of the cache: "f16", "f32", "bf16" or "fp8".
        weights: "mapped": in the system's cache of the file; "copied": on huge pages, which a CPU
            reads faster; "auto": copied for a CPU where they fill no more than half of free memory.
        order, admission: who runs next and whether (`Scheduler`): "fcfs" and "always" by default.
        **options: any other field of pkv_engine_options by its name (`OPTIONS` lists them), as
            threads, cache_tokens, max_rows, max_seq_len, page_tokens; 0 means the default, but for
            batch_invariant, prefix_sharing and prefix_cache, which are 1 unless they are set to 0.

    Raises:
        InvalidArgument: the file is no such model (the text names the key or tensor), or an option
            that is not possible.
        NotSupported: a model or device that this build does not know, or a package without engine.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "cpu",
        kv_dtype: str = "f16",
        weights: str = "auto",
        order: str = "fcfs",
        admission: str = "always",
        **options: float,
    ) -> None:
        self._lib = engine_lib()
        given = sized(_abi.EngineOptions)
        index_of(device, ("cpu", "cuda"), "device")
        index_of(kv_dtype, tuple(KV_TYPES), "kv_dtype")
        given.order = index_of(order, ORDERS, "order")
        given.admission = index_of(admission, POLICIES, "admission")
        given.device = _abi.DEVICE_CUDA if device == "cuda" else _abi.DEVICE_CPU
        given.kv_dtype = KV_TYPES[kv_dtype]
        for name in _ON:
            setattr(given, name, 1)
        if device == "cuda":
            given.batch_invariant = 0
        set_options(given, options, OPTIONS)
        opening = sized(_abi.ModelOptions)
        opening.weights = index_of(weights, WEIGHTS, "weights")
        if weights == "auto" and device == "cuda":
            opening.weights = WEIGHTS.index("mapped")
        handle = ctypes.c_void_p()
        path = os.fsencode(os.fspath(model))
        self._lib.call("pkv_model_open", ctypes.byref(handle), path, ctypes.byref(opening))
        self._core = self._start(handle.value or 0, given)
        # Without a lock: threads that fill one entry at once write the same.
        self._pieces: dict[int, bytes] = {}
        # Holds nothing that leads back here: an engine nobody has any more ends its thread.
        self._finalizer = weakref.finalize(self, self._core.stop)

    def _start(self, model: int, given: Any) -> Core:
        engine = ctypes.c_void_p()
        try:
            self._lib.call(
                "pkv_engine_create", ctypes.byref(engine), model, ctypes.byref(given)
            )
            rows = given.max_rows or 32
            chunk = given.prefill_chunk or 2048
            return Core(self._lib, model, engine.value or 0, rows + chunk)
        except BaseException:  # as where no more threads can be started
            self._lib.function("pkv_engine_destroy")(engine)
            self._lib.function("pkv_model_close")(model)
            raise

    # --- its life ------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends what runs (WrongState in the threads that wait) and frees everything."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- text ----------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        info = sized(_abi.ModelInfo)
        with self._core.using() as model:
            self._lib.function("pkv_model_get_info")(ctypes.byref(info), model)
        values = (getattr(info, name) for name in ModelInfo._fields)
        return ModelInfo(
            *(v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values)
        )

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids.

        Args:
            add_special: with the tokens that the model's prompts begin (end) with.
            parse_special: text that spells a control token becomes that token.
        """
        flags = _abi.TEXT_ADD_SPECIAL * add_special | _abi.TEXT_PARSE_SPECIAL * parse_special
        data = text.encode("utf-8", "surrogatepass")
        return self._ids("pkv_tokenize", data, flags)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens; control tokens are shown where `special` says so."""
        return b"".join(self._piece(t, special) for t in tokens).decode("utf-8", "replace")

    def chat_tokens(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation: bool = True, **template: Any
    ) -> list[int]:
        """A conversation in the model's chat format, as OpenAI's API has it.

        Raises:
            NotSupported: the model has no chat template, or its template shows no tools.
            InvalidArgument: the template refuses this conversation, in its own words.
        """
        whole: dict[str, Any] = {"messages": list(messages)}
        if tools:
            whole["tools"] = list(tools)
        if template:
            whole["chat_template_kwargs"] = template
        data = _json(whole, "messages")
        return self._ids("pkv_chat_tokenize_json", data, int(add_generation))

    def _ids(self, function: str, data: bytes, last: int) -> list[int]:
        count, capacity = ctypes.c_size_t(), len(data) // 2 + 64
        while True:
            ids = (ctypes.c_int32 * capacity)()
            error = _abi.Error()
            with self._core.using() as model:
                status = self._lib.function(function)(
                    ids, capacity, ctypes.byref(count), model, data, len(data), last,
                    ctypes.byref(error),
                )
            if status == _abi.OK:
                return ids[: count.value]
            if status != _abi.E_TOO_SMALL or count.value <= capacity:
                raise self._lib.failure(status, error)
            capacity = count.value

    def _piece(self, token: int, special: bool = False) -> bytes:
        key = token * 2 + special
        found = self._pieces.get(key)
        if found is None:
            text, size = ctypes.c_void_p(), ctypes.c_size_t()
            with self._core.using() as model:
                self._lib.call(
                    "pkv_token_text", ctypes.byref(text), ctypes.byref(size), model, token,
                    int(special),
                )
                found = ctypes.string_at(text.value, size.value) if size.value else b""
            self._pieces[key] = found
        return found

    # --- generating ----------------------------------------------------------------------------

    @overload
    def generate(self, prompt: Prompt, **settings: Any) -> Completion: ...

    @overload
    def generate(self, prompt: list[Prompt], **settings: Any) -> list[Completion]: ...

    def generate(self, prompt: Any, **settings: Any) -> Any:
        """The answer to a prompt (text or token ids), or those to a list of prompts.

        Args:
            max_tokens: sampled at most; None = until the context is full. 0 with echo scores the
                prompt.
            temperature, top_k, top_p, min_p: 0 = greedy; 0 = all.
            seed: the same seed gives the same text, whatever else runs.
            n: answers to each prompt.
            repetition_penalty, presence_penalty, frequency_penalty, logit_bias: of OpenAI's API;
                logit_bias is {token: -100 .. 100}.
            stop: a text, or up to 16.
            min_tokens, ignore_end: neither end nor stop string before so many; no end at all.
            logprobs, top_logprobs: log-probabilities of the model; of the 0 .. 20 best.
            echo: the prompt's tokens come first.
            json, schema, grammar: the text has to be a JSON object, satisfy a JSON schema (a dict,
                or its text), or a GBNF grammar. One of them.
            cache_salt, priority: only equal salts share prompts; lower is more urgent.

        Raises:
            OutOfRange: a setting that is not possible, a prompt that leaves no room for an answer,
                or more requests than max_requests.
        """
        if _is_prompt(prompt):
            return self._whole(self._begin(self._tokens(prompt), settings))
        if not isinstance(prompt, (list, tuple)):
            raise InvalidArgument(f"prompt is a {type(prompt).__name__}, wanted text or token ids")
        runs: list[_Run] = []
        try:
            for one in prompt:
                runs.append(self._begin(self._tokens(one), dict(settings)))
            return [self._whole(run) for run in runs]
        except BaseException:
            for run in runs:
                run.leave()
            raise

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Piece]:
        """The answer as it comes; settings as for `generate`. A stream that is left (closed, or not
        held any more) is cancelled."""
        return self._begin(self._tokens(prompt), settings).pieces()

    def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None, **settings: Any
    ) -> Completion:
        """The assistant's next turn. Settings as for `generate`; `tools` as OpenAI's API has them,
        `template` are settings of the chat template (enable_thinking)."""
        # Before it begins: nothing of these may fail once there is an answer.
        tools, style = _tool_list(tools), self._tool_style()
        names = {tool["function"]["name"] for tool in tools}
        done = self._whole(self._begin_chat(messages, tools, template, settings))
        if not names:
            return done
        return done._replace(choices=tuple(_with_calls(c, style, names) for c in done.choices))

    def stream_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None, **settings: Any
    ) -> Iterator[Piece]:
        """The same as it comes; from where a tool's call may begin, the text waits for the end."""
        tools, style = _tool_list(tools), self._tool_style()
        names = {tool["function"]["name"] for tool in tools}
        run = self._begin_chat(messages, tools, template, settings)
        return _pieces_with_calls(run, style, names) if names else run.pieces()

    def _tool_style(self) -> int:
        with self._core.using() as model:
            return self._lib.function("pkv_model_tool_style")(model)

    def _begin_chat(
        self, messages: Sequence[Message], tools: list[Mapping[str, Any]],
        template: Mapping[str, Any] | None, settings: dict[str, Any]
    ) -> _Run:
        ids = self.chat_tokens(messages, tools=tools, **dict(template or {}))
        style = self._tool_style()
        shown = -1
        if tools and style in MARKERS:
            marker = self.tokenize(MARKERS[style], add_special=False, parse_special=True)
            shown = marker[0] if len(marker) == 1 else -1
        return self._begin(np.array(ids, np.int32), settings, shown)

    def _tokens(self, prompt: Any) -> np.ndarray:
        if isinstance(prompt, str):
            return np.array(self.tokenize(prompt), np.int32)
        try:
            ids = np.asarray(prompt, np.int32)
        except (TypeError, ValueError, OverflowError) as e:
            raise InvalidArgument(f"a prompt must be text or token ids: {e}") from None
        if ids.ndim != 1:
            raise InvalidArgument(f"a prompt has shape {ids.shape}, wanted one dimension")
        return np.ascontiguousarray(ids)

    def _begin(self, ids: np.ndarray, settings: dict[str, Any], shown: int = -1) -> _Run:
        self._core.check()
        made = _Request(self._core, ids, settings)
        live = Live(max(1, made.struct.n))

        def submit() -> None:
            try:
                self._core.submit(live, made.struct)
            finally:
                made.free()

        try:
            self._core.ask(submit)
            return _Run(self, live, made, len(ids), shown)
        except BaseException:  # Ctrl-C while it waits: what was asked for still happens
            _leave(self._core, live)
            raise

    def _whole(self, run: _Run) -> Completion:
        texts = [""] * run.choices
        tokens: list[list[Token]] = [[] for _ in texts]
        ends = [""] * run.choices
        for piece in run.pieces():
            texts[piece.index] += piece.text
            if piece.token is not None:
                tokens[piece.index].append(piece.token)
            ends[piece.index] = piece.finish_reason or ends[piece.index]
        choices = tuple(
            Choice(i, texts[i], tuple(tokens[i]), ends[i], run.stops_met[i])
            for i in range(run.choices)
        )
        return Completion(choices, run.prompt_tokens, run.cached_tokens)

    # --- the cache, figures --------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, Any]:
        """pkv_engine_stats by name, after the latest step."""

        def read() -> dict[str, Any]:
            stats = sized(_abi.EngineStats)
            self._lib.function("pkv_engine_get_stats")(ctypes.byref(stats), self._core.engine)
            values = {name: getattr(stats, name) for name, *_ in stats._fields_}
            del values["struct_size"]
            values["kv_bytes_route"] = tuple(values["kv_bytes_route"])
            return values

        return self._core.ask(read)

    def clear_cache(self) -> None:
        """Forgets prompts that no request uses."""
        clear = self._lib.function("pkv_engine_clear_cache")
        self._core.ask(lambda: clear(self._core.engine))

    def save_cache(self, path: str | os.PathLike[str]) -> int:
        """Writes the prefix cache to a file; returns its pages. Not while requests run."""
        return self._cache_file("pkv_engine_save_cache", path)

    def load_cache(self, path: str | os.PathLike[str]) -> int:
        """Takes the prefix cache from a file that an equal engine wrote; returns its pages.

        Raises:
            InvalidArgument: the file is damaged, or of another model or setting.
        """
        return self._cache_file("pkv_engine_load_cache", path)

    def _cache_file(self, function: str, path: str | os.PathLike[str]) -> int:
        pages, name = ctypes.c_int64(), os.fsencode(os.fspath(path))
        self._core.ask(
            lambda: self._lib.call(function, ctypes.byref(pages), self._core.engine, name)
        )
        return pages.value


def _is_prompt(value: Any) -> bool:
    """Text, or token ids; else a list of those."""
    if isinstance(value, (str, np.ndarray)):
        return True
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and isinstance(value[0], (int, np.integer))
    )


def _tool_list(tools: Any) -> list[Mapping[str, Any]]:
    """A copy, each with a function that has a name."""
    if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Iterable)):
        raise InvalidArgument(f"tools is a {type(tools).__name__}, wanted a list of tools")
    copied = list(tools or ())
    for i, tool in enumerate(copied):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise InvalidArgument(f"tools[{i}] has no function with a name")
    return copied


def _with_calls(choice: Choice, style: int, names: set[str]) -> Choice:
    text, calls = tool_calls(choice.text, style, names)
    return choice._replace(text=text, tool_calls=calls) if calls else choice


def _pieces_with_calls(run: _Run, style: int, names: set[str]) -> Iterator[Piece]:
    pieces = run.pieces()
    streams = [CallStream(style, names) for _ in range(run.choices)]

    def read() -> Iterator[Piece]:
        try:
            for piece in pieces:
                stream = streams[piece.index]
                if piece.finish_reason:
                    text, calls = stream.end(piece.text)
                    yield piece._replace(text=text, tool_calls=calls)
                else:
                    yield piece._replace(text=stream.add(piece.text))
        finally:
            pieces.close()

    return read()


def _json(value: Any, name: str) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError) as e:
        raise InvalidArgument(f"{name} cannot be written as JSON: {e}") from None


# Fields of pkv_request that are set by their names.
SETTINGS = (
    *("max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs", "top_logprobs", "echo"),
    *("ignore_end", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "n", "cache_salt", "priority"),
)
OTHER_SETTINGS = ("stop", "logit_bias", "json", "schema", "grammar")


class _Request:
    """A pkv_request with what it points to, until it is submitted."""

    def __init__(self, core: Core, ids: np.ndarray, settings: dict[str, Any]) -> None:
        self._core, self._ids = core, ids
        self.struct = sized(_abi.Request)
        self.struct.prompt = ids.ctypes.data
        self.struct.prompt_tokens = len(ids)
        plain = {k: v for k, v in settings.items() if k not in OTHER_SETTINGS}
        plain["max_tokens"] = UNBOUNDED if plain.get("max_tokens") is None else plain["max_tokens"]
        for name in plain:
            if name not in SETTINGS:
                known = ", ".join((*SETTINGS, *OTHER_SETTINGS))
                raise InvalidArgument(f"no setting is called {name!r}: {known}")
        set_options(self.struct, plain, SETTINGS)
        self._set_stops(settings.get("stop"))
        self._set_bias(settings.get("logit_bias"))
        self._set_constraint(settings)

    def _set_stops(self, stop: Any) -> None:
        texts = [stop] if isinstance(stop, str) else stop or ()
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise InvalidArgument("stop must be a text, or a list of texts")
        self.stops = tuple(text.encode("utf-8", "surrogatepass") for text in texts)
        if any(b"\0" in text for text in self.stops):
            raise InvalidArgument("a stop string must not hold a zero byte")
        self._stop_array = (ctypes.c_char_p * len(self.stops))(*self.stops)
        if self.stops:
            self.struct.stop = ctypes.addressof(self._stop_array)
            self.struct.stop_count = len(self.stops)

    def _set_bias(self, bias: Any) -> None:
        if not bias:
            return
        try:
            pairs = [(int(token), float(value)) for token, value in dict(bias).items()]
        except (TypeError, ValueError):
            raise InvalidArgument("logit_bias must be {token: bias}") from None
        if not all(-(2**31) <= token < 2**31 and math.isfinite(value) for token, value in pairs):
            raise InvalidArgument("logit_bias holds a token or bias that is no such number")
        self._bias_array = (_abi.LogitBias * len(pairs))(*pairs)
        self.struct.logit_bias = ctypes.addressof(self._bias_array)
        self.struct.logit_bias_count = len(pairs)

    def _set_constraint(self, settings: dict[str, Any]) -> None:
        asked = [name for name in ("json", "schema", "grammar") if settings.get(name)]
        if not asked:
            return
        if len(asked) > 1:
            raise InvalidArgument(f"{' and '.join(asked)} cannot be asked for at once")
        kind, value = asked[0], settings[asked[0]]
        text = b""
        if kind != "json":
            text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else b""
            if not isinstance(value, str):
                if kind == "grammar":
                    raise InvalidArgument("grammar must be a text")
                text = _json(value, "schema")
        with self._core.using():
            self.struct.constraint = self._core.constraints.share(kind, text)

    def free(self) -> None:
        """On the engine's thread, which has its own share of the constraint by now."""
        if self.struct.constraint:
            self._core.constraints.give_back(self.struct.constraint)
            self.struct.constraint = None


class _Run:
    """A request on its way: its events become pieces of text in the thread that waits for them."""

    def __init__(
        self, engine: Engine, live: Live, request: _Request, prompt_tokens: int, shown: int
    ) -> None:
        self._engine, self._live, self._shown = engine, live, shown
        self.choices = live.choices
        self.prompt_tokens, self.cached_tokens = prompt_tokens, 0
        self._stop_texts = request.stops
        self.stops_met: list[str | None] = [None] * self.choices
        self._streams = [TextStream(request.stops) for _ in range(self.choices)]
        self._left = self.choices
        # A stream that is never begun has no generator that could end: this ends it.
        self._finalizer = weakref.finalize(self, _leave, engine._core, live)

    def leave(self) -> None:
        self._finalizer()

    def pieces(self) -> Generator[Piece, None, None]:
        try:
            while self._left > 0:
                event = self._live.events.get()
                if isinstance(event, BaseException):
                    self._left = 0
                    raise event
                yield self._piece(event)
        finally:
            if self._left > 0:
                self.leave()
            else:
                self._finalizer.detach()

    def _piece(self, event: Event) -> Piece:
        stream = self._streams[event.choice]
        data = b""
        token = None
        if event.token >= 0:
            data = self._engine._piece(event.token, event.token == self._shown)
            logprob = None if math.isnan(event.logprob) else event.logprob
            token = Token(event.token, logprob, event.top)
        self.cached_tokens = event.cached_tokens
        if not event.finish:
            return Piece(event.choice, stream.add(data), token, "")
        self._left -= 1
        if event.stop_index >= 0:
            met = self._stop_texts[event.stop_index]
            self.stops_met[event.choice] = met.decode("utf-8", "surrogatepass")
        text = stream.end(data, event.stop_bytes)
        return Piece(event.choice, text, token, FINISH_REASONS[event.finish])


def _leave(core: Core, live: Live) -> None:
    core.tell(lambda: core.cancel(live))
