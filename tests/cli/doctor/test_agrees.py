"""`kvredis doctor` and `kvredis serve` on the same real machine, configuration and limits.

What the one calls a fault the other refuses, or says that it did not get; where the one finds none, the other has all
that it was asked for.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvredis.storage.memory.cuda import cuda_driver
from kvredis.storage.memory.hugepages import HugepagePool, shmem_thp_usable
from tests.cli.conftest import EXIT_S
from tests.fork_server import Forked
from tests.gate import nightly

ROOT = Path(__file__).parents[3]
LIMITED = """
import ctypes, json, os, resource, sys
for name, value in json.loads(sys.argv[1]).items():
    resource.setrlimit(getattr(resource, name), (value, value))
if sys.argv[2] == "unprivileged":
    assert ctypes.CDLL(None, use_errno=True).prctl(24, 14, 0, 0, 0) == 0 or os.geteuid(), "PR_CAPBSET_DROP CAP_IPC_LOCK"
    os.execv(sys.executable, [sys.executable, "-m", "kvredis", *sys.argv[3:]])
del sys.argv[1:3]
from kvredis.cli.main import main
main(prog_name="kvredis")
"""
"""Runs kvredis with less than this process may: limits, and without the right to lock memory beyond them, which is
taken from what a process executes."""

SMALL = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "16MB", "KVREDIS_HUGEPAGES": "off", "KVREDIS_PREFAULT": "0", "KVREDIS_PORT": "0"}


@dataclass(frozen=True)
class Case:
    """A configuration and its limits; `fault` is the finding that is not ok, None for none; `said` by serve then."""

    env: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    fault: str | None = None
    status: int | None = None
    """serve's exit status, None: it serves, with less than was asked."""
    said: str = ""
    until: str = "Ready to accept"
    """The line of serve's that ends what is looked at."""
    unprivileged: bool = False
    applies: Callable[[], bool] = lambda: True


def no_gpu() -> bool:
    """Whether page-locking is the kernel's business here; a GPU's driver asks for no limit."""
    return cuda_driver() is None


TOO_MANY = f"{(HugepagePool.read().available + 512) * 2}MB"
CASES = {
    "nothing special": Case(),
    "the page lock it asks for": Case(
        {"KVREDIS_PAGE_LOCK": "true", "LMCACHE_MAX_LOCAL_CPU_SIZE": "4MB"},
        {"RLIMIT_MEMLOCK": 6 << 20},
        said="page-locked: mlock",
        until="arena: warm",
        unprivileged=True,
        applies=no_gpu,
    ),
    "a page lock beyond the limit": Case(
        {"KVREDIS_PAGE_LOCK": "true"},
        {"RLIMIT_MEMLOCK": 1 << 20},
        "memlock",
        said="page-locked: no",
        until="arena: warm",
        unprivileged=True,
        applies=no_gpu,
    ),
    "no page lock asked, none to be had": Case({}, {"RLIMIT_MEMLOCK": 1 << 20}, unprivileged=True),
    "more than the machine has": Case({"LMCACHE_MAX_LOCAL_CPU_SIZE": "100TB"}, {}, "memory", 1, "but MemAvailable is "),
    "an address space that is too small": Case(
        {"LMCACHE_MAX_LOCAL_CPU_SIZE": "4GB"}, {"RLIMIT_AS": 2 << 30}, "memory", 1, "RLIMIT_AS"
    ),
    "files that may not be so long": Case({}, {"RLIMIT_FSIZE": 8 << 20}, "file size", 1, "File too large"),
    "files that are just so long": Case({}, {"RLIMIT_FSIZE": 16 << 20}),
    "too few open files": Case(
        {"KVREDIS_MAXCLIENTS": "1000"}, {"RLIMIT_NOFILE": 256}, "open files", None, "maxclients is 224 instead of 1000"
    ),
    "hugepages that are not there": Case(
        {"KVREDIS_HUGEPAGES": "require", "LMCACHE_MAX_LOCAL_CPU_SIZE": TOO_MANY},
        {},
        "hugepages",
        1,
        "Failed to allocate huge pages",
    ),
    "hugepages if there are any": Case({"KVREDIS_HUGEPAGES": "auto"}),
    "transparent ones where they are off": Case(
        {"KVREDIS_HUGEPAGES": "thp"},
        {},
        "THP (memfd)",
        None,
        "Arena without hugepages: shmem THP is ",
        applies=lambda: not shmem_thp_usable(),
    ),
    "a port that another has": Case({"KVREDIS_PORT": "{taken}"}, {}, "port", 1, "cannot listen: 127.0.0.1:"),
    "an address of another machine": Case({"KVREDIS_BIND": "192.0.2.1"}, {}, "port", 1, "cannot listen: 192.0.2.1:"),
    "optional addresses, none of which is here": Case(
        {"KVREDIS_BIND": "-192.0.2.1"}, {}, "port", 1, "nothing to listen on: -192.0.2.1"
    ),
    "optional addresses for metrics": Case(
        {"KVREDIS_BIND": "-192.0.2.1", "KVREDIS_UNIXSOCKET": "{folder}/kv.sock", "KVREDIS_METRICS_PORT": "free"},
        {},
        "metrics port",
        1,
        "nothing to listen on: -192.0.2.1",
    ),
    "optional addresses beside a socket": Case(
        {"KVREDIS_BIND": "-192.0.2.1", "KVREDIS_UNIXSOCKET": "{folder}/kv.sock"}
    ),
    "a socket path that a file has": Case(
        {"KVREDIS_UNIXSOCKET": "{folder}/file"}, {}, "unix socket", 1, "exists and is not a socket"
    ),
    "a socket in no folder": Case({"KVREDIS_UNIXSOCKET": "{folder}/no/kv.sock"}, {}, "unix socket", 1, "cannot listen"),
    "a socket path that is too long": Case(
        {"KVREDIS_UNIXSOCKET": "{folder}/" + "s" * 100}, {}, "unix socket", 1, "path too long"
    ),
    "TLS without a certificate": Case({"KVREDIS_TLS_PORT": "free"}, {}, "server options", 2, "needs a certificate"),
    "a disk tier in a file": Case(
        {"LMCACHE_LOCAL_DISK": "{folder}/file", "LMCACHE_MAX_LOCAL_DISK_SIZE": "1GB"},
        {},
        "disk tier",
        2,
        "cannot be used",
    ),
    "a disk tier behind a link that leads nowhere": Case(
        {"LMCACHE_LOCAL_DISK": "{folder}/link/disk", "LMCACHE_MAX_LOCAL_DISK_SIZE": "1GB"},
        {},
        "disk tier",
        2,
        "cannot be used",
    ),
    "a disk tier that is too large": Case(
        {"LMCACHE_LOCAL_DISK": "{folder}/disk", "LMCACHE_MAX_LOCAL_DISK_SIZE": "100000TB"}, {}, "disk tier", None, ""
    ),
    "a disk tier": Case({"LMCACHE_LOCAL_DISK": "{folder}/disk", "LMCACHE_MAX_LOCAL_DISK_SIZE": "1GB"}),
    "a server that would keep nothing": Case(
        {"LMCACHE_LOCAL_CPU": "false"}, {}, "disk tier", 2, "a server without a disk tier keeps nothing"
    ),
    "users that cannot be read": Case({"KVREDIS_ACLFILE": "{folder}/none"}, {}, "server options", 2, "aclfile"),
}
"""What falls short of what is asked, and what does not."""
GATE = {case.fault: name for name, case in reversed(CASES.items())}.values()
"""The first case of each finding, and one without."""


