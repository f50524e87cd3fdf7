"""What operators look at, in the shape that their tools parse: field by field as Debian's redis-server has it."""

import re
from pathlib import Path

import pytest
import yaml

from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.wire import CommandLine, Wire

VOLATILE = re.compile(rb"^\+\d+\.\d{6} \[(\d+) unix:[^\]]*\]")


def names(reply: bytes) -> list[bytes]:
    """The field names in a flat array or a map of bulks."""
    return re.findall(rb"\$\d+\r\n([a-z][a-z.\d-]+)\r\n", reply)


def info_fields(text: bytes) -> dict[bytes, list[bytes]]:
    """The names in each section of INFO."""
    found: dict[bytes, list[bytes]] = {}
    section: list[bytes] = []
    for line in text.split(b"\r\n"):
        if line.startswith(b"# "):
            section = found[line[2:]] = []
        elif b":" in line:
            section.append(line.partition(b":")[0])
    return found


def test_info_everything_has_each_field_of_redis_in_its_section(
    redis_server: RunningServer, kvredis: RunningServer
) -> None:
    told = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            for line in ("CONFIG RESETSTAT", "SET k v EX 100", "NOPE"):
                wire.ask(line)
            told.append(info_fields(wire.ask("INFO everything")))
    theirs, ours = told
    assert list(ours) == [*theirs, b"Kv"]
    for section, fields in theirs.items():
        assert set(fields) <= set(ours[section]), section


def test_figures_for_programs_are_numbers(kvredis: RunningServer) -> None:
    texts = {"used_memory_peak_perc", "used_memory_dataset_perc", "role", "mem_allocator", "maxmemory_policy"}
    with kvredis.connect() as wire:
        wire.ask("SET k v")
        lines = wire.ask("INFO clients memory stats replication cpu").decode().split("\r\n")
    for line in lines:
        field, _, value = line.partition(":")
        if value and field not in texts and not field.endswith(("_human", "_state", "_replid", "_replid2")):
            assert re.fullmatch(r"-?\d+(\.\d+)?", value), line


def test_memory_stats_has_the_fields_of_redis_in_its_order(redis_server: RunningServer, kvredis: RunningServer) -> None:
    for resp in ("HELLO 2", "HELLO 3"):
        told = []
        for server in (redis_server, kvredis):
            with server.connect() as wire:
                wire.ask(resp)
                wire.ask("SET k v")
                told.append(names(wire.ask("MEMORY STATS")))
        assert told[1] == told[0]


def test_a_slow_command_is_told_with_the_same_words(redis_server: RunningServer, kvredis: RunningServer) -> None:
    script: list[CommandLine] = [
        "CONFIG SET slowlog-log-slower-than 0", ["SET", "k", "x" * 200], ["MSET", *["a"] * 80], "AUTH default pw",
        "HELLO 2 AUTH default pw SETNAME me", "CONFIG SET requirepass pw hz 10", ["CONFIG", "SET", "requirepass", b""],
        "ACL SETUSER bob on >pw", "GET a b", "NOPE", "MULTI", "GET k", "EXEC",
        "CONFIG SET slowlog-log-slower-than 10000",
    ]  # fmt: skip
    told = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            wire.ask("SLOWLOG RESET")
            for line in script:
                wire.ask(line)
            words = wire.ask("SLOWLOG GET -1").split(b"\r\n")
            told.append([word for word in words if not word.startswith(b":") and b".sock" not in word])
            wire.ask("ACL DELUSER bob")
    lengths = [[word for word in each if not re.fullmatch(rb"\$\d\d+", word)] for each in told]  # of the address
    assert lengths[1] == lengths[0]
    assert b"pw" not in told[1]


