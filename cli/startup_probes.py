"""The metrics port before there is a server: probes are told that it starts, instead of finding no listener.

What `serve` does at its start (an arena that is faulted in, a disk tier that is recovered) blocks its thread, so this
listener has a thread and a loop of its own. It gives the port back before the server listens there.
"""

import asyncio
import logging
import threading
from types import TracebackType

from kvredis.server.client.blocked import tell_loop
from kvredis.server.http import health
from kvredis.server.http.server import HttpServer
from kvredis.server.options import ServerOptions
from kvredis.storage.errors import KVRedisError

log = logging.getLogger(__name__)

CLOSE_S = 10
"""It takes milliseconds."""


class StartingDoor:
    """Open from when it is entered until `close`, if there is a metrics port with a number. KVRedisError at the begin
    when that cannot be had: better now than when the disk has been read."""

    def __init__(self, options: ServerOptions) -> None:
        self._http = None if options.metrics_port <= 0 else HttpServer(options, health.starting(), lambda *_: None)
        self._opened = threading.Event()
        self._failed: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kvredis-starting", daemon=True)

    def __enter__(self) -> "StartingDoor":
        if self._http is not None:
            self._thread.start()
            self._opened.wait()
            if isinstance(self._failed, OSError):  # of the port, or of a loop that could not be made
                raise KVRedisError(f"cannot listen: {self._failed}") from self._failed
            if self._failed is not None:
                raise self._failed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the port back; again is nothing."""
        loop, self._loop = self._loop, None
        if loop is not None:
            tell_loop(loop, self._ended.set)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failed:
            self._failed = failed
            if self._opened.is_set():  # the caller has gone on, and does without
                log.exception("the metrics port answers no longer while the server starts")
        finally:
            self._opened.set()

    async def _serve(self) -> None:
        assert self._http is not None
        self._http.open()
        self._loop = asyncio.get_running_loop()
        self._opened.set()
        await self._ended.wait()
        await self._http.close()
