"""One node of a cluster on a real loop: whose commands it runs, whose it sends elsewhere, and what that costs."""

from pathlib import Path

import pytest

from kvredis.server.cluster.topology import slot_of
from tests.server.cluster_node import EDGE, MOVED, OURS, OURS_TOO, THEIRS, key_of, node
from tests.server.feed import request
from tests.server.live import MIB, Client, LiveServer, pattern, until

CROSSSLOT = b"-CROSSSLOT Keys in request don't hash to the same slot\r\n"
NOT_SERVED = b"-CLUSTERDOWN Hash slot not served\r\n"


async def lines(client: Client, count: int) -> list[bytes]:
    """The next replies, each of one line."""
    return [await client.read_line() for _ in range(count)]


async def test_keys_of_other_nodes_are_moved_and_ours_are_served(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    assert await client.ask("SET", OURS, "v") == b"+OK\r\n"
    assert await client.get(OURS) == b"v"
    assert await client.ask("SET", THEIRS, "v") == await client.ask("GET", THEIRS) == MOVED
    assert await client.ask("GETRANGE", THEIRS, "0", "1") == await client.ask("set", THEIRS, "v", "EX", "9") == MOVED
    assert await client.ask("MGET", OURS, THEIRS) == await client.ask("DEL", THEIRS, OURS) == CROSSSLOT
    assert await client.ask("KV.MATCH", OURS, OURS_TOO) == await client.ask("KV.PREFETCH", OURS, THEIRS) == CROSSSLOT
    assert await client.ask("KV.MATCH", b"{%b}1" % OURS, b"{%b}2" % OURS) == b":0\r\n"
    assert await client.ask("KV.META", THEIRS) == MOVED
    assert live.store.count(0) == 1


async def test_a_pipeline_of_both_is_answered_in_its_order_and_counted_as_redis_counts(
    loop: str, live: LiveServer
) -> None:
    client = await live.connect()
    pipeline = b"".join(
        request(*words)
        for words in (
            ("SET", OURS, "1"), ("SET", THEIRS, "1"), ("SET", OURS, "2"), ("EXISTS", OURS), ("EXISTS", THEIRS),
            ("EXISTS", OURS), ("PING",), ("EXISTS", THEIRS), ("DBSIZE",),
        )
    )  # fmt: skip
    await client.send_raw(pipeline)
    ok, one = b"+OK\r\n", b":1\r\n"
    assert await lines(client, 9) == [ok, MOVED, ok, one, MOVED, one, b"+PONG\r\n", MOVED, one]
    commands = live.server.stats.commands
    assert (commands["set"].calls, commands["set"].rejected_calls, commands["set"].failed_calls) == (2, 1, 0)
    assert (commands["exists"].calls, commands["exists"].rejected_calls) == (2, 2)


async def test_a_slot_that_no_node_has_is_down(loop: str, tmp_path: Path) -> None:
    async with node(tmp_path, "{name: us, host: h, port: 1, slots: 0-8191}") as live:
        client = await live.connect()
        assert await client.ask("SET", OURS, "v") == b"+OK\r\n"
        assert await client.ask("SET", THEIRS, "v") == await client.ask("GET", THEIRS) == NOT_SERVED
        assert await client.ask("SET", THEIRS, pattern(MIB)) == NOT_SERVED
        assert await client.ask("MGET", THEIRS, OURS) == NOT_SERVED
        assert await client.ask("MGET", OURS, THEIRS) == CROSSSLOT


async def test_a_value_for_another_node_takes_no_room(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("SET", OURS, pattern(3 * MIB))
    value = pattern(14 * MIB, 1)  # ours would have to leave for it, if it were let in
    await client.send_raw(request("SET", THEIRS, value)[: 8 * MIB])
    await until(lambda: live.sessions() and live.sessions()[0].input_bytes >= 11 * MIB)
    assert live.store.reserved_bytes == 0
    await client.send_raw(request("SET", THEIRS, value)[8 * MIB :] + request("GET", OURS))
    assert await client.read_line() == MOVED
    assert await client.read_bulk() == pattern(3 * MIB)
    assert await client.ask("MSET", OURS, pattern(MIB), THEIRS, pattern(MIB)) == CROSSSLOT
    assert await client.ask("MSET", THEIRS, pattern(MIB), OURS, pattern(MIB)) == CROSSSLOT
    assert await client.ask("SET", OURS, pattern(MIB, 2)) == b"+OK\r\n"
    assert await client.get(OURS) == pattern(MIB, 2)
    assert live.store.stats.evicted == live.store.stats.refused == 0


async def test_a_client_without_rights_learns_nothing_of_the_slots(loop: str, tmp_path: Path) -> None:
    async with node(tmp_path, requirepass="secret") as live:
        client = await live.connect()
        assert await client.ask("GET", THEIRS) == b"-NOAUTH Authentication required.\r\n"
        await client.ask("AUTH", "secret")
        await client.ask("ACL", "SETUSER", "some", "on", "nopass", "+get", "~none*")
        await client.ask("AUTH", "some", "x")
        assert await client.ask("GET", THEIRS) == b"-NOPERM No permissions to access a key\r\n"
        assert await client.ask("GET", key_of(range(EDGE, 2 * EDGE), "none")) != b""
        assert (await client.ask("GET", key_of(range(EDGE, 2 * EDGE), "none"))).startswith(b"-MOVED ")


async def test_a_wrong_key_breaks_the_transaction_as_it_is_queued(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("MULTI")
    assert await client.ask("SET", OURS, pattern(MIB)) == b"+QUEUED\r\n"
    assert await client.ask("SET", THEIRS, pattern(MIB)) == MOVED
    assert await client.ask("SET", OURS, pattern(2 * MIB)) == b"+QUEUED\r\n"  # it says so, and keeps nothing
    assert live.store.reserved_bytes < 2 * MIB
    assert await client.ask("EXEC") == b"-EXECABORT Transaction discarded because of previous errors.\r\n"
    assert live.store.reserved_bytes == live.store.count(0) == 0


async def test_a_transaction_across_two_of_our_slots_is_refused_at_exec(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("MULTI")
    assert await client.ask("SET", OURS, "1") == await client.ask("SET", OURS_TOO, pattern(MIB)) == b"+QUEUED\r\n"
    assert await client.ask("EXEC") == CROSSSLOT
    assert live.store.reserved_bytes == live.store.count(0) == 0
    assert await client.ask("EXEC") == b"-ERR EXEC without MULTI\r\n"
    await client.ask("MULTI")
    await client.ask("SET", OURS, "1")
    await client.ask("PING")
    assert await client.ask("EXEC") == b"*2\r\n"
    assert await lines(client, 2) == [b"+OK\r\n", b"+PONG\r\n"]
    assert await client.ask("WATCH", THEIRS) == MOVED
    assert await client.ask("WATCH", OURS, OURS_TOO) == CROSSSLOT


async def test_shard_channels_are_slots_too_and_other_channels_are_not(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    assert await client.ask("SSUBSCRIBE", THEIRS) == await client.ask("SPUBLISH", THEIRS, "x") == MOVED
    assert await client.ask("SSUBSCRIBE", OURS, OURS_TOO) == CROSSSLOT
    assert await client.ask("SPUBLISH", OURS, "x") == await client.ask("PUBLISH", THEIRS, "x") == b":0\r\n"
    assert await client.ask("SSUBSCRIBE", OURS) == b"*3\r\n"


async def test_there_is_one_database(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    for line in ("SELECT 1", "SELECT 99", "SWAPDB 0 1", "SWAPDB 0 0"):
        name = line.split()[0]
        assert await client.ask(*line.split()) == f"-ERR {name} is not allowed in cluster mode\r\n".encode()
    assert await client.ask("MOVE", OURS, "0") == b"-ERR MOVE is not allowed in cluster mode\r\n"
    copy = b"-ERR Copying to another database is not allowed in cluster mode\r\n"
    assert await client.ask("COPY", OURS, OURS, "DB", "1") == copy
    assert await client.ask("SELECT", "0") == b"+OK\r\n"
    assert await client.ask("SET", OURS, "v") == b"+OK\r\n"
    assert await client.ask("COPY", OURS, b"{%b}" % OURS, "DB", "0") == b":1\r\n"


@pytest.mark.parametrize("wanted", ["MEET h 1", "FORGET x", "ADDSLOTS 1", "SETSLOT 1 STABLE", "FAILOVER", "RESET"])
async def test_membership_is_the_files_alone(loop: str, wanted: str, live: LiveServer) -> None:
    client = await live.connect()
    name = wanted.split()[0]
    told = f"-ERR CLUSTER {name} is not for this cluster: its nodes and their slots are what the file"
    assert (await client.ask("CLUSTER", *wanted.split())).startswith(told.encode())
    assert live.server.cluster is not None
    assert live.server.cluster.epoch == 1


async def test_keys_of_a_slot_are_counted_and_listed_while_others_are_served(loop: str, tmp_path: Path) -> None:
    async with node(tmp_path, arena_bytes=256 * MIB) as live:
        tagged = {b"{%b}%d" % (OURS, n) for n in range(300)}
        for key in tagged:
            live.store.put(key, b"v")
        for n in range(10_000):
            live.store.put(b"other%d" % n, b"v")
        slot = b"%d" % slot_of(OURS)
        client, other = await live.connect(), await live.connect()
        await client.send("CLUSTER", "COUNTKEYSINSLOT", slot)
        await client.send("ECHO", "behind")
        await until(lambda: any(session.waiting is not None for session in live.sessions()))
        assert await other.ask("PING") == b"+PONG\r\n"
        counted = int((await client.read_line())[1:])
        assert counted >= 300
        assert await client.read_bulk() == b"behind"
        await client.send("CLUSTER", "GETKEYSINSLOT", slot, "1000")
        listed = {await client.read_bulk() for _ in range(int((await client.read_line())[1:]))}
        assert tagged <= listed
        assert len(listed) == counted
        await client.send("CLUSTER", "GETKEYSINSLOT", slot, "7")
        assert await client.read_line() == b"*7\r\n"
        assert None not in {await client.read_bulk() for _ in range(7)}
        await client.ask("MULTI")
        await client.ask("CLUSTER", "COUNTKEYSINSLOT", slot)
        assert await client.ask("EXEC") == b"*1\r\n"
        assert await client.read_line() == b":%d\r\n" % counted


async def test_a_client_that_goes_in_the_middle_of_counting_leaves_nothing(loop: str, live: LiveServer) -> None:
    for n in range(10_000):
        live.store.put(b"k%d" % n, b"v")
    client = await live.connect()
    await client.send("CLUSTER", "COUNTKEYSINSLOT", "1")
    await until(lambda: any(session.waiting is not None for session in live.sessions()))
    client.close()
    await until(lambda: not live.server.sessions)


async def test_a_node_says_of_itself_that_it_is_one(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.send("HELLO", "2")
    await client.send("INFO", "server", "cluster")
    await client.send("CONFIG", "GET", "cluster-enabled")
    await client.send("QUIT")
    told = await client.read_all()
    assert b"mode\r\n$7\r\ncluster\r\n" in told
    assert b"redis_mode:cluster\r\n" in told
    assert b"cluster_enabled:1\r\n" in told
    assert told.endswith(b"$15\r\ncluster-enabled\r\n$3\r\nyes\r\n+OK\r\n")
