"""The composition root of an engine's side: from a Config to the backend that it asks for."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvredis.storage.store import Store

from .address import parse_url
from .base import Backend
from .config import Config
from .local import LocalBackend
from .remote import RemoteBackend

logger = logging.getLogger(__name__)


def open_backend(config: Config) -> Backend:
    """Open what `config` asks for, with memory of max_local_cpu_size and a disk tier below it; the caller closes it.

    With remote_url blocks live on that server: the memory here is room for transfers only, and there is no disk tier. A
    server that is not there is no error: it is a miss until it comes. Raises ConfigError and what Store.open raises.
    """
    options = config.store_options()
    if config.remote_url is None:
        if not config.local_cpu and options.disk is None:
            logger.warning("local_cpu is false and there is neither disk nor remote_url: nothing will be stored")
        return LocalBackend(Store.open(options), keep=config.local_cpu)
    if options.disk is not None:
        logger.warning("local_disk is not used beside remote_url: give the disk tier to that server")
    address = parse_url(config.remote_url, source=config.origin.get("remote_url", "remote_url"))
    staging = Store.open(replace(options, disk=None, keep=True))
    return RemoteBackend(address, staging, timeout_s=config.blocking_timeout_secs)
