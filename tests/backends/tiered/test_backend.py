"""Near first, far behind: where blocks come from, what stays where, and that the figures add up."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from kvredis.backends.tiered.backend import LayeredBackend
from tests.backends.conftest import ServerProcess
from tests.backends.fake_server import FakeServer, Leave, Shelf
from tests.backends.local_disk import DRAIN_S, stuck_disk
from tests.backends.nodes import wait_until
from tests.backends.verbs import content, keys_of, loaded, put, put_through

from .layered_pair import LENGTH, figures, forget_near, near_keys, open_layered, store_prompt, store_through

TIERS = ("lookups", "memory_hits", "disk_hits", "remote_hits", "misses")


@pytest.fixture
def shelf(fake: FakeServer) -> Iterator[Shelf]:
    """What the server behind holds; it takes SETs unless the test says otherwise, and at the end."""
    fake.answer = shelf = Shelf()
    yield shelf
    shelf.open.set()


@pytest.fixture
def backend(fake: FakeServer, shelf: Shelf) -> Iterator[LayeredBackend]:
    """64 blocks of near memory before the fake server."""
    with closing(open_layered(fake.url)) as backend:
        yield backend
        shelf.open.set()
        backend.flush()
        backend.near.store.check_integrity()
        assert backend.near.store.leases == backend.near.store.reserved_bytes == 0


def values_of(keys: list[bytes]) -> list[bytes]:
    return [content(key, LENGTH) for key in keys]


# ---- where blocks come from --------------------------------------------------------------------------------------


def test_what_is_stored_is_near_at_once_and_far_when_the_server_takes_it(
    backend: LayeredBackend, fake: FakeServer, shelf: Shelf
) -> None:
    keys = keys_of(5)
    shelf.open.clear()
    assert store_prompt(backend, keys) == 5
    assert backend.match(keys) == 5
    assert loaded(backend, keys) == values_of(keys)
    assert figures(backend, "memory_hits", "remote_hits") == (5, 0)
    assert not shelf.values
    shelf.open.set()
    assert backend.flush() == 0
    assert dict(shelf.values) == {key: content(key, LENGTH) for key in keys}
    assert fake.named(b"GET") == []


@pytest.mark.parametrize("kind", ["kvredis", "redis"])
def test_the_second_load_of_what_was_far_asks_the_server_for_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    server: ServerProcess = request.getfixturevalue(f"{kind}_server")
    keys = [b"second:%b" % key for key in keys_of(20)]
    with closing(open_layered(server.url)) as first:
        assert store_prompt(first, keys) == 20
        assert first.flush() == 0
    with closing(open_layered(server.url)) as second, redis.Redis(unix_socket_path=server.url[7:]) as client:

        def gets() -> int:
            return int(client.info("commandstats").get("cmdstat_get", {}).get("calls", 0))

        before = gets()
        assert loaded(second, keys) == values_of(keys)
        assert gets() == before + 20
        assert loaded(second, keys) == values_of(keys)
        assert gets() == before + 20
        assert second.match(keys) == 20
        assert figures(second, *TIERS) == (40, 20, 0, 20, 0)


def test_a_value_under_a_page_that_was_far_is_near_afterwards_too(backend: LayeredBackend, shelf: Shelf) -> None:
    shelf.values.update({b"small": b"x", b"empty": b""})
    for _ in range(2):
        assert loaded(backend, [b"small", b"empty"]) == [b"x", b""]
    assert figures(backend, "memory_hits", "remote_hits") == (2, 2)


def test_near_and_far_blocks_come_in_the_order_asked_for_and_the_far_ones_in_one_load(
    backend: LayeredBackend, fake: FakeServer, shelf: Shelf
) -> None:
    keys = keys_of(30)
    shelf.values.update({key: content(key, LENGTH) for key in keys[::3]})
    for key in keys[1::3]:
        assert put_through(backend, key, content(key, LENGTH))
    expected = [None if turn % 3 == 2 else content(key, LENGTH) for turn, key in enumerate(keys)]
    assert loaded(backend, keys) == expected
    assert sorted(args[0] for args in fake.named(b"GET")) == sorted(keys[::3] + keys[2::3])
    assert figures(backend, *TIERS) == (30, 10, 0, 10, 10)
    assert figures(backend, "hits", "far_hits", "far_misses") == (20, 10, 10)


def test_blocks_that_have_left_near_since_the_load_began_come_from_far(backend: LayeredBackend, shelf: Shelf) -> None:
    keys = keys_of(6)
    assert store_prompt(backend, keys) == 6
    assert backend.flush() == 0
    leases = backend.load(keys)
    first = next(leases)
    assert first is not None
    first.release()
    forget_near(backend, keys[2:5])
    for key, lease in zip(keys[1:], leases, strict=True):
        assert lease is not None
        with lease:
            assert lease.view == content(key, LENGTH)
    assert figures(backend, *TIERS) == (6, 3, 0, 3, 0)
    assert near_keys(backend, keys) == keys


def test_a_prompt_longer_than_near_memory_is_loaded_whole(fake: FakeServer, shelf: Shelf) -> None:
    keys = keys_of(60)
    with closing(open_layered(fake.url, blocks=20)) as backend:
        store_through(backend, keys)
        assert 0 < len(near_keys(backend, keys)) <= 20
        assert backend.match(keys) == 60
        for _ in range(2):
            assert loaded(backend, keys) == values_of(keys)


def test_each_tier_of_three_serves_what_it_has(fake: FakeServer, shelf: Shelf, tmp_path: Path) -> None:
    keys = keys_of(24)
    with closing(open_layered(fake.url, blocks=16, disk=tmp_path / "disk", timeout_s=20.0)) as backend:
        shelf.values.update({key: content(key, LENGTH) for key in keys[:4]})
        store_through(backend, keys)
        tiering = backend.near.store.tiering
        assert tiering is not None
        assert tiering.io.drain(DRAIN_S)
        tiers = backend.tiers_of(keys)
        assert tiers[:4] == ["remote"] * 4
        assert set(tiers[4:]) == {"memory", "disk"}
        assert loaded(backend, keys) == values_of(keys)
        lookups, memory, disk, remote, misses = figures(backend, *TIERS)
        assert (lookups, remote, misses) == (24, 4, 0)
        assert int(memory) + int(disk) == 20
        assert int(disk) >= tiers.count("disk") / 2
        assert set(shelf.values) == set(keys), "memory and disk are one tier to the server"


def test_the_counters_of_the_tiers_add_up_to_the_lookups_whatever_happens(fake: FakeServer, shelf: Shelf) -> None:
    keys, chance = keys_of(40), random.Random(7)
    with closing(open_layered(fake.url, blocks=16)) as backend:
        asked = lookups = 0
        for _ in range(60):
            part = chance.sample(keys, chance.randrange(1, 12))
            match chance.randrange(4):
                case 0:
                    put(backend, part[0], content(part[0], LENGTH))
                case 1:
                    backend.delete(part[:2])
                case 2:
                    with closing(backend.load(part)) as leases:
                        for _, lease in zip(range(len(part) // 2), leases, strict=False):
                            asked += 1
                            if lease is not None:
                                lease.release()
                case _:
                    values = loaded(backend, part)
                    assert all(value in (None, content(key, LENGTH)) for key, value in zip(part, values, strict=True))
                    asked += len(part)
            lookups, *by_tier = (int(figure) for figure in figures(backend, *TIERS))
            assert lookups == sum(by_tier)
        assert asked <= lookups <= asked + 60  # zip takes one more than it gives


# ---- what stays near -----------------------------------------------------------------------------------------------


def test_a_far_block_that_is_deleted_while_it_is_read_does_not_stay_near(backend: LayeredBackend, shelf: Shelf) -> None:
    keys = keys_of(4)
    shelf.values.update({key: content(key, LENGTH) for key in keys})
    leases = backend.load(keys)
    first = next(leases)
    assert first is not None
    assert backend.delete(keys) == 4
    assert first.view == content(keys[0], LENGTH)
    first.release()
    for lease in leases:  # the server may have sent some of them before
        if lease is not None:
            lease.release()
    assert near_keys(backend, keys) == []
    shelf.values[keys[0]] = b"again"
    assert loaded(backend, keys[:1]) == [b"again"]
    assert near_keys(backend, keys) == keys[:1], "later loads do stay"


def test_a_far_block_that_is_stored_anew_while_it_is_read_does_not_take_the_new_ones_place(
    backend: LayeredBackend, shelf: Shelf
) -> None:
    shelf.values[b"k"] = b"old" * 20_000
    (old,) = backend.load([b"k"])
    assert put_through(backend, b"k", b"new" * 20_000)
    assert old is not None
    with old:
        assert old.view == b"old" * 20_000
    assert loaded(backend, [b"k"]) == [b"new" * 20_000]
    assert shelf.values[b"k"] == b"new" * 20_000


def test_near_tells_nothing_of_loads_that_it_has_not_counted(backend: LayeredBackend, shelf: Shelf) -> None:
    assert put_through(backend, b"k", b"v" * LENGTH)
    assert loaded(backend, [b"k", b"l"])[1] is None
    stats = backend.stats()
    assert (stats["lookups"], stats["memory_hits"], stats["misses"]) == (2, 1, 1)
    assert not {"near_lookups", "near_memory_hits", "near_disk_hits", "near_misses"} & stats.keys()
    assert stats["near_used_bytes"]


def test_what_a_lookup_has_found_leaves_near_last(fake: FakeServer, shelf: Shelf) -> None:
    found, others = keys_of(6), [b"other:%b" % key for key in keys_of(10)]
    with closing(open_layered(fake.url, blocks=16)) as backend:
        store_through(backend, found)
        store_through(backend, others)
        assert backend.match([*found, b"nowhere"]) == 6
        for number in range(10):
            assert put_through(backend, b"new:%d" % number, content(b"new", LENGTH))
        assert near_keys(backend, [*found, *others]) == found


# ---- questions ---------------------------------------------------------------------------------------------------


def test_a_lookup_asks_the_server_once_and_only_for_what_is_not_near(
    backend: LayeredBackend, fake: FakeServer, shelf: Shelf
) -> None:
    keys = keys_of(9)
    for key in keys[1::2]:
        assert put_through(backend, key, content(key, LENGTH))
    shelf.values.update(dict.fromkeys((keys[0], keys[2], keys[4]), b"x"))
    assert backend.match(keys[1:2]) == 1
    assert fake.named(b"KV.MATCH") == fake.named(b"EXISTS") == []
    assert backend.match(keys) == 6, "0, 2 and 4 are far, 1, 3 and 5 near, 6 is nowhere"
    assert fake.named(b"KV.MATCH") == [keys[0::2]]
    assert backend.match(keys[6:]) == 0
    assert backend.match(keys[5:]) == 1
    assert backend.match([]) == 0


def test_where_blocks_are_is_said_without_asking_the_server(
    backend: LayeredBackend, fake: FakeServer, shelf: Shelf
) -> None:
    keys = keys_of(3)
    assert put_through(backend, keys[1], content(keys[1], LENGTH))
    asked = len(fake.commands)
    assert backend.tiers_of(keys) == ["remote", "memory", "remote"]
    assert len(fake.commands) == asked


def test_a_touch_answers_at_once_and_the_server_hears_of_it(
    backend: LayeredBackend, fake: FakeServer, shelf: Shelf
) -> None:
    keys = keys_of(4)
    shelf.values[keys[0]] = b"x"
    assert put_through(backend, keys[1], content(keys[1], LENGTH))
    assert backend.touch(keys) == 1
    wait_until(lambda: fake.named(b"TOUCH") == [keys], "the server is told what was used")


def test_a_block_is_deleted_in_both_tiers_and_counts_once(backend: LayeredBackend, shelf: Shelf) -> None:
    keys = keys_of(6)
    shelf.values.update(dict.fromkeys(keys[:2], b"x"))
    assert store_prompt(backend, keys[2:5]) == 3
    forget_near(backend, keys[4:5])
    assert backend.flush() == 0
    assert backend.delete(keys) == 5
    assert not shelf.values
    assert near_keys(backend, keys) == []


# ---- time and room -----------------------------------------------------------------------------------------------


def test_what_does_not_come_within_the_time_given_is_a_miss_and_what_is_near_is_not(
    backend: LayeredBackend, fake: FakeServer, shelf: Shelf
) -> None:
    keys = keys_of(6)
    for key in keys[::2]:
        assert put_through(backend, key, content(key, LENGTH))
    shelf.values.update({key: content(key, LENGTH) for key in keys[1::2]})
    stuck = shelf.open
    stuck.clear()

    def hang_on_get(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"GET":
            stuck.wait()
        return shelf(args)

    fake.answer = hang_on_get
    began_s = backend.near.store.now_s()
    leases = list(backend.load(keys, within_s=0.2))
    assert backend.near.store.now_s() - began_s < 4, "well before the timeout of the server"
    assert [lease is not None for lease in leases] == [True, False] * 3
    for lease in leases:
        if lease is not None:
            lease.release()
    stuck.set()
    assert loaded(backend, keys) == values_of(keys), "no server was lost over it"
    assert figures(backend, "far_losses") == (0,)


def test_the_disk_and_the_server_share_the_time_given(fake: FakeServer, shelf: Shelf, tmp_path: Path) -> None:
    keys = keys_of(24)
    with closing(open_layered(fake.url, blocks=16, disk=tmp_path / "disk", timeout_s=60.0)) as backend:
        store_through(backend, keys)
        tiering = backend.near.store.tiering
        assert tiering is not None
        assert tiering.io.drain(DRAIN_S)
        away = [key for key, tier in zip(keys, backend.tiers_of(keys), strict=True) if tier == "disk"]
        assert away
        with stuck_disk(backend.near):
            began_s = backend.near.store.now_s()
            assert loaded(backend, away, within_s=0.2) == [None] * len(away), "the disk has used it all up"
            assert backend.near.store.now_s() - began_s < 30
        assert loaded(backend, keys) == values_of(keys)


def test_a_disk_that_does_not_answer_is_passed_over_for_the_server(
    fake: FakeServer, shelf: Shelf, tmp_path: Path
) -> None:
    keys = keys_of(24)
    with closing(open_layered(fake.url, blocks=16, disk=tmp_path / "disk", timeout_s=40.0)) as backend:
        store_through(backend, keys)
        backend.near.load_wait_s = 0.1
        with stuck_disk(backend.near):
            assert loaded(backend, keys) == values_of(keys)


def test_a_far_block_waits_a_moment_for_room_and_is_a_miss_when_readers_hold_it_all(
    fake: FakeServer, shelf: Shelf
) -> None:
    keys = keys_of(18)
    with closing(open_layered(fake.url, blocks=16)) as backend:
        for key in keys[:16]:
            assert put_through(backend, key, content(key, LENGTH))
        shelf.values.update({key: content(key, LENGTH) for key in keys[16:]})
        held = [lease for lease in backend.load(keys[:16]) if lease is not None]
        assert len(held) == 16
        assert loaded(backend, keys[16:]) == [None, None]
        assert figures(backend, "misses", "far_no_room") == (2, 2)
        assert backend.reserve(b"more", LENGTH) is None
        for lease in held:
            lease.release()
        assert loaded(backend, keys[16:]) == values_of(keys[16:])
        assert backend.stats()["near_evicted"] == 2, "the coldest have made room"
