"""The command table: how a command line finds its command, and what it says of every command."""

from pathlib import Path
from typing import Any, NamedTuple

import hiredis
import pytest

from kvredis.server.commands import load_families
from kvredis.server.commands.command import Argument, has_keys, parse
from kvredis.server.commands.registry import COMMANDS, SPELLINGS, Command, every_command, lookup
from kvredis.server.protocol.arguments import INT64_MAX, parse_cursor, parse_integer
from tests.server.fake_session import FakeSession

load_families()


def test_a_command_is_found_in_any_spelling() -> None:
    for name in (b"GET", b"get", b"gEt"):
        found = lookup([name, b"k"])
        assert isinstance(found, Command)
        assert found.name == "get"
    assert SPELLINGS[b"get"] is SPELLINGS[b"GET"] is COMMANDS[b"GET"]


def test_a_subcommand_is_found_under_its_container() -> None:
    found = lookup([b"Client", b"SetInfo", b"lib-name", b"x"])
    assert isinstance(found, Command)
    assert found.name == "client|setinfo"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([b"get"], b"-ERR wrong number of arguments for 'get' command\r\n"),
        ([b"CLIENT"], b"-ERR wrong number of arguments for 'client' command\r\n"),
        ([b"CLIENT", b"SETINFO", b"x"], b"-ERR wrong number of arguments for 'client|setinfo' command\r\n"),
        ([b"CLIENT", b"a\0b"], b"-ERR unknown subcommand 'a'. Try CLIENT HELP.\r\n"),
        ([b"Foo"], b"-ERR unknown command 'Foo', with args beginning with: \r\n"),
        ([b"Foo", b"a\r\nb", b"c\0d"], b"-ERR unknown command 'Foo', with args beginning with: 'a  b' 'c' \r\n"),
    ],
)
def test_what_is_no_command_gets_redis_words(args: list[bytes], text: bytes) -> None:
    assert lookup(args) == text


def test_the_echo_of_an_unknown_command_is_bounded() -> None:
    reply = lookup([b"F" * 10**6, *[b"x" * 10**6] * 1000])
    assert isinstance(reply, bytes)
    assert len(reply) < 400


def test_only_what_becomes_a_value_as_it_is_may_go_straight_into_the_arena() -> None:
    receiving: dict[tuple[int, ...], set[str]] = {}
    for found in every_command():
        receiving.setdefault(found.payload_args, set()).add(found.name)
    del receiving[()]
    assert receiving == {
        (2, 0): {"set", "setnx", "getset"},
        (2, 2): {"mset", "msetnx"},
        (3, 0): {"setex", "psetex", "restore", "restore-asking", "kv.write"},
    }


def test_every_command_is_described() -> None:
    for found in every_command():
        assert found.summary, found.name
        assert found.categories, found.name
        assert ("fast" in found.categories) != ("slow" in found.categories), found.name
        assert bool(found.keys[0]) == bool(found.access), found.name
        assert isinstance(parse(found.syntax), tuple)


def test_commands_before_login_are_those_of_redis() -> None:
    assert {found.name for found in every_command() if "no_auth" in found.flags} == {"auth", "hello", "quit", "reset"}


@pytest.mark.parametrize(("text", "number"), [(b"0", 0), (b"-1", -1), (b"9223372036854775807", INT64_MAX)])
def test_integers_are_read_in_their_one_spelling(text: bytes, number: int) -> None:
    assert parse_integer(text) == number


@pytest.mark.parametrize(
    "text", [b"", b"+1", b" 1", b"1 ", b"01", b"-0", b"1.0", b"1e3", b"9223372036854775808", b"1\n", b"9" * 100]
)
def test_other_spellings_of_integers_are_refused(text: bytes) -> None:
    assert parse_integer(text) is None


