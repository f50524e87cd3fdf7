"""`kvredis ls` against a real server: the tree adds up, the list is what is there, and memory is bounded."""

import contextlib
import json
import os
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.connection import AbstractConnection
from rich.console import Console

from kvredis.cli.inspect.client import place_of
from kvredis.cli.inspect.key_names import CHUNKS, LMCACHE, LMCACHE_MP, OTHER, PAGES, read_name
from kvredis.cli.inspect.ls import drawn
from kvredis.cli.inspect.prefix_tree import Forest
from tests.backends.topologies import KvredisCluster
from tests.cli.inspected import (
    LMCACHE_KEYS,
    QWEN,
    ROOT,
    block,
    connected,
    fill,
    plain_redis,
    run,
    run_process,
    serving,
    store_prompt,
    wait_until_on_disk,
)

KEYS = 5 + 2 + 3 + 3 + 4 + 3


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as address:
        fill(address)
        yield address


def tree(address: str, *words: str) -> Any:
    result = run("ls", "-u", f"redis://{address}", "--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_tree_has_models_ranks_and_prompts_with_their_tokens(address: str) -> None:
    found = tree(address)
    assert found["keys"] == KEYS
    assert found["kvredis"] is True
    models = {model["model"]: model for model in found["models"]}
    (qwen,) = models["Qwen2.5-7B"]["ranks"]
    assert [(one["keys"], one["tokens"]) for one in qwen["prompts"]] == [(5, 80), (2, 32)]
    assert qwen["bytes"] == 7 * len(block(QWEN))
    assert qwen["tiers"] == {"memory": {"keys": 7, "bytes": 7 * len(block(QWEN))}}
    assert [(one["rank"], one["tokens"]) for one in models["Llama-3.1-8B"]["ranks"]] == [("rank 0", 48), ("rank 1", 48)]
    assert [one["rank"] for one in models["Mistral-7B"]["ranks"]] == ["worker 0 of 2", "worker 1 of 2"]
    assert models["session:"]["ranks"][0]["keys"] == 2
    assert models[""]["ranks"][0]["keys"] == 1


def test_the_drawn_tree_says_the_same(address: str) -> None:
    result = run("ls", "-u", f"redis://{address}")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"redis://{address}  kvredis ")
    assert f"{KEYS} keys" in lines[0]
    (qwen,) = (line for line in lines if "Qwen2.5-7B" in line)
    assert "112 tokens" in qwen
    assert "7 chunks" in qwen
    assert sum("rank 1" in line for line in lines) == 1
    (mistral,) = (line for line in lines if "Mistral-7B" in line)
    assert "2 LMCache chunks" in mistral, "the second key of a chunk is not another chunk"


def test_hits_are_counted_and_can_be_sorted_by(address: str) -> None:
    with connected(address) as client:
        short = client.keys("kvredis:Qwen*")
        keys = store_prompt(client, QWEN, 500_000, 1)
        assert keys[0] not in short
        for _ in range(3):
            client.get(keys[0])
        try:
            result = tree(address, "--sort", "hits", "--match", "kvredis:Qwen*")
        finally:
            client.delete(*keys)
    prompts = result["models"][0]["ranks"][0]["prompts"]
    assert (prompts[0]["hits"], prompts[0]["keys"]) == (3, 1)


def test_limit_shows_so_many_prompts_and_says_what_it_leaves_out(address: str) -> None:
    result = run("ls", "-u", f"redis://{address}", "--match", "kvredis:Qwen*", "--limit", "1")
    assert "1 more prompts" in result.stdout
    assert tree(address, "--match", "kvredis:Qwen*", "--limit", "1")["models"][0]["ranks"][0]["prompts_more"] == 1


def test_keys_lists_names_sorted_and_only_those_that_match(address: str) -> None:
    result = run("ls", "-u", f"redis://{address}", "--keys", "--match", "session:*")
    assert result.stdout == "session:1\nsession:2\n"
    every = run("ls", "-u", f"redis://{address}", "--keys").stdout.splitlines()
    assert len(every) == KEYS
    assert every == sorted(every)


def test_keys_with_a_limit_says_how_many_are_left(address: str) -> None:
    result = run("ls", "-u", f"redis://{address}", "--keys", "--limit", "2")
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == f"{KEYS - 2} more: --limit shows them\n"
    assert "more: --limit" in run("ls", "-u", f"redis://{address}", "--keys", "--json", "--limit", "2").stderr
    assert len(run("ls", "-u", f"redis://{address}", "--keys", "--limit", "0").stdout.splitlines()) == KEYS


