"""A part is in memory once, too: KV.WRITE of 32 MiB raises the server's peak by less than 2 MiB."""

from pathlib import Path

from tests.server.client.test_memory import GROWTH_BYTES_MAX, LENGTH, ROUNDS, serving
from tests.server.feed import request
from tests.server.live import pattern

BEHIND = 30
OK = memoryview(b"+OK\r\n")


def test_a_large_part_is_in_memory_once(loop: str, tmp_path: Path) -> None:
    value, behind = pattern(LENGTH), pattern(BEHIND, 1)
    wanted = b"$%d\r\n%b\r\n" % (LENGTH + BEHIND, value + behind)
    with serving(tmp_path, loop) as server:
        for number in range(1, ROUNDS + 1):
            told = b":%d\r\n" % number
            assert server.exchange(request("KV.RESERVE", "k", str(LENGTH + BEHIND)), len(told)) == told
            assert server.exchange(request("KV.WRITE", str(number), str(LENGTH), behind), 5) == OK
            growth = server.growth_bytes(request("KV.WRITE", str(number), "0", value), 5)
            assert growth < GROWTH_BYTES_MAX
            assert server.exchange(request("KV.COMMIT", str(number)), 5) == OK
            assert server.exchange(request("GET", "k"), len(wanted)) == wanted
