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


@pytest.mark.parametrize("text", [None, "- a list\n", "a: [\n"])
def test_a_file_that_is_no_configuration_is_told_by_what_names_it(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "kv.yaml"
    if text is not None:
        file.write_text(text)
    env = {"LMCACHE_CONFIG_FILE": str(file)}
    for args, named in (
        (["config", "check", str(file)], "FILE"),
        (["config", "show", "--config-file", str(file)], "--config-file"),
        (["config", "show"], "LMCACHE_CONFIG_FILE"),
    ):
        result = run(*args, **({} if file.name in args[-1] else env))
        assert result.exit_code == 2
        assert str(file) in result.output
        assert f": {named}: " in result.output


def test_an_arena_of_nothing_is_exit_2_even_where_it_would_be_staging_alone() -> None:
    for size in ("0", "-1"):
        result = run("config", "show", LMCACHE_LOCAL_CPU="false", LMCACHE_MAX_LOCAL_CPU_SIZE=size)
        assert result.exit_code == 2
        assert "env LMCACHE_MAX_LOCAL_CPU_SIZE: max_local_cpu_size: a size must be greater than 0" in result.output


def test_check_reads_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("chunk_size: 64\nchunk_sise: 1\n")
    result = run("config", "check", str(file), LMCACHE_CHUNK_SIZE="abc")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"warning: {file}:2: chunk_sise: unknown key; did you mean chunk_size?",
        f"{file}: ok, 1 keys set, 1 warnings",
    ]


WRONG = """\
chunk_size: abc
chunk_sise: 1
extra_config:
  valkey_password: hush
  use_odirect: maybe
  resp_num_thread: 8
kvredis:
  port: 65536
"""


def test_check_prints_every_problem_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(WRONG)
    result = run("config", "check", str(file))
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        f"error: {file}:1: chunk_size: want a whole number from 1 to 2147483647 (got 'abc')",
        f"error: {file}:8: port: want a port from 0 to 65535, or none (got 65536)",
        f"error: {file}:5: extra_config.use_odirect: want true or false (also 1/0, yes/no, on/off) (got 'maybe')",
        f"warning: {file}:2: chunk_sise: unknown key; did you mean chunk_size?",
        f"warning: {file}:6: extra_config.resp_num_thread: unknown entry; did you mean resp_num_threads?",
        f"warning: {file}:4: extra_config.valkey_password: has no effect without remote_url",
        f"{file}: 3 errors, 1 keys set, 3 warnings",
    ]


def test_check_gives_key_value_source_line_and_nearest_name_as_json(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(WRONG)
    result = run("config", "check", str(file), "--json")
    assert result.exit_code == 2
    facts = json.loads(result.stdout)
    assert (facts["file"], facts["ok"], facts["keys_set"]) == (str(file), False, 1)
    assert facts["errors"][1] == {
        "key": "port",
        "value": 65536,
        "source": f"{file}:8",
        "line": 8,
        "reason": "want a port from 0 to 65535, or none",
    }
    assert [warning["nearest"] for warning in facts["warnings"]] == ["chunk_size", "resp_num_threads", None]
    assert [warning["line"] for warning in facts["warnings"]] == [2, 6, 4]
    assert "hush" not in result.output


def test_check_of_a_good_file_is_ok_as_json_and_of_none_is_exit_2(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("chunk_size: 64\n")
    result = run("config", "check", str(file), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"file": str(file), "ok": True, "keys_set": 1, "errors": [], "warnings": []}
    result = run("config", "check", str(tmp_path / "none.yaml"), "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["errors"][0]["line"] is None


def test_check_tries_the_servers_further_settings_and_shows_no_password_among_them(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("kvredis:\n  settings:\n    slowlog-max-len: 5\n    hz: soon\n    masterauth: hush\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 2
    assert [line.partition(" (got")[0] for line in result.output.splitlines()] == [
        f"error: {file}:4: settings.hz: argument couldn't be parsed into an integer",
        f"error: {file}:5: settings.masterauth: there is no setting of this name",
        f"{file}: 2 errors, 1 keys set, 0 warnings",
    ]
    assert "hush" not in result.output


def test_check_knows_the_seed_of_the_interpreter(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("pre_caching_hash_algorithm: builtin\n")
    assert run("config", "check", str(file), PYTHONHASHSEED="random").exit_code == 2
    assert run("config", "check", str(file), PYTHONHASHSEED="7").exit_code == 0


def test_show_names_the_origin_of_each_entry(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("remote_url: resp://h:1\nextra_config:\n  use_odirect: false\n  password: hush\n")
    args = ("config", "show", "--origin", "--config-file", str(file))
    env = {"LMCACHE_EXTRA_CONFIG": '{"resp_num_threads": 8}', "KVREDIS_SETTINGS": '{"hz": 20}'}
    shown = json.loads(run(*args, "--json", **env).stdout)
    assert shown["extra_config"] == {
        "value": {"use_odirect": False, "password": "***", "resp_num_threads": 8},
        "origin": f"{file}:2, env LMCACHE_EXTRA_CONFIG",
        "entries": {
            "use_odirect": f"{file}:3",
            "password": f"{file}:4",
            "resp_num_threads": "env LMCACHE_EXTRA_CONFIG",
        },
    }
    assert shown["disk_direct"] == {"value": False, "origin": f"{file}:3 extra_config.use_odirect"}
    assert shown["settings"]["entries"] == {"hz": "env KVREDIS_SETTINGS"}
    assert shown["chunk_size"] == {"value": 256, "origin": "default"}
    text = run(*args, **env).output
    assert "hush" not in text
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert lines["extra_config.password"].endswith(f'"***"  ({file}:4)')
    assert lines["extra_config.resp_num_threads"].endswith("8  (env LMCACHE_EXTRA_CONFIG)")


def test_show_survives_values_that_json_has_no_word_for(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("extra_config:\n  gpu_to_numa_mapping: {0: 1}\n  since: 2026-11-22\n  some: !!set {a, b}\n")
    shown = json.loads(run("config", "show", "--json", "--config-file", str(file)).stdout)
    assert shown["extra_config"]["gpu_to_numa_mapping"] == {"0": 1}
    assert shown["extra_config"]["since"] == "2026-11-22"
    assert sorted(shown["extra_config"]["some"]) == ["a", "b"]
