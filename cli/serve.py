"""`kvredis serve`: the composition root. Configuration, arena, store, server and event loop meet here and nowhere else.

Order at the start: everything that can be refused comes before the line "Ready to accept connections": configuration,
addresses, which are bound before there is an arena, memory, disk. Faulting in and page-locking a large arena takes
seconds and can be done while it serves, so by default it comes after that line, on a thread; --prefault puts it before.

Order at the end: clients first, then the event loop, then the blocks that the disk tier has not got yet.
"""

import asyncio
import gc
import importlib.util
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.backends.config.schema import Config
from kvredis.server.cluster.node import Cluster
from kvredis.server.cluster.topology import SLOTS
from kvredis.server.config.reload import check_options
from kvredis.server.config.settings import begin
from kvredis.server.net.listeners import Reserved, release, reserve
from kvredis.server.options import ServerOptions
from kvredis.server.server import Server
from kvredis.storage.background import start_thread
from kvredis.storage.disk.tier import DiskTier
from kvredis.storage.errors import ArenaError, ConfigError, DeviceError, KVRedisError
from kvredis.storage.memory.arena import PREFAULT_THREADS_MAX, Arena
from kvredis.storage.memory.device_arena import DeviceArena
from kvredis.storage.memory.memory_limits import gib
from kvredis.storage.options import StoreOptions
from kvredis.storage.store import Store

from .config import (
    EVENT_LOOP_VARIABLE,
    FILES_BESIDE_CLIENTS,
    check_store,
    config_file_option,
    load_config,
    server_options,
    server_options_of,
    told_where,
)
from .startup_probes import StartingDoor
from .systemd import feed_watchdog, more_time_while, notify

log = logging.getLogger(__name__)

_WARMING_NICENESS = 10
_LEVELS = {"debug": logging.DEBUG, "verbose": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}


