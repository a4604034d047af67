# SPDX-License-Identifier: Apache-2.0
"""Texts of answers as they come, and the calls of tools in whole ones."""

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
    rest = text[at:]
    return (content + rest if not calls else (content + rest).strip()), tuple(calls)


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
