"""`kvredis` with a disk that reads a few blocks, then none until a file is there: `python -m tests.cli.gated_disk`.

For what is seen while blocks come, which a real disk is done with too soon. GATE names the file, GATE_READS says how
many blocks come before.
"""

import os
import threading
import time
from itertools import count

from kvredis.cli.main import main
from kvredis.storage.disk.segment import Record
from kvredis.storage.disk.tier import DiskTier

LOOK_S = 0.02
_numbers, _lock, _read = count(), threading.Lock(), DiskTier.read


def read(self: DiskTier, record: Record, into: memoryview) -> bool:
    """Read when it is this block's turn, or when the gate is open."""
    with _lock:
        number = next(_numbers)
    while number >= int(os.environ["GATE_READS"]) and not os.path.exists(os.environ["GATE"]):
        time.sleep(LOOK_S)  # a new file sends no event here
    return _read(self, record, into)


if __name__ == "__main__":
    DiskTier.read = read  # type: ignore[method-assign]
    main()
