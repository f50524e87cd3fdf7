"""`kvredis prefetch`: blocks that were on disk alone are in memory afterwards, and the counts say which."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.topologies import KvredisCluster
from tests.cli.inspected import QWEN, connected, plain_redis, run, serving, store_prompt, wait_until_on_disk

BLOCKS = 6


@pytest.fixture
def spilled(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A server whose blocks are on disk alone: it was started again. With their keys."""
    disk = ("--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "64MB")
    with serving(*disk) as address, connected(address) as client:
        keys = store_prompt(client, QWEN, 0, BLOCKS)
        wait_until_on_disk(client)
    with serving(*disk) as address:
        yield address, [key.decode() for key in keys]


def tiers(address: str, keys: list[str]) -> list[str]:
    found = json.loads(run("meta", "-u", f"redis://{address}", "--json", *keys).stdout)
    return [facts["tier"] for facts in found]


def test_wait_stays_until_they_have_come(spilled: tuple[str, list[str]]) -> None:
    address, keys = spilled
    assert tiers(address, keys) == ["disk"] * BLOCKS
    result = run("prefetch", "-u", f"redis://{address}", "--wait", "--json", *keys[:4], "gone")
    told = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert (told["keys"], told["queued"], told["done"], told["missing"], told["waited"]) == (5, 4, 4, 1, True)
    assert "disk" not in tiers(address, keys[:4])
    again = run("prefetch", "-u", f"redis://{address}", "--match", "kvredis:*", "--wait")
    assert again.stdout == "6 keys: 2 brought, 4 in memory already\n"
    assert again.stderr == "", "no bar in a pipe"


def test_without_wait_the_server_is_told_and_that_is_all(spilled: tuple[str, list[str]]) -> None:
    address, keys = spilled
    result = run("prefetch", "-u", f"redis://{address}", "--priority", "0", *keys)
    assert result.exit_code == 0
    assert result.stdout == f"{BLOCKS} keys: {BLOCKS} on their way, 0 in memory already\n"


def test_a_server_without_a_disk_has_everything_in_memory() -> None:
    with serving() as address, connected(address) as client:
        keys = [key.decode() for key in store_prompt(client, QWEN, 0, 2)]
        result = run("prefetch", "-u", f"redis://{address}", "--wait", *keys, "gone")
    assert result.stdout == "3 keys: 0 brought, 2 in memory already, 1 missing\n"


def test_a_plain_redis_is_told_apart(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url:
        result = run("prefetch", "-u", url, "key")
    assert result.exit_code == 1
    assert result.stderr == f"kvredis: {url} is no kvredis: it has no disk tier to prefetch from\n"


def test_keys_of_several_slots_go_to_their_nodes() -> None:
    with KvredisCluster() as cluster:
        for key in ("a", "b", "c"):
            assert run("put", "-u", cluster.url, "--raw", __file__, key).exit_code == 0
        result = run("prefetch", "-u", cluster.url, "--wait", "a", "b", "c", "gone")
    assert result.stdout == "4 keys: 0 brought, 3 in memory already, 1 missing\n"


def test_keys_and_a_pattern_or_neither_are_bad_usage() -> None:
    assert run("prefetch").exit_code == 2
    assert run("prefetch", "key", "--match", "*").exit_code == 2
