"""How fast the disk tier's device is, measured in a second or two through the tier's own way to the kernel.

One thread, one request at a time and little data: a floor, and enough to see a disk that is none (a network mount, a
throttled volume). What the tier reaches is `kvredis bench disk`'s to say.
"""

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvredis.storage.disk.files import File, Files
from kvredis.storage.memory.arena import Machine
from kvredis.storage.memory.memory_limits import control_groups

PIECE_BYTES = 4 * 1024 * 1024
MEASURED_BYTES = 64 * 1024 * 1024
MEASURED_S = 1.0
"""A bound on each direction: a slow disk is measured with less."""


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Bytes per second, written (until the device has them) and read back."""

    write_bytes_s: float
    read_bytes_s: float

    def told(self) -> str:
        """Say it in a line."""
        return (
            f"writes {self.write_bytes_s / 1e9:.2f} and reads {self.read_bytes_s / 1e9:.2f} GB/s, one request at a time"
        )


def disk_rate(folder: Path, files: Files, *, direct: bool) -> DiskRate:
    """Write a file in `folder` and read it back; the file is gone afterwards. Blocks. Raises OSError.

    Without O_DIRECT what is read comes out of the page cache, and says little about the device.
    """
    path = folder / "rate"
    file = files.open(path, direct=direct)
    try:
        with mmap.mmap(-1, PIECE_BYTES) as memory, memoryview(memory) as piece:
            piece[:] = bytes(range(256)) * (PIECE_BYTES // 256)  # some devices make short work of zeros
            written, write_s = _written(file, piece)
            started_s = time.perf_counter()
            done = 0
            while done < written and time.perf_counter() - started_s < MEASURED_S:
                done += file.pread(piece, done)
            read_s = time.perf_counter() - started_s
        return DiskRate(written / write_s, done / read_s)
    finally:
        file.close()
        files.remove(path)


def io_limits(place: Path, machine: Machine) -> str:
    """Say how our control groups throttle the device that `place` is on (io.max of version 2), "" if they do not."""
    wanted = _whole_device(os.stat(place).st_dev, machine)
    told = []
    for group in control_groups("io", machine.sys_root, machine.proc_root):
        try:
            lines = (group / "io.max").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            number, _, bounds = line.partition(" ")
            told += [bound for bound in bounds.split() if number == wanted and not bound.endswith("=max")]
    return ", ".join(told)


def _whole_device(device: int, machine: Machine) -> str:
    """MAJOR:MINOR of a device, of the whole one where it is a partition: io.max knows no parts (cgroup-v2.rst)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    folder = (machine.sys_root / "dev/block" / number).resolve()
    if not (folder / "partition").exists():
        return number
    try:
        return (folder.parent / "dev").read_text().strip()
    except OSError:
        return number


def _written(file: File, piece: memoryview) -> tuple[int, float]:
    started_s = time.perf_counter()
    done = 0
    while done < MEASURED_BYTES and time.perf_counter() - started_s < MEASURED_S:
        file.pwrite(piece, done)
        done += len(piece)
    file.sync()
    return done, time.perf_counter() - started_s