@click.command(epilog="Example: kvredis serve --port 6379 --max-local-cpu-size 5GB --hugepages require")
@server_options
@config_file_option
def serve(config_file: Path | None, **flags: Any) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    A flag wins over the environment, the environment over the file. `--hugepages require` fails unless the 2 MiB pool
    has the pages (see `kvredis doctor hugepages`).
    """
    if os.getpid() == 1:  # of a container: the kernel drops a signal that its first process has not asked for
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    if flags["prefault"] is not None:
        flags["prefault"] = min(os.cpu_count() or 1, PREFAULT_THREADS_MAX) if flags["prefault"] else 0
    config = load_config(config_file, {name: value for name, value in flags.items() if value not in (None, ())})
    logging.getLogger().setLevel(_LEVELS[config.loglevel])
    loop_factory = event_loop_factory(os.environ.get(EVENT_LOOP_VARIABLE, ""))
    options = replace(server_options_of(config), maxclients=raise_open_files(config.maxclients))
    check_store(config)
    with told_where(config):
        check_options(options)
    if options.cluster_topology is not None:
        hold_sighup(held=True)
    # Prefaulting and page-locking are Warming's, at the moment that the configuration asks for. The disk tier comes by
    # itself, for its line tells a time of its own.
    parts = config.store_options()
    reserved = reserved_addresses(options)
    click.get_current_context().call_on_close(lambda: release(reserved))
    starting = click.get_current_context().with_resource(StartingDoor(options))
    started_s = time.monotonic()
    notify(f"STATUS=Opening an arena of {gib(config.capacity_bytes)}")
    store = Store.open(replace(parts, prefault_threads=0, page_lock=False, disk=None))
    gc.disable()  # until calm_collector: a hundred thousand blocks that come off the disk are no garbage
    arena_s = time.monotonic() - started_s
    server: Server | None = None
    try:
        if parts.disk is not None:
            notify(f"STATUS=Opening the disk tier {parts.disk.directory}")
        with told_where(config):
            told_of_disk = add_disk(store, parts)
        told_of_gpu = add_gpu(store, config)
        warming = Warming(store.arena, config)
        started_s = time.monotonic()
        warming.before_ready()
        size_from = config.origin.get("max_local_cpu_size", "default")
        click.echo(arena_line(store.arena, arena_s + time.monotonic() - started_s, size_from))
        for told in filter(None, (told_of_disk, told_of_gpu)):
            click.echo(told)
        with told_where(config):
            server = Server(store, options)
            server.listeners.reserved = reserved
            begin(server)
        if server.cluster is not None:
            click.echo(cluster_line(server.cluster))
        starting.close()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(serve_until_signal(server, warming))
    finally:
        gc.enable()
        saves = store.tiering is not None and (server is None or server.save_on_exit)
        with more_time_while(lambda: len(store.unsaved) if saves else 0):
            store.close(save=saves)


def reserved_addresses(options: ServerOptions) -> Reserved:
    """Bind all addresses with numbers. KVRedisError names the one that cannot be had."""
    try:
        return reserve(options)
    except OSError as error:
        raise KVRedisError(f"cannot listen: {error}") from error


def event_loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Choose the event loop: "asyncio" or "uvloop" as named, uvloop where it is installed if nothing is named."""
    if name not in ("", "asyncio", "uvloop"):
        raise ConfigError("event_loop", name, f"env {EVENT_LOOP_VARIABLE}", "want asyncio or uvloop")
    installed = importlib.util.find_spec("uvloop") is not None
    if name == "uvloop" and not installed:
        raise KVRedisError("uvloop is asked for but not installed: pip install uvloop")
    if name == "asyncio" or not installed:
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def raise_open_files(maxclients: int) -> int:
    """Raise this process's open-files limit for `maxclients` connections; give how many it allows, as Redis does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = maxclients + FILES_BESIDE_CLIENTS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return maxclients
    reachable = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    allowed = max(1, reachable - FILES_BESIDE_CLIENTS)
    if allowed < maxclients:
        log.warning("maxclients is %d instead of %d: the open-files limit is %d", allowed, maxclients, hard)
    return allowed


def arena_line(arena: Arena, seconds: float, size_from: str) -> str:
    """Say what the arena got, which key asked for so much memory, and what it did not get and why."""
    unit = f"{arena.page_bytes // 1024} KiB" if arena.page_bytes < 1024**2 else f"{arena.page_bytes // 1024**2} MiB"
    why = f"\nArena without hugepages: {arena.fallback}" if arena.fallback else ""
    return (
        f"Arena: {gib(arena.nbytes)}, {arena.nbytes // arena.page_bytes} pages of {unit} ({arena.pages}), "
        f"page-locked: {arena.page_locked}, {seconds:.3f} s; "
        f"it takes all of this memory (max_local_cpu_size: {size_from}){why}"
    )


def add_disk(store: Store, options: StoreOptions) -> str:
    """Put the disk tier below the store and say what it is and what it has kept; "" when the options have none.

    Blocks. Raises ConfigError when the directory cannot be used.
    """
    if options.disk is None:
        return ""
    started_s = time.monotonic()
    disk = DiskTier.open(options.disk)
    recovered = f"{disk.stats.recovered} blocks ({gib(disk.live_bytes)}) recovered"
    store.add_disk(disk, io_threads=options.io_threads, spill_wait_s=options.spill_wait_s, keep=options.keep)
    return (
        f"Disk tier: {options.disk.directory}, {gib(disk.limit_bytes)} in segments of "
        f"{gib(disk.geometry.segment_bytes)}, {'O_DIRECT' if disk.direct else f'buffered: {disk.fallback}'}, "
        f"{recovered}, {time.monotonic() - started_s:.3f} s"
    )


def add_gpu(store: Store, config: Config) -> str:
    """Put a tier of GPU memory beside the store's and say what it is, or why there is none; "" when none is asked for.

    Blocks for half a second. WHY a server that has no GPU starts all the same: its clients do without, too.
    """
    if config.gpu is None:
        return ""
    if config.lane == "off" or not store.arena.sealed:
        return "GPU memory: off, since no client can be given it (lane: off)"
    nbytes, number = config.gpu
    started_s = time.monotonic()
    try:
        arena = DeviceArena.create(nbytes, number)
    except DeviceError as error:
        return f"GPU memory: off, {error}"
    store.add_gpu(arena)
    return (
        f"GPU memory: {gib(arena.nbytes)} of GPU {number} ({arena.device.uuid}), {time.monotonic() - started_s:.3f} s"
    )


def cluster_line(cluster: Cluster) -> str:
    """Say which node of a cluster this is."""
    node, nodes = cluster.myself, len(cluster.topology.nodes)
    return f"Cluster: node {node.name} ({node.id}), {node.slots} of {SLOTS} slots, one of {nodes} nodes"


def hold_sighup(*, held: bool) -> None:
    """Have the node of a cluster get SIGHUP later, or from now on. An operator who deals slots out anew tells all
    nodes, and one that is still recovering its disk tier, or saving it, would end."""
    signal.pthread_sigmask(signal.SIG_BLOCK if held else signal.SIG_UNBLOCK, (signal.SIGHUP,))


class Warming:
    """Prefault and page-lock: before the server is ready where the configuration says so, else on a thread after it."""

    def __init__(self, arena: Arena, config: Config) -> None:
        self._arena = arena
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        asked = {name: config.origin.get(name, "default") != "default" for name in ("prefault", "page_lock")}
        self._prefault_first = asked["prefault"] and bool(config.prefault)
        self._prefault = self._prefault_first or not asked["prefault"]
        self._lock = config.page_lock if asked["page_lock"] else self._prefault
        self._threads = config.prefault if self._prefault_first else max(1, (os.cpu_count() or 1) // 2)

    def before_ready(self) -> None:
        """Do now what was asked for by name; mark the rest as pending."""
        if self._prefault_first:
            self._run()
        elif self._lock:
            self._arena.page_locked = "pending"

    def after_ready(self) -> None:
        """Start on the rest."""
        if not self._prefault_first and (self._prefault or self._lock):
            self._thread = start_thread(self._run_logged, "kvredis-warming")

    def stop(self) -> None:
        """End it early and wait; the arena may be closed afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> float:
        started_s = time.monotonic()
        if self._prefault:
            self._arena.prefault(min(self._threads, PREFAULT_THREADS_MAX), self._stop)
        if self._lock and not self._stop.is_set():
            self._arena.lock()
        return time.monotonic() - started_s

    def _run_logged(self) -> None:
        try:
            # Clients first: on Linux this is the calling thread's own niceness, and threads that it starts inherit it.
            os.setpriority(os.PRIO_PROCESS, 0, _WARMING_NICENESS)
            seconds = self._run()
        except ArenaError as error:
            self._arena.page_locked = "no"
            log.warning("%s; serving goes on", error)
            return
        except BaseException:
            self._arena.page_locked = "no"  # as it would be "pending" until the server ends
            raise
        if not self._stop.is_set():
            log.info("arena: warm after %.1f s, page-locked: %s", seconds, self._arena.page_locked)


