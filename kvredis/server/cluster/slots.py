"""Which of the 16384 hash slots a key is in, by Redis Cluster's rule.

A slot is the CRC16 of the key, or of its tag: what stands between the first `{` and the next `}`, unless that is
nothing. Keys with one tag are in one slot, whatever surrounds it. The CRC is XMODEM's, which `binascii` has in C.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from kvredis.server.commands.registry import keys_end

if TYPE_CHECKING:
    from kvredis.server.commands.registry import Command

SLOTS: Final = 16384
SLOT_MASK: Final = SLOTS - 1

BRACE: Final = ord("{")
"""As a number, since Python looks for a byte in bytes ten times as fast as for bytes of length one."""


def slot_of(key: bytes) -> int:
    """The slot of a key."""
    return crc_hqx(hashed_part(key) if BRACE in key else key, 0) & SLOT_MASK


def hashed_part(key: bytes) -> bytes:
    """The tag of a key, or all of a key that has none."""
    tag, closed, _ = key.partition(b"{")[2].partition(b"}")
    return tag if closed and tag else key


def head_of(key: bytes) -> bytes:
    """A key up to the end of its tag, empty without one. All keys with this head are in one slot."""
    front, opened, rest = key.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return front + opened + tag + closed if closed and tag else b""


def routing_keys(command: Command, args: Sequence[object]) -> list[bytes]:
    """The arguments of a command line that say where in a cluster it belongs: its keys, and shard channels, which are
    given as keys for this purpose alone."""
    first, last, step = command.keys
    if not first:
        return []
    end = keys_end(command.behind_keys, args) if command.behind_keys else len(args)
    return cast("list[bytes]", args[first : end + last + 1 if last < 0 else min(end, last + 1) : step])
