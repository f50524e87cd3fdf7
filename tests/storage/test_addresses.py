"""A view tells where it begins, whatever else in the process asks CPython for buffers."""

import ctypes
import mmap

import pytest

from kvredis.storage.addresses import address_of


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
