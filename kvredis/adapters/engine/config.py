"""Config from an engine's own way to pass arguments (a JSON of extra_config), with the same keys as everywhere else.

A tier below an engine's host memory differs from CacheEngine in one default: with a server behind it, it keeps no
copies of its own (local_cpu), since the engine's memory above it has them, and has 1 GiB for what is passing through.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from kvredis.backends.config.schema import DEFAULT_ORIGIN, Config
from kvredis.storage.errors import ConfigError

logger = logging.getLogger(__name__)

Role = Literal["kv_both", "kv_producer", "kv_consumer"]
"""LMCache's and vLLM's kv_role: a producer never loads, a consumer never stores."""
PASSAGE_GIB: Final = 1.0
PREFAULT_THREADS_MAX: Final = 8
_ADDRESS: Final = ("url", "host", "port")


def config_from(arguments: Mapping[str, Any], source: str) -> Config:
    """Defaults, LMCACHE_CONFIG_FILE, LMCACHE_* and KVREDIS_*, then `arguments`: keys of Config, and instead of
    remote_url a url, or host and port, which mean kvredis://: shared memory on this host, else RESP.

    Raises ConfigError, which names `source` for what is wrong in the arguments.
    """
    overrides = {name: value for name, value in arguments.items() if name not in _ADDRESS}
    url = _url(arguments, source)
    if url is not None:
        if overrides.get("remote_url", url) != url:
            raise ConfigError("remote_url", overrides["remote_url"], source, f"contradicts {url}")
        overrides["remote_url"] = url
    try:
        config = Config.load(overrides=overrides)
        if config.effective_remote_url is None:
            if config.disk is None:
                logger.warning("kvredis has no remote_url: what is stored stays in this process")
            return config
        if config.origin["local_cpu"] != DEFAULT_ORIGIN and config.local_cpu:
            return config
        is_sized = config.origin["max_local_cpu_size"] != DEFAULT_ORIGIN
        return replace(
            config, local_cpu=False, max_local_cpu_size=config.max_local_cpu_size if is_sized else PASSAGE_GIB
        )
    except ConfigError as error:
        if error.source == "flag" or error.source.startswith("--"):
            raise ConfigError(error.key, error.value, source, error.reason) from error
        raise


def for_device(config: Config, device: str) -> Config:
    """The configuration of an engine that computes on a device of that type ("cuda", "cpu" ...): beside a GPU its host
    memory is page-locked, unless it is configured otherwise, since copies to and from other memory are ten times
    slower. Pages are touched by several threads before, which is quicker than by the driver alone."""
    if device != "cuda" or config.origin["page_lock"] != DEFAULT_ORIGIN:
        return config
    threads = config.prefault or min(os.cpu_count() or 1, PREFAULT_THREADS_MAX)
    return replace(config, page_lock=True, prefault=threads)


def of_rank(config: Config, rank: int, ranks: int, replica: int = 0) -> Config:
    """The configuration of one of several ranks that are told the same, or of a data-parallel replica: a directory of
    its own below local_disk, of max_local_disk_size as LMCache's workers have it, since a disk tier is one process'."""
    below = [f"replica-{replica}"] * (replica > 0) + [f"rank-{rank}"] * (ranks > 1)
    if not below or config.local_disk is None:
        return config
    return replace(config, local_disk=os.path.join(config.local_disk, *below))


def _url(arguments: Mapping[str, Any], source: str) -> str | None:
    url, host, port = (arguments.get(name) for name in _ADDRESS)
    if url is not None:
        if host is not None or port is not None:
            raise ConfigError("url", url, source, "is given beside host or port: one of them is enough")
        return str(url)
    if host is None and port is None:
        return None
    name = str(host or "127.0.0.1")
    return f"kvredis://{f'[{name}]' if ':' in name else name}:{6379 if port is None else port}"
