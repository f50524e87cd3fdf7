"""The command table: how a command line finds its command, and what it says of every command."""

import pytest

from kvredis.server.commands import load_families
from kvredis.server.commands.command import Argument, parse
from kvredis.server.commands.registry import COMMANDS, SPELLINGS, Command, every_command, lookup
from kvredis.server.protocol.arguments import INT64_MAX, parse_cursor, parse_integer

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
