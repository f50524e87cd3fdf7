"""Start an installed `kvredis serve`, speak to it once with its own client, and end it: what a first user does.

Usage: python scripts/smoke.py PATH-OF-KVREDIS     (run it with the interpreter that kvredis is installed for)
"""

import importlib.util
import signal
import subprocess
import sys
import time

from kvredis.backends.resp.connection import Connection

VALUE = bytes(range(256)) * 4096


def main() -> int:
    """Exit 0 when the server answered, kept a value and ended cleanly."""
    assert importlib.util.find_spec("torch") is None, "the server must be tried without torch"
    command = [sys.argv[1], "serve", "--port", "0", "--max-local-cpu-size", "64MB"]
    started_s = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = next(line for line in server.stdout if line.startswith("Ready to accept connections"))
            print(f"{ready.rstrip()} (after {time.monotonic() - started_s:.2f} s)")
            address = ready.split(" on ")[1].split(",")[0].strip()
            with Connection.open(f"redis://{address}") as client:
                assert client.call(b"PING") == "PONG"
                assert client.set(b"block", VALUE) == "OK"
                assert client.call(b"GET", b"block") == VALUE
            server.send_signal(signal.SIGTERM)
            status = server.wait(timeout=30)
        finally:
            server.kill()
    print(f"PING, SET and GET answered; exit status {status} after SIGTERM")
    return status


if __name__ == "__main__":
    sys.exit(main())
