#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes python/persistentkv/_abi.py, the C ABI for ctypes, from the public headers.

    tools/gen_python_abi.py [--check]

--check compares instead and exits 1 when the file is not what the headers say. Only what the
headers use is understood; anything else is an error here, never a guess.
"""

import argparse
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import csource

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
HEADERS = ["pkv.h", "device.h", "sched.h", "engine.h"]
TARGET = "python/persistentkv/_abi.py"

NUMBERS = {
    "int32_t": "c_int32",
    "uint32_t": "c_uint32",
    "int64_t": "c_int64",
    "uint64_t": "c_uint64",
    "size_t": "c_size_t",
    "float": "c_float",
    "double": "c_double",
    "char": "c_char",
    "int": "c_int",
}

HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""The C ABI of libpkv for ctypes. Written by tools/gen_python_abi.py; do not edit.

Every pointer is a c_void_p: addresses and byref() alike. Sizes and strides are those of pkv.h.
"""

from ctypes import (
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

'''


class Wrong(Exception):
    """A declaration this tool does not understand."""


def load():
    """(code without comments and directives, {macro: integer}) of the headers together."""
    code, macros = "", {}
    for name in HEADERS:
        text = csource.without_comments(csource.read(os.path.join(ROOT, "include/pkv", name)))
        for m in re.finditer(r"^#define (PKV_\w+) +(-?\d+)u?[ \t]*$", text, re.M):
            macros[m[1]] = int(m[2])
        # The status enum is made by a macro from this list.
        for m in re.finditer(r"^ +X\((\w+), (-?\d+), ", text, re.M):
            macros["PKV_" + m[1]] = int(m[2])
        code += re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.M)
    return code, macros


def enums_of(code):
    found, values = [], {}
    for m in re.finditer(r"typedef enum (\w+) \{([^}]*)\} \1;", code):
        found.append(m[1])
        for item in filter(None, (part.strip() for part in m[2].split(","))):
            pair = re.fullmatch(r"(\w+)\s+=\s+(-?\d+)", item)
            if pair:
                values[pair[1]] = int(pair[2])
            elif m[1] != "pkv_status":
                raise Wrong(f"{m[1]}: a value without a number: {item}")
    return found, values


def number(type_name, enums):
    if type_name in enums:
        return "c_int32"
    if re.fullmatch(r"pkv_\w+_fn", type_name):  # a function pointer
        return "c_void_p"
    if type_name in NUMBERS:
        return NUMBERS[type_name]
    raise Wrong(f"unknown type {type_name}")


def element(type_name, enums, structs):
    return class_name(type_name) if type_name in structs else number(type_name, enums)


def fields_of(body, enums, macros, structs):
    """[(field, ctypes expression)]; structs: those that may be fields, declared before."""
    out = []
    for line in filter(None, (part.strip() for part in body.split(";"))):
        line = re.sub(r"\bconst\b", "", line).strip()
        function = re.fullmatch(r"[\w ]+\*? *\(\*(\w+)\)\(.*\)", line, re.S)
        if function:
            out.append((function[1], "c_void_p"))
            continue
        m = re.fullmatch(r"(\w+)\s+(.*)", line, re.S)
        if not m:
            raise Wrong(f"not a field: {line}")
        for name in (part.strip() for part in m[2].split(",")):
            array = re.fullmatch(r"(\w+)\[(\w+)\]", name)
            if name.startswith("*"):
                out.append((name.lstrip("* "), "c_void_p"))
            elif array:
                size = macros.get(array[2], array[2])
                out.append((array[1], f"{element(m[1], enums, structs)} * {int(size)}"))
            else:
                out.append((name, number(m[1], enums)))
    return out


def structs_of(code, enums, macros):
    found = []
    for m in re.finditer(r"typedef struct (\w+) \{((?:[^{}])*)\} \1;", code):
        found.append((m[1], fields_of(m[2], enums, macros, [name for name, _ in found])))
    return found


def argument(text, enums):
    text = re.sub(r"\bconst\b", "", text).strip()
    if "*" in text:
        return "c_char_p" if re.match(r"char\s*\*[^*]*$", text) else "c_void_p"
    type_name = text.split()[0]
    return number(type_name, enums)


def functions_of(code, enums):
    """[(name, result, [arguments])], opaque handles included as pointers."""
    found = []
    for m in re.finditer(r"\bPKV_API\b([^;{]*);", code):
        text = re.sub(r"\bPKV_MUST_CHECK\b", "", " ".join(m[1].split())).strip()
        f = re.fullmatch(r"(.*?)(\w+)\((.*)\)", text)
        if not f:
            raise Wrong(f"not a function: {text}")
        kind = f[1].strip()
        result = "None" if kind == "void" else argument(kind + " x", enums)
        arguments = [] if f[3] == "void" else [argument(a, enums) for a in f[3].split(",")]
        found.append((f[2], result, arguments))
    return found


def class_name(struct):
    return "".join(word.capitalize() for word in struct.removeprefix("pkv_").split("_"))


def generate():
    code, macros = load()
    enums, values = enums_of(code)
    out = [HEAD]
    for name, value in sorted({**macros, **values}.items(), key=lambda item: item[0]):
        out.append(f"{name.removeprefix('PKV_')} = {value}\n")
    for struct, fields in structs_of(code, enums, macros):
        out.append(f"\n\nclass {class_name(struct)}(Structure):\n    _fields_ = [\n")
        out += [f'        ("{name}", {kind}),\n' for name, kind in fields]
        out.append("    ]\n")
    structs = [struct for struct, _ in structs_of(code, enums, macros)]
    out.append("\n\nSTRUCTS = {\n")
    out += [f'    "{struct}": {class_name(struct)},\n' for struct in structs]
    out.append("}\n\n# name: (result, arguments)\nFUNCTIONS = {\n")
    for name, result, arguments in functions_of(code, enums):
        line = f'    "{name}": ({result}, [{", ".join(arguments)}]),\n'
        if len(line) > 100:
            inner = "".join(f"            {a},\n" for a in arguments)
            line = f'    "{name}": (\n        {result},\n        [\n{inner}        ],\n    ),\n'
        out.append(line)
    out.append("}\n")
    return "".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text, path = generate(), os.path.join(ROOT, TARGET)
    if not args.check:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    elif not os.path.isfile(path) or csource.read(path) != text:
        print(f"{TARGET} is not what the headers say: run tools/gen_python_abi.py")
        return 1
    print(f"{TARGET}: {len(text.splitlines())} lines, as the headers say")
    return 0


if __name__ == "__main__":
    sys.exit(main())
