"""The record on disk: what its header says, and that no bit of it can turn unnoticed."""

import errno
import os
import random
from pathlib import Path

import pytest

from kvredis.storage.database import unplaced
from kvredis.storage.disk.files import RealFile, RealFiles
from kvredis.storage.disk.segment import (
    HEADER_BYTES,
    KEY_BYTES_MAX,
    SEGMENTS_MAX,
    Facts,
    Record,
    default_segment_bytes,
    fault,
    geometry,
    record_bytes,
    scratch,
    seal,
    segment_name,
    segment_number,
)
from kvredis.storage.entry import extent_length
from kvredis.storage.memory.allocator import GRAIN_BYTES, Extent

KIB = 1024


def sealed(facts: Facts, payload: bytes, seq: int = 7) -> tuple[memoryview, Record]:
    """A record's image and what the index would say of it."""
    image = scratch(len(payload))
    image[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    (checksum,) = seal([(facts, image)], [seq])
    extent = Extent(0, record_bytes(len(payload)))
    return image, Record.of(facts, extent, seq, checksum)


@pytest.mark.parametrize("key", [b"", b"k", bytes(range(256)), b"x" * KEY_BYTES_MAX], ids=len)
@pytest.mark.parametrize("length", [0, 1, 3584, 3585, 70_000])
def test_what_was_sealed_is_found_to_be_sound(key: bytes, length: int) -> None:
    image, record = sealed(Facts(key, 15, length, 2**63 - 1), random.Random(length).randbytes(length), seq=2**63 - 1)
    assert fault(image, record) is None


def test_every_bit_of_header_and_payload_is_covered() -> None:
    payload = random.Random(1).randbytes(300)
    image, record = sealed(Facts(b"key", 3, len(payload), 0), payload)
    for byte in range(HEADER_BYTES + len(payload)):
        image[byte] ^= 1 << byte % 8
        assert fault(image, record) is not None, byte
        image[byte] ^= 1 << byte % 8
    image[-1] ^= 1
    assert fault(image, record) is None, "what lies behind the payload does not count"


def test_a_sound_record_of_another_block_is_a_fault() -> None:
    payload = b"p" * 100
    image, record = sealed(Facts(b"key", 3, 100, 0), payload)
    for other in (
        sealed(Facts(b"kez", 3, 100, 0), payload)[1],
        sealed(Facts(b"key", 4, 100, 0), payload)[1],
        sealed(Facts(b"key", 3, 99, 0), payload[:99])[1],
        sealed(Facts(b"key", 3, 100, 0), b"q" * 100)[1],
        sealed(Facts(b"key", 3, 100, 0), payload, seq=8)[1],
    ):
        assert fault(image, other) == "another record"
    assert fault(image, record) is None


def test_a_renamed_record_is_sound_as_what_it_was_written_as_until_it_has_that_name_again() -> None:
    image, record = sealed(Facts(b"a", 0, 100, 0), b"p" * 100)
    record.rename(b"b", unplaced(0))
    record.rename(b"c", unplaced(1))
    assert (record.name, record.written_as) == ((b"c", 1), (b"a", 0))
    assert fault(image, record) is None
    other, _ = sealed(Facts(b"c", 1, 100, 0), b"p" * 100)
    assert fault(other, record) == "another record"
    record.rename(b"a", unplaced(0))
    assert (record.name, record.written_as) == ((b"a", 0), (b"a", 0))
    assert record.written_as == record.name
    assert fault(image, record) is None


def test_memory_that_was_never_written_is_no_record() -> None:
    assert fault(scratch(10), sealed(Facts(b"k", 0, 10, 0), b"x" * 10)[1]) == "no record"


def test_a_record_never_needs_more_than_its_extent_in_the_arena() -> None:
    for length in (0, 1, 3583, 3584, 3585, 4096, 2 * KIB * KIB):
        assert HEADER_BYTES + length <= record_bytes(length) <= extent_length(length)
        assert record_bytes(length) % GRAIN_BYTES == 0


@pytest.mark.parametrize(
    ("limit_kib", "segment_kib"), [(4, 4), (5, 256), (1000, 256), (1024, 256), (1 << 20, 4), (1 << 30, 256 * KIB)]
)
def test_segments_stay_within_the_limit_and_are_not_too_many(limit_kib: int, segment_kib: int) -> None:
    cut = geometry(limit_kib * KIB, segment_kib * KIB)
    assert cut.segment_bytes % GRAIN_BYTES == 0
    assert 1 <= cut.count <= SEGMENTS_MAX
    assert limit_kib * KIB - cut.count * GRAIN_BYTES < cut.count * cut.segment_bytes <= limit_kib * KIB


def test_a_disk_that_can_afford_it_has_room_for_redis_longest_value() -> None:
    for limit_gib in (1, 15, 16, 17, 100, 10_000):
        limit_bytes = limit_gib * KIB**3
        cut = geometry(limit_bytes, default_segment_bytes(limit_bytes))
        assert cut.count * cut.segment_bytes <= limit_bytes
        assert (cut.segment_bytes > record_bytes(512 * KIB**2)) is (limit_gib >= 16)
    assert geometry(5 * KIB**2, default_segment_bytes(5 * KIB**2)).segment_bytes == 5 * KIB**2


def test_an_address_and_its_place_in_a_file_are_one_another_s_inverse() -> None:
    cut = geometry(1024 * KIB, 256 * KIB)
    for segment in range(cut.count):
        for offset in (0, GRAIN_BYTES, cut.segment_bytes - GRAIN_BYTES):
            assert cut.locate(cut.address(segment, offset, GRAIN_BYTES)) == (segment, offset)


def test_only_the_names_we_give_are_taken_for_segments() -> None:
    assert [segment_number(segment_name(number)) for number in (0, 7, 12345)] == [0, 7, 12345]
    for name in (
        "segment-1.kv",
        "segment-0001",
        "segment-.kv",
        "segment-00a1.kv",
        "0001.kv",
        "segment--001.kv",
        "lock",
    ):
        assert segment_number(name) is None


# What is found out of a file system before the disk tier trusts it.


@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENOSPC, None), (errno.EDQUOT, None), (errno.EINVAL, "Invalid arg")]
)
def test_a_disk_that_is_full_is_not_one_without_o_direct(
    number: int, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwritev(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        pieces.clear()  # the error's traceback would keep it from being unmapped, which the kernel does not
        raise OSError(number, os.strerror(number))

    def opened(self: RealFiles, path: Path, *, direct: bool) -> RealFile:
        return RealFile(os.open(path, os.O_RDWR | os.O_CREAT), path)  # whatever file system the tests have

    monkeypatch.setattr(RealFiles, "open", opened)
    monkeypatch.setattr(os, "pwritev", pwritev)
    obstacle = RealFiles().direct_obstacle(tmp_path)
    assert obstacle is None if told is None else told in str(obstacle)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_made_and_refused_is_taken_away_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RealFiles, path: Path, *, direct: bool) -> RealFile:
        path.touch()  # as the kernel does, which looks at O_DIRECT only then
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(RealFiles, "open", refuse)
    assert "refuses O_DIRECT" in str(RealFiles().direct_obstacle(tmp_path))
    assert not list(tmp_path.iterdir())


def descriptors_of(path: Path) -> list[int]:
    """The descriptors of this process that lead to a file."""
    return [int(each.name) for each in Path("/proc/self/fd").iterdir() if os.path.realpath(each) == str(path)]


def test_a_lock_is_free_when_it_is_closed_although_a_fork_still_has_its_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    parents = RealFiles().lock(path)
    assert parents is not None
    (descriptor,) = descriptors_of(path)
    forked = RealFile(os.dup(descriptor), path)  # what a child has: another number of the same open file
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        parents.close()
    assert RealFiles().lock(path) is None, "a child gives nothing back"
    forked.close()
    parents = RealFiles().lock(path)
    assert parents is not None
    (descriptor,) = descriptors_of(path)
    forked = RealFile(os.dup(descriptor), path)
    parents.close()
    again = RealFiles().lock(path)
    assert again is not None
    again.close()
    forked.close()
