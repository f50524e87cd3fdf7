"""The backends of an engine whose blocks live on servers: RemoteBackend on one (kvredis, or any that speaks Redis'
protocol, behind Sentinels too), ClusterBackend on the masters of a Redis Cluster. Both are RemoteBlocks over routes.

Bodies are received straight into the local arena and sent straight out of it: one copy per side, the kernel's. The
arena is room for transfers only here: what is reserved in it is given back when a SET has been answered, or when the
reader of a GET releases its Lease; or it is committed then, so that a tier nearer than the servers keeps it.

Routes (routing.py) say which server has a key, and where to go when that one says it does not. Connections are opened
when first needed: one a server for questions, up to `connections` or a few more for what is stored, as many or more for
each load under way, and one for each wait (wait_for), borrowed for as long as it lasts.

A RemotePrefetch is what KV.PREFETCH said, and KV.JOB to ask how far it has come. A server that is lost, or has
forgotten the job, cannot tell any more: then it is finished, because no caller shall wait for it. A map is an array of
names and values here, since we speak RESP2.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import repeat
from typing import Final

from kvredis.backends import base
from kvredis.backends.config.url import Address, ClusterAddress, SentinelAddress
from kvredis.backends.fork_guard import Home
from kvredis.backends.gc_guard import Endings
from kvredis.backends.resp.cluster import Place
from kvredis.backends.resp.connection import Reply, read_map
from kvredis.backends.resp.wire import Scattered
from kvredis.backends.shm.buffers import RemoteReservation, Rooms, Staging
from kvredis.backends.shm.gpu_writer import GpuReservation, GpuWriter
from kvredis.storage.errors import BackendError

from .health import Link
from .load import Load, Patience
from .pipeline import Touch
from .pool import Node
from .routing import HOPS_MAX, ClusterRoutes, OneServer, Part, Routes
from .write_queue import WriteQueue

QUESTION_KEYS: Final = 4096
"""Keys in one command."""
EXISTS_KEYS: Final = 256
"""EXISTS in one round; a long prompt that is not stored costs no more than one such round."""
COUNTERS: Final = ("hits", "misses", "no_room", "given_up")


class RemoteBlocks:
    """A base.Backend over `routes`, with `staging` for the bodies, which is closed with it. Thread-safe: questions to a
    server take turns, each load receives on connections of its own, and what is stored leaves by the write queue.
    `reserve` and `commit` wait for none of them.
    """

    def __init__(
        self,
        name: str,
        open_routes: Callable[[WriteQueue], Routes],
        staging: Staging,
        *,
        timeout_s: float,
        keep: bool,
    ) -> None:
        """`name` is said in the log. With `keep` `staging` hears by a commit of each value that a server has taken."""
        self._name = name
        self._staging = staging
        self._timeout_s = timeout_s
        self._write_queue = WriteQueue(lambda: self._routes, staging, keep=keep)
        self._routes = open_routes(self._write_queue)
        self._lock = threading.Lock()
        self._endings = Endings()
        self._home = Home()
        self._closed = False
        self._counts = dict.fromkeys(COUNTERS, 0)

    # ---- questions -----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """As Backend.match: one KV.MATCH for each slot, or else pipelined EXISTS and a TOUCH of what was found.

        What is on its way counts as present, and no caller waits for it: `load` gives it from here.
        """
        if not self._home.is_here():
            return 0
        asked = self._write_queue.without(keys)
        run = self._leading_run(asked)
        return keys.index(asked[run]) if run < len(asked) else len(keys)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """As Backend.present: pipelined EXISTS; what is on its way counts as present."""
        if not self._home.is_here():
            return [False] * len(keys)
        asked = self._write_queue.without(keys)
        self._routes.await_first()
        found = dict(zip(asked, self._exist(asked), strict=True))
        return [found.get(key, True) for key in keys]

    def expect(self, keys: Sequence[bytes], within_s: float) -> int:
        """As Backend.expect. A server that does not know KV.EXPECT, or does not answer, leaves all to the caller."""
        if not self._home.is_here():
            return len(keys)
        self._routes.await_first()
        parts = self._routes.parts(self._write_queue.without(keys), QUESTION_KEYS)
        answers = self._ask(b"KV.EXPECT", parts, b"PX", b"%d" % max(within_s * 1000, 1))
        return sum(
            reply if isinstance(reply, int) else len(part.keys) for part, (_, reply) in zip(parts, answers, strict=True)
        )

    def coming(self, keys: Sequence[bytes]) -> int:
        """As Backend.coming. Where a server does not answer, its keys are missing."""
        if not self._home.is_here():
            return 0
        self._routes.await_first()
        asked = self._write_queue.without(keys)
        run = self._run_by_match(asked, b"EXPECTED") or 0
        return keys.index(asked[run]) if run < len(asked) else len(keys)

    def wait_for(self, keys: Sequence[bytes], within_s: float) -> int:
        """As Backend.wait_for, in questions that take half the timeout at most. Of a cluster the node of the first key
        that is missing is asked, of the keys that it has. Each wait has a connection of its own."""
        missing = self._write_queue.without(keys) if self._home.is_here() else list(keys)
        if missing and self._home.is_here():
            self._routes.await_first()
            node, asked = self._routes.parts(missing, QUESTION_KEYS)[0]
            there, until_s, is_over = 0, time.monotonic() + within_s, False
            while not is_over:
                began_s = time.monotonic()
                wait_s = min(max(until_s - began_s, 0.0), self._timeout_s / 2)
                command = (b"KV.MATCH", *asked, b"WAIT", b"%d" % max(wait_s * 1000, 1))
                with suppress(TimeoutError):
                    reply = node.ask_aside(*command, within_s=wait_s + ANSWER_S)
                    there = reply if isinstance(reply, int) else 0
                # Answered before its time: all is there, or what is missing is not announced.
                is_over = time.monotonic() >= until_s or time.monotonic() - began_s < wait_s / 2
            found = set(asked[:there])
            missing = [key for key in missing if key not in found]
        return keys.index(missing[0]) if missing else len(keys)

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        """As Far.absent: where no server answers, none counts as absent."""
        asked = self._write_queue.without(keys)
        self._routes.await_first()
        return [key for key, (_, reply) in zip(asked, self._ask_for_each(asked), strict=True) if reply == 0]

    def touch(self, keys: Sequence[bytes]) -> int:
        """As Backend.touch. Behind what is on its way it takes its turn, and counts only those that are so too."""
        if not self._home.is_here():
            return 0
        queued = self._write_queue.touch(keys, self._touches(keys))
        return self._sum(b"TOUCH", keys) if queued is None else queued

    def touch_later(self, keys: Sequence[bytes]) -> None:
        """As touch, but no caller waits for it, and nothing is counted; one too many of them is dropped."""
        if self._home.is_here():
            self._write_queue.touch(keys, self._touches(keys), always=True)

    def delete(self, keys: Sequence[bytes]) -> int:
        """As Backend.delete; waits until none of `keys` is on its way."""
        if not self._home.is_here():
            return 0
        self._write_queue.wait_for(keys)
        return self._sum(b"UNLINK", keys)

    def prefetch(self, keys: Sequence[bytes]) -> RemotePrefetch:
        """As Backend.prefetch; a server that does not know KV.PREFETCH or PREFETCH has queued nothing."""
        prefetch = RemotePrefetch(self._timeout_s / 2)
        if not self._home.is_here():
            prefetch.missing = len(keys)
            return prefetch
        away = self._write_queue.without(keys)
        prefetch.resident = len(keys) - len(away)
        self._routes.await_first()
        parts = self._routes.parts(away, QUESTION_KEYS)
        answers = self._ask(b"KV.PREFETCH", parts, b"JOB")
        rest = [part for part, (_, reply) in zip(parts, answers, strict=True) if reply is None]
        for node, reply in (*answers, *self._ask(b"PREFETCH", rest)):
            prefetch.add(node, reply)
        return prefetch

    def tiers_of(self, keys: Sequence[bytes]) -> list[base.Tier]:
        """As Backend.tiers_of: what is on its way is here still; a server may have the others on a disk of its own."""
        if not self._home.is_here():
            return ["remote"] * len(keys)
        away = set(self._write_queue.without(keys))
        return ["remote" if key in away else "memory" for key in keys]

    def _touches(self, keys: Sequence[bytes]) -> dict[Node, Touch]:
        parts: dict[Node, list[Sequence[bytes]]] = {}
        for node, part in self._routes.parts(keys, QUESTION_KEYS):
            parts.setdefault(node, []).append(part)
        return {node: Touch(mine) for node, mine in parts.items()}

    def _leading_run(self, keys: Sequence[bytes]) -> int:
        run, by_exists = 0, False
        self._routes.await_first()
        until_s = time.monotonic() + self._timeout_s
        while run < len(keys) and time.monotonic() < until_s:
            part = keys[run : run + (EXISTS_KEYS if by_exists else QUESTION_KEYS)]
            found = self._run_by_exists(part) if by_exists else self._run_by_match(part)
            if found is None:
                by_exists = True
                continue
            run += found
            if found < len(part):
                break
        if by_exists and run:
            self._sum(b"TOUCH", keys[:run])
        return run

    def _run_by_match(self, keys: Sequence[bytes], *option: bytes) -> int | None:
        """Ask how long the run is among the keys of each slot: it is over at the first of all that are missing. None:
        a server does not know KV.MATCH."""
        parts = self._routes.parts(keys, QUESTION_KEYS)
        missing = set()
        for part, (node, reply) in zip(parts, self._ask(b"KV.MATCH", parts, *option), strict=True):
            if reply is None and not node.knows(b"KV.MATCH"):
                return None
            found = max(self._count(node, reply), 0)
            if found < len(part.keys):
                missing.add(part.keys[found])
        return next((place for place, key in enumerate(keys) if key in missing), len(keys)) if missing else len(keys)

    def _run_by_exists(self, keys: Sequence[bytes]) -> int:
        return [*self._exist(keys), False].index(False)

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._count(node, reply) == 1 for node, reply in self._ask_for_each(keys)]

    def _ask_for_each(self, keys: Sequence[bytes]) -> list[tuple[Node, Reply]]:
        return self._ask(b"EXISTS", [Part(self._routes.owner(key), (key,)) for key in keys])

    def _sum(self, name: bytes, keys: Sequence[bytes]) -> int:
        """Add up a command's answers over parts of the keys, tail first: what is touched last stays longest."""
        self._routes.await_first()
        parts = self._routes.parts(keys, QUESTION_KEYS)[::-1]
        return sum(self._count(node, reply) for node, reply in self._ask(name, parts))

    def _count(self, node: Node, reply: Reply) -> int:
        if isinstance(reply, int):
            return reply
        if reply is not None:
            node.complain(reply)
        return 0

    # ---- asking, wherever that leads -------------------------------------------------------------------------------

    def _ask(self, name: bytes, parts: Sequence[Part], *last: bytes) -> list[tuple[Node, Reply]]:
        """Send one command for each part and give each node that answered, and its answer; None: no server, or it does
        not know that.

        Redirections are followed, all of a round together; a command that cannot be answered in one place, since its
        slot is moving, is asked key by key, and the answers are added up.
        """
        answers: list[tuple[Node, Reply]] = [(part.node, None) for part in parts]
        todo: dict[int, tuple[Node, bool]] = {place: (part.node, False) for place, part in enumerate(parts)}
        until_s = time.monotonic() + self._timeout_s
        for _ in range(HOPS_MAX + 1):
            rounds: dict[tuple[Node, bool], list[int]] = {}
            for place, way in todo.items():
                rounds.setdefault(way, []).append(place)
            todo = {}
            for (node, asking), places in rounds.items():
                if time.monotonic() > until_s:
                    break  # of many servers, several hang
                replies = node.pipeline([(name, *parts[place].keys, *last) for place in places], asking=asking)
                for place, reply in zip(places, replies, strict=True):
                    answers[place] = node, reply
                    hop = self._routes.follow(node, reply) if isinstance(reply, BackendError) else None
                    if hop is not None:
                        todo[place] = hop
            if not todo:
                break
        torn = [place for place, part in enumerate(parts) if is_torn(name, part, answers[place][1])]
        for place in torn:
            node, keys = parts[place]
            counts = [reply for _, reply in self._ask(name, [Part(node, (key,)) for key in keys])]
            answers[place] = node, sum(count for count in counts if isinstance(count, int))
        return answers

    # ---- writing -------------------------------------------------------------------------------------------------

    def room(self, length: int, at_least: int = 1) -> int:
        """As Backend.room, of what is taken without waiting; 0 while all servers are lost."""
        if not self._home.is_here():
            return 0
        room = 0 if all(node.link.waiting for node in self._routes.nodes()) else self._write_queue.room(length)
        return room if room >= at_least else 0

    def reserve(self, key: bytes, length: int) -> RemoteReservation | GpuReservation | None:
        """As Backend.reserve, but it never waits. None, counted as dropped, when more is stored than the servers take,
        and while the key's is lost."""
        if not self._home.is_here():
            return None
        self._endings.catch_up()
        return self._write_queue.reserve(key, length)

    def reserve_all(self, keys: Sequence[bytes], length: int) -> list[base.Reservation]:
        """As Backend.reserve_all, and `reserve`."""
        return base.reserve_each(self.reserve, keys, length)

    def lend(self, key: bytes, memory: Scattered) -> RemoteReservation | None:
        """As `reserve`, of a value that is sent from where it lies: `memory` stays what it is until the next flush has
        ended. None, and nothing is counted: it can be reserved only."""
        if not self._home.is_here():
            return None
        self._endings.catch_up()
        return self._write_queue.lend(key, memory)

    def flush(self) -> int:
        """As Backend.flush; those that were dropped since they were committed count too."""
        return self._write_queue.flush() if self._home.is_here() else 0

    # ---- reading -------------------------------------------------------------------------------------------------

    def load(
        self,
        keys: Sequence[bytes],
        *,
        within_s: float | None = None,
        rooms: Rooms | None = None,
        into: Mapping[bytes, Scattered] | None = None,
    ) -> Generator[base.Lease | None, None, None]:
        """As Backend.load: what has not left yet from here, the others over the load's connections, several GETs under
        way on each. All waits together last as long as the timeout at most. Bodies come into `rooms`, and are committed
        there when they have been read; without any they pass through the staging memory. Values that come over a socket
        and are as long as the memory that is lent for them in `into` are received there: their Lease is a LentLease.
        What that memory holds of others is undefined."""
        if not self._home.is_here():
            yield from repeat(None, len(keys))
            return
        self._endings.catch_up()
        here: list[base.Lease | None] = list(self._write_queue.hold(keys))
        load = Load(self._routes, self._staging, Patience(self._timeout_s, within_s), rooms, into)
        hits = misses = 0

        def end() -> None:
            for lease in here:
                if lease is not None:
                    lease.release()
            load.close()
            with self._lock:
                for name, count in zip(COUNTERS, (hits, misses, load.no_room, load.is_given_up), strict=True):
                    self._counts[name] += count

        try:
            load.begin([key for key, lease in zip(keys, here, strict=True) if lease is None])
            for place, key in enumerate(keys):
                lease, here[place] = here[place], None
                if lease is None:
                    lease = load.take(key)
                hits += lease is not None
                misses += lease is None
                yield lease
        finally:
            self._endings.end(end)

    # ---- figures and the end -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | str]:
        """Give counters since the start; bytes are all that went over the sockets, `given_up` counts loads."""
        self._endings.catch_up()
        with self._lock:
            counts = dict(self._counts)
        return {"server": self._name, **counts, **self._routes.stats(), **self._write_queue.stats()}

    def close(self) -> None:
        """As Backend.close; waits for the answers to what was sent, which closing early could make the server drop, but
        not longer than the timeout: what is still on its way then is dropped, and counted."""
        if not self._home.is_here():
            return
        self._endings.catch_up()
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._write_queue.close(self._name, self._timeout_s)
            self._routes.close()
            self._staging.close()


