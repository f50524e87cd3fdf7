"""The command's table: help without imports, exit statuses, and what is missing said by name."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import kvredis
from kvredis.cli import main as main_module
from kvredis.cli.main import SUBCOMMANDS, Subcommand, main

from .conftest import ROOT


def run_python(code: str) -> str:
    """Run code in a fresh interpreter in the repository and give what it printed."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_help_lists_the_subcommands_and_gives_an_example() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in ("serve", "config", "doctor"):
        assert SUBCOMMANDS[name].help.split()[0] in result.output
    assert "Example: kvredis serve" in result.output


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"kvredis, version {kvredis.__version__}\n"
    try:
        installed = version("kvredis")
    except PackageNotFoundError:
        pytest.skip("metadata: kvredis is not installed in this environment")
    assert installed == kvredis.__version__


def test_help_and_serve_import_neither_torch_nor_numpy() -> None:
    code = """
import sys
from click.testing import CliRunner
from kvredis.cli.main import main
assert CliRunner().invoke(main, ["--help"]).exit_code == 0
print(sorted(name for name in sys.modules if name.startswith("kvredis.backends")))
assert CliRunner().invoke(main, ["serve", "--help"]).exit_code == 0
print(sorted({"torch", "numpy", "transformers", "redis"} & set(sys.modules)))
"""
    assert run_python(code) == "[]\n[]\n"


def test_an_unknown_subcommand_is_bad_usage() -> None:
    result = CliRunner().invoke(main, ["serv"])
    assert result.exit_code == 2
    assert "No such command 'serv'" in result.output


@pytest.mark.parametrize("name", list(SUBCOMMANDS))
def test_every_subcommand_there_is_shows_help_with_an_example(name: str) -> None:
    if name not in CliRunner().invoke(main, ["--help"]).output:
        pytest.fail(f"{name} is in the table but has no module")
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert "Example: " in result.output


def test_a_missing_extra_is_said_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setitem(SUBCOMMANDS, "serve", Subcommand("kvredis.cli.serve", "Run.", extra="engine"))
    monkeypatch.setattr(main_module, "import_module", import_module)
    result = CliRunner().invoke(main, ["serve"])
    assert result.exit_code == 1
    assert f"serve needs torch, which is not installed: pip install '{ROOT}[engine]'" in result.output


OPTIONAL = ("aiohttp", "torch", "numpy", "safetensors", "matplotlib", "zmq", "tokenizers", "transformers")


def without_extras(*words: str, lacking: tuple[str, ...] = OPTIONAL) -> "subprocess.CompletedProcess[str]":
    """The command where no extra is installed, or not these packages of one."""
    code = f"""
import sys
for name in {lacking}:
    sys.modules[name] = None
from kvredis.cli.main import main
main({list(words)!r}, prog_name="kvredis")
"""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "words", ["bench", "bench server", "bench swap", "bench prefill", "demo", "demo ttft", "plan", "proxy"]
)
def test_help_needs_no_extra(words: str) -> None:
    done = without_extras(*words.split(), "-h")
    assert done.returncode == 0, done.stderr
    assert "Example: " in done.stdout


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [
        ("kvredis", "CacheEngine", "engine"),
        ("kvredis.adapters.vllm", "KVRedisConnector", "vllm"),
        ("kvredis.adapters.vllm_tier", "KVRedisTier", "vllm"),
        ("kvredis.adapters.sglang", "KVRedisHiCache", "sglang"),
        ("kvredis.adapters.transformers", "CachedModel", "demo"),
    ],
)
def test_a_public_import_path_names_the_extra_that_it_needs(module: str, name: str, extra: str) -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "vllm", "sglang", "transformers"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent())
from {module} import {name}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert re.match(rf"ModuleNotFoundError: {module}.{name} needs \w+, which is not installed: pip install ", last)
    assert f"[{extra}]" in last


def test_a_package_that_lacks_a_part_is_not_said_to_be_missing() -> None:
    code = "from kvredis import load_public\nload_public('json.nothing', 'a.b', 'c')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'json.nothing'"


