#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Texts that a random model makes under JSON schemas, checked by jsonschema.

usage: test_schema.py SCHEMA_SAMPLER [--seed N] [--schemas N] [--samples N]

Schemas are random, of every supported keyword; each text has to be JSON, and valid. Schemas with a
keyword that is not supported have to be refused, by that keyword's name.
"""
import argparse
import json
import random
import re
import subprocess
import sys
from datetime import date, datetime, time

import jsonschema

FORMATS = jsonschema.FormatChecker(formats=())
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def in_python(text):
    """A time zone as the standard library of this version reads it."""
    return text.replace("Z", "+00:00")


@FORMATS.checks("date", raises=ValueError)
def check_date(value):
    return not isinstance(value, str) or date.fromisoformat(value) is not None \
        or value.startswith("0000")


@FORMATS.checks("time", raises=ValueError)
def check_time(value):
    value = re.sub(r"\.(\d+)", lambda m: "." + m.group(1).ljust(6, "0"), value) \
        if isinstance(value, str) else value
    return not isinstance(value, str) or time.fromisoformat(in_python(value)).tzinfo is not None


@FORMATS.checks("date-time", raises=ValueError)
def check_date_time(value):
    value = re.sub(r"\.(\d+)", lambda m: "." + m.group(1).ljust(6, "0"), value) \
        if isinstance(value, str) else value
    return not isinstance(value, str) or datetime.fromisoformat(in_python(value)).tzinfo is not None


@FORMATS.checks("uuid")
def check_uuid(value):
    return not isinstance(value, str) or UUID.fullmatch(value) is not None


PATTERNS = [
    "^[a-z]+$", "^\\d{3}-\\d{4}$", "foo|bar", "^(ab|c)*$", "^\\w+@\\w+\\.com$", "^[^0-9]{2,5}$",
    "x.y", "^$", "^a?b+c{2}$", "^(?:\\+\\d{1,3} )?\\d+$", "^[\\w.-]+$", "^\\S+\\s\\S+$",
    "\\\\|\"", "^[\\u00e0-\\u00ff]+$", "^\\D$", "^[^\\s]{1,3}$", "^.{0,4}$", "\\/", "^a|b$",
    "^[^\"\\\\]*$", "[\\]\\-^]",
]
NAMES = ["a", "b", "name", "id", "na", "n\"x", "\u00e9t\u00e9", "tags", "x\\y", "a b"]


class Maker:
    """A random schema; `defs` are names that may be referred to."""

    def __init__(self, rng):
        self.rng = rng
        self.defs = []

    def constant(self):
        r = self.rng
        return r.choice([None, True, False, 0, -3, 12, 1.5, "", "x", "a\"b\\", "\u4e16", [1, "a"],
                         {"k": None}, [], {}])

    def integer(self):
        r, out = self.rng, {"type": "integer"}
        low = r.choice([-1000, -17, -1, 0, 1, 5, 10, 99, 100, 12345, -10 ** 18, 2.5])
        if r.random() < 0.6:
            out[r.choice(["minimum", "exclusiveMinimum"])] = low
        if r.random() < 0.6:
            high = low + r.choice([2, 3, 9, 10, 100, 98765, 10 ** 18])
            out[r.choice(["maximum", "exclusiveMaximum"])] = high
        return out

    def number(self):
        r, out = self.rng, {"type": "number"}
        low = r.choice([-100, -7, -1, 0, 1, 9])
        if r.random() < 0.5:
            out[r.choice(["minimum", "exclusiveMinimum"])] = low
        if r.random() < 0.5:
            out[r.choice(["maximum", "exclusiveMaximum"])] = low + r.choice([1, 2, 10, 101])
        return out

    def string(self):
        r, out = self.rng, {"type": "string"}
        kind = r.randrange(4)
        if kind == 0:
            least = r.randrange(4)
            out["minLength"] = least
            if r.random() < 0.7:
                out["maxLength"] = least + r.randrange(20)
        elif kind == 1:
            out["pattern"] = r.choice(PATTERNS)
        elif kind == 2:
            out["format"] = r.choice(["date", "time", "date-time", "uuid"])
        return out

    def object(self, depth):
        r, out = self.rng, {"type": "object"}
        names = r.sample(NAMES, r.randrange(5))
        if names:
            out["properties"] = {n: self.schema(depth - 1) for n in names}
            out["required"] = [n for n in names if r.random() < 0.5]
            if r.random() < 0.2:
                out["required"].append("other")
        if r.random() < 0.5:
            out["additionalProperties"] = r.choice([True, False, {"type": "integer"}])
            if out["additionalProperties"] is False and "other" in out.get("required", []):
                out["required"].remove("other")
        return out

    def array(self, depth):
        r, out = self.rng, {"type": "array"}
        prefix = r.randrange(3) if r.random() < 0.4 else 0
        if prefix:
            out["prefixItems"] = [self.schema(depth - 1) for _ in range(prefix)]
        if r.random() < 0.7:
            out["items"] = self.schema(depth - 1)
        least = r.randrange(4) if r.random() < 0.5 else 0
        if least:
            out["minItems"] = least
        if r.random() < 0.5:
            out["maxItems"] = least + r.randrange(4)
        return out

    def one_of(self, depth):
        r = self.rng
        if r.random() < 0.5:
            kinds = r.sample(["string", "integer", "null", "boolean", "array"], 3)
            return {"oneOf": [{"type": k} for k in kinds]}
        return {"oneOf": [{"type": "object", "required": ["kind"],
                           "properties": {"kind": {"const": k}, "v": self.schema(depth - 1)}}
                          for k in ("x", "y")]}

    def all_of(self, depth):
        r = self.rng
        if r.random() < 0.5:
            return {"allOf": [{"type": ["integer", "string"], "minimum": 3},
                              {"type": "number", "maximum": 40}]}
        return {"allOf": [self.object(depth - 1) | {"additionalProperties": True},
                          {"type": "object", "properties": {"extra": self.schema(depth - 1)},
                           "required": ["extra"]}]}

    def schema(self, depth):
        r = self.rng
        if depth <= 0 or r.random() < 0.35:
            kind = r.randrange(8)
            if kind == 0:
                return {"enum": [self.constant() for _ in range(1 + r.randrange(4))]}
            if kind == 1:
                return {"const": self.constant()}
            if kind == 2:
                return {"type": r.choice(["null", "boolean"])}
            if kind == 3 and self.defs:
                return {"$ref": "#/$defs/" + r.choice(self.defs)}
            return r.choice([self.integer, self.number, self.string, self.string])()
        kind = r.randrange(9)
        if kind < 3:
            return self.object(depth)
        if kind < 5:
            return self.array(depth)
        if kind == 5:
            return {"anyOf": [self.schema(depth - 1) for _ in range(1 + r.randrange(3))]}
        if kind == 6:
            return self.one_of(depth)
        if kind == 7:
            return self.all_of(depth)
        return {"type": r.sample(["string", "null", "integer", "array"], 2), "minLength": 1,
                "title": "note", "x-more": 1}

    def root(self):
        r = self.rng
        if r.random() < 0.3:  # one that holds itself
            self.defs = ["node"]
            node = {"type": "object",
                    "properties": {"v": self.schema(1), "next": {"anyOf": [
                        {"type": "null"}, {"$ref": "#/$defs/node"}]},
                        "all": {"type": "array", "items": {"$ref": "#/$defs/node"},
                                "maxItems": 1}},
                    "required": ["next"]}
            return {"$defs": {"node": node}, **self.schema(3)} if r.random() < 0.5 else \
                {"$defs": {"node": node}, "$ref": "#/$defs/node"}
        return self.schema(3)


REFUSED = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {}, "then": {}},
    "patternProperties": {"type": "object", "patternProperties": {"^a": {}}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "minProperties": {"type": "object", "minProperties": 1},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {}},
    "multipleOf": {"type": "integer", "multipleOf": 3},
    "format": {"type": "string", "format": "email"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "dependentRequired": {"type": "object", "dependentRequired": {}},
    "$ref": {"$ref": "https://example.com/schema"},
    "keyword 1 here": {"type": "object", "frobnicate": 1},
    "pattern": {"type": "string", "pattern": "^(?=a)b$"},
    "surrogates": {"type": "string", "pattern": "^\\ud83d$"},
    "type must be": {"type": "invalid"},
    "nothing to repeat": {"type": "string", "pattern": "foo**"},
    "class is not closed": {"type": "string", "pattern": "["},
    "left recursive": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    "no text satisfies": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "minItems is above": {"type": "array", "minItems": 3, "maxItems": 2},
    "no integer lies": {"type": "integer", "minimum": 3, "maximum": 2},
    "maxLength may be": {"type": "string", "maxLength": 10 ** 9},
    "too large": {"type": "integer", "maximum": 10 ** 30},
    "enum or const": {"enum": [1, 2], "minimum": 2},
    "prefixItems is": {"type": "array", "items": [{"type": "null"}]},
    "deeper": {"$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(300)}
               | {"300": {"type": "null"}}, "$ref": "#/$defs/0"},
}


def ask(sampler, schemas, samples, seed):
    """For each schema its texts, or (status, message)."""
    lines = "".join(json.dumps(s) + "\n" for s in schemas)
    done = subprocess.run([sampler, str(samples), str(seed)], input=lines.encode(), check=True,
                          stdout=subprocess.PIPE, timeout=500)
    # The texts may hold any character: only \n ends a line of the answer.
    answers = iter(done.stdout.decode().split("\n"))
    for _ in schemas:
        word, rest = next(answers).split(" ", 1)
        if word == "refused":
            yield tuple(rest.split(" ", 1))
        else:
            yield [json.loads(next(answers)) for _ in range(int(rest))]


def check_texts(schema, texts):
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    for text in texts:
        try:
            validator.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"schema {json.dumps(schema)}\ntext {text!r}\n{error}", file=sys.stderr)
            return False
    return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("sampler")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemas", type=int, default=600)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    schemas = [Maker(random.Random(options.seed * 100003 + i)).root()
               for i in range(options.schemas)]
    bad = valid = refused = 0
    for schema, answer in zip(schemas, ask(options.sampler, schemas, options.samples,
                                           options.seed)):
        if isinstance(answer, tuple):
            refused += 1
            # A random schema may be one that nothing satisfies.
            if "no text satisfies" not in answer[1] and "lies between" not in answer[1] and \
                    "asks for more than" not in answer[1]:
                print(f"refused: {answer[1]}: {json.dumps(schema)}", file=sys.stderr)
                bad += 1
            continue
        valid += len(answer)
        bad += not check_texts(schema, answer)
    for (name, schema), answer in zip(REFUSED.items(), ask(options.sampler, REFUSED.values(), 1,
                                                           1)):
        if not isinstance(answer, tuple) or name not in answer[1]:
            print(f"{name}: {answer!r}", file=sys.stderr)
            bad += 1
    print(f"{options.schemas} schemas, {refused} of them refused, {valid} texts valid, "
          f"{len(REFUSED)} others refused by name, {bad} bad")
    return 1 if bad or valid < options.schemas * options.samples // 2 else 0


if __name__ == "__main__":
    sys.exit(main())
