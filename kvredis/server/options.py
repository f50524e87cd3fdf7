"""What a server is started with: where it listens, which clients it lets in, and the bounds that it begins with.

The names are those of the configuration keys (backends/config/schema.py); `kvredis serve` fills this in from there.
What CONFIG SET may change later lives in the Server; this is what was asked for at the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1024 * 1024

TLS_PROTOCOLS = ("TLSv1.2", "TLSv1.3")
"""All that are spoken; what came before them is broken."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """All of it. `port`: 0 takes a free one, -1 opens none; `tls_port`, `metrics_port`: 0 opens none, -1 takes a free
    one."""

    bind: tuple[str, ...] = ("127.0.0.1",)
    port: int = 6379
    unixsocket: str | None = None
    unixsocketperm: str | None = None  # octal digits; None leaves it to the umask
    requirepass: str = ""
    aclfile: str | None = None
    protected_mode: bool = True
    maxclients: int = 10_000
    loglevel: str = "notice"
    # -- one node of a cluster: the file that says which slots each of its nodes serves (cluster/topology.py)
    cluster_topology: str | None = None
    cluster_node: str | None = None  # which of its nodes this one is: name, id or host:port
    # -- TLS: only read when tls_port is not 0
    tls_port: int = 0
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_key_file_pass: str = field(default="", repr=False)
    tls_ca_cert_file: str | None = None
    tls_auth_clients: str = "yes"  # yes | no | optional
    tls_protocols: tuple[str, ...] = TLS_PROTOCOLS
    tls_ciphers: str | None = None  # of TLS 1.2; those of 1.3 are all good
    metrics_port: int = 0  # HTTP: /metrics, /health and the page
    io_threads: int = 1  # threads that send large replies, the loop's own among them
    # -- bounds and times
    timeout: int = 0  # seconds without a command after which a client is hung up on, 0 = never
    tcp_keepalive: int = 300  # seconds, 0 = off
    proto_max_bulk_len: int = 512 * MIB
    client_query_buffer_limit: int = 1024 * MIB
    client_output_buffer_limit: str = "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60"
    body_timeout: float = 30.0  # seconds without a byte of a value that was announced
    # -- shared memory
    lane: str = "auto"  # or off
    lane_lease_ms: int = 30_000  # time limit of a lease for which none was asked
    # -- behaviour
    enable_debug_command: str = "no"  # no | local | yes
    notify_keyspace_events: str = ""
    maxmemory_policy: str = "allkeys-lru"  # or noeviction; any other name means: make room
    settings: Mapping[str, str] = field(default_factory=dict)  # further settings, by their names in CONFIG
    config_file: Path | None = None  # the file that was read, for CONFIG REWRITE
