"""Keyspace notifications: which changes are published on which channels, in the words of `notify-keyspace-events`.

A change is an ordinary message to ordinary channels, `__keyspace@<db>__:<key>` and `__keyevent@<db>__:<event>`. Nearly
always no client has asked for any, so a change costs one look at `server.event_letters`, which is empty unless a class
of events is wanted *and* a place to tell them: letters without effect never reach the commands.
"""

from __future__ import annotations

from typing import Protocol

from kvredis.server.client.client import Client, ClientOf, Host

from .pubsub import PubSub

EVERY_CLASS = "g$lshzxetd"
"""The classes that `A` stands for, in Redis' order; `m` (a miss) and `n` (a new key) must be named."""

NAMED_CLASSES = "mn"
PLACES = "KE"


class _Server(Host, Protocol):
    event_letters: str
    pubsub: PubSub

    def drain_journal(self, by: Client | None) -> None: ...


def notify(session: ClientOf[_Server], letter: str, event: str, key: bytes, space: int | None = None) -> None:
    """Tell subscribers that `event` of class `letter` has happened to `key`, if they want to know of that class.

    To be called after the change. What the store has noted up to now is told first: a key that had to leave for this
    one, or had expired, went before it, and as in Redis an invalidation comes before the event.
    """
    server = session.server
    if server.event_letters:
        server.drain_journal(session)
        publish_event(server, letter, event, key, session.space if space is None else space)


def publish_event(server: _Server, letter: str, event: str, key: bytes, space: int) -> None:
    """The same without a client: for keys that expire or are evicted. Does nothing unless that class is on."""
    letters = server.event_letters
    if letter not in letters and not ("A" in letters and letter in EVERY_CLASS):
        return
    name = event.encode()
    if "K" in letters:
        server.pubsub.publish(b"__keyspace@%d__:%b" % (space, key), name)
    if "E" in letters:
        server.pubsub.publish(b"__keyevent@%d__:%b" % (space, name), key)


def normalize(text: str) -> str:
    """The letters as Redis reports them: A or the classes in its order, then K, E, m and n. ValueError with Redis'
    words for a letter that is none."""
    if set(text) - set(EVERY_CLASS + NAMED_CLASSES + PLACES + "A"):
        raise ValueError("Invalid event class character. Use 'Ag$lshzxeKEtmdn'.")
    given = set(text) | (set(EVERY_CLASS) if "A" in text else set())
    shown = "A" if given >= set(EVERY_CLASS) else "".join(letter for letter in EVERY_CLASS if letter in given)
    return shown + "".join(letter for letter in PLACES + NAMED_CLASSES if letter in given)


def effective(letters: str) -> str:
    """`letters` if they name a class and a place to tell it, else none at all."""
    return letters if set(letters) & set(PLACES) and set(letters) - set(PLACES) else ""


def listen_for(server: _Server, letters: str) -> None:
    """Make the normalized `letters` what the server tells from now on: CONFIG SET notify-keyspace-events."""
    server.event_letters = effective(letters)
    server.reconsider()
