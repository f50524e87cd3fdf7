"""`kvredis doctor` on a disk tier's directory: what it finds, what mends it, and that it leaves nothing there."""

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvredis.backends.config.schema import Config
from kvredis.cli.doctor.disk import DiskFacts, disk_facts
from kvredis.cli.main import main
from kvredis.storage.disk.files import RealFiles
from kvredis.storage.disk.recovery import LOCK_NAME
from kvredis.storage.disk.segment import segment_name
from kvredis.storage.memory.arena import Machine


class BufferedFiles(RealFiles):
    """A file system that does not take O_DIRECT."""

    def direct_obstacle(self, directory: Path) -> str | None:
        return f"{directory} refuses O_DIRECT: Invalid argument"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine whose mounts are xfs on / and, on top of something older, ext4 on this test's "a disk"."""
    point = str(tmp_path / "a disk").replace(" ", r"\040")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "a disk").mkdir()
    (tmp_path / "proc/self/mountinfo").write_text(
        "27 1 254:0 / / rw,relatime - xfs /dev/vda rw\n"
        f"30 27 254:1 / {point} rw,relatime shared:1 - vfat /dev/vdb rw\n"
        f"31 27 254:2 / {point} rw,relatime - ext4 /dev/vdc rw\n"
    )
    return Machine(tmp_path / "sys", tmp_path / "proc")


def look(machine: Machine, directory: Path, size: str = "1MB", **keys: Any) -> DiskFacts:
    config = Config.load(env={}, overrides={"local_disk": str(directory), "max_local_disk_size": size})
    facts = disk_facts(config, machine, **keys)
    assert facts is not None
    return facts


