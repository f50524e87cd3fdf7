"""`kvredis get` and `put`: byte for byte there and back, and never half a file."""

import json
import os
import stat
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kvredis.cli.inspect.get import write_whole
from kvredis.storage.errors import BackendError
from tests.backends.topologies import KvredisCluster
from tests.cli.inspected import QWEN, block, connected, plain_redis, run, run_process


@pytest.fixture
def url(address: str) -> str:
    """The server, holding one whole and one damaged block, and a text."""
    value = block(QWEN)
    with connected(address) as client:
        client.flushall()
        client.set("whole", value)
        client.set("damaged", value[:-1] + bytes([value[-1] ^ 1]))
        client.set("cut", value[:-1])
        client.set("text", "words")
    return f"redis://{address}"


def test_what_is_written_is_a_safetensors_file_of_the_block(url: str, tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    result = run("get", "-u", url, "whole", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes() == block(QWEN)
    assert tuple(load_file(path)["kv"].shape) == QWEN.shape()
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_pipe_gets_the_bytes_and_nothing_else(url: str) -> None:
    assert run_process(["get", "-u", url, "whole"]).stdout == block(QWEN)
    assert run_process(["get", "-u", url, "whole", "-o", "-"]).stdout == block(QWEN)


def test_json_says_what_was_written(url: str, tmp_path: Path) -> None:
    path = str(tmp_path / "b")
    told = json.loads(run("get", "-u", url, "whole", "-o", path, "--json").stdout)
    assert told == {"key": "whole", "file": path, "bytes": len(block(QWEN))}
    assert run("get", "-u", url, "whole", "--json").exit_code == 2


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("damaged", "its bytes are damaged: their checksum is"),
        ("cut", "its header tells of 2048 bytes of tensors, and there are 2047"),
        ("text", "it is no safetensors file"),
        ("gone", "has no key gone"),
    ],
)
def test_what_is_no_whole_block_is_not_written(url: str, tmp_path: Path, key: str, why: str) -> None:
    path = tmp_path / "block"
    path.write_text("what was there")
    result = run("get", "-u", url, key, "-o", str(path))
    assert result.exit_code == 1
    assert why in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_raw_takes_what_is_there(url: str, tmp_path: Path) -> None:
    assert run("get", "-u", url, "text", "--raw", "-o", str(tmp_path / "t")).exit_code == 0
    assert (tmp_path / "t").read_bytes() == b"words"


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot be written: No such file or directory"):
        write_whole(tmp_path / "no" / "file", b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BackendError, match="cannot be written: Is a directory"):
        write_whole(tmp_path / "folder", b"x")
    with pytest.raises(BackendError, match="cannot be written: File name too long"):
        write_whole(tmp_path / ("x" * 256), b"x")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(BackendError, match="cannot be written: Too many levels of symbolic links"):
        write_whole(tmp_path / "circle", b"x")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["circle", "folder"]


def test_a_file_may_have_the_longest_name_that_there_is(tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * 255), b"words")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"words"]


def test_what_is_no_file_is_written_into_and_a_link_is_followed(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"words")
        assert os.read(reader, 100) == b"words"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode), "as root, -o /dev/null would have made a file of it"
    link.symlink_to(file)
    write_whole(link, b"words")
    assert (link.is_symlink(), file.read_bytes()) == (True, b"words")


def test_a_block_goes_to_another_server_and_back_through_files(url: str, tmp_path: Path) -> None:
    path, back = tmp_path / "whole.safetensors", tmp_path / "back"
    assert run("get", "-u", url, "whole", "-o", str(path)).exit_code == 0
    (tmp_path / "redis").mkdir()
    with plain_redis(tmp_path / "redis") as plain:
        assert run("put", "-u", plain, str(path)).exit_code == 0
        assert run("get", "-u", plain, "whole", "-o", str(back)).exit_code == 0
    assert back.read_bytes() == block(QWEN)


def test_a_cluster_is_asked_where_the_key_is(tmp_path: Path) -> None:
    path = tmp_path / "b"
    path.write_bytes(block(QWEN))
    with KvredisCluster() as cluster:
        for key in ("a", "b", "c", "d"):
            assert run("put", "-u", cluster.url, str(path), key).exit_code == 0
            assert run("get", "-u", cluster.url, key, "-o", str(tmp_path / key)).exit_code == 0
            assert (tmp_path / key).read_bytes() == block(QWEN)
        assert run("meta", "-u", cluster.url, "a", "b", "c", "d").exit_code == 0
        gone = run("rm", "-u", cluster.url, "a", "b", "c", "d", "--json")
        assert json.loads(gone.stdout) == {"deleted": 4, "missing": []}
