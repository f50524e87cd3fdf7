"""One configuration for server and engine alike, in LMCache's language, that never guesses.

The declarations in class Config are the only list of keys: reading files, environment and flags (sources.py), `config
show --origin`, the CLI's options and the reference in docs/ (scripts/docs_site.py) all derive from it. A bad value
stops the program with its source and line, and so does an unknown key in the file's section `kvredis:`, which is ours
alone; an unknown key elsewhere and a key of LMCache that means nothing here each give one line of warning.

Precedence, lowest first: defaults, the YAML file named by LMCACHE_CONFIG_FILE, LMCACHE_* and KVREDIS_* in the
environment, overrides (command-line flags). Where LMCache differs: it drops the bad value and goes on. The entries of
extra_config are merged from source to source, where LMCache's environment drops the file's.

To add a key: a line in class Config, with its default, its parser (parsers.py: how one value is checked) and its help.
What must fit together with other keys is a rule in rules.py. `_server` declares keys of the section `kvredis:`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvredis.storage.disk.recovery import DiskOptions
from kvredis.storage.eviction.base import POLICIES, REDIS_POLICIES
from kvredis.storage.memory.arena import HugepageMode
from kvredis.storage.options import GIB, StoreOptions

from . import parsers
from .parsers import Parser
from .rules import ALLKEYS, check_all
from .sources import FILE_VARIABLE, Found, Key
from .sources import SECTION as SECTION
from .url import connections_entry, merged_url

logger = logging.getLogger(__name__)

DEFAULT_ORIGIN = "default"
MIB = 1024 * 1024
HASH_ALGORITHMS = ("sha256_cbor", "sha256", "sha256_cbor_64bit", "xxhash", "xxhash_cbor", "builtin")


def _key(
    default: Any,
    parse: Parser,
    metavar: str,
    help: str,
    *,
    server: bool = False,
    engine: bool = True,
    secret: bool = False,
    merged: bool = False,
) -> Any:
    declared = Key("", default, parse, help, metavar, server, engine, secret, merged)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={"key": declared})
    return dataclasses.field(default=default, metadata={"key": declared})


def _server(default: Any, parse: Parser, metavar: str, help: str, *, engine: bool = False, secret: bool = False) -> Any:
    """Declare a key of the section `kvredis:`; `engine` where an engine's own store reads it as well."""
    return _key(default, parse, metavar, help, server=True, engine=engine, secret=secret)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, checked. Make one with `Config.load()`; the bare constructor gives the defaults, unchecked.

    `origin` says for each key where its value is from: "default", "FILE:LINE", "env NAME" or "--flag", for extra_config
    all of them with commas between. A key that an entry of extra_config stands for has that entry's place and name.
    `entry_origin` says it of "key.entry" for keys that are mappings. `warnings` holds the lines that were logged while
    loading, `file` is the one that was read.
    """

    chunk_size: int = _key(256, parsers.whole(1), "N", "tokens per chunk")
    local_cpu: bool = _key(True, parsers.flag, "BOOL", "keep the hot cache in the arena; false = staging only")
    max_local_cpu_size: float = _key(5.0, parsers.size_gib, "SIZE", "the arena, in GiB or with a unit (5GB, 512MB)")
    local_cpu_use_hugepages: bool = _key(False, parsers.flag, "BOOL", "2 MiB pages, or fail with what is missing")
    local_disk: str | None = _key(
        None,
        parsers.optional(parsers.directory, "a directory"),
        "DIR",
        "directory of the disk tier, false = none; needs max_local_disk_size too",
    )
    max_local_disk_size: float = _key(
        0.0,
        parsers.size_gib_or_none,
        "SIZE",
        "the disk tier, in GiB or with a unit, 256 TiB at most, 0 = none; needs local_disk as well",
    )
    remote_url: str | None = _key(
        None,
        parsers.optional(parsers.server_url, "a URL"),
        "URL",
        "server that an engine stores to: redis://HOST:PORT, unix:///PATH",
    )
    remote_serde: str = _key(
        "naive", parsers.serde, "NAME", "how values are encoded; naive = as they are, and nothing else is here"
    )
    cache_policy: str = _key("LRU", parsers.choice(*POLICIES), "NAME", f"what is evicted first: {', '.join(POLICIES)}")
    save_decode_cache: bool = _key(False, parsers.flag, "BOOL", "store the KV of generated tokens too")
    save_unfull_chunk: bool = _key(False, parsers.flag, "BOOL", "store a prompt's last, partial chunk too")
    use_layerwise: bool = _key(False, parsers.flag, "BOOL", "store and load layer by layer, where an engine can (vLLM)")
    min_retrieve_tokens: int | str = _key(
        0, parsers.whole_or("auto", 0), "N", "do not load fewer tokens than this; auto = by measured speed"
    )
    max_load_chunks: int = _key(
        1024, parsers.whole(1), "N", "chunks that engines with paged KV may be loading at a time; more are computed"
    )
    wait_for_kv: bool = _key(
        False,
        parsers.flag,
        "BOOL",
        "wait for KV that another engine is computing, as long as computing it takes (vLLM)",
    )
    use_gpu_memory: bool = _key(
        True,
        parsers.flag,
        "BOOL",
        "write blocks to the GPU memory of a server on this host that has some, and read there those that lie there"
        " (vLLM, with local_cpu: false)",
    )
    state_bytes_per_prompt: int | None = _key(
        None,
        parsers.optional(parsers.memory(1)),
        "BYTES",
        "bound on the states of recurrent layers (Mamba) that are stored of a prompt; none = by measured speed",
    )
    verify_blocks: bool = _key(True, parsers.flag, "BOOL", "checksums for the blocks of engines with paged KV")
    bandwidth_gb_s: float = _key(
        0.0, parsers.gb_per_s_or_none, "GB/S", "bound on what such an engine moves, loads before stores; 0 = none"
    )
    blocking_timeout_secs: float = _key(10.0, parsers.seconds, "SECONDS", "a slower remote is a miss")
    pre_caching_hash_algorithm: str = _key(
        "sha256_cbor",
        parsers.choice(*HASH_ALGORITHMS),
        "NAME",
        "hash of the token chunks; builtin wants PYTHONHASHSEED set to a number",
    )
    extra_config: Mapping[str, Any] = _key(
        {}, parsers.mapping, "JSON", "LMCache's bag of further settings", merged=True
    )

    # -- the server: where it listens
    bind: tuple[str, ...] = _server(
        ("127.0.0.1",), parsers.words, "HOST", "addresses to listen on; * and ::* = all, -HOST = if there is such a one"
    )
    port: int = _server(6379, parsers.port("none"), "N", "TCP port; 0 takes a free one, none opens none")
    unixsocket: str | None = _server(None, parsers.optional(parsers.text), "PATH", "unix socket to listen on as well")
    unixsocketperm: str | None = _server(
        None,
        parsers.optional(parsers.file_mode, "three octal digits"),
        "MODE",
        "the socket file's mode, three octal digits",
    )
    protected_mode: bool = _server(
        True, parsers.flag, "BOOL", "without a password take clients of this machine alone, whatever bind says"
    )
    requirepass: str = _server("", parsers.text, "PASSWORD", "password that clients must give", secret=True)
    aclfile: str | None = _server(None, parsers.optional(parsers.text), "PATH", "users and their rights")
    tls_port: int = _server(0, parsers.port("free"), "N", "port for TLS; 0 opens none, free takes a free one")
    tls_cert_file: str | None = _server(None, parsers.optional(parsers.text), "PATH", "the server's certificate, PEM")
    tls_key_file: str | None = _server(
        None, parsers.optional(parsers.text), "PATH", "its key, PEM, unless that is in the same file"
    )
    tls_key_file_pass: str = _server("", parsers.text, "PASSWORD", "password of the key", secret=True)
    tls_ca_cert_file: str | None = _server(
        None, parsers.optional(parsers.text), "PATH", "authorities whose certificates clients may show, PEM"
    )
    tls_auth_clients: str = _server(
        "yes", parsers.choice("yes", "no", "optional"), "yes|no|optional", "whether TLS clients must show a certificate"
    )
    tls_protocols: tuple[str, ...] = _server(
        ("TLSv1.2", "TLSv1.3"), parsers.some_of("TLSv1.2", "TLSv1.3"), "VERSION", "versions of TLS"
    )
    tls_ciphers: str | None = _server(
        None, parsers.optional(parsers.text), "LIST", "ciphers of TLS 1.2, in OpenSSL's notation"
    )
    metrics_port: int = _server(
        0,
        parsers.port("free"),
        "N",
        "HTTP port for /metrics, /health and a page, on the addresses of bind; 0 opens none, free takes a free one; "
        "https where tls_port is set and port is none",
    )
    # -- the server: bounds
    maxclients: int = _server(10_000, parsers.whole(1), "N", "connections at the same time")
    timeout: int = _server(0, parsers.whole(0), "SECONDS", "hang up on a client that is idle for so long, 0 = never")
    tcp_keepalive: int = _server(
        300, parsers.whole(0), "SECONDS", "have the kernel ask a silent client whether it is there, 0 = never"
    )
    proto_max_bulk_len: int = _server(512 * MIB, parsers.memory(MIB), "BYTES", "the longest value (512mb)")
    client_query_buffer_limit: int = _server(
        1024 * MIB, parsers.memory(MIB), "BYTES", "the most that one client's unfinished commands may take (1gb)"
    )
    client_output_buffer_limit: str = _server(
        "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60",
        parsers.buffer_limits,
        "LIMITS",
        "CLASS HARD SOFT SECONDS ... for clients that do not read",
    )
    body_timeout: float = _server(
        30.0, parsers.seconds, "SECONDS", "give up a value whose bytes have stopped coming for so long"
    )
    io_threads: int | str = _server(
        "auto",
        parsers.whole_or("auto", 1, 128),  # Redis' bound
        "N",
        "threads that send and receive large values of several clients at a time, and copy long ones out of lent "
        "memory, the loop's own among them; auto = half of 8 or more processors, 8 at most, else 1",
    )
    # -- the server: the same-host lane
    lane: str = _server(
        "auto", parsers.choice("auto", "off"), "auto|off", "let clients of this host read blocks in the arena itself"
    )
    lane_lease_ms: int = _server(
        30_000, parsers.whole(1, 600_000), "MS", "how long such a client may hold a block when it does not say"
    )
    # -- the server: its tier in GPU memory
    gpu_memory: str | None = _server(
        None,
        parsers.optional(parsers.gpu_memory, "a size"),
        "SIZE[,DEVICE]",
        "GPU memory that clients of this host read and write by themselves (20GB, or 20GB,1 on the second GPU)",
    )
    # -- the server: its disk tier
    disk_io_threads: int = _server(
        4, parsers.whole(1, 64), "N", "threads that write to and read from the disk tier", engine=True
    )
    spill_wait: float = _server(
        0.5,
        parsers.seconds_or_none,
        "SECONDS",
        "how long a SET may wait for the disk to make room before the coldest blocks leave unwritten, 0 = not at all",
        engine=True,
    )
    disk_direct: bool = _server(
        True, parsers.flag, "BOOL", "O_DIRECT: keep the disk tier out of the page cache", engine=True
    )
    # -- the server: what it does
    maxmemory_policy: str = _server(
        "allkeys-lru",
        parsers.choice(*REDIS_POLICIES, "noeviction"),
        "NAME",
        "make room in a full arena, in Redis' words (allkeys-lru and so on, as cache_policy), or noeviction: refuse",
        engine=True,
    )
    notify_keyspace_events: str = _server(
        "", parsers.event_classes, "LETTERS", "which changes are published to channels, in Redis' letters"
    )
    enable_debug_command: str = _server(
        "no", parsers.choice("no", "local", "yes"), "no|local|yes", "who may use DEBUG; local = clients of this machine"
    )
    settings: Mapping[str, str] = _server(
        {}, parsers.scalars, "JSON", "further settings by the names that CONFIG SET knows"
    )
    hugepages: str = _server(
        "auto",
        parsers.choice(*(mode.value for mode in HugepageMode)),
        "MODE",
        "2 MiB pages: auto, off, thp or require",
        engine=True,
    )
    loglevel: str = _server(
        "notice", parsers.choice("debug", "verbose", "notice", "warning"), "LEVEL", "how much is logged"
    )
    prefault: int = _server(
        0,
        parsers.whole(0, 256),
        "N",
        "threads that touch the arena's pages at the start, 0 = none; left out, a server does it while it serves",
        engine=True,
    )
    page_lock: bool = _server(
        False,
        parsers.flag,
        "BOOL",
        "lock the arena's pages in memory, for a GPU where there is one; left out, a server does it while it serves",
        engine=True,
    )
    cluster_topology: str | None = _server(
        None,
        parsers.optional(parsers.text),
        "FILE",
        "the nodes of a cluster and the hash slots that each of them serves",
    )
    cluster_node: str | None = _server(
        None, parsers.optional(parsers.text), "NODE", "which of these nodes this server is: its name, id or HOST:PORT"
    )

    origin: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    entry_origin: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    file: Path | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def load(
        cls,
        file: Path | None = None,
        env: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        server: bool = False,
    ) -> Self:
        """Read every source and return the checked result: of an engine, or with `server` of a server.

        `file` wins over LMCACHE_CONFIG_FILE; `env` None means os.environ; an override of None means: not given.
        Raises ConfigError for a value that cannot be used, for a file that cannot be read, for an unknown key under
        `kvredis:` and for an unknown override. What the environment or the file says of keys that a server alone reads
        never fails an engine: it is a line of warning.
        """
        found, file = read(file, os.environ if env is None else env, overrides, server=server)
        if found.errors:
            raise found.errors[0]
        for remark in found.remarks:
            logger.warning("%s", remark)
        return cls(
            **found.values,
            origin={name: found.origin.get(name, DEFAULT_ORIGIN) for name in KEYS},
            entry_origin=found.entry_origin,
            warnings=tuple(map(str, found.remarks)),
            file=file,
        )

    @property
    def capacity_bytes(self) -> int:
        """Return the arena's size in bytes."""
        return int(self.max_local_cpu_size * GIB)

    @property
    def disk(self) -> DiskOptions | None:
        """Return what the disk tier is opened with; None unless both of its keys are given."""
        if self.local_disk is None or not self.max_local_disk_size:
            return None
        return DiskOptions(
            Path(self.local_disk),
            int(self.max_local_disk_size * GIB),
            direct=self.disk_direct,
            source=self.origin.get("local_disk", DEFAULT_ORIGIN),
        )

    @property
    def gpu(self) -> tuple[int, int] | None:
        """Return how many bytes of GPU memory are asked for, and of which GPU; None where none are."""
        if self.gpu_memory is None:
            return None
        size, _, device = self.gpu_memory.partition(",")
        return int(parsers.size_gib(size, "gpu_memory", DEFAULT_ORIGIN) * GIB), int(device or 0)

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

    @property
    def eviction_policy(self) -> str:
        """Return the store's policy: `cache_policy`, unless only `maxmemory_policy` was given and names another."""
        if self.origin.get("cache_policy", DEFAULT_ORIGIN) != DEFAULT_ORIGIN or self.cache_policy != "LRU":
            return self.cache_policy
        if self.maxmemory_policy == "noeviction":
            return self.cache_policy
        return ALLKEYS.get(self.maxmemory_policy, self.maxmemory_policy)

    @property
    def effective_remote_url(self) -> str | None:
        """Return remote_url with the credentials, database, TLS, cluster mode and service that extra_config adds to it.

        What an engine opens. Holds the password in clear, so it is nothing to log.
        """
        return None if self.remote_url is None else merged_url(self.remote_url, self.extra_config)[0]

    @property
    def remote_connections(self) -> int | None:
        """Return over how many connections payloads go: extra_config's resp_num_threads, valkey_num_workers; None: as
        many as the server is good for."""
        name = connections_entry(self.remote_url, self.extra_config)
        return None if name is None else int(self.extra_config[name])

    @property
    def connect_timeout_s(self) -> float | None:
        """Return how many seconds a connection may take to come about; None leaves it to the backend.

        It is extra_config's connection_timeout, and for Sentinel and Cluster LMCache's variable REDIS_TIMEOUT.
        """
        given = (self.extra_config.get(name) for name in ("connection_timeout", "redis_timeout"))
        return next((float(each) for each in given if each is not None), None)

    def store_options(self) -> StoreOptions:
        """Return what a Store is opened with under this configuration."""
        return StoreOptions(
            capacity_bytes=self.capacity_bytes,
            hugepages=self.hugepage_mode,
            cache_policy=self.eviction_policy,
            prefault_threads=self.prefault,
            page_lock=self.page_lock,
            disk=self.disk,
            keep=self.local_cpu,
            io_threads=self.disk_io_threads,
            spill_wait_s=self.spill_wait,
        )

    def shown(self) -> dict[str, Any]:
        """Return key -> value fit for JSON and for any reader: passwords are replaced by stars."""
        return {key.name: _shown(key, getattr(self, key.name)) for key in KEYS.values()}


def _shown(key: Key, value: Any) -> Any:
    return "***" if key.secret and value else parsers.shown(value)


def read(
    file: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any] | None = None, *, server: bool = True
) -> tuple[Found, Path | None]:
    """Read every source to its end, as a server or as an engine does: all errors and remarks, and which file it was.
    Raises and logs nothing."""
    found = Found(KEYS, server)
    if file is None and (named := env.get(FILE_VARIABLE, "").strip()):
        file = Path(parsers.unquote(named))
    if file is not None:
        found.read_file(file)
    found.read_env(env)
    found.read_overrides(overrides or {})
    check_all(found, env)
    return found, file


KEYS: dict[str, Key] = {
    field.name: dataclasses.replace(field.metadata["key"], name=field.name)
    for field in dataclasses.fields(Config)
    if "key" in field.metadata
}