def test_cursors_are_read_as_c_reads_them() -> None:
    assert [parse_cursor(text) for text in (b"0", b"", b"+7", b"007", b"18446744073709551615")] == [
        0, 0, 7, 7, 2**64 - 1,
    ]  # fmt: skip
    assert [parse_cursor(text) for text in (b"+", b"-", b"x", b"1 ", b"18446744073709551616", b"1" * 50)] == [None] * 6
    assert parse_cursor(b"-1") == 2**64 - 1  # as strtoull; a walk from there is over


def test_syntax_becomes_arguments() -> None:
    key, value, condition, end = parse("key value [NX | XX] [EX seconds | KEEPTTL]")
    assert (key.type, value.type) == ("key", "string")
    assert condition.type == "oneof"
    assert condition.flags == ("optional",)
    assert [part.token for part in condition.parts] == ["NX", "XX"]
    assert end.parts == (Argument("seconds", "integer", "EX"), Argument("keepttl", "pure-token", "KEEPTTL"))


def test_repeated_arguments_are_marked_multiple() -> None:
    (keys,) = parse("key [key ...]")
    assert keys == Argument("key", "key", flags=("multiple",))
    (pairs,) = parse("key value [key value ...]")
    assert (pairs.type, pairs.flags) == ("block", ("multiple",))
    (names,) = parse("[name [name ...]]")
    assert names.flags == ("optional", "multiple")


@pytest.mark.parametrize("syntax", ["[key", "key]", "<a | b"])
def test_unbalanced_syntax_is_a_mistake_in_the_program(syntax: str) -> None:
    with pytest.raises(ValueError, match="unbalanced"):
        parse(syntax)


# The command table against what Redis 7.2 says of its own (redis_commands.tsv tells where its rows come from).
# Clients route, retry and cache by arity, flags and keys, and an ACL rule is only as good as the categories.

load_families()


OURS = (
    {"kv.attach", "kv.fill", "kv.lane", "kv.lease", "kv.lend", "kv.put", "kv.release", "kv.revoke"}
    | {"kv.abort", "kv.commit", "kv.reserve", "kv.splice", "kv.write"}
    | {"kv.expect", "kv.job", "kv.match", "kv.meta", "kv.prefetch", "kv.scan", "kv.tiers", "prefetch"}
)


"""Commands that Redis does not have."""


LEFT_OUT = {
    "a block is not a bitmap": "bitcount bitfield bitfield_ro bitop bitpos getbit setbit",
    "a block is not a HyperLogLog": "pfadd pfcount pfdebug pfmerge pfselftest",
    "there is no Lua": "eval eval_ro evalsha evalsha_ro fcall fcall_ro function script function|delete function|dump"
    " function|flush function|help function|kill function|list function|load function|restore function|stats"
    " script|debug script|exists script|flush script|help script|kill script|load",
    "there are no replicas, and keys do not migrate": "failover migrate psync replconf sync",
}


OTHER_TYPES = """
    LPUSH RPUSH LPOP RPOP LPUSHX RPUSHX LLEN LRANGE LINDEX LSET LREM LTRIM LINSERT LPOS LMOVE LMPOP RPOPLPUSH BLPOP
    BRPOP BLMOVE BLMPOP BRPOPLPUSH HSET HGET HDEL HGETALL HEXISTS HINCRBY HINCRBYFLOAT HKEYS HLEN HMGET HMSET
    HRANDFIELD HSCAN HSETNX HSTRLEN HVALS SADD SREM SCARD SISMEMBER SMISMEMBER SMEMBERS SMOVE SPOP SRANDMEMBER SSCAN
    SDIFF SDIFFSTORE SINTER SINTERCARD SINTERSTORE SUNION SUNIONSTORE ZADD ZCARD ZCOUNT ZDIFF ZDIFFSTORE ZINCRBY
    ZINTER ZINTERCARD ZINTERSTORE ZLEXCOUNT ZMPOP ZMSCORE ZPOPMAX ZPOPMIN ZRANDMEMBER ZRANGE ZRANGEBYLEX
    ZRANGEBYSCORE ZRANGESTORE ZRANK ZREM ZREMRANGEBYLEX ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREVRANGE ZREVRANGEBYLEX
    ZREVRANGEBYSCORE ZREVRANK ZSCAN ZSCORE ZUNION ZUNIONSTORE BZMPOP BZPOPMAX BZPOPMIN XACK XADD XAUTOCLAIM XCLAIM
    XDEL XGROUP XINFO XLEN XPENDING XRANGE XREAD XREADGROUP XREVRANGE XSETID XTRIM GEOADD GEODIST GEOHASH GEOPOS
    GEORADIUS GEORADIUS_RO GEORADIUSBYMEMBER GEORADIUSBYMEMBER_RO GEOSEARCH GEOSEARCHSTORE SORT SORT_RO SENTINEL
"""


