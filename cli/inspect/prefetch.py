"""`kvredis prefetch`: blocks come from disk into memory before a client asks for them, with a bar while they come."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import click

from kvredis.cli.terminal import key_bytes, progress
from kvredis.storage.errors import BackendError

from .client import Connection, Place, Servers, Word, mapped, on_server
from .key_options import KeyName

BATCH: Final = 1000
"""Keys of one job. A server waits for so many at a time; with --wait the next job begins when one has ended."""
POLL_MS: Final = 100


@dataclass(slots=True)
class Fetched:
    """What became of the keys; `queued` ones are done, failed or dropped later on, which only --wait sees."""

    keys: int = 0
    queued: int = 0
    resident: int = 0
    missing: int = 0
    no_room: int = 0
    done: int = 0
    failed: int = 0
    dropped: int = 0

    def add(self, counts: dict[str, Any]) -> None:
        """Add a job's counts."""
        for name, count in counts.items():
            if name.replace("-", "_") in asdict(self):
                setattr(self, name.replace("-", "_"), getattr(self, name.replace("-", "_")) + count)


@click.command(
    epilog="""\b
Example: kvredis prefetch --wait my-block other-block
Example: kvredis prefetch --match 'kvredis:Qwen2.5-7B@*' --wait
Example: kvredis prefetch --match '*@{0@9c1f*' --priority 2 --json
Exit 1: with --wait, a block could not be brought (no room, unreadable); or Ctrl-C, which cancels what has not begun"""
)
@click.argument("keys", metavar="[KEY...]", type=KeyName(), nargs=-1)
@click.option("--match", metavar="PATTERN", help="All keys that match, as in Redis: * ? [a-z] \\.")
@click.option("--wait", is_flag=True, help="Stay until they have come, with a bar on a terminal.")
@click.option(
    "--priority",
    type=click.IntRange(0, 2),
    default=1,
    show_default=True,
    help="0: as urgent as a GET; 1: before the spills; 2: when the disk has nothing else to do.",
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@on_server
def prefetch(keys: tuple[str, ...], match: str | None, wait: bool, priority: int, is_json: bool, place: Place) -> None:
    """Bring blocks from disk into memory, the head of a prompt first if you name its blocks in order.

    Without --wait the server is told and goes on by itself. What it has brought can be evicted again like any block.
    """
    if bool(keys) == (match is not None):
        raise click.UsageError("want KEYs or --match PATTERN, one of them")
    total = Fetched()
    with place.open() as servers:
        if not all(server.is_kvredis for server in servers.each):
            raise BackendError(f"{servers.each[0]} is no kvredis: it has no disk tier to prefetch from")
        count = len(keys) if match is None else _count(servers, key_bytes(match))
        with progress("prefetching", count) as bar:
            for server, part in _batches(servers, keys, match):
                before = total.keys
                for done in _brought(server, part, priority, wait, total):
                    bar.to(before + done)
                total.keys += len(part)
                bar.to(total.keys)
    _report(total, wait, is_json)


# ---- inside ------------------------------------------------------------------------------------------------------


def _count(servers: Servers, pattern: bytes) -> int:
    count = 0
    with progress("counting", None) as bar:
        for server in servers.each:
            for keys in server.scan(pattern):
                count += len(keys)
                bar.to(count)
    return count


def _batches(servers: Servers, keys: tuple[str, ...], match: str | None) -> Iterator[tuple[Connection, list[bytes]]]:
    """The keys by server, as many as a job should have. In a cluster a command's keys are of one slot."""
    if match is None:
        batches = [list(map(key_bytes, keys))]
        every: Iterator[list[bytes]] = iter(batches)
    else:
        every = (part for server in servers.each for part in server.scan(key_bytes(match), BATCH))
    for part in every:
        for server, group in servers.by_slot(part):
            for at in range(0, len(group), BATCH):
                yield server, group[at : at + BATCH]


def _brought(server: Connection, keys: list[bytes], priority: int, wait: bool, total: Fetched) -> Iterator[int]:
    """Ask for keys; with `wait` yields how many of them are settled until all are."""
    if not keys:
        return
    words: list[Word] = ["PRIORITY", priority, *(["JOB"] if wait else [])]
    counts = mapped(server.ask("KV.PREFETCH", *keys, *words))
    number = counts.pop("job", None)
    if number is None:
        total.add(counts)
        return
    try:
        while True:
            status = mapped(server.ask("KV.JOB", number, "WAIT", POLL_MS))
            if status["status"] != "running":
                break
            yield len(keys) - status["queued"] + status["done"] + status["failed"] + status["dropped"]
    except KeyboardInterrupt:
        _cancel(server, number)
        raise
    total.add(status)


def _cancel(server: Connection, number: int) -> None:
    """Take back what has not begun. A second Ctrl-C must not leave the job running, so it is not heard here."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server.forget()  # an answer may be under way on that connection
        status = mapped(server.ask("KV.JOB", number, "CANCEL"))
        click.echo(f"\ncancelled: {status['done']:,} of {status['queued']:,} blocks had come", err=True)
    except BackendError as error:
        click.echo(f"\nkvredis: the job could not be cancelled: {error}", err=True)
    finally:
        signal.signal(signal.SIGINT, former)


def _report(total: Fetched, wait: bool, is_json: bool) -> None:
    failed = total.no_room + total.failed + total.dropped
    if is_json:
        click.echo(json.dumps(asdict(total) | {"waited": wait}, indent=2))
    else:
        come = f"{total.done:,} brought" if wait else f"{total.queued:,} on their way"
        told = [
            f"{total.keys:,} {'key' if total.keys == 1 else 'keys'}: {come}",
            f"{total.resident:,} in memory already",
        ]
        told += [f"{total.missing:,} missing"] * bool(total.missing)
        told += [f"{total.no_room:,} without room"] * bool(total.no_room)
        told += [f"{total.failed:,} failed"] * bool(total.failed)
        told += [f"{total.dropped:,} dropped"] * bool(total.dropped)
        click.echo(", ".join(told))
    click.get_current_context().exit(1 if wait and failed else 0)
