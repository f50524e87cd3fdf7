"""CONFIG REWRITE: the file says what was set, everything else in it stays, and a file that cannot be edited is kept."""

import os
from pathlib import Path

import pytest
import yaml

from kvredis.backends.config.schema import KEYS, Config
from kvredis.server.config.rewrite import RewriteError, rewrite, with_settings
from kvredis.server.config.settings import SETTINGS, Effect, value_of
from kvredis.server.server import Server, ServerOptions
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.fake_session import ARENA_BYTES, FakeSession

WANTED = {"maxclients": "7", "slowlog-max-len": "5", "requirepass": "0123", "latency-tracking": "no"}
SAID = {"maxclients": 7, "requirepass": "0123", "settings": {"slowlog-max-len": 5, "latency-tracking": "no"}}


def session_of(file: Path | None, **options: str) -> FakeSession:
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
    return FakeSession(Server(store, ServerOptions(config_file=file, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "chunk_size: 256",
        "kvredis:\n  port: 1 # here\n  maxclients: 5  # many\n\n# tail\nlocal_cpu: true\n",
        "kvredis: {port: 1}\n",
        "kvredis: {}\n",
        "{}\n",
        "kvredis:\nchunk_size: 3\n",
        "kvredis: ~ # nothing yet\n",
        "kvredis:\n    bind:\n      - a\n      - b\n    # behind\nlocal_cpu: no\n",
        "kvredis:\n  settings:\n    hz: 10 # x\n    slowlog-max-len: 'abc'\n  port: 1\n",
        "kvredis:\n  requirepass: |\n    abc\n  port: 2\n",
        "kvredis:\n  maxclients: # many\n  port: 2",
        "base: &base\n  port: 3\nkvredis:\n  <<: *base\n  maxclients: 1\n",
        "---\nkvredis:\n  port: 1\n...\n",
        "kvredis:\r\n  port: 1\r\n",
        "'kvredis':\n  \"maxclients\": 5\n",
        "kvredis:\n  settings: {hz: 10,\n             latency-tracking: yes}\n",
    ],
)
def test_whatever_the_file_looks_like_it_says_what_was_set_and_the_rest_as_before(text: str) -> None:
    before, after = yaml.safe_load(text) or {}, yaml.safe_load(edited := with_settings(text, WANTED))
    own, kept = after.pop("kvredis"), before.pop("kvredis", None) or {}
    settings = (kept.pop("settings", None) or {}) | SAID["settings"]  # type: ignore[operator]
    assert own == kept | SAID | {"settings": settings}
    assert after == before
    assert with_settings(edited, WANTED) == edited


def test_comments_and_unknown_lines_stay_where_they_are() -> None:
    text = (
        "# head\nkvredis:\n  port: 1  # one\n  maxclients: 5  # many\n  unknown: [1,  2]\n\n# tail\nlocal_cpu: true\n"
    )
    assert with_settings(text, {"maxclients": "9", "hz": "20"}) == (
        "# head\nkvredis:\n  port: 1  # one\n  maxclients: 9  # many\n  unknown: [1,  2]\n"
        "  settings:\n    hz: 20\n\n# tail\nlocal_cpu: true\n"
    )


@pytest.mark.parametrize(
    "text", ["- a\n", "kvredis: 5\n", "kvredis: [1]\n", "a: &x {port: 3}\nkvredis: *x\n", "a: [\n", "a: b: c\n"]
)
def test_what_cannot_be_edited_is_refused(text: str) -> None:
    with pytest.raises(RewriteError):
        with_settings(text, WANTED)


@pytest.mark.parametrize("value", ["", "a b", 'a"b\\c', "#x", "yes", "é", "1.5", "007", "null", "\n", "\x01", "- a"])
def test_any_text_comes_back_as_it_was(value: str) -> None:
    text = with_settings("kvredis:\n  port: 1\n", {"requirepass": value, "save": value})
    assert yaml.safe_load(text)["kvredis"] == {"port": 1, "requirepass": value, "settings": {"save": value}}


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(RewriteError, match="requirepass is not text"):
        with_settings("", {"requirepass": b"\xff".decode("utf-8", "surrogateescape")})


def test_the_file_is_replaced_whole_with_its_mode_and_through_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "kv.yaml", tmp_path / "link.yaml"
    file.write_text("kvredis:\n  port: 1\n")
    file.chmod(0o640)
    link.symlink_to(file)
    rewrite(link, WANTED)
    assert link.is_symlink()
    assert yaml.safe_load(file.read_text())["kvredis"]["maxclients"] == 7
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["kv.yaml", "link.yaml"]
    inode = file.stat().st_ino
    rewrite(file, WANTED)
    assert file.stat().st_ino == inode, "nothing to write, nothing written"


def test_without_a_file_there_is_nothing_to_rewrite() -> None:
    session = session_of(None)
    assert session.ask("CONFIG REWRITE") == b"-ERR The server is running without a config file\r\n"
    session.store.close()


def test_a_file_that_is_gone_or_broken_is_an_error_and_stays_what_it_is(tmp_path: Path) -> None:
    session = session_of(tmp_path / "nope.yaml")
    session.ask("CONFIG SET hz 20")
    assert session.ask("CONFIG REWRITE").startswith(b"-ERR Rewriting config file: ")
    (tmp_path / "nope.yaml").write_text("kvredis: 5\n")
    assert session.ask("CONFIG REWRITE") == b"-ERR Rewriting config file: kvredis is not a mapping\r\n"
    assert (tmp_path / "nope.yaml").read_text() == "kvredis: 5\n"
    session.store.close()


def test_only_what_was_set_while_it_ran_is_written(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("# mine\n")
    session = session_of(file)
    assert session.ask("CONFIG REWRITE") == b"+OK\r\n"
    assert file.read_text() == "# mine\n"
    session.ask([b"CONFIG", b"SET", b"client-output-buffer-limit", b"pubsub 1mb 0 0", b"hz", b"1000"])
    assert session.ask("CONFIG REWRITE") == b"+OK\r\n"
    said = yaml.safe_load(file.read_text())["kvredis"]
    assert said["settings"]["hz"] == 500
    text = said.get("client_output_buffer_limit") or said["settings"]["client-output-buffer-limit"]
    assert text == "normal 0 0 0 slave 268435456 67108864 60 pubsub 1048576 0 0"
    session.store.close()


def test_a_server_that_starts_from_what_was_written_is_what_the_first_one_was(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("max_local_cpu_size: 64MB\n")
    first = session_of(file)
    changed = {
        "maxclients": "77", "timeout": "9", "tcp-keepalive": "33", "proto-max-bulk-len": "2097152", "hz": "50",
        "client-query-buffer-limit": "4194304", "client-output-buffer-limit": "pubsub 1mb 0 0", "body-timeout": "2.5",
        "notify-keyspace-events": "KEx", "maxmemory-policy": "noeviction", "protected-mode": "no", "save": "900 1",
        "requirepass": "123", "slowlog-log-slower-than": "-1", "latency-tracking-info-percentiles": "50 99.9",
        "loglevel": "warning", "maxmemory": "2097152",
    }  # fmt: skip
    for name, value in changed.items():
        assert first.ask([b"CONFIG", b"SET", name.encode(), value.encode()]) == b"+OK\r\n"
    first.ask("CONFIG SET loglevel notice")
    assert first.ask("CONFIG REWRITE") == b"+OK\r\n"
    config = Config.load(file, {})
    assert not config.warnings
    fields = set(ServerOptions.__dataclass_fields__) & set(KEYS) - {"io_threads"}  # "auto", which serve makes a number
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
    second = Server(store, ServerOptions(**{name: getattr(config, name) for name in fields}))
    live = [name for name, setting in SETTINGS.items() if setting.effect in (Effect.LIVE, Effect.IGNORED)]
    assert {name: value_of(second, name) for name in live} == {name: value_of(first.server, name) for name in live}
    store.close()
    first.store.close()


def test_a_policy_set_while_it_ran_does_not_contradict_the_cache_policy_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("cache_policy: LRU\nkvredis:\n  maxmemory_policy: allkeys-lru\n")
    session = session_of(file)
    session.ask("CONFIG SET maxmemory-policy volatile-ttl")
    assert session.ask("CONFIG REWRITE") == b"+OK\r\n"
    session.store.close()
    assert Config.load(file, {}).settings == {"maxmemory-policy": "volatile-ttl"}


@pytest.mark.parametrize("number", ["0", "1", "86400", "86401", "600000", "999999999", str(2**31 - 1), str(2**63 - 1)])
def test_whatever_number_is_taken_while_it_runs_is_taken_from_the_file_too(number: str, tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("max_local_cpu_size: 64MB\n")
    session = session_of(file)
    taken = [
        name
        for name, setting in SETTINGS.items()
        if setting.effect is Effect.LIVE
        and name != "maxclients"  # takes as many as the process may have files
        and session.ask([b"CONFIG", b"SET", name.encode(), number.encode()]) == b"+OK\r\n"
    ]
    assert "requirepass" in taken
    assert session.ask("CONFIG REWRITE") == b"+OK\r\n"
    config = Config.load(file, {})
    fields = [name for name in taken if name.replace("-", "_") in set(ServerOptions.__dataclass_fields__) & set(KEYS)]
    said = {name: str(getattr(config, name.replace("-", "_"))).removesuffix(".0") for name in fields}
    assert said == dict.fromkeys(fields, number)
    session.store.close()
