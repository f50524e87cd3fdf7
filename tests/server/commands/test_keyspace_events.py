"""Keyspace notifications: the letters of the setting, and which messages they let out."""

from typing import cast

import pytest

from kvredis.server.client.session import Session
from kvredis.server.commands.keyspace_events import effective, normalize, notify, publish_event
from kvredis.server.server import Server
from tests.server.fake_session import FakeSession
from tests.server.pushes import message


@pytest.fixture
def listener(server: Server) -> FakeSession:
    """A client that hears every event."""
    session = FakeSession(server, 1)
    session.ask("PSUBSCRIBE __key*")
    return session


def heard(listener: FakeSession) -> list[tuple[str, str]]:
    """Channel and message of what the listener was sent, and nothing stays unheard."""
    pushed, listener.pushed = listener.pushed, []
    return [(words[6].decode(), words[8].decode()) for words in (each.split(b"\r\n") for each in pushed)]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("KEA", "AKE"),
        ("", ""),
        ("lxEg", "glxE"),
        ("nmA", "Amn"),
        ("g$lshzxetd", "A"),
        ("KKK", "K"),
        ("detxzhsl$gEK", "AKE"),
        ("mK$", "$Km"),
    ],
)
def test_the_letters_are_shown_in_the_order_of_redis(written: str, shown: str) -> None:
    assert normalize(written) == shown


def test_a_letter_that_is_none_is_refused_in_the_words_of_redis() -> None:
    with pytest.raises(ValueError, match=r"^Invalid event class character\. Use 'Ag\$lshzxeKEtmdn'\.$"):
        normalize("KQ")


@pytest.mark.parametrize("letters", ["", "K", "KE", "A", "g$", "mn"])
def test_letters_that_name_no_class_or_no_place_are_as_good_as_none(letters: str) -> None:
    assert effective(letters) == ""


def test_an_event_is_told_for_the_key_first_and_then_for_the_event(server: Server, listener: FakeSession) -> None:
    listener.ask("CONFIG SET notify-keyspace-events KEA")
    publish_event(server, "$", "set", b"k", 9)
    assert listener.pushed == [
        message("pmessage", "__key*", "__keyspace@9__:k", "set"),
        message("pmessage", "__key*", "__keyevent@9__:set", "k"),
    ]


@pytest.mark.parametrize(
    ("letters", "told"),
    [
        ("K$", [("__keyspace@0__:k", "set")]),
        ("E$", [("__keyevent@0__:set", "k")]),
        ("KEg", []),
        ("KEmn", []),
        ("KA", [("__keyspace@0__:k", "set")]),
    ],
)
def test_only_the_classes_and_places_named_are_told(
    server: Server, listener: FakeSession, letters: str, told: list[tuple[str, str]]
) -> None:
    listener.ask(f"CONFIG SET notify-keyspace-events {letters}")
    notify(cast(Session, listener), "$", "set", b"k")
    assert heard(listener) == told


@pytest.mark.parametrize("letter", ["m", "n"])
def test_misses_and_new_keys_are_told_only_by_name(server: Server, listener: FakeSession, letter: str) -> None:
    listener.ask("CONFIG SET notify-keyspace-events KA")
    publish_event(server, letter, "event", b"k", 0)
    assert heard(listener) == []
    listener.ask(f"CONFIG SET notify-keyspace-events K{letter}")
    publish_event(server, letter, "event", b"k", 0)
    assert heard(listener) == [("__keyspace@0__:k", "event")]


def test_an_event_speaks_of_the_database_that_the_client_uses_unless_told(listener: FakeSession) -> None:
    listener.ask("CONFIG SET notify-keyspace-events E$g")
    listener.space = 3
    notify(cast(Session, listener), "$", "set", b"k")
    notify(cast(Session, listener), "g", "move_to", b"k", 5)
    assert heard(listener) == [("__keyevent@3__:set", "k"), ("__keyevent@5__:move_to", "k")]


def test_the_setting_is_live_and_shown_as_redis_shows_it(server: Server, listener: FakeSession) -> None:
    assert server.event_letters == ""
    assert listener.ask("CONFIG SET notify-keyspace-events xKE") == b"+OK\r\n"
    assert server.event_letters == "xKE"
    assert listener.ask("CONFIG GET notify-keyspace-events").endswith(b"$3\r\nxKE\r\n")
    assert listener.ask("CONFIG SET notify-keyspace-events Q") == (
        b"-ERR CONFIG SET failed (possibly related to argument 'notify-keyspace-events') - "
        b"Invalid event class character. Use 'Ag$lshzxeKEtmdn'.\r\n"
    )
    assert server.event_letters == "xKE"
    assert listener.ask([b"CONFIG", b"SET", b"notify-keyspace-events", b""]) == b"+OK\r\n"
    assert server.event_letters == ""
