"""The checksum of what is on disk: XXH3-128, whichever code finds it."""

import random
import threading

import pytest
from xxhash import xxh3_128_digest

from kvredis.storage.disk import checksum

KIB = 1024
GROUP_BYTES = 64 * KIB
LENGTHS = (
    *(241, 256, 257, 1023, 1024, 1025, 1088, 1089, 2048, 4097),
    *(GROUP_BYTES - 1, GROUP_BYTES, GROUP_BYTES + 1, GROUP_BYTES + 1025, 2 * GROUP_BYTES, 2 * GROUP_BYTES + 1),
    *(128 * KIB - 1, 2048 * KIB, 2048 * KIB + 1, 2048 * KIB + 12_345),
)
"""Around the stripes, blocks and groups that the code adds up, and where it gives up the interpreter lock."""

NOISE = memoryview(random.Random(5).randbytes(LENGTHS[-1] + 64))


@pytest.mark.parametrize("length", [0, 1, 240, *LENGTHS])
def test_the_checksum_of_any_length_is_that_of_xxhash(length: int) -> None:
    for shift in (0, 1, 33):
        payload = NOISE[shift : shift + length]
        assert checksum.digest(payload) == xxh3_128_digest(payload)


@pytest.mark.parametrize("length", LENGTHS)
def test_our_own_code_finds_what_xxhash_finds(length: int) -> None:
    native = pytest.importorskip("kvredis.storage.disk._checksum", reason="the extension is not built here")
    if not native.is_usable():
        pytest.skip("this processor has no AVX2")
    for shift in (0, 1, 33):
        payload = NOISE[shift : shift + length]
        assert native.digests([payload]) == [xxh3_128_digest(payload)]


def test_one_turned_bit_anywhere_is_another_checksum() -> None:
    payload = bytearray(NOISE[: 2 * GROUP_BYTES + 1500])
    before = checksum.digest(memoryview(payload))
    for at in (0, 1023, 1024, 16 * KIB, GROUP_BYTES - 1, GROUP_BYTES, 2 * GROUP_BYTES + 100, len(payload) - 1):
        payload[at] ^= 4
        assert checksum.digest(memoryview(payload)) != before, at
        payload[at] ^= 4
    assert checksum.digest(memoryview(payload)) == before


def test_what_is_short_or_not_in_one_piece_is_refused_and_let_go_of() -> None:
    native = pytest.importorskip("kvredis.storage.disk._checksum", reason="the extension is not built here")
    long, short = bytearray(KIB), bytearray(240)
    with pytest.raises(ValueError, match="no checksum of 240 bytes"):
        native.digests([long, short])
    with pytest.raises(BufferError):
        native.digests([long, NOISE[::2]])
    with pytest.raises(TypeError):
        native.digests([long, 7])
    for each in (long, short):
        each.extend(b"x")  # BufferError, were it still held


def test_each_of_several_payloads_has_its_own_checksum() -> None:
    payloads = [NOISE[start : start + length] for start, length in ((0, 300 * KIB), (7, 64 * KIB), (50, 128 * KIB))]
    assert checksum.digests(payloads) == [xxh3_128_digest(payload) for payload in payloads]
    assert checksum.digests([*payloads, NOISE[:3]])[-1] == xxh3_128_digest(NOISE[:3])
    assert checksum.digests([]) == []


def test_threads_that_sum_at_the_same_time_do_not_disturb_each_other() -> None:
    expected = [xxh3_128_digest(NOISE[shift : shift + 300 * KIB]) for shift in range(4)]
    found: list[list[bytes]] = [[] for _ in expected]

    def sum_up(shift: int) -> None:
        found[shift] += [checksum.digest(NOISE[shift : shift + 300 * KIB]) for _ in range(50)]

    threads = [threading.Thread(target=sum_up, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[digest] * 50 for digest in expected]
