"""The end of XXH3-64: from eight lanes to a number. And the constants that its beginning takes.

Facts: https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm", inputs of more than 240 bytes with the
default secret and seed 0.
"""

from collections.abc import Sequence
from typing import Final

BLOCK_BYTES: Final = 1024
"""Behind so many the lanes are scrambled. Only inputs of whole blocks are known here."""
LANES: Final = 8
SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
LAST_STRIPE: Final = 121
"""Where in the secret the last stripe's part begins."""

_PRIMES_32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIMES_64: Final = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
INITIAL: Final[tuple[int, ...]] = (_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0])
_MERGE: Final = 11  # where in the secret merging begins
_AVALANCHE: Final = 0x165667919E3779F9
_ALL: Final = (1 << 64) - 1


_KEYS: Final = [int.from_bytes(SECRET[at : at + 8], "little") for at in range(_MERGE, _MERGE + 8 * LANES, 8)]


def digest_of(lanes: Sequence[int], nbytes: int) -> int:
    """The checksum of `nbytes` bytes whose last lanes these are."""
    total = nbytes * _PRIMES_64[0]
    for pair in range(0, LANES, 2):
        product = (lanes[pair] ^ _KEYS[pair]) * (lanes[pair + 1] ^ _KEYS[pair + 1])
        total += (product & _ALL) ^ (product >> 64)
    total &= _ALL
    total = (total ^ (total >> 37)) * _AVALANCHE & _ALL
    return total ^ (total >> 32)