def is_torn(name: bytes, part: Part, reply: Reply) -> bool:
    """Say whether a command failed only because its keys are in two places just now, and may be asked for singly."""
    is_sum = name in (b"TOUCH", b"UNLINK")
    return is_sum and len(part.keys) > 1 and isinstance(reply, BackendError) and str(reply).startswith("TRYAGAIN")


class RemoteBackend(RemoteBlocks):
    """Blocks on the server at `address`, or on the master of those days where Sentinels know it."""

    def __init__(
        self,
        address: Address | SentinelAddress,
        staging: Staging,
        *,
        connections: int | None = None,
        timeout_s: float = 10.0,
        connect_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        keep: bool = False,
    ) -> None:
        """With `keep` `staging` is a nearer tier, and hears by a commit of each value that the server has taken."""
        self.address = address
        # Whose own memory the GPU knows wants the server's known to it as well.
        page_lock = staging.arena.page_locked == "cuda"
        link = Link(address, timeout_s, clock, connect_timeout_s=connect_timeout_s, page_lock=page_lock)
        self._node = node = Node(link, connections)
        self._gpu: GpuWriter | None = None
        self._keeps = keep
        super().__init__(str(address), lambda write_queue: OneServer(node), staging, timeout_s=timeout_s, keep=keep)

    def use_gpu(self, number: int) -> None:
        """Write blocks to the GPU memory of a server on this host, while it has room there, and read there those that
        lie there: with our GPU `number`. From now on reservations and leases may be GpuReservation and GpuLease, which
        no processor can touch. Without such a server, or with a nearer tier that keeps blocks, it changes nothing."""
        if self._gpu is None and not self._keeps and self._node.link.use_gpu(number):
            self._gpu = GpuWriter(self._node.open, self._node.retire, self._node.lose)

    def reserve(self, key: bytes, length: int) -> RemoteReservation | GpuReservation | None:
        """As RemoteBlocks.reserve. On the server's GPU it waits for the server."""
        if self._gpu is not None and self._home.is_here():
            (room,) = self._gpu.reserve([key], length)
            if room is not None:
                return room
        return super().reserve(key, length)

    def reserve_all(self, keys: Sequence[bytes], length: int) -> list[base.Reservation]:
        if self._gpu is None or not self._home.is_here():
            return super().reserve_all(keys, length)
        on_gpu, elsewhere = self._gpu.reserve(keys, length), super().reserve
        rooms: list[base.Reservation] = []
        with ExitStack() as undo:
            for room in filter(None, on_gpu):
                undo.callback(room.abort)
            there = iter(on_gpu)
            rooms += base.reserve_each(lambda key, nbytes: next(there) or elsewhere(key, nbytes), keys, length)
            undo.pop_all()
        for left in filter(None, on_gpu[len(rooms) :]):
            left.abort()
        return rooms

    def flush(self) -> int:
        """As RemoteBlocks.flush; those that the server's GPU did not take count too."""
        refused = super().flush()
        return refused + (self._gpu.take_refused() if self._gpu is not None and self._home.is_here() else 0)

    def stats(self) -> dict[str, int | float | str]:
        """As RemoteBlocks.stats, with the blocks that were `gpu_stored` on the server's GPU by its answers so far."""
        return {"kind": "remote", **super().stats(), "gpu_stored": 0 if self._gpu is None else self._gpu.stored}

    def close(self) -> None:
        if self._gpu is not None and self._home.is_here():
            self._gpu.close()
        super().close()


