# SPDX-License-Identifier: Apache-2.0
"""`pkv serve` ended at any moment: while it loads, computes, streams; by SIGKILL and by SIGTERM.

usage: test_serve_kill.py PKV MODEL [ROUNDS [SEED]]
"""
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

from serve_harness import MODEL, PKV, check

ROUNDS = int(sys.argv[3]) if len(sys.argv) > 3 else 6
SEED = int(sys.argv[4]) if len(sys.argv) > 4 else 1
LIMIT_S = 120


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def ask(port, index, results):
    """One stream, from the moment that the port takes connections; what came of it, as a word."""
    body = json.dumps({"prompt": "Once upon a time, %d" % index, "max_tokens": 60 + index,
                       "ignore_eos": True, "stream": index % 3 != 0}).encode()
    got = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as link:
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close"
                         b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            while True:
                more = link.recv(65536)
                if not more:
                    break
                got += more
    except OSError:
        results[index] = "cut"
        return
    if b" 503 " in got[:20]:
        results[index] = "refused"
    elif b"data: [DONE]" in got or b'"usage"' in got:
        results[index] = "whole"
    else:
        results[index] = "cut"


def one_round(pick, port):
    """The same port each time: a server that was killed leaves nothing behind."""
    number = pick.choice((signal.SIGKILL, signal.SIGTERM))
    server = subprocess.Popen([PKV, "serve", MODEL, "--port", str(port), "--ctx", "512", "--cache",
                               "4096", "--no-access-log",
                               # A machine that stands still meanwhile is no fault of the server's.
                               "--drain-timeout", "600"], stderr=subprocess.PIPE,
                              stdin=subprocess.DEVNULL)
    line = server.stderr.readline().decode()
    check("listening on" in line, lambda: line + server.stderr.read().decode())
    results = {}
    wait = pick.random() * 1.2
    early = pick.random() < 0.3  # while the model is loaded
    if not early:
        time.sleep(0.3)
    threads = [threading.Thread(target=ask, args=(port, i, results)) for i in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(wait if not early else wait / 10)
    server.send_signal(number)
    log = server.communicate(timeout=LIMIT_S)[1].decode()
    for thread in threads:
        thread.join(LIMIT_S)
        check(not thread.is_alive(), "a client still waits")
    words = sorted(results.values())
    if number == signal.SIGTERM:
        # What had begun is finished; what came later is refused, or finds nobody.
        check(server.returncode == 0, (server.returncode, log))
        check(" error " not in log and " warn " not in log and "anitizer" not in log, log)
    else:
        check(server.returncode == -signal.SIGKILL, (server.returncode, log))
    return signal.Signals(number).name, words


def main():
    if not os.access(MODEL, os.R_OK):
        print("skip: the model is not there")
        return
    print("seed %d" % SEED)
    pick, port, seen = random.Random(SEED), free_port(), {}
    for _ in range(ROUNDS):
        name, words = one_round(pick, port)
        for word in words:
            seen[name, word] = seen.get((name, word), 0) + 1
    print("%d rounds: %s" % (ROUNDS, seen))
    if ROUNDS >= 20:
        check(seen.get(("SIGTERM", "whole"), 0) > 0 and seen.get(("SIGKILL", "cut"), 0) > 0, seen)


if __name__ == "__main__":
    main()
