"""`kvredis config`: every value with its source, and a file judged by itself."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.cli.main import main


def run(*args: str, **env: str) -> Result:
    """Run kvredis with no other LMCACHE_* or KVREDIS_* than those given."""
    with pytest.MonkeyPatch.context() as patch:
        import os

        for name in os.environ:
            if name.startswith(("LMCACHE_", "KVREDIS_")):
                patch.delenv(name)
        return CliRunner(env=env).invoke(main, list(args))


def test_show_prints_the_defaults_as_json() -> None:
    shown = json.loads(run("config", "show", "--json").stdout)
    assert shown["chunk_size"] == 256
    assert shown["max_local_cpu_size"] == 5.0
    assert shown["port"] == 6379


def test_show_names_the_origin_and_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("chunk_size: 64\nmax_local_cpu_size: 0.5\nkvredis:\n  port: 7000\n")
    result = run(
        "config",
        "show",
        "--origin",
        "--json",
        "--config-file",
        str(file),
        LMCACHE_CHUNK_SIZE="512",
        KVREDIS_EVENT_LOOP="x",
    )
    shown = json.loads(result.stdout)
    assert shown["chunk_size"] == {"value": 512, "origin": "env LMCACHE_CHUNK_SIZE"}
    assert shown["max_local_cpu_size"]["value"] == 0.5
    assert shown["port"] == {"value": 7000, "origin": f"{file}:4"}
    assert shown["maxclients"]["origin"] == "default"


def test_show_hides_passwords() -> None:
    result = run("config", "show", "--origin", KVREDIS_REQUIREPASS="hunter2")
    assert "hunter2" not in result.output
    assert "(env KVREDIS_REQUIREPASS)" in result.output


def test_a_bad_value_is_exit_2(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("local_cpu: true\nchunk_size: abc\n")
    for args in (["config", "check", str(file)], ["config", "show", "--config-file", str(file)]):
        result = run(*args)
        assert result.exit_code == 2
        assert f"{file}:2: chunk_size: " in result.output


def test_check_reads_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("chunk_size: 64\nchunk_sise: 1\n")
    result = run("config", "check", str(file), LMCACHE_CHUNK_SIZE="abc")
    assert result.exit_code == 0
    assert f"{file}: ok, 1 keys set, 1 warnings" in result.output
