"""The other process of a link: does what it is told over a socket, one line of JSON at a time, until that closes.

Started by process.py with the descriptors that it shall use. Each order is answered with `ready` before it is
carried out, and with what came of it afterwards.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any, TextIO

from kvredis.storage.errors import KVRedisError

from .ends import WAIT_S, End, Ways


def main(given: dict[str, Any]) -> None:
    """Serve one session; `given` has the numbers of descriptors, the TCP port and nbytes."""
    control = socket.socket(fileno=given["control"])
    unix = [socket.socket(fileno=fd) for fd in given["unix"]]
    tcp = [socket.create_connection(("127.0.0.1", given["port"]), WAIT_S) for _ in range(2)]
    for each in (*unix, *tcp):
        each.settimeout(WAIT_S)
    for each in tcp:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What the other end sends on comes first, and we receive on it.
    sockets = {"unix": (unix[1], unix[0]), "tcp": (tcp[1], tcp[0])}
    ways = Ways(sockets, (given["pipe"][0], given["pipe"][1]), (given["events"][0], given["events"][1]))
    end = End(given["nbytes"], 1, given["shared"], ways)
    with control, control.makefile("rw", encoding="utf-8", newline="\n") as talk:
        for line in talk:
            _obey(end, json.loads(line), talk)


def _obey(end: End, order: dict[str, Any], talk: TextIO) -> None:
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    jobs = order["jobs"]
    end.prepare(order["way"], jobs, order["value"])
    _say(talk, ready=True)
    try:
        if order["rounds"]:
            end.echo(order["way"], order["rounds"])
            _say(talk)
            return
        span = end.work(order["way"], jobs)
        _say(talk, span=span, verified=end.verify(order["way"]) if "receive" in jobs else 0)
    except (KVRedisError, OSError) as error:
        _say(talk, error=f"{type(error).__name__}: {error}")


def _say(talk: TextIO, **answer: Any) -> None:
    talk.write(json.dumps(answer) + "\n")
    talk.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
