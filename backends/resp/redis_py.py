"""redis-py as we ask it: short questions of who is where, each tried once and within a time.

It knows how to log in and how Sentinels and clusters answer. No payload passes through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvredis.backends.config.tls import Tls

if TYPE_CHECKING:
    import redis


def client(host: str, port: int, login: tuple[str, str], tls: Tls | None, timeout_s: float) -> redis.Redis:
    """A client to be closed by the caller; `login` is user and password, either may be "". It connects with the first
    question, and raises what redis-py raises. Loads redis-py, which takes a while the first time."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {} if tls is None else tls.redis_options()
    return redis.Redis(
        host,
        port,
        username=login[0] or None,
        password=login[1] or None,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,  # one exchange less
        **options,
    )
