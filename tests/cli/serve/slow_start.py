"""`kvredis` whose disk tier opens when the test allows it: `python -m tests.cli.serve.slow_start serve ...`.

For what must hold while a server starts: it waits until a test opens the fifo named by KVREDIS_TEST_GATE for writing.
"""

import os
from typing import Any

from kvredis.cli.main import main
from kvredis.storage.disk.tier import DiskTier

opened = DiskTier.open
gate = os.environ.pop("KVREDIS_TEST_GATE", "")


def open_late(*args: Any, **more: Any) -> DiskTier:
    """Wait, then do what is asked."""
    with open(gate, "rb"):
        return opened(*args, **more)


if __name__ == "__main__":
    DiskTier.open = open_late  # type: ignore[method-assign]
    main()
