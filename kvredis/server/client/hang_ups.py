"""Hang-ups of clients that wait: the server does not read from them, so no read tells it that they have gone.

Most waits are short, and server.py looks at each waiting client once a second. Clients whose value waits for its turn
may be thousands, each with a socket and unread bytes in it: the kernel (epoll) tells of their hang-ups at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Final

from .client import Client

TOLD_AT_ONCE: Final = 16
"""So many clients are closed before others have their turn, at some 0.1 ms each."""


def has_hung_up(fd: int, *, wholly: bool) -> bool:
    """Whether the client behind a socket has gone.

    One that will send no more counts too, as it does with Redis; with `wholly` only one that takes nothing more either.
    """
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return any(not wholly or events & ~select.POLLRDHUP for _, events in poll.poll(0))


class HangUps:
    """The clients of one server that wait and are to be told of when they go, by epoll(7), edge-triggered."""

    def __init__(self, gone: Callable[[Client, bool], None]) -> None:
        """`gone(client, wholly)` is called in the loop, once when a client will send no more and once when it takes
        nothing more either."""
        self._gone = gone
        self._clients: dict[int, Client] = {}
        self._epoll: select.epoll | None = None

    def start(self) -> None:
        """The loop runs: watch."""
        self._epoll = select.epoll()
        asyncio.get_running_loop().add_reader(self._epoll, self._tell)

    def watch(self, session: Client) -> None:
        """Tell of this client from now on; what it has done before counts."""
        if self._epoll is not None and self._clients.get(session.fd) is not session:
            self._epoll.register(session.fd, select.EPOLLRDHUP | select.EPOLLET)
            self._clients[session.fd] = session

    def forget(self, session: Client) -> None:
        """Tell of this client no more."""
        if self._epoll is None or self._clients.get(session.fd) is not session:
            return  # its socket was closed, and the number is another client's
        del self._clients[session.fd]
        with contextlib.suppress(OSError):  # the kernel forgets a socket that is closed
            self._epoll.unregister(session.fd)

    def close(self) -> None:
        """Stop watching; again is nothing."""
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll)
            self._epoll.close()
            self._epoll = None

    def _tell(self) -> None:
        assert self._epoll is not None
        for fd, events in self._epoll.poll(0, TOLD_AT_ONCE):  # what is left over is told of in the loop's next turn
            session = self._clients.get(fd)
            if session is not None:
                self._gone(session, bool(events & ~select.EPOLLRDHUP))
