"""The load of the ping arm: a process of its own that SETs flat out, over more keys than memory holds.

A process and not a thread, because the pings next to it must not wait for this interpreter's GIL. Run as
`python -m kvredis.bench.disk.background_load URL SIZE KEYS`: it stores every key once, prints `ready`, goes on over one
connection until its standard input closes, prints `stopped`, gets every key back and compares it in full, and prints
{"bytes": n, "seconds": s, "missing": keys that were not there any more, "verified_bytes": n}.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from kvredis.backends.config.url import parse_url
from kvredis.storage.errors import KVRedisError

from .client import BlockClient, Values

_SEED = 20250105


def main(url: str, size_bytes: int, count: int) -> None:
    """SET until standard input ends; see the module's docstring."""
    values = Values(size_bytes, count, _SEED)
    stop = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    with BlockClient(parse_url(url), values) as client:
        for index in range(count):
            client.store(index)
        print("ready", flush=True)
        sets, start_s = 0, time.monotonic()
        while not stop.is_set():
            client.store(sets % count, 1 + sets // count)
            sets += 1
        seconds = time.monotonic() - start_s
        print("stopped", flush=True)
        missing = verified = 0
        for index in range(count):
            values.wipe()
            if client.load(index) is None:
                missing += 1
            else:
                verified += values.check(index, (sets + count - 1 - index) // count, url)
    said = {"bytes": sets * size_bytes, "seconds": seconds, "missing": missing, "verified_bytes": verified}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except KVRedisError as error:
        sys.exit(str(error))
