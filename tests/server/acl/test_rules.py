"""The rules of one user: what each lets pass, what is no rule, and that what is written down can be read again."""

import contextlib
import random

import pytest

from kvredis.server.acl.rules import (
    BAD_HASH,
    CHANNEL_AFTER_ALL,
    FIRST_ARG_OF_SUBCOMMAND,
    KEY_AFTER_ALL,
    NO_SUCH_PASSWORD,
    READ,
    SYNTAX,
    UNKNOWN,
    WRITE,
    RuleError,
    UnmatchedParenthesis,
    User,
    merged,
    proves,
    touched_by,
)
from kvredis.server.commands import load_families
from kvredis.server.commands.registry import COMMANDS, Command, lookup
from kvredis.server.protocol.replies import OK

load_families()

HASH = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"


def make_user(rules: str) -> User:
    """A user that was given these rules, separated by spaces."""
    user = User(b"u")
    user.apply_all(merged(rules.encode().split(b" ")))
    return user


def verdict(user: User, line: str) -> str:
    """Why a line is refused and the word that is to blame, or "ok"."""
    args = line.encode().split(b" ")
    found = lookup(args)
    assert isinstance(found, Command), line
    denial = user.denial(found, args)
    return "ok" if denial is None else f"{denial.reason.name.lower()} {args[denial.at].decode()}"


@pytest.mark.parametrize(
    ("rules", "line", "expected"),
    [
        ("allkeys", "get k", "command get"),
        ("allkeys +get", "get k", "ok"),
        ("allkeys +GET", "GET k", "ok"),
        ("allkeys +get -get", "get k", "command get"),
        ("allkeys +@all -get", "get k", "command get"),
        ("allkeys +@all -get", "set k v", "ok"),
        ("allkeys allcommands nocommands", "get k", "command get"),
        ("allkeys +@read", "get k", "ok"),
        ("allkeys +@read", "set k v", "command set"),
        ("allkeys +@read -@string", "get k", "command get"),
        ("allkeys -@string +@read", "get k", "ok"),
        ("allkeys +@all -@dangerous", "keys *", "command keys"),
        ("+@all -@dangerous", "config get x", "command config"),
        ("+config", "config get x", "ok"),
        ("+config|get", "config get x", "ok"),
        ("+config|get", "CONFIG SET x y", "command CONFIG"),
        ("+config -config|set", "config set x y", "command config"),
        ("+config -config|set", "config get x", "ok"),
        ("+config|get -config", "config get x", "command config"),
        ("+@admin -@admin +config|get", "config get x", "ok"),
        ("+select|0", "select 0", "ok"),
        ("+select|0 +SELECT|1", "select 1", "ok"),
        ("+select|0", "select 2", "command select"),
        ("+select|0 -select", "select 0", "command select"),
        ("-select +select|0", "select 0", "ok"),
        ("-@all", "auth u p", "ok"),
        ("-@all", "hello 3", "ok"),
        ("-@all", "reset", "ok"),
        ("-@all", "ping", "command ping"),
        ("+@hash", "get k", "command get"),
    ],
)
def test_commands_pass_by_name_part_first_argument_and_category(rules: str, line: str, expected: str) -> None:
    assert verdict(make_user(rules), line) == expected


@pytest.mark.parametrize(
    ("rules", "line", "expected"),
    [
        ("", "get k", "key k"),
        ("~k", "get k", "ok"),
        ("~k resetkeys", "get k", "key k"),
        ("~a* ~b*", "mget a1 b1", "ok"),
        ("~a* ~b*", "mget a1 c1 b1", "key c1"),
        ("~a*", "mset a1 b1 b1 v", "key b1"),
        ("~a*", "mset a1 b1 a2 b2", "ok"),
        ("%R~k", "get k", "ok"),
        ("%R~k", "set k v", "key k"),
        ("%W~k", "set k v", "ok"),
        ("%W~k", "get k", "key k"),
        ("%W~k", "set k v get", "key k"),
        ("%R~k %W~k", "set k v ex 10 get", "ok"),
        ("%r~* %W~k", "set k v get", "key k"),
        ("%wr~k", "set k v GET", "ok"),
        ("%R~k", "del k", "key k"),
        ("%W~k", "del k", "ok"),
        ("%W~k", "exists k", "ok"),
        ("%R~k", "exists k j", "key j"),
        ("%W~k", "strlen k", "ok"),
        ("%W~k", "ttl k", "key k"),
        ("%W~k", "expire k 10", "ok"),
        ("%R~k", "memory usage k", "ok"),
        ("%R~k %W~j", "copy k j", "ok"),
        ("%R~k %W~j", "copy j k", "key j"),
        ("%R~k %W~j", "rename k j", "key k"),
        ("~k %W~j", "renamenx k j", "ok"),
        ("~k", "object encoding j", "key j"),
        ("~k", "dbsize", "ok"),
        ("~k", "kv.match k j", "key j"),
        ("~", "get k", "key k"),
        ("~[a-c]?", "get b7", "ok"),
    ],
)
def test_keys_pass_by_pattern_and_by_what_is_done_to_them(rules: str, line: str, expected: str) -> None:
    assert verdict(make_user(f"+@all {rules}"), line) == expected


