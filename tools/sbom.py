#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""sbom.py: packaging/materials.txt as a bill of materials, CycloneDX 1.5 in JSON, on stdout.

Versions and SHA-256 of what is fetched are those that the fetching scripts check; of libraries from
Debian, the version is that of this machine's pkg-config, where it has them. What cannot be had is
left out, never guessed. The same tree on the same machine gives the same bytes.
"""
import json
import os
import re
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../.."))
sys.path[:0] = [os.path.join(ROOT, "tools"), os.path.join(ROOT, "bench")]
sys.dont_write_bytecode = True
import compare_llamacpp  # noqa: E402
import fetch_model  # noqa: E402

USES = {"linked": "required", "python": "required", "build": "excluded", "test": "excluded",
        "lint": "excluded", "bench": "excluded", "model": "excluded"}
MODULES = {"libxxhash-dev": "libxxhash", "libpcre2-dev": "libpcre2-8",
           "libutf8proc-dev": "libutf8proc", "libjansson-dev": "jansson",
           "libmicrohttpd-dev": "libmicrohttpd", "libcmocka-dev": "cmocka"}


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def materials():
    """(use, from, name, license) of each line."""
    rows = []
    for number, line in enumerate(read("packaging/materials.txt").splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 4 or words[0] not in USES or words[1] not in ("deb", "pip"):
            sys.exit(f"packaging/materials.txt:{number}: not use, from, name and license: {line}")
        rows.append(tuple(words))
    return rows


def pinned():
    """{package of PyPI's: (version, [SHA-256])} as the fetching scripts have them."""
    found = {}
    text = read("tests/python/requirements.txt").replace("\\\n", " ")
    for name, version, rest in re.findall(r"^([\w-]+)==(\S+)(.*)$", text, re.M):
        found[name] = (version, re.findall(r"sha256:([0-9a-f]{64})", rest))
    found[fetch_model.PACKAGE] = (fetch_model.VERSION, [fetch_model.WHEEL_SHA256])
    for i, digest in enumerate(fetch_model.GEMMA_WHEELS_SHA256, 1):
        found[f"{fetch_model.GEMMA_PACKAGE}{i}"] = (fetch_model.GEMMA_VERSION, [digest])
    found[compare_llamacpp.PACKAGE] = (compare_llamacpp.VERSION, [compare_llamacpp.ARCHIVE_SHA256])
    return found


def version_here(name):
    if name not in MODULES:
        return None
    try:
        done = subprocess.run(["pkg-config", "--modversion", MODULES[name]], capture_output=True,
                              text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def component(row, pins):
    use, source, name, license_id = row
    version, digests = pins.get(name, (None, [])) if source == "pip" else (version_here(name), [])
    url = f"pkg:{'deb/debian' if source == 'deb' else 'pypi'}/{name.replace('_', '-')}"
    if version:
        url += "@" + version
    entry = {"type": {"model": "machine-learning-model", "linked": "library",
                      "python": "library"}.get(use, "application"),
             "bom-ref": url, "name": name, "scope": USES[use], "purl": url,
             "licenses": [{"license": {"name": license_id} if license_id.startswith("LicenseRef")
                           else {"id": license_id}}],
             "properties": [{"name": "persistentkv:use", "value": use}]}
    if version:
        entry["version"] = version
    if len(digests) == 1:
        entry["hashes"] = [{"alg": "SHA-256", "content": digests[0]}]
    else:  # one a wheel
        entry["properties"] += [{"name": "persistentkv:sha256", "value": d} for d in digests]
    return entry


def bill():
    version = re.search(r"project\(persistentkv VERSION ([0-9.]+)", read("CMakeLists.txt"))[1]
    pins = pinned()
    components = [component(row, pins) for row in materials()]
    ours = f"pkg:generic/persistentkv@{version}"
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
            "metadata": {"component": {
                "type": "application", "bom-ref": ours, "name": "persistentkv",
                "version": version, "purl": ours,
                "licenses": [{"license": {"id": "Apache-2.0"}}]}},
            "components": components,
            "dependencies": [{"ref": ours, "dependsOn": [
                c["bom-ref"] for c in components if c["scope"] == "required"]}]}


if __name__ == "__main__":
    print(json.dumps(bill(), indent=2))
