"""Single keys from a terminal, and the terminal as it was afterwards, however the block ends.

Only what `kvredis top` uses: letters and arrows, read without waiting for a line. Ctrl-C stays a signal; SIGTERM and
SIGHUP are made into an exit, so that they too leave the terminal in order.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Final

_KEYS: Final = re.compile(rb"\x1b[\[O]([ABCDZ])|\x1b\[[0-9;]*~|\x1b\[[0-9;]*[A-Za-z]|.", re.DOTALL)
_ARROWS: Final = {b"A": "up", b"B": "down", b"C": "right", b"D": "left", b"Z": "left"}
_BEGUN: Final = (b"\x1b", b"\x1b[", b"\x1bO")
REST_S: Final = 0.05
"""How long the rest of an arrow's bytes may take; over a slow line they come one by one."""
_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)


class Keyboard:
    """Keys that are pressed, and a bell that other threads and a change of the window's size ring."""

    def __init__(self, terminal: int, bell: int, ring: int) -> None:
        self._terminal, self._bell, self._ring = terminal, bell, ring
        self.is_gone = False

    def wait(self, timeout_s: float) -> list[str]:
        """The keys pressed since the last call: letters, and up, down, left, right (Tab is right). Comes back when
        there is one, when the bell rings or when the time is up. `is_gone` is set when the terminal is no more."""
        ready, _, _ = select.select([self._terminal, self._bell], [], [], max(timeout_s, 0))
        if self._bell in ready:
            os.read(self._bell, 4096)
        if self._terminal not in ready:
            return []
        data = os.read(self._terminal, 4096)
        while data.endswith(_BEGUN) and select.select([self._terminal], [], [], REST_S)[0]:
            more = os.read(self._terminal, 4096)
            data += more
            if not more:
                break
        self.is_gone = not data
        return list(keys_in(data))

    def ring(self) -> None:
        """Let a `wait` come back. Any thread may."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it rings already; closed: no thread waits
            os.write(self._ring, b"!")


def keys_in(data: bytes) -> Iterator[str]:
    """The keys that a terminal's bytes stand for; those of no use here are left out."""
    for found in _KEYS.finditer(data):
        if found[1]:
            yield _ARROWS[found[1]]
        elif found[0] == b"\t":
            yield "right"
        elif len(found[0]) == 1 and found[0].isalpha():
            yield found[0].decode("ascii").lower()


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """The keyboard of standard input, which must be a terminal, while the block runs."""
    terminal = sys.stdin.fileno()
    former = termios.tcgetattr(terminal)
    bell, ring = os.pipe()
    os.set_blocking(bell, False)
    os.set_blocking(ring, False)
    keys = Keyboard(terminal, bell, ring)

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, end) for number in _ENDINGS}
    handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: keys.ring())
    try:
        tty.setcbreak(terminal)
        modes = termios.tcgetattr(terminal)
        modes[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave a shell on our screen
        termios.tcsetattr(terminal, termios.TCSADRAIN, modes)
        yield keys
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, former)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(bell)
        os.close(ring)
