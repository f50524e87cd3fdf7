"""Servers under test start, tell their CPU time and are gone afterwards, whatever happened in between."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvredis.backends.config.url import Address
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.servers import (
    RECIPES,
    Recipe,
    ServerProcess,
    Transport,
    before_recipe,
    child_environment,
    process_cpu_s,
)
from kvredis.bench.core.wire import Resp

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def recipe(*arguments: str, program: str = sys.executable) -> Recipe:
    return Recipe("fake", Resp(), program, "nothing", lambda _at, _folder: list(arguments), lambda: "1")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", ["redis", "memcached"])
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_a_server_answers_and_is_gone_after_the_block(name: str, transport: Transport) -> None:
    if RECIPES[name].missing():
        pytest.skip(RECIPES[name].missing() or "")
    with ServerProcess(RECIPES[name], transport) as server:
        pid, path = server.pid, server.address.path
        assert bool(path) == (transport == "unix")
        with server.connect() as wire:
            wire.put(b"key", memoryview(b"value"))
            out = memoryview(bytearray(5))
            wire.get(b"key", out)
            assert bytes(out) == b"value"
        assert server.cpu_s() > 0
        assert RECIPES[name].version()
        server.pin({max(os.sched_getaffinity(0))})
        assert os.sched_getaffinity(pid) == {max(os.sched_getaffinity(0))}
    assert not is_running(pid)
    assert not path or not Path(path).parent.exists()


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_a_server_is_gone_when_the_block_fails() -> None:
    pids = []

    def fail() -> None:
        with ServerProcess(RECIPES["redis"], "tcp") as server:
            pids.append(server.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_running(pids[0])


def test_a_server_that_has_ended_is_named_to_a_client_that_connects() -> None:
    with ServerProcess(RECIPES["kvredis"], "tcp") as server:
        server.stop()
        with pytest.raises(BenchError, match="kvredis accepts no connection: Connection refused"):
            server.connect()


def test_a_server_that_does_not_start_is_an_error_with_what_it_said() -> None:
    with pytest.raises(BenchError, match=r"fake ended with 3.*\n.*no memory today"):
        ServerProcess(recipe("-c", "print('no memory today'); raise SystemExit(3)"), "unix").__enter__()


def test_a_server_that_is_not_installed_is_named_with_its_package() -> None:
    absent = recipe(program="no-such-server-anywhere")
    assert absent.missing() == "no-such-server-anywhere is not installed (Debian package nothing)"
    with pytest.raises(BenchError, match="Debian package"):
        ServerProcess(absent, "tcp").__enter__()


def test_a_servers_command_line_says_where_it_listens() -> None:
    folder = Path("/folder")
    for name, made in RECIPES.items():
        assert "4321" in made.arguments(Address(port=4321), folder), name
        assert "/a/socket" in made.arguments(Address(host="", path="/a/socket"), folder), name


def committed(checkout: Path, program: str) -> str:
    """Make a checkout whose `python -m kvredis` is `program`; give its commit as git shortens it."""
    (checkout / "kvredis").mkdir(parents=True)
    (checkout / "kvredis" / "__init__.py").write_text("")
    (checkout / "kvredis" / "__main__.py").write_text(program)
    author = ("-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "--no-verify", "-m", "before")):
        subprocess.run(("git", "-C", str(checkout), *words), check=True, capture_output=True)
    shown = subprocess.run(("git", "-C", str(checkout), "log", "-1", "--format=%h"), check=True, capture_output=True)
    return shown.stdout.decode().strip()


@needs_git
def test_the_server_before_runs_the_kvredis_of_its_checkout_wherever_the_bench_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "import kvredis, sys; print(f'runs {kvredis.__file__} {sys.argv[1]}'); raise SystemExit(3)"
    commit = committed(tmp_path / "old", says)
    monkeypatch.chdir(Path(__file__).parents[3])  # where `python -m kvredis` would find ours first
    made = before_recipe(tmp_path / "old")
    assert (made.name, made.version()) == ("before", commit)
    with pytest.raises(BenchError, match=f"runs {tmp_path}/old/kvredis/__init__.py serve"):
        ServerProcess(made, "unix").__enter__()


def test_the_server_before_has_our_interpreter_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.bench.core.servers._first_line", lambda *_: "abc1234")
    (tmp_path / "kvredis").mkdir()
    (tmp_path / "kvredis" / "__main__.py").touch()
    before, ours = before_recipe(tmp_path), RECIPES["kvredis"]
    assert before.program == ours.program
    assert before.arguments(Address(port=1), tmp_path) == ours.arguments(Address(port=1), tmp_path)


@needs_git
def test_a_folder_that_is_no_checkout_of_kvredis_cannot_be_the_server_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match=r"no kvredis/__main__\.py"):
        before_recipe(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "kvredis").mkdir()
    (tmp_path / "kvredis" / "__main__.py").touch()
    with pytest.raises(BenchError, match="git knows no commit"):
        before_recipe(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="cannot run git"):
        before_recipe(tmp_path)


def test_the_cpu_clock_of_a_process_is_its_user_and_system_time() -> None:
    before_s, own_s = process_cpu_s(os.getpid()), time.process_time()
    sum(range(200_000))
    spent_s, own_spent_s = process_cpu_s(os.getpid()) - before_s, time.process_time() - own_s
    assert spent_s == pytest.approx(own_spent_s, abs=0.005)
    assert spent_s > 0


def test_a_child_gets_no_configuration_and_finds_this_kvredis() -> None:
    environment = child_environment(
        {"LMCACHE_CHUNK_SIZE": "1", "KVREDIS_PORT": "1", "HOME": "/root", "PYTHONPATH": "/x"}
    )
    assert set(environment) == {"HOME", "PYTHONPATH"}
    first, second = environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "kvredis" / "__init__.py").exists()
    assert second == "/x"
    other = child_environment({"PYTHONPATH": "/x"}, Path("/another/checkout"))
    assert other["PYTHONPATH"] == os.pathsep.join(["/another/checkout", "/x"])