class ClusterBackend(RemoteBlocks):
    """Blocks on the masters of the cluster at `address`; memory and bounds are shared, `connections` are a node's."""

    def __init__(
        self,
        address: ClusterAddress,
        staging: Staging,
        *,
        connections: int | None = None,
        timeout_s: float = 10.0,
        connect_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        keep: bool = False,
    ) -> None:
        """As RemoteBackend. Nothing is asked before the first verb: nodes that are not there yet are no error."""
        self.address = address

        def node_at(place: Place) -> Node:
            link = Link(address.server(*place), timeout_s, clock, connect_timeout_s=connect_timeout_s)
            return Node(link, connections)

        super().__init__(
            str(address),
            lambda write_queue: ClusterRoutes(address, timeout_s, node_at, write_queue.let_go),
            staging,
            timeout_s=timeout_s,
            keep=keep,
        )

    def stats(self) -> dict[str, int | float | str]:
        """As RemoteBlocks.stats, with `nodes` known now, `redirects` followed and `refreshes` of the topology."""
        return {"kind": "cluster", **super().stats()}


WAIT_SLICE_S: Final = 1.0
"""How long one KV.JOB WAIT takes at most, so that a server that answers late is not taken for one that hangs."""
ANSWER_S: Final = 0.5
"""How much longer than asked for a wait may take, as an answer has its way to come."""


