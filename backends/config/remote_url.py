"""One URL out of all that was said about the server: remote_url, and what LMCache keeps beside it in extra_config.

LMCache's connectors read the credentials of resp:// and valkey:// servers, Valkey's database, TLS and cluster mode
from entries, and a Sentinel's service from the environment. Here they are written into the URL, percent-encoded, so
that whoever opens a connection reads one string. Where both speak the URL wins. As in LMCache an entry counts for the
schemes of its own connector alone: a password sent to a redis:// server that wants none would be an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from .url import SCHEMES

CONNECTION_ENTRIES: Final = ("resp_num_threads", "valkey_num_workers", "valkey_sync_num_workers")
_RESP: Final = ("username", "password")
_VALKEY: Final = ("valkey_username", "valkey_password", "valkey_database", "valkey_mode", "tls_enable")
_SERVICE: Final = "redis_service_name"


def merged_url(url: str, entries: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return `url` with all that `entries` have to add, and why each of those that add nothing does not.

    Holds the password in clear. Total: of a URL that is none it makes one that is none either.
    """
    given = {name: value for name, value in entries.items() if value not in (None, "")}
    parts = _Parts(url, given)
    if parts.scheme.startswith("valkey"):
        parts.log_in("valkey_username", "valkey_password")
        parts.cluster()
        parts.secure()
        parts.select()
    else:
        parts.leave(_VALKEY, "is read for valkey:// alone")
    if parts.scheme == "resp":
        parts.log_in("username", "password")
    else:
        parts.leave(_RESP, "is read for resp:// alone")
    if parts.shape == "sentinel":
        parts.name_service()
    else:
        parts.leave((_SERVICE,), "is read for redis-sentinel:// alone")
    return str(parts), parts.unused


def shape_of(url: str) -> str:
    """Return what a URL or its scheme names: "server", "sentinel" or "cluster"; "" if there is no such scheme."""
    scheme = url.partition("://")[0].lower()
    return SCHEMES[scheme][0] if scheme in SCHEMES else ""


def connections_entry(url: str | None, entries: Mapping[str, Any]) -> str | None:
    """Name the entry that says how many connections there are: the one of the URL's own connector first."""
    last = "resp_num_threads" if (url or "").lower().startswith("valkey") else ""
    names = sorted(CONNECTION_ENTRIES, key=lambda name: name == last)
    return next((name for name in names if entries.get(name) is not None), None)


class _Parts:
    """A URL taken apart, what was given beside it, and why some of that is of no use."""

    def __init__(self, url: str, given: Mapping[str, Any]) -> None:
        scheme, self._mark, rest = url.partition("://")
        self.scheme = scheme.lower()
        before, self._question, self.query = rest.partition("?")
        who_where, _, self.path = before.partition("/")
        self.who, self._at, self.where = who_where.rpartition("@")
        self._given = given
        self.unused: dict[str, str] = {}

    @property
    def shape(self) -> str:
        """Return what the scheme names: a server, a sentinel, a cluster, or nothing."""
        return shape_of(self.scheme)

    def leave(self, names: tuple[str, ...], reason: str) -> None:
        """Note that entries are for another kind of server."""
        for name in names:
            if name in self._given:
                self.unused[name] = f"{reason}, and remote_url is {self.scheme}://"

    def log_in(self, user: str, password: str) -> None:
        """Add the credentials; those of the URL win as a pair, since half of each is nobody's."""
        own = bool(self._at) or any(word.startswith(("username=", "password=")) for word in self.query.split("&"))
        if own:
            for name in (user, password):
                if name in self._given:
                    self.unused[name] = "remote_url has credentials of its own, which win"
        elif password in self._given:
            self.who, self._at = f"{_quoted(self._given.get(user, ''))}:{_quoted(self._given[password])}", "@"
        elif user in self._given:
            self.unused[user] = f"is of no use without {password}"

    def cluster(self) -> None:
        """Make the URL one of a cluster if valkey_mode says so."""
        mode = self._given.get("valkey_mode")
        if mode == "cluster" and self.shape == "server":
            self.scheme += "-cluster"
        elif mode is not None and (mode == "cluster") != (self.shape == "cluster"):
            self.unused["valkey_mode"] = f"remote_url is {self.scheme}://, which wins"

    def secure(self) -> None:
        """Make the URL one of TLS if tls_enable says so."""
        name, dash, shape = self.scheme.partition("-")
        if self._given.get("tls_enable") is True:
            self.scheme = f"{name.removesuffix('s')}s{dash}{shape}"
        elif "tls_enable" in self._given and name.endswith("s"):
            self.unused["tls_enable"] = f"remote_url is {self.scheme}://, which wins"

    def select(self) -> None:
        """Add the database."""
        db = self._given.get("valkey_database")
        own = self.path.strip("/") or next((w[3:] for w in self.query.split("&") if w.startswith("db=")), "")
        if db is None or own == str(db) or (not own and not db):
            return
        if self.shape == "cluster":
            self.unused["valkey_database"] = "a cluster has no database but 0"
        elif own or self.shape != "server":
            self.unused["valkey_database"] = "remote_url has a path of its own, which wins"
        else:
            self.path = str(db)

    def name_service(self) -> None:
        """Add the name under which Sentinels know the server."""
        service, own = self._given.get(_SERVICE), self.path.strip("/").partition("/")[0]
        if service is None:
            return
        encoded = _quoted(service)
        if own and own != encoded:
            self.unused[_SERVICE] = f"remote_url names the service {own}, which wins"
        elif not own:
            self.path = encoded

    def __str__(self) -> str:
        path = f"/{self.path}" if self.path else ""
        return f"{self.scheme}{self._mark}{self.who}{self._at}{self.where}{path}{self._question}{self.query}"


def _quoted(value: object) -> str:
    """Percent-encode an entry; what is not UTF-8 stays that, and is refused by whoever reads the URL."""
    return quote(str(value), safe="", errors="surrogatepass")
