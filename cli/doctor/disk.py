"""What `kvredis doctor` says of a disk tier's directory: can it be used, is there room, O_DIRECT, who has it open, how
fast is it.

A server may have the directory open meanwhile, so nothing in it is opened but the lock; what must be tried out (may we
write, does O_DIRECT work) is tried in a folder of our own, which is gone again afterwards. The rate is measured in a
second or two through the tier's own way to the kernel: one thread, one request at a time and little data. That is a
floor, and enough to see a disk that is none (a network mount, a throttled volume). What the tier reaches is
`kvredis bench disk`'s to say.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kvredis.backends.config.schema import KEYS, Config
from kvredis.cli.config import config_file_option, load_config, option_of
from kvredis.storage.disk.files import File, Files, RealFiles
from kvredis.storage.disk.recovery import LOCK_NAME
from kvredis.storage.disk.segment import segment_number
from kvredis.storage.memory.arena import Machine
from kvredis.storage.memory.memory_limits import control_groups, gib
from kvredis.storage.options import GIB

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


INDEX_SHARE = 0.05
"""What is advised to be left for the index: some 150 bytes a record, the smallest of which takes 4096."""

_OCTAL = re.compile(r"\\([0-7]{3})")
_STAT_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own blocks are: stat(2)


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A directory as a disk tier finds it. `obstacle` says why it cannot be used, `fix` is the line that mends it.

    One that is not there is made by the server; the facts are then those of the folder above that is there. Segments
    have `taken_bytes` already. `limit_bytes` 0: no setting says what the tier may take. None: not tried.
    """

    directory: str
    exists: bool
    filesystem: str
    free_bytes: int
    taken_bytes: int
    limit_bytes: int
    direct: bool | None
    direct_obstacle: str | None
    in_use: bool
    obstacle: str | None
    fix: str
    rate: DiskRate | None = None
    throttled: str = ""

    def told(self) -> str:
        """Say it in a line."""
        parts = [self.directory if self.exists else f"{self.directory} (not made yet)"]
        if self.obstacle is not None:
            parts.append(self.obstacle)
        parts += [self.filesystem, f"{gib(self.free_bytes)} free"]
        if self.taken_bytes:
            parts.append(f"{gib(self.taken_bytes)} its own")
        if self.direct is not None:
            parts.append("O_DIRECT" if self.direct else f"buffered: {self.direct_obstacle}")
        if self.rate is not None:
            parts.append(self.rate.told())
        if self.throttled:
            parts.append(f"throttled by a control group: {self.throttled}")
        if self.in_use:
            parts.append("open in a running server")
        return ", ".join(parts)


