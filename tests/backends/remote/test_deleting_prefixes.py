"""Deleting all keys under a prefix is done, or it raises: new weights must not be served the old ones' KV."""

from contextlib import closing
from pathlib import Path

import pytest

from kvredis.storage.errors import BackendError
from tests.backends.conftest import Connect, StartServer
from tests.backends.fake_server import FakeServer, Leave, Shelf
from tests.backends.tiered.layered_pair import open_layered
from tests.backends.verbs import content, keys_of, put_through

LENGTH = 20_000


class Scanned(Shelf):
    """A shelf of which all is told at once, and which refuses one command."""

    def __init__(self, refused: bytes) -> None:
        super().__init__()
        self.refused = refused

    def __call__(self, args: list[bytes]) -> bytes | Leave:
        if args[0] == self.refused:
            return b"-NOPERM not for you\r\n"
        if args[0] == b"SCAN":
            keys = b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in self.values)
            return b"*2\r\n$1\r\n0\r\n*%d\r\n%b" % (len(self.values), keys)
        return super().__call__(args)


def test_a_server_that_is_not_there_is_told(connect: Connect, tmp_path: Path) -> None:
    backend = connect(f"unix://{tmp_path}/fake")
    with pytest.raises(BackendError, match=f"may be left at unix://{tmp_path}/fake: a server does not answer"):
        backend.delete_prefix(b"kv")


@pytest.mark.parametrize("command", [b"SCAN", b"UNLINK"])
def test_a_server_that_refuses_is_told_with_what_it_says(connect: Connect, fake: FakeServer, command: bytes) -> None:
    fake.answer = Scanned(command)
    backend = connect(fake.url)
    assert put_through(backend, b"kv:1", content(b"kv:1", LENGTH))
    with pytest.raises(BackendError, match=r"may be left at .*: NOPERM not for you"):
        backend.delete_prefix(b"kv")
    assert backend.present([b"kv:1"]) == [True]


def test_memory_forgets_though_the_server_is_lost(server_of: StartServer) -> None:
    server = server_of("kvredis")
    keys = keys_of(3)
    with closing(open_layered(server.url)) as backend:
        assert all(put_through(backend, key, content(key, LENGTH)) for key in keys)
        server.kill()
        with pytest.raises(BackendError, match="may be left"):
            backend.delete_prefix(b"")
        assert not any(backend.near.present(keys))


def test_a_server_that_goes_between_two_answers_is_told(connect: Connect, fake: FakeServer) -> None:
    shelf = Scanned(b"")

    def answer(args: list[bytes]) -> bytes | Leave:
        return Leave() if args[0] == b"UNLINK" else shelf(args)

    fake.answer = answer
    backend = connect(fake.url)
    assert put_through(backend, b"kv:1", content(b"kv:1", LENGTH))
    with pytest.raises(BackendError, match="a server does not answer"):
        backend.delete_prefix(b"kv")
