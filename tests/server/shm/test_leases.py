"""KV.LEASE and KV.RELEASE: blocks are read in the arena itself, and stay what they were while they are leased."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvredis.server.shm import attach as lane_module
from kvredis.storage.entry import INLINE_BYTES_MAX, Place
from tests.server.lane_client import attached, connected
from tests.server.live import MIB, LiveServer, pattern, until
from tests.server.tiered_server import TieredServer, block

OLD, NEW = pattern(2 * MIB, 1), pattern(2 * MIB, 2)
SHARE_USED = "OOM this connection has leased its share of the arena"


async def test_a_lease_says_where_the_bytes_are_or_what_they_are_or_that_there_are_none(
    loop: str, live: LiveServer
) -> None:
    async with attached(live) as client:
        small, least = pattern(INLINE_BYTES_MAX - 1), pattern(INLINE_BYTES_MAX, 3)
        await client.ask("MSET", "large", OLD, "small", small, "least", least, "empty", b"")
        large, nothing, tiny, edge, empty = await client.ask("KV.LEASE", 0, "large", "none", "small", "least", "empty")
        assert (client.bytes_at(large), client.bytes_at(edge)) == (OLD, least)
        assert (nothing, tiny, empty) == (None, small, b"")
        assert large[1] == len(OLD)
        assert live.store.leases == 2
        assert await client.ask("KV.RELEASE", large[0], edge[0]) == 2
        assert live.store.leases == 0
        assert client.is_open


@pytest.mark.parametrize(
    "change",
    [
        ["SET", "k", NEW],
        ["DEL", "k"],
        ["RENAME", "k", "other"],
        ["FLUSHALL"],
        ["FLUSHDB", "ASYNC"],
        ["PEXPIREAT", "k", "1"],
        ["APPEND", "k", b"more"],
        ["SETRANGE", "k", "0", b"changed"],
        ["GETDEL", "k"],
        ["MSET", *(word for n in range(20) for word in (f"n{n}", NEW[:MIB]))],
    ],
    ids=lambda words: words[0],
)
async def test_leased_bytes_stay_what_they_were_whatever_becomes_of_the_key(
    loop: str, change: list[str | bytes], live: LiveServer
) -> None:
    async with attached(live) as client, connected(live) as other:
        await other.ask("SET", "k", OLD)
        ((offset, length),) = await client.ask("KV.LEASE", 0, "k")
        await other.ask(*change)
        for n in range(12):  # and those that come for the room
            await other.ask("SET", f"more{n}", NEW)
        assert client.bytes_at([offset, length]) == OLD
        assert await client.ask("KV.RELEASE", offset) == 1
        live.store.check_integrity()


async def test_a_block_leased_twice_is_counted_twice(loop: str, live: LiveServer) -> None:
    async with attached(live) as client, attached(live) as other:
        await client.ask("SET", "k", OLD)
        (one, two), (three,) = await client.ask("KV.LEASE", 0, "k", "k"), await other.ask("KV.LEASE", 0, "k")
        assert one == two == three
        assert live.store.leases == 3
        assert await client.ask("KV.RELEASE", one[0]) == 1
        assert await client.ask("KV.RELEASE", one[0], one[0]) == 1
        assert await client.ask("KV.RELEASE", one[0]) == 0
        assert live.store.leases == 1, "another's lease is his"
        assert await client.ask("KV.RELEASE", -1, 2**63 - 1, 512) == 0


async def test_a_lease_whose_limit_has_passed_is_void_and_the_client_is_told_so(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        now_s = live.store.now_s()
        live.store.now_s = lambda: now_s
        await client.ask("MSET", "short", OLD, "long", NEW)
        (short,) = await client.ask("KV.LEASE", 100, "short")
        (long,) = await client.ask("KV.LEASE", 600_000, "long")
        live.store.now_s = lambda: now_s + 0.099
        assert live.store.revoke_overdue() == 0
        live.store.now_s = lambda: now_s + 0.2
        await until(lambda: live.store.leases == 1)
        assert b" leases=1 " in await client.ask("CLIENT", "INFO")
        assert await client.ask("KV.RELEASE", short[0], long[0]) == 1
        assert live.server.shm.leases == live.store.leases == 0


async def test_one_client_leases_half_of_the_arena_and_others_have_the_rest(loop: str, live: LiveServer) -> None:
    async with attached(live) as greedy, attached(live) as modest:
        for n in range(6):
            await greedy.ask("SET", f"k{n}", OLD)
        places = await greedy.ask("KV.LEASE", 0, *(f"k{n}" for n in range(6)))
        assert [str(place) for place in places[3:]] == [SHARE_USED] * 3
        assert all(isinstance(place, list) for place in places[:3])
        assert live.store.leases == 3
        assert await greedy.ask("KV.LEASE", 0, "k0") == places[:1], "which takes no more room"
        assert await greedy.ask("KV.RELEASE", places[0][0]) == 1
        (again,) = await modest.ask("KV.LEASE", 0, "k5")
        assert modest.bytes_at(again) == OLD
        assert await greedy.ask("KV.RELEASE", places[0][0]) == 1
        (late,) = await greedy.ask("KV.LEASE", 0, "k5")
        assert greedy.bytes_at(late) == OLD
        for n in range(6):
            await modest.ask("SET", f"new{n}", NEW)  # there is room for who stores
        assert await modest.ask("GET", "new5") == NEW


async def test_ended_leases_of_which_the_client_says_nothing_do_not_fill_its_share(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "LEASES_MAX", 4)

    async with LiveServer(tmp_path) as live, attached(live) as client:
        now_s = live.store.now_s()
        live.store.now_s = lambda: now_s
        await client.ask("SET", "k", pattern(100_000))
        places = await client.ask("KV.LEASE", 100, *["k"] * 5)
        assert [str(place) for place in places[4:]] == [SHARE_USED]
        live.store.now_s = lambda: now_s + 1
        live.store.revoke_overdue()
        places = await client.ask("KV.LEASE", 0, *["k"] * 4)
        assert all(isinstance(place, list) for place in places)
        assert await client.ask("KV.RELEASE", *[places[0][0]] * 9) == 4


async def test_a_block_on_disk_is_brought_before_it_is_leased(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path) as live, attached(live) as client:
        live.put_away("a", "b")
        live.put("c")
        places = await client.ask("KV.LEASE", 0, "a", "none", "b", "c")
        assert places[1] is None
        assert [client.bytes_at(places[n]) for n in (0, 2, 3)] == [block("a"), block("b"), block("c")]
        assert live.tier("a") == "memory"


async def test_what_is_on_disk_beyond_a_clients_share_is_refused_and_not_waited_for(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path) as live, attached(live) as client:
        names = [f"k{n}" for n in range(24)]  # 8 are half of the arena
        for name in names:
            live.put_away(name)
        places = await client.ask("KV.LEASE", 0, *names, "none")
        leased = [place for place in places if isinstance(place, list)]
        assert 0 < len(leased) <= 8
        assert [client.bytes_at(place) for place in leased] == [block(name) for name in names[: len(leased)]]
        assert places[: len(leased)] == leased
        assert places[-1] is None
        assert [str(refused) for refused in places[len(leased) : -1]] == [SHARE_USED] * (len(names) - len(leased))
        assert live.tier(names[-1]) == "disk"
        live.store.check_integrity()


async def test_a_leased_block_is_not_taken_out_of_memory_for_others(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path) as live, attached(live) as client:
        live.put("a")
        live.saved()
        (place,) = await client.ask("KV.LEASE", 0, "a")
        for n in range(40):
            assert await client.ask("SET", f"k{n}", block(f"k{n}")) == b"OK"
        assert client.bytes_at(place) == block("a")
        assert live.tier("a") == "memory"
        assert await client.ask("KV.RELEASE", place[0]) == 1


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["KV.LEASE", "x", "k"], "ERR value is not an integer or out of range"),
        (["KV.LEASE", "-1", "k"], "ERR a lease lasts from 1 to 600000 milliseconds, 0 being the server's default"),
        (["KV.LEASE", "600001", "k"], "ERR a lease lasts from 1 to 600000 milliseconds, 0 being the server's default"),
        (["KV.LEASE", "0", *["k"] * 1025], "ERR at most 1024 keys at a time"),
        (["KV.LEASE", "0"], "ERR wrong number of arguments for 'kv.lease' command"),
        (["KV.RELEASE", "512", "x"], "ERR value is not an integer or out of range"),
    ],
)
async def test_a_bad_request_is_an_error_and_leases_and_releases_nothing(
    loop: str, words: list[str], refusal: str, live: LiveServer
) -> None:
    async with attached(live) as client:
        await client.ask("SET", "k", OLD)
        await client.ask("KV.LEASE", 0, "k")
        assert str(await client.ask(*words)) == refusal
        assert live.store.leases == 1


async def test_a_lease_counts_as_a_use_and_a_miss_is_told_of(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        await client.ask("CONFIG", "SET", "notify-keyspace-events", "Em")
        await client.ask("SET", "k", OLD)
        async with connected(live) as listener:
            await listener.ask("SUBSCRIBE", "__keyevent@0__:keymiss")
            hits, misses = live.store.stats.hits, live.store.stats.misses
            await client.ask("KV.LEASE", 0, "k", "nothing")
            assert await listener.read() == [b"message", b"__keyevent@0__:keymiss", b"nothing"]
        assert (live.store.stats.hits, live.store.stats.misses) == (hits + 1, misses + 1)


async def test_within_a_transaction_blocks_are_leased_too(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        await client.ask("SET", "k", OLD)
        await client.ask("MULTI")
        assert await client.ask("KV.LEASE", 0, "k") == b"QUEUED"
        assert await client.ask("SET", "k", NEW) == b"QUEUED"
        ((place,), ok) = await client.ask("EXEC")
        assert ok == b"OK"
        assert client.bytes_at(place) == OLD


async def test_an_operator_ends_a_clients_leases_by_hanging_up_on_it(loop: str, live: LiveServer) -> None:
    async with connected(live) as operator, attached(live) as client:
        await operator.ask("SET", "k", OLD)
        await client.ask("KV.LEASE", 0, "k", "k")
        number = await client.ask("CLIENT", "ID")
        assert client.is_open
        assert await operator.ask("KV.REVOKE", number) == 2
        await until(lambda: not client.is_open)
        await until(lambda: live.store.leases == 0)
        assert await operator.ask("KV.REVOKE", number) == 0
        assert await operator.ask("KV.REVOKE", await operator.ask("CLIENT", "ID")) == 0
        assert str(await operator.ask("KV.REVOKE", "x")) == "ERR client-id should be greater than 0"


async def test_a_client_that_revokes_itself_hears_the_count_and_is_hung_up_on(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        await client.ask("SET", "k", OLD)
        await client.ask("KV.LEASE", 0, "k")
        assert await client.ask("KV.REVOKE", await client.ask("CLIENT", "ID")) == 1
        await until(lambda: not client.is_open)
        await until(lambda: live.store.leases == 0)


async def test_the_socket_is_shut_before_the_bytes_may_change(loop: str, live: LiveServer) -> None:
    """What a reader goes by: who finds its socket open after having read has read what was leased."""
    async with attached(live) as client:
        await client.ask("SET", "k", OLD)
        await client.ask("KV.LEASE", 0, "k")
        open_at_release: list[bool] = []
        end = live.store.end_leases

        def watched(places: Sequence[Place]) -> int:
            open_at_release.append(client.is_open)
            return end(places)

        live.store.end_leases = watched  # type: ignore[method-assign]
        live.sessions()[0].close()
        await until(lambda: live.store.leases == 0)
        assert open_at_release == [False]


async def test_the_share_is_counted_right_when_another_block_has_come_to_lie_where_one_was(
    loop: str, live: LiveServer
) -> None:
    async with attached(live) as client:
        now_s = live.store.now_s()
        live.store.now_s = lambda: now_s
        for n in range(8):
            live.store.now_s = lambda now_s=now_s + n: now_s  # type: ignore[misc]
            live.store.revoke_overdue()
            await client.ask("FLUSHALL")
            await client.ask("SET", "k", pattern(MIB * (1 + n % 2), n))
            ((offset, _),) = await client.ask("KV.LEASE", 100, "k")
            assert offset == 512
        assert await client.ask("KV.RELEASE", *[512] * 9) == 1
        for n in range(4):
            await client.ask("SET", f"k{n}", pattern(2 * MIB, n))
        places = await client.ask("KV.LEASE", 0, *(f"k{n}" for n in range(4)))
        assert [isinstance(place, list) for place in places] == [True, True, True, False]


async def test_a_release_that_comes_late_does_not_end_a_younger_lease_at_the_same_place(
    loop: str, live: LiveServer
) -> None:
    """Of the older one's end the server has long made room for others; the client still had to say that it knows."""
    async with attached(live) as client:
        now_s = live.store.now_s()
        live.store.now_s = lambda: now_s
        await client.ask("SET", "old", OLD)
        (old,) = await client.ask("KV.LEASE", 100, "old")
        live.store.now_s = lambda: now_s + 1
        live.store.revoke_overdue()
        await client.ask("FLUSHALL")
        for n in range(4):
            await client.ask("SET", f"k{n}", NEW)
        places = await client.ask("KV.LEASE", 0, *(f"k{n}" for n in range(4)))
        assert str(places[3]) == SHARE_USED
        assert places[0] == old, "another block lies there now"
        assert await client.ask("KV.RELEASE", old[0]) == 0
        assert live.store.leases == 3, "this was the end of the first"
        assert await client.ask("KV.RELEASE", old[0]) == 1
        assert live.store.leases == 2


