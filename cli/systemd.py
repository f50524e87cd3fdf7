"""What `kvredis serve` tells systemd, in the words of sd_notify(3), where systemd has asked for it ($NOTIFY_SOCKET).

Ready; what we are doing (STATUS=); that the event loop turns, where a watchdog was set; and, while a disk tier takes
what memory holds at the end, that we need longer than the stop timeout: as long as blocks leave, and no longer.
"""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

NOTIFY_S: Final = 1.0
"""How long a manager that does not read, so that its queue is full, may keep us: one that is busy is soon back."""

EXTEND_EVERY_S: Final = 5.0
EXTEND_BY_S: Final = 30.0
"""How much longer we ask for each time: a disk that takes no block for so long is given up on by the manager."""


def notify(*lines: str, wait_s: float = NOTIFY_S) -> None:
    """Send these lines as one message; what cannot be sent within `wait_s` is dropped, and no failure is ours."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notice:
        notice.settimeout(wait_s)
        notice.connect("\0" + address[1:] if address.startswith("@") else address)
        notice.sendall("\n".join(lines).encode())


def feed_watchdog(loop: asyncio.AbstractEventLoop) -> None:
    """Say from now on, twice in the watchdog's time, that the loop turns. To be called on the loop."""
    text, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or pid not in ("", str(os.getpid())):
        return
    pause_s = int(text) / 1e6 / 2

    def feed() -> None:
        notify("WATCHDOG=1", wait_s=0)  # the loop is for clients, and the next one comes in time
        loop.call_later(pause_s, feed)

    feed()


@contextlib.contextmanager
def more_time_while(left: Callable[[], int], *, every_s: float = EXTEND_EVERY_S) -> Iterator[None]:
    """Have the manager wait for what the `with` block does as long as `left()`, in blocks, becomes less."""
    if not os.environ.get("NOTIFY_SOCKET") or not left():
        yield
        return
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(left, over, every_s), name="kvredis-notify", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _tell(left: Callable[[], int], over: threading.Event, every_s: float) -> None:
    before: int | None = None
    while not over.is_set():
        now = left()
        status = f"STATUS=Saving to disk: {now} blocks left"
        if before is None or now < before:
            notify(status, f"EXTEND_TIMEOUT_USEC={EXTEND_BY_S * 1e6:.0f}")
        else:
            notify(status)
        before = now
        over.wait(every_s)