def run(machine: Machine, *args: str, **env: str) -> Result:
    """Run `kvredis doctor ARGS` with no other LMCACHE_* or KVREDIS_* than those given."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("LMCACHE_", "KVREDIS_")):
                patch.delenv(name)
        return CliRunner(env=env).invoke(main, ["doctor", *args], obj=machine)


def test_a_directory_that_can_be_used_is_ok_and_as_it_was_afterwards(machine: Machine, tmp_path: Path) -> None:
    facts = look(machine, tmp_path / "a disk")
    assert (facts.exists, facts.obstacle, facts.in_use, facts.taken_bytes) == (True, None, False, 0)
    assert (facts.filesystem, facts.limit_bytes) == ("ext4", 1024**2)
    assert facts.free_bytes > facts.limit_bytes
    assert list((tmp_path / "a disk").iterdir()) == []


def test_one_that_is_not_there_is_judged_by_the_folder_above_and_not_made(machine: Machine, tmp_path: Path) -> None:
    facts = look(machine, tmp_path / "a disk/deep/down")
    assert (facts.exists, facts.obstacle, facts.filesystem) == (False, None, "ext4")
    assert "(not made yet)" in facts.told()
    assert list((tmp_path / "a disk").iterdir()) == []


def test_a_folder_beside_the_mount_is_not_in_it(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "a disk 2").mkdir()
    assert look(machine, tmp_path / "a disk 2").filesystem == "xfs"


def test_a_mount_whose_name_is_not_ascii_is_found(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "größe").mkdir()
    with (tmp_path / "proc/self/mountinfo").open("a", encoding="utf-8") as mounts:
        mounts.write(f"32 27 254:3 / {tmp_path}/größe rw - btrfs /dev/vdd rw\n")
    assert look(machine, tmp_path / "größe").filesystem == "btrfs"


def test_a_machine_that_lists_no_mounts_has_an_unknown_file_system(tmp_path: Path) -> None:
    assert look(Machine(tmp_path / "sys", tmp_path / "proc"), tmp_path).filesystem == "unknown file system"


def test_a_disk_that_is_too_small_says_what_fits(machine: Machine, tmp_path: Path) -> None:
    facts = look(machine, tmp_path / "a disk", "100000TB")
    assert facts.obstacle is not None
    assert "too small by " in facts.told()
    fits = Config.load(env={}, overrides={"max_local_disk_size": facts.fix.split(": ")[1].split(",")[0]})
    assert 0 < fits.max_local_disk_size * 1024**3 <= facts.free_bytes


def test_what_its_segments_take_already_counts_as_room(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "a disk"
    with (directory / segment_name(0)).open("wb") as segment:
        os.posix_fallocate(segment.fileno(), 0, 2 * 1024**2)
    (directory / "another.file").write_bytes(bytes(4 * 1024**2))
    real = os.statvfs(directory)
    full = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    facts = look(machine, directory, "2MB")
    assert (facts.free_bytes, facts.taken_bytes, facts.obstacle) == (0, 2 * 1024**2, None)
    assert look(machine, directory, "3MB").obstacle == "too small by 0.00 GiB"


def test_a_directory_that_a_server_has_open_is_said_to_be_in_use_and_is_no_fault(
    machine: Machine, tmp_path: Path
) -> None:
    directory = tmp_path / "a disk"
    lock = RealFiles().lock(directory / LOCK_NAME)
    assert lock is not None
    facts = look(machine, directory)
    assert (facts.in_use, facts.obstacle) == (True, None)
    assert facts.told().endswith("open in a running server")
    lock.close()
    assert not look(machine, directory).in_use


def test_looking_does_not_keep_the_lock(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "a disk" / LOCK_NAME).touch()
    assert not look(machine, tmp_path / "a disk").in_use
    lock = RealFiles().lock(tmp_path / "a disk" / LOCK_NAME)
    assert lock is not None
    lock.close()


def test_a_file_in_the_way_is_said(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/below"):
        facts = look(machine, path)
        assert facts.obstacle == "cannot be used: Not a directory"
        assert facts.fix == "choose another local_disk"
        assert facts.direct is None
        assert "O_DIRECT" not in facts.told()


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "install -d -m 700 -o 1234 {directory}   (as root)"),
        (errno.EROFS, "mount -o remount,rw {directory}"),
        (errno.ENOSPC, "make room"),
    ],
)
def test_a_directory_that_cannot_be_written_says_what_to_type(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def refuse(*args: object, **keys: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    facts = look(machine, tmp_path / "a disk")
    assert facts.obstacle == f"cannot be used: {os.strerror(number)}"
    assert facts.fix == fix.format(directory=tmp_path / "a disk")


def test_a_file_system_without_o_direct_is_usable_and_named_with_the_reason(machine: Machine, tmp_path: Path) -> None:
    directory = tmp_path / "a disk"
    facts = look(machine, directory, files=BufferedFiles())
    assert (facts.obstacle, facts.direct) == (None, False)
    assert f"buffered: {directory} refuses O_DIRECT: Invalid argument" in facts.told()
    assert "disk_direct: false" in facts.fix
    config = Config.load(env={"KVREDIS_DISK_DIRECT": "no"}, overrides={"local_disk": str(directory)})
    asked_for = disk_facts(config, machine, BufferedFiles())
    assert asked_for is not None
    assert asked_for.fix == ""


def test_its_rate_is_measured_unless_it_shall_be_quick_and_nothing_is_left(machine: Machine, tmp_path: Path) -> None:
    directory = tmp_path / "a disk"
    flags = ("disk", "--local-disk", str(directory), "--max-local-disk-size", "1MB")
    result = run(machine, *flags, "--json")
    rate = json.loads(result.stdout)["rate"]
    assert min(rate["write_bytes_s"], rate["read_bytes_s"]) > 0
    assert list(directory.iterdir()) == []
    assert " GB/s, one request at a time" in run(machine, *flags).output
    assert json.loads(run(machine, *flags, "--json", "--quick").stdout)["rate"] is None
    env = {"LMCACHE_LOCAL_DISK": str(directory), "LMCACHE_MAX_LOCAL_DISK_SIZE": "1MB"}
    assert "GB/s" in json.loads(run(machine, "--json", **env).stdout)["disk tier"]["found"]
    assert "GB/s" not in json.loads(run(machine, "--json", "--quick", **env).stdout)["disk tier"]["found"]


def test_a_throttled_device_is_told_with_its_bounds(machine: Machine, tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    group = machine.sys_root / "fs/cgroup/pod"
    group.mkdir(parents=True)
    (machine.proc_root / "self/cgroup").write_text("0::/pod\n")
    (group / "io.max").write_text(
        f"{number}9 rbps=1 wbps=1 riops=1 wiops=1\n{number} rbps=max wbps=2097152 riops=max wiops=max\n"
    )
    facts = look(machine, tmp_path / "a disk")
    assert facts.throttled == "wbps=2097152"
    assert "throttled by a control group: wbps=2097152" in facts.told()
    partition = machine.sys_root / "devices/block/disk/part"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (partition.parent / "dev").write_text("253:16\n")
    (machine.sys_root / "dev/block").mkdir(parents=True)
    (machine.sys_root / "dev/block" / number).symlink_to(partition)
    (group / "io.max").write_text("253:16 rbps=1048576 wbps=max riops=max wiops=max\n")
    assert look(machine, tmp_path / "a disk").throttled == "rbps=1048576", "a partition's disk is what is throttled"
    (group / "io.max").write_text("")
    assert look(machine, tmp_path / "a disk").throttled == ""


def test_the_command_takes_the_directory_from_its_flags_or_from_the_configuration(
    machine: Machine, tmp_path: Path
) -> None:
    directory = str(tmp_path / "a disk")
    flagged = run(machine, "disk", "--json", "--local-disk", f"file://{directory}", "--max-local-disk-size", "1MB")
    assert flagged.exit_code == 0, flagged.output
    configured = run(machine, "disk", "--json", LMCACHE_LOCAL_DISK=directory, LMCACHE_MAX_LOCAL_DISK_SIZE="1MB")
    for result in (flagged, configured):
        facts = json.loads(result.stdout)
        assert (facts["ok"], facts["directory"], facts["limit_bytes"]) == (True, directory, 1024**2)


def test_the_command_is_exit_1_with_what_is_needed_when_it_cannot_be(machine: Machine, tmp_path: Path) -> None:
    directory = str(tmp_path / "a disk")
    result = run(machine, "disk", "--local-disk", directory, "--max-local-disk-size", "100000TB")
    assert result.exit_code == 1
    assert "\nneeded: 102400000.00 GiB\nnot usable; max_local_disk_size: " in result.output


def test_a_command_without_a_directory_is_bad_usage(machine: Machine) -> None:
    assert run(machine, "disk").exit_code == 2
    result = run(machine, "disk", "--local-disk", "/x", "--max-local-disk-size", "much")
    assert result.exit_code == 2
    assert "--max-local-disk-size: max_local_disk_size: not a size" in result.output


def test_the_whole_examination_has_a_line_for_it(machine: Machine, tmp_path: Path) -> None:
    findings = json.loads(run(machine, "--json").stdout)
    assert (findings["disk tier"]["ok"], findings["disk tier"]["found"]) == (None, "none is configured")
    env = {"LMCACHE_LOCAL_DISK": str(tmp_path / "a disk"), "LMCACHE_MAX_LOCAL_DISK_SIZE": "1MB"}
    finding = json.loads(run(machine, "--json", **env).stdout)["disk tier"]
    assert (finding["ok"], finding["needed"]) == (True, "0.00 GiB")
    finding = json.loads(run(machine, "--json", **env | {"LMCACHE_MAX_LOCAL_DISK_SIZE": "100000TB"}).stdout)
    assert finding["disk tier"]["ok"] is False


def test_a_directory_without_a_size_is_a_fact_that_nothing_asked_for(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(machine, "--json", LMCACHE_LOCAL_DISK=str(tmp_path / "file"))
    assert json.loads(result.stdout)["disk tier"]["ok"] is None


def test_a_server_that_would_keep_nothing_is_a_fault_and_an_engine_with_a_server_is_not(machine: Machine) -> None:
    finding = json.loads(run(machine, "--json", LMCACHE_LOCAL_CPU="false").stdout)["disk tier"]
    assert finding["ok"] is False
    assert "local_cpu: a server without a disk tier keeps nothing" in finding["found"]
    env = {"LMCACHE_LOCAL_CPU": "false", "LMCACHE_REMOTE_URL": "redis://127.0.0.1:6379"}
    assert json.loads(run(machine, "--json", **env).stdout)["disk tier"]["ok"] is None
