"""Finding out whether the server of a kvredis:// URL is on this host, so that values need not go through a socket.

The pool asks at each new connection, as another server may have taken the place of the one before. A server on another
host, or one whose arena cannot be mapped, is no error: values then go over the socket, as with any other URL.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvredis.backends.config.url import Address
from kvredis.backends.resp.connection import Connection, read_map
from kvredis.storage.errors import BackendError, DeviceError

from .connection import AttachedConnection

logger = logging.getLogger(__name__)

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Differs from host to host and from boot to boot; the containers of a host share it."""
ELSEWHERE: Final = "it is on another host"
WAIT_S_MIN: Final = 0.001


class SameHost:
    """The way to one server's memory. Any thread may call anything; it says in the log what has become of it, and again
    when that changes.
    """

    def __init__(self, address: Address, *, page_lock: bool = False) -> None:
        """With `page_lock` the server's memory is registered with the GPU's driver."""
        self._address = address
        self._page_lock = page_lock
        self.gpu: int | None = None
        """Our GPU, by its number, for which new connections map the server's GPU memory; None: for none."""
        self._saying = threading.Lock()
        self._said = self._said_of_gpu = ""

    def attached(self, connection: Connection, deadline_s: float) -> Connection:
        """Give a connection that is attached to the server's memory, in place of `connection`, which is closed then; or
        that one, if there is no such way. Takes until `deadline_s` of time.monotonic() at most.

        Raises BackendError when `connection` itself fails.
        """
        found = self._look(connection, deadline_s)
        if isinstance(found, str):
            self._say(found)
            return connection
        connection.close()
        self._say("")
        return found

    def _look(self, connection: Connection, deadline_s: float) -> AttachedConnection | str:
        """Attach, or say why that cannot be."""
        told = _ask(connection, deadline_s)
        if isinstance(told, str):
            return told
        path, boot_id, run_id = (told.get(name, "") for name in ("socket", "boot-id", "run-id"))
        if boot_id and boot_id != _own_boot_id():
            return ELSEWHERE
        if not boot_id or not path or not run_id:
            return "it offers no shared memory"
        try:
            # A path of the URL's own is known to lead there; another container may see the server's under another name.
            return self._open(self._address.path or path, run_id, deadline_s)
        except BackendError as error:
            return str(error)
        except RuntimeError as error:  # no thread for the GPU's driver
            return repr(error)

    def _open(self, path: str, run_id: str, deadline_s: float) -> AttachedConnection:
        gpu = self.gpu
        try:
            return self._open_for(gpu, path, run_id, deadline_s)
        except DeviceError as error:
            self._say_of_gpu(f"our GPU {gpu} cannot map it: {error}")
            self.gpu = None
            return self._open_for(None, path, run_id, deadline_s)

    def _open_for(self, gpu: int | None, path: str, run_id: str, deadline_s: float) -> AttachedConnection:
        address = replace(self._address, host="", path=path, tls=None)
        attached = AttachedConnection.open(address, _left_s(deadline_s))
        try:
            assert isinstance(attached, AttachedConnection)
            told = _ask(attached, deadline_s)
            if isinstance(told, str) or told.get("run-id") != run_id:
                raise BackendError(f"another server answers at {path}")
            attached.set_timeout(_left_s(deadline_s))
            why_no_gpu = attached.attach(run_id, page_lock=self._page_lock, gpu=gpu)
            if gpu is not None:
                self._say_of_gpu(why_no_gpu)
        except BaseException:
            attached.close()
            raise
        return attached

    def _say(self, why_not: str) -> None:
        """Tell the log, unless it is what was told last."""
        with self._saying:
            said, self._said = self._said, why_not or "shared"
        if said == self._said:
            return
        if not why_not:
            logger.info("%s is on this host: values are read in its memory, and by it in ours", self._address)
        elif why_not == ELSEWHERE:
            logger.info("%s: values go over the socket: %s", self._address, why_not)
        else:
            logger.warning("%s: values go over the socket, not through shared memory: %s", self._address, why_not)

    def _say_of_gpu(self, why_not: str) -> None:
        """Tell the log, unless it is what was told last. A server without GPU memory is the common case, and no news;
        "" stands for one that has some for us."""
        with self._saying:
            said, self._said_of_gpu = self._said_of_gpu, why_not or "mapped"
        if said == self._said_of_gpu or why_not.startswith("ERR"):
            return
        if why_not:
            logger.warning("%s: its GPU memory is not used: %s", self._address, why_not)
        else:
            logger.info("%s: blocks are written to its GPU memory, and read there", self._address)


def _own_boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _ask(connection: Connection, deadline_s: float) -> dict[str, str] | str:
    """Ask KV.LANE: what it tells, as text, or what it answers instead."""
    connection.set_timeout(_left_s(deadline_s))
    reply = connection.call(b"KV.LANE")
    if isinstance(reply, BackendError):
        return f"it answers KV.LANE with {reply}"
    values = {name: value for name, value in read_map(reply).items() if value is not None}
    return {name: value.decode("utf-8", "replace") for name, value in values.items() if isinstance(value, bytes)}


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), WAIT_S_MIN)
