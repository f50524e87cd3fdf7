"""The server's keys: what each may say, in the words of redis.conf where Redis has the setting too."""

from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.config.schema import Config
from kvredis.storage.errors import ConfigError

MIB = 1024 * 1024

FULL = """\
kvredis:
  bind: ["*", "-::*"]
  port: none
  unixsocketperm: 770
  protected_mode: no
  aclfile: /etc/kvredis.acl
  tls_port: 6380
  tls_cert_file: /etc/tls/server.pem
  tls_key_file: /etc/tls/server.key
  tls_key_file_pass: 1234
  tls_ca_cert_file: /etc/tls/ca.pem
  tls_auth_clients: no
  tls_protocols: [tlsv1.3]
  tls_ciphers: ECDHE+AESGCM
  timeout: 60
  tcp_keepalive: 0
  proto_max_bulk_len: 2gb
  client_query_buffer_limit: 64m
  client_output_buffer_limit: replica 1gb 0 0 PUBSUB 64mb 16mb 90
  body_timeout: 2.5
  enable_debug_command: yes
  notify_keyspace_events: Ex
  maxmemory_policy: NoEviction
  cluster_topology: /etc/kvredis/nodes.yaml
  cluster_node: 127.0.0.1:7000
  settings:
    slowlog-max-len: 1000
    Latency-Tracking: no
    slowlog-log-slower-than: -1
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Where a test may write its file."""
    return tmp_path / "kv.yaml"


def load(text: str, path: Path, **env: str) -> Config:
    path.write_text(text)
    return Config.load(path, env, server=True)


def test_a_full_file_is_read(written: Path) -> None:
    config = load(FULL, written)
    assert config.warnings == ()
    assert config.file == written
    assert (config.bind, config.port, config.unixsocketperm) == (("*", "-::*"), -1, "770")
    assert (config.protected_mode, config.aclfile) == (False, "/etc/kvredis.acl")
    assert (config.tls_port, config.tls_auth_clients, config.tls_protocols) == (6380, "no", ("TLSv1.3",))
    assert (config.tls_key_file_pass, config.shown()["tls_key_file_pass"]) == ("1234", "***")
    assert (config.timeout, config.tcp_keepalive, config.body_timeout) == (60, 0, 2.5)
    assert (config.proto_max_bulk_len, config.client_query_buffer_limit) == (2048 * MIB, 64_000_000)
    assert config.client_output_buffer_limit == f"slave {1024 * MIB} 0 0 pubsub {64 * MIB} {16 * MIB} 90"
    assert (config.enable_debug_command, config.notify_keyspace_events) == ("yes", "Ex")
    assert config.maxmemory_policy == "noeviction"
    assert config.settings == {"slowlog-max-len": "1000", "latency-tracking": "no", "slowlog-log-slower-than": "-1"}
    assert (config.cluster_topology, config.cluster_node) == ("/etc/kvredis/nodes.yaml", "127.0.0.1:7000")
    assert config.origin["settings"] == f"{written}:26"
    assert config.entry_origin["settings.latency-tracking"] == f"{written}:28"


def test_defaults_are_redis_own_and_safe() -> None:
    config = Config.load(env={})
    assert (config.bind, config.protected_mode, config.tls_port) == (("127.0.0.1",), True, 0)
    assert (config.tls_auth_clients, config.tls_protocols) == ("yes", ("TLSv1.2", "TLSv1.3"))
    assert (config.timeout, config.tcp_keepalive, config.enable_debug_command) == (0, 300, "no")
    assert (config.proto_max_bulk_len, config.client_query_buffer_limit) == (512 * MIB, 1024 * MIB)
    assert config.file is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "none", -1),
        ("port", "0", 0),
        ("tls_port", "Free", -1),
        ("tls_protocols", "TLSv1.3, TLSv1.2", ("TLSv1.2", "TLSv1.3")),
        ("unixsocketperm", "0700", "700"),
        ("unixsocketperm", "0o660", "660"),
        ("unixsocketperm", "none", None),
        ("proto_max_bulk_len", "1048576", MIB),
        ("proto_max_bulk_len", "1100k", 1_100_000),
        ("client_output_buffer_limit", "", ""),
        ("enable_debug_command", "LOCAL", "local"),
        ("settings", '{"hz": 20, "Activedefrag": true}', {"hz": "20", "activedefrag": "yes"}),
    ],
)
def test_values_from_the_environment(name: str, text: str, value: Any) -> None:
    variable = f"KVREDIS_{name.upper()}"
    config = Config.load(env={variable: text})
    assert getattr(config, name) == value
    assert config.origin[name] == f"env {variable}"


@pytest.mark.parametrize("mode", ["0770", "0660", "0700", "448", "true", "[7, 7, 0]"])
def test_a_mode_that_yaml_has_made_a_number_of_is_refused_and_quotes_are_asked_for(written: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match="no switch" if mode == "true" else "in quotes"):
        load(f"kvredis:\n  unixsocketperm: {mode}\n", written)


def test_a_setting_that_is_no_single_value_names_its_own_line(written: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("kvredis:\n  settings:\n    hz: 10\n    save: [900, 1]\n", written)
    assert (caught.value.key, caught.value.source) == ("settings.save", f"{written}:4")


def test_settings_of_a_later_source_replace_the_mapping_and_its_origins(written: Path) -> None:
    text = "kvredis:\n  settings:\n    hz: 10\n"
    config = load(text, written, KVREDIS_SETTINGS='{"save": ""}')
    assert config.settings == {"save": ""}
    assert config.entry_origin == {"settings.save": "env KVREDIS_SETTINGS"}
