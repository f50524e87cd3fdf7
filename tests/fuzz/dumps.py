"""Dumps for RESTORE, sound and damaged: behind a right checksum the bytes are still a stranger's.

The checksum is no secret and keeps no attacker out, so most of these have the right one, whatever they hold.
"""

import random
from typing import Final

from kvredis.server.commands.compat.dump import crc64
from tests.server.live import pattern

VERSIONS: Final = (6, 9, 10, 11, 11, 11, 12, 65535)
LENGTHS: Final = (0, 1, 44, 63, 64, 300, 16_383, 16_384, 70_000, 2**31, 2**32, 2**40, 2**64 - 1)


def encode_length(rng: random.Random, length: int) -> bytes:
    """A length in one of the ways in which a dump may write it, not always the shortest."""
    shortest = 0 if length < 64 else 1 if length < 16_384 else 2 if length < 2**32 else 3
    way = rng.choice([shortest, shortest, min(3, shortest + 1), 3])
    if way == 0:
        return bytes([length])
    if way == 1:
        return bytes([0x40 | length >> 8, length & 255])
    return b"\x80" + length.to_bytes(4, "big") if way == 2 else b"\x81" + length.to_bytes(8, "big")


def packed(rng: random.Random) -> tuple[bytes, int]:
    """A stream of LZF's control bytes and what it unpacks to: valid as far as it can be told from here."""
    stream, length = bytearray(), 0
    for _ in range(rng.choice([0, 1, 3, 10, 200])):
        if length and rng.random() < 0.6:
            distance = rng.randrange(min(length, 8192))
            repeated = rng.choice([3, 5, 8, 9, 100, 264])
            if repeated < 9:
                stream.append((repeated - 2) << 5 | distance >> 8)
            else:
                stream += bytes([7 << 5 | distance >> 8, repeated - 9])
            stream.append(distance & 255)
            length += repeated
        else:
            literal = rng.randrange(1, 33)
            stream += bytes([literal - 1]) + rng.randbytes(literal)
            length += literal
    return bytes(stream), length


def dump(rng: random.Random) -> bytes:
    """A dump: a string of each encoding, another type, or noise; damaged now and then, mostly well sealed."""
    kind = rng.randrange(6)
    if kind < 2:
        text = pattern(rng.choice([0, 3, 63, 64, 300, 16_383, 16_384, 70_000]), kind)
        claimed = rng.choice([len(text)] * 4 + [rng.choice(LENGTHS)])
        body = b"\0" + encode_length(rng, claimed) + text
    elif kind == 2:
        size = rng.choice([1, 2, 4])
        body = bytes([0, 0xC0 | (size // 2)]) + rng.randbytes(size - (rng.random() < 0.2))
    elif kind == 3:
        stream, length = packed(rng)
        claimed = rng.choice([length] * 6 + [length + 1, max(0, length - 1), rng.choice(LENGTHS)])
        stream_length = rng.choice([len(stream)] * 6 + [rng.choice(LENGTHS)])
        body = b"\0\xc3" + encode_length(rng, stream_length) + encode_length(rng, claimed) + stream
    else:
        body = rng.choice([b"", b"\0", b"\1", b"\x12", b"\0\xc4", b"\0\xff"]) + rng.randbytes(rng.randrange(40))
    if rng.random() < 0.3 and body:
        damaged = bytearray(body)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        body = bytes(damaged[: rng.choice([len(damaged)] * 3 + [rng.randrange(len(damaged))])])
    body += rng.choice(VERSIONS).to_bytes(2, "little")
    seal = crc64(body) if rng.random() < 0.9 else rng.randrange(2**64)
    return body + seal.to_bytes(8, "little")
