"""A process that streams blocks through a small staging arena and says what memory that took: see test_stream_memory.

    python -m tests.backends.remote.stream_client URL BLOCKS BLOCK_BYTES

It loads stream:0, stream:1 ... and prints, as JSON, the digest of each block, by how much the process grew at its
largest while it did so, and the most that its arena held.
"""

import hashlib
import json
import sys
from pathlib import Path

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store


def status_bytes(field: str) -> int:
    """A field of /proc/self/status that is given in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


def main(url: str, blocks: int, block_bytes: int) -> None:
    """Stream all of them, one at a time."""
    store = Store(Arena.create(2 * block_bytes, HugepageMode.OFF))
    backend = RemoteBackend(parse_url(url), store)
    keys = [b"stream:%d" % n for n in range(blocks)]
    assert backend.match(keys) == blocks  # connected, imported, warm: what comes now is the stream's own
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew: man 5 proc
    before = status_bytes("VmRSS")
    digests, held = [], 0
    for lease in backend.load(keys):
        assert lease is not None
        with lease:
            held = max(held, store.used_bytes)
            digests.append(hashlib.sha256(lease.view).hexdigest())
    grown = status_bytes("VmHWM") - before
    print(json.dumps({"digests": digests, "grown_bytes": grown, "arena_bytes": held}))
    backend.close()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
