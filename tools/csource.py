# SPDX-License-Identifier: Apache-2.0
"""What the checkers know about C text: comments, strings, includes and function bodies.

A lexer of one regular expression, no preprocessor. Positions and line numbers never change: what is
blanked out becomes spaces.
"""

import os
import re

_TOKEN = re.compile(
    r'//(?:[^\n\\]|\\.|\\\n)*|/\*.*?\*/|"(?:\\.|\\\n|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include\b[ \t]*(.*)$', re.M)
_NAME = re.compile(r"\b(?!__attribute__\b|__global__\b|__launch_bounds__\b)([A-Za-z_]\w*)\s*\(")


def _blank(text):
    return re.sub(r"[^\n]", " ", text)


def read(path):
    with open(path, encoding="utf-8", errors="replace", newline="") as f:
        return f.read()


def without_comments(text):
    """The text with comments blanked; strings stay (include lines need them)."""
    return _TOKEN.sub(lambda m: _blank(m[0]) if m[0][0] == "/" else m[0], text)


def code_only(text):
    """The text with comments and the contents of strings and characters blanked."""

    def one(m):
        s = m[0]
        return _blank(s) if s[0] == "/" else s[0] + _blank(s[1:-1]) + s[-1]

    return _TOKEN.sub(one, text)


def comments_only(text):
    """The comments, everything else blanked."""
    out, end = [], 0
    for m in _TOKEN.finditer(text):
        if m[0][0] == "/":
            out += [_blank(text[end : m.start()]), m[0]]
            end = m.end()
    return "".join(out) + _blank(text[end:])


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def includes(text):
    """[(line, kind, name)]: kind is '"', '<', or '?' for anything computed."""
    found = []
    for m in _INCLUDE.finditer(without_comments(text)):
        rest = m[1].strip()
        quoted = re.fullmatch(r'"([^"]*)"', rest)
        angled = re.fullmatch(r"<([^>]*)>", rest)
        line = line_of(text, m.start())
        if quoted:
            found.append((line, '"', quoted[1]))
        elif angled:
            found.append((line, "<", angled[1]))
        else:
            found.append((line, "?", rest))
    return found


def _function_name(header):
    """The name when `header`, the text before a '{' at file level, starts a function."""
    header = re.sub(r"__attribute__\s*\(\(.*?\)\)\s*$", "", header.strip(), flags=re.S).strip()
    if not header.endswith(")") or "=" in header:
        return None
    match = _NAME.search(header)
    return match[1] if match else None


def functions(text):
    """[(name, first line, lines)] of every function body, braces included."""
    lines = code_only(text).split("\n")
    found, depth, header = [], 0, ""
    branches, name, start, continued = [], None, 0, False
    for number, line in enumerate(lines, 1):
        directive = re.match(r"\s*#\s*(\w*)", line)
        if continued or directive:
            word = directive[1] if directive and not continued else ""
            continued = line.rstrip().endswith("\\")
            if word in ("if", "ifdef", "ifndef"):
                branches.append(depth)
            elif word in ("else", "elif") and branches:
                depth = branches[-1]
            elif word == "endif" and branches:
                branches.pop()
            continue
        for c in line + "\n":
            if c == "{":
                if depth == 0 and re.search(r'\bextern\s*"\s*"\s*$', header):
                    header = ""
                    continue
                if depth == 0:
                    name, start = _function_name(header), number
                depth += 1
            elif c == "}":
                depth = max(depth - 1, 0)
                if depth == 0:
                    if name:
                        found.append((name, start, number - start + 1))
                    name, header = None, ""
            elif depth == 0:
                header = "" if c == ";" else header + c
    return found


def walk(root, folders, endings):
    """Files below root/folder with one of the endings, as sorted relative paths."""
    found = []
    for folder in folders:
        for where, names, files in os.walk(os.path.join(root, folder)):
            names[:] = sorted(n for n in names if not n.startswith(".") and n != "__pycache__")
            found += [
                os.path.relpath(os.path.join(where, f), root)
                for f in files
                if f.endswith(endings)
            ]
    return sorted(found)
