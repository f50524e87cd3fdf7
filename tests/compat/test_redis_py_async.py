"""redis.asyncio at work, in both protocols: what LMCache, and most servers written in Python, speak to Redis with."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tests.compat.conftest import RunningServer

BLOCK = bytes(range(256)) * 4096
WAIT_S = 10

BOTH = pytest.mark.parametrize("protocol", [2, 3])
Story = Callable[[Any, Any], Awaitable[None]]


@asynccontextmanager
async def client_of(server: RunningServer, protocol: int, **options: Any) -> AsyncIterator[Any]:
    """A client with a pool of its own; untyped, since redis-py's own types make every reply an Awaitable or not."""
    client: Any = redis.asyncio.Redis(port=server.port, protocol=protocol, socket_timeout=WAIT_S, **options)
    async with aclosing(client):
        yield client


def tell(server: RunningServer, protocol: int, story: Story, **options: Any) -> None:
    """Run a story with two clients of the server on a loop of its own."""

    async def run() -> None:
        async with client_of(server, protocol, **options) as client, client_of(server, protocol) as other:
            await asyncio.wait_for(story(client, other), WAIT_S)

    asyncio.run(run())


@BOTH
def test_many_tasks_share_a_bounded_pool(protocol: int, kvredis: RunningServer) -> None:
    async def story() -> None:
        pool = redis.asyncio.BlockingConnectionPool(
            port=kvredis.port, protocol=protocol, max_connections=5, timeout=WAIT_S, socket_timeout=WAIT_S
        )
        client: Any = redis.asyncio.Redis(connection_pool=pool)
        async with aclosing(client):
            await asyncio.gather(*(client.set(f"k{n}", BLOCK[:n]) for n in range(300)))
            assert await asyncio.gather(*(client.get(f"k{n}") for n in range(300))) == [BLOCK[:n] for n in range(300)]
            assert len([one for one in await client.client_list() if one["lib-name"] == "redis-py"]) <= 5
        await pool.disconnect()

    asyncio.run(story())


@BOTH
def test_a_transaction_runs_whole_or_gives_way(protocol: int, kvredis: RunningServer) -> None:
    async def story(client: Any, other: Any) -> None:
        async with client.pipeline(transaction=True) as pipe:
            assert await pipe.set("a", BLOCK).incr("n").get("a").execute() == [True, 1, BLOCK]
            await pipe.watch("a")
            await other.set("a", "theirs")
            pipe.multi()
            with pytest.raises(redis.WatchError):
                await pipe.set("a", "ours").execute()
        assert await client.get("a") == b"theirs"

    tell(kvredis, protocol, story)


@BOTH
def test_a_pipeline_without_a_transaction_keeps_its_order(protocol: int, kvredis: RunningServer) -> None:
    async def story(client: Any, other: Any) -> None:
        async with client.pipeline(transaction=False) as pipe:
            for n in range(200):
                pipe.set(f"k{n}", BLOCK[: n * 1000])
            pipe.execute_command("NOPE")
            for n in range(200):
                pipe.get(f"k{n}")
            replies = await pipe.execute(raise_on_error=False)
        assert replies[:200] == [True] * 200
        assert isinstance(replies[200], redis.ResponseError)
        assert replies[201:] == [BLOCK[: n * 1000] for n in range(200)]

    tell(kvredis, protocol, story)


@BOTH
def test_messages_arrive_while_others_work(protocol: int, kvredis: RunningServer) -> None:
    async def story(client: Any, other: Any) -> None:
        async with client.pubsub(ignore_subscribe_messages=True) as listener:
            await listener.subscribe("news")
            await listener.psubscribe("n*")
            while await other.publish("news", BLOCK) < 2:
                await listener.get_message(timeout=WAIT_S)
            heard: list[str] = []
            async for message in listener.listen():
                assert message["data"] == BLOCK
                heard.append(message["type"])
                if len(set(heard)) == 2:
                    break
            await listener.unsubscribe()
            await listener.punsubscribe()

    tell(kvredis, protocol, story)


@BOTH
def test_a_cancelled_command_costs_its_connection_and_no_other(protocol: int, kvredis: RunningServer) -> None:
    async def story(client: Any, other: Any) -> None:
        waiting = asyncio.create_task(client.execute_command("WAIT", "1", "0"))
        while (await other.info("clients"))["blocked_clients"] < 1:
            pass
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await client.set("k", "v") is True
        assert await client.get("k") == b"v"
        while (await other.info("clients"))["blocked_clients"] > 0:
            pass

    tell(kvredis, protocol, story)


@BOTH
def test_a_killed_connection_is_made_again(protocol: int, kvredis: RunningServer) -> None:
    async def story(client: Any, other: Any) -> None:
        await client.set("k", "v")
        assert await other.client_kill_filter(_id=await client.client_id()) == 1
        assert await client.get("k") == b"v"
        assert int((await client.client_info())["db"]) == 2

    retry = Retry(NoBackoff(), 3)
    tell(kvredis, protocol, story, db=2, retry=retry, retry_on_error=[redis.ConnectionError])
