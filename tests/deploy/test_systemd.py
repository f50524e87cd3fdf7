"""The systemd unit: systemd finds nothing wrong with it, and the server runs in what it shuts it into."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend
from kvredis.storage.memory.hugepages import pages_needed
from tests.backends.verbs import content, put_through
from tests.cli.serve.test_systemd import ServiceManager

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/systemd"
UNIT = FOLDER / "kvredis.service"
DROP_INS = sorted((FOLDER / "kvredis.service.d").glob("*.conf"))
INSTALLED = "/opt/kvredis/bin/kvredis"
HERE = str(Path(sys.executable).with_name("kvredis"))
EXPOSURE_MAX = 2.0
"""systemd-analyze's own word for what is below: OK. 1.5 of it are sockets, which a server needs."""
WAIT_S = 60


def settings(*paths: Path) -> dict[str, list[str]]:
    """What a unit and its drop-ins say of each setting, in order."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            if line and line[0] not in "#[":
                name, _, value = line.partition("=")
                found.setdefault(name, []).append(value)
    return found


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze."""
    program = shutil.which("systemd-analyze")
    if program is None and not os.environ.get("CI"):
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    assert program is not None, "systemd-analyze is not installed (scripts/system-packages)"
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=WAIT_S)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with this environment's kvredis in it, in a folder of its own."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace(INSTALLED, HERE))
    return path


@pytest.mark.parametrize("drop_in", [None, *DROP_INS], ids=lambda path: path.stem if path else "alone")
def test_systemd_understands_every_line(installed: Path, drop_in: Path | None) -> None:
    if drop_in is not None:
        folder = installed.with_name("kvredis.service.d")
        folder.mkdir()
        shutil.copy(drop_in, folder)
    done = analyze("verify", str(installed))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_line_that_systemd_does_not_understand_would_be_seen(installed: Path) -> None:
    installed.write_text(installed.read_text().replace("ProtectHome=yes", "ProtectHomes=yes"))
    assert "ProtectHomes" in analyze("verify", str(installed)).stderr


