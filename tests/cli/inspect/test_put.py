"""`kvredis put`: a block is stored as it is, and a file that is none is refused before the server hears of it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.connection import AbstractConnection

from kvredis.cli.inspect.block_file import checked, read_block
from kvredis.cli.inspect.client import PIECE_BYTES
from kvredis.storage.errors import LayoutError
from tests.cli.inspected import QWEN, block, connected, run


@pytest.fixture
def url(address: str) -> str:
    with connected(address) as client:
        client.flushall()
    return f"redis://{address}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my-block.safetensors"
    path.write_bytes(block(QWEN))
    return path


def value_of(address: str, key: str) -> bytes | None:
    with connected(address) as client:
        value = client.get(key)
    assert value is None or isinstance(value, bytes)
    return value


def test_the_key_is_the_files_name_without_its_suffix(address: str, url: str, file: Path) -> None:
    assert run("put", "-u", url, str(file)).exit_code == 0
    assert value_of(address, "my-block") == block(QWEN)


def test_a_key_a_time_to_live_and_json(address: str, url: str, file: Path) -> None:
    result = run("put", "-u", url, str(file), "other", "--ttl", "100", "--json")
    assert json.loads(result.stdout) == {"key": "other", "bytes": len(block(QWEN)), "stored": True, "ttl_s": 100}
    with connected(address) as client:
        assert 0 < client.ttl("other") <= 100


def test_if_absent_leaves_what_is_there_and_says_so(address: str, url: str, file: Path) -> None:
    assert run("put", "-u", url, "--raw", __file__, "k").exit_code == 0
    result = run("put", "-u", url, str(file), "k", "--if-absent")
    assert result.exit_code == 1
    assert result.stderr == f"kvredis: {url} has k already: it is left alone (--if-absent)\n"
    assert value_of(address, "k") == Path(__file__).read_bytes()


@pytest.mark.parametrize("nbytes", [(1 << 20) + 1, 40 << 20], ids=["on its way at once", "still on its way"])
def test_a_value_that_is_longer_than_the_server_takes_is_said_to_be(url: str, tmp_path: Path, nbytes: int) -> None:
    address = url.removeprefix("redis://")
    (tmp_path / "long").write_bytes(bytes(nbytes))
    with connected(address) as client:
        before = client.config_get("proto-max-bulk-len")["proto-max-bulk-len"]
        client.config_set("proto-max-bulk-len", "1mb")
        try:
            result = run("put", "-u", url, "--raw", str(tmp_path / "long"))
        finally:
            client.config_set("proto-max-bulk-len", before)
    assert result.exit_code == 1
    text = f"{url} takes no value above 1,048,576 bytes (proto-max-bulk-len), and this one has {nbytes:,}"
    assert result.stderr == f"kvredis: {text}\n"


def test_a_value_is_sent_in_pieces_from_where_it_lies(
    address: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    send: Callable[..., None] = AbstractConnection.send_packed_command

    def noted(self: Any, command: Any, check_health: bool = True) -> None:
        pieces = [command] if isinstance(command, str) else list(command)
        sent.extend(pieces)
        send(self, pieces, check_health)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", noted)
    value = random.Random(7).randbytes(2 * PIECE_BYTES + 5)
    (tmp_path / "large").write_bytes(value)
    assert run("put", "-u", url, "--raw", str(tmp_path / "large"), "--ttl", "100", "--if-absent").exit_code == 0
    assert max(map(len, sent)) == PIECE_BYTES, "each has the timeout to itself"
    assert sum(isinstance(piece, memoryview) for piece in sent) == 3
    assert value_of(address, "large") == value


def test_standard_input_needs_a_key(address: str, url: str) -> None:
    assert run("put", "-u", url, "-", stdin=block(QWEN)).exit_code == 2
    assert run("put", "-u", url, "-", "in", stdin=block(QWEN)).exit_code == 0
    assert value_of(address, "in") == block(QWEN)


def test_an_empty_file_is_a_value_with_raw_alone(address: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert run("put", "-u", url, str(tmp_path / "empty")).exit_code == 1
    assert run("put", "-u", url, "--raw", str(tmp_path / "empty")).exit_code == 0
    assert value_of(address, "empty") == b""


def test_a_file_that_is_not_there_is_named(url: str, tmp_path: Path) -> None:
    result = run("put", "-u", url, str(tmp_path / "no"))
    assert result.exit_code == 1
    assert result.stderr == f"kvredis: {tmp_path / 'no'} cannot be read: No such file or directory\n"


def header(**fields: object) -> bytes:
    """A file of 8 bytes of tensor whose header has these fields."""
    text = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


def edited(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda value: value.replace(old, new, 1)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "there is no header"),
        (b"text that is none", "there is no header"),
        ((5).to_bytes(8, "little") + b"{]}  ", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        (b"\x10" + bytes(7) + b'{"t":1}         ', "has no description"),
        (header(dtype=3), "has no dtype"),
        (header(shape=[-1]), "has no shape"),
        (header(data_offsets=[0]), "has no data_offsets"),
        (header(data_offsets=[8, 0]), "ends before it begins"),
        (header(shape=[2**62] * 2000), "has 2,000 dimensions"),
        (header(shape=[3]), "would have 12 bytes, not 8"),
        (header(dtype="F128", data_offsets=[1, 8]), "begins at byte 1, not 0"),
        (header() + b"x", "tells of 8 bytes of tensors, and there are 9"),
        (header()[:-1], "tells of 8 bytes of tensors, and there are 7"),
        (b"[" * 9 + bytes(8), "there is no header"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_and_said_why(value: bytes, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        read_block(memoryview(value))


def test_metadata_must_be_texts() -> None:
    text = b'{"__metadata__":{"a":1}}'
    with pytest.raises(LayoutError, match="__metadata__ is not a map of texts"):
        read_block(memoryview(len(text).to_bytes(8, "little") + text))


def test_what_a_header_says_does_not_reach_a_terminal_as_it_is() -> None:
    text = json.dumps({"__metadata__": {"xxh3": "\x1b[2J\ud800"}}).encode()
    with pytest.raises(LayoutError) as caught:
        checked(memoryview(len(text).to_bytes(8, "little") + text))
    assert str(caught.value).isprintable()


def test_a_damaged_file_is_not_stored(address: str, url: str, file: Path) -> None:
    file.write_bytes(block(QWEN)[:-1] + b"\x00")
    result = run("put", "-u", url, str(file))
    assert result.exit_code == 1
    assert "its bytes are damaged" in result.stderr
    assert value_of(address, "my-block") is None