@click.command(epilog="Example: kvredis doctor disk --local-disk /var/lib/kvredis --max-local-disk-size 100GB")
@option_of(KEYS["local_disk"])
@option_of(KEYS["max_local_disk_size"])
@click.option("--quick", is_flag=True, help="Do not measure how fast it is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@config_file_option
@click.pass_context
def disk(ctx: click.Context, /, quick: bool, as_json: bool, config_file: Path | None, **size: str | None) -> None:
    """Print whether a directory, by default the configured one, can be a disk tier; if not, what mends it (exit 1).

    Writes 64 MiB there and reads them back, to say how fast it is.
    """
    config = load_config(config_file, size)
    facts = disk_facts(config, ctx.obj if isinstance(ctx.obj, Machine) else Machine(), measure=not quick)
    if facts is None:
        raise click.UsageError("no local_disk is configured: name a directory with --local-disk")
    if as_json:
        click.echo(json.dumps({"ok": facts.obstacle is None, **asdict(facts)}, indent=2))
    else:
        click.echo(facts.told())
        if facts.limit_bytes:
            click.echo(f"needed: {gib(facts.limit_bytes)}")
        click.echo(f"{'usable' if facts.obstacle is None else 'not usable'}{facts.fix and f'; {facts.fix}'}")
    ctx.exit(0 if facts.obstacle is None else 1)


def disk_facts(
    config: Config, machine: Machine, files: Files | None = None, *, measure: bool = False
) -> DiskFacts | None:
    """Look at the configured directory; None when there is none. Blocks; what it makes to try it out, it takes away."""
    files = files or RealFiles()
    if config.local_disk is None:
        return None
    directory = Path(config.local_disk).absolute()
    place = next(each for each in (directory, *directory.parents) if os.path.exists(each))
    exists = place == directory
    limit_bytes = int(config.max_local_disk_size * GIB)
    filesystem, mounted_at = _filesystem(place, machine.proc_root)
    stat = os.statvfs(place)
    free_bytes = stat.f_bavail * stat.f_frsize
    direct: bool | None = None
    rate: DiskRate | None = None
    direct_obstacle = obstacle = None
    taken_bytes, in_use, fix = 0, False, ""
    try:
        measured = measure and free_bytes > 2 * MEASURED_BYTES
        direct_obstacle, rate = _try_out(place, files, direct=config.disk_direct, measured=measured)
        direct = direct_obstacle is None
        if not exists:
            _must_be_free(place / directory.relative_to(place).parts[0])
        else:
            in_use = _in_use(directory, files)
            taken_bytes = _taken_bytes(directory)
    except OSError as error:
        obstacle, fix = f"cannot be used: {error.strerror}", _way_out(error, directory, mounted_at)
    if obstacle is None and free_bytes + taken_bytes < limit_bytes:
        missing = limit_bytes - free_bytes - taken_bytes
        fits = (free_bytes + taken_bytes) * (1 - INDEX_SHARE) // (1024**2)
        obstacle, fix = f"too small by {gib(missing)}", f"max_local_disk_size: {fits:.0f}MB, or make room"
    elif obstacle is None and direct_obstacle is not None and config.disk_direct:
        fix = "for O_DIRECT a local_disk on ext4 or xfs; disk_direct: false if it shall be so"
    return DiskFacts(
        directory=str(directory),
        exists=exists,
        filesystem=filesystem,
        free_bytes=free_bytes,
        taken_bytes=taken_bytes,
        limit_bytes=limit_bytes,
        direct=direct,
        direct_obstacle=direct_obstacle,
        in_use=in_use,
        obstacle=obstacle,
        fix=fix,
        rate=rate,
        throttled=io_limits(place, machine),
    )


def _try_out(place: Path, files: Files, *, direct: bool, measured: bool) -> tuple[str | None, DiskRate | None]:
    """Make a folder in `place` and write to it; say why O_DIRECT cannot be had, if so, and how fast it was. Raises
    OSError."""
    with tempfile.TemporaryDirectory(prefix=".kvredis-doctor-", dir=place) as folder:
        obstacle = files.direct_obstacle(Path(folder))
        rate = disk_rate(Path(folder), files, direct=direct and obstacle is None) if measured else None
        return None if obstacle is None else obstacle.replace(folder, str(place)), rate


def _must_be_free(path: Path) -> None:
    """Raise OSError unless the server can make this directory; a link that leads nowhere only seems not to be there."""
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)
        raise FileExistsError(errno.EEXIST, f"{path} is a link to what is not there")


def _in_use(directory: Path, files: Files) -> bool:
    """Say whether a server that runs holds the lock. Raises OSError."""
    if not (directory / LOCK_NAME).exists():
        return False
    lock = files.lock(directory / LOCK_NAME)
    if lock is not None:
        lock.close()
    return lock is None


def _taken_bytes(directory: Path) -> int:
    """Give what the segments that are there take of the device. Raises OSError."""
    with os.scandir(directory) as found:
        segments = [each.stat() for each in found if segment_number(each.name) is not None]
    return sum(stat.st_blocks for stat in segments) * _STAT_BLOCK_BYTES


def _filesystem(place: Path, proc_root: Path) -> tuple[str, str]:
    """Give the file system's type and where it is mounted, as the kernel lists them."""
    best, kind = "", "unknown file system"
    where = os.path.realpath(place)
    try:
        lines = (proc_root / "self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), mount.split()[4])  # a blank is written as \040
        # The last one listed is on top of others at the same point.
        if len(point) >= len(best) and (where + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, source.split()[0]
    return kind, best


def _way_out(error: OSError, directory: Path, mounted_at: str) -> str:
    if error.errno == errno.EROFS:
        return f"mount -o remount,rw {mounted_at}"
    if error.errno == errno.EEXIST:
        return f"mount or make {os.path.realpath(directory)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"install -d -m 700 -o {os.geteuid()} {directory}   (as root)"
    return "choose another local_disk"
