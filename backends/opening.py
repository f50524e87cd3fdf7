"""The composition root of an engine's side: from a Config to the backend that it asks for."""

from __future__ import annotations

import logging

from kvredis.storage.store import Store

from .address import parse_url
from .base import Backend
from .config import Config
from .local import LocalBackend
from .remote import RemoteBackend

logger = logging.getLogger(__name__)


def open_backend(config: Config) -> Backend:
    """Open what `config` asks for, with memory of max_local_cpu_size; the caller closes it.

    With remote_url blocks live on that server, and the memory here is room for transfers only. A server that is not
    there is no error: it is a miss until it comes. Raises ConfigError and what Arena.create raises.
    """
    if config.remote_url is None:
        if not config.local_cpu:
            logger.warning("local_cpu is false and there is no remote_url: nothing will be stored")
        return LocalBackend(Store.open(config.store_options()), keep=config.local_cpu)
    address = parse_url(config.remote_url, source=config.origin.get("remote_url", "remote_url"))
    return RemoteBackend(address, Store.open(config.store_options()), timeout_s=config.blocking_timeout_secs)
