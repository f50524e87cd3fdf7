"""What the tests of command handlers share: payloads as the parser leaves them, and a handler's reply in one piece."""

from typing import cast

from kvredis.server.client.session import Session
from kvredis.server.commands.registry import COMMANDS
from kvredis.server.protocol.replies import joined
from kvredis.storage.entry import Reservation
from tests.server.fake_session import FakeSession

LARGE = 100_000
OOM = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"


def received(session: FakeSession, key: bytes, value: bytes) -> Reservation:
    """A payload that has arrived in full and is not yet published."""
    reservation = session.store.reserve(key, len(value), session.space)
    assert reservation is not None
    reservation.view[:] = value
    return reservation


def run(session: FakeSession, *args: bytes | Reservation) -> bytes:
    """The reply to a command whose arguments may be Reservations."""
    assert isinstance(args[0], bytes)
    reply = COMMANDS[args[0]].handler(cast(Session, session), list(args))  # type: ignore[arg-type]
    return joined(reply)  # type: ignore[arg-type]


def bulk(value: bytes) -> bytes:
    """A value's reply."""
    return b"$%d\r\n%b\r\n" % (len(value), value)
