"""Prefetch jobs as a client sees them: how far they are, when they end, which of them the disk takes first."""

from pathlib import Path

from kvredis.server.commands.prefetch import TOO_MANY_JOBS
from tests.server.feed import request
from tests.server.live import MIB, until
from tests.server.tiered_server import TieredServer, block, info
from tests.server.tiering.prefetches import ask, begin, counts, job, read_map


async def test_a_job_is_waited_for_with_and_without_a_time(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    client, other = await live.connect(), await live.connect()
    live.hold()
    number = await begin(client, "a", "b", "nothing")
    assert await ask(client, "KV.JOB", number, "WAIT", "1") == job("running", queued=2, missing=1)
    await client.send("KV.JOB", number, "WAIT", "0")
    await other.send("kv.job", number, "wait", "60000")
    await until(lambda: sum(session.waiting is not None for session in live.sessions()) == 2)
    live.let_go()
    done = job("done", queued=2, done=2, missing=1)
    assert await read_map(client) == await read_map(other) == done
    assert await ask(client, "KV.JOB", number, "WAIT", "0") == done
    assert await ask(client, "KV.JOB", number) == done


async def test_a_client_that_goes_while_it_waits_for_a_job_leaves_the_job_alone(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    client, other = await live.connect(), await live.connect()
    await other.ask("PING")
    live.hold()
    number = await begin(client, "a")
    await client.send("KV.JOB", number, "WAIT", "0")
    await until(lambda: live.sessions()[0].waiting is not None or live.sessions()[1].waiting is not None)
    client.reset()
    live.server._turns = 9
    await until(lambda: len(live.sessions()) == 1)
    live.let_go()
    assert await ask(other, "KV.JOB", number, "WAIT", "0") == job("done", queued=1, done=1)


async def test_a_cancelled_job_brings_what_has_begun_and_no_more(loop: str, live: TieredServer) -> None:
    keys = [f"key{number}" for number in range(5)]
    live.put_away(*keys)
    client = await live.connect()
    live.hold()
    number = await begin(client, *keys)
    live.manual.run(2)
    assert await ask(client, "KV.JOB", number, "CANCEL") == job("cancelled", queued=5, done=2, dropped=3)
    assert live.jobs() == 0
    assert [live.tier(key) for key in keys] == ["memory"] * 2 + ["disk"] * 3
    assert await ask(client, "KV.JOB", number, "cancel") == job("cancelled", queued=5, done=2, dropped=3)


async def test_what_has_not_begun_by_the_deadline_is_dropped(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    client = await live.connect()
    live.hold()
    number = await begin(client, "a", "b", "DEADLINE", "1000")
    live.manual.run(1)
    live.clock.now_s += 0.9
    live.tick()
    assert await ask(client, "KV.JOB", number) == job("running", queued=2, done=1)
    live.clock.now_s += 0.2
    live.tick()
    assert await ask(client, "KV.JOB", number) == job("cancelled", queued=2, done=1, dropped=1)
    assert live.jobs() == 0
    assert live.tier("b") == "disk"


async def test_a_demand_is_not_dropped_with_the_prefetch_that_it_has_joined(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    client, other = await live.connect(), await live.connect()
    live.hold()
    number = await begin(client, "a", "DEADLINE", "1000")
    await other.send("GET", "a")
    await until(lambda: any(session.waiting is not None for session in live.sessions()))
    live.clock.now_s += 2
    live.tick()
    await ask(client, "KV.JOB", number, "CANCEL")
    live.let_go()
    assert await other.read_bulk() == block("a")


async def test_the_disk_takes_jobs_in_the_order_of_their_priority(loop: str, live: TieredServer) -> None:
    live.put_away("idle", "soon", "now", "got")
    client, other = await live.connect(), await live.connect()
    live.hold()
    for key, priority in (("idle", "2"), ("soon", "1"), ("now", "0")):
        assert await ask(client, "KV.PREFETCH", key, "PRIORITY", priority) == counts(1)
    await other.send("GET", "got")
    await until(lambda: any(session.waiting is not None for session in live.sessions()))
    came = []
    for _ in range(4):
        live.manual.run(1)
        came += [key for key in ("idle", "soon", "now", "got") if live.tier(key) == "memory" and key not in came]
    assert came == ["now", "got", "soon", "idle"]
    assert await other.read_bulk() == block("got")


async def test_two_gib_are_asked_for_and_answered_without_a_look_at_the_disk(tmp_path: Path) -> None:
    """No read has begun when the answer is there, nor when others are served after it."""
    async with TieredServer(tmp_path, arena_bytes=3 * 1024 * MIB) as live:
        names = [f"chunk{number}" for number in range(1024)]
        for name in names:
            assert live.store.put(name.encode(), b"its first bytes")
        live.send_away(*names)
        for entry in live.store.index:
            entry.length = 2 * MIB - 1024  # as far as readers are told
        client, other = await live.connect(), await live.connect()
        live.hold()
        before = len(live.files.words)
        number = await begin(client, *names)
        assert await ask(other, "KV.JOB", number) == job("running", queued=1024)
        assert len(live.files.words) == before
        told = await info(other, "kv")
        assert (told["disk_queued_prefetches"], told["disk_prefetch_jobs"]) == ("32", "1")
        assert await ask(other, "KV.JOB", number, "CANCEL") == job("cancelled", queued=1024, dropped=1024)
        assert len(live.files.words) == before
        for entry in live.store.index:
            assert entry.record is not None
            entry.length = entry.record.length


async def test_jobs_that_are_over_can_be_asked_for_and_are_no_prefetches_under_way(
    loop: str, live: TieredServer
) -> None:
    live.put_away("a")
    client = await live.connect()
    live.hold()
    number = await begin(client, "a")
    await begin(client, "nowhere")
    told = await info(client)
    assert (told["prefetch_jobs"], told["disk_prefetch_jobs"]) == ("1", "2")
    live.let_go()
    assert await ask(client, "KV.JOB", number, "WAIT", "0") == job("done", queued=1, done=1)
    told = await info(client)
    assert (told["prefetch_jobs"], told["disk_prefetch_jobs"]) == ("0", "2")


async def test_what_memory_cannot_hold_at_once_has_no_room_from_the_start(loop: str, live: TieredServer) -> None:
    keys = [f"key{number}" for number in range(20)]
    for key in keys:
        live.put_away(key)
    client = await live.connect()
    number = await begin(client, *keys)
    assert await ask(client, "KV.JOB", number, "WAIT", "0") == job("done", queued=16, done=16, no_room=4)
    assert [live.tier(key) for key in keys] == ["memory"] * 16 + ["disk"] * 4


async def test_there_are_only_so_many_jobs_under_way(loop: str, live: TieredServer) -> None:
    keys = [f"key{number}" for number in range(257)]
    for key in keys:
        assert live.store.put(key.encode(), key.encode())
    live.send_away(*keys)
    client = await live.connect()
    live.hold()
    await client.send_raw(b"".join(request("PREFETCH", key) for key in keys[:256]))
    assert await client.read(256 * 4) == b":1\r\n" * 256
    assert await client.ask("PREFETCH", keys[256]) == TOO_MANY_JOBS
    assert await client.ask("KV.PREFETCH", keys[256], "JOB") == TOO_MANY_JOBS
    live.manual.run(1)
    assert await client.ask("PREFETCH", keys[256]) == b":1\r\n"