async def test_of_two_leases_of_a_block_the_one_that_lasts_longer_is_released_last(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        now_s = live.store.now_s()
        live.store.now_s = lambda: now_s
        await client.ask("SET", "k", OLD)
        (place,) = await client.ask("KV.LEASE", 600_000, "k")
        assert await client.ask("KV.LEASE", 100, "k") == [place]
        assert await client.ask("KV.RELEASE", place[0]) == 1
        live.store.now_s = lambda: now_s + 1
        live.store.revoke_overdue()
        assert live.store.leases == 1, "who asked for ten minutes has them"


async def test_places_of_whose_end_the_client_says_nothing_are_bounded(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "LEASES_MAX", 2)

    async with LiveServer(tmp_path) as live, attached(live) as client:
        now_s = live.store.now_s()
        live.store.now_s = lambda: now_s
        for n in range(3):
            await client.ask("SET", f"k{n}", pattern(100_000, n))
        places = await client.ask("KV.LEASE", 100, "k0", "k1")
        live.store.now_s = lambda: now_s + 1
        live.store.revoke_overdue()
        assert str((await client.ask("KV.LEASE", 0, "k2"))[0]) == SHARE_USED
        assert await client.ask("KV.RELEASE", places[0][0]) == 0
        assert isinstance((await client.ask("KV.LEASE", 0, "k2"))[0], list)
