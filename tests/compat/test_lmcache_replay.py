"""What LMCache's connectors put on the wire, replayed byte for byte, and the steps of its Redis tutorial.

The streams were taken from LMCache 0.5.6 through a logging proxy. Its native client reads exact byte counts, so one
byte more or less in a reply is a lost worker.
"""

import struct
from collections.abc import Iterator

import pytest

from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.wire import encode

BASE = "vllm@meta-llama/Meta-Llama-3.1-8B-Instruct@1@0@-5e4a7c9b1d2f3a60@bfloat16"
DATA = bytes(range(256)) * 1024
TOO_BIG = bytes(65 * 1024 * 1024)
OOM = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
METADATA = struct.pack("=7i", len(DATA), 1, 3, 2, 2, 256, 128)
"""Length, KV_2LTD, bfloat16, four dimensions: 28 bytes, as RemoteMetadata packs them."""

REDIS_PY_HANDSHAKE = (
    b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n"
    b"*5\r\n$6\r\nCLIENT\r\n$19\r\nMAINT_NOTIFICATIONS\r\n$2\r\nON\r\n$20\r\nmoving-endpoint-type\r\n"
    b"$11\r\ninternal-ip\r\n"
    b"*4\r\n$6\r\nCLIENT\r\n$7\r\nSETINFO\r\n$8\r\nLIB-NAME\r\n$8\r\nredis-py\r\n"
    b"*4\r\n$6\r\nCLIENT\r\n$7\r\nSETINFO\r\n$7\r\nLIB-VER\r\n$5\r\n8.1.0\r\n"
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a password."""
    process, server = start_kvredis(tmp_path_factory.mktemp("guarded"), "--requirepass", "secret")
    yield server
    stop(process)


def test_redis_py_handshake_gets_a_map_a_plain_error_and_two_ok(kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        hello, notifications, name, version = wire.exchange(REDIS_PY_HANDSHAKE, 4)
    assert hello.startswith(
        b"%7\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.4.0\r\n$5\r\nproto\r\n:3\r\n"
    )
    assert notifications == b"-ERR unknown subcommand 'MAINT_NOTIFICATIONS'. Try CLIENT HELP.\r\n"
    assert name == version == b"+OK\r\n"


def test_the_redis_connector_stores_two_keys_and_finds_them_again(kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        wire.exchange(REDIS_PY_HANDSHAKE, 4)
        assert wire.ask(f"EXISTS {BASE}metadata") == b":0\r\n"
        assert wire.ask(["SET", f"{BASE}kv_bytes", DATA]) == b"+OK\r\n"
        assert wire.ask(["SET", f"{BASE}metadata", METADATA]) == b"+OK\r\n"
        assert wire.ask(f"EXISTS {BASE}metadata") == b":1\r\n"
        assert wire.ask(f"GET {BASE}metadata") == b"$28\r\n" + METADATA + b"\r\n"
        assert wire.ask(f"GET {BASE}kv_bytes") == b"$262144\r\n" + DATA + b"\r\n"
        assert wire.ask(f"DEL {BASE}metadata") == b":1\r\n"
        assert wire.ask(f"GET {BASE}metadata") == b"_\r\n"


def test_the_native_client_gets_exact_replies_without_a_handshake(kvredis: RunningServer) -> None:
    key = b"%d" % len(BASE)
    with kvredis.connect() as wire:
        get = b"*2\r\n$3\r\nGET\r\n$" + key + b"\r\n" + BASE.encode() + b"\r\n"
        set_ = b"*3\r\n$3\r\nSET\r\n$" + key + b"\r\n" + BASE.encode() + b"\r\n$262144\r\n" + DATA + b"\r\n"
        exists = b"*2\r\n$6\r\nEXISTS\r\n$" + key + b"\r\n" + BASE.encode() + b"\r\n"
        delete = b"*2\r\n$3\r\nDEL\r\n$" + key + b"\r\n" + BASE.encode() + b"\r\n"
        assert wire.exchange(exists) == [b":0\r\n"]
        assert wire.exchange(get) == [b"$-1\r\n"]
        assert wire.exchange(set_) == [b"+OK\r\n"]
        assert wire.exchange(exists) == [b":1\r\n"]
        assert wire.exchange(get) == [b"$262144\r\n" + DATA + b"\r\n"]
        assert wire.exchange(delete) == [b":1\r\n"]
        assert wire.exchange(delete) == [b":0\r\n"]


@pytest.mark.parametrize("login", ["AUTH secret", "AUTH default secret"])
def test_the_native_client_logs_in_with_one_argument_or_two(login: str, guarded: RunningServer) -> None:
    with guarded.connect() as wire:
        assert wire.ask("GET k") == b"-NOAUTH Authentication required.\r\n"
        assert wire.ask("AUTH wrong") == b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        assert wire.ask("AUTH nobody secret") == b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        assert wire.ask("HELLO 3").startswith(b"-NOAUTH HELLO must be called with the client already authenticated")
        assert wire.ask("GET k") == b"-NOAUTH Authentication required.\r\n"
        assert wire.ask(login) == b"+OK\r\n"
        assert wire.ask(["SET", "k", DATA]) == b"+OK\r\n"
        assert wire.ask("GET k") == b"$262144\r\n" + DATA + b"\r\n"
        assert wire.ask("RESET") == b"+RESET\r\n"
        assert wire.ask("GET k") == b"-NOAUTH Authentication required.\r\n"


def test_hello_logs_in_and_names_the_connection(guarded: RunningServer) -> None:
    with guarded.connect() as wire:
        assert wire.ask("HELLO 3 AUTH default wrong").startswith(b"-WRONGPASS")
        assert wire.ask("HELLO 3 AUTH default secret SETNAME me").startswith(b"%7\r\n")
        assert wire.ask("CLIENT GETNAME") == b"$2\r\nme\r\n"


def test_glide_gets_the_replication_role_as_text(kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        wire.ask("HELLO 3")
        assert wire.ask("CLIENT SETINFO LIB-NAME GlidePySync(lmcache:0.5.6)") == b"+OK\r\n"
        assert wire.ask("CLIENT SETINFO LIB-VER 0.0.0") == b"+OK\r\n"
        reply = wire.ask("INFO REPLICATION")
        assert reply.startswith(b"=")
        assert b"\r\nrole:master\r\n" in reply
        assert wire.ask(["SET", BASE, DATA, "EX", "60"]) == b"+OK\r\n"
        assert wire.ask(f"TTL {BASE}") in (b":60\r\n", b":59\r\n")


def test_a_chunk_that_was_just_reported_is_served_in_the_same_pipeline(kvredis: RunningServer) -> None:
    request = encode(["SET", "k", DATA]) + encode("EXISTS k") + encode("GET k") + encode("DEL k") + encode("GET k")
    with kvredis.connect() as wire:
        replies = wire.exchange(request, 5)
    assert replies == [b"+OK\r\n", b":1\r\n", b"$262144\r\n" + DATA + b"\r\n", b":1\r\n", b"$-1\r\n"]


def test_the_tutorial_steps_find_measure_and_delete_the_chunk(kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        wire.ask(["SET", f"{BASE}kv_bytes", DATA])
        wire.ask(["SET", f"{BASE}metadata", METADATA])
        assert wire.ask("KEYS *Llama*").startswith(b"*2\r\n")
        assert wire.ask("KEYS *Mistral*") == b"*0\r\n"
        assert wire.ask(f"EXISTS {BASE}metadata {BASE}kv_bytes") == b":2\r\n"
        usage = int(wire.ask(f"MEMORY USAGE {BASE}kv_bytes")[1:])
        assert len(DATA) <= usage <= 1.1 * len(DATA)
        memory = wire.ask("INFO memory").decode()
        facts = dict(line.split(":", 1) for line in memory.split("\r\n") if ":" in line)
        assert int(facts["maxmemory"]) == 64 * 1024 * 1024
        assert len(DATA) <= int(facts["used_memory"]) <= 2 * len(DATA)
        wire.ask(f"GET {BASE}kv_bytes")
        stats = wire.ask("INFO stats").decode()
        assert "keyspace_hits:" in stats
        assert wire.ask(f"DEL {BASE}metadata {BASE}kv_bytes") == b":2\r\n"
        assert wire.ask("DBSIZE") == b":0\r\n"


def test_a_refused_set_ends_the_connection_of_a_client_that_cannot_read_errors(kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        assert wire.ask(["SET", "k", TOO_BIG]) == OOM
        assert wire.at_end()


def test_no_room_to_evict_leaves_a_client_that_said_hello_in_step(kvredis: RunningServer) -> None:
    with kvredis.connect() as wire:
        wire.ask("HELLO 2")
        assert wire.ask(["SET", "k", TOO_BIG]) == OOM
        assert wire.ask("EXISTS k") == b":0\r\n"
        assert wire.ask(["SET", "k", DATA]) == b"+OK\r\n"
