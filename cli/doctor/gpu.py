"""What `kvredis doctor` says of GPUs: the driver, the devices, whether they take memory of ours as page-locked, and
whether there is as much GPU memory as the configuration asks for.

The trial goes through the same code as the server's page_lock, on one hugepage's worth of memory. It makes a CUDA
context of some hundred megabytes on the first device for a moment, and none where there is no driver.
"""

import ctypes
import mmap
from typing import Any

from kvredis.backends.config.schema import Config
from kvredis.storage.errors import DeviceError
from kvredis.storage.memory.cuda import cuda_driver
from kvredis.storage.memory.device_arena import DeviceArena
from kvredis.storage.memory.hugepages import HUGEPAGE_BYTES
from kvredis.storage.memory.memory_limits import gib
from kvredis.storage.memory.page_lock import CudaLock

from .finding import Finding

_NAME_BYTES = 128


def gpu(config: Config, driver: Any = None) -> tuple[list[Finding], bool]:
    """Look at the GPUs; also says whether their driver page-locks memory. `driver` defaults to this machine's."""
    driver = cuda_driver() if driver is None else driver
    if driver is None:
        return [Finding("GPU", None, "no driver library (libcuda.so.1)"), *_memory(config)], False
    names = _device_names(driver)
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    found = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}, {', '.join(names) or 'no device'}"
    if not names:
        return [Finding("GPU", None, found), *_memory(config)], False
    refusal = _trial(driver)
    locks = refusal is None
    fix = (
        "" if locks else "nvidia-smi must work for this user (/dev/nvidia*); copies to the GPU are several times slower"
    )
    trial = Finding(
        "GPU page-lock", locks if config.page_lock else None, refusal or "takes memory of this process", "", fix
    )
    return [Finding("GPU", None, found), trial, *_memory(config)], locks


def _memory(config: Config) -> list[Finding]:
    """Whether `gpu_memory` can be had now: as much is free, and some is taken, mapped and given back."""
    if config.gpu is None:
        return []
    nbytes, number = config.gpu
    needed, fix = f"{gib(nbytes)} of GPU {number}", "gpu_memory: less, or another GPU (SIZE,DEVICE); or none"
    try:
        with DeviceArena.create(1, number) as arena:
            free, total = arena.device.free_bytes()
            found = f"{gib(free)} of {gib(total)} free on {arena.device.uuid}, shared by descriptors"
    except DeviceError as error:
        return [Finding("GPU memory", False, str(error), needed, fix)]
    enough = free + arena.nbytes >= nbytes
    return [Finding("GPU memory", enough, found, needed, "" if enough else fix)]


def _device_names(driver: Any) -> list[str]:
    count, device = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    names = []
    for number in range(count.value):
        name = ctypes.create_string_buffer(_NAME_BYTES)
        if driver.cuDeviceGet(ctypes.byref(device), number) == 0:
            driver.cuDeviceGetName(name, _NAME_BYTES, device)
        names.append(name.value.decode("ascii", "replace") or "unknown device")
    return names


def _trial(driver: Any) -> str | None:
    """Have a little memory registered and let go of; the driver's refusal, if any."""
    with mmap.mmap(-1, HUGEPAGE_BYTES) as memory:
        at = ctypes.c_char.from_buffer(memory)
        lock = CudaLock.take(ctypes.addressof(at), HUGEPAGE_BYTES, driver)
        if not isinstance(lock, str):
            lock.release()
        del at  # a mapping that something points into cannot be closed
    return lock if isinstance(lock, str) else None
