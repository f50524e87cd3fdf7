"""The connection of all subcommands to a running server: its address, the user, and how it is asked.

The URL is any that remote_url may be. A cluster is its masters, each of them asked by itself, so that whatever is said
about one server (SCAN, KV.JOB, INFO) is said the same way about many. redis-py carries the words: these commands are
for people and scripts, and `get` of one block is all that they move.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import click

from kvredis.backends.config.url import Address, ClusterAddress, RemoteAddress, parse_remote
from kvredis.backends.resp.sentinel import SentinelResolver
from kvredis.cli.config import config_file_option, load_config
from kvredis.cli.numbers import Number
from kvredis.storage.errors import BackendError

from .errors import moved, told

URL_DEFAULT: Final = "redis://127.0.0.1:6379"
PASSWORD_VARIABLE: Final = "REDISCLI_AUTH"
"""Where redis-cli looks for a password that should not stand in a command line."""
TIMEOUT_S: Final = 10.0
SCAN_COUNT: Final = 1000
PIPELINE_MAX: Final = 1000
"""Commands that are sent before their replies are read."""
PIECE_BYTES: Final = 1 << 20
"""A value goes in pieces of so much, each of which has the timeout to itself."""

TOGETHER: Final = 100
"""Keys that are asked about in one exchange, where each of them is a command."""
_CONTAINERS: Final = ("CLIENT", "MEMORY", "SLOWLOG")
"""Commands whose subcommands INFO counts one by one."""

Word = bytes | str | int | memoryview
Facts = dict[str, Any]
"""What is known of a block, by KV.META's names."""
Client = Any
"""redis.Redis or redis.RedisCluster, most of whose methods have no types; loaded when it is needed."""
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class NotAllowed(BackendError):
    """The server knows this user and does not let him ask that."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is said to be and how long it may take, before the first connection."""

    address: RemoteAddress
    timeout_s: float = TIMEOUT_S

    def open(self) -> Servers:
        """Connect. Raises BackendError with a line for the user."""
        if isinstance(self.address, ClusterAddress):
            return _open_cluster(self.address, self.timeout_s)
        if isinstance(self.address, Address):
            return Servers((Connection(self.address, self.timeout_s),))
        master = SentinelResolver(self.address).master(self.timeout_s)
        return Servers((Connection(master, self.timeout_s),))


