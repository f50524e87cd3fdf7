"""The first words of clients that are not installed here, as their sources and traces give them.

A handshake that is answered oddly is a client that never connects.
"""

import re
from pathlib import Path
from threading import Thread

import pytest
import redis

from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.wire import encode

OK = rb"\+OK\r\n"
HELLO_3 = (
    rb"%7\r\n\$6\r\nserver\r\n\$5\r\nredis\r\n\$7\r\nversion\r\n\$5\r\n7\.\d\.\d\r\n"
    rb"\$5\r\nproto\r\n:3\r\n\$2\r\nid\r\n:\d+\r\n"
    rb"\$4\r\nmode\r\n\$10\r\nstandalone\r\n\$4\r\nrole\r\n\$6\r\nmaster\r\n\$7\r\nmodules\r\n\*0\r\n"
)
HELLO_2 = HELLO_3.replace(rb"%7", rb"\*14").replace(rb"proto\r\n:3", rb"proto\r\n:2")
NO_SUBCOMMAND = rb"-ERR unknown subcommand 'MAINT_NOTIFICATIONS'\. Try CLIENT HELP\.\r\n"
NO_PASSWORD = (
    rb"-ERR AUTH <password> called without any password configured for the default user\. "
    rb"Are you sure your configuration is correct\?\r\n"
)
NO_CLUSTER = rb"-ERR This instance has cluster support disabled\r\n"

HANDSHAKES = {
    "go-redis": [
        ("HELLO 3", HELLO_3), ("CLIENT SETNAME app", OK), ("SELECT 1", OK),
        ("CLIENT MAINT_NOTIFICATIONS ON moving-endpoint-type internal-ip", NO_SUBCOMMAND),
        ("CLIENT SETINFO LIB-NAME go-redis(,go1.24)", OK), ("CLIENT SETINFO LIB-VER 9.12.1", OK),
        ("PING", rb"\+PONG\r\n"),
    ],
    "go-redis before RESP3": [("SELECT 1", OK), ("CLIENT SETNAME app", OK), ("PING", rb"\+PONG\r\n")],
    "jedis": [
        ("HELLO 3 SETNAME app", HELLO_3), ("CLIENT SETINFO LIB-NAME jedis", OK), ("CLIENT SETINFO LIB-VER 6.0.0", OK),
        ("SELECT 2", OK),
    ],
    "lettuce": [
        ("HELLO 3", HELLO_3), ("CLIENT SETNAME app", OK), ("CLIENT SETINFO lib-name Lettuce", OK),
        ("CLIENT SETINFO lib-ver 6.8.0", OK), ("SELECT 2", OK), ("PING", rb"\+PONG\r\n"),
    ],
    "glide": [
        ("HELLO 3", HELLO_3), ("CLIENT SETINFO LIB-NAME GlidePySync(lmcache:0.5.6)", OK),
        ("CLIENT SETINFO LIB-VER 0.0.0", OK),
        ("INFO REPLICATION", rb"=\d+\r\ntxt:# Replication\r\nrole:master\r\n.*\r\n"),
        ("GET nope", rb"_\r\n"), ("SET k v EX 86400", OK),
    ],
    "valkey-py": [
        ("CLIENT SETINFO LIB-NAME valkey-py", OK), ("CLIENT SETINFO LIB-VER 6.1.0", OK), ("SELECT 1", OK),
        ("GET nope", rb"\$-1\r\n"),
    ],
    "StackExchange.Redis": [
        ("HELLO 2", HELLO_2), ("CLIENT SETNAME app", OK), ("CLIENT SETINFO lib-name SE.Redis", OK),
        ("CLIENT ID", rb":\d+\r\n"),
        ("CONFIG GET slave-read-only", rb"\*\d\r\n.*"),
        ("CONFIG GET databases", rb"\*2\r\n\$9\r\ndatabases\r\n\$2\r\n16\r\n"),
        ("INFO replication", rb"\$\d+\r\n# Replication\r\nrole:master\r\n.*\r\n"), ("CLUSTER NODES", NO_CLUSTER),
        ("ECHO x", rb"\$1\r\nx\r\n"), ("SENTINEL MASTERS", rb"-ERR unknown command 'SENTINEL'.*\r\n"),
    ],
    "a password where none is set": [("AUTH secret", NO_PASSWORD), ("PING", rb"\+PONG\r\n")],
    "a client with an empty name": [("HELLO 3 SETNAME ", HELLO_3), ("CLIENT GETNAME", rb"_\r\n")],
    "a protocol of tomorrow": [
        ("HELLO 4", rb"-NOPROTO unsupported protocol version\r\n"), ("PING", rb"\+PONG\r\n"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("pipelined", [False, True], ids=["one by one", "in one write"])
@pytest.mark.parametrize("name", HANDSHAKES)
def test_a_handshake_is_answered_as_its_client_expects(name: str, pipelined: bool, kvredis: RunningServer) -> None:
    steps = HANDSHAKES[name]
    with kvredis.connect() as wire:
        if pipelined:
            replies = wire.exchange(b"".join(encode(line) for line, _ in steps), len(steps))
        else:
            replies = [wire.ask(line) for line, _ in steps]
    for (line, expected), reply in zip(steps, replies, strict=True):
        assert re.fullmatch(expected, reply, re.DOTALL), (line, reply)


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_reads_large_values_from_a_server_that_sends_by_several_threads(protocol: int, tmp_path: Path) -> None:
    process, server = start_kvredis(tmp_path, "--io-threads", "4")
    values = {f"k{number}": bytes([number]) * (3 << 20) for number in range(4)}
    got: dict[str, list[object]] = {}

    def read(key: str) -> None:
        with redis.Redis(port=server.port, protocol=protocol, socket_timeout=20) as client:
            assert client.set(key, values[key])
            got[key] = [client.get(key) for _ in range(5)]

    readers = [Thread(target=read, args=(key,)) for key in values]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    stop(process)
    assert got == {key: [value] * 5 for key, value in values.items()}
