"""Several threads at one store: every byte is the one that was stored, and afterwards the accounts agree."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvredis.storage.entry import INLINE_BYTES_MAX, Lease
from kvredis.storage.eviction.base import LRU
from kvredis.storage.index import Index
from kvredis.storage.memory.allocator import Allocator
from kvredis.storage.store import Store

from .small_store import content, fill, small_store

THREADS = 4
STEPS = 1500
SWITCH_INTERVAL_S = 1e-5
"""As often as the interpreter can change threads: hundreds of times in what would else be one turn."""

LENGTHS = (100, INLINE_BYTES_MAX, 60_000, 200_000)
KEYS = 6
HOLDS_MAX = 4


@pytest.fixture
def _restless_interpreter() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(before_s)


def work(store: Store, name: int, barrier: threading.Barrier, wrong: list[object]) -> None:
    """Store, read and delete under common keys; what a key holds begins with the number of its content."""
    rng = random.Random(name)
    held: list[Lease] = []
    barrier.wait()
    try:
        for step in range(STEPS):
            key = b"%d" % rng.randrange(KEYS)
            choice = rng.random()
            if choice < 0.4:
                number = name * STEPS + step
                value = number.to_bytes(4, "big") + content(number, rng.choice(LENGTHS))
                reservation = store.reserve(key, len(value))
                if reservation is not None:
                    with reservation:
                        reservation.view[:] = value
                        if rng.random() < 0.7:
                            reservation.commit(expire_at_ms=0 if rng.random() < 0.8 else 1)
            elif choice < 0.9:
                lease = store.lease(key, limit_s=rng.choice((0.0, 3600.0)))
                if lease is not None:
                    held.append(lease)
                if len(held) < HOLDS_MAX:
                    continue
                for lease in held:
                    with lease:
                        data = bytes(lease.view)
                        if data[4:] != content(int.from_bytes(data[:4], "big"), len(data) - 4):
                            wrong.append(key)
                held.clear()
            elif choice < 0.95:
                store.delete([key])
            else:
                store.match([b"%d" % number for number in range(KEYS)])
                store.collect_expired()
                store.revoke_overdue()
                store.scan(0, 1000)
    except BaseException as error:
        wrong.append(error)
        raise
    finally:
        for lease in held:
            lease.release()


@pytest.mark.usefixtures("_restless_interpreter")
def test_threads_share_a_store() -> None:
    with closing(small_store()) as store:
        barrier = threading.Barrier(THREADS)
        wrong: list[object] = []
        threads = [threading.Thread(target=work, args=(store, name, barrier, wrong)) for name in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert store.leases == store.reserved_bytes == store.retired_bytes == 0
        store.check_integrity()
        stats = store.stats
        assert min(stats.hits, stats.overwritten, stats.evicted, stats.aborted) > 0
        store.flush()
        assert store.used_bytes == 0


def test_nothing_is_changed_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads meet in the wrong place too seldom to be the proof of that."""
    stores: list[Store] = []
    calls: set[str] = set()

    def guarded(name: str, change: Callable[..., object]) -> Callable[..., object]:
        def checked(*args: object) -> object:
            if stores:  # there is none yet that an arena's free memory is given to
                assert stores[0].lock.locked(), f"{name} without the lock"
                calls.add(name)
            return change(*args)

        return checked

    changes: list[tuple[type, str]] = [(Allocator, "allocate"), (Allocator, "allocate_at"), (Allocator, "free")]
    changes += [(Index, "take"), (LRU, "admit"), (LRU, "forget"), (LRU, "touch_run")]
    for owner, name in changes:  # before there is a store: of what is as it was the compiled part takes no notice
        monkeypatch.setattr(owner, name, guarded(name, getattr(owner, name)))
    with closing(small_store()) as store:
        stores.append(store)
        keys = fill(store, count=20)
        lease, reservation = store.lease(keys[-1]), store.reserve(b"aborted", 30_000)
        assert lease is not None
        assert reservation is not None
        reservation.abort()
        store.put(b"small", b"x")
        store.put(b"gone", b"x", expire_at_ms=1)
        store.match(keys[-3:])
        store.collect_expired()
        store.delete([keys[-1]])
        lease.release()
        store.flush()
        assert calls == {name for _, name in changes}
        assert store.used_bytes == 0
