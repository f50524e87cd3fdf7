"""`kvredis doctor` on fixture machines: figures from the tree, advice that fits it, exit 1 only for what was asked."""

import importlib.util
import io
import json
import os
import pty
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvredis.backends.config.schema import Config
from kvredis.cli.doctor import gpu, system
from kvredis.cli.doctor.finding import Finding, draw
from kvredis.cli.doctor.system import network
from kvredis.storage.memory.arena import Machine
from tests.cli.conftest import ROOT, Serve
from tests.server.certificates import make_papers

from .doctor_machine import make_machine, run, set_meminfo, set_pool


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with 16 GiB free and an empty 2 MiB pool."""
    return make_machine(tmp_path)


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
    set_meminfo(machine, page_kib=1024**2)
    result = run(machine, "hugepages", "--size", "5GB")
    assert "echo 2560 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages" in result.output
    assert "hugepagesz=2M hugepages=2560" in result.output
    assert "sysctl" not in result.output


def test_a_size_that_is_none_is_bad_usage(machine: Machine) -> None:
    result = run(machine, "hugepages", "--size", "lots")
    assert result.exit_code == 2
    assert "--size" in result.output


def test_nothing_asked_for_and_nothing_there_is_exit_0(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuda_driver", lambda: None)
    result = run(machine)
    assert result.exit_code == 0, result.output
    for name in ("memory", "hugepages", "THP (memfd)", "memlock", "NUMA", "open files", "uvloop", "GPU"):
        assert name in result.output
    assert "NO " not in result.output
    assert "no driver library" in result.output


def test_hugepages_that_are_asked_for_and_not_there_are_exit_1(machine: Machine) -> None:
    result = run(machine, "--json", LMCACHE_LOCAL_CPU_USE_HUGEPAGES="true")
    assert result.exit_code == 1
    findings = json.loads(result.stdout)
    assert findings["hugepages"]["ok"] is False
    assert findings["hugepages"]["fix"] == "sysctl -w vm.nr_hugepages=2560"
    set_pool(machine, total=2560, free=2560)
    assert run(machine, LMCACHE_LOCAL_CPU_USE_HUGEPAGES="true").exit_code == 0


def test_thp_that_is_asked_for_and_off_is_exit_1(machine: Machine) -> None:
    result = run(machine, KVREDIS_HUGEPAGES="thp")
    assert result.exit_code == 1
    assert "echo advise > " in result.output


def test_too_little_memory_and_too_few_files_are_exit_1(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64) if which == resource.RLIMIT_NOFILE else (-1, -1))
    findings = json.loads(run(machine, "--json", LMCACHE_MAX_LOCAL_CPU_SIZE="100", KVREDIS_MAXCLIENTS="10000").stdout)
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
    result = run(machine, KVREDIS_TLS_PORT="6380")
    assert result.exit_code == 1
    assert "NO  server options" in result.output
    assert "tls_cert_file: tls_port needs a certificate" in result.output
    result = run(machine, "--json", KVREDIS_SETTINGS='{"hz": "often"}')
    assert json.loads(result.stdout)["server options"]["ok"] is False


def test_ports_are_free_or_ours_or_a_fault(machine: Machine, serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = run(machine, "system", KVREDIS_PORT=port)
        assert result.exit_code == 1
        assert f"NO  port            127.0.0.1:{port}: Address already in use" in result.output
        assert f"ss -ltnp 'sport = :{port}'" in result.output
        found = json.loads(run(machine, "system", "--json", KVREDIS_METRICS_PORT=port).stdout)
        assert found["metrics port"]["ok"] is False
    assert json.loads(run(machine, "system", "--json", KVREDIS_PORT=port).stdout)["port"]["ok"] is True
    server = serve("--port", "0", "--max-local-cpu-size", "16MB", "--hugepages", "off", "--requirepass", "pa$$")
    port = server.wait_ready()[0].rpartition(":")[2]
    ours = json.loads(run(machine, "system", "--json", KVREDIS_PORT=port, KVREDIS_REQUIREPASS="pa$$").stdout)
    assert (ours["port"]["ok"], ours["port"]["found"]) == (True, f"127.0.0.1:{port} (a kvredis that runs)")
    assert run(machine, "system", KVREDIS_PORT=port, KVREDIS_REQUIREPASS="other").exit_code == 1


def test_two_ports_that_are_the_same_are_a_fault(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
    found = json.loads(run(machine, "system", "--json", KVREDIS_PORT=port, KVREDIS_METRICS_PORT=port).stdout)
    assert (found["port"]["ok"], found["metrics port"]["ok"]) == (True, False)


def test_all_that_a_running_server_of_this_configuration_has_is_no_fault(
    machine: Machine, serve: Serve, tmp_path: Path
) -> None:
    path = str(tmp_path / "kv.sock")
    small = ("--max-local-cpu-size", "16MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")
    server = serve("--port", "0", "--metrics-port", "free", "--unixsocket", path, "--requirepass", "pa$$", *small)
    port = next(each for each in server.wait_ready() if not each.startswith("unix:")).rpartition(":")[2]
    metrics = next(line for line in server.lines if line.startswith("Metrics on ")).strip("/").rpartition(":")[2]
    env = {"KVREDIS_PORT": port, "KVREDIS_METRICS_PORT": metrics, "KVREDIS_UNIXSOCKET": path}
    ours = json.loads(run(machine, "system", "--json", KVREDIS_REQUIREPASS="pa$$", **env).stdout)
    assert {name: ours[name]["ok"] for name in ("port", "metrics port", "unix socket")} == dict.fromkeys(
        ("port", "metrics port", "unix socket"), True
    )
    others = json.loads(run(machine, "system", "--json", KVREDIS_REQUIREPASS="other", **env).stdout)
    assert not any(others[name]["ok"] for name in ("port", "metrics port", "unix socket"))


@pytest.mark.parametrize("auth", ["yes", "no"])
def test_a_running_server_that_speaks_tls_alone_is_known_too(
    machine: Machine, serve: Serve, tmp_path: Path, auth: str
) -> None:
    papers = make_papers(tmp_path)
    given = {
        "port": "none",
        "requirepass": "pa$$",
        "tls-cert-file": papers.path("server"),
        "tls-key-file": papers.path("server_key"),
        "tls-ca-cert-file": papers.path("ca"),
        "tls-auth-clients": auth,
    }
    flags = [word for name, value in given.items() for word in (f"--{name}", value)]
    small = ("--max-local-cpu-size", "16MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")
    port = serve("--tls-port", "free", *flags, *small).wait_ready()[0].rpartition(":")[2]
    env = {f"KVREDIS_{name.replace('-', '_').upper()}": value for name, value in given.items()}
    env["KVREDIS_TLS_PORT"] = port
    ours = json.loads(run(machine, "system", "--json", **env).stdout)["TLS port"]
    assert (ours["ok"], ours["found"]) == (True, f"127.0.0.1:{port} (a kvredis that runs)")
    others = json.loads(run(machine, "system", "--json", **env | {"KVREDIS_REQUIREPASS": "other"}).stdout)["TLS port"]
    assert others["ok"] is False


def test_an_address_that_is_not_this_machines_is_a_fault_unless_it_may_be_missing(machine: Machine) -> None:
    result = run(machine, "system", KVREDIS_BIND="192.0.2.1")
    assert result.exit_code == 1
    assert "bind: an address of this machine" in result.output
    assert run(machine, "system", KVREDIS_BIND="127.0.0.1 -192.0.2.1").exit_code == 0


def test_an_engines_configuration_asks_for_no_port_and_no_clients(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = {"LMCACHE_REMOTE_URL": "kvredis://127.0.0.1:6379"}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    found = {finding.name: finding.ok for finding in network(Config.load(env=url), machine)}
    assert found == {"backlog": None, "open files": None}
    found = {finding.name: finding.ok for finding in network(Config.load(env=url | {"KVREDIS_PORT": "0"}), machine)}
    assert found == {"port": True, "backlog": None, "open files": False}


def test_on_a_real_terminal_it_is_coloured_and_in_a_pipe_it_is_not() -> None:
    main, other = pty.openpty()
    env = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "COLUMNS": "100", "KVREDIS_PORT": "0"}
    words = [sys.executable, "-m", "kvredis", "doctor", "system"]
    process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=other, stdout=other, stderr=other)
    os.close(other)
    said = b""
    try:
        while data := os.read(main, 4096):
            said += data
    except OSError:  # EIO: the other end is closed
        pass
    os.close(main)
    assert process.wait(60) in (0, 1)
    assert b"\x1b[32mok" in said
    piped = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, timeout=60)
    assert b"ok  port" in piped.stdout
    assert b"\x1b" not in piped.stdout


def test_a_server_that_would_listen_nowhere_is_a_fault(machine: Machine) -> None:
    result = run(machine, "system", KVREDIS_PORT="none")
    assert result.exit_code == 1
    assert "no port and no unix socket" in result.output


def test_a_socket_path_is_free_stale_or_in_the_way(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"

    def look(at: Path = path) -> tuple[bool, str]:
        finding = json.loads(run(machine, "system", "--json", KVREDIS_UNIXSOCKET=str(at)).stdout)["unix socket"]
        return finding["ok"], finding["found"]

    assert look() == (True, str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert look() == (True, str(path)), "a stale one is replaced"
        assert path.exists(), "by the server, not by who looks"
        listener.listen()
        assert look() == (False, f"{path} is in use by another server")
    path.unlink()
    path.touch()
    assert look() == (False, f"{path} exists and is not a socket")
    assert look(tmp_path / "missing/kv.sock")[0] is False


def test_a_backlog_that_the_kernel_would_cut_is_told_and_no_fault(machine: Machine) -> None:
    somaxconn = machine.proc_root / "sys/net/core/somaxconn"
    somaxconn.parent.mkdir(parents=True)
    somaxconn.write_text("128\n")
    finding = json.loads(run(machine, "system", "--json").stdout)["backlog"]
    assert (finding["ok"], finding["fix"]) == (None, "sysctl -w net.core.somaxconn=511")


def test_an_aclfile_that_cannot_be_read_is_a_fault(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "users.acl").write_text("user reader on nopass +@nothing\n")
    finding = json.loads(run(machine, "system", "--json", KVREDIS_ACLFILE=str(tmp_path / "users.acl")).stdout)
    assert finding["server options"]["ok"] is False
    assert "users.acl:1" in finding["server options"]["found"]
    (tmp_path / "users.acl").write_text("user reader on nopass +@read\n")
    assert run(machine, "system", KVREDIS_ACLFILE=str(tmp_path / "users.acl")).exit_code == 0


def test_what_is_not_installed_is_a_fact_and_a_fault_when_it_is_asked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    findings = json.loads(run(machine, "system", "--json").stdout)
    assert (findings["uvloop"]["ok"], findings["uvloop"]["found"]) == (None, "not installed")
    assert findings["C extensions"]["found"].startswith("not built: kvredis.storage.memory._native, ")
    findings = json.loads(run(machine, "system", "--json", KVREDIS_EVENT_LOOP="uvloop").stdout)
    assert findings["uvloop"]["ok"] is False


def test_versions_of_all_that_matters_are_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PACKAGES", ("redis", "no-such-package"))
    found = json.loads(run(machine, "system", "--json").stdout)["versions"]["found"]
    assert found.startswith("kvredis ")
    assert f"Linux {os.uname().release}, redis " in found
    assert found.endswith(", no no-such-package")


def test_a_container_is_seen_by_its_root_and_by_what_its_manager_says(machine: Machine) -> None:
    assert json.loads(run(machine, "system", "--json").stdout)["container"]["found"] == "unknown"
    mounts = machine.proc_root / "self/mountinfo"
    mounts.parent.mkdir(exist_ok=True)
    for kind, told in (("ext4", "no sign of one"), ("overlay", "yes, / is an overlay")):
        mounts.write_text(f"1 0 0:1 / / rw,relatime - {kind} {kind} rw\n2 1 0:2 / /proc rw - proc proc rw\n")
        assert json.loads(run(machine, "system", "--json").stdout)["container"]["found"] == told
    result = run(machine, "system", "--json", KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert json.loads(result.stdout)["container"]["found"] == "Kubernetes"


def test_on_a_terminal_it_is_a_table_and_the_fixes_stand_below_it_whole() -> None:
    fix = "echo 1280 > /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages; " * 2
    findings = [
        Finding("memory", True, "16.00 GiB available", "5.00 GiB"),
        Finding("hugepages", False, "0 pages", "2560 pages", "sysctl -w vm.nr_hugepages=2560"),
        Finding("NUMA", None, "[2 nodes]", "", fix),
    ]
    terminal = io.StringIO()
    draw(findings, Console(file=terminal, force_terminal=True, width=60, color_system="standard"))
    told = terminal.getvalue()
    assert told.index("asks for and this machine") < told.index("sysctl -w vm.nr_hugepages=2560") < told.index(fix)
    assert "[2 nodes]" in told, "found text is no markup"
    assert "\x1b[1;31mNO" in told
