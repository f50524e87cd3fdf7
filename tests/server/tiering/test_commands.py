"""Every command that names keys, of blocks that are on disk alone: the same replies, and a read only for who needs it.

Which commands need the bytes is said here once more, apart from the table that the server goes by: a command that is in
neither list, or whose record says something else, fails.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from kvredis.server.commands import load_families
from kvredis.server.commands.registry import every_command
from tests.server.live import run_on
from tests.server.tiered_server import TieredServer, block

READERS: Final = {
    "get": ("GET big", "GET small", "get number", "GET nothing"),
    "getex": ("GETEX big", "GETEX big EX 100", "GETEX small PERSIST", "GETEX big FOO", "GETEX nothing"),
    "getdel": ("GETDEL big", "GETDEL small", "GETDEL nothing"),
    "getset": ("GETSET big new", "GETSET small new", "GETSET nothing new"),
    "set": ("SET big new GET", "SET small new NX GET", "SET big new XX get KEEPTTL", "SET big new EX 10 GET"),
    "append": ("APPEND big tail", "APPEND small tail", "APPEND nothing tail"),
    "setrange": ("SETRANGE big 7 new", "SETRANGE small 30 new", "SETRANGE big 70000 new", "SETRANGE big 0 "),
    "getrange": ("GETRANGE big 100 -100", "GETRANGE small 1 3", "GETRANGE big 5 1", "GETRANGE nothing 0 -1"),
    "substr": ("SUBSTR big 0 0", "SUBSTR small -3 -1"),
    "incr": ("INCR number", "INCR small", "INCR big", "INCR nothing"),
    "decr": ("DECR number", "DECR small"),
    "incrby": ("INCRBY number 5", "INCRBY number x", "INCRBY big 1"),
    "decrby": ("DECRBY number 5", "DECRBY small 5"),
    "incrbyfloat": ("INCRBYFLOAT number 0.5", "INCRBYFLOAT small 1"),
    "mget": ("MGET big", "MGET nothing big small number big nothing other", "MGET small number"),
    "dump": ("DUMP small", "DUMP number", "DUMP big", "DUMP nothing"),
    "copy": ("COPY big to", "COPY small number REPLACE", "COPY small number", "COPY big to DB 3", "COPY nothing to"),
    "lcs": ("LCS small number", "LCS small number LEN", "LCS small nothing"),
    "object|encoding": ("OBJECT ENCODING big", "OBJECT ENCODING number", "OBJECT ENCODING nothing"),
    "kv.lease": ("KV.LEASE 0 big small nothing",),
    "debug": ("DEBUG OBJECT number", "DEBUG OBJECT big", "DEBUG OBJECT nothing"),
}
"""Those that look at the bytes of a key that was there, with lines that do."""

OTHERS: Final = {
    "exists": ("EXISTS big small nothing big",),
    "strlen": ("STRLEN big", "STRLEN small"),
    "type": ("TYPE big", "TYPE number"),
    "ttl": ("TTL big", "TTL ending"),
    "pttl": ("PTTL ending",),
    "expiretime": ("EXPIRETIME ending",),
    "pexpiretime": ("PEXPIRETIME ending", "PEXPIRETIME big"),
    "expire": ("EXPIRE big 100", "EXPIRE ending 50 GT", "EXPIRE big -1"),
    "pexpire": ("PEXPIRE big 100000",),
    "expireat": ("EXPIREAT big 1999999999",),
    "pexpireat": ("PEXPIREAT big 1999999999999",),
    "persist": ("PERSIST ending", "PERSIST big"),
    "del": ("DEL big small nothing",),
    "unlink": ("UNLINK big number",),
    "rename": ("RENAME big to", "RENAME big small", "RENAME nothing to"),
    "renamenx": ("RENAMENX big to", "RENAMENX big small"),
    "move": ("MOVE big 3", "MOVE nothing 3"),
    "touch": ("TOUCH big small nothing",),
    "memory|usage": ("MEMORY USAGE nothing",),
    "kv.meta": ("KV.META nothing",),
    "kv.match": ("KV.MATCH big small nothing number", "KV.MATCH big nothing WAIT 0"),
    "kv.expect": ("KV.EXPECT big nothing small",),
    "set": ("SET big new", "SET big new NX", "SET big new XX", "SET small new KEEPTTL"),
    "setnx": ("SETNX big new", "SETNX nothing new"),
    "setex": ("SETEX big 100 new",),
    "psetex": ("PSETEX big 100000 new",),
    "mset": ("MSET big new small new",),
    "msetnx": ("MSETNX nothing new big new",),
    "object|idletime": ("OBJECT IDLETIME big",),
    "object|freq": ("OBJECT FREQ big",),
    "object|refcount": ("OBJECT REFCOUNT big", "OBJECT REFCOUNT nothing"),
    "restore": ("RESTORE big 0 x", "RESTORE big 0 x REPLACE"),
    "restore-asking": ("RESTORE-ASKING big 0 x",),
    "watch": ("WATCH big small",),
    "prefetch": ("PREFETCH nothing",),
    "kv.prefetch": ("KV.PREFETCH nothing",),
    "kv.put": ("KV.PUT big 0 100",),
    "kv.reserve": ("KV.RESERVE big 20000",),
}
"""Those that need no byte of it."""

NAMELESS: Final = ("SCAN 0 COUNT 100", "KEYS b*", "DBSIZE", "SWAPDB 0 3", "FLUSHDB", "INFO keyspace")
CHANNELS: Final = {"ssubscribe", "sunsubscribe", "spublish"}
"""Their "keys" are channels."""

VALUES: Final = {
    "big": block("big"),
    "small": b"a small value",
    "number": b"10",
    "other": block("other"),
    "ending": b"will end",
}

LOOK: Final = re.compile(rb" at:0x[0-9a-f]+| lru:[0-9]+")
"""What DEBUG OBJECT says of where a block lies and of the time of day."""


async def plant(live: TieredServer, *, away: bool) -> None:
    """The keys of VALUES, in memory or on disk alone."""
    for key, value in VALUES.items():
        assert live.store.put(key.encode(), value, 0, live.clock_ms + 1_000_000 if key == "ending" else 0)
    live.saved()
    if away:
        live.send_away(*VALUES)


@dataclass(frozen=True)
class Told:
    """What came of a line."""

    reply: bytes
    left: list[bytes | None]
    """What each key holds afterwards, in both databases."""
    reads: int
    """How often the disk had been read from when it was answered."""


def run_line(loop: str, folder: Path, line: str, *, away: bool) -> Told:
    """Say a line to a server with the keys of VALUES."""

    async def story() -> Told:
        async with TieredServer(folder, enable_debug_command="yes") as live:
            await plant(live, away=away)
            client = await live.connect()
            await client.send(*line.split(" "))
            await client.send("QUIT")
            reply = await client.read_all()
            assert reply.endswith(b"+OK\r\n")
            reads, left = live.steps("pread"), []
            looker = await live.connect()
            for space in ("0", "3"):
                await looker.ask("SELECT", space)
                left += [await looker.get(key) for key in (*VALUES, "nothing", "to")]
            return Told(LOOK.sub(b"", reply), left, reads)

    folder.mkdir()
    return run_on(loop, story())


def test_every_command_that_names_keys_is_known_to_need_their_bytes_or_not_to() -> None:
    load_families()
    naming = {each.name for each in every_command() if each.keys != (0, 0, 0)} - CHANNELS
    assert naming == (READERS.keys() | OTHERS.keys()) - {"debug"}
    assert {each.name for each in every_command() if each.reads} == READERS.keys()


@pytest.mark.parametrize("name", READERS)
def test_a_command_that_reads_finds_a_block_on_disk_as_it_would_in_memory(loop: str, name: str, tmp_path: Path) -> None:
    for number, line in enumerate(READERS[name]):
        here = run_line(loop, tmp_path / f"{number} here", line, away=False)
        gone = run_line(loop, tmp_path / f"{number} gone", line, away=True)
        assert (gone.reply, gone.left) == (here.reply, here.left), line
        assert here.reads == 0, line
        named = line.split(" ")[1:]
        assert gone.reads == len(VALUES.keys() & set(named[:1] if name == "copy" else named)), line


@pytest.mark.parametrize("name", OTHERS)
def test_a_command_that_needs_no_byte_of_a_block_leaves_it_on_disk(name: str, tmp_path: Path) -> None:
    for number, line in enumerate(OTHERS[name]):
        here = run_line("uvloop", tmp_path / f"{number} here", line, away=False)
        gone = run_line("uvloop", tmp_path / f"{number} gone", line, away=True)
        assert (gone.reply, gone.left) == (here.reply, here.left), line
        assert gone.reads == 0, line


@pytest.mark.parametrize("line", NAMELESS)
def test_a_command_about_all_keys_leaves_them_on_disk(line: str, tmp_path: Path) -> None:
    here = run_line("uvloop", tmp_path / "here", line, away=False)
    gone = run_line("uvloop", tmp_path / "gone", line, away=True)
    assert (gone.reply, gone.left, gone.reads) == (here.reply, here.left, 0)


async def test_memory_usage_of_a_block_on_disk_is_what_is_known_of_it(live: TieredServer) -> None:
    live.put("big")
    client = await live.connect()
    in_memory = int((await client.ask("MEMORY", "USAGE", "big"))[1:])
    live.send_away("big")
    assert 0 < int((await client.ask("MEMORY", "USAGE", "big"))[1:]) == in_memory - 64 * 1024
    assert live.steps("pread") == 0


async def test_a_block_is_read_once_for_all_that_is_asked_of_it(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    client = await live.connect()
    for _ in range(3):
        assert await client.get("a") == block("a")
    await client.send("GETRANGE", "a", "0", "9")
    assert await client.read_bulk() == block("a")[:10]
    assert live.steps("pread") == 1
