"""What lies on disk: the record, which is an extent's own image, and the few large files that records lie in.

A payload begins PAYLOAD_OFFSET_BYTES past the start of its extent, for reasons of memory (entry.py). The bytes in front
of it are free, and a record's header is made to fit them, so that a block goes to disk and back as one aligned piece:

    offset 0            512                       512 + length      next multiple of 4096
    | header | unused | payload ...              | whatever was there |

Header, little-endian: magic (8), format version (u16), key length (u16), database (u16), 0 (u16), payload length (u64),
expire_at_ms (u64), sequence number (u64), xxh3-128 of the payload (16), key, zeros, crc32 of all before it (u32, the
header's last four bytes). A header is a statement that the index must confirm: a record is what was asked for only if
both agree on key, database, length, sequence number and checksum, and the payload has that checksum. A block that is
renamed stays where it lies, header and all: then the index knows both names.

The disk is one row of equally long segments, addressed by one number: segment i begins at i x (segment_bytes + one
grain). The grain between two segments is never used, so the allocator that is used for the arena never makes a hole
or an extent that crosses from one file into the next.
"""

import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvredis.storage.database import Database, unplaced
from kvredis.storage.memory.allocator import GRAIN_BYTES, Extent

from .checksum import digest, digests

FORMAT_VERSION: Final = 1
"""Of records and index together; another one is another directory's."""

MAGIC: Final = b"KVREDISR"
HEADER_BYTES: Final = 512
"""As many as entry.PAYLOAD_OFFSET_BYTES, since a record is an extent's own image (tiering/disk_io.py asserts it)."""
_HEADER = struct.Struct("<8sHHHHQQQ16s")
_CRC = struct.Struct("<I")
_CRC_AT = HEADER_BYTES - _CRC.size
KEY_BYTES_MAX: Final = _CRC_AT - _HEADER.size
"""A longer key does not fit the header: such a block is not storable, and stays in memory or leaves."""

SEGMENTS_MAX: Final = 256
"""Files that are open at once; larger disks get longer segments."""


SEGMENT_BYTES: Final = 256 * 1024**2
LONG_SEGMENT_BYTES: Final = 1024**3
"""Room for Redis' longest value, 512 MB."""
LONG_SEGMENTS_FROM_BYTES: Final = 16 * 1024**3

Name = tuple[bytes, int]
"""A key and its database."""


class Facts(NamedTuple):
    """What a header says of a block, beside what is derived from the payload."""

    key: bytes
    space: int
    length: int
    expire_at_ms: int


@dataclass(slots=True, eq=False)
class Record:
    """A block on disk: `length` bytes of payload in the record at `extent`, which counts from the first segment on."""

    key: bytes
    database: Database
    extent: Extent
    length: int
    expire_at_ms: int
    seq: int
    """Ever growing, over restarts too: of two records of one key the one with the higher number is the newer."""
    checksum: bytes
    written_key: bytes = field(init=False)
    written_space: int = field(init=False)
    """The name in the header, where that is not the record's own any more."""
    renamed_seq: int = 0
    """The sequence number that was due when it got its present name by a rename; 0 = it never did."""
    swapped_before: int = 0
    """Its database's `swapped` when it came there."""
    readers: int = 0
    """Reads under way; the extent is not used again before they have ended."""
    retired: bool = False
    """Gone from the index on disk, so that the last reader frees the extent."""
    write: int = 0
    """The number of the write to the store that made it; 0 = it was found at the start."""
    damaged: bool = False
    """It could not be read back as it was: that is why it is gone."""
    superseded: bool = False
    """Its key has a newer value in memory; it stays for a crash until that value is on disk (superseded.py)."""
    generation: int = 0
    """The number of the batch with which the index learned of it; 0 = it was found at the start."""

    @classmethod
    def of(cls, facts: Facts, extent: Extent, seq: int, checksum: bytes) -> "Record":
        """The record of a block that was just sealed; in no database yet."""
        return cls(facts.key, unplaced(facts.space), extent, facts.length, facts.expire_at_ms, seq, checksum)

    def __post_init__(self) -> None:
        self.written_key, self.written_space = self.key, self.database.number

    @property
    def space(self) -> int:
        """The number of its database."""
        return self.database.number

    @property
    def name(self) -> Name:
        """What the index knows it by."""
        return self.key, self.database.number

    @property
    def written_as(self) -> Name:
        """What its header knows it by."""
        return self.written_key, self.written_space

    @property
    def named_seq(self) -> int:
        """The sequence number that was due when it got its present name by a rename or SWAPDB; 0 = it never did."""
        swapped = self.database.swapped
        return swapped if swapped > self.swapped_before else self.renamed_seq

    def rename(self, key: bytes, database: Database) -> None:
        """Give it another name; the bytes stay as they are. A published record is renamed by its tier alone."""
        self.key, self.database, self.swapped_before = key, database, database.swapped


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the disk is cut: `count` segments of `segment_bytes` each."""

    segment_bytes: int
    count: int

    @property
    def stride_bytes(self) -> int:
        """From the start of a segment to that of the next, in addresses."""
        return self.segment_bytes + GRAIN_BYTES

    def locate(self, extent: Extent) -> tuple[int, int]:
        """Segment and offset in its file."""
        return divmod(extent.offset, self.stride_bytes)

    def address(self, segment: int, offset: int, length: int) -> Extent:
        """The inverse of `locate`."""
        return Extent(segment * self.stride_bytes + offset, length)


def geometry(limit_bytes: int, segment_bytes: int) -> Geometry:
    """Cut `limit_bytes`, at least a grain, into equal segments of about `segment_bytes` and at most SEGMENTS_MAX."""
    wanted = max(segment_bytes, -(-limit_bytes // SEGMENTS_MAX), GRAIN_BYTES)
    count = -(-limit_bytes // wanted)
    return Geometry(max(GRAIN_BYTES, limit_bytes // count // GRAIN_BYTES * GRAIN_BYTES), count)


def default_segment_bytes(limit_bytes: int) -> int:
    """How long segments are when the options do not say: a record lies in one, so disks that can afford it get longer
    ones."""
    return LONG_SEGMENT_BYTES if limit_bytes >= LONG_SEGMENTS_FROM_BYTES else SEGMENT_BYTES


def segment_name(segment: int) -> str:
    """The name of a segment's file."""
    return f"segment-{segment:04d}.kv"


