# SPDX-License-Identifier: Apache-2.0
"""What `pkv serve` is told by flags, environment and file; what it logs; `pkv healthcheck`; CORS.

usage: test_serve_settings.py PKV MODEL   (as test_serve.py)
"""
import errno
import fcntl
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from serve_harness import ARGS, HAVE_MODEL, LIMIT_S, MODEL, PKV, RECORD, Server

TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "tiny_folders",
                    "llama3.gguf")


def command(*args, env=None):
    """(exit code, stderr)"""
    done = subprocess.run([PKV, *args], capture_output=True, timeout=LIMIT_S, check=False,
                          env=dict(os.environ, **(env or {})))
    return done.returncode, done.stderr.decode()


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def file(self, text, name="serve.conf"):
        path = os.path.join(self.folder.name, name)
        with open(path, "wb") as out:
            out.write(text if isinstance(text, bytes) else text.encode())
        return path


class Settings(Files):
    def test_refused(self):
        """What a file or the environment may not say is refused by its name and line."""
        for text, complaint in (
                ("prot = 1\n", "line 1: 'prot' is no setting of 'pkv serve'; did you mean 'port'?"),
                ("# x\n\nport 80\n", "line 3: NAME = VALUE is wanted"),
                ("port = 70000\n", "line 1: port is '70000'; it takes a whole number"),
                ("port = 1\nport = 2\n", "line 2: port is there twice"),
                ("config = other\n", "line 1: a file cannot name another one"),
                ("no-prefix-cache = yes\n", "it may be true or false"),
                ("order = best\n", "it may be one of tree, fcfs"),
                ("= 5\n", "'' is no setting"),
                (b"name = \xff\n", "no text in UTF-8"), (b"name = a\0b\n", "no text in UTF-8")):
            code, err = command("serve", "m.gguf", "--config", self.file(text))
            self.assertEqual(code, 2, err)
            self.assertIn(complaint, err)
        self.assertEqual(command("serve", "m", "--config", "/no/such/file")[0], 1)
        none = "is none (1 to 255 characters of ASCII, no blanks)"
        for keys, complaint in ((",", "key 1 of the list " + none),
                                ("a,,b", "key 2 of the list " + none), ("a b", none),
                                ("\u00e9", none), ("k" * 256, none),
                                (",".join(["k"] * 257), "there are more than 256 keys")):
            code, err = command("serve", TINY, "--port", "0", env={"PKV_SERVE_API_KEYS": keys})
            self.assertIn(complaint, err)
            self.assertEqual(code, 1)
        code, err = command("serve", TINY, "--port", "0", "--api-keys", "")
        self.assertEqual((code, "there is no key in the list" in err), (1, True), err)
        code, err = command("serve", TINY, "--port", "0", "--host", "example.org")
        self.assertEqual((code, '"example.org" is no address' in err), (1, True), err)
        self.assertEqual(command("serve", "m", "--config", self.file(b" " * 70000))[0], 1)
        for env, complaint in (({"PKV_SERVE_PROT": "1"}, "PKV_SERVE_PROT stands for no option"),
                               ({"PKV_SERVE_PORT": "x"}, "the variable for --port is 'x'")):
            code, err = command("serve", "m.gguf", env=env)
            self.assertEqual(code, 2, err)
            self.assertIn(complaint, err)

    @unittest.skipUnless(HAVE_MODEL, "the model is not there")
    def test_precedence(self):
        """The command line before the environment, that before the file, that before defaults."""
        path = self.file("model = %s\nctx = 100\nname = from file\ncache = 4096\nrows = 3\n"
                         "no-access-log = true\n" % MODEL)
        env = {"PKV_SERVE_CONFIG": path, "PKV_SERVE_CTX": "200", "PKV_SERVE_ROWS": "5",
               "PKV_SERVE_REQUESTS": ""}
        server = Server("--rows", "7", "--no-access-log=false", model=None, env=env)
        props = json.loads(server.request("GET", "/props")[2])
        self.assertEqual(props["model_alias"], "from file")
        self.assertEqual(props["default_generation_settings"]["n_ctx"], 200)
        self.assertEqual(props["total_slots"], 7)
        self.assertEqual(server.end(), (0, ""))
        self.assertIn("path=/props", "".join(server.lines))

    def test_no_flag_value_elsewhere(self):
        self.assertEqual(command("tokenize", "--json=true")[0], 2)


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class Log(unittest.TestCase):
    def ask_all(self, server):
        """Requests whose every part is of the client's choosing."""
        secret = "Tell nobody of the marzipan"
        fields = {"prompt": secret, "max_tokens": 4, "temperature": 0}
        self.assertEqual(server.post("/v1/completions", fields)[0], 200)
        server.events("/v1/completions", fields)
        server.request("GET", "/none?" + "x" * 100, None, {"X-Request-Id": "good-id"})
        server.request("GET", "/health")
        with server.connect() as link:
            link.sendall(b"GET /v1/models?a%0d%0aforged HTTP/1.1\r\nHost: localhost\r\n"
                         b"X-Request-Id: a\tb\x1b[31m\xff\r\nConnection: close\r\n\r\n")
            while link.recv(4096):
                pass
        with server.connect() as link:
            link.sendall(b"BR\x1bEW /marzipan HTTP/1.1\r\nHost: localhost\r\n\r\n")
            link.settimeout(5)
            try:
                while link.recv(4096):
                    pass
            except OSError:
                pass

    def test_text(self):
        server = Server(*ARGS)
        self.ask_all(server)
        self.assertEqual(server.end(), (0, ""))
        log = "".join(server.lines)
        self.assertNotIn("marzipan", log)
        self.assertNotIn("forged", log)
        self.assertNotIn("\x1b", log)
        for line in server.lines:
            self.assertRegex(line, RECORD)
        requests = [line for line in server.lines if " request: " in line]
        self.assertFalse([line for line in requests if "/health" in line])
        first = next(line for line in requests if "POST" in line)
        self.assertRegex(first, r"id=req-\S+ client=127\.0\.0\.1 key=0 method=POST "
                         r"path=/v1/completions status=200 stream=0 complete=1 seconds=[\d.]+ "
                         r"prompt=\d+ cached=0 generated=4 finish=length queue=[\d.]+s "
                         r"ttft=[\d.]+s$")
        self.assertEqual(len([line for line in requests if "method=POST" in line]), 2)
        self.assertEqual(len([line for line in requests if "id=good-id" in line
                              and "path=- status=404" in line]), 1)

    def test_json(self):
        server = Server(*ARGS, "--log-format", "json", "--log-level", "debug")
        self.ask_all(server)
        self.assertEqual(server.end(), (0, ""))
        records = [json.loads(line) for line in server.lines]
        self.assertNotIn("marzipan", "".join(server.lines))
        self.assertIn("listening on", records[0]["message"])
        self.assertTrue(all(r["level"] in ("info", "debug") for r in records))
        one = next(r for r in records if r["room"] == "request" and r["method"] == "POST")
        self.assertEqual((one["status"], one["stream"], one["generated_tokens"], one["finish"]),
                         (200, False, 4, "length"))
        self.assertLessEqual(one["queue_seconds"], one["ttft_seconds"])
        self.assertLessEqual(one["ttft_seconds"], one["seconds"])
        self.assertTrue([r for r in records if r.get("path") == "/health"])

    def test_no_forged_lines(self):
        """A name that would end its line and steer a terminal stays in it, escaped."""
        name = "/no/such\x1b[2J\nfile\u2028\u0085\\"
        for form in ("text", "json"):
            done = subprocess.run([PKV, "serve", name, "--port", "0", "--log-format", form],
                                  capture_output=True, timeout=LIMIT_S, check=False)
            text = done.stderr.decode()
            self.assertEqual(len(text.splitlines()), 2, text)
            self.assertEqual(done.returncode, 1)
            last = text.splitlines()[-1]
            message = json.loads(last)["message"] if form == "json" else last
            self.assertIn(r"\x1b[2J", message)
            self.assertNotIn("\x1b", message)