def test_keys_as_json_holds_the_facts(address: str) -> None:
    result = run("ls", "-u", f"redis://{address}", "--keys", "--json", "--sort", "bytes", "--limit", "1")
    (one,) = json.loads(result.stdout)
    assert one["key"].startswith("kvredis:Qwen2.5-7B@")
    assert (one["tokens"], one["nbytes"], one["tier"]) == (16, len(block(QWEN)), "memory")
    assert json.loads(run("ls", "-u", f"redis://{address}", "--keys", "--json", "--match", "no*").stdout) == []


def test_long_lists_bytes_tokens_and_tier(address: str) -> None:
    result = run("ls", "-u", f"redis://{address}", "--keys", "--long", "--match", "kvredis:Qwen*", "--limit", "1")
    assert result.stdout.split()[2:5] == ["16", "memory", "0"]
    assert run("ls", "-u", f"redis://{address}", "--long").exit_code == 2


def test_blocks_on_disk_alone_are_counted_by_their_length(tmp_path: Path) -> None:
    disk = ("--local-disk", str(tmp_path), "--max-local-disk-size", "64MB")
    with serving(*disk) as address, connected(address) as client:
        keys = store_prompt(client, QWEN, 0, 4)
        wait_until_on_disk(client)
    with serving(*disk) as address, connected(address) as client:
        unread = tree(address)["models"][0]["ranks"][0]
        assert (unread["tokens"], unread["tokens_complete"]) == (0, False)
        assert list(unread["tiers"]) == ["disk"]
        client.get(keys[0])
        read = tree(address)["models"][0]["ranks"][0]
        assert (read["tokens"], read["tokens_complete"]) == (4 * 16, True), "one block in memory tells of the others"


