"""The same sessions with Debian's redis-server and with ours: replies must be equal byte for byte."""

from collections.abc import Sequence

import pytest

from tests.compat.acl_scripts import ACL_SCRIPTS
from tests.compat.conftest import RunningServer
from tests.compat.ops_scripts import OPS_SCRIPTS
from tests.compat.scripts import ALLOWED, SCRIPTS
from tests.compat.wire import CommandLine, encode

EVERY_SCRIPT = {**SCRIPTS, **ACL_SCRIPTS, **OPS_SCRIPTS}


def converse(server: RunningServer, resp: int, script: Sequence[CommandLine]) -> list[bytes]:
    """All the replies to a script on one connection."""
    with server.connect() as wire:
        if resp == 3:
            wire.ask("HELLO 3")
        return [wire.ask(line) for line in script]


def comparable(line: CommandLine, reply: bytes) -> bytes | list[bytes]:
    """A reply as it is, but the lines of KEYS without their order, which neither server promises."""
    return sorted(reply.split(b"\r\n")) if line[:4] == "KEYS" or line[:1] == ["KEYS"] else reply


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("name", EVERY_SCRIPT)
def test_both_servers_answer_a_script_with_the_same_bytes(
    name: str, resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    script = EVERY_SCRIPT[name]
    theirs, ours = converse(redis_server, resp, script), converse(kvredis, resp, script)
    for line, their, our in zip(script, theirs, ours, strict=True):
        if isinstance(line, str) and line in ALLOWED:
            assert their != our, f"{line} is no longer different: take it off the list"
        else:
            assert comparable(line, our) == comparable(line, their), line


def test_every_allowed_difference_is_in_a_script() -> None:
    lines = {line for script in SCRIPTS.values() for line in script if isinstance(line, str)}
    assert set(ALLOWED) <= lines


@pytest.mark.parametrize("resp", [2, 3])
def test_a_pipelined_script_gets_the_same_replies_in_the_same_order(
    resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    script = SCRIPTS["strings"]
    request = b"".join(map(encode, script))
    replies = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            if resp == 3:
                wire.ask("HELLO 3")
            replies.append(wire.exchange(request, len(script)))
    assert replies[0] == replies[1]


@pytest.mark.parametrize("command", ["SELECT 1", "CLIENT SETNAME x", "HELLO 3"])
def test_reset_takes_back_what_the_connection_has_set(
    command: str, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    script = ["SET k v", command, "RESET", "GET k", "GET nope", "CLIENT GETNAME"]
    theirs, ours = (
        converse(server, 2, script)[2:]  # HELLO's own reply names the server
        for server in (redis_server, kvredis)
    )
    assert ours == theirs


def test_client_list_has_the_fields_of_redis_the_two_of_7_2_and_behind_them_our_own(
    redis_server: RunningServer, kvredis: RunningServer
) -> None:
    names = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            line = wire.ask("CLIENT LIST").split(b"\r\n")[1].split(b"\n")[0]
            names.append([field.partition(b"=")[0] for field in line.split(b" ")])
    assert names[1][:30] == [*names[0], b"lib-name", b"lib-ver"]
    assert names[1][-1] == b"expects"


def test_info_has_the_sections_of_redis_in_its_order_and_one_more(
    redis_server: RunningServer, kvredis: RunningServer
) -> None:
    titles = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            wire.ask("SET k v")
            wire.ask("FOO")
            text = wire.ask("INFO")
            titles.append([line for line in text.split(b"\r\n") if line.startswith(b"# ")])
    assert titles[1] == [*titles[0], b"# Kv"]


@pytest.mark.parametrize("section", ["clients", "replication", "keyspace", "errorstats"])
def test_an_info_section_has_every_field_of_redis(
    section: str, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    fields = []
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            wire.ask("SET k v")
            wire.ask("FOO")
            lines = wire.ask(f"INFO {section}").split(b"\r\n")[1:]
            fields.append({line.partition(b":")[0] for line in lines})
    assert fields[0] <= fields[1]