class UnreadServer(Server):
    """Its log is read only once somebody says so."""

    def read_log(self):
        self.read.wait(LIMIT_S)
        super().read_log()


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class UnreadLog(unittest.TestCase):
    def check(self, *args):
        UnreadServer.read = threading.Event()
        server = UnreadServer(*args)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
        for _ in range(1000):  # 64 KiB and more of records
            connection.request("GET", "/v1/models")
            self.assertEqual(connection.getresponse().read()[:1], b"{")
        server.read.set()
        time.sleep(0.2)
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
        connection.close()
        code, bad = server.end()
        self.assertEqual(code, 0)
        self.assertRegex(bad, r"\A[^\n]*\d+ lines were not written[^\n]*\n\Z")
        return bad

    def test_nobody_reads(self):
        """A log that nobody reads holds up no request: its lines are lost, and counted."""
        self.check()
        self.assertEqual(json.loads(self.check("--log-format", "json"))["level"], "warn")


class Healthcheck(Files):
    def test_nobody_there(self):
        with socket.socket() as taken:  # bound, and nobody listens
            taken.bind(("127.0.0.1", 0))
            port = str(taken.getsockname()[1])
            code, err = command("healthcheck", "--port", port)
        self.assertEqual(code, 1)
        self.assertIn("nothing answers on 127.0.0.1, port " + port, err)
        self.assertEqual(command("healthcheck", "--host", "example.org")[0], 1)

    def test_silent_and_odd_servers(self):
        for answer, complaint in ((None, "no answer came in time"), (b"", "ended before an answer"),
                                  (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP"),
                                  (b"HTTP/1.1 999 X\r\n", "no HTTP"),
                                  (b"HTTP/1.1 503 X\r\n", "/health says 503")):
            with socket.create_server(("127.0.0.1", 0)) as server:
                def serve(server=server, answer=answer):
                    link = server.accept()[0]
                    with link:
                        link.recv(4096)
                        if answer is None:
                            link.settimeout(LIMIT_S)
                            link.recv(1)
                        else:
                            link.sendall(answer)
                thread = threading.Thread(target=serve, daemon=True)
                thread.start()
                code, err = command("healthcheck", "--timeout", "1", "--port",
                                    str(server.getsockname()[1]))
                thread.join(LIMIT_S)
            self.assertEqual(code, 1, err)
            self.assertIn(complaint, err)

    @unittest.skipUnless(HAVE_MODEL, "the model is not there")
    def test_same_settings(self):
        """O7: the settings of the server are those of its check, port and keys included."""
        keys = self.file("the-key\n", "keys")
        server = Server(*ARGS, "--api-key-file", keys, key="the-key")
        path = self.file("port = %d\napi-key-file = %s\nctx = 512\n" % (server.port, keys))
        self.assertEqual(command("healthcheck", "--config", path), (0, ""))
        self.assertEqual(command("healthcheck", "--config", path, "--ready"), (0, ""))
        env = {"PKV_SERVE_PORT": str(server.port), "PKV_SERVE_API_KEYS": "wrong"}
        self.assertEqual(command("healthcheck", env=env), (0, ""))
        code, err = command("healthcheck", "--ready", env=env)
        self.assertEqual((code, err), (1, "pkv healthcheck: /ready says 401\n"))
        self.assertEqual(server.end(), (0, ""))


# Stands for a kernel that lacks a call: runs argv[3:], in which the call of number argv[1] fails
# with argv[2]. Numbers are the same on all processors, but for seccomp's own.
WITHOUT = """
import ctypes, os, struct, sys
number, code = int(sys.argv[1]), int(sys.argv[2])
parts = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | code),
         (0x06, 0, 0, 0x7fff0000)]
lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *p) for p in parts))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(parts), ctypes.addressof(lines)))
libc = ctypes.CDLL(None, use_errno=True)
zero = ctypes.c_ulong(0)
for words in ((38, ctypes.c_ulong(1), zero), (22, ctypes.c_ulong(2), program)):
    if libc.prctl(words[0], words[1], words[2], zero, zero) != 0:
        sys.exit("prctl: %s" % os.strerror(ctypes.get_errno()))
os.execv(sys.argv[3], sys.argv[3:])
"""
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
SECCOMP = 317 if os.uname().machine == "x86_64" else 277


class Sandbox(Files):
    """What the sandbox keeps from a process is in test_sandbox; here, that pkv is in one."""

    def setUp(self):
        super().setUp()
        # A leak checker stops the process from outside, which it refuses.
        self.env = {"ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}

    @unittest.skipUnless(HAVE_MODEL, "the model is not there")
    def test_serve(self):
        """It answers as without, with keys from a file and threads; tells systemd too."""
        keys = self.file("the-key\n", "keys")
        path = os.path.join(self.folder.name, "notify")
        fields = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
        texts = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(path)
            manager.settimeout(LIMIT_S)
            for flags in ((), ("--sandbox",)):
                server = Server("--ctx", "128", "--threads", "3", "--api-key-file", keys, *flags,
                                key="the-key",
                                env=dict(self.env, NOTIFY_SOCKET=path))
                status, _, body = server.request("POST", "/v1/completions", json.dumps(fields),
                                                 server.headers)
                self.assertEqual(status, 200, body)
                texts.append(json.loads(body)["choices"])
                self.assertEqual(server.request("GET", "/metrics")[0], 401)
                threads = f"/proc/{server.process.pid}/task"
                for thread in os.listdir(threads):
                    with open(f"{threads}/{thread}/status", encoding="ascii") as file:
                        found = re.search(r"^Seccomp:\s*(\d)", file.read(), re.M)
                    self.assertEqual(found[1], "2" if flags else "0")
                self.assertEqual(server.end(), (0, ""))
                self.assertEqual((manager.recv(99), manager.recv(99)), (b"READY=1", b"STOPPING=1"))
        self.assertEqual(*texts)

    def test_inspect(self):
        out = [subprocess.run([PKV, "inspect", TINY, *flags], capture_output=True, env=dict(
            os.environ, **self.env), timeout=LIMIT_S, check=True).stdout
            for flags in ((), ("--sandbox",))]
        self.assertEqual(*out)
        self.assertEqual(command("inspect", "/no/such", "--sandbox", env=self.env)[0], 1)
        read, write = os.pipe()  # full: it stops at its first words, and can be looked at
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write, b"x" * 4096)
        with subprocess.Popen([PKV, "inspect", TINY, "--sandbox"], stdout=write,
                              env=dict(os.environ, **self.env)) as process:
            os.close(write)
            end, state = time.monotonic() + LIMIT_S, ""
            while not re.search(r"^Seccomp:\s*2", state, re.M) and time.monotonic() < end:
                with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
                    state = file.read()
            with os.fdopen(read, "rb") as pipe:
                self.assertEqual(pipe.read()[4096:], out[0])
        self.assertRegex(state, r"Seccomp:\s*2")

    def test_kernel_without(self):
        """Half a sandbox is none: what the kernel lacks is named, and not a byte of the model is
        read; without --sandbox all is as ever."""
        text = "no model"  # which would be said of it
        model = self.file(text, "m.gguf")
        landlock = "--sandbox: this kernel has no Landlock, or it is switched off: "
        for number, code, words in (
                (CREATE_RULESET, errno.ENOSYS, landlock + os.strerror(errno.ENOSYS)),
                (CREATE_RULESET, errno.EOPNOTSUPP, landlock + os.strerror(errno.EOPNOTSUPP)),
                (ADD_RULE, errno.ENOSYS, "--sandbox: no rule for \"%s\"" % model),
                (RESTRICT_SELF, errno.E2BIG, "--sandbox: Landlock: "),
                (SECCOMP, errno.ENOSYS, "--sandbox: this kernel takes no seccomp filter: ")):
            for what in (["serve", model, "--port", "0"], ["inspect", model]):
                with self.subTest(number=number, code=code, what=what[0]):
                    run = [sys.executable, "-c", WITHOUT, str(number), str(code), PKV, *what]
                    done, plain = (subprocess.run(
                        run + flags, capture_output=True, timeout=LIMIT_S, check=False,
                        env=dict(os.environ, **self.env)) for flags in (["--sandbox"], []))
                    self.assertIn(words, done.stderr.decode())
                    self.assertEqual((done.returncode, done.stdout), (1, b""))
                    self.assertNotIn(b"GGUF", done.stderr)
                    self.assertIn(b"GGUF", plain.stderr)

    def test_refused(self):
        for args, words in ((["--api-key-file", "/no/such"], "/no/such"),
                            (["--device", "cuda"], "--sandbox is for --device cpu")):
            code, err = command("serve", TINY, "--port", "0", "--sandbox", *args, env=self.env)
            self.assertNotEqual(code, 0)
            self.assertIn(words, err)


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class Notify(Files):
    def test_notify(self):
        """systemd is told when the model is there, and when the end begins."""
        path = os.path.join(self.folder.name, "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(path)
            manager.settimeout(LIMIT_S)
            server = Server(*ARGS, env={"NOTIFY_SOCKET": path})
            self.assertEqual(manager.recv(100), b"READY=1")
            self.assertEqual(server.end(), (0, ""))
            self.assertEqual(manager.recv(100), b"STOPPING=1")
        for odd in ("relative", "/" + "x" * 200, "/no/such/socket"):
            server = Server(*ARGS, env={"NOTIFY_SOCKET": odd})
            self.assertEqual(server.end(), (0, ""))


@unittest.skipUnless(HAVE_MODEL, "the model is not there")
class Cors(unittest.TestCase):
    def preflight(self, server, origin, path="/v1/completions", method="POST"):
        headers = {"Origin": origin} if origin else {}
        if method:
            headers["Access-Control-Request-Method"] = method
        status, answer, _ = server.request("OPTIONS", path, None, headers)
        return status, {k: v for k, v in answer.items() if k.startswith("Access-Control")}

    def test_off(self):
        """P19: without --cors no page of another origin learns anything."""
        server = Server(*ARGS)
        self.assertEqual(self.preflight(server, "http://a.example"), (405, {}))
        _, headers, _ = server.request("GET", "/health", None, {"Origin": "http://a.example"})
        self.assertNotIn("Access-Control-Allow-Origin", headers)
        self.assertEqual(server.end(), (0, ""))

    def test_on(self):
        server = Server(*ARGS, "--cors", "http://a.example,https://b.example:8443", "--api-keys",
                        "the-key", key="the-key")
        for origin in ("http://a.example", "https://b.example:8443"):
            status, headers = self.preflight(server, origin)
            self.assertEqual((status, headers["Access-Control-Allow-Origin"]), (204, origin))
            self.assertIn("POST", headers["Access-Control-Allow-Methods"])
            self.assertIn("Authorization", headers["Access-Control-Allow-Headers"])
            self.assertNotIn("Access-Control-Allow-Credentials", headers)
            # The answer itself, and the refusal too: a page has to be able to read it.
            for more, wanted in (({}, 401), (server.headers, 200)):
                status, headers, _ = server.request("GET", "/v1/models", None,
                                                    dict(more, Origin=origin))
                self.assertEqual((status, headers["Access-Control-Allow-Origin"]),
                                 (wanted, origin))
                self.assertIn("Origin", headers["Vary"])
        for origin in ("http://a.example.evil", "http://a.exampl", "null", "*", "https://a.example",
                       "http://a.example,https://b.example:8443"):
            status, headers = self.preflight(server, origin)
            self.assertEqual((status, headers), (401, {}), origin)
        # An OPTIONS that is no preflight is no way round the key; nor is one of a path without.
        self.assertEqual(self.preflight(server, "http://a.example", method=None)[0], 401)
        self.assertEqual(self.preflight(server, None)[0], 401)
        self.assertEqual(self.preflight(server, "http://a.example", "/none")[0], 401)
        self.assertEqual(server.end(), (0, ""))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[3:]])