async def serve_until_signal(server: Server, warming: Warming) -> None:
    """Listen, say so, and serve until SIGTERM, SIGINT or SHUTDOWN; then drain. A second signal ends the process at
    once, with status 1, also while the store is being saved; no socket file is left by then, since draining begins with
    closing the listeners, and the disk tier comes back from that as from any other crash."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # first: one before the line "Ready" ends it in order, too
        loop.add_signal_handler(number, server.request_shutdown)
    try:
        await server.start()
    except OSError as error:
        raise KVRedisError(f"cannot listen: {error}") from error
    try:
        calm_collector()
        if server.reload is not None:
            loop.add_signal_handler(signal.SIGHUP, server.reload.ask)
            hold_sighup(held=False)
        if server.http is not None:
            click.echo("Metrics on " + ", ".join(server.http.urls))
        click.echo("Ready to accept connections on " + ", ".join(server.addresses))
        notify("READY=1", "STATUS=Serving on " + ", ".join(server.addresses))
        feed_watchdog(loop)
        warming.after_ready()
        await server.shutdown_wanted.wait()
        notify("STOPPING=1", "STATUS=Letting transfers under way come to their end")
        if server.reload is not None:
            hold_sighup(held=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(1))
        await server.stop()
    finally:
        warming.stop()


def calm_collector() -> None:
    """Keep Python's cycle collector from walking every stored block each time some thousands were added.

    Blocks, replies and ended sessions form no cycles and are freed by their counts. The young are walked a few at a
    time, in a millisecond, and once more with the next few thousand; after that they are old, and no walk over a
    million of them is worth a second in which no client has its turn.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000_000)