def test_a_package_that_a_command_misses_as_it_runs_is_said_with_the_line_that_installs_it() -> None:
    done = without_extras("bench", "swap")
    assert done.returncode == 1
    assert done.stderr.endswith(f"bench needs torch, which is not installed: pip install '{ROOT}[bench]'\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench profile --out {}/trace.json", "bench needs transformers, which is not installed"),
        ("bench prefill", "the bench's engines need torch and transformers"),
    ],
)
def test_a_bench_of_a_model_names_the_extra_that_has_transformers(words: str, said: str, tmp_path: Path) -> None:
    done = without_extras(*words.format(tmp_path).split(), lacking=("transformers",))
    assert done.returncode == 1
    assert done.stderr.endswith(f"Error: {said}: pip install '{ROOT}[demo]'\n")


def test_a_proxy_without_its_extra_is_told_the_line_that_installs_it() -> None:
    done = without_extras("proxy", "--prefill", "p:1", "--decode", "d:1")
    assert done.returncode == 1
    assert done.stderr.endswith(f"proxy needs aiohttp, which is not installed: pip install '{ROOT}[proxy]'\n")


def test_outside_of_a_clone_a_hint_says_where_to_run_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kvredis.install_line("engine") == f"pip install '{ROOT}[engine]'"
    monkeypatch.setattr(kvredis, "__file__", str(tmp_path / "site-packages" / "kvredis" / "__init__.py"))
    assert kvredis.install_line("engine") == "pip install '.[engine]' in a clone of kvredis' repository"


@pytest.mark.parametrize("words", ["serv", "lss", "bench sever", "demo tft", "config shwo"])
def test_a_mistyped_command_is_answered_with_the_nearest(words: str) -> None:
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    assert result.output.count("Did you mean") == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("serve --prot 1", "Did you mean '--port'?"),
        ("ls --sortt bytes", "Did you mean '--sort'?"),
        ("serve --requirepas x", "Did you mean '--requirepass'?"),
        ("serve --maxmemory 5GB", "Did you mean '--max-local-cpu-size'?"),
        ("serve --password x", "Did you mean '--requirepass'?"),
        ("serve --no-prefaul", "Did you mean '--no-prefault'?"),
        ("serve --save x", "No such option '--save'."),
        ("demo -u 127.0.0.1:1", "It belongs behind: kvredis demo ttft"),
        ("ls redis://127.0.0.1:1", "-u names the server: -u redis://127.0.0.1:1"),
        ("top 127.0.0.1:1", "-u names the server: -u 127.0.0.1:1"),
        ("serve /etc/kvredis.yaml", "A file is named by --config-file /etc/kvredis.yaml"),
        ("help", "Did you mean 'kvredis --help'?"),
        ("help serve", "Did you mean 'kvredis serve --help'?"),
    ],
)
def test_a_mistyped_line_is_answered_with_what_was_meant_and_nothing_else(words: str, meant: str) -> None:
    result = CliRunner().invoke(main, words.split(), prog_name="kvredis")
    assert result.exit_code == 2
    assert result.output.strip().endswith(meant)


@pytest.mark.parametrize("words", ["", "serve", "ls", "bench server", "doctor memory"])
def test_h_is_help(words: str) -> None:
    short, long = (CliRunner().invoke(main, [*words.split(), word]) for word in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)


def test_our_errors_become_text_and_exit_status_but_a_bug_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvredis.storage.errors import ArenaError, ConfigError

    def failing(error: Exception) -> int | BaseException | None:
        def run() -> None:
            raise error

        monkeypatch.setattr(main_module.LateGroup, "get_command", lambda *_: click.Command("serve", callback=run))
        result = CliRunner().invoke(main, ["serve"])
        return result.exit_code if isinstance(result.exception, SystemExit) else result.exception

    bug = ValueError("a bug")
    assert failing(ArenaError("no memory")) == 1
    assert failing(ConfigError("port", "x", "--port", "no")) == 2
    assert failing(bug) is bug


def test_the_package_names_its_parts_without_importing_them() -> None:
    code = """
import sys, kvredis
print([name for name in kvredis.__all__ if name[0] != "_"], "torch" in sys.modules, "yaml" in sys.modules)
kvredis.Config
print("torch" in sys.modules)
"""
    assert run_python(code) == "['CacheEngine', 'ChunkLayout', 'Config'] False False\nFalse\n"
    with pytest.raises(AttributeError, match="no attribute 'Cache'"):
        kvredis.Cache  # noqa: B018  the access is the test


@pytest.mark.parametrize("words", ["plan --shape 8b --prefill-tokens-per-s 25000", "--help", "--version"])
def test_a_full_disk_behind_standard_output_is_told_in_a_line(words: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvredis", *words.split()],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, b"kvredis: cannot write: No space left on device\n")
