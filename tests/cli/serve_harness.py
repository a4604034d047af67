# SPDX-License-Identifier: Apache-2.0
"""A `pkv serve` of a test's own on 127.0.0.1. The test's first two arguments are PKV and MODEL.

Any test fails whose server logged a warning, an error, or something that is no record of the log,
a sanitizer's report among it."""
import atexit
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

PKV, MODEL = sys.argv[1], sys.argv[2]
HAVE_MODEL = os.access(MODEL, os.R_OK)
LIMIT_S = 300
ARGS = ["--ctx", "512", "--cache", "4096", "--requests", "8", "--header-timeout", "2",
        "--body-timeout", "2", "--idle-timeout", "3", "--max-body", "65536"]
RECORD = re.compile(r"[-0-9]{10}T[:0-9]{8}\.\d{3}Z (error|warn|info|debug) \w+: ")


def check(good, what):
    """An assert that python -O keeps; `what`, or what calling it gives, says what went wrong."""
    if not good:
        raise AssertionError(what() if callable(what) else what)


class Server:
    """One running server; what it wrote to stderr is checked at the end."""

    def __init__(self, *args, ready=True, key=None, model=MODEL, env=None):
        self.headers = {"Authorization": "Bearer " + key} if key else {}
        model = [model] if model else []
        self.process = subprocess.Popen([PKV, "serve", *model, "--port", "0", *args],
                                        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                                        env=dict(os.environ, **(env or {})))
        # A test that fails before end() must leave nothing running: it would hold ctest's pipe.
        atexit.register(self.process.kill)
        line = self.process.stderr.readline().decode()
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
        if not found:
            self.process.kill()
            raise AssertionError(line + self.process.stderr.read().decode())
        self.port = int(found[1])
        self.lines = [line]
        # Read all the time: lines that nobody reads are lost.
        self.reader = threading.Thread(target=self.read_log, daemon=True)
        self.reader.start()
        if ready:
            self.wait_ready()

    def wait_ready(self):
        end = time.monotonic() + LIMIT_S
        while self.request("GET", "/ready", None, self.headers)[0] != 200:
            check(time.monotonic() < end and self.process.poll() is None, self.end)
            time.sleep(0.01)

    def read_log(self):
        for line in self.process.stderr:
            self.lines.append(line.decode())

    def end(self, number=signal.SIGTERM):
        """(exit code, what the log has beside records of info and debug)"""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(timeout=LIMIT_S)
        self.reader.join(timeout=LIMIT_S)
        self.process.stderr.close()
        return self.process.returncode, "".join(filter(self.is_bad, self.lines))

    @staticmethod
    def is_bad(line):
        try:
            level = json.loads(line)["level"] if line.startswith("{") else RECORD.match(line)[1]
        except (ValueError, KeyError, TypeError):
            return True
        return level not in ("info", "debug")

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)

    def request(self, method, path, body=None, headers=None):
        """(status, headers, body) of one request on a connection of its own."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            link.request(method, path, body, headers or {})
            answer = link.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            link.close()

    def post(self, path, fields):
        status, _, body = self.request("POST", path, json.dumps(fields))
        return status, json.loads(body)

    def events(self, path, fields):
        """The events of a stream, [DONE] included."""
        status, headers, body = self.request("POST", path, json.dumps(dict(fields, stream=True)))
        check(status == 200, (status, body))
        check(headers["Content-Type"].startswith("text/event-stream"), headers)
        # On a busy machine any stream may be silent for a second, and says so with blank lines.
        lines = [line for line in body.decode("utf-8").split("\n\n") if line]
        check(all(line.startswith("data: ") for line in lines), lines)
        return [line[6:] for line in lines]

    def metrics(self):
        text = self.request("GET", "/metrics")[2].decode()
        return {m[1]: int(m[2]) for m in re.finditer(r"^pkv_(\S+) (\d+)$", text, re.M)}

    def wait_for(self, test, what):
        """Until the metrics satisfy `test`."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            seen = self.metrics()
            if test(seen):
                return seen
            time.sleep(0.02)
        raise AssertionError(what + ": %r" % seen)


class ServerCase(unittest.TestCase):
    """Tests that share one server, which must end without a word."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*ARGS)

    @classmethod
    def tearDownClass(cls):
        code, err = cls.server.end()
        check((code, err) == (0, ""), (code, err))


def rest(link):
    """All that comes until the server closes its side."""
    return b"".join(iter(lambda: link.recv(65536), b""))


def run_text(prompt, tokens):
    """What `pkv run` answers."""
    done = subprocess.run([PKV, "run", "-m", MODEL, "-p", prompt, "-n", str(tokens), "--json",
                           "--ctx", "512"], capture_output=True, timeout=LIMIT_S, check=True)
    result = json.loads(done.stdout)
    return result["text"], result
