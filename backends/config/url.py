"""Where a server is, said as a URL: the one place that reads such URLs, so that engine, CLI and bench agree on them.

A URL names one server, or the Sentinels that know where it is, or some nodes of a Redis Cluster. One table says which
scheme is which; what comes out are values, and nothing here opens a file or a socket.

`merged_url` makes one URL of remote_url and what LMCache keeps beside it in extra_config. LMCache's connectors read the
credentials of resp:// and valkey:// servers, Valkey's database, TLS and cluster mode from entries, and a Sentinel's
service from the environment. Here they are written into the URL, percent-encoded, so that each part that opens a
connection reads one string. Where both speak the URL wins. As in LMCache an entry counts for the schemes of its own
connector alone: a password sent to a redis:// server that wants none would be an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal
from urllib.parse import parse_qs, quote, unquote

from kvredis.storage.errors import ConfigError

from .tls import TLS_OPTIONS, Tls

PORT_DEFAULT: Final = 6379
SENTINEL_PORT_DEFAULT: Final = 26379
SERVICE_DEFAULT: Final = "mymaster"

Shape = Literal["server", "sentinel", "cluster"]

SCHEMES: Final[dict[str, tuple[Shape, bool]]] = {
    **dict.fromkeys(("redis", "valkey", "resp", "kvredis", "unix"), ("server", False)),
    **dict.fromkeys(("rediss", "valkeys"), ("server", True)),
    **dict.fromkeys(("redis-sentinel", "valkey-sentinel"), ("sentinel", False)),
    **dict.fromkeys(("rediss-sentinel", "valkeys-sentinel"), ("sentinel", True)),
    **dict.fromkeys(("redis-cluster", "valkey-cluster"), ("cluster", False)),
    **dict.fromkeys(("rediss-cluster", "valkeys-cluster"), ("cluster", True)),
}
"""What each scheme names, and whether it is reached over TLS."""

FORMS: Final[dict[Shape, str]] = {
    "server": "redis://HOST:PORT, rediss://HOST:PORT (TLS), unix:///PATH or kvredis://HOST:PORT",
    "sentinel": "redis-sentinel://HOST:PORT,HOST:PORT/SERVICE",
    "cluster": "redis-cluster://HOST:PORT,HOST:PORT",
}

_URL: Final = re.compile(r"([a-z][a-z0-9-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?", re.IGNORECASE | re.DOTALL)
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+(?:%[^\]\s]+)?)\]|([^:\[\]\s]+))(?::([0-9]{1,5}))?", re.IGNORECASE)
_NO_HOST: Final = re.compile(r"[$<>{}\"'`|\\^*]")
"""What a template leaves of a host that it was to put in."""
_SECRETS: Final = ("password", "sentinel_password", "ssl_password")
_SECRET: Final = re.compile(r"(password=).*", re.IGNORECASE | re.DOTALL)
"""A password in a query that was cut wrongly: behind a second question mark, or a number sign."""


@dataclass(frozen=True, slots=True)
class Address:
    """One server and who we are to it: a TCP host and port, or the path of a unix socket (@name: an abstract one)."""

    host: str = "127.0.0.1"
    port: int = PORT_DEFAULT
    path: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    tls: Tls | None = None
    shared_memory: bool = False
    """kvredis://: values go through shared memory when the server is on this host."""

    def __str__(self) -> str:
        """Return a URL that is safe to log: it never holds the password."""
        who = _shown_user(self.username, self.password)
        if self.path:
            scheme = "kvredis" if self.shared_memory else "unix"
            return f"{scheme}://{who}{self.path}" + (f"?db={self.db}" if self.db else "")
        scheme = "kvredis" if self.shared_memory else "redis" if self.tls is None else "rediss"
        return f"{scheme}://{who}{_joined((self.host, self.port))}" + (f"/{self.db}" if self.db else "")


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """A master by the name under which Sentinels watch it. Credentials and `db` are for the master; TLS is for all."""

    sentinels: tuple[tuple[str, int], ...]
    service: str = SERVICE_DEFAULT
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    tls: Tls | None = None
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)

    def server(self, host: str, port: int) -> Address:
        """Give the master's own address, once it is known."""
        return Address(host, port, "", self.username, self.password, self.db, self.tls)

    def __str__(self) -> str:
        """Return a URL that is safe to log: it never holds a password."""
        scheme = "redis-sentinel" if self.tls is None else "rediss-sentinel"
        where = f"{_joined(*self.sentinels)}/{quote(self.service, safe='')}" + (f"/{self.db}" if self.db else "")
        return f"{scheme}://{_shown_user(self.username, self.password)}{where}"


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Some nodes of a Redis Cluster, any of which tells of all others; credentials and TLS are the same everywhere."""

    nodes: tuple[tuple[str, int], ...]
    username: str = ""
    password: str = field(default="", repr=False)
    tls: Tls | None = None

    def server(self, host: str, port: int) -> Address:
        """Give the address of one node."""
        return Address(host, port, "", self.username, self.password, 0, self.tls)

    def __str__(self) -> str:
        """Return a URL that is safe to log: it never holds the password."""
        scheme = "redis-cluster" if self.tls is None else "rediss-cluster"
        return f"{scheme}://{_shown_user(self.username, self.password)}{_joined(*self.nodes)}"


RemoteAddress = Address | SentinelAddress | ClusterAddress


def redact(url: str) -> str:
    """Return `url` with its passwords replaced by stars, for messages, and with escapes for what is not UTF-8; works on
    malformed URLs as well."""
    url = url.encode("utf-8", "backslashreplace").decode()
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    before, query_mark, query = rest.partition("?")
    words = [_redacted_word(word) for word in query.split("&")]
    who, at, where = (before + query_mark + "&".join(words)).rpartition("@")
    if at:
        who = f"{who.partition(':')[0]}:***@" if ":" in who else "***@"
    return scheme + mark + who + where


def parse_remote(url: str, *, key: str = "remote_url", source: str = "url") -> RemoteAddress:
    """Read a URL of any scheme in SCHEMES.

    One server: `scheme://[[user]:password@]host[:port][/db]`, `unix://[[user]:password@]/path[?db=n]`. Behind
    Sentinels: `scheme://[[user]:password@]host[:port][,host[:port]...][/service[/db]]`, with the options
    `sentinel_username` and `sentinel_password`. A cluster: the same without service and db. Schemes with an s, as
    rediss:// and rediss-cluster://, mean TLS and take TLS_OPTIONS. All parts are percent-decoded.

    Raises ConfigError, with the passwords hidden, for anything else.
    """
    try:
        return _parse(url)
    except ValueError as error:
        raise ConfigError(key, redact(url), source, _SECRET.sub(r"\1***", str(error))) from None


def parse_url(url: str, *, key: str = "remote_url", source: str = "url") -> Address:
    """As parse_remote, for a caller who talks to one server that is known beforehand."""
    address = parse_remote(url, key=key, source=source)
    if not isinstance(address, Address):
        raise ConfigError(key, redact(url), source, f"want one server: {FORMS['server']}")
    return address


# ---- inside ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Parts:
    """A URL taken apart; options are taken out of it by those who know them."""

    username: str
    password: str
    where: str
    path: str
    options: dict[str, str]
    tls: Tls | None

    def hosts(self, port_default: int) -> tuple[tuple[str, int], ...]:
        return tuple(_host(word, port_default) for word in self.where.split(","))

    def db(self, in_path: str) -> int:
        text = self.options.pop("db", in_path)
        if text and not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ValueError(f"the database must be a number, not {text!r}")
        return int(text or 0)


def _parse(url: str) -> RemoteAddress:
    found = _URL.fullmatch(url.strip())
    shape, secure = SCHEMES.get(found[1].lower(), (None, False)) if found else (None, False)
    if found is None or shape is None:
        raise ValueError("want " + "; ".join(FORMS.values()))
    scheme, who_where, path, query, fragment = found.groups()
    options = _options(query or "")
    if fragment is not None or ((shape != "server" or who_where) and "@" in "".join((path, *options))):
        raise ValueError("a / or ? or # in a user, password or path must be percent-encoded")  # and is not shown
    who, _, where = who_where.rpartition("@")
    tls = _tls(scheme, secure, options)
    before, _, behind = who.partition(":")
    username, password = _credential("username", before, options), _credential("password", behind, options)
    if username and not password:
        raise ValueError("a user without a password; write user:password@ or :password@")
    parts = _Parts(username, password, where, path, options, tls)
    is_ours = scheme.lower() == "kvredis"
    is_path = scheme.lower() == "unix" or (is_ours and not where)
    address: RemoteAddress = _unix(parts) if is_path else _BY_SHAPE[shape](parts)
    if is_ours and isinstance(address, Address):
        address = replace(address, shared_memory=True)
    for name in options:
        raise ValueError(f"unknown option {name!r} after the question mark")
    return address


def _options(query: str) -> dict[str, str]:
    options = parse_qs(query, keep_blank_values=True, errors="surrogateescape")
    for name, values in options.items():
        if len(values) > 1:
            raise ValueError(f"{name} is given twice")
    return {name: value for name, (value,) in options.items()}


def _credential(name: str, in_front: str, options: dict[str, str]) -> str:
    as_option = options.pop(name, "")
    if in_front and as_option:
        raise ValueError(f"{name} is given twice")
    return _text(name, unquote(in_front, errors="surrogateescape") or as_option)


def _text(name: str, value: str) -> str:
    """Give `value`, unless it has bytes that are not UTF-8: from a URL's %FF, or as they are in the environment."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the {name} is not UTF-8") from None
    return value


