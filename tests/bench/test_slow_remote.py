"""The bench of a slow link: its proxy is as slow as it says and loses nothing, its arms do what they stand for."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from click.testing import CliRunner

from kvredis.backends.config.url import Address
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import Row, new_result
from kvredis.bench.core.servers import ServerProcess
from kvredis.bench.slow_remote.run import (
    AUTO,
    FREE,
    NONE,
    PLAIN,
    SCHEMA,
    THROTTLED,
    Sample,
    SlowRemotePlan,
    SlowRemoteResult,
    run,
    slow_remote_gate,
    table_lines,
)
from kvredis.bench.slow_remote.throttle import Link, Throttle
from kvredis.cli.bench.command import bench

TIMEOUT_S = 30


@pytest.fixture
def echo() -> Iterator[Address]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client:
            while data := client.recv(65536):
                client.sendall(data)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield Address(host="127.0.0.1", port=listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def exchange(address: Address, data: bytes) -> bytes:
    """Send `data`, say that it is all, and read until the other side has said so too."""
    got = bytearray()
    with socket.create_connection((address.host, address.port), TIMEOUT_S) as client:

        def send() -> None:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)

        sending = threading.Thread(target=send)
        sending.start()
        while part := client.recv(65536):
            got += part
        sending.join()
    return bytes(got)


def test_the_proxy_passes_on_every_byte_and_the_end(echo: Address) -> None:
    data = bytes(range(256)) * 8192
    with Throttle(echo) as proxy:
        assert exchange(proxy.address, data) == data
        proxy.limit(50e6)
        assert exchange(proxy.address, data) == data


def test_a_limit_holds_for_all_connections_together_until_it_is_lifted(echo: Address) -> None:
    data = bytes(150_000)
    with Throttle(echo) as proxy:
        proxy.limit(200_000)
        began_s = time.monotonic()
        both = [threading.Thread(target=exchange, args=(proxy.address, data)) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert time.monotonic() - began_s > 1.2, "300 kB at 200 kB/s"
        proxy.limit(0)
        began_s = time.monotonic()
        assert exchange(proxy.address, bytes(3_000_000)) == bytes(3_000_000)
        assert time.monotonic() - began_s < 10, "which is 15 s at 200 kB/s"


def test_a_proxy_without_a_server_hangs_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound, and not listening
        with Throttle(Address(host="127.0.0.1", port=silent.getsockname()[1])) as proxy:
            assert exchange(proxy.address, b"") == b""


def test_a_proxy_that_was_killed_is_an_error_of_the_bench_and_is_cleaned_up(echo: Address) -> None:
    with Throttle(echo) as proxy:
        process = proxy._process
        assert process is not None
        process.kill()
        process.wait()
        for _ in range(2):
            with pytest.raises(BenchError, match="the throttling proxy ended"):
                proxy.limit(1e6)
    assert process.stdin is not None
    assert process.stdin.closed


def test_what_a_link_could_not_pass_on_while_it_was_not_run_is_made_up_for_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", slept.append)
    link = Link()
    link.take(1_000_000)
    link.limit(1000)
    link.take(10)
    link.take(10)
    now_s += 60
    link.take(10)
    assert slept == pytest.approx([0.005, 0.015, 0.005])


TINY = ("--repeats", "1", "--prompts", "1", "--prompt-tokens", "512", "--prefill-tokens-per-s", "2000")


@pytest.mark.nightly
def test_a_tiny_run_loads_through_both_links_and_compares_what_came(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = CliRunner().invoke(bench, ("slow-remote", *TINY, "--link-mb-per-s", "2", "--json", str(path)))
    assert done.exit_code == 0, done.output
    result: SlowRemoteResult = json.loads(path.read_text())
    assert result["schema"] == SCHEMA
    loaded = {(row["link"], row["arm"]): row["samples"][0]["loaded_tokens"] for row in result["rows"]}
    assert loaded[THROTTLED, NONE] == loaded[FREE, NONE] == 0
    assert loaded[THROTTLED, PLAIN] == loaded[FREE, PLAIN] == 511
    assert loaded[THROTTLED, AUTO] < 511
    assert loaded[FREE, AUTO] <= 511
    (recovery,) = result["recovery"]
    assert recovery["seconds"] > 0
    assert result["verified_bytes"] >= 2 * 511 * 8192
    assert result["break_even_bytes_per_s"] == 2000 * 8192
    assert len(result["gate"]) == 5
    assert "computing is simulated: 2000 tokens/s of sleep" in done.output
    assert f"Result: {path}" in done.output
    assert list(tmp_path.iterdir()) == [path]


def result_of(throttled: dict[str, float], free: dict[str, float]) -> SlowRemoteResult:
    rows = []
    for link, seconds in ((THROTTLED, throttled), (FREE, free)):
        for arm in (NONE, PLAIN, AUTO):
            sample = Sample(repeat=0, seconds=seconds[arm], loaded_tokens=1, skipped_tokens=2)
            to_none, to_plain = seconds[arm] / seconds[NONE], seconds[arm] / seconds[PLAIN]
            row = Row(link=link, arm=arm, samples=[sample], seconds=1.0, ratio_to_none=to_none, ratio_to_plain=to_plain)
            rows.append(row)
    result = SlowRemoteResult(
        **new_result(SCHEMA, SlowRemotePlan().options()), break_even_bytes_per_s=1e8, rows=rows, recovery=[]
    )
    result["gate"] = slow_remote_gate(result)
    return result


GOOD = {NONE: 10.0, PLAIN: 30.0, AUTO: 10.2}
FAST = {NONE: 10.0, PLAIN: 2.0, AUTO: 2.1}


def test_a_result_that_keeps_every_line_passes_and_is_told() -> None:
    result = result_of(GOOD, FAST)
    assert [line["passed"] for line in slow_remote_gate(result)] == [True] * 5
    text = "\n".join(table_lines(result))
    assert "1.020x" in text
    assert "MISSED" not in text


@pytest.mark.parametrize(
    ("throttled", "free", "missed"),
    [
        (GOOD | {AUTO: 10.4}, FAST, ["throttled: auto / none"]),
        (GOOD | {PLAIN: 9.0}, FAST, ["throttled: plain / none"]),
        (GOOD, FAST | {AUTO: 2.3}, ["free: auto / plain"]),
        (GOOD, FAST | {AUTO: 11.0}, ["free: auto / plain", "free: auto / none"]),
    ],
)
def test_each_line_is_missed_by_what_it_forbids(
    throttled: dict[str, float], free: dict[str, float], missed: list[str]
) -> None:
    result = result_of(throttled, free)
    assert [line["name"] for line in slow_remote_gate(result) if not line["passed"]] == missed
    assert "MISSED" in "\n".join(table_lines(result))


def test_a_figure_that_is_missing_does_not_pass() -> None:
    result = result_of(GOOD, FAST)
    for row in result["rows"]:
        row["ratio_to_none"] = row["ratio_to_plain"] = None
    assert not any(line["passed"] for line in slow_remote_gate(result))


def test_a_server_that_does_not_take_what_is_stored_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvredis.adapters.engine.engine import CacheEngine
    from kvredis.bench.slow_remote.run import run

    monkeypatch.setattr(CacheEngine, "lookup", lambda engine, tokens: 0)
    with pytest.raises(BenchError, match="does not hold"):
        run(SlowRemotePlan(repeats=1, prompts=1, prompt_tokens=512), lambda step: None)


def test_a_server_that_dies_gets_no_figure_although_engines_go_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[ServerProcess] = []

    class Noted(ServerProcess):
        def __enter__(self) -> Self:
            servers.append(self)
            return super().__enter__()

    def stop(step: str) -> None:
        if step == f"{FREE}, {NONE}":
            servers[0].stop()

    monkeypatch.setattr("kvredis.bench.slow_remote.run.ServerProcess", Noted)
    plan = SlowRemotePlan(repeats=1, prompts=1, prompt_tokens=512)
    with pytest.raises(BenchError, match="slow accepts no connection"):
        run(plan, stop)
