"""redis-cli, Debian's: what an operator types."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.compat.conftest import RunningServer

TIMEOUT_S = 30
MODELS = ("vllm@meta-llama/Llama-3@1@0@aa", "vllm@meta-llama/Llama-3@1@0@bb", "vllm@mistralai/Mistral@1@0@aa")
MANY = 10_000

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")


def run(server: RunningServer, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """redis-cli with these arguments, however it ends."""
    command = ["redis-cli", "-s", server.unixsocket, *words]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=TIMEOUT_S)


def cli(server: RunningServer, *words: str, stdin: bytes = b"") -> bytes:
    """What redis-cli prints for these arguments; it must end well."""
    done = run(server, *words, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def watch(server: RunningServer, *words: str, until: Callable[[bytes], bool], meanwhile: Callable[[], None]) -> bytes:
    """What redis-cli shows on a terminal for a mode that never ends, until that suffices. `meanwhile` is done after
    each piece of output."""
    ours, its = os.openpty()
    command = ["timeout", str(TIMEOUT_S), "redis-cli", "-s", server.unixsocket, *words]
    seen = b""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its) as process:
        os.close(its)
        try:
            while not until(seen):
                try:
                    seen += os.read(ours, 4096)
                except OSError as closed:
                    raise AssertionError(f"redis-cli ended after {seen!r}") from closed
                meanwhile()
        finally:
            process.terminate()
            os.close(ours)
    return seen


def test_the_steps_of_lmcaches_tutorial_find_a_models_blocks(kvredis: RunningServer) -> None:
    for key in MODELS:
        cli(kvredis, "-x", "SET", key, stdin=bytes(1 << 20))
    assert sorted(cli(kvredis, "KEYS", "*Llama*").split()) == [MODELS[0].encode(), MODELS[1].encode()]
    assert sorted(cli(kvredis, "--scan", "--pattern", "*Llama*").split()) == [MODELS[0].encode(), MODELS[1].encode()]
    assert cli(kvredis, "EXISTS", *MODELS, "nope") == b"3\n"
    assert 1 << 20 < int(cli(kvredis, "MEMORY", "USAGE", MODELS[0])) < 2 << 20
    memory = dict(
        line.split(":", 1) for line in cli(kvredis, "INFO", "memory").decode().split("\r\n")[1:] if ":" in line
    )
    assert int(memory["used_memory"]) > 3 << 20
    assert memory["maxmemory_policy"] == "allkeys-lru"
    stats = cli(kvredis, "INFO", "stats").decode()
    assert "keyspace_hits:" in stats
    assert "evicted_keys:0\r\n" in stats
    assert cli(kvredis, "DEL", MODELS[0]) == b"1\n"
    assert cli(kvredis, "EXISTS", MODELS[0]) == b"0\n"
    assert cli(kvredis, "MEMORY", "USAGE", MODELS[0]) == b"\n"
    assert cli(kvredis, "DBSIZE") == b"2\n"
    assert cli(kvredis, "FLUSHDB") == b"OK\n"


@pytest.mark.parametrize("protocol", [["-2"], ["-3"]])
def test_info_is_printed_as_text_in_both_protocols(protocol: list[str], kvredis: RunningServer) -> None:
    text = cli(kvredis, *protocol, "INFO").decode()
    assert text.startswith("# Server\r\nredis_version:7.4.0\r\n")
    assert "\r\nmaxmemory:67108864\r\n" in text
    assert "\r\n# Kv\r\n" in text


def test_a_raw_get_into_a_file_is_the_value(kvredis: RunningServer) -> None:
    value = bytes(range(256)) * 8192
    cli(kvredis, "-x", "SET", "block", stdin=value)
    assert cli(kvredis, "--raw", "GET", "block") == value + b"\n"  # the line feed is redis-cli's own
    assert cli(kvredis, "-D", "", "--raw", "GET", "block") == value


def test_values_are_quoted_as_csv_and_as_json(kvredis: RunningServer) -> None:
    cli(kvredis, "MSET", "a", 'x"y', "n", "1")
    assert cli(kvredis, "--csv", "MGET", "a", "nope", "n") == b'"x\\"y",NULL,"1"\n'
    assert json.loads(cli(kvredis, "--json", "MGET", "a", "nope", "n")) == ['x"y', None, "1"]
    assert json.loads(cli(kvredis, "-3", "--json", "CONFIG", "GET", "databases")) == {"databases": "16"}
    hello = json.loads(cli(kvredis, "-3", "--json", "HELLO", "3"))
    assert (hello["server"], hello["proto"], hello["role"], hello["modules"]) == ("redis", 3, "master", [])


def test_an_interactive_session_learns_the_commands_and_helps(kvredis: RunningServer) -> None:
    typed = b"help get\nhelp @string\nping\nget nope\nselect 1\nset a 1\nobject encoding a\nmulti\nincr a\nexec\n"
    printed = cli(kvredis, "--no-raw", stdin=typed).decode()
    summary = json.loads(cli(kvredis, "-3", "--json", "COMMAND", "DOCS", "get"))["get"]["summary"]
    assert f"GET\x1b[0m \x1b[90mkey\x1b[0m\r\n  \x1b[33msummary:\x1b[0m {summary}\r\n" in printed
    assert "\x1b[1mSETRANGE\x1b[0m" in printed
    for reply in ("PONG", "(nil)", '"int"', "QUEUED", "1) (integer) 2"):
        assert reply in printed


def test_a_typed_error_is_shown_as_redis_words_it(kvredis: RunningServer) -> None:
    assert cli(kvredis, "LPUSH", "l", "a") == (b"ERR unknown command 'LPUSH', with args beginning with: 'l' 'a' \n\n")
    assert run(kvredis, "-e", "LPUSH", "l", "a").returncode == 1


@pytest.mark.parametrize("protocol", [[], ["-3"]])
def test_bigkeys_and_memkeys_walk_the_keyspace(protocol: list[str], kvredis: RunningServer) -> None:
    cli(kvredis, "-x", "SET", "big", stdin=bytes(100_000))
    cli(kvredis, "SET", "small", "1")
    big = cli(kvredis, *protocol, "--bigkeys")
    assert b"""Biggest string found '"big"' has 100000 bytes""" in big
    assert b"2 strings with 100001 bytes (100.00% of keys, avg size 50000.50)" in big
    assert b"""Biggest string found '"big"' has""" in cli(kvredis, *protocol, "--memkeys")
    assert b"Sampled 2 keys" in cli(kvredis, *protocol, "--memkeys-samples", "0")


def test_hotkeys_is_refused_because_no_frequencies_are_kept(kvredis: RunningServer) -> None:
    cli(kvredis, "SET", "k", "v")
    done = run(kvredis, "--hotkeys")
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: ERR An LFU maxmemory policy is not selected, access frequency not tracked.")


def test_hotkeys_names_the_key_that_was_read_most_under_an_lfu_policy(kvredis: RunningServer) -> None:
    cli(kvredis, "CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    try:
        cli(kvredis, "MSET", "cold", "v", "hot", "v")
        for _ in range(9):
            cli(kvredis, "GET", "hot")
        assert re.search(rb"hot key found with counter: 14\s+keyname: \"?hot", cli(kvredis, "--hotkeys"))
    finally:
        cli(kvredis, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")


def test_stat_shows_what_goes_on(kvredis: RunningServer) -> None:
    cli(kvredis, "MSET", "a", "1", "b", "2")
    seen = watch(kvredis, "-i", "0.01", "--stat", until=lambda seen: seen.count(b"\n") >= 6, meanwhile=lambda: None)
    lines = seen.decode().replace("\r", "").split("\n")
    assert "keys       mem      clients blocked requests            connections" in lines[1]
    for line in lines[2:5]:
        keys, memory, clients, blocked, requests, *_ = line.split()
        assert (keys, blocked) == ("2", "0")
        assert memory[-1] in "BKMG"
        assert int(clients) >= 1
        assert int(requests) > 0


def test_latency_is_sampled_once_a_while_and_as_a_history(kvredis: RunningServer) -> None:
    lowest, highest, mean, samples = cli(kvredis, "-i", "0.1", "--latency").split()
    assert int(lowest) <= float(mean) <= int(highest)
    assert int(samples) >= 5
    seen = watch(
        kvredis, "-i", "0.05", "--latency-history",
        until=lambda seen: seen.count(b"seconds range") >= 3, meanwhile=lambda: None,
    )  # fmt: skip
    assert b"min: " in seen
    assert b"samples)" in seen


@pytest.mark.parametrize("protocol", [[], ["-3"]])
def test_pipe_mode_inserts_ten_thousand_values_of_any_bytes(protocol: list[str], kvredis: RunningServer) -> None:
    sent = {b"%05d" % n: bytes([n & 255, n >> 8, 13, 10, 0]) * (n % 50) for n in range(MANY)}
    requests = b"".join(b"*3\r\n$3\r\nSET\r\n$5\r\n%b\r\n$%d\r\n%b\r\n" % (k, len(v), v) for k, v in sent.items())
    assert b"errors: 0, replies: 10000" in cli(kvredis, *protocol, "--pipe", stdin=requests)
    assert cli(kvredis, "DBSIZE") == b"10000\n"
    with kvredis.connect() as wire:
        for key, value in list(sent.items())[:: MANY // 200]:
            assert wire.ask(["GET", key]) == b"$%d\r\n%b\r\n" % (len(value), value)


def test_pipe_mode_counts_errors_and_goes_on(kvredis: RunningServer) -> None:
    requests = b"SET a 1\r\nLPUSH l x\r\nINCR a\r\nSET a\r\nINCR a\r\n"
    done = run(kvredis, "--pipe", stdin=requests)
    assert b"errors: 2, replies: 5" in done.stdout
    assert cli(kvredis, "GET", "a") == b"3\n"


@pytest.mark.parametrize("protocol", [[], ["-3"]])
def test_monitor_shows_the_commands_of_others(protocol: list[str], kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        seen = watch(
            kvredis, *protocol, "MONITOR",
            until=lambda seen: b'"SET" "mon\\"itor"' in seen,
            meanwhile=lambda: (wire.ask(["SET", 'mon"itor', b"\r\n\0"]), None)[1],
        )  # fmt: skip
    line = next(line for line in seen.split(b"\r\n") if b"itor" in line)
    time, where, words = line.split(b" ", 2)
    assert b"." in time
    assert where == b"[0"
    assert words == b'unix:%b] "SET" "mon\\"itor" "\\r\\n\\x00"' % kvredis.unixsocket.encode()


@pytest.mark.parametrize("protocol", [[], ["-3"]])
def test_subscribe_shows_messages(protocol: list[str], kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        seen = watch(
            kvredis, *protocol, "SUBSCRIBE", "news",
            until=lambda seen: b"hello" in seen,
            meanwhile=lambda: (wire.ask("PUBLISH news hello"), None)[1],
        )  # fmt: skip
    assert b'1) "message"' in seen
