"""Opaque pages and their jobs without an engine: every page is answered for, and a wrong byte is never loaded."""

import json
import threading

import pytest
from safetensors.numpy import load

from kvredis.adapters.engine.config import config_from
from kvredis.adapters.paged.pages import TOUCHES_MAX, Page, PageFormat, PageStore, TierJobs, model_prefix, page_prefix
from kvredis.storage.errors import ConfigError, LayoutError
from tests.adapters.fake_backend import FakeBackend, FakeReservation

NBYTES = 300_000
FORMAT = PageFormat({"engine": "test", "model": 'org/"m"'}, NBYTES)
END_S = 30


def filled(seed: int, sizes: tuple[int, ...] = (NBYTES,)) -> list[memoryview]:
    """Pieces of memory that hold something."""
    return [memoryview(bytearray((seed + place) % 251 for place in range(size))) for size in sizes]


def page(name: bytes, pieces: list[memoryview]) -> Page:
    return Page(name, FORMAT, pieces)


def stored(store: PageStore, *names: bytes) -> list[bool]:
    """Store a page under each name, whose bytes follow from it."""
    return store.store([page(name, filled(name[-1])) for name in names])


def loaded(store: PageStore, *names: bytes, until_missing: bool = False) -> list[bool]:
    """Load them, and see that those which have come are what was stored."""
    pages = [page(name, [memoryview(bytearray(NBYTES))]) for name in names]
    come = store.load(pages, until_missing=until_missing)
    for each, has in zip(pages, come, strict=True):
        if has:
            assert bytes(each.pieces[0]) == bytes(filled(each.key[-1])[0])
    return come


