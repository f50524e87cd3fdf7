"""How a setting's value may be written: from what CONFIG SET was given to how CONFIG GET reports it.

A check raises ValueError with the words that Redis uses for what is wrong; clients and test suites match on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kvredis.server.protocol.arguments import INT64_MAX, parse_integer

Check = Callable[[str], str]
"""From what the user wrote to how Redis would report it; ValueError with Redis' words for what is wrong."""

Limits = tuple[int, int, int]
"""Hard limit and soft limit of an output buffer in bytes, 0 being none, and the seconds that the soft one may last."""

LIMIT_CLASSES = {"normal": "normal", "slave": "replica", "replica": "replica", "pubsub": "pubsub"}
"""The kinds of client that have limits of their own, by the names that the setting takes."""


def anything(text: str) -> str:
    """Any text."""
    return text


def yes_no(text: str) -> str:
    """A switch."""
    if text.lower() not in ("yes", "no"):
        raise ValueError("argument must be 'yes' or 'no'")
    return text.lower()


def number(low: int, high: int = INT64_MAX) -> Check:
    """A whole number within bounds."""

    def check(text: str) -> str:
        return _between(_integer(text), low, high)

    return check


def clamped(low: int, high: int) -> Check:
    """A whole number that is brought within bounds instead of being refused: `hz`."""

    def check(text: str) -> str:
        return str(min(max(_integer(text), low), high))

    return check


def memory(low: int = 0, high: int = INT64_MAX) -> Check:
    """Bytes with redis.conf's units: k is 1000, kb 1024, and so on."""

    def check(text: str) -> str:
        nbytes = parse_memory(text)
        if nbytes is None:
            raise ValueError("argument must be a memory value")
        return _between(nbytes, low, high)

    return check


def memory_or_share(text: str) -> str:
    """Bytes, or a percentage: maxmemory-clients."""
    if not text.endswith("%"):
        return memory()(text)
    share = parse_integer(text[:-1].encode())
    if share is None or share < 0:
        raise ValueError("argument must be a memory or percent value")
    if share > 100:
        raise ValueError("percentage argument must be less or equal to 100")
    return text


def parse_memory(text: str) -> int | None:
    """A number of bytes as redis.conf writes it."""
    found = re.fullmatch(r"(\d{1,19})(b|kb?|mb?|gb?|)", text.lower(), re.ASCII)
    if found is None:
        return None
    nbytes = int(found[1])
    power = " kmg".index(found[2].strip("b") or " ")
    unit: int = 1024 if found[2].endswith("b") else 1000
    for _ in range(power):
        nbytes *= unit
    return nbytes


def one_of(*names: str) -> Check:
    """One of several words."""

    def check(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"argument(s) must be one of the following: {', '.join(names)}")
        return text.lower()

    return check


def seconds(text: str) -> str:
    """A time in seconds, with or without a fraction, at most a day: the configuration file takes no more, and CONFIG
    REWRITE may write it there."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII) is None or not 0 < float(text) <= 86_400:
        raise ValueError("argument must be a number of seconds above 0, at most 86400")
    return f"{float(text):g}"


def save_points(text: str) -> str:
    """Pairs of seconds and changes."""
    numbers = text.split()
    if len(numbers) % 2 or not all(re.fullmatch(r"[0-9]{1,18}", each) for each in numbers):
        raise ValueError("Invalid save parameters")
    return " ".join(numbers)


def buffer_limits(text: str) -> str:
    """`class hard soft seconds` for one class of clients or more."""
    parse_limits(text)
    return text


def parse_limits(text: str) -> dict[str, Limits]:
    """The limits that a value of client-output-buffer-limit names, by class."""
    words = text.split()
    if len(words) % 4:
        raise ValueError("Wrong number of arguments in buffer limit configuration.")
    limits: dict[str, Limits] = {}
    for name, hard, soft, lasting in zip(*[iter(words)] * 4, strict=True):
        if name.lower() not in LIMIT_CLASSES:
            raise ValueError("Invalid client class specified in buffer limit configuration.")
        sizes = [parse_memory(hard), parse_memory(soft), parse_integer(lasting.encode())]
        known = [size for size in sizes if size is not None and 0 <= size <= INT64_MAX]
        if len(known) != len(sizes):
            raise ValueError("Error in hard, soft or soft_seconds setting in buffer limit configuration.")
        limits[LIMIT_CLASSES[name.lower()]] = (known[0], known[1], known[2])
    return limits


def limits_text(limits: dict[str, Limits]) -> str:
    """The limits as CONFIG GET shows them, with Redis' older word for replicas."""
    shown = (("normal", "normal"), ("slave", "replica"), ("pubsub", "pubsub"))
    return " ".join(" ".join(map(str, (name, *limits[kind]))) for name, kind in shown)


def percentiles(text: str) -> str:
    """Percentages, each between 0 and 100."""
    numbers = text.split()
    if not all(re.fullmatch(r"-?\d{1,9}(\.\d{1,15})?", each, re.ASCII) for each in numbers):
        raise ValueError("Invalid latency-tracking-info-percentiles parameters")
    if not all(0 <= float(each) <= 100 for each in numbers):
        raise ValueError("latency-tracking-info-percentiles parameters should sit between [0.0,100.0]")
    return " ".join(repr(float(each)).removesuffix(".0") for each in numbers)


def _integer(text: str) -> int:
    found = parse_integer(text.encode("utf-8", "surrogateescape"))
    if found is None:
        raise ValueError("argument couldn't be parsed into an integer")
    return found


def _between(found: int, low: int, high: int) -> str:
    if not low <= found <= high:
        raise ValueError(f"argument must be between {low} and {high} inclusive")
    return str(found)
