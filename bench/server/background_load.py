"""The background of the head-of-line arm: a process of its own that moves 32 MiB values until it is told to stop.

A process and not a thread, because the pings next to it must not wait for this interpreter's GIL. Run as
`python -m kvredis.bench.server.background_load URL SET|GET|both`: it stores its keys, prints `ready`, moves values over
one connection per direction until its standard input closes, compares the last bodies in full and prints {"bytes": n,
"seconds": s}.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from kvredis.backends.config.url import parse_url
from kvredis.bench.core.wire import Resp, Wire
from kvredis.bench.core.workload import Memory, Workload, memory_bytes
from kvredis.storage.errors import KVRedisError

SIZE_BYTES = 32 * 1024**2
_KEYS = 2
_SEED = 20250102
BACKGROUNDS = ("SET", "GET", "both")


def main(url: str, background: str) -> None:
    """Move values until standard input ends; see the module's docstring."""
    address = parse_url(url)
    nbytes = memory_bytes([SIZE_BYTES], _KEYS * SIZE_BYTES)
    work = Workload(SIZE_BYTES, _KEYS, Memory(nbytes, seed=_SEED), Memory(nbytes))
    stop = threading.Event()

    def move(direction: str) -> int:
        moved = 0
        with Wire.connect(address, Resp()) as wire:
            while moved < _KEYS * SIZE_BYTES or not stop.is_set():  # every key at least once: all are compared
                index = (moved // SIZE_BYTES) % _KEYS
                if direction == "SET":
                    wire.put(work.keys[index], work.value(index, 0))
                else:
                    wire.get(work.keys[index], work.place(index))
                moved += SIZE_BYTES
        return moved

    with Wire.connect(address, Resp()) as wire:
        for job in work.sets(0):
            wire.put(job.key, job.view)
        with ThreadPoolExecutor(2) as pool:
            directions = ("SET", "GET") if background == "both" else (background,)
            start_s = time.monotonic()
            futures = [pool.submit(move, direction) for direction in directions]
            print("ready", flush=True)
            sys.stdin.read()
            stop.set()
            moved = sum(future.result() for future in futures)
            seconds = time.monotonic() - start_s
        if background == "SET":
            for job in work.gets():
                wire.get(job.key, job.view)
        work.verify(0, str(address))
    print(json.dumps({"bytes": moved, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except KVRedisError as error:
        sys.exit(str(error))
