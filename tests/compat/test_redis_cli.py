"""redis-cli, Debian's: what an operator types."""

import shutil
import subprocess

import pytest

from tests.compat.conftest import RunningServer

TIMEOUT_S = 30

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")


def cli(server: RunningServer, *words: str, stdin: bytes = b"") -> bytes:
    """What redis-cli prints for these arguments."""
    command = ["redis-cli", "-s", server.unixsocket, *words]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=TIMEOUT_S, check=True)
    return done.stdout


def test_scan_with_a_pattern_lists_the_keys_of_one_model(kvredis: RunningServer) -> None:
    for key in ("vllm@meta-llama/Llama-3@1@0@aa", "vllm@meta-llama/Llama-3@1@0@bb", "vllm@mistralai/Mistral@1@0@aa"):
        cli(kvredis, "SET", key, "1")
    found = cli(kvredis, "--scan", "--pattern", "*Llama*").split()
    assert sorted(found) == [b"vllm@meta-llama/Llama-3@1@0@aa", b"vllm@meta-llama/Llama-3@1@0@bb"]


@pytest.mark.parametrize("protocol", [["-2"], ["-3"]])
def test_info_is_printed_as_text_in_both_protocols(protocol: list[str], kvredis: RunningServer) -> None:
    text = cli(kvredis, *protocol, "INFO").decode()
    assert text.startswith("# Server\r\nredis_version:7.4.0\r\n")
    assert "\r\nmaxmemory:67108864\r\n" in text
    assert "\r\n# Kv\r\n" in text


def test_memory_usage_and_del_work_on_a_large_value(kvredis: RunningServer) -> None:
    cli(kvredis, "-x", "SET", "block", stdin=bytes(1 << 20))
    assert int(cli(kvredis, "MEMORY", "USAGE", "block")) > 1 << 20
    assert cli(kvredis, "DEL", "block") == b"1\n"
    assert cli(kvredis, "MEMORY", "USAGE", "block") == b"\n"


def test_a_raw_get_into_a_file_is_the_value(kvredis: RunningServer) -> None:
    value = bytes(range(256)) * 8192
    cli(kvredis, "-x", "SET", "block", stdin=value)
    assert cli(kvredis, "--raw", "GET", "block") == value + b"\n"  # the line feed is redis-cli's own
    assert cli(kvredis, "-D", "", "--raw", "GET", "block") == value


def test_an_interactive_session_learns_the_commands_and_helps(kvredis: RunningServer) -> None:
    printed = cli(kvredis, stdin=b"help @kv\nping\nget nope\nselect 1\nset a 1\nobject encoding a\n").decode()
    assert "PONG" in printed
    assert "int" in printed


def test_a_typed_error_is_shown_as_redis_words_it(kvredis: RunningServer) -> None:
    assert cli(kvredis, "LPUSH", "l", "a") == (b"ERR unknown command 'LPUSH', with args beginning with: 'l' 'a' \n\n")


def test_bigkeys_and_memkeys_walk_the_keyspace(kvredis: RunningServer) -> None:
    cli(kvredis, "-x", "SET", "big", stdin=bytes(100_000))
    cli(kvredis, "SET", "small", "1")
    assert b"""Biggest string found '"big"' has 100000 bytes""" in cli(kvredis, "--bigkeys")
    assert b"""Biggest string found '"big"' has""" in cli(kvredis, "--memkeys")


def test_pipe_mode_counts_every_reply(kvredis: RunningServer) -> None:
    requests = b"".join(b"*3\r\n$3\r\nSET\r\n$4\r\n%04d\r\n$1\r\nx\r\n" % n for n in range(1000))
    assert b"errors: 0, replies: 1000" in cli(kvredis, "--pipe", stdin=requests)
    assert cli(kvredis, "DBSIZE") == b"1000\n"