def _tls(scheme: str, secure: bool, options: dict[str, str]) -> Tls | None:
    given: dict[str, str] = {name: options.pop(name) for name in TLS_OPTIONS if name in options}
    if secure:
        return Tls.of(given)
    if given:
        raise ValueError(f"{next(iter(given))} is for TLS, and {scheme}:// is not; rediss:// would be")
    return None


def _unix(parts: _Parts) -> Address:
    path = unquote(parts.path, errors="surrogateescape")  # as the system has it
    if parts.where or not path.startswith("/") or "\0" in path:
        raise ValueError("a unix socket wants an absolute path, as in unix:///run/kvredis.sock")
    return Address("", PORT_DEFAULT, path, parts.username, parts.password, parts.db(""))


def _server(parts: _Parts) -> Address:
    (host, port), *more = parts.hosts(PORT_DEFAULT)
    if more:
        raise ValueError(f"several hosts: {FORMS['sentinel']} and {FORMS['cluster']} take them")
    db = parts.db(parts.path.strip("/"))
    return Address(host, port, "", parts.username, parts.password, db, parts.tls)


def _sentinel(parts: _Parts) -> SentinelAddress:
    sentinels = parts.hosts(SENTINEL_PORT_DEFAULT)
    service, _, db_text = parts.path.strip("/").partition("/")
    db = parts.db(db_text)
    names = ("sentinel_username", "sentinel_password")
    user, password = (_text(name, parts.options.pop(name, "")) for name in names)
    if user and not password:
        raise ValueError("a Sentinel user without a password; give sentinel_password as well")
    service = _text("service", unquote(service, errors="surrogateescape")) or SERVICE_DEFAULT
    return SentinelAddress(sentinels, service, parts.username, parts.password, db, parts.tls, user, password)


