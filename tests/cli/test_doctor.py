"""`kvredis doctor` on fixture machines: figures from the tree, advice that fits it, exit 1 only for what was asked."""

import json
import os
import resource
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.cli import doctor as doctor_module
from kvredis.cli.main import main
from kvredis.storage.arena import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Write a machine with 16 GiB free and an empty 2 MiB pool."""
    pool = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    thp = tmp_path / "sys/kernel/mm/transparent_hugepage"
    for folder in (pool, thp, tmp_path / "proc"):
        folder.mkdir(parents=True)
    for name in ("nr_hugepages", "free_hugepages", "resv_hugepages"):
        (pool / name).write_text("0\n")
    (thp / "enabled").write_text("always [madvise] never\n")
    (thp / "shmem_enabled").write_text("always advise [never]\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 16777216 kB\nHugePages_Total: 7\nHugepagesize: 2048 kB\n")
    return Machine(tmp_path / "sys", tmp_path / "proc")


def set_pool(machine: Machine, total: int, free: int) -> None:
    """Give the machine a pool."""
    pool = machine.sys_root / "kernel/mm/hugepages/hugepages-2048kB"
    (pool / "nr_hugepages").write_text(f"{total}\n")
    (pool / "free_hugepages").write_text(f"{free}\n")


def run(machine: Machine, *args: str, **env: str) -> Result:
    """Run `kvredis doctor ARGS` on a machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LMCACHE_CONFIG_FILE", raising=False)
        return CliRunner(env=env).invoke(main, ["doctor", *args], obj=machine)


def test_five_gib_need_2560_pages_and_both_lines_say_so(machine: Machine) -> None:
    result = run(machine, "hugepages", "--size", "5GB")
    assert result.exit_code == 1
    assert "5.00 GiB needs 2560 pages of 2 MiB" in result.output
    assert "sysctl -w vm.nr_hugepages=2560" in result.output
    assert "  vm.nr_hugepages=2560   (in /etc/sysctl.conf)" in result.output
    assert "pool now: 0 pages, 0 free" in result.output, "sysfs is believed, not HugePages_Total"


def test_pages_that_others_use_are_added(machine: Machine) -> None:
    set_pool(machine, total=3000, free=1000)
    facts = json.loads(run(machine, "hugepages", "--size", "5GB", "--json").stdout)
    assert (facts["pages_needed"], facts["pool_total"], facts["pool_free"], facts["ok"]) == (2560, 3000, 1000, False)
    assert facts["command"] == "sysctl -w vm.nr_hugepages=4560"


def test_a_pool_with_room_is_enough(machine: Machine) -> None:
    set_pool(machine, total=2560, free=2560)
    result = run(machine, "hugepages", "--size", "5GB")
    assert result.exit_code == 0
    assert result.output.endswith("enough\n")
    assert "sysctl" not in result.output


def test_a_default_pool_of_larger_pages_gets_other_advice(machine: Machine) -> None:
    (machine.proc_root / "meminfo").write_text("MemAvailable: 16777216 kB\nHugepagesize: 1048576 kB\n")
    result = run(machine, "hugepages", "--size", "5GB")
    assert "echo 2560 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages" in result.output
    assert "hugepagesz=2M hugepages=2560" in result.output
    assert "sysctl" not in result.output


def test_a_size_that_is_none_is_bad_usage(machine: Machine) -> None:
    result = run(machine, "hugepages", "--size", "lots")
    assert result.exit_code == 2
    assert "--size" in result.output


def test_nothing_asked_for_and_nothing_there_is_exit_0(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "cuda_driver", lambda: None)
    result = run(machine, KVREDIS_MAXCLIENTS="16")
    assert result.exit_code == 0, result.output
    for name in ("memory", "hugepages", "THP (memfd)", "memlock", "open files", "uvloop", "GPU driver"):
        assert name in result.output
    assert "NO " not in result.output
    assert "no driver library" in result.output


def test_hugepages_that_are_asked_for_and_not_there_are_exit_1(machine: Machine) -> None:
    result = run(machine, "--json", LMCACHE_LOCAL_CPU_USE_HUGEPAGES="true", KVREDIS_MAXCLIENTS="16")
    assert result.exit_code == 1
    findings = json.loads(result.stdout)
    assert findings["hugepages"]["ok"] is False
    assert findings["hugepages"]["fix"] == "sysctl -w vm.nr_hugepages=2560"
    set_pool(machine, total=2560, free=2560)
    assert run(machine, LMCACHE_LOCAL_CPU_USE_HUGEPAGES="true", KVREDIS_MAXCLIENTS="16").exit_code == 0


def test_thp_that_is_asked_for_and_off_is_exit_1(machine: Machine) -> None:
    result = run(machine, KVREDIS_HUGEPAGES="thp", KVREDIS_MAXCLIENTS="16")
    assert result.exit_code == 1
    assert "echo advise > " in result.output


def test_too_little_memory_and_too_few_files_are_exit_1(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64) if which == resource.RLIMIT_NOFILE else (-1, -1))
    findings = json.loads(run(machine, "--json", LMCACHE_MAX_LOCAL_CPU_SIZE="100").stdout)
    assert findings["memory"]["ok"] is False
    assert "MemAvailable is 16.00 GiB" in findings["memory"]["fix"]
    assert findings["open files"]["ok"] is False
    assert "ulimit -Hn 10032" in findings["open files"]["fix"]


def test_page_lock_that_is_asked_for_needs_the_memlock_limit(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    findings = json.loads(run(machine, "--json", KVREDIS_PAGE_LOCK="true").stdout)
    assert findings["memlock"]["ok"] is False
    assert findings["memlock"]["found"] == "8192 KiB"
    assert "LimitMEMLOCK" in findings["memlock"]["fix"]


def test_options_that_serve_would_refuse_are_exit_1(machine: Machine) -> None:
    result = run(machine, KVREDIS_TLS_PORT="6380", KVREDIS_MAXCLIENTS="16")
    assert result.exit_code == 1
    assert "NO  server options" in result.output
    assert "tls_cert_file: tls_port needs a certificate" in result.output
    result = run(machine, "--json", KVREDIS_SETTINGS='{"hz": "often"}', KVREDIS_MAXCLIENTS="16")
    assert json.loads(result.stdout)["server options"]["ok"] is False
