"""`kvredis doctor` on memory: pools, nodes, control groups and limits of fixture machines, and what follows."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.config.schema import Config
from kvredis.cli.doctor.finding import Finding
from kvredis.cli.doctor.gpu import gpu
from kvredis.storage.memory.arena import Machine
from tests.storage.memory.test_page_lock import FakeDriver

from .doctor_machine import GIB, make_machine, run, set_meminfo, set_nodes, set_pool, write


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with 16 GiB free and an empty 2 MiB pool."""
    return make_machine(tmp_path)


def findings(machine: Machine, **env: str) -> dict[str, dict[str, Any]]:
    """What is found about memory, by name."""
    found: dict[str, dict[str, Any]] = json.loads(run(machine, "memory", "--json", **env).stdout)
    return found


def test_an_arena_of_hugepages_needs_no_other_memory(machine: Machine) -> None:
    set_pool(machine, total=2560, free=2560)
    set_meminfo(machine, available=GIB)
    assert findings(machine)["memory"]["ok"] is True
    assert findings(machine, KVREDIS_HUGEPAGES="off")["memory"]["ok"] is False
    assert run(machine, "memory", KVREDIS_HUGEPAGES="require").exit_code == 0


def test_a_pool_of_1_gib_pages_beside_it_is_not_counted(machine: Machine) -> None:
    for name in ("nr_hugepages", "free_hugepages"):
        write(machine.sys_root / "kernel/mm/hugepages/hugepages-1048576kB" / name, "16")
    set_meminfo(machine, page_kib=1024**2)
    found = findings(machine, KVREDIS_HUGEPAGES="require")["hugepages"]
    assert (found["ok"], found["found"]) == (False, "0 pages of 2 MiB, 0 free")
    assert found["fix"] == "echo 2560 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"


def test_a_machine_without_sysfs_has_no_hugepages_and_nodes_and_may_serve_without(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "sys", tmp_path / "proc")
    found = findings(machine)
    assert found["hugepages"]["found"] == "none in this kernel"
    assert found["NUMA"]["found"] == "unknown"
    assert run(machine, "memory").exit_code == 0
    assert run(machine, "memory", KVREDIS_HUGEPAGES="require").exit_code == 1


def test_what_is_advised_can_be_done_on_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    nowhere = Machine(tmp_path / "sys", tmp_path / "proc")
    found = findings(nowhere)
    assert (found["memory"]["found"], found["hugepages"]["fix"]) == ("unknown", "")
    asked = findings(nowhere, KVREDIS_HUGEPAGES="require")["hugepages"]
    assert (asked["ok"], asked["fix"]) == (False, "hugepages: auto does without")


def test_an_unbalanced_pool_is_told_by_node_and_evened_out(machine: Machine) -> None:
    set_nodes(machine, (2560, 2000), (0, 0))
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", "1")):
        write(machine.sys_root / "bus/pci/devices/0000:17:00.0" / name, text)
    found = findings(machine)["NUMA"]
    assert found["ok"] is None
    assert found["found"] == (
        "node 0: 64.00 GiB, 2560 hugepages (2000 free); node 1: 64.00 GiB, 0 hugepages (0 free); "
        "GPU 0000:17:00.0 at node 1"
    )
    node = "/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"
    assert found["fix"] == f"echo 1280 > {node.format(0)}; echo 1280 > {node.format(1)}"
    set_nodes(machine, (1280, 1280), (1280, 1280))
    assert findings(machine)["NUMA"]["fix"] == ""


