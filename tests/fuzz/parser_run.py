"""Mutated sessions against the parser, without sockets: the quick reader takes what the careful one takes.

The reference is the same parser without its quick reader. Both get the same bytes in the same pieces; the commands and
the error must be equal, and once the client has gone nothing may be reserved.
"""

import random
from dataclasses import dataclass

from kvredis.server.protocol.parser import Parser
from kvredis.server.protocol.request import REFUSED, Argument, Refused
from kvredis.storage.entry import Reservation
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.fuzz.corpus import session
from tests.fuzz.mutator import cuts, mutate, shrink
from tests.server.feed import CarefulParser, Seen, feed

ARENA_BYTES = 4 * 1024 * 1024
BULK_BYTES_MAX = 2 * 1024 * 1024


@dataclass(frozen=True)
class ParserCase:
    """One stream, how it arrives, and whether its client has given its password."""

    stream: bytes
    cuts: tuple[int, ...]
    authenticated: bool


def parser_case(seed: int, number: int) -> ParserCase:
    """Case `number` of a seed, always the same."""
    rng = random.Random(f"parser {seed} {number}")
    stream = mutate(rng, session(rng), session(rng))
    return ParserCase(stream, tuple(cuts(rng, stream)), rng.random() < 0.9)


def make_store() -> Store:
    """A store with room for some payloads and not for all, so that REFUSED comes up too."""
    return Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))


def both(store: Store, case: ParserCase) -> tuple[list[Seen], list[Seen]]:
    """What the parser makes of the stream with its quick reader, and without."""

    def open_payload(args: list[Argument], length: int) -> Reservation | Refused | None:
        if len(args) < 2 or args[0] not in (b"SET", b"MSET") or not isinstance(args[-1], bytes):
            return None
        return store.reserve(args[-1], length) or REFUSED

    found = []
    for parser_class in (Parser, CarefulParser):
        parser = parser_class(open_payload, bulk_bytes_max=BULK_BYTES_MAX)
        parser.authenticated = case.authenticated
        found.append(feed(parser, case.stream, case.cuts))
        parser.abandon()
        assert store.reserved_bytes == 0
    return found[0], found[1]


def differs(store: Store, case: ParserCase) -> bool:
    """Whether the two readers disagree, or an exception gets out, or something stays reserved."""
    try:
        quick, careful = both(store, case)
    except Exception:
        return True
    return quick != careful or not all(quick)


def run_parser_cases(seed: int, numbers: range) -> None:
    """Raise AssertionError for the first case that differs, with its shortest stream."""
    store = make_store()
    for number in numbers:
        case = parser_case(seed, number)
        if differs(store, case):
            authenticated, pieces = case.authenticated, case.cuts

            def fails(stream: bytes, authenticated: bool = authenticated, pieces: tuple[int, ...] = pieces) -> bool:
                fitting = tuple(at for at in pieces if at < len(stream))
                return differs(store, ParserCase(stream, fitting, authenticated))

            raise AssertionError(
                f"parser case {number} of seed {seed} (authenticated={authenticated}, cuts={pieces}); "
                f"shortest stream: {shrink(case.stream, fails)[:2000]!r}"
            )
    store.check_integrity()
    store.close()