@pytest.mark.parametrize(
    ("rules", "line", "expected"),
    [
        ("", "publish c x", "channel c"),
        ("&c*", "publish c1 x", "ok"),
        ("&c*", "subscribe c1 c2 d", "channel d"),
        ("&c*", "psubscribe c*", "ok"),
        ("&c*", "psubscribe c1", "channel c1"),
        ("&c* &c1", "psubscribe c* c1", "ok"),
        ("&*", "psubscribe anything", "ok"),
        ("&* resetchannels", "publish c x", "channel c"),
        ("&c", "ssubscribe c", "ok"),
        ("&c", "ssubscribe d", "channel d"),
        ("&c", "spublish d x", "channel d"),
        ("", "unsubscribe c", "ok"),
        ("", "punsubscribe c*", "ok"),
    ],
)
def test_channels_pass_by_pattern_and_patterns_word_for_word(rules: str, line: str, expected: str) -> None:
    assert verdict(make_user(f"+@all {rules}"), line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("get a", "ok"),
        ("get b", "ok"),
        ("set a v", "key a"),
        ("set w v", "ok"),
        ("mget a b", "command mget"),
        ("get z", "key z"),
        ("del a", "command del"),
        ("publish c x", "channel c"),
    ],
)
def test_one_selector_must_let_the_whole_line_pass(line: str, expected: str) -> None:
    assert verdict(make_user("~a +get (~b +get) (+set %W~w ) (+publish &d)"), line) == expected


def test_of_two_selectors_complaints_the_later_argument_and_the_deeper_reason_is_told() -> None:
    user = make_user("+mget ~a (+mget ~a ~b) (~* +get)")
    assert verdict(user, "mget a b c") == "key c"
    user.apply(b"(+mget ~*)")
    assert verdict(user, "mget a b c") == "ok"


@pytest.mark.parametrize(
    ("line", "access"),
    [
        ("get k", READ),
        ("set k v", WRITE),
        ("set k v get", READ | WRITE),
        ("exists k", 0),
        ("del k", WRITE),
        ("expire k 1", WRITE),
    ],
)
def test_what_is_done_to_a_key_is_read_from_the_command_table(line: str, access: int) -> None:
    args = line.encode().split(b" ")
    ((_, found),) = touched_by(COMMANDS[args[0].upper()], args).keys
    assert found == access


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("foo", SYNTAX),
        ("@all", SYNTAX),
        ("+nope", UNKNOWN),
        ("-config|nope", UNKNOWN),
        ("-select|0", UNKNOWN),
        ("+@nope", UNKNOWN),
        ("+@", UNKNOWN),
        ("+", UNKNOWN),
        ("+config|", SYNTAX),
        ("+config|set|x", FIRST_ARG_OF_SUBCOMMAND),
        ("%~x", SYNTAX),
        ("%RR~x", SYNTAX),
        ("%", SYNTAX),
        ("~a\tb", SYNTAX),
        ("&a\0b", SYNTAX),
        ("+select|a\tb", SYNTAX),
        ("(+nope)", UNKNOWN),
        ("(on)", SYNTAX),
        ('(~"a)', SYNTAX),
        ('(~"a)")', SYNTAX),
        ("(~a) +get)", SYNTAX),
        ("(+get", SYNTAX),
        ("<nope", NO_SUCH_PASSWORD),
        ("!" + HASH, NO_SUCH_PASSWORD),
        ("#nope", BAD_HASH),
        ("#" + HASH.upper(), BAD_HASH),
    ],
)
def test_what_is_no_rule_is_refused_in_redis_words_and_changes_nothing(rule: str, text: str) -> None:
    user = make_user("on >p ~a &b +get (~c)")
    before = user.describe()
    with pytest.raises(RuleError) as caught:
        user.apply(rule.encode())
    assert str(caught.value) == text
    assert user.describe() == before


