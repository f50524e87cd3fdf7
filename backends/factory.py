"""The composition root of an engine's side: from a Config to the backend that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvredis.storage.store import Store

from .base import Backend
from .config.schema import Config
from .config.url import ClusterAddress, RemoteAddress, parse_remote
from .local import LocalBackend
from .remote.backend import ClusterBackend, RemoteBackend
from .shm.buffers import Staging
from .tiered.backend import LayeredBackend
from .tiered.load import Far
from .tiered.staging import NearStaging

logger = logging.getLogger(__name__)


def open_backend(config: Config) -> Backend:
    """Open what `config` asks for, with memory of max_local_cpu_size; the caller closes it.

    With remote_url blocks are kept on that server, and near as well: in memory if local_cpu is true, and on disk if
    there is one. With neither of these memory is room for transfers alone. A server that is not there is no error: it
    is a miss until it comes. Raises ConfigError and what Store.open raises.
    """
    options = config.store_options()
    url = config.effective_remote_url
    address = None if url is None else parse_remote(url, source=config.origin.get("remote_url", "remote_url"))
    if address is not None and not config.local_cpu and options.disk is None:
        return _open_far(config, address, Store.open(replace(options, keep=True)), keep=False)
    if not config.local_cpu and options.disk is None:
        logger.warning("local_cpu is false and there is neither disk nor remote_url: nothing will be stored")
    near = LocalBackend(Store.open(options), keep=config.local_cpu, load_wait_s=config.blocking_timeout_secs)
    if address is None:
        return near
    staging = NearStaging(near, config.blocking_timeout_secs)
    return LayeredBackend(near, _open_far(config, address, staging, keep=True), staging)


def _open_far(config: Config, address: RemoteAddress, staging: Staging, *, keep: bool) -> Far:
    """The backend of the server or servers at `address`. With `keep`, `staging` hears what became of each value."""
    to: Callable[..., Far]
    to = partial(ClusterBackend, address) if isinstance(address, ClusterAddress) else partial(RemoteBackend, address)
    return to(
        staging,
        connections=config.remote_connections,
        timeout_s=config.blocking_timeout_secs,
        connect_timeout_s=config.connect_timeout_s,
        keep=keep,
    )
