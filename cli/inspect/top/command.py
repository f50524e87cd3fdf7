"""`kvredis top`: a server live, as `htop` shows a machine; or one look at it for a script."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from typing import Any, Final

import click

from kvredis.cli.inspect.client import Place, Servers, on_server
from kvredis.cli.numbers import Number
from kvredis.cli.terminal import console, is_terminal
from kvredis.storage.errors import BackendError

from .figures import Figures, Rates, Walk, figures, hit_rate, prompts, rates
from .keyboard import Keyboard, keyboard
from .screen import View, screen, sorted_prompts

INTERVAL_S: Final = 2.0
PREFIXES_JSON: Final = 100
WALKS_ONCE: Final = 40
"""Slices of the keyspace that --once looks at for prompts."""


@click.command(
    epilog="""\b
Example: kvredis top
Example: kvredis top -u redis://kv-1:6379 --interval 0.5
Example: kvredis top --once
Example: kvredis top --json --interval 10 | tee kv.jsonl
Exit 1: with --once or --json, the server could not be asked; without a terminal"""
)
@click.option(
    "--interval",
    "interval_s",
    type=Number(0.1, 3600),
    default=INTERVAL_S,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", "is_once", is_flag=True, help="Look twice, an interval apart, print what that says, and end.")
@click.option("--json", "is_json", is_flag=True, help="Print a line of JSON for each interval; --once: one object.")
@on_server
def top(interval_s: float, is_once: bool, is_json: bool, place: Place) -> None:
    """Watch a server: tiers, hit rate, bytes and commands per second, prompts, commands, clients.

    Keys: q ends, p pauses, s sorts the list by something else, left and right (or Tab) choose the list, up and down
    scroll it. A large terminal shows all lists at once. When the server goes away the last figures stay, and it is
    called again each interval. The prompts are those of the last walk through all keys, 500 of them each interval.
    """
    if is_once or is_json:
        with contextlib.suppress(KeyboardInterrupt):
            _print(place, interval_s, is_once, is_json)
        return
    shown = console()
    if not (shown.file.isatty() and is_terminal(sys.stdin)) or shown.is_dumb_terminal:
        raise BackendError("`kvredis top` wants a terminal that can draw; --once prints a look, --json lines")
    _live(place, interval_s)


# ---- inside ------------------------------------------------------------------------------------------------------


class _Watcher(threading.Thread):
    """Asks a server again and again beside the keyboard, which must work while a server does not answer."""

    def __init__(self, place: Place, interval_s: float, keys: Keyboard) -> None:
        super().__init__(daemon=True)
        self.latest: tuple[Figures, Rates | None, list[dict[str, Any]]] | None = None
        self.lost = ""
        self.is_paused = threading.Event()
        self.is_over = threading.Event()
        self._place, self._interval_s, self._keys = place, interval_s, keys

    def run(self) -> None:
        """Ask until it is over; whatever goes wrong is `lost`, and tried again."""
        walk, before = Walk(), None
        servers: Servers | None = None
        while not self.is_over.is_set():
            if not self.is_paused.is_set():
                try:
                    if servers is None:
                        servers = self._place.open()
                        walk.forget()
                    now = figures(servers)
                    walk.step(servers)
                    self.latest = (now, rates(before, now) if before else None, prompts(walk.forest))
                    before, self.lost = now, ""
                except BaseException as error:
                    self.lost = str(error) or repr(error)
                    _close(servers)
                    servers = None
                self._keys.ring()
            self.is_over.wait(self._interval_s)
        _close(servers)


def _close(servers: Servers | None) -> None:
    if servers is not None:
        with contextlib.suppress(Exception), servers:
            pass


def _live(place: Place, interval_s: float) -> None:
    from rich.live import Live

    shown = console()
    view = View(str(place.address))
    with keyboard() as keys, contextlib.suppress(KeyboardInterrupt):
        watcher = _Watcher(place, interval_s, keys)
        with Live(console=shown, screen=True, auto_refresh=False) as live:
            watcher.start()
            try:
                _turn(view, watcher, keys, live)
            finally:
                watcher.is_over.set()
                # Some terminals show what was on this screen again when their size has changed.
                live.update("", refresh=True)


def _turn(view: View, watcher: _Watcher, keys: Keyboard, live: Any) -> None:
    """Draw, and do what the keys say, until one says q."""
    while not keys.is_gone:
        view.lost = watcher.lost
        if watcher.latest is not None and not view.is_paused:
            view.figures, view.rates, view.prompts = watcher.latest
        columns, lines = live.console.size
        live.update(screen(view, columns, lines), refresh=True)
        for key in keys.wait(60):
            if key == "q":
                return
            view.press(key)
        if view.is_paused:
            watcher.is_paused.set()
        else:
            watcher.is_paused.clear()


def _print(place: Place, interval_s: float, is_once: bool, is_json: bool) -> None:
    with place.open() as servers:
        walk, before = Walk(), figures(servers)
        while True:
            for _ in range(WALKS_ONCE):
                walk.step(servers)
                if walk.is_whole:
                    break
            time.sleep(interval_s)
            now = figures(servers)
            told = rates(before, now)
            if is_json:
                click.echo(json.dumps(_facts(place, now, told, walk), indent=2 if is_once else None))
            else:
                _print_screen(place, now, told, walk)
            if is_once:
                return
            before = now


def _print_screen(place: Place, now: Figures, told: Rates, walk: Walk) -> None:
    shown = console()
    view = View(str(place.address), now, told, prompts(walk.forest))
    width = shown.width if shown.file.isatty() else 120
    # All of a page's lines, but for those that no list fills.
    shown.print(screen(view, min(width, 139), 50, has_keys=False), no_wrap=True, overflow="ellipsis")


def _facts(place: Place, now: Figures, told: Rates, walk: Walk) -> dict[str, Any]:
    """What there is to see, in fields; rates are per second of the interval, null without any lookup."""
    return {
        "server": str(place.address),
        "unix_s": round(time.time(), 3),
        "version": now.version,
        "uptime_s": now.uptime_s,
        "interval_s": round(told.seconds, 3),
        "clients": now.clients_count,
        "tiers": now.tiers,
        "hit_rate": hit_rate(now),
        "hit_rate_now": told.hit_rate,
        "per_s": {name: round(value, 3) for name, value in told.per_s.items()},
        "totals": now.counters,
        "commands": {
            name: {"calls": calls, "usec": microseconds, "calls_per_s": round(told.calls_per_s.get(name, 0.0), 3)}
            for name, (calls, microseconds) in sorted(now.commands.items())
        },
        "slowest": now.slow,
        "prefixes": sorted_prompts(prompts(walk.forest), "bytes")[:PREFIXES_JSON],
        "prefixes_complete": walk.is_whole,
    }
