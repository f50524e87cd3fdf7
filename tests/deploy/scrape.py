"""The names of a real server's scrape, and those that an expression of PromQL asks for."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvredis.storage.memory.cuda import LIBRARY_VARIABLE
from kvredis.storage.memory.device_arena import DeviceArena
from tests.server.http.http_client import ask
from tests.server.live import MIB, run_on
from tests.server.tiered_server import TieredServer
from tests.stand_in_cuda import stand_in_cuda

NAME = re.compile(r"(?<![\w:\"'$])((?:kvredis|lmcache|process)[_:][\w:]+)(?![\w:]*\()")


def scraped_names(folder: Path) -> set[str]:
    """What a server with a disk tier, GPU memory and a client that has done something tells of."""

    async def story() -> str:
        async with TieredServer(folder, metrics_port=-1) as live:
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv(LIBRARY_VARIABLE, str(stand_in_cuda()))
                live.store.add_gpu(DeviceArena.create(8 * MIB))
            client = await live.connect()
            await client.ask("SET", "k", b"v" * 20_000)
            await client.get("k")
            return (await ask(live, "/metrics")).body.decode()

    families = text_string_to_metric_families(run_on("uvloop", story()))
    return {sample.name for family in families for sample in family.samples}


def asked_names(expression: str) -> set[str]:
    """The metrics that are named in an expression, those of labels' values left out."""
    return set(NAME.findall(re.sub(r"\"[^\"]*\"", '""', expression)))
