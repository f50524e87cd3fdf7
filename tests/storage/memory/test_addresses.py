"""A view tells where it begins, whatever else in the process asks CPython for buffers."""

import ctypes
import mmap
from collections.abc import Callable, Sequence

import pytest

from kvredis.storage.memory import copy
from kvredis.storage.memory.copy import View, address_of, addresses_of


def in_python(views: Sequence[View]) -> list[int]:
    return list(map(address_of, views))


@pytest.fixture(params=["natively", "in Python"])
def way(request: pytest.FixtureRequest) -> Callable[[Sequence[View]], list[int]]:
    if request.param == "in Python":
        return in_python
    if copy._addresses_natively is None:
        pytest.skip("the extension is not built here")
    return copy._addresses_natively


def test_a_view_begins_where_its_memory_does() -> None:
    memory = bytearray(b"0123456789")
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert address_of(memory) == base
    assert address_of(memoryview(memory)[3:]) == base + 3
    assert address_of(memoryview(memory).toreadonly()[4:]) == base + 4


def test_the_view_is_free_again_afterwards() -> None:
    with mmap.mmap(-1, 4096) as memory:
        view = memoryview(memory)
        address_of(view)
        view.release()  # or closing the mapping would raise BufferError


def test_what_is_not_contiguous_has_no_address() -> None:
    with pytest.raises(BufferError):
        address_of(memoryview(b"0123456789")[::2])


def test_types_that_others_set_for_the_same_function_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.pythonapi.PyObject_GetBuffer, "argtypes", (ctypes.c_int,))
    assert address_of(b"bytes") > 0


def test_of_several_views_each_tells_in_order(way: Callable[[Sequence[View]], list[int]]) -> None:
    memory = bytearray(b"0123456789")
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    views: list[View] = [memoryview(memory)[5:], memoryview(memory).toreadonly(), memory, memoryview(memory)[2:3]]
    assert way(views) == addresses_of(views) == [base + 5, base, base, base + 2]
    assert way(tuple(views)) == [base + 5, base, base, base + 2]
    assert way([]) == []


def test_several_views_are_free_again_also_when_one_has_no_address(way: Callable[[Sequence[View]], list[int]]) -> None:
    with mmap.mmap(-1, 4096) as memory:
        views = [memoryview(memory)[:100], memoryview(memory)[100:]]
        way(views)
        with pytest.raises(BufferError):
            way([*views, memoryview(b"0123456789")[::2]])
        with pytest.raises(TypeError):
            way([*views, 3])  # type: ignore[list-item]
        for view in views:
            view.release()


@pytest.mark.parametrize("wrong", [3, None])
def test_what_is_no_sequence_of_views_is_refused(way: Callable[[Sequence[View]], list[int]], wrong: object) -> None:
    with pytest.raises(TypeError):
        way(wrong)  # type: ignore[arg-type]
