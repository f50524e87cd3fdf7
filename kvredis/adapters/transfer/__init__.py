"""Copies between an engine's paged KV and blocks in host memory. The paged mover imports it; it knows no backend and
no engine. `open_transfer` chooses how, by where the engine's pages are."""

from dataclasses import replace

from kvredis.adapters.engine.tensors import outside_pools

from .base import Transfer
from .cpu import HostTransfer
from .kv_cache import PagedKV

RARE_SLOT_BYTES = 8 * 1024 * 1024


def open_transfer(paged: PagedKV, *, sums: bool = False, is_rare: bool = False) -> Transfer:
    """The transfer that is right for where the engine's KV is; with `sums` it finds checksums, where it can. Its memory
    on a GPU is not the engine's: it stays where it is when the engine's KV is unmapped. One of several that are rarely
    used takes an eighth of what others take."""
    if paged.device.type == "cuda":
        from .cuda.device import CudaDevice  # compiles kernels, where there is Triton
        from .cuda.ring import RingTransfer
        from .cuda.tuning import TUNING

        tuning = replace(TUNING, slot_bytes=RARE_SLOT_BYTES) if is_rare else TUNING
        return outside_pools(lambda: RingTransfer(paged, CudaDevice(paged), tuning, sums=sums))
    return HostTransfer(paged)
