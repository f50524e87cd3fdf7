"""Streams that fuzzing has found to do harm once, each as short as it could be made, and what they are answered now."""

from pathlib import Path

import pytest

from tests.server.feed import request
from tests.server.live import LOOPS, LiveServer, run_on

UNKNOWN = b"-ERR unknown command 'J', with args beginning with: "

FOUND = {
    "an unknown command after DISCARD ran DISCARD again": (
        request("MULTI") + request("DISCARD") + request("J"),
        b"+OK\r\n+OK\r\n" + UNKNOWN + b"\r\n",
    ),
    "an unknown command after EXEC ran EXEC again": (
        request("MULTI") + request("EXEC") + b"J\r\n",
        b"+OK\r\n*0\r\n" + UNKNOWN + b"\r\n",
    ),
    "an unknown command after UNSUBSCRIBE unsubscribed": (
        request("SUBSCRIBE", "a") + request("UNSUBSCRIBE", "a") + request("J", "b"),
        b"*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n"
        b"*3\r\n$11\r\nunsubscribe\r\n$1\r\na\r\n:0\r\n" + UNKNOWN + b"'b' \r\n",
    ),
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_stream_that_once_did_harm_does_none(loop: str, found: str, tmp_path: Path) -> None:
    stream, answer = FOUND[found]

    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            client = await live.connect()
            await client.send_raw(stream)
            client.half_close()
            assert await client.read_all() == answer

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_is_gone_before_it_is_taken_in_raises_nothing(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            for _ in range(200):
                client = await live.connect("tcp")
                client.reset()
            assert await (await live.connect("tcp")).ask("PING") == b"+PONG\r\n"

    run_on(loop, story())


def test_config_get_star_is_answered_though_the_working_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            client = await live.connect()
            assert (await client.ask("CONFIG", "GET", "*")).startswith(b"*")
            client.half_close()
            assert b"$3\r\ndir\r\n$0\r\n" in await client.read_all()

    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    run_on("uvloop", story())