def test_pages_at_nodes_that_this_process_may_not_use_are_none(machine: Machine) -> None:
    set_nodes(machine, (2560, 2560), (2560, 2560))
    status = machine.proc_root / "self/status"
    for allowed, ok in (("0-1", True), ("1", True), ("0", True)):
        write(status, f"Name: kvredis\nMems_allowed_list:\t{allowed}")
        assert findings(machine, KVREDIS_HUGEPAGES="require")["hugepages"]["ok"] is ok
    set_nodes(machine, (512, 512), (2560, 2560))
    write(status, "Mems_allowed_list:\t0")
    found = findings(machine, KVREDIS_HUGEPAGES="require")["hugepages"]
    assert found["ok"] is False
    assert "but only 512 of the free pages are at the memory nodes that this process may use" in found["found"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limits_are_told_and_count(machine: Machine, version: int) -> None:
    set_pool(machine, total=2560, free=2560)
    group = machine.sys_root / "fs/cgroup"
    if version == 2:
        write(machine.proc_root / "self/cgroup", "0::/pod")
        write(group / "pod/memory.max", str(4 * GIB))
        write(group / "pod/hugetlb.2MB.max", "0")
    else:  # as in a container: the path is the host's, what is mounted is the container's own
        write(
            machine.proc_root / "self/cgroup", "7:hugetlb:/docker/1\n5:memory:/docker/1\n1:name=systemd:/docker/1\n0::/"
        )
        write(group / "memory/memory.limit_in_bytes", str(4 * GIB))
        write(group / "hugetlb/hugetlb.2MB.limit_in_bytes", "0")
        write(group / "hugetlb/hugetlb.2MB.rsvd.limit_in_bytes", str(2**63 - 2**21))
    found = findings(machine)
    assert found["control group"]["found"] == "memory 4.00 GiB, 2 MiB hugepages 0.00 GiB"
    assert found["memory"]["ok"] is False, "pages that the group may not have do not help"
    assert "the memory limit of control group" in found["memory"]["fix"]
    assert "use hugepages" not in found["memory"]["fix"]
    assert "but the 2 MiB hugepage limit of control group" in found["hugepages"]["found"]
    assert findings(machine, KVREDIS_HUGEPAGES="require")["hugepages"]["ok"] is False
    result = run(machine, "hugepages", "--size", "5GB")
    assert result.exit_code == 1
    assert "not to be had: the 2 MiB hugepage limit" in result.output
    assert findings(machine, LMCACHE_MAX_LOCAL_CPU_SIZE="3")["memory"]["ok"] is True


def test_what_a_version_1_group_uses_firmly_is_not_there_twice(machine: Machine) -> None:
    write(machine.proc_root / "self/cgroup", "5:memory:/pod")
    group = machine.sys_root / "fs/cgroup/memory/pod"
    write(group / "memory.limit_in_bytes", str(4 * GIB))
    write(group / "memory.usage_in_bytes", str(3 * GIB))
    write(group / "memory.stat", f"cache 0\ntotal_cache {2 * GIB}\ntotal_shmem {GIB}")
    assert findings(machine, LMCACHE_MAX_LOCAL_CPU_SIZE="2")["memory"]["ok"] is True, "file cache comes back"
    assert findings(machine, LMCACHE_MAX_LOCAL_CPU_SIZE="2.01")["memory"]["ok"] is False


def test_strict_overcommit_counts_the_arena_and_leaves_hugepages_alone(machine: Machine) -> None:
    write(machine.proc_root / "sys/vm/overcommit_memory", "2")
    set_meminfo(machine, f"CommitLimit: {8 * 1024**2} kB", f"Committed_AS: {4 * 1024**2} kB")
    found = findings(machine)["overcommit"]
    assert (found["ok"], found["found"]) == (False, "never, 4.00 GiB uncommitted")
    assert "sysctl -w vm.overcommit_memory=0" in found["fix"]
    assert findings(machine, LMCACHE_MAX_LOCAL_CPU_SIZE="4")["overcommit"]["ok"] is True
    set_pool(machine, total=2560, free=2560)
    assert findings(machine)["overcommit"]["ok"] is True
    write(machine.proc_root / "sys/vm/overcommit_memory", "0")
    assert findings(machine)["overcommit"]["found"] == "heuristic"


def test_swap_is_advised_against_only_where_the_arena_could_go_there(machine: Machine) -> None:
    assert findings(machine)["swap"]["found"] == "none"
    set_meminfo(machine, "SwapTotal: 2097152 kB")
    write(machine.proc_root / "sys/vm/swappiness", "60")
    assert findings(machine)["swap"]["found"] == "2.00 GiB, swappiness 60"
    assert "vm.swappiness=1" in findings(machine)["swap"]["fix"]
    assert findings(machine, KVREDIS_PAGE_LOCK="true")["swap"]["fix"] == ""
    write(machine.proc_root / "sys/vm/swappiness", "1")
    assert findings(machine)["swap"]["fix"] == ""


def test_root_that_lost_the_capability_is_bound_by_memlock_and_a_user_who_has_it_is_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (8 << 20, 8 << 20))
    for mask, ok in (("0000000000000000", False), ("00000000a80425fb", False), ("0000000000004000", True)):
        write(machine.proc_root / "self/status", f"CapEff:\t{mask}")
        assert findings(machine, KVREDIS_PAGE_LOCK="true")["memlock"]["ok"] is ok
    assert findings(machine)["memlock"]["ok"] is None, "the configuration does not ask for it"


class Gpu(FakeDriver):
    """A driver that also has a version and names."""

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 12080
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:  # noqa: N802
        name.value = b"NVIDIA H200"
        return 0


def look(driver: Gpu, **keys: str) -> tuple[list[Finding], bool]:
    return gpu(Config.load(env=keys), driver)


def test_a_gpu_that_takes_our_memory_says_so_and_keeps_none() -> None:
    driver = Gpu(devices=2)
    (device, trial), locks = look(driver)
    assert device.found == "driver for CUDA 12.8, NVIDIA H200, NVIDIA H200"
    assert (trial.ok, trial.found, locks) == (None, "takes memory of this process", True)
    assert driver.registered == {}
    assert driver.retained == 0


def test_a_gpu_that_refuses_is_a_fault_when_page_lock_is_asked_for() -> None:
    (_, trial), locks = look(Gpu(register_code=304), KVREDIS_PAGE_LOCK="true")
    assert (trial.ok, trial.found, locks) == (False, "cuMemHostRegister: error 304", False)
    (_, trial), _ = look(Gpu(register_code=304))
    assert trial.ok is None


@pytest.mark.parametrize("driver", [Gpu(devices=0), Gpu(init_code=100)])
def test_a_driver_without_a_device_is_a_fact(driver: Gpu) -> None:
    (device,), locks = look(driver, KVREDIS_PAGE_LOCK="true")
    assert (device.ok, device.found, locks) == (None, "driver for CUDA 12.8, no device", False)