def test_monitors_see_the_same_lines(redis_server: RunningServer, kvredis: RunningServer) -> None:
    script: list[CommandLine] = [
        ["SET", b"k", b'a"b\r\n\x00\\\x7f\xff\t\a\b\v'], "CONFIG GET hz", "AUTH default x", "HELLO 3 AUTH default x",
        "ACL WHOAMI", "SLOWLOG LEN", "PING", "NOPE", "GET", "MULTI", "SET a b", "EXEC", "SELECT 3", "CLIENT ID", "QUIT",
    ]  # fmt: skip
    told = []
    for server in (redis_server, kvredis):
        with server.connect() as monitor, server.connect() as wire:
            assert monitor.ask("MONITOR") == b"+OK\r\n"
            for line in script:
                wire.ask(line)
            told.append([VOLATILE.sub(rb"+\1", monitor.read()) for _ in range(11)])
    assert told[1] == told[0]


def test_a_histogram_has_the_shape_that_exporters_read(redis_server: RunningServer, kvredis: RunningServer) -> None:
    for resp in ("HELLO 2", "HELLO 3"):
        told = []
        for server in (redis_server, kvredis):
            with server.connect() as wire:
                wire.ask(resp)
                wire.ask("CONFIG RESETSTAT")
                for _ in range(3):
                    wire.ask("SET k v")
                reply = wire.ask("LATENCY HISTOGRAM set")
                told.append(re.sub(rb"[*%]\d+\r\n(:\d+\r\n)+$", b"", reply))
        assert told[1] == told[0]
        assert b":3\r\n" in told[0]


def test_what_was_rewritten_is_there_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("# ours\nkvredis:\n  maxclients: 100 # enough\n")

    def session(*script: str) -> list[bytes]:
        process, server = start_kvredis(tmp_path, "--config-file", str(file))
        try:
            with Wire(server.unixsocket) as wire:
                return [wire.ask(line) for line in script]
        finally:
            stop(process)

    changed = "CONFIG SET maxclients 50 slowlog-max-len 7 notify-keyspace-events KEA latency-tracking no"
    asked = ("CONFIG GET maxclients slowlog-max-len notify-keyspace-events latency-tracking",)
    ok, rewritten, before = session(changed, "CONFIG REWRITE", *asked)
    assert (ok, rewritten) == (b"+OK\r\n", b"+OK\r\n")
    assert file.read_text().startswith("# ours\nkvredis:\n  maxclients: 50 # enough\n")
    assert yaml.safe_load(file.read_text())["kvredis"]["settings"]["slowlog-max-len"] == 7
    assert session(*asked) == [before]
    assert b"$2\r\n50\r\n" in before


def hits_and_misses(wire: Wire) -> tuple[int, int]:
    """What INFO has counted so far."""
    text = wire.ask("INFO stats").decode()
    hits, misses = re.findall(r"keyspace_(?:hits|misses):(\d+)", text)
    return int(hits), int(misses)


@pytest.mark.parametrize("line", ["EXISTS", "TOUCH", "TTL", "PTTL", "EXPIRETIME", "TYPE", "STRLEN", "OBJECT ENCODING"])
def test_redis_counts_commands_that_only_look_as_hits_or_misses_and_we_do_not(
    line: str, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    for server, counted in ((redis_server, 1), (kvredis, 0)):
        with server.connect() as wire:
            wire.ask("SET k v")
            hits, misses = hits_and_misses(wire)
            wire.ask(f"{line} k")
            wire.ask(f"{line} nope")
            assert hits_and_misses(wire) == (hits + counted, misses + counted)


@pytest.mark.parametrize("line", ["GET {}", "MGET {}", "GETRANGE {} 0 1", "SUBSTR {} 0 1", "GETEX {}", "DUMP {}"])
def test_a_client_that_asks_for_a_value_is_counted_as_in_redis(
    line: str, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    counted = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            wire.ask("SET k v")
            before = hits_and_misses(wire)
            wire.ask(line.format("k"))
            wire.ask(line.format("nope"))
            counted.append([now - then for now, then in zip(hits_and_misses(wire), before, strict=True)])
    assert counted[0] == counted[1]