class TestValue:
    """What is stored."""

    @pytest.mark.parametrize("sizes", [(NBYTES,), (1, NBYTES - 1), (100_000,) * 3, (299_999, 1)])
    def test_pieces_come_back_whatever_they_were_cut_into(self, sizes: tuple[int, ...]) -> None:
        value = memoryview(bytearray(FORMAT.total_bytes))
        FORMAT.write(value, filled(7, sizes))
        out = [memoryview(bytearray(size)) for size in reversed(sizes)]
        FORMAT.read(value, out)
        assert b"".join(out) == b"".join(filled(7, sizes))

    def test_it_is_a_safetensors_file_that_other_tools_open(self) -> None:
        value = memoryview(bytearray(FORMAT.total_bytes))
        FORMAT.write(value, filled(3))
        assert load(bytes(value))["kv"].tobytes() == bytes(filled(3)[0])
        length = int.from_bytes(value[:8], "little")
        assert (8 + length) % 512 == 0
        told = json.loads(bytes(value[8 : 8 + length]))["__metadata__"]
        assert (told["format"], told["model"], len(told["xxh3"])) == ("kvredis-page-1", 'org/"m"', 32)

    def test_any_bit_that_has_changed_is_noticed(self) -> None:
        value = bytearray(FORMAT.total_bytes)
        FORMAT.write(memoryview(value), filled(3))
        out = [memoryview(bytearray(NBYTES))]
        for place in (0, 9, 60, 200, 511, 512, 512 + NBYTES // 2, len(value) - 1):
            value[place] ^= 4
            with pytest.raises(LayoutError):
                FORMAT.read(memoryview(value), out)
            value[place] ^= 4
        FORMAT.read(memoryview(value), out)

    def test_without_the_sums_a_header_is_checked_all_the_same(self) -> None:
        value = bytearray(FORMAT.total_bytes)
        FORMAT.write(memoryview(value), filled(3))
        value[-1] ^= 1
        out = [memoryview(bytearray(NBYTES))]
        FORMAT.read(memoryview(value), out, verify=False)
        other = PageFormat({"engine": "test", "model": "org/n"}, NBYTES)
        with pytest.raises(LayoutError, match="header"):
            other.read(memoryview(value), out, verify=False)

    def test_pieces_of_the_wrong_size_are_refused(self) -> None:
        value = memoryview(bytearray(FORMAT.total_bytes))
        for sizes in ((NBYTES - 1,), (NBYTES - 1, 0), ()):
            with pytest.raises(LayoutError):
                FORMAT.write(value, filled(1, sizes))

    def test_a_model_whose_name_is_endless_is_refused(self) -> None:
        with pytest.raises(LayoutError, match="model's name"):
            PageFormat({"model": "m" * 20_000}, 1)

    @pytest.mark.parametrize("sizes", [(NBYTES,), (1, NBYTES - 1), (100_000,) * 3])
    def test_a_page_that_is_lent_is_the_same_value(self, sizes: tuple[int, ...]) -> None:
        value = memoryview(bytearray(FORMAT.total_bytes))
        FORMAT.write(value, filled(7, sizes))
        lent = FORMAT.lend(filled(7, sizes))
        FORMAT.head(lent)
        assert b"".join(lent.views) == value
        FORMAT.check(lent)

    @pytest.mark.parametrize(("view", "place"), [(0, 0), (0, 200), (0, 511), (1, 0), (2, 149_999)])
    def test_any_bit_that_has_changed_on_its_way_into_a_page_is_noticed(self, view: int, place: int) -> None:
        lent = FORMAT.lend(filled(3, (NBYTES // 2, NBYTES // 2)))
        FORMAT.head(lent)
        lent.views[view][place] ^= 4
        with pytest.raises(LayoutError):
            FORMAT.check(lent)
        if view:
            FORMAT.check(lent, verify=False)

    def test_pieces_of_the_wrong_size_are_not_lent(self) -> None:
        for sizes in ((NBYTES - 1,), (NBYTES, 1), ()):
            with pytest.raises(LayoutError):
                FORMAT.head(FORMAT.lend(filled(1, sizes)))


def test_a_key_names_everything_that_the_bytes_depend_on() -> None:
    prefix = page_prefix("org/m y", {"dtype": "bf16", "tp": [0, 2]})
    assert prefix.startswith(model_prefix("org/m y") + b"")
    assert model_prefix("org/m y") == b"kvredis:org/m_y@"
    others = [
        page_prefix("org/m_y", {"dtype": "bf16", "tp": [0, 2]}),
        page_prefix("org/m y", {"dtype": "fp8", "tp": [0, 2]}),
        page_prefix("org/m y", {"dtype": "bf16", "tp": [1, 2]}),
    ]
    assert len({prefix, *others}) == 4
    assert page_prefix("org/m y", {"tp": [0, 2], "dtype": "bf16"}) == prefix


class TestStore:
    """Pages through a backend."""

    def test_each_page_is_answered_for(self) -> None:
        store = PageStore(FakeBackend())
        assert stored(store, b"a", b"c") == [True, True]
        assert store.present([b"a", b"b", b"c", b"d"]) == [True, False, True, False]
        assert store.match([b"a", b"b", b"c"]) == 1
        assert loaded(store, b"a", b"b", b"c") == [True, False, True]
        assert loaded(store, b"a", b"b", b"c", until_missing=True) == [True, False, False]

    def test_what_is_there_is_not_stored_again_and_the_tail_goes_first(self) -> None:
        backend = FakeBackend()
        store = PageStore(backend)
        stored(store, b"b")
        assert stored(store, b"a", b"b", b"c") == [True] * 3
        assert backend.written == [b"b", b"c", b"a"]
        assert store.stats()["already_stored"] == 1

    def test_a_damaged_page_is_false_and_leaves_and_no_lease_stays(self) -> None:
        backend = FakeBackend()
        store = PageStore(backend)
        stored(store, b"a", b"b")
        value = bytearray(backend.values[b"a"])
        value[-1] ^= 1
        backend.values[b"a"] = bytes(value)
        assert loaded(store, b"a", b"b") == [False, True]
        assert b"a" not in backend.values
        assert (store.stats()["corrupt"], backend.leases) == (1, 0)

    def test_bytes_whose_lease_has_ended_are_not_loaded_and_not_called_damaged(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = FakeBackend()
        store = PageStore(backend)
        stored(store, b"a")

        def read(*args: object, **rest: object) -> None:
            raise LayoutError("another value's bytes")

        def load_ended(keys: list[bytes], **rest: object) -> object:
            for lease in FakeBackend.load(backend, keys):
                assert lease is not None
                lease.held = False
                yield lease

        monkeypatch.setattr(backend, "load", load_ended)
        assert loaded(store, b"a") == [False]
        monkeypatch.setattr(FORMAT, "read", read)
        assert loaded(store, b"a") == [False]
        assert b"a" in backend.values
        assert store.stats()["corrupt"] == 0

    def test_a_backend_that_fails_is_false_everywhere_and_says_so_once(self, caplog: pytest.LogCaptureFixture) -> None:
        backend = FakeBackend()
        store = PageStore(backend)
        backend.broken = True
        assert stored(store, b"a") == [False]
        assert loaded(store, b"a") == [False]
        assert store.present([b"a"]) == [False]
        assert store.match([b"a"]) == 0
        assert len(caplog.records) == 1

    def test_a_backend_that_takes_nothing_refuses_page_by_page(self) -> None:
        backend = FakeBackend()
        store = PageStore(backend)
        stored(store, b"a")
        backend.full = True
        assert stored(store, b"a", b"b") == [True, False]
        assert store.stats()["refused"] == 1


class GatedBackend(FakeBackend):
    """Gives room only while the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waits = threading.Semaphore(0)

    def reserve(self, key: bytes, length: int) -> FakeReservation | None:
        self.waits.release()
        assert self.gate.wait(END_S)
        return super().reserve(key, length)


class TestJobs:
    """Jobs that no thread waits for."""

    def test_a_load_overtakes_stores_and_each_job_is_answered_once(self) -> None:
        backend = GatedBackend()
        store = PageStore(backend)
        backend.gate.set()
        stored(store, b"a")
        backend.gate.clear()
        jobs = TierJobs(store, pages_max=8)
        jobs.submit(1, [page(b"b", filled(ord("b")))], is_load=False)
        assert backend.waits.acquire(timeout=END_S)
        target = memoryview(bytearray(NBYTES))
        jobs.submit(2, [page(b"a", [target]), page(b"z", [memoryview(bytearray(NBYTES))])], is_load=True)
        jobs._loads.settle()
        assert [(each.job, each.come, each.is_load) for each in jobs.take_done()] == [(2, [True, False], True)]
        assert bytes(target) == bytes(filled(ord("a"))[0])
        assert not jobs.is_idle
        backend.gate.set()
        jobs.drain()
        assert [(each.job, each.come) for each in jobs.take_done()] == [(1, [True])]
        assert jobs.is_idle
        jobs.close()

    def test_a_job_too_many_has_failed_at_once(self) -> None:
        backend = GatedBackend()
        jobs = TierJobs(PageStore(backend), pages_max=3)
        jobs.submit(1, [page(b"%d" % each, filled(each)) for each in range(2)], is_load=False)
        jobs.submit(2, [page(b"%d" % each, filled(each)) for each in range(2)], is_load=False)
        assert [(each.job, each.come) for each in jobs.take_done()] == [(2, [False, False])]
        assert jobs.dropped_jobs == 1
        backend.gate.set()
        jobs.drain()
        jobs.submit(3, [page(b"3", filled(3))], is_load=False)
        jobs.drain()
        assert [(each.job, all(each.come)) for each in jobs.take_done()] == [(1, True), (3, True)]
        jobs.close()

    def test_a_job_of_more_than_the_bound_is_done_when_nothing_else_waits(self) -> None:
        jobs = TierJobs(PageStore(FakeBackend()), pages_max=3)
        for number, is_load in enumerate((False, True)):  # a long prompt's hit is one job
            jobs.submit(number, [page(b"%d" % each, filled(each)) for each in range(5)], is_load=is_load)
            jobs.drain()
        assert [all(each.come) for each in jobs.take_done()] == [True, True]
        assert jobs.dropped_jobs == 0
        jobs.close()

    def test_closing_ends_what_is_under_way_and_answers_for_what_is_not(self) -> None:
        backend = GatedBackend()
        jobs = TierJobs(PageStore(backend), pages_max=8)
        for number in range(3):
            jobs.submit(number, [page(b"%d" % number, filled(number))], is_load=False)
        jobs.touch([b"0"])
        assert backend.waits.acquire(timeout=END_S)
        closing = threading.Thread(target=jobs.close)
        closing.start()
        backend.gate.set()
        closing.join(END_S)
        assert not closing.is_alive()
        told = {each.job: each.come for each in jobs.take_done()}
        assert told.keys() == {0, 1, 2}
        assert told[0] == [True]
        jobs.submit(9, [page(b"9", filled(9))], is_load=True)
        assert [(each.job, each.come) for each in jobs.take_done()] == [(9, [False])]
        jobs.close()

    def test_touches_are_advice_that_has_a_bound(self) -> None:
        backend = GatedBackend()
        store = PageStore(backend)
        jobs = TierJobs(store, pages_max=8)
        jobs.submit(1, [page(b"a", filled(1))], is_load=False)
        assert backend.waits.acquire(timeout=END_S)
        for _ in range(TOUCHES_MAX + 5):
            jobs.touch([b"a"])
        assert jobs._touches == TOUCHES_MAX
        backend.gate.set()
        jobs.drain()
        jobs.touch([])  # vLLM 0.30 does so
        jobs.drain()
        assert [each.job for each in jobs.take_done()] == [1], "a touch is no job"
        jobs.close()

    @pytest.mark.parametrize("error", [ValueError, SystemExit])
    def test_what_a_job_or_a_touch_raises_keeps_neither_the_engine_nor_the_next_job_waiting(
        self, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: object) -> None:
            raise error

        store = PageStore(FakeBackend())
        jobs = TierJobs(store, pages_max=8)
        with monkeypatch.context() as patched:
            for verb in ("touch", "store", "load"):
                patched.setattr(store, verb, fails)
            jobs.touch([b"a"])
            jobs.submit(1, [page(b"a", filled(1))], is_load=False)
            jobs.submit(2, [page(b"a", filled(1))], is_load=True)
            jobs.drain()
        assert sorted((each.job, each.come) for each in jobs.take_done()) == [(1, [False]), (2, [False])]
        jobs.submit(3, [page(b"a", filled(1))], is_load=False)
        jobs.drain()
        assert [(each.job, each.come) for each in jobs.take_done()] == [(3, [True])]
        jobs.close()

    def test_a_job_whose_answer_is_not_one_for_each_page_has_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = PageStore(FakeBackend())
        jobs = TierJobs(store, pages_max=8)
        monkeypatch.setattr(store, "store", lambda pages: [])
        jobs.submit(1, [page(b"a", filled(1))], is_load=False)
        jobs.drain()
        assert [(each.job, each.come) for each in jobs.take_done()] == [(1, [False])]
        jobs.close()


class TestConfig:
    """An engine's arguments."""

    def test_with_a_server_memory_is_for_what_passes_through(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
        config = config_from({"host": "kv", "port": 7000}, "tier")
        assert (config.remote_url, config.local_cpu, config.max_local_cpu_size) == ("kvredis://kv:7000", False, 1.0)
        config = config_from({"url": "redis://kv:1", "local_cpu": True}, "tier")
        assert (config.local_cpu, config.max_local_cpu_size) == (True, 5.0)
        monkeypatch.setenv("LMCACHE_REMOTE_URL", "redis://env:2")
        monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "2")
        config = config_from({}, "tier")
        assert (config.remote_url, config.local_cpu, config.max_local_cpu_size) == ("redis://env:2", False, 2.0)
        assert config_from({"host": "::1"}, "tier").remote_url == "kvredis://[::1]:6379"

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"hots": "kv"}, "tier: hots: unknown key"),
            ({"url": "redis://kv", "port": 1}, "tier: url: is given beside host or port"),
            ({"url": "redis://kv", "remote_url": "redis://kw"}, "tier: remote_url: contradicts"),
            ({"max_local_cpu_size": "much"}, "tier: max_local_cpu_size"),
            ({"port": "many"}, "tier: remote_url"),
        ],
    )
    def test_an_argument_that_cannot_be_used_is_named_with_its_source(
        self, arguments: dict[str, object], says: str
    ) -> None:
        with pytest.raises(ConfigError, match=says):
            config_from(arguments, "tier")
