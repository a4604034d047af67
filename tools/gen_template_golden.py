#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/chat_templates.json: what Python's jinja2 makes of chat templates.

    pip install jinja2
    tools/fetch_templates.py
    tools/gen_template_golden.py [--shipped .cache/templates]

jinja2 is set up as the transformers library sets it up. Three kinds of cases: the constructs of
tests/data/template_constructs.json (text), the templates of tests/data/chat_templates over
conversations (text), and shipped templates, FOLDER/<name>.jinja (hash of the template and of each
text; those of the present file that are not in FOLDER are kept), and requests as a server gets
them through the same templates. Where jinja2 refuses, the text is null.
"""

import argparse
import datetime
import glob
import json
import os

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
CASES = os.path.join(ROOT, "tests", "data", "template_constructs.json")
GOLDEN = os.path.join(ROOT, "tests", "golden", "chat_templates.json")
NOW = 1785500000  # what strftime_now tells, as UTC


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(form):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(form)

    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return env


def render(template, variables):
    try:
        return environment().from_string(template).render(**variables)
    except Exception:
        return None


def answer(template, view):
    """Of a request: one with tools is not for a template that would not show them."""
    tree = environment().parse(template)
    if view["tools"] and "tools" not in meta.find_undeclared_variables(tree):
        return None
    return render(template, view)


def fnv(text):
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def conversations():
    properties = {
        "city": {"type": "string", "description": "A city, é, 日本"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "n": {"type": "integer", "default": 3},
        "x": {"type": ["number", "null"], "minimum": 1.5e-7},
    }
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Get "the" weather <now> & then',
            "parameters": {"type": "object", "properties": properties, "required": ["city"]},
        },
    }
    empty = {"type": "object", "properties": {}}
    noop = {
        "type": "function",
        "function": {"name": "noop", "description": "", "parameters": empty},
    }
    paris = call(
        "get_weather", {"city": "Paris é", "n": 1.5, "deep": {"a": [1, None, True]}}, id="abcdefghi"
    )
    one, two = (call("get_weather", {"city": c}, id="abcdefgh" + c) for c in "AB")
    odd = "ok <|im_end|> {{ x }} {% if %} </s>\u2028 \\n 'q' \"d\""
    lists = [
        [message("user", "Hi")],
        [
            message("system", " Be brief. "),
            message("user", " 1+1? \n"),
            message("assistant", "2"),
            message("user", odd),
        ],
        [
            message("user", "a"),
            message("assistant", "<think>\nhmm\n</think>\n\nb"),
            message("user", "é日本🎉\u00a0 \t"),
        ],
        [
            message("user", "w?"),
            message("assistant", None, tool_calls=[paris]),
            message("tool", "20 C", tool_call_id="abcdefghi", name="get_weather"),
            message("assistant", "It is 20."),
            message("user", "ta"),
        ],
        [
            message("user", "w?"),
            message("assistant", "", tool_calls=[paris]),
            message("tool", '{"t": 20}', tool_call_id="abcdefghi"),
        ],
        [
            message("user", "w?"),
            message("assistant", "", tool_calls=[one, two]),
            message("tool", "1", tool_call_id="abcdefghA"),
            message("tool", "2", tool_call_id="abcdefghB"),
        ],
        [message("user", [{"type": "text", "text": "one"}, {"type": "text", "text": " two "}])],
        [message("user", "a"), message("user", "b")],
        [message("assistant", "x")],
        [message("system", "only")],
        [message("user", "")],
        [
            message("system", [{"type": "text", "text": "s"}]),
            message("user", [{"type": "image"}, {"type": "text", "text": "see"}]),
            message("assistant", [{"type": "text", "text": "yes"}]),
        ],
        [],
        [
            message("user", "q"),
            message("assistant", "a", reasoning_content="because"),
            message("user", "\n\n x"),
            message("assistant", "b", reasoning_content="\nagain\n"),
        ],
        [
            message("user", "x"),
            message("assistant", "c", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
            message("tool", "<tool_response>r</tool_response>"),
        ],
    ]
    more = [
        {},
        {"tools": [weather, noop]},
        {"tools": None, "enable_thinking": False},
        {"tools": [], "enable_thinking": True},
    ]
    out = []
    for i, messages in enumerate(lists):
        for k, extra in enumerate(more):
            variables = {"messages": messages, "add_generation_prompt": (i + k) % 2 == 0}
            out.append({**variables, "bos_token": "<s>", "eos_token": "</s>", **extra})
    return out


def requests():
    """Requests as clients send them, and what the template has to be shown of each."""
    weather = conversations()[1]["tools"][0]
    spelt = '{"city": "Paris \\u00e9", "n": 1.5, "deep": {"a": [1, null, true]}}'
    first = call("get_weather", spelt, id="abcdefgh1")
    second = call("get_weather", '{"city":"<|im_end|></s>"}', id="abcdefgh2")
    asked = [message("developer", "Use tools."), message("user", "w?", name=None)]
    answered = [
        message("assistant", None, tool_calls=[first], refusal=None),
        message("tool", '{"t": 20, "x": "<|im_end|>\\n"}', tool_call_id="abcdefgh1"),
    ]
    both = [
        {"role": "assistant", "tool_calls": [first, second]},
        message("tool", "1", tool_call_id="abcdefgh1"),
        message("tool", [{"type": "text", "text": "2"}], tool_call_id="abcdefgh2"),
    ]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    broken = [message("assistant", "", tool_calls=[call("f", "{not json", id="abcdefgh3")])]
    settings = {"chat_template_kwargs": {"enable_thinking": False}}
    sent = [
        {"messages": asked, "tools": [weather]},
        {"messages": asked + answered, "tools": [weather], "tool_choice": "auto"},
        {"messages": asked + both, "tools": [weather]},
        {"messages": [message("user", parts)], "tools": None, "temperature": 0},
        {"messages": [message("user", "q"), message("assistant", "a", tool_calls=[])], "tools": []},
        {"messages": [message("user", "x")] + broken},
        {"messages": [message("user", "x")], **settings},
        {"messages": asked + answered + [message("assistant", "20."), message("user", "ta")]},
    ]
    return [(json.dumps(r, ensure_ascii=k % 2 == 0), shown(r)) for k, r in enumerate(sent)]


def shown(request):
    messages = []
    for turn in request["messages"]:
        turn = {k: v for k, v in turn.items() if v is not None}
        if turn["role"] == "developer":
            turn["role"] = "system"
        if isinstance(turn.get("content"), list):
            turn["content"] = "".join(part["text"] for part in turn["content"])
        calls = json.loads(json.dumps(turn.pop("tool_calls", [])))
        for one in calls:
            try:
                one["function"]["arguments"] = json.loads(one["function"]["arguments"])
            except ValueError:
                pass
        turn.setdefault("content", "")
        messages.append({**turn, **({"tool_calls": calls} if calls else {})})
    common = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    extra = request.get("chat_template_kwargs", {})
    return {"messages": messages, "tools": request.get("tools") or None, **common, **extra}


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shipped", help="folder of <name>.jinja")
    args = parser.parse_args()
    talks = conversations()
    shipped = json.loads(read(GOLDEN))["shipped"] if os.path.exists(GOLDEN) else []
    asks = requests()
    if args.shipped:
        for path in sorted(glob.glob(os.path.join(args.shipped, "*.jinja"))):
            source = read(path)
            texts = [render(source, talk) for talk in talks]
            hashes = [None if text is None else fnv(text) for text in texts]
            name = os.path.basename(path)[: -len(".jinja")]
            asked = [answer(source, view) for _, view in asks]
            asked = [None if text is None else fnv(text) for text in asked]
            entry = {"name": name, "hash": fnv(source), "texts": hashes, "requests": asked}
            shipped = [old for old in shipped if old["name"] != name] + [entry]
        shipped.sort(key=lambda entry: entry["name"])
    ours = []
    for path in sorted(glob.glob(os.path.join(ROOT, "tests/data/chat_templates/*.jinja"))):
        source = read(path)
        texts = [render(source, talk) for talk in talks]
        asked = [answer(source, view) for _, view in asks]
        ours.append({"name": os.path.basename(path), "texts": texts, "requests": asked})
    cases = json.loads(read(CASES))
    variables = cases["variables"]
    sources = ["{{ " + e + " }}" for e in cases["expressions"]] + cases["statements"]
    constructs = [{"template": t, "text": render(t, variables)} for t in sources]
    golden = {
        "jinja2": jinja2.__version__,
        "now": NOW,
        "variables": variables,
        "constructs": constructs,
        "conversations": talks,
        "requests": [text for text, _ in asks],
        "templates": ours,
        "shipped": shipped,
    }
    with open(GOLDEN, "w", encoding="utf-8") as file:
        json.dump(golden, file, ensure_ascii=False, indent=1)
        file.write("\n")
    refused = sum(c["text"] is None for c in constructs)
    print(f"{len(constructs)} constructs ({refused} refused), {len(ours)} templates, "
          f"{len(shipped)} shipped, {len(talks)} conversations")


if __name__ == "__main__":
    main()
