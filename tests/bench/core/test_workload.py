"""The proof of the bytes can fail: each way in which a server could be wrong changes the verdict."""

import pytest

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.workload import PAGE_BYTES, VALUE_OFFSET_BYTES, Memory, Workload, memory_bytes, working_set

SIZE = 5000
COUNT = 4


@pytest.fixture(scope="module")
def memories() -> tuple[Memory, Memory]:
    nbytes = memory_bytes([SIZE], COUNT * SIZE)
    return Memory(nbytes, seed=1), Memory(nbytes)


@pytest.fixture
def work(memories: tuple[Memory, Memory]) -> Workload:
    work = Workload(SIZE, COUNT, *memories)
    work.wipe()
    return work


def answer(work: Workload, shift: int) -> None:
    """Fill the places as a right server would after the SETs of `shift`."""
    for index in range(work.count):
        work.place(index)[:] = work.value(index, shift)


def test_the_right_bodies_pass_and_are_counted(work: Workload) -> None:
    answer(work, 3)
    assert work.verify(3, "fake") == COUNT * SIZE


@pytest.mark.parametrize("index", range(COUNT))
@pytest.mark.parametrize("at", [0, 1, SIZE // 2, SIZE - 1])
def test_one_flipped_bit_anywhere_fails_and_is_named(work: Workload, index: int, at: int) -> None:
    answer(work, 0)
    work.place(index)[at] ^= 0x80
    with pytest.raises(
        VerificationError, match=rf"fake returned a wrong byte: key {work.keys[index].decode()}.* byte {at}:"
    ):
        work.verify(0, "fake")


def test_the_values_of_the_pass_before_fail(work: Workload) -> None:
    answer(work, 1)
    with pytest.raises(VerificationError):
        work.verify(2, "fake")


def test_bodies_that_never_came_fail(work: Workload) -> None:
    with pytest.raises(VerificationError):
        work.verify(0, "fake")


def test_the_values_of_one_pass_are_all_different(work: Workload) -> None:
    assert len({bytes(work.value(index, 0)) for index in range(COUNT)}) == COUNT


def test_the_same_seed_gives_the_same_values_and_another_seed_others() -> None:
    first, again, other = (Memory(8192, seed=seed) for seed in (7, 7, 8))
    assert first.view == again.view
    assert first.view != other.view


def test_connections_share_the_keys_without_overlap(work: Workload) -> None:
    keys = [job.key for part in range(3) for job in work.gets(part, 3)]
    assert sorted(keys) == sorted(work.keys)


def test_more_connections_than_keys_still_have_one_each(work: Workload) -> None:
    assert [len(work.sets(0, part, 6)) for part in range(6)] == [1] * 6


def test_values_lie_512_bytes_past_a_page_start(work: Workload, memories: tuple[Memory, Memory]) -> None:
    assert memories[0].address % PAGE_BYTES == 0
    starts = [work._at(slot) % PAGE_BYTES for slot in range(COUNT)]
    assert starts == [VALUE_OFFSET_BYTES] * COUNT


def test_a_working_set_has_two_keys_at_least() -> None:
    assert working_set(32 << 20, 128 << 20) == 4
    assert working_set(100 << 20, 128 << 20) == 2


def test_a_workload_that_does_not_fit_is_refused(memories: tuple[Memory, Memory]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Workload(SIZE, COUNT + 1, *memories)


def test_more_memory_than_the_machine_has_is_refused_before_it_is_filled() -> None:
    with pytest.raises(BenchError, match=r"need 1048576\.00 GiB, but .* is "):
        Memory(1 << 50)
