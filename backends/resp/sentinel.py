"""Where a master is now: its Sentinels are asked each time that a connection to it is opened.

redis-py does the asking, with authentication and TLS; payloads then go over our own connection. WHY one Sentinel at a
time: one that is gone, or hangs, must cost a share of the time only, and the one that has answered is asked first next
time.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final, cast

from kvredis.backends.config.url import Address, SentinelAddress
from kvredis.storage.errors import BackendError

from .sockets import client, within

WAIT_S_MIN: Final = 0.01


class SentinelResolver:
    """Finds the master of one service. Any thread may ask; those who ask at once do so side by side."""

    def __init__(self, address: SentinelAddress) -> None:
        self._address = address
        self._order = address.sentinels  # replaced as a whole, never changed

    def master(self, timeout_s: float) -> Address:
        """Ask the Sentinels in turn, within `timeout_s` in all, until one names a master that it takes for alive.

        Raises BackendError with what each of them has answered.
        """
        import redis  # noqa: F401  before the clock starts: the first time it may take as long as all the rest

        deadline_s = time.monotonic() + timeout_s
        order, answers = self._order, []
        for asked, (host, port) in enumerate(order):
            left_s = max((deadline_s - time.monotonic()) / (len(order) - asked), WAIT_S_MIN)
            try:
                master = within(left_s, f"asking Sentinel {host}:{port}", partial(self._ask, host, port, left_s))
            except Exception as error:  # what redis-py makes of an answer that is none may be anything
                answers.append(f"{host}:{port}: {str(error)[:200] or repr(error)}")
                continue
            self._order = (order[asked], *order[:asked], *order[asked + 1 :])
            return master
        raise BackendError(f"no Sentinel knows a master for {self._address.service!r}: {'; '.join(answers)}")

    def _ask(self, host: str, port: int, timeout_s: float) -> Address:
        address = self._address
        login = (address.sentinel_username, address.sentinel_password)
        with client(host, port, login, address.tls, timeout_s) as asked:
            masters = cast("dict[str, dict[str, Any]]", asked.sentinel_masters())  # redis-py types asyncio's like it
        master = masters.get(address.service)
        if master is None:
            raise BackendError("does not watch it")
        if not master["is_master"] or master["is_sdown"] or master["is_odown"]:
            raise BackendError(f"finds it {master['flags']}")
        return address.server(master["ip"], master["port"])
