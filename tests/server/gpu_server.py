"""A live server with GPU memory on a library in libcuda's place, and clients that map that memory as another GPU."""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Self

from kvredis.storage.memory.device_arena import DeviceArena
from tests.server.feed import request
from tests.server.lane_client import LaneClient, connected, receive_with_descriptors
from tests.server.live import LiveServer

MIB: Final = 1024 * 1024
GPU_BYTES: Final = 8 * MIB


class GpuServer(LiveServer):
    """`async with GpuServer(folder) as live`; KVREDIS_LIBCUDA names the library."""

    def __init__(self, folder: Path, arena_bytes: int = 16 * MIB, gpu_bytes: int = GPU_BYTES, **options: Any) -> None:
        super().__init__(folder, arena_bytes, **options)
        self.store.add_gpu(DeviceArena.create(gpu_bytes))
        assert self.store.gpu is not None
        self.gpu = self.store.gpu

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.store.check_integrity()
        await super().__aexit__(kind, error, trace)


class GpuClient(LaneClient):
    """A client that has the GPU's memory too, in `gpu`."""

    gpu: DeviceArena | None = None

    async def attach(self) -> Any:
        """KV.ATTACH GPU: the map, or the error."""
        await self._loop.sock_sendall(self.sock, request("KV.ATTACH", "GPU"))
        data, descriptors = await receive_with_descriptors(self.sock)
        self._reader.feed(data)
        reply = await self.read()
        if isinstance(reply, list):
            self.facts = dict(zip(reply[::2], reply[1::2], strict=True))
            for fd in descriptors[:2]:
                os.close(fd)
            self.gpu = DeviceArena.attach(descriptors[2], self.facts[b"gpu-bytes"], 1)
            os.close(descriptors[2])
        return reply

    def at(self, address: int) -> int:
        """Where in the GPU's memory an address lies."""
        offset = address - int(self.facts[b"gpu-base"])
        assert offset >= 0
        return offset

    async def reserve(self, key: str, value: bytes) -> int:
        """Reserve room for a value on the GPU and write it there; the reservation's id."""
        assert self.gpu is not None
        number, address = await self.ask("KV.RESERVE", key, len(value), "GPU")
        self.gpu.write(self.at(address), value)
        return int(number)

    async def put(self, key: str, value: bytes) -> None:
        """Store a value on the GPU."""
        assert await self.ask("KV.COMMIT", await self.reserve(key, value)) == b"OK"

    def bytes_at(self, place: list[Any]) -> bytes:
        """What lies at [address, length, "gpu"]."""
        assert self.gpu is not None
        assert place[2] == b"gpu"
        found = bytearray(place[1])
        self.gpu.read(self.at(place[0]), found)
        return bytes(found)

    def close(self) -> None:
        """Hang up and let go of all."""
        super().close()
        if self.gpu is not None:
            self.gpu.close()
            self.gpu = None


@contextlib.asynccontextmanager
async def on_gpu(live: LiveServer) -> AsyncIterator[GpuClient]:
    """A client on the server's unix socket, attached to the GPU's memory."""
    async with connected(live) as plain:
        client = GpuClient(plain.sock)
        assert isinstance(await client.attach(), list)
        try:
            yield client
        finally:
            client.close()
