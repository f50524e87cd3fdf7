"""`kvredis` with a disk that takes no block any more: `python -m tests.cli.stuck_disk serve ...`.

For what must hold while a server is being saved, which a real disk is done with too soon to be caught at it.
"""

import threading

from kvredis.cli.main import main
from kvredis.storage.disk.segment import Facts, Record
from kvredis.storage.disk.tier import DiskTier
from kvredis.storage.memory.allocator import Extent


def write(self: DiskTier, extent: Extent, image: memoryview, facts: Facts) -> Record | None:
    """Never come back."""
    threading.Event().wait()
    return None


if __name__ == "__main__":
    DiskTier.write = write  # type: ignore[method-assign]
    main()