def environment(case: Case, folder: Path, taken: int) -> dict[str, str]:
    """The case's variables, with the places of this run."""
    given = {name: text.format(folder=folder, taken=taken) for name, text in (SMALL | case.env).items()}
    return {"PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"} | given


def command(case: Case, *words: str) -> list[str]:
    """kvredis with these words under the case's limits."""
    rights = "unprivileged" if case.unprivileged else "as we are"
    return [sys.executable, "-c", LIMITED, json.dumps(case.limits), rights, *words]


def served(case: Case, env: dict[str, str]) -> str:
    """Start a server, read what it says up to the case's line or its end, and end it; checks the status."""
    process = Forked(
        command(case, "serve"), cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if case.until in line:
                break
        else:
            assert process.wait(EXIT_S) == case.status, said
            return said
        assert case.status is None, said
        return said
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("name", [name if name in GATE else nightly(name) for name in CASES])
def test_what_the_doctor_calls_a_fault_the_server_does_not_get(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if not case.applies():
        case = Case(case.env)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("not mounted")
    with socket.create_server(("127.0.0.1", 0)) as other:
        env = environment(case, tmp_path, other.getsockname()[1])
        words = command(case, "doctor", "--json", "--quick")
        with Forked(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as doctor:
            told, _ = doctor.communicate(timeout=60)
        findings = json.loads(told)
        faults = [fault for fault, finding in findings.items() if finding["ok"] is False]
        assert faults == ([] if case.fault is None else [case.fault]), told
        assert doctor.returncode == (1 if case.fault else 0)
        said = served(case, env)
    assert case.said in said
    if case.fault is None:
        assert "WARNING" not in said
    if name.startswith("hugepages that"):
        assert findings["hugepages"]["fix"] in said, "both name the same line"


def test_the_launcher_takes_the_right_to_lock_memory_away() -> None:
    """Else the cases that have it taken away would compare nothing."""
    case = Case(limits={"RLIMIT_MEMLOCK": 1 << 20}, unprivileged=True)
    script = LIMITED.replace('"-m", "kvredis"', '"-c"')
    code = (
        "import ctypes, mmap; m = mmap.mmap(-1, 4 << 20); a = ctypes.addressof(ctypes.c_char.from_buffer(m)); "
        "print(ctypes.CDLL(None).mlock(ctypes.c_void_p(a), ctypes.c_size_t(4 << 20)))"
    )
    words = [sys.executable, "-c", script, json.dumps(case.limits), "unprivileged", code]
    assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout == "-1\n"
