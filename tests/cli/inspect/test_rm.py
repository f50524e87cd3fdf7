"""`kvredis rm`: what is named goes, what matches goes after it was counted and agreed to."""

import json

import pytest

from tests.cli.inspected import connected, run


@pytest.fixture
def url(address: str) -> str:
    with connected(address) as client:
        client.flushall()
        client.mset({f"old:{number}": "x" for number in range(3000)} | {"new:1": "y", "new:2": "y"})
    return f"redis://{address}"


def left(address: str) -> int:
    with connected(address) as client:
        return int(client.dbsize())


def test_named_keys_go_and_a_missing_one_is_said(address: str, url: str) -> None:
    assert run("rm", "-u", url, "new:1").stdout == "deleted 1 key\n"
    result = run("rm", "-u", url, "new:1", "new:2")
    assert result.exit_code == 1
    assert result.stdout == "deleted 1 key\n"
    assert result.stderr == "kvredis: no key new:1\n"
    assert left(address) == 3000


def test_a_pattern_is_counted_and_deleted_after_yes(address: str, url: str) -> None:
    result = run("rm", "-u", url, "--match", "old:*", "--yes", "--json")
    assert json.loads(result.stdout) == {"deleted": 3000, "missing": []}
    assert left(address) == 2


def test_without_a_terminal_a_pattern_wants_yes(address: str, url: str) -> None:
    result = run("rm", "-u", url, "--match", "old:*")
    assert result.exit_code == 2
    assert "3,000 keys match old:*: --yes deletes them without a question" in result.stderr
    assert left(address) == 3002


def test_a_pattern_that_nothing_matches_deletes_nothing_and_asks_nothing(url: str) -> None:
    result = run("rm", "-u", url, "--match", "none*")
    assert (result.exit_code, result.stdout) == (0, "deleted 0 keys\n")


def test_keys_and_a_pattern_or_neither_are_bad_usage(url: str) -> None:
    assert run("rm", "-u", url).exit_code == 2
    assert run("rm", "-u", url, "key", "--match", "*").exit_code == 2