class RemotePrefetch:
    """A base.Prefetch, empty until `add`. It asks where no caller waits behind it; a wait is cut into slices of
    `slice_s_max`."""

    def __init__(self, slice_s_max: float = WAIT_SLICE_S) -> None:
        self.queued = self.resident = self.missing = self.no_room = 0
        self.refused = ""
        self._slice_s = min(slice_s_max, WAIT_SLICE_S)
        self._jobs: list[tuple[Node, bytes]] = []  # those that may be under way

    def add(self, node: Node, reply: Reply) -> None:
        """Add what `node` has answered to KV.PREFETCH, or to PREFETCH, which tells how many are queued and no more;
        None: nothing."""
        if reply is None:
            return
        said = {"queued": reply} if isinstance(reply, int) else read_map(reply)
        counts = [said.get(name, 0) for name in ("queued", "resident", "missing", "no-room")]
        counted = [count for count in counts if isinstance(count, int) and count >= 0]
        if not said or len(counted) < len(counts):
            self.refused = str(reply)[:200]
            return
        self.queued += counted[0]
        self.resident += counted[1]
        self.missing += counted[2]
        self.no_room += counted[3]
        job = said.get("job")
        if isinstance(job, int | bytes):
            self._jobs.append((node, job if isinstance(job, bytes) else b"%d" % job))

    @property
    def is_finished(self) -> bool:
        """As Prefetch.is_finished; a round trip until it is."""
        return self._finish()

    def wait(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        with suppress(TimeoutError):  # a server that hangs, where one that is merely slow would still be asked
            while not self._finish(left_s := max(until_s - time.monotonic(), 0.0), left_s + ANSWER_S):
                if time.monotonic() >= until_s:
                    return False
            return True
        return False

    def cancel(self) -> None:
        for node, job in self._jobs:
            node.ask_aside(b"KV.JOB", job, b"CANCEL")

    def _finish(self, timeout_s: float = 0.0, answer_s: float = math.inf) -> bool:
        """Cross off the jobs that are over, waiting a slice of `timeout_s` for the first that is not. TimeoutError when
        a server does not answer within `answer_s`."""
        wait_ms = int(min(timeout_s, self._slice_s) * 1000)
        wait = (b"WAIT", b"%d" % wait_ms) if wait_ms else ()
        for node, job in tuple(self._jobs):
            status = read_map(node.ask_aside(b"KV.JOB", job, *wait, within_s=answer_s)).get("status")
            if status in (b"running", "running"):
                return False
            with suppress(ValueError):  # another thread has asked as well
                self._jobs.remove((node, job))
        return True
