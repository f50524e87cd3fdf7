"""The keys of the disk tier: how each is written, that both halves are needed, and what a Store is opened with."""

import logging
from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.config.schema import Config
from kvredis.storage.errors import ConfigError

GIB = 1024**3
BOTH = {"LMCACHE_LOCAL_DISK": "/var/kv", "LMCACHE_MAX_LOCAL_DISK_SIZE": "20"}

LMCACHES_PAGE = """\
# 256 tokens per KV chunk
chunk_size: 256
local_cpu: false
max_local_cpu_size: 5.0
local_disk: "file:///tmp/lmcache/"
max_local_disk_size: 10
"""


def test_the_page_of_lmcache_on_disk_offload_loads_verbatim(tmp_path: Path) -> None:
    written = tmp_path / "disk-offload.yaml"
    written.write_text(LMCACHES_PAGE)
    config = Config.load(written, {})
    assert config.warnings == ()
    options = config.store_options()
    assert options.disk is not None
    assert options.disk.directory == Path("/tmp/lmcache")
    assert options.disk.limit_bytes == 10 * GIB
    assert options.disk.source == f"{written}:5"
    assert not options.keep


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/var/kv", "/var/kv"),
        ("file:///var/kv/", "/var/kv/"),
        (" /var/kv ", "/var/kv"),
        ("file://here/", "here/"),
        ("", None),
        ("none", None),
    ],
)
def test_a_directory_is_a_path_or_a_file_url(text: str, path: str | None) -> None:
    assert Config.load(env={"LMCACHE_LOCAL_DISK": text}).local_disk == path


@pytest.mark.parametrize(
    ("text", "nbytes"), [("20", 20 * GIB), ("0.5", GIB // 2), ("64MB", 64 * 1024**2), ("1TB", 1024 * GIB)]
)
def test_the_size_is_gib_or_has_a_unit(text: str, nbytes: int) -> None:
    disk = Config.load(env=BOTH | {"LMCACHE_MAX_LOCAL_DISK_SIZE": text}).disk
    assert disk is not None
    assert disk.limit_bytes == nbytes


def test_without_the_keys_there_is_no_disk_and_nothing_to_say() -> None:
    config = Config.load(env={})
    options = config.store_options()
    assert (config.warnings, options.disk, options.keep) == ((), None, True)
    assert (options.io_threads, options.spill_wait_s, config.disk_direct) == (4, 0.5, True)


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (
            {"LMCACHE_LOCAL_DISK": "/var/kv"},
            "env LMCACHE_LOCAL_DISK: local_disk: there is no disk tier without max_local_disk_size",
        ),
        (
            {"LMCACHE_LOCAL_DISK": "/var/kv", "LMCACHE_MAX_LOCAL_DISK_SIZE": "0"},
            "env LMCACHE_LOCAL_DISK: local_disk: there is no disk tier without max_local_disk_size",
        ),
        (
            {"LMCACHE_MAX_LOCAL_DISK_SIZE": "20"},
            "env LMCACHE_MAX_LOCAL_DISK_SIZE: max_local_disk_size: there is no disk tier without local_disk",
        ),
    ],
)
def test_half_of_it_is_no_disk_and_one_line_that_names_the_missing_key(
    env: dict[str, str], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = Config.load(env=env)
    assert config.store_options().disk is None
    assert config.warnings == (line,)
    assert [record.getMessage() for record in caplog.records] == [line]


def test_the_servers_keys_reach_the_store() -> None:
    env = {"KVREDIS_DISK_IO_THREADS": "8", "KVREDIS_SPILL_WAIT": "0", "KVREDIS_DISK_DIRECT": "off"}
    config = Config.load(env=BOTH | env, overrides={"disk_io_threads": "16"})
    options = config.store_options()
    assert options.disk is not None
    assert (options.io_threads, options.spill_wait_s, options.disk.direct) == (16, 0.0, False)
    assert config.origin["disk_io_threads"] == "--disk-io-threads"
    assert config.origin["spill_wait"] == "env KVREDIS_SPILL_WAIT"


def test_the_servers_keys_stand_in_its_section_of_the_file(tmp_path: Path) -> None:
    written = tmp_path / "kv.yaml"
    written.write_text("kvredis:\n  disk_io_threads: 1\n  spill_wait: 2.5\n  disk_direct: false\n")
    config = Config.load(written, {})
    assert config.warnings == ()
    assert (config.disk_io_threads, config.spill_wait, config.disk_direct) == (1, 2.5, False)
    assert config.origin["disk_direct"] == f"{written}:4"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("LMCACHE_LOCAL_DISK", "file://", "want a directory"),
        ("LMCACHE_LOCAL_DISK", "/var/\0kv", "want a directory"),
        ("LMCACHE_MAX_LOCAL_DISK_SIZE", "-1", "greater than 0"),
        ("LMCACHE_MAX_LOCAL_DISK_SIZE", "much", "not a size"),
        ("KVREDIS_DISK_IO_THREADS", "0", "from 1 to 64"),
        ("KVREDIS_DISK_IO_THREADS", "65", "from 1 to 64"),
        ("KVREDIS_DISK_IO_THREADS", "1.5", "from 1 to 64"),
        ("KVREDIS_SPILL_WAIT", "-0.1", "from 0 to 86400"),
        ("KVREDIS_SPILL_WAIT", "nan", "from 0 to 86400"),
        ("KVREDIS_SPILL_WAIT", "inf", "from 0 to 86400"),
        ("KVREDIS_DISK_DIRECT", "perhaps", "true or false"),
    ],
)
def test_a_bad_value_names_key_value_and_source(name: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Config.load(env={name: text})
    assert (caught.value.source, caught.value.value) == (f"env {name}", text)
    assert caught.value.key == name.split("_", 1)[1].lower()


@pytest.mark.parametrize("raw", [True, ["/a"], {"path": "/a"}])
def test_a_directory_that_is_no_text_is_refused(raw: Any) -> None:
    with pytest.raises(ConfigError, match=r"local_disk: (want a string|is no switch)"):
        Config.load(env={}, overrides={"local_disk": raw})