def test_it_is_exposed_to_little(installed: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", str(installed))
    assert done.returncode == 0, done.stdout


def test_what_it_says_to_install_is_in_a_clone() -> None:
    lines = [line.split() for line in UNIT.read_text().splitlines() if line.startswith("#   install ")]
    assert len(lines) == 2
    assert [words[4] for words in lines if not (ROOT / words[4]).is_file()] == []


def test_only_a_node_of_a_cluster_can_be_reloaded() -> None:
    assert "ExecReload" not in settings(UNIT), "SIGHUP ends a server that stands alone"
    cluster = settings(FOLDER / "kvredis.service.d/cluster.conf")
    assert cluster["ExecReload"] == ["/bin/sh -c 'kill -HUP $MAINPID'"]
    assert cluster["Environment"][0].startswith("KVREDIS_CLUSTER_TOPOLOGY=")


def test_the_pages_that_are_reserved_at_boot_are_those_of_the_example() -> None:
    config = Config.load(FOLDER / "kvredis.yaml", env={})
    reserved = settings(FOLDER / "kvredis-hugepages.conf")["vm.nr_hugepages "]
    assert reserved == [f" {pages_needed(config.capacity_bytes)}"]


def test_every_variable_it_sets_is_a_key(tmp_path: Path) -> None:
    given = [entry.partition("=")[::2] for path in (UNIT, *DROP_INS) for entry in settings(path).get("Environment", [])]
    env = {name: value for name, value in given if name != "LMCACHE_CONFIG_FILE"}
    assert Config.load(env=env).warnings == ()


def allowed_calls() -> list[str]:
    """The system calls of SystemCallFilter=: the first line lets through, those with ~ take away."""
    groups: dict[str, list[str]] = {}
    members: list[str] = []
    for line in analyze("syscall-filter").stdout.splitlines():
        word = line.strip()
        if line.startswith("@"):
            members = groups.setdefault(word, [])
        elif line.startswith(" ") and word and word[0] != "#":
            members.append(word)

    def expanded(word: str) -> set[str]:
        return set().union(*map(expanded, groups[word])) if word in groups else {word}

    calls = expanded("@default")
    for value in settings(UNIT)["SystemCallFilter"]:
        calls = calls - expanded(value[1:]) if value.startswith("~") else calls | expanded(value)
    return sorted(calls)


def test_the_server_works_where_the_unit_shuts_it_in(tmp_path: Path) -> None:
    unit = settings(UNIT)
    families = [int(getattr(socket, name)) for name in unit["RestrictAddressFamilies"][0].split()]
    sandbox = {
        "umask": unit["UMask"][0],
        "limits": {f"RLIMIT_{name.removeprefix('Limit')}": unit[name][0] for name in unit if name.startswith("Limit")},
        "calls": allowed_calls(),
        "families": families,
    }
    credentials, runtime, state = (tmp_path / name for name in ("credentials", "run", "state"))
    for folder in (credentials, runtime / "kvredis", state):
        folder.mkdir(parents=True)
    shutil.copy(FOLDER / "kvredis.yaml", credentials)
    given = [entry.partition("=") for entry in unit["Environment"]]
    env = {name: text.replace("%d", str(credentials)).replace("%t", str(runtime)) for name, _, text in given}
    env |= {"KVREDIS_PORT": "0", "KVREDIS_HUGEPAGES": "off", "LMCACHE_MAX_LOCAL_CPU_SIZE": "32MB"}
    env |= {"LMCACHE_LOCAL_DISK": str(state), "LMCACHE_MAX_LOCAL_DISK_SIZE": "1GB", "KVREDIS_REQUIREPASS": "word"}
    manager = ServiceManager(str(tmp_path / "notify"))
    env |= {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "60000000"}
    command = unit["ExecStart"][0].replace(INSTALLED, HERE).split()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sandbox.py")), json.dumps(sandbox), *command],
            env=env,
            stdout=log,
            stderr=log,
        )
    try:
        manager.lines_until("READY=1")
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "CapEff:\t0000000000000000\n" in status
        assert "Seccomp:\t2\n" in status
        assert os.stat(env["KVREDIS_UNIXSOCKET"]).st_mode & 0o777 == 0o666
        work(env["KVREDIS_UNIXSOCKET"])
        process.send_signal(signal.SIGTERM)
        lines = manager.lines_until("EXTEND_TIMEOUT_USEC=30000000")
        assert next(line for line in lines if not line.startswith(("STATUS=", "WATCHDOG"))) == "STOPPING=1"
        assert process.wait(WAIT_S) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        manager.close()
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said
    assert "Operation not permitted" not in said
    assert f"Disk tier: {state}" in said


def work(path: str) -> None:
    """Everything that asks something of the kernel: blocks to and from disk, more than memory holds, the lane, INFO."""
    with redis.Redis(unix_socket_path=path, password="word") as client:
        for number in range(48):
            client.set(f"k{number}", bytes([number]) * (1 << 20))
        assert client.execute_command("WAITAOF", 1, 0, 20_000) == [1, 0]
        for number in range(48):
            assert client.get(f"k{number}") == bytes([number]) * (1 << 20)
        assert client.info("everything")["kvredis_version"]
    config = Config.load(env={"LMCACHE_REMOTE_URL": f"kvredis://:word@{path}", "LMCACHE_LOCAL_CPU": "false"})
    backend = open_backend(config)
    try:
        assert put_through(backend, b"block", content(b"block", 1 << 20))
    finally:
        backend.close()
    with redis.Redis(unix_socket_path=path, password="word") as client:
        assert client.get("block") == content(b"block", 1 << 20)
        client.set("last", b"v" * (1 << 20))  # so that there is something to save at the end