def test_a_plain_redis_is_listed_without_tokens(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
        store_prompt(client, QWEN, 0, 2)
        client.lpush("list", "no string")
        found = json.loads(run("ls", "-u", url, "--json").stdout)
        assert (found["kvredis"], found["keys"]) == (False, 3)
        drawn = run("ls", "-u", url).stdout
    assert "no kvredis" in drawn.splitlines()[0]
    assert "Qwen2.5-7B" in drawn


def test_a_kvredis_of_before_is_asked_key_by_key(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    plain: Any = AbstractConnection.send_command

    def old(link: AbstractConnection, *words: Any, **options: Any) -> None:
        asked.append(words[0])
        plain(link, *(("KV.NONE",) if words[0] == "KV.SCAN" else words), **options)

    monkeypatch.setattr(AbstractConnection, "send_command", old)
    found = tree(address)
    assert found["keys"] == KEYS
    assert asked.count("KV.SCAN") == 1
    assert "SCAN" in asked


def test_the_next_slice_is_asked_for_before_the_last_one_is_looked_at_and_may_be_left(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    plain: Any = AbstractConnection.send_command

    def noted(link: AbstractConnection, *words: Any, **options: Any) -> None:
        asked.append(words[0])
        plain(link, *words, **options)

    monkeypatch.setattr(AbstractConnection, "send_command", noted)
    with place_of(f"redis://{address}", 10).open() as servers:
        (server,) = servers.each
        walk = server.walk(count=1, ahead=True)
        assert len(next(walk)) < KEYS
        assert asked.count("KV.SCAN") == 2
        assert server.ask("DBSIZE") == KEYS, "between two slices anything may be asked"
        walk.close()  # type: ignore[attr-defined]
        assert server.ask("DBSIZE") == KEYS, "the slice that the client no longer wants is no answer to it"
        assert sum(map(len, server.walk(ahead=True))) == KEYS


def test_of_a_plain_redis_other_types_are_sized_and_looking_is_not_using(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("text:1", "x" * 1000)
        client.hset("hash:1", mapping={"field": "y" * 5000})
        result = run("ls", "-u", url, "--keys", "--json")
        sizes = {one["key"]: one["nbytes"] for one in json.loads(result.stdout)}
        assert sizes["text:1"] == 1000
        assert sizes["hash:1"] > 5000


@pytest.mark.parametrize("columns", [40, 80])
def test_however_narrow_the_terminal_sizes_are_seen(address: str, columns: int) -> None:
    with place_of(f"redis://{address}", 10).open() as servers:
        forest = Forest()
        for batch in servers.each[0].walk():
            for key, facts in batch:
                forest.add(key, facts or {})
        screen = Console(width=columns, color_system=None)
        with screen.capture() as captured:
            screen.print(drawn(servers, forest, "bytes", 20, {}, columns), no_wrap=True, overflow="ellipsis")
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= columns
    assert any(f"{KEYS} keys" in line and "KiB" in line for line in lines)
    (prompt,) = (line for line in lines if "80 tokens" in line)
    assert "12.5 KiB" in prompt


@pytest.mark.parametrize("columns", [40, 100])
def test_a_line_of_the_long_list_is_a_line_however_narrow_the_terminal_is(address: str, columns: int) -> None:
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, columns))
    words = [sys.executable, "-m", "kvredis", "ls", "-u", address, "--keys", "--long", "--limit", "3"]
    env = {"PATH": os.environ["PATH"], "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=its, stderr=subprocess.PIPE):
        os.close(its)
        told = b""
        with contextlib.suppress(OSError):  # EIO: it has ended
            while data := os.read(ours, 4096):
                told += data
        os.close(ours)
    lines = told.decode().splitlines()
    assert len(lines) == 3
    assert all("KiB" in line and "memory" in line for line in lines)
    assert columns > 40 or max(map(len, lines)) <= columns
    assert (columns > 40) == all(" 16 " in line for line in lines), "tokens, where there is room"


def test_a_pipe_gets_no_bar_and_no_live_screen_whatever_asks_for_colour(address: str) -> None:
    env = {"PATH": os.environ["PATH"], "FORCE_COLOR": "1", "TTY_INTERACTIVE": "1", "LC_ALL": "C.UTF-8"}
    ours, its = os.openpty()  # a keyboard
    for words, status in ((("ls",), 0), (("top",), 1)):
        done = subprocess.run(
            [sys.executable, "-m", "kvredis", *words, "-u", address],
            cwd=ROOT, env=env, stdin=its, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == status
        assert "\x1b[?" not in done.stdout + done.stderr
        assert "reading" not in done.stderr
    os.close(ours)
    os.close(its)


@pytest.mark.parametrize("name", ["C", "POSIX"])
def test_in_the_c_locale_all_that_is_drawn_is_ascii(address: str, name: str) -> None:
    for words in (("ls",), ("top", "--once", "--interval", "0.1")):
        done = subprocess.run(
            [sys.executable, "-m", "kvredis", *words, "-u", f"redis://{address}"],
            cwd=ROOT, env={"PATH": os.environ["PATH"], "LC_ALL": name}, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        assert b"?" not in done.stdout
        assert b"memory" in done.stdout


def test_a_cluster_is_listed_as_a_whole() -> None:
    with KvredisCluster() as cluster:
        result = run("ls", "-u", cluster.url, "--json")
        assert json.loads(result.stdout)["keys"] == 0, result.output
        for word in ("a", "b", "c", "d", "e", "f"):
            assert run("put", "-u", cluster.url, "--raw", __file__, word).exit_code == 0
        found = json.loads(run("ls", "-u", cluster.url, "--json").stdout)
        assert len(found["servers"]) == 3
        assert found["keys"] == 6


def test_a_terminal_is_not_told_what_a_key_would_tell_it_but_a_pipe_gets_its_bytes(address: str) -> None:
    evil = b"evil\x1b[2J\xff"
    with connected(address) as client:
        client.set(evil, "x")
        try:
            piped = run_process(["ls", "-u", f"redis://{address}", "--keys", "--match", "evil*"])
            drawn = run("ls", "-u", f"redis://{address}", "--match", "evil*").stdout
            told = json.loads(run("ls", "-u", f"redis://{address}", "--keys", "--json", "--match", "evil*").stdout)
        finally:
            client.delete(evil)
    assert piped.stdout == evil + b"\n"
    assert "\x1b" not in drawn
    assert told[0]["key"].encode("utf-8", "surrogateescape") == evil


@pytest.mark.parametrize(
    "evil",
    [
        b"kvredis:evil\x1b[2J@0123456789abcdef@{0@9c1f9c1f9c1f9c1f}9c1f9c1f9c1f9c1f",
        b"kvredis:evil@0123456789abcdef@{0:\x1b[2J\n7@9c1f9c1f9c1f9c1f}9c1f9c1f9c1f9c1f",
        b"evil\x1b[2J@2@0@6c4f18f9b2e02e8@bfloat16",
    ],
    ids=["model", "layers", "LMCache"],
)
def test_no_word_of_a_key_reaches_the_tree_as_it_is(address: str, evil: bytes) -> None:
    with connected(address) as client:
        client.set(evil, "x")
        try:
            tree = run("ls", "-u", f"redis://{address}", "--match", "*evil*").stdout
        finally:
            client.delete(evil)
    assert "\x1b" not in tree
    assert "\\x1b[2J" in tree
    line = next(line for line in tree.splitlines() if "evil" in line)
    assert "1 B" in line, "its figures are on the line of its name"


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
def test_the_tree_is_drawn_also_where_the_locale_has_no_bars(address: str, encoding: str) -> None:
    words = [sys.executable, "-m", "kvredis", "ls", "-u", f"redis://{address}"]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(words, env=env, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Qwen2.5-7B" in done.stdout


def test_a_reader_that_has_enough_ends_it_quietly(address: str) -> None:
    shell = f"{sys.executable} -m kvredis ls -u redis://{address} --keys --limit 0 | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("key", "kind", "model", "rank", "root"),
    [
        ("kvredis:org/m@0123456789abcdef@{3@aabbccddeeff0011}aabbccdd", CHUNKS, "org/m", "rank 3", "aabbccddeeff0011"),
        ("kvredis:m@0123456789abcdef@{1/4@aabbccdd}aa", CHUNKS, "m", "rank 1 of 4", "aabbccdd"),
        ("kvredis:m@0123456789abcdef@{0:8-15@aabbccdd}aa", CHUNKS, "m", "rank 0, layers 8-15", "aabbccdd"),
        ("kvredis:m@0123456789abcdef@{1/2:8-15@aa}aa", CHUNKS, "m", "rank 1 of 2, layers 8-15", "aa"),
        ("kvredis:m@0123456789abcdef:page-7", PAGES, "m", "", ""),
        (LMCACHE_KEYS[1], LMCACHE, "Mistral-7B", "worker 1 of 2", ""),
        (f"{LMCACHE_KEYS[0]}metadata", LMCACHE, "Mistral-7B", "worker 0 of 2", ""),
        ("m@1@0@ab12@half@5@tag%v", LMCACHE, "m", "worker 0 of 1", ""),
        ("m@00000002@0@00000000000000000000000000000002", LMCACHE_MP, "m", "rank 00000002", ""),
        ("user:1:name", OTHER, "user:", "", ""),
        ("name", OTHER, "", "", ""),
        ("kvredis:m@xyz", OTHER, "kvredis:", "", ""),
    ],
)
def test_a_name_tells_whose_it_is(key: str, kind: str, model: str, rank: str, root: str) -> None:
    found = read_name(key.encode())
    assert (found.kind, found.model, found.rank, found.root) == (kind, model, rank, root)
    assert found.is_aside == key.endswith("metadata")


def test_however_many_prompts_there_are_the_forest_keeps_the_largest_and_the_sums() -> None:
    forest = Forest(roots_max=10, groups_max=5)
    for number in range(100):
        key = f"kvredis:m@0123456789abcdef@{{0@{number:016x}}}{number:064x}"
        forest.add(key.encode(), {"nbytes": 1000 + number, "tokens": 16, "tier": "memory", "hits": 1, "idle": 0})
    for number in range(100):
        forest.add(f"{number}:x".encode(), {"nbytes": 1})
    (group,) = (group for group in forest.groups.values() if group.name.kind == CHUNKS)
    assert len(group.roots) <= 10
    assert group.tokens(group.whole) == (1600, True)
    assert group.whole.nbytes == group.rest.nbytes + sum(part.nbytes for part in group.roots.values())
    assert group.folded + len(group.roots) == 100
    assert f"{99:016x}" in group.roots
    assert len(forest.groups) <= 6
    assert forest.whole.keys == 200


def test_a_read_of_a_value_with_two_keys_is_one_hit() -> None:
    forest = Forest()
    for end in ("kv_bytes", "metadata"):
        forest.add(f"{LMCACHE_KEYS[0]}{end}".encode(), {"nbytes": 1, "hits": 3})
    assert forest.whole.hits == 3
