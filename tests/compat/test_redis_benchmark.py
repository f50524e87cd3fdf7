"""redis-benchmark, Debian's, with every option that people give it: its exit, and the values that it left behind."""

import csv
import io
import shutil
import subprocess

import pytest

from tests.compat.conftest import RunningServer
from tests.compat.wire import Wire
from tests.gate import nightly

TESTS = "ping_inline,ping_mbulk,set,get,incr,mset"
TITLES = ["PING_INLINE", "PING_MBULK", "SET", "GET", "INCR", "MSET (10 keys)"]
REQUESTS = 2000
KEYS = 50
SIZE = 1000
TIMEOUT_S = 60

pytestmark = pytest.mark.skipif(shutil.which("redis-benchmark") is None, reason="redis-benchmark is not installed")


def benchmark(server: RunningServer, *words: str) -> str:
    """What redis-benchmark prints; it must end well and complain of nothing."""
    command = ["redis-benchmark", "-p", str(server.port), "-n", str(REQUESTS), "-c", "20", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rror" not in done.stdout + done.stderr
    return done.stdout


def values(wire: Wire, prefix: str) -> dict[bytes, bytes]:
    """The values of the keys that begin so."""
    keys = wire.ask(f"KEYS {prefix}*").split(b"\r\n")[2:-1:2]
    return {key: wire.ask(["GET", key]).partition(b"\r\n")[2][:-2] for key in keys}


@pytest.mark.parametrize(
    "options",
    [
        nightly([], id="plain"),
        nightly(["-P", "16"], id="pipelined"),
        nightly(["-3"], id="resp3"),
        pytest.param(["-3", "-P", "16"], id="resp3-pipelined"),
        nightly(["--threads", "2"], id="threads"),
        pytest.param(["--threads", "2", "-P", "8", "--dbnum", "9"], id="threads-pipelined-db9"),
        nightly(["--dbnum", "9", "-k", "0"], id="db9-reconnecting"),
        pytest.param(["--enable-tracking"], id="tracking"),
    ],
)
def test_the_tests_of_strings_run_and_leave_right_values(options: list[str], kvredis: RunningServer) -> None:
    printed = benchmark(kvredis, "-t", TESTS, "-r", str(KEYS), "-d", str(SIZE), "--csv", *options)
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert [row["test"] for row in rows] == TITLES
    assert all(float(row["rps"]) > 0 for row in rows)
    with kvredis.connect() as wire:
        if "--dbnum" in options:
            assert wire.ask("DBSIZE") == b":0\r\n"
            wire.ask("SELECT 9")
        blocks, counters = values(wire, "key:"), values(wire, "counter:")
    assert 0 < len(blocks) <= KEYS
    assert len(set(blocks.values())) == 1, "one value was written to every key"
    assert len(next(iter(blocks.values()))) == SIZE
    assert sum(map(int, counters.values())) >= REQUESTS


def test_quiet_output_has_a_line_for_each_test(kvredis: RunningServer) -> None:
    lines = benchmark(kvredis, "-t", TESTS, "-q").splitlines()
    assert [line.split(":")[0].strip() for line in lines if "requests per second, p50=" in line] == TITLES


def test_large_values_are_written_and_read_whole(kvredis: RunningServer) -> None:
    benchmark(kvredis, "-t", "set,get", "-d", "100000", "-r", "20", "-P", "4", "-q")
    with kvredis.connect() as wire:
        blocks = values(wire, "key:")
    assert {len(block) for block in blocks.values()} == {100_000}
    assert len(set(blocks.values())) == 1


def test_a_command_line_of_ones_own_is_measured(kvredis: RunningServer) -> None:
    benchmark(kvredis, "-r", "10", "-q", "GETRANGE", "key:__rand_int__", "0", "-1")
    benchmark(kvredis, "-r", "10", "-q", "SET", "mine:__rand_int__", "x", "EX", "100")
    with kvredis.connect() as wire:
        assert wire.ask("DBSIZE") == b":10\r\n"


def test_what_a_string_store_has_not_ends_the_benchmark_with_redis_words(kvredis: RunningServer) -> None:
    command = ["redis-benchmark", "-p", str(kvredis.port), "-n", "100", "-q", "-t", "lpush"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "ERR unknown command 'LPUSH', with args beginning with: 'mylist' " in done.stdout + done.stderr