def test_a_pattern_after_all_is_a_mistake() -> None:
    user = make_user("allkeys allchannels")
    for rule, text in ((b"~x", KEY_AFTER_ALL), (b"%R~x", KEY_AFTER_ALL), (b"&x", CHANNEL_AFTER_ALL)):
        with pytest.raises(RuleError) as caught:
            user.apply(rule)
        assert str(caught.value) == text
    user.apply_all([b"~*", b"&*"])


def test_a_selector_may_be_spread_over_words_but_must_end() -> None:
    assert merged([b"on", b"(~a", b"+get", b")", b"off", b"()"]) == [b"on", b"(~a +get )", b"off", b"()"]
    with pytest.raises(UnmatchedParenthesis, match=r"^Unmatched parenthesis in acl selector starting at '\(~a'\.$"):
        merged([b"on", b"(~a", b"+get"])


def test_rules_on_commands_are_kept_in_their_order_and_void_ones_forgotten() -> None:
    assert make_user("+GET +@read -set +config|get").root.describe_commands() == b"-@all +get +@read -set +config|get"
    assert make_user("+config|get +config|set -config").root.describe_commands() == b"-@all -config"
    assert make_user("+@read +get -@read").root.describe_commands() == b"-@all +get -@read"
    assert make_user("+select|0 +SELECT|0 +get +@all -get").root.describe_commands() == b"+@all -get"


def test_everything_allows_commands_that_are_yet_to_come_and_nothing_else_does() -> None:
    unheard_of = Command("unheard.of", 1, lambda session, args: OK, categories=("read",))
    assert make_user("+@all -get").denial(unheard_of, [b"unheard.of"]) is None
    assert make_user("-@all +@read +get").denial(unheard_of, [b"unheard.of"]) is not None


def test_a_user_is_unrestricted_only_if_nothing_need_be_asked() -> None:
    user = make_user("on +@all ~* &*")
    assert user.unrestricted
    for rule, undo in ((b"off", b"on"), (b"-get", b"+get"), (b"resetkeys", b"~*"), (b"resetchannels", b"&*")):
        user.apply(rule)
        assert not user.unrestricted, rule
        user.apply(undo)
        assert user.unrestricted, undo


def test_a_password_is_any_of_the_users_and_only_while_it_is_one() -> None:
    user = make_user("on >secret >other")
    assert proves(b"secret", user)
    assert proves(b"other", user)
    assert not proves(b"Secret", user)
    assert not proves(b"", user)
    user.apply(b"!" + HASH.encode())
    assert not proves(b"secret", user)
    user.apply(b"<other")
    assert not proves(b"other", user)
    user.apply(b"nopass")
    assert proves(b"anything", user)
    user.apply(b">secret")
    assert not proves(b"anything", user)
    user.apply(b"off")
    assert not proves(b"secret", user)
    assert not proves(b"secret", None)


def test_no_client_can_log_in_as_a_new_user_without_a_password() -> None:
    user = make_user("on")
    assert not proves(b"", user)
    assert not proves(b"0" * 64, user)


def test_reset_makes_a_user_new() -> None:
    user = make_user("on nopass skip-sanitize-payload +@all ~* &* (+get) reset")
    assert user.describe() == b"user u off sanitize-payload resetchannels -@all"


PIECES = (
    "on", "off", "nopass", ">p", ">q", "#" + HASH, "resetpass", "skip-sanitize-payload", "sanitize-payload", "~a",
    "~b*", "%R~a", "%W~a", "%RW~c", "%RW~*", "%R~*", "%W~*", "~", "allkeys", "resetkeys", "&a", "&b*", "allchannels",
    "resetchannels", "+@all", "-@all", "+get", "-get", "+GET", "+config|get", "-config|set", "+config", "-config",
    "+select|0", "+select|x", "-select", "+@read", "-@read", "+@dangerous", "-@fast", "(~x +get)",
    "(%R~y &z -@all +@read -get)", "(+@all ~* &*)", "()", "(+select|0", "~q", "+get)", "clearselectors",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_down_makes_the_same_user_again(seed: int) -> None:
    dice = random.Random(seed)
    lines = ("get a", "set a v", "mget a b1", "config get x", "config set x y", "select 0", "publish a x", "keys *")
    for _ in range(100):
        user = User(b"u")
        rules = " ".join(dice.choices(PIECES, k=dice.randint(0, 14)))
        with contextlib.suppress(RuleError, UnmatchedParenthesis):  # those before it count
            user.apply_all(merged(rules.encode().split(b" ")))
        again = User(b"u")
        again.apply_all([b"reset", *merged(user.describe().split(b" ")[2:])])
        assert again.describe() == user.describe(), rules
        assert again.unrestricted == user.unrestricted
        assert [verdict(again, line) for line in lines] == [verdict(user, line) for line in lines], rules
