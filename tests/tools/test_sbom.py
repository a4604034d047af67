# SPDX-License-Identifier: Apache-2.0
"""The list of materials is whole, and what is fetched has its hash in it."""
import json
import os
import re
import subprocess
import sys
import unittest

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../../.."))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import sbom  # noqa: E402

# How a script gets something from elsewhere.
FETCHES = re.compile(r'-m pip [^\n]*(\\\n[^\n]*)?\binstall\b|"pip",\s+"download"|\bcurl -|'
                     r"\bwget -|urlretrieve")


class Sbom(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        texts = [subprocess.run([sys.executable, os.path.join(ROOT, "tools", "sbom.py")],
                                capture_output=True, text=True, check=True).stdout
                 for _ in range(2)]
        assert texts[0] == texts[1]
        cls.bill = json.loads(texts[0])
        cls.by_name = {c["name"]: c for c in cls.bill["components"]}

    def test_form(self):
        self.assertEqual((self.bill["bomFormat"], self.bill["specVersion"]), ("CycloneDX", "1.5"))
        refs = [c["bom-ref"] for c in self.bill["components"]]
        self.assertEqual(len(refs), len(set(refs)))
        for c in self.bill["components"]:
            self.assertRegex(c["purl"], r"^pkg:(deb/debian|pypi)/[a-z0-9.+-]+(@\S+)?$")
            self.assertIn(c["scope"], ("required", "optional", "excluded"))
        ours = self.bill["dependencies"][0]
        self.assertTrue(set(ours["dependsOn"]) <= set(refs) and len(ours["dependsOn"]) >= 6)

    def test_everything_is_there(self):
        """Whatever ./run installs, CMake links and pip fetches with a pin."""
        script = sbom.read("run")
        for name in set(re.findall(r"^ *(?:case .*\) )?want ([a-z0-9.+-]+) ", script, re.M)):
            self.assertIn(name, self.by_name)
        for path in ("CMakeLists.txt", "tests/CMakeLists.txt", "cmake/python.cmake"):
            for module in re.findall(r"pkg_check_modules\(\w+ .*IMPORTED_TARGET ([\w-]+)[>=.\d]*\)",
                                     sbom.read(path)):
                self.assertIn(module, sbom.MODULES.values())
        for name in sbom.MODULES:
            self.assertIn(name, self.by_name)
        for name, (version, digests) in sbom.pinned().items():
            self.assertEqual(self.by_name[name]["version"], version)
            self.assertTrue(digests, name)
            for digest in digests:
                self.assertRegex(digest, "^[0-9a-f]{64}$")
                self.assertIn(digest, json.dumps(self.by_name[name]))

    def test_no_hash_no_fetch(self):
        """Files of ours that fetch check what they got."""
        known = {"run", "bench/compare_llamacpp.py", "bench/peers_kit.py", "tools/fetch_model.py",
                 "tools/gpu_tests.sh"}  # the last only says how
        found = set()
        for folder, _, names in os.walk(ROOT):
            if re.search(r"/(build|\.cache|\.git)(/|$)", folder + "/"):
                continue
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), ROOT)
                if not path.endswith((".py", ".sh")) and path != "run":
                    continue
                if path.startswith("tests" + os.sep):
                    continue
                if FETCHES.search(sbom.read(path)):
                    found.add(path)
        self.assertEqual(found, known)
        for path in ("run", "bench/peers_kit.py"):
            text = sbom.read(path).replace("\\\n", " ")
            for line in text.splitlines():
                if (re.search(r"pip\b.* (install|download)\b|make_venv \"", line)
                        and not re.search("--require-hashes|--no-index", line)):
                    self.assertNotRegex(line, "==|-r ")  # what it fetches is named elsewhere
            self.assertIn("--require-hashes", text)

    def test_lists_have_hashes(self):
        """A package a line, each with its version and its SHA-256."""
        folder = os.path.join(ROOT, "tests", "python")
        lists = [name for name in os.listdir(folder) if name.endswith(".txt")]
        self.assertIn("vllm-0.24.0.txt", lists)
        for name in lists:
            text = sbom.read("tests/python/" + name).replace("\\\n", " ")
            for line in text.splitlines():
                if line and not line.startswith("#"):
                    self.assertRegex(line, r"^[a-z0-9-]+==\S+( +--hash=sha256:[0-9a-f]{64})+$",
                                     name)


if __name__ == "__main__":
    unittest.main()