def _cluster(parts: _Parts) -> ClusterAddress:
    nodes = parts.hosts(PORT_DEFAULT)
    if parts.db(parts.path.strip("/")):
        raise ValueError("a Redis Cluster has no database but 0")
    return ClusterAddress(nodes, parts.username, parts.password, parts.tls)


_BY_SHAPE: Final[dict[Shape, Callable[[_Parts], RemoteAddress]]] = {
    "server": _server,
    "sentinel": _sentinel,
    "cluster": _cluster,
}


def _host(word: str, port_default: int) -> tuple[str, int]:
    found = _HOST.fullmatch(word)
    if found is None:
        raise ValueError("want HOST or HOST:PORT" if word else "no host")
    if _NO_HOST.search(found[1] or found[2]):
        raise ValueError(f"{found[1] or found[2]} is no host's name: something was to be put in its place")
    port = int(found[3] or port_default)
    if not 0 < port < 65536:
        raise ValueError(f"a port is from 1 to 65535, not {port}")
    return unquote(found[1] or found[2]).lower(), port


def _joined(*places: tuple[str, int]) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in places)


def _shown_user(username: str, password: str) -> str:
    return f"{quote(username, safe='')}:***@" if password else ""


def _redacted_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    return f"{name}=***" if equals and unquote(name) in _SECRETS else _SECRET.sub(r"\1***", word)


# ---- remote_url and the entries of extra_config ------------------------------------------------------------------

CONNECTION_ENTRIES: Final = ("resp_num_threads", "valkey_num_workers", "valkey_sync_num_workers")
_RESP: Final = ("username", "password")
_VALKEY: Final = ("valkey_username", "valkey_password", "valkey_database", "valkey_mode", "tls_enable")
_SERVICE: Final = "redis_service_name"


def merged_url(url: str, entries: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return `url` with all that `entries` have to add, and why each of those that add nothing does not.

    Holds the password in clear. Total: of a URL that is none it makes one that is none either.
    """
    given = {name: value for name, value in entries.items() if value not in (None, "")}
    parts = _Draft(url, given)
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


class _Draft:
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
        """Add the credentials; those of the URL win as a pair, since half of each is of no user."""
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
    """Percent-encode an entry; what is not UTF-8 stays that, and is refused where the URL is read."""
    return quote(str(value), safe="", errors="surrogatepass")
