# SPDX-License-Identifier: Apache-2.0
"""Texts of answers as they come, and the calls of tools in them."""

from __future__ import annotations

import codecs
import json
from typing import Any, NamedTuple

# pkv_tool_style
PLAIN, TAGGED, LLAMA, MISTRAL, SHOWN = range(5)
MARKERS = {TAGGED: "<tool_call>", MISTRAL: "[TOOL_CALLS]"}


class TextStream:
    """Bytes of tokens to text that nothing can take back: whole characters, and no beginning of a
    stop string."""

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        self._stops = stops
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> str:
        self._held += data
        kept = max((self._begun(stop) for stop in self._stops), default=0)
        ready = len(self._held) - kept
        text = self._decoder.decode(self._held[:ready])
        self._held = self._held[ready:]
        return text

    def end(self, data: bytes, stop_bytes: int) -> str:
        """The last ones, of which `stop_bytes` at the end belong to a stop string."""
        held = self._held + data
        self._held = b""
        return self._decoder.decode(held[: len(held) - stop_bytes], True)

    def _begun(self, stop: bytes) -> int:
        """How many bytes at the end may be the beginning of `stop`."""
        for count in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:count]):
                return count
        return 0


class ToolCall(NamedTuple):
    """A function that the model calls.

    Attributes:
        name: one of the request's tools.
        arguments: the object that it wrote; {} where it wrote none.
    """

    name: str
    arguments: dict[str, Any]


def _call(value: Any, names: set[str]) -> ToolCall | None:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(name, arguments) if isinstance(arguments, dict) else None


def tool_calls(text: str, style: int, names: set[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """(what is no call, the calls) of a whole answer. Only names of the request's own tools make a
    call; everything else stays text, whatever the model wrote."""
    content, calls = _split(text, style, names)
    return (content.strip() if calls else content), calls


def _split(text: str, style: int, names: set[str]) -> tuple[str, tuple[ToolCall, ...]]:
    marker = MARKERS.get(style)
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    content, at = "", 0
    if marker is None and not text.lstrip().startswith(("{", "[")):
        return text, ()
    while at < len(text):
        begin = text.find(marker, at) if marker else at
        if begin < 0:
            break
        start = begin + len(marker or "")
        while start < len(text) and text[start] in " \t\r\n[":
            start += 1
        found, end = _read_calls(text, start, decoder, names)
        if not found:
            if marker is None:
                break
            content += text[at:start]
            at = start
            continue
        content += text[at:begin]
        calls += found
        at = end
    return content + text[at:], tuple(calls)


class CallStream:
    """Text as it comes to what is no call, and the calls at its end. From where a call may begin on
    everything waits for the end, and so do the blanks before it."""

    def __init__(self, style: int, names: set[str]) -> None:
        self._style, self._names = style, names
        self._marker = MARKERS.get(style)
        self._held = ""
        self._begun = self._plain = self._calling = False

    def add(self, text: str) -> str:
        self._held += text
        if self._calling:
            return ""
        ready = self._ready_marked(self._marker) if self._marker else self._ready_bare()
        text, self._held = self._held[:ready], self._held[ready:]
        self._begun = self._begun or ready > 0
        return text

    def end(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """What is left, and the calls."""
        text = self.add(text)
        rest, calls = _split(self._held, self._style, self._names)
        self._held = ""
        if calls:  # blanks around the whole go, as in `tool_calls`; not those within it
            rest = rest.rstrip() if self._begun else rest.strip()
        return text + rest, calls

    def _ready_bare(self) -> int:
        """A call is the whole answer, or there is none: its first character tells."""
        if not self._plain and self._held.strip():
            self._calling = self._held.lstrip().startswith(("{", "["))
            self._plain = not self._calling
        return len(self._held) if self._plain else 0

    def _ready_marked(self, marker: str) -> int:
        at = self._held.find(marker)
        self._calling = at >= 0
        if at < 0:
            begun = (n for n in range(len(marker) - 1, 0, -1) if self._held.endswith(marker[:n]))
            at = len(self._held) - next(begun, 0)
        return len(self._held[:at].rstrip())


def _read_calls(
    text: str, at: int, decoder: json.JSONDecoder, names: set[str]
) -> tuple[list[ToolCall], int]:
    """Objects from `at` on, one behind another, and where they end."""
    calls: list[ToolCall] = []
    while at < len(text) and text[at] == "{":
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        call = _call(value, names)
        if call is None:
            break
        calls.append(call)
        at = end
        if text.startswith("</tool_call>", _blank(text, at)):
            at = _blank(text, at) + len("</tool_call>")
        while at < len(text) and text[at] in " \t\r\n,;]":
            at += 1
    return calls, at


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
