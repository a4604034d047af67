# SPDX-License-Identifier: Apache-2.0
"""Reading the attention files of bench/results (see README.md there): rows, commands, peers."""
import csv

# Reads of ours that older files name under `peers`.
READS = ("null_read", "null_read_us", "plain_read", "plain_read_us")


def read(path):
    """[row, ...]: each a dict by column, "command" the line that made it (None: not said) and
    "line" its number in the file."""
    rows, head, command = [], None, None
    with open(path, encoding="utf-8", newline="") as file:
        for number, text in enumerate(file, 1):
            if text.startswith("#"):
                if text.startswith("# command:"):
                    command = text.partition(":")[2].strip()
                continue
            fields = next(csv.reader([text]), [])
            if not fields:
                continue
            if head is None:
                head = fields
                for column in ("cell", "route", "gpu_us", "peers"):
                    if column not in head:
                        raise ValueError(f"{path}: no column '{column}': not a file of attention")
                continue
            if len(fields) != len(head):
                raise ValueError(f"{path}, line {number}: {len(fields)} fields, the head has "
                                 f"{len(head)}")
            rows.append(dict(zip(head, fields), command=command, line=number))
    if head is None:
        raise ValueError(f"{path} is empty")
    return rows


def number(row, column):
    """The field as a number; None where it is empty or absent."""
    text = row.get(column) or ""
    return float(text) if text else None


def all_peers(row):
    """{name: microseconds} as written; names of an earlier run begin with "anchor:"."""
    pairs = (part.rpartition("=") for part in (row.get("peers") or "").split(";") if part)
    return {name: float(us) for name, _, us in pairs}


def peers(row):
    """The same without reads of ours."""
    return {name: us for name, us in all_peers(row).items() if name not in READS}


def null_us(row):
    """The null read of the row's run, or None."""
    value = number(row, "null_us")
    return value if value is not None else all_peers(row).get(
        "null_read_us", all_peers(row).get("null_read"))