class Connection:
    """One server. Every method raises BackendError whose text is fit to be printed."""

    def __init__(self, address: RemoteAddress, timeout_s: float, client: Client = None) -> None:
        self.address = address
        self._client = _client(address, timeout_s) if client is None and isinstance(address, Address) else client
        self._about: dict[str, Any] | None = None
        self._knows_walk, self._is_untouching = True, False
        self.asked: dict[str, int] = {}
        """Commands that were asked through here, by the name that INFO counts them under."""
        self.looked = 0
        """Lookups among them that INFO counts as hits."""

    def __str__(self) -> str:
        """Return the URL without its password."""
        return str(self.address)

    def ask(self, *words: Word) -> Any:
        """One command and its reply; maps are lists of names and values (`mapped` makes them dicts)."""
        assert self._client is not None
        try:
            reply = self._client.execute_command(*words)
        except Exception as error:
            raise self._failure(error, words) from error
        self._count(words)
        return reply

    def store(self, key: bytes, value: memoryview, *options: Word) -> Any:
        """SET, whose value is sent from where it lies; redis-py would copy it, and time it as a whole."""
        assert self._client is not None
        pool = self._client.connection_pool
        link = None
        try:
            link = pool.get_connection()
            link.send_packed_command(_packed_set(key, value, options))
            return link.read_response()
        except Exception as error:
            limit = self._value_bytes_max() if _hangs_up(error) else None
            if limit is not None and len(value) > limit:
                bound = f"{self} takes no value above {limit:,} bytes (proto-max-bulk-len)"
                raise BackendError(f"{bound}, and this one has {len(value):,}") from error
            raise self._failure(error, ("SET",)) from error
        finally:
            if link is not None:
                pool.release(link)

    def _value_bytes_max(self) -> int | None:
        """The longest value that the server takes, None where it does not tell. A longer one it refuses at its length,
        and hangs up: what it has said of it is mostly lost behind the bytes that are still on their way."""
        try:
            told = mapped(self.ask("CONFIG", "GET", "proto-max-bulk-len"))
            return int(told["proto-max-bulk-len"])
        except (BackendError, KeyError, ValueError):
            return None

    def ask_each(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Many commands in one exchange, at most PIPELINE_MAX of them; an error reply is in its reply's place."""
        assert self._client is not None
        assert len(commands) <= PIPELINE_MAX
        try:
            pipeline = self._client.pipeline(transaction=False)
            for words in commands:
                pipeline.execute_command(*words)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        except Exception as error:
            raise self._failure(error, commands[0] if commands else ()) from error
        for words, reply in zip(commands, replies, strict=True):
            # What a server does not know or allow it does not count either.
            if not isinstance(reply, Exception) or str(reply).startswith("WRONGTYPE"):
                self._count(words)
        return replies

    def meta_of(self, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
        """What KV.META says of each key, None for what is gone. Raises BackendError where there is no KV.META."""
        found: list[dict[str, Any] | None] = []
        for reply in self.ask_each([("KV.META", key) for key in keys]):
            if isinstance(reply, Exception):
                raise self._failure(reply, ("KV.META",))
            found.append(None if reply is None else mapped(reply))
        return found

    def scan(self, match: bytes | None = None, count: int = SCAN_COUNT) -> Iterator[list[bytes]]:
        """All keys in batches of about `count`; SCAN's promise: what is there throughout is told at least once."""
        cursor: Word = b"0"
        pattern = () if match is None else ("MATCH", match)
        while True:
            reply = self.ask("SCAN", cursor, *pattern, "COUNT", count)
            cursor, keys = reply[0], reply[1]
            yield list(keys)
            if int(cursor) == 0:
                return

    def walk(
        self, match: bytes | None = None, count: int = SCAN_COUNT, *, ahead: bool = False
    ) -> Iterator[list[tuple[bytes, Facts | None]]]:
        """All keys in batches of about `count`, each with what its server tells of many keys at once.

        Of kvredis that is KV.SCAN's facts; of an older kvredis KV.META's; of a plain Redis the length, for which no key
        counts as used where CLIENT NO-TOUCH is known (7.2), or what it takes in memory if it is no string. None stands
        for a key that has gone meanwhile. With `ahead` kvredis makes the next batch while the caller looks at the last
        one, and another question meanwhile takes another connection. Raises BackendError.
        """
        pattern = () if match is None else ("MATCH", match)
        if self.is_kvredis and self._knows_walk:
            for told in self._slices(("KV.SCAN", *pattern, "COUNT", count), ahead=ahead):
                yield [(key, _facts(facts)) for key, facts in zip(told[::2], told[1::2], strict=True)]
            if self._knows_walk:
                return
        for keys in self.scan(match, count):
            batch: list[tuple[bytes, Facts | None]] = []
            for at in range(0, len(keys), TOGETHER):
                part = keys[at : at + TOGETHER]
                batch += zip(part, self.meta_of(part) if self.is_kvredis else self._sizes_of(part), strict=True)
            yield batch

    def _slices(self, words: Sequence[Word], *, ahead: bool) -> Iterator[list[Any]]:
        """What KV.SCAN tells, slice by slice; nothing where a kvredis of before does not know it."""
        assert self._client is not None
        name, *options = words
        pool = self._client.connection_pool
        link, cursor, is_asked = None, b"0", False
        try:
            while True:
                link = link or pool.get_connection()
                if not is_asked:
                    link.send_command(name, cursor, *options)
                cursor, told = link.read_response()
                self._count(words)
                is_asked = ahead and int(cursor) != 0
                if is_asked:
                    link.send_command(name, cursor, *options)
                else:
                    pool.release(link)
                    link = None
                yield told
                if int(cursor) == 0:
                    return
        except Exception as error:
            if "unknown command" not in str(error).lower():
                raise self._failure(error, words) from error
            self._knows_walk = False
        finally:
            if link is not None:
                link.disconnect()  # with the slice that was asked for and is not wanted
                pool.release(link)

    def _sizes_of(self, keys: Sequence[bytes]) -> list[Facts | None]:
        """How long values are, of a plain Redis."""
        if not self._is_untouching:
            self._is_untouching = True
            self.ask_each([("CLIENT", "NO-TOUCH", "ON")])  # an error is one of before 7.2, where looking is using
        lengths = self.ask_each([("STRLEN", key) for key in keys])
        others = [key for key, length in zip(keys, lengths, strict=True) if isinstance(length, Exception)]
        sizes = iter(self.ask_each([("MEMORY", "USAGE", key) for key in others]))
        told: list[Facts | None] = []
        for length in lengths:
            nbytes = next(sizes) if isinstance(length, Exception) else length
            self.looked += length != 0  # a key of another type has been found as well
            told.append({"nbytes": nbytes if isinstance(nbytes, int) else 0, "tier": "memory"})
        return told

    @property
    def about(self) -> dict[str, Any]:
        """INFO's section on the server, asked once."""
        if self._about is None:
            found = self.ask("INFO", "server")
            self._about = found if isinstance(found, dict) else {}
        return self._about

    @property
    def is_kvredis(self) -> bool:
        """Whether it knows the KV.* commands. A user who may not ask INFO is believed to have named a kvredis."""
        try:
            return "kvredis_version" in self.about
        except NotAllowed:
            return True

    def forget(self) -> None:
        """Drop the connection: what was asked and not answered is of no interest. The next question opens another."""
        if self._client is not None:
            self._client.connection_pool.disconnect()

    def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            self._client.close()

    def _count(self, words: Sequence[Word]) -> None:
        name = "|".join(str(word).lower() for word in words[: 2 if words[0] in _CONTAINERS else 1])
        self.asked[name] = self.asked.get(name, 0) + 1

    def _failure(self, error: BaseException, words: Sequence[Word]) -> BackendError:
        text = str(error)
        if type(error).__name__ in ("MovedError", "AskError") or text.startswith(("MOVED ", "ASK ")):
            return BackendError(moved(text, self.address))
        is_denied = type(error).__name__ == "NoPermissionError" or text.startswith("NOPERM")
        return (NotAllowed if is_denied else BackendError)(told(error, self.address, words))


class Servers:
    """Those that hold the keys: one server, or the masters of a cluster. Ends with the block that it is opened in."""

    def __init__(self, each: Sequence[Connection], cluster: Client = None) -> None:
        self.each = tuple(each)
        self._cluster = cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self.each:
            one.close()
        if self._cluster is not None:
            self._cluster.close()

    def of(self, key: bytes) -> Connection:
        """The server that has, or would have, this key."""
        if self._cluster is None:
            return self.each[0]
        node = self._cluster.get_node_from_key(key)
        name = None if node is None else f"{node.host}:{node.port}"
        return next((one for one in self.each if _name(one.address) == name), self.each[0])

    def by_slot(self, keys: Sequence[bytes]) -> Iterator[tuple[Connection, list[bytes]]]:
        """The keys in groups that one command may name: all of them, or in a cluster those of one slot."""
        if self._cluster is None:
            yield self.each[0], list(keys)
            return
        groups: dict[int, list[bytes]] = {}
        for key in keys:
            groups.setdefault(self._cluster.keyslot(key), []).append(key)
        for group in groups.values():
            yield self.of(group[0]), group


def on_server(command: Decorated) -> Decorated:
    """Add the options that name a server, and give the command a Place as `place`."""

    @click.option("-u", "--url", metavar="URL", help=f"The server; default: remote_url, else {URL_DEFAULT}.")
    @click.option("--user", metavar="NAME", help="Log in as this user; the password is asked for, or in REDISCLI_AUTH.")
    @click.option("--askpass", is_flag=True, help="Ask for the password, so that it stands in no command line.")
    @click.option(
        "--timeout",
        type=Number(0, min_open=True, max=86400),
        default=TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="How long the server may be silent.",
    )
    @config_file_option
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        url: str | None,
        user: str | None,
        askpass: bool,
        timeout: float,
        config_file: Path | None,
        **more: Any,
    ) -> Any:
        address = _address(url, config_file)
        return command(*args, place=Place(_logged_in(address, user, askpass), timeout), **more)

    return wrapped  # type: ignore[return-value]


def whole_url(word: str) -> str:
    """The URL that -u means: HOST:PORT is one without its scheme, and a number alone a port of this machine."""
    where = f"127.0.0.1:{word}" if word.isdecimal() else word
    return where if "://" in where else f"redis://{where}"


def place_of(url: str | None, timeout_s: float) -> Place:
    """The place of a URL as `-u` takes it, without questions to the user; what completion uses."""
    return Place(_logged_in(_address(url, None), None, False), timeout_s)


def mapped(reply: Any) -> dict[str, Any]:
    """A map as RESP2 and RESP3 give it, with text for names and for values that are text."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {_name_text(name): _value(value) for name, value in pairs}


# ---- inside ------------------------------------------------------------------------------------------------------


def _hangs_up(error: Exception) -> bool:
    """Whether a connection has ended, or ends because the server cannot go on from what was said."""
    return type(error).__name__ == "ConnectionError" or "bulk length" in str(error)


@functools.lru_cache(4096)  # blocks of one prompt have the same length, and were used in the same second
def _facts(line: bytes | None) -> Facts:
    """What KV.SCAN says of a key: numbers but for the tier. Nothing of one that this user may not read. Not to be
    changed: keys share it."""
    found: Facts = {}
    for word in (line or b"").decode("ascii", "replace").split():
        name, _, value = word.partition("=")
        found[name] = int(value) if value.isdecimal() else value
    return found


@functools.lru_cache(256)  # the same dozen names in each of a million replies
def _name_text(name: Any) -> str:
    return _text(name)


def _text(word: Any) -> str:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)


def _value(value: Any) -> Any:
    return _text(value) if isinstance(value, bytes) else value


def _address(url: str | None, config_file: Path | None) -> RemoteAddress:
    if url is not None:
        return parse_remote(whole_url(url), key="url", source="-u")
    return parse_remote(load_config(config_file, server=False).remote_url or URL_DEFAULT)


def _logged_in(address: RemoteAddress, user: str | None, askpass: bool) -> RemoteAddress:
    """The address with who we are: what the command line says, else the URL, else REDISCLI_AUTH."""
    password = "" if user else address.password
    if askpass:
        password = click.prompt("Password", hide_input=True, err=True)
    password = password or os.environ.get(PASSWORD_VARIABLE, "")
    if user and not password:
        password = click.prompt("Password", hide_input=True, err=True)
    return replace(address, username=user or address.username, password=password) if password else address


def _packed_set(key: bytes, value: memoryview, options: Sequence[Word]) -> Iterator[bytes | memoryview]:
    """SET as RESP has it, in pieces."""

    def bulk(word: bytes) -> bytes:
        return b"$%d\r\n%b\r\n" % (len(word), word)

    yield b"*%d\r\n%b%b$%d\r\n" % (3 + len(options), bulk(b"SET"), bulk(key), len(value))
    for at in range(0, len(value), PIECE_BYTES):
        yield value[at : at + PIECE_BYTES]
    yield b"\r\n" + b"".join(bulk(str(word).encode()) for word in options)


def _client(address: Address, timeout_s: float) -> Client:
    """A client that tries once: a user at a terminal wants to be told, not to wait."""
    import redis

    where: dict[str, Any] = {"host": address.host, "port": address.port}
    if address.path:
        path = f"\0{address.path[1:]}" if address.path.startswith("@") else address.path
        where = {"unix_socket_path": path}
    if address.tls is not None:
        address.tls.context()  # says which file is at fault; redis-py does not
        where |= address.tls.redis_options()
    return redis.Redis(**where, db=address.db, **_manners(address.username, address.password, timeout_s))


def _manners(username: str, password: str, timeout_s: float) -> dict[str, Any]:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "username": username or None,
        "password": password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # known to every server there is
    }


def _open_cluster(address: ClusterAddress, timeout_s: float) -> Servers:
    import redis
    from redis import cluster as of_cluster

    node_of: Callable[..., Any] = of_cluster.ClusterNode
    options: dict[str, Any] = {} if address.tls is None else address.tls.redis_options()
    try:
        cluster: Client = redis.RedisCluster(
            startup_nodes=[node_of(host, port) for host, port in address.nodes],
            require_full_coverage=False,
            **options,
            **_manners(address.username, address.password, timeout_s),
        )
        each = [
            Connection(address.server(node.host, int(node.port)), timeout_s)
            for node in sorted(cluster.get_primaries(), key=lambda node: str(node.name))
        ]
    except Exception as error:
        raise BackendError(told(error, address)) from error
    return Servers(each, cluster)


def _name(address: RemoteAddress) -> str:
    return f"{address.host}:{address.port}" if isinstance(address, Address) else str(address)
