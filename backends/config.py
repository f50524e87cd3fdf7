"""One configuration for server and engine alike, in LMCache's language, that never guesses.

The declarations in class Config are the only list of keys: reading files, environment and flags, `config show --origin`
and the CLI's options all derive from it. A bad value stops the program with its source and line; an unknown key, a key
of LMCache that means nothing here and a key that does not take effect yet each give one line of warning.

Precedence, lowest first: defaults, the YAML file named by LMCACHE_CONFIG_FILE, LMCACHE_* and KVREDIS_* in the
environment, overrides (command-line flags). Where LMCache differs: it drops the bad value and goes on.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from kvredis.storage.arena import HugepageMode
from kvredis.storage.errors import ConfigError
from kvredis.storage.options import GIB, StoreOptions

from . import values
from .address import redact
from .lmcache_names import FOREIGN_ENV, FOREIGN_KEYS
from .values import Parser

logger = logging.getLogger(__name__)

FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
OTHER_VARIABLES = frozenset({FILE_VARIABLE, "KVREDIS_EVENT_LOOP"})
"""Read elsewhere and no keys."""
SECTION = "kvredis"
DEFAULT_ORIGIN = "default"


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key as declared in Config: what reads it, and all the names that it goes by."""

    name: str
    default: Any
    parse: Parser
    help: str
    metavar: str
    server: bool  # lives under `kvredis:` in the file and as KVREDIS_* in the environment
    secret: bool  # never shown
    later: bool  # read and checked, without effect so far: a value other than the default gives a warning

    @property
    def env(self) -> str:
        """Return the name of its environment variable."""
        return ("KVREDIS_" if self.server else "LMCACHE_") + self.name.upper()

    @property
    def flag(self) -> str:
        """Return the name of its command-line option."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_flag(self) -> bool:
        """Say whether it is a switch: true or false."""
        return isinstance(self.default, bool)


def _key(
    default: Any,
    parse: Parser,
    metavar: str,
    help: str,
    *,
    server: bool = False,
    secret: bool = False,
    later: bool = False,
) -> Any:
    declared = Key("", default, parse, help, metavar, server, secret, later)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={"key": declared})
    return dataclasses.field(default=default, metadata={"key": declared})


def _server(default: Any, parse: Parser, metavar: str, help: str, *, secret: bool = False, later: bool = False) -> Any:
    return _key(default, parse, metavar, help, server=True, secret=secret, later=later)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, checked. Make one with `Config.load()`; the bare constructor gives the defaults, unchecked.

    `origin` says for each key where its value is from: "default", "FILE:LINE", "env NAME" or "--flag".
    `warnings` holds the lines that were logged while loading.
    """

    chunk_size: int = _key(256, values.whole(1), "N", "tokens per chunk")
    local_cpu: bool = _key(True, values.flag, "BOOL", "keep the hot cache in the arena; false = staging only")
    max_local_cpu_size: float = _key(5.0, values.size_gib, "SIZE", "the arena, in GiB or with a unit (5GB, 512MB)")
    local_cpu_use_hugepages: bool = _key(False, values.flag, "BOOL", "2 MiB pages, or fail with what is missing")
    local_disk: str | None = _key(
        None, values.optional(values.directory), "DIR", "directory of the disk tier", later=True
    )
    max_local_disk_size: float = _key(0.0, values.size_gib_or_none, "SIZE", "the disk tier, 0 = none", later=True)
    remote_url: str | None = _key(
        None,
        values.optional(values.server_url),
        "URL",
        "server that an engine stores to: redis://HOST:PORT, unix:///PATH",
    )
    remote_serde: str = _key(
        "naive", values.choice("naive", absent="naive"), "NAME", "how values are encoded; naive = as they are"
    )
    cache_policy: str = _key(
        "LRU", values.choice("LRU", "LFU", "FIFO", "MRU", "S3FIFO"), "NAME", "what is evicted first", later=True
    )
    save_decode_cache: bool = _key(False, values.flag, "BOOL", "store the KV of generated tokens too", later=True)
    save_unfull_chunk: bool = _key(False, values.flag, "BOOL", "store a prompt's last, partial chunk too")
    use_layerwise: bool = _key(False, values.flag, "BOOL", "store and load layer by layer", later=True)
    min_retrieve_tokens: int | str = _key(
        0, values.whole_or("auto", 0), "N", "do not load fewer tokens than this; auto = by measured speed", later=True
    )
    blocking_timeout_secs: float = _key(10.0, values.seconds, "SECONDS", "a slower remote is a miss")
    pre_caching_hash_algorithm: str = _key(
        "sha256_cbor", values.text, "NAME", "hash of the token chunks; kvredis always chains sha256", later=True
    )
    extra_config: Mapping[str, Any] = _key({}, values.mapping, "JSON", "LMCache's bag of further settings", later=True)

    bind: tuple[str, ...] = _server(("127.0.0.1",), values.words, "HOST", "addresses that the server listens on")
    port: int = _server(6379, values.whole(0, 65535), "N", "TCP port, 0 takes a free one")
    unixsocket: str | None = _server(None, values.optional(values.text), "PATH", "unix socket to listen on as well")
    requirepass: str = _server("", values.text, "PASSWORD", "password that clients must give", secret=True)
    maxclients: int = _server(10_000, values.whole(1), "N", "connections at the same time")
    hugepages: str = _server(
        "auto", values.choice(*(mode.value for mode in HugepageMode)), "MODE", "2 MiB pages: auto, off, thp or require"
    )
    loglevel: str = _server(
        "notice", values.choice("debug", "verbose", "notice", "warning"), "LEVEL", "how much is logged"
    )
    prefault: int = _server(0, values.whole(0, 256), "N", "threads that touch the arena's pages at the start, 0 = none")
    page_lock: bool = _server(
        False, values.flag, "BOOL", "lock the arena's pages in memory, for a GPU where there is one"
    )
    aclfile: str | None = _server(None, values.optional(values.text), "PATH", "users and their rights", later=True)
    tls_port: int = _server(0, values.whole(0, 65535), "N", "port for TLS, 0 = none", later=True)
    tls_cert_file: str | None = _server(None, values.optional(values.text), "PATH", "certificate", later=True)
    tls_key_file: str | None = _server(None, values.optional(values.text), "PATH", "its key", later=True)
    tls_ca_cert_file: str | None = _server(None, values.optional(values.text), "PATH", "whom to trust", later=True)
    metrics_port: int = _server(0, values.whole(0, 65535), "N", "port for /metrics and /health, 0 = none", later=True)

    origin: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def load(
        cls,
        file: Path | None = None,
        env: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Self:
        """Read every source and return the checked result.

        `file` wins over LMCACHE_CONFIG_FILE; `env` None means os.environ; an override of None means: not given.
        Raises ConfigError for a value that cannot be used, for a file that cannot be read and for an unknown override.
        """
        env = os.environ if env is None else env
        found, warnings = _Found({}, {}), list[str]()
        named = env.get(FILE_VARIABLE, "").strip()
        if file is not None or named:
            _read_file(Path(file or values.unquote(named)), found, warnings)
        _read_env(env, found, warnings)
        for name, raw in (overrides or {}).items():
            if raw is None:
                continue
            if name not in KEYS:
                raise ConfigError(name, raw, "flag", "unknown key" + _nearest(name, KEYS))
            found.take(KEYS[name], raw, KEYS[name].flag)
        for key in KEYS.values():
            if key.later and found.values.get(key.name, key.default) != key.default:
                warnings.append(f"{found.origin[key.name]}: {key.name} has no effect yet in this version")
        for line in warnings:
            logger.warning("%s", line)
        origin = {name: found.origin.get(name, DEFAULT_ORIGIN) for name in KEYS}
        return cls(**found.values, origin=origin, warnings=tuple(warnings))

    @property
    def capacity_bytes(self) -> int:
        """Return the arena's size in bytes."""
        return int(self.max_local_cpu_size * GIB)

    @property
    def hugepage_mode(self) -> HugepageMode:
        """Return what the arena shall be made of: `hugepages` where given, else what LMCache's switch asks for.

        The switch left alone means auto: hugepages if there are any. true demands them and false does without.
        """
        if self.origin.get("hugepages", DEFAULT_ORIGIN) != DEFAULT_ORIGIN or self.hugepages != "auto":
            return HugepageMode(self.hugepages)
        if self.local_cpu_use_hugepages:
            return HugepageMode.REQUIRE
        if self.origin.get("local_cpu_use_hugepages", DEFAULT_ORIGIN) != DEFAULT_ORIGIN:
            return HugepageMode.OFF
        return HugepageMode.AUTO

    def store_options(self) -> StoreOptions:
        """Return what a Store is opened with under this configuration."""
        return StoreOptions(
            capacity_bytes=self.capacity_bytes,
            hugepages=self.hugepage_mode,
            cache_policy="LRU",  # the others are read but not built yet; loading said so
            prefault_threads=self.prefault,
            page_lock=self.page_lock,
        )

    def shown(self) -> dict[str, Any]:
        """Return key -> value fit for JSON and for anyone's eyes: passwords are replaced by stars."""
        result: dict[str, Any] = {}
        for key in KEYS.values():
            value = getattr(self, key.name)
            if key.secret and value:
                value = "***"
            elif key.name == "remote_url" and value:
                value = redact(value)
            result[key.name] = list(value) if isinstance(value, tuple) else value
        return result


KEYS: dict[str, Key] = {
    field.name: dataclasses.replace(field.metadata["key"], name=field.name)
    for field in dataclasses.fields(Config)
    if "key" in field.metadata
}


@dataclass(slots=True)
class _Found:
    values: dict[str, Any]
    origin: dict[str, str]

    def take(self, key: Key, raw: Any, source: str) -> None:
        try:
            self.values[key.name] = key.parse(raw, key.name, source)
        except ConfigError as error:
            if key.secret:
                raise ConfigError(key.name, "***", source, error.reason) from None
            raise
        self.origin[key.name] = source


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _read_env(env: Mapping[str, str], found: _Found, warnings: list[str]) -> None:
    by_env = {key.env: key for key in KEYS.values()}
    for name in sorted(env):
        if not name.startswith(("LMCACHE_", "KVREDIS_")) or name in OTHER_VARIABLES:
            continue
        if key := by_env.get(name):
            found.take(key, values.unquote(env[name]), f"env {name}")
        elif name in FOREIGN_ENV:
            warnings.append(f"env {name}: a setting of LMCache without a meaning in kvredis")
        else:
            near = difflib.get_close_matches(name, by_env, n=1)
            warnings.append(f"env {name}: unknown" + (f"; did you mean {near[0]}?" if near else ""))


def _read_file(path: Path, found: _Found, warnings: list[str]) -> None:
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(FILE_VARIABLE, str(path), str(path), f"cannot be read: {error}") from None
    try:
        root = loader.get_single_node()
        for name, node, line in _entries(loader, root, path, warnings):
            source = f"{path}:{line}"
            if name == SECTION:
                for inner, inner_node, inner_line in _entries(loader, node, path, warnings):
                    inner_source = f"{path}:{inner_line}"
                    _take_from_file(
                        inner, loader.construct_object(inner_node, deep=True), inner_source, found, warnings, True
                    )
            else:
                _take_from_file(name, loader.construct_object(node, deep=True), source, found, warnings, False)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(FILE_VARIABLE, str(path), f"{path}:{line}", f"not YAML: {error.problem}") from None
    finally:
        loader.dispose()


def _entries(
    loader: yaml.SafeLoader, node: yaml.Node | None, path: Path, warnings: list[str]
) -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield (name, value node, line) of a mapping; an empty document or section has none."""
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            FILE_VARIABLE, str(path), f"{path}:{node.start_mark.line + 1}", "want a mapping of keys to values"
        )
    loader.flatten_mapping(node)
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name, line = str(loader.construct_object(key_node)), key_node.start_mark.line + 1
        if name in seen:
            warnings.append(f"{path}:{line}: {name} is given twice; this line wins over line {seen[name]}")
        seen[name] = line
        yield name, value_node, line


def _take_from_file(name: str, raw: Any, source: str, found: _Found, warnings: list[str], in_section: bool) -> None:
    key = KEYS.get(name)
    if key is not None and key.server == in_section:
        found.take(key, raw, source)
    elif key is not None:
        where = (
            f"belongs under `{SECTION}:`" if key.server else f"belongs at the top of the file, not under `{SECTION}:`"
        )
        warnings.append(f"{source}: {name} {where}; ignored here")
    elif name in FOREIGN_KEYS and not in_section:
        warnings.append(f"{source}: {name}: a setting of LMCache without a meaning in kvredis")
    else:
        here = {known.name: known for known in KEYS.values() if known.server == in_section}
        warnings.append(f"{source}: {name}: unknown key" + (_nearest(name, here) or _nearest(name, KEYS)))