"""Commands of types that a block store does not hold, and Sentinel's."""


class Row(NamedTuple):
    """What COMMAND says of one command."""

    arity: int
    flags: frozenset[str]
    keys: tuple[int, ...]
    categories: frozenset[str]


def read_rows() -> dict[str, Row]:
    """The rows of the table by name."""
    rows = {}
    for line in Path(__file__).with_name("redis_commands.tsv").read_text().splitlines():
        if not line.startswith("#"):
            name, arity, flags, *keys, categories = line.split("\t")
            row = Row(int(arity), _words(flags), tuple(map(int, keys)), _words(categories))
            rows[name] = row
    return rows


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split(",")) - {""}


REDIS = read_rows()


IMPLEMENTED = {each.name: each for each in every_command()}


ABSENT = {name: reason for reason, names in LEFT_OUT.items() for name in names.split()}


WITH_KEYS = [each for each in IMPLEMENTED.values() if has_keys(each)]


def told(session: FakeSession, line: str) -> Any:
    """A reply as Python objects."""
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(session.ask(line))
    return reader.gets()


def line_of(found: Command) -> list[str]:
    """A command line with distinct arguments, long enough for every key."""
    first, last, step = found.keys
    wanted = max(abs(found.arity), last + 1, first + 2 * step if last < 0 else 0)
    names = found.name.split("|")
    return names + [f"arg{at}" for at in range(len(names), wanted if found.arity < 0 else found.arity)]


def keys_by_the_table(row: Row | Command, line: list[str]) -> list[str]:
    """The keys in a command line as first, last and step say."""
    first, last, step = row.keys
    return line[first : len(line) + last + 1 if last < 0 else last + 1 : step]


def test_every_command_of_redis_is_here_or_left_out_with_a_reason() -> None:
    assert REDIS.keys() - IMPLEMENTED.keys() == ABSENT.keys()
    assert IMPLEMENTED.keys() - REDIS.keys() == OURS


@pytest.mark.parametrize("fact", Row._fields)
def test_commands_have_the_facts_of_redis(fact: str, session: FakeSession) -> None:
    different = {}
    for name in sorted(REDIS.keys() & IMPLEMENTED.keys()):
        (entry,) = told(session, f"COMMAND INFO {name}")
        _, arity, flags, first, last, step, categories, *_ = entry
        ours = Row(arity, frozenset(flags), (first, last, step), frozenset(categories))
        if getattr(ours, fact) != getattr(REDIS[name], fact):
            different[name] = f"{getattr(ours, fact)}, Redis: {getattr(REDIS[name], fact)}"
    assert different == {}


@pytest.mark.parametrize("name", sorted({*OTHER_TYPES.split(), *(name.upper() for name in ABSENT if "|" not in name)}))
def test_what_is_left_out_answers_as_an_unknown_command(name: str) -> None:
    assert lookup([name.encode(), b"k", b"v"]) == (
        b"-ERR unknown command '%b', with args beginning with: 'k' 'v' \r\n" % name.encode()
    )


