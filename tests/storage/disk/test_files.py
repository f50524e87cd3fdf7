"""What is found out of a file system before the disk tier trusts it."""

import errno
import os
from pathlib import Path

import pytest

from kvredis.storage.disk.files import RealFile, RealFiles


@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENOSPC, None), (errno.EDQUOT, None), (errno.EINVAL, "Invalid arg")]
)
def test_a_disk_that_is_full_is_not_one_without_o_direct(
    number: int, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        del data  # the error's traceback would keep it from being unmapped, which the kernel does not
        raise OSError(number, os.strerror(number))

    def opened(self: RealFiles, path: Path, *, direct: bool) -> RealFile:
        return RealFile(os.open(path, os.O_RDWR | os.O_CREAT), path)  # whatever file system the tests have

    monkeypatch.setattr(RealFiles, "open", opened)
    monkeypatch.setattr(os, "pwrite", pwrite)
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