def segment_number(name: str) -> int | None:
    """The inverse of `segment_name`; None for a file that is no segment."""
    digits = name.removeprefix("segment-").removesuffix(".kv")
    return int(digits) if digits.isascii() and digits.isdigit() and segment_name(int(digits)) == name else None


def record_bytes(length: int) -> int:
    """Bytes on disk of a record with a payload of `length` bytes; never more than its extent in the arena has."""
    return -(-(HEADER_BYTES + length) // GRAIN_BYTES) * GRAIN_BYTES


def seal(images: Sequence[tuple[Facts, memoryview]], seqs: Sequence[int]) -> list[bytes]:
    """Write the headers in front of the payloads that lie in images; gives the payloads' checksums.

    Reads the whole payloads, with the GIL free. No key may be longer than KEY_BYTES_MAX.
    """
    checksums = digests([image[HEADER_BYTES : HEADER_BYTES + facts.length] for facts, image in images])
    for (facts, image), seq, checksum in zip(images, seqs, checksums, strict=True):
        _write_header(image, facts, seq, checksum)
    return checksums


def _write_header(image: memoryview, facts: Facts, seq: int, checksum: bytes) -> None:
    key, space, length, expire_at_ms = facts
    header = bytearray(HEADER_BYTES)
    _HEADER.pack_into(header, 0, MAGIC, FORMAT_VERSION, len(key), space, 0, length, expire_at_ms, seq, checksum)
    header[_HEADER.size : _HEADER.size + len(key)] = key
    _CRC.pack_into(header, _CRC_AT, zlib.crc32(memoryview(header)[:_CRC_AT]))
    image[:HEADER_BYTES] = header


def fault(image: memoryview, record: Record, name: Name | None = None) -> str | None:
    """What is wrong with the record in `image`, in a word or two; None when it is, to the bit, what `record` says.

    `name` is what the header should say, for a caller whose record others may rename meanwhile.
    """
    magic, version, key_length, space, _, length, _, seq, checksum = _HEADER.unpack_from(image)
    if magic != MAGIC:
        return "no record"
    if _CRC.unpack_from(image, _CRC_AT)[0] != zlib.crc32(image[:_CRC_AT]):
        return "header checksum"
    if version != FORMAT_VERSION:
        return "format version"
    key = bytes(image[_HEADER.size : _HEADER.size + key_length])
    if ((key, space), length, seq, checksum) != (name or record.written_as, record.length, record.seq, record.checksum):
        return "another record"
    if digest(image[HEADER_BYTES : HEADER_BYTES + length]) != record.checksum:
        return "payload checksum"
    return None


def scratch(length: int) -> memoryview:
    """Room for the record of a payload of `length` bytes that has no extent in the arena, aligned as O_DIRECT asks."""
    return memoryview(mmap.mmap(-1, record_bytes(length)))