@pytest.mark.parametrize("name", sorted(name for name in ABSENT if "|" in name))
def test_a_subcommand_that_is_left_out_answers_as_an_unknown_one(name: str, session: FakeSession) -> None:
    container, _, part = name.partition("|")
    reply = session.ask(f"{container} {part}")
    if container in ABSENT:
        assert reply.startswith(b"-ERR unknown command ")
    else:
        assert reply == f"-ERR unknown subcommand '{part}'. Try {container.upper()} HELP.\r\n".encode()


def test_other_types_are_unknown_to_command_too(session: FakeSession) -> None:
    assert told(session, "COMMAND INFO " + " ".join(OTHER_TYPES.split())) == [None] * len(OTHER_TYPES.split())
    assert told(session, "COMMAND DOCS " + " ".join(OTHER_TYPES.split())) == []


def test_command_its_count_its_list_and_its_docs_name_the_same_commands(session: FakeSession) -> None:
    entries = {entry[0]: entry for entry in told(session, "COMMAND")}
    assert entries.keys() == {found.name for found in COMMANDS.values()}
    assert told(session, "COMMAND COUNT") == len(entries)
    parts = {part[0] for entry in entries.values() for part in entry[9]}
    assert set(told(session, "COMMAND LIST")) == entries.keys() | parts == IMPLEMENTED.keys()
    docs = told(session, "COMMAND DOCS")
    assert set(docs[::2]) == entries.keys()
    described = dict(zip(docs[::2], docs[1::2], strict=True))
    for name, entry in entries.items():
        facts = dict(zip(described[name][::2], described[name][1::2], strict=True))
        assert facts.keys() >= {"summary", "since", "group", "complexity"}
        assert set(facts.get("subcommands", [])[::2]) == {part[0] for part in entry[9]}


@pytest.mark.parametrize("category", sorted({word for row in REDIS.values() for word in row.categories}))
def test_command_list_by_category_is_what_the_entries_say(category: str, session: FakeSession) -> None:
    listed = set(told(session, f"COMMAND LIST FILTERBY ACLCAT {category[1:]}"))
    assert listed - OURS == {name for name in IMPLEMENTED.keys() & REDIS.keys() if category in REDIS[name].categories}


def types_of(arguments: tuple[Argument, ...]) -> set[str]:
    """The types of arguments and of their parts."""
    return {each.type for each in arguments}.union(*(types_of(each.parts) for each in arguments))


def test_the_syntax_of_a_command_holds_its_keys_and_fits_its_arity() -> None:
    for found in IMPLEMENTED.values():
        arguments = parse(found.syntax)
        needed = sum(1 + bool(a.token and a.type != "pure-token") for a in arguments if "optional" not in a.flags)
        if not found.subcommands:
            assert needed + len(found.name.split("|")) <= abs(found.arity), found.name
        assert has_keys(found) == ("key" in types_of(arguments)), found.name


@pytest.mark.parametrize("found", WITH_KEYS, ids=lambda found: found.name)
def test_getkeys_finds_the_keys_where_redis_does(found: Command, session: FakeSession) -> None:
    line = line_of(found)
    keys = keys_by_the_table(REDIS.get(found.name, found), line)
    assert keys
    assert told(session, "COMMAND GETKEYS " + " ".join(line)) == keys
    with_flags = told(session, "COMMAND GETKEYSANDFLAGS " + " ".join(line))
    assert [key for key, _ in with_flags] == keys
    for _, flags in with_flags:
        assert len({"RO", "RW", "OW", "RM"} & set(flags)) == 1, flags
        if "readonly" in found.flags:
            assert "RO" in flags
        assert not {"readonly", "write"} <= set(found.flags)


@pytest.mark.parametrize(
    "name", sorted(name for name, found in IMPLEMENTED.items() if not (has_keys(found) or found.subcommands))
)
def test_getkeys_refuses_a_command_without_keys(name: str, session: FakeSession) -> None:
    line = " ".join(line_of(IMPLEMENTED[name]))
    assert session.ask(f"COMMAND GETKEYS {line}") == b"-ERR The command has no key arguments\r\n"
