"""Who may see what over HTTP: the users of the ACL, with HTTP's Basic scheme for AUTH.

Wrong passwords and missing rights are counted and logged as those of RESP clients are, so that one ACL LOG shows all
who were refused. Two things are HTTP's own. Protected mode is asked for every request that is guarded, since a probe
may knock without a password. And on loopback a user who needs none may ask by names of this machine alone: a web page
whose name an attacker has pointed at 127.0.0.1 would else read all with the browser of the user who opens that page.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import socket
from typing import Final

from kvredis.server.acl.rules import DEFAULT_USER, User
from kvredis.server.acl.state import Refusal
from kvredis.server.commands.registry import Command, lookup
from kvredis.server.context import Context

from .server import HttpError, HttpRequest, Peer

CHALLENGE: Final = (("WWW-Authenticate", 'Basic realm="kvredis", charset="UTF-8"'),)

METRICS: Final = (b"info",)
PAGE: Final = (b"info", b"slowlog|get", b"scan", b"kv.meta")
"""What a path shows is what these commands answer: the user must be allowed each of them, KV.META of every key."""

PROTECTED: Final = (
    "kvredis is in protected mode: no password is set for the default user, so only clients of this machine see this. "
    "Set requirepass, or protected_mode to false."
)


class HttpAuth:
    """Callable as http/server.py's Gate."""

    def __init__(self, server: Context) -> None:
        self._server = server

    def __call__(self, request: HttpRequest, peer: Peer) -> None:
        """Raise HttpError 401 for who must say who it is, and 403 for who may not see this."""
        server = self._server
        default = server.acl.default
        if server.protected_mode and default.needs_no_password and not is_local(peer.addr):
            raise HttpError(403, PROTECTED)
        given = request.headers.get("authorization")
        if given is not None:
            user = self._login(given, peer)
        elif default.needs_no_password:
            user = default
        else:
            raise HttpError(401, "a user and password are needed", CHALLENGE)
        # Whatever password is given, such a user has proven nothing by it.
        if user.needs_no_password and is_local(peer.laddr) and not is_own_name(request.headers.get("host", "")):
            raise HttpError(403, "this user has no password and asks for the server by a name that is not its own")
        self._check_rights(request, user, peer, asks_again=given is None)

    def _login(self, given: str, peer: Peer) -> User:
        name, password = credentials(given)
        user = self._server.acl.login(name, password)
        if user is None:
            self._note("auth", b"http", name, peer)
            raise HttpError(401, "wrong user or password, or the user is disabled", CHALLENGE)
        return user

    def _check_rights(self, request: HttpRequest, user: User, peer: Peer, *, asks_again: bool) -> None:
        for name in METRICS if request.path == "/metrics" else PAGE:
            if not may_run(user, [*name.split(b"|"), b"*"]):
                self._note("command", name, user.name, peer)
                text = f"user {user.name.decode('utf-8', 'replace')} may not use {name.decode()}, which this shows"
                raise HttpError(401 if asks_again else 403, text, CHALLENGE if asks_again else ())

    def _note(self, reason: str, what: bytes, name: bytes, peer: Peer) -> None:
        info = f"addr={peer.addr} laddr={peer.laddr} name= user={name.decode('utf-8', 'replace')} cmd=http"
        self._server.acl.note(self._server, Refusal(reason, "toplevel", what, name, info.encode()))


def may_run(user: User, line: list[bytes]) -> bool:
    """Whether a user may run this line, and where that reads keys, with every key."""
    command = lookup(line)
    assert isinstance(command, Command)
    if user.unrestricted:
        return True
    return user.may_read_all(command, line) if command.keys[0] else user.denial(command, line) is None


def credentials(given: str) -> tuple[bytes, bytes]:
    """User and password out of an Authorization header; no name means the default user. HttpError 400 and 401."""
    scheme, _, encoded = given.partition(" ")
    if scheme.lower() != "basic":
        raise HttpError(401, "only the Basic scheme is known here", CHALLENGE)
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        raise HttpError(400, "the Authorization header cannot be read") from None
    if not colon:
        raise HttpError(400, "the Authorization header cannot be read")
    return name or DEFAULT_USER, password


def is_local(addr: str) -> bool:
    """Whether one end of a TCP connection is loopback."""
    return addr.startswith(("127.", "[::1]", "[::ffff:127."))


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine: a number, localhost, or what the machine is called."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() in ("localhost", socket.gethostname().lower(), "")
    return True
