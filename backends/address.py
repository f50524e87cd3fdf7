"""Where a server is, said as a URL: the one place that reads such URLs, so that engine, CLI and bench agree on them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlsplit

from kvredis.storage.errors import ConfigError

PORT_DEFAULT = 6379
TCP_SCHEMES = ("redis", "valkey", "resp", "kvredis")
LATER_SCHEMES = ("rediss", "valkeys", "redis-sentinel", "redis-cluster", "valkey-sentinel", "valkey-cluster")


@dataclass(frozen=True, slots=True)
class Address:
    """One server and who we are to it: a TCP host and port, or else the path of a unix socket."""

    host: str = "127.0.0.1"
    port: int = PORT_DEFAULT
    path: str = ""
    username: str = ""
    password: str = ""
    db: int = 0

    def __str__(self) -> str:
        """Return a URL that is safe to log: it never holds the password."""
        who = f"{quote(self.username, safe='')}:***@" if self.password else ""
        if self.path:
            return f"unix://{who}{self.path}" + (f"?db={self.db}" if self.db else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis://{who}{host}:{self.port}" + (f"/{self.db}" if self.db else "")


def redact(url: str) -> str:
    """Return `url` with its password replaced by stars, for messages; works on malformed URLs as well."""
    scheme, mark, rest = url.partition("://")
    before, query_mark, query = rest.partition("?")
    who, at, where = before.rpartition("@")
    if at:
        before = f"{who.partition(':')[0]}:***@{where}" if ":" in who else f"***@{where}"
    words = ["password=***" if word.startswith("password=") else word for word in query.split("&")]
    return scheme + mark + before + query_mark + "&".join(words) if mark else url


def parse_url(url: str, *, key: str = "remote_url", source: str = "url") -> Address:
    """Read redis://, valkey://, resp:// and kvredis:// (TCP) and unix:// or kvredis:///path (unix socket).

    Forms: `scheme://[[user]:password@]host[:port][/db]` and `unix://[[user]:password@]/path[?db=n]`; user and password
    are percent-decoded. Raises ConfigError, with the password hidden, for anything else.
    """

    def bad(reason: str) -> ConfigError:
        return ConfigError(key, redact(url), source, reason)

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise bad(f"not a URL of a server: {error}") from None
    if parts.scheme in LATER_SCHEMES:
        raise bad(f"{parts.scheme}:// is not supported yet; use redis:// or unix://")
    if parts.scheme != "unix" and parts.scheme not in TCP_SCHEMES:
        raise bad("want redis://HOST:PORT, unix:///PATH or kvredis://HOST:PORT")
    query = parse_qs(parts.query, keep_blank_values=True)
    for name in query:
        if name not in ("db", "password", "username"):
            raise bad(f"unknown option {name!r} after the question mark")
    username = unquote(parts.username or "") or query.get("username", [""])[-1]
    password = unquote(parts.password or "") or query.get("password", [""])[-1]
    if parts.username and parts.password is None:
        raise bad("a user without a password; write user:password@ or :password@")
    is_unix = parts.scheme == "unix" or (parts.scheme == "kvredis" and not parts.hostname)
    path = unquote(parts.path) if is_unix else ""
    if is_unix and (parts.hostname or not path.startswith("/")):
        raise bad("a unix socket wants an absolute path, as in unix:///run/kvredis.sock")
    if not is_unix and not parts.hostname:
        raise bad("no host")
    db_text = query["db"][-1] if "db" in query else ("" if is_unix else parts.path.strip("/"))
    if db_text and not (db_text.isascii() and db_text.isdigit()):
        raise bad(f"the database must be a number, not {db_text!r}")
    return Address(
        host=parts.hostname or "",
        port=PORT_DEFAULT if port is None else port,
        path=path,
        username=username,
        password=password,
        db=int(db_text or 0),
    )
