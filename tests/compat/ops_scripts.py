"""What an operator says to both servers: SLOWLOG, LATENCY, MEMORY, CONFIG and the small server commands.

The shape is that of scripts.py. A script leaves the settings as it found them, since both servers go on. What tells a
time, an address or a text of ours is left to tests/server; DEBUG is shut on both.
"""

from tests.compat.wire import CommandLine

_LIMITS = "client-output-buffer-limit"
_LIMITS_DEFAULT = "normal 0 0 0 slave 256mb 64mb 60 pubsub 32mb 8mb 60"

OPS_SCRIPTS: dict[str, list[CommandLine]] = {
    "slowlog": [
        "SLOWLOG RESET", "SLOWLOG LEN", "SLOWLOG GET", "SLOWLOG GET 5", "SLOWLOG GET -1", "SLOWLOG GET -2",
        "SLOWLOG GET x", "SLOWLOG GET 1 2", "SLOWLOG GET 99999999999999999999", "SLOWLOG LEN x", "SLOWLOG RESET x",
        "SLOWLOG", "SLOWLOG FOO", "slowlog len", "CONFIG GET slowlog-max-len", "CONFIG SET slowlog-max-len -1",
        "CONFIG SET slowlog-log-slower-than -2", "CONFIG SET slowlog-log-slower-than x",
        "CONFIG SET slowlog-max-len 0", "CONFIG SET slowlog-log-slower-than 0", "GET k", "SLOWLOG LEN",
        "CONFIG SET slowlog-max-len 2", "GET k", "GET k", "GET k", "SLOWLOG LEN",
        "CONFIG SET slowlog-log-slower-than -1", "CONFIG GET slowlog-log-slower-than", "SLOWLOG RESET", "GET k",
        "SLOWLOG LEN", "CONFIG SET slowlog-log-slower-than 10000", "CONFIG SET slowlog-max-len 128",
    ],
    "latency": [
        "LATENCY LATEST", "LATENCY LATEST x", "LATENCY HISTORY", "LATENCY HISTORY x", "LATENCY HISTORY x y",
        "LATENCY RESET", "LATENCY RESET x y", "LATENCY GRAPH x", "LATENCY GRAPH", "LATENCY HISTOGRAM nope",
        "LATENCY HISTOGRAM nope nope|nope", "LATENCY FOO", "LATENCY", "LATENCY DOCTOR x", "latency reset",
        "CONFIG SET latency-monitor-threshold -1", "CONFIG SET latency-monitor-threshold x",
        "CONFIG GET latency-monitor-threshold", "CONFIG SET latency-tracking maybe", "CONFIG SET latency-tracking no",
        "INFO latencystats", "CONFIG SET latency-tracking yes", "CONFIG RESETSTAT", "LATENCY HISTOGRAM get set",
        "CONFIG SET latency-tracking-info-percentiles abc", "CONFIG SET latency-tracking-info-percentiles 101",
        "CONFIG SET latency-tracking-info-percentiles -1",
        ["CONFIG", "SET", "latency-tracking-info-percentiles", "50 99.99 100 0.0001"],
        "CONFIG GET latency-tracking-info-percentiles", ["CONFIG", "SET", "latency-tracking-info-percentiles", b""],
        "CONFIG GET latency-tracking-info-percentiles",
        ["CONFIG", "SET", "latency-tracking-info-percentiles", "50 99 99.9"],
    ],
    "memory": [
        "MEMORY STATS x", "MEMORY PURGE", "MEMORY PURGE x", "MEMORY DOCTOR x", "MEMORY MALLOC-STATS x", "MEMORY",
        "MEMORY FOO", "MEMORY USAGE", "MEMORY USAGE nope", "MEMORY USAGE nope SAMPLES 5", "SET k v",
        "MEMORY USAGE k SAMPLES", "MEMORY USAGE k FOO", "MEMORY USAGE k FOO 1", "MEMORY USAGE k SAMPLES x",
        "MEMORY USAGE k SAMPLES -1",
    ],
    "server": [
        "TIME x", "LASTSAVE x", "ROLE", "ROLE x", "SAVE", "SAVE x", "BGSAVE FOO", "BGSAVE SCHEDULE x", "BGREWRITEAOF x",
        "REPLICAOF NO ONE", "replicaof no one", "SLAVEOF NO ONE", "REPLICAOF x", "REPLICAOF x y", "REPLICAOF h 99999",
        "REPLICAOF h -1", "SLAVEOF h 70000", "MODULE", "MODULE LIST", "MODULE LIST x", "MODULE FOO", "MODULE LOAD x",
        "MODULE UNLOAD x", "MODULE LOADEX x y", "MODULE UNLOAD", "SHUTDOWN ABORT", "SHUTDOWN FOO",
        "SHUTDOWN SAVE NOSAVE", "SHUTDOWN NOW ABORT", "LOLWUT VERSION x", "SENTINEL MASTERS", "MONITOR x",
    ],
    "wait": [
        "WAIT 0 0", "WAIT 0 100", "WAIT -1 0", "WAIT 1 1", "WAIT x 0", "WAIT 0 x", "WAIT 0 1.5", "WAIT 0 -1",
        "WAIT 9223372036854775808 0", "WAIT", "WAIT 1", "WAIT 1 2 3", "MULTI", "WAIT 1 0", "WAIT 5 1000000", "EXEC",
        "MULTI", "MONITOR", "READONLY", "SLOWLOG RESET", "EXEC", "MULTI", "SAVE", "EXEC", "MULTI", "SHUTDOWN",
        "DISCARD",
    ],
    "cluster": [
        "CLUSTER", "CLUSTER INFO", "CLUSTER SLOTS", "CLUSTER SLOTS x", "CLUSTER SHARDS", "CLUSTER NODES",
        "CLUSTER MYID", "CLUSTER KEYSLOT k", "CLUSTER KEYSLOT", "CLUSTER FOO", "CLUSTER HELP", "CLUSTER RESET HARD",
        "CLUSTER MEET a", "CLUSTER ADDSLOTS 1 2", "cluster info", "READONLY", "READONLY x", "READWRITE", "READWRITE x",
        "ASKING", "ASKING x", "CLUSTER COUNTKEYSINSLOT 1", "CLUSTER GETKEYSINSLOT 1", "CLUSTER LINKS",
    ],
    "debug": ["DEBUG", "DEBUG SLEEP 0", "DEBUG JMAP", "DEBUG SEGFAULT", "debug object k"],
    "live settings": [
        f"CONFIG GET {_LIMITS}", f"CONFIG SET {_LIMITS} foo", ["CONFIG", "SET", _LIMITS, "foo 1 1 1"],
        ["CONFIG", "SET", _LIMITS, "master 1 1 1"], ["CONFIG", "SET", _LIMITS, "normal 1 1"],
        ["CONFIG", "SET", _LIMITS, "normal x 1 1"], ["CONFIG", "SET", _LIMITS, "normal 1mb 1k -1"],
        ["CONFIG", "SET", _LIMITS, "normal -1 1k 1"], ["CONFIG", "SET", _LIMITS, "Replica 1mb 1k 1 PUBSUB 5gb 1 2"],
        f"CONFIG GET {_LIMITS}", ["CONFIG", "SET", _LIMITS, "pubsub 1mb 2mb 1 pubsub 5 1 2"], f"CONFIG GET {_LIMITS}",
        ["CONFIG", "SET", _LIMITS, b""], ["CONFIG", "SET", _LIMITS, _LIMITS_DEFAULT], f"CONFIG GET {_LIMITS}",
        "CONFIG SET proto-max-bulk-len 1000", "CONFIG SET proto-max-bulk-len 1gb", "CONFIG GET proto-max-bulk-len",
        "CONFIG SET proto-max-bulk-len 512mb", "CONFIG SET timeout -1", "CONFIG SET timeout x",
        "CONFIG SET timeout 100", "CONFIG GET timeout", "CONFIG SET timeout 0", "CONFIG SET tcp-keepalive -1",
        "CONFIG SET tcp-keepalive 60", "CONFIG GET tcp-keepalive", "CONFIG SET tcp-keepalive 300",
        "CONFIG SET maxclients x", "CONFIG SET maxclients 0", "CONFIG SET maxclients 5000", "CONFIG GET maxclients",
        "CONFIG SET maxclients 10000",
        "CONFIG SET maxmemory-policy foo", "CONFIG SET maxmemory-policy noeviction", "CONFIG GET maxmemory-policy",
        "CONFIG SET maxmemory-policy ALLKEYS-LRU", "CONFIG SET tracking-table-max-keys -1",
        "CONFIG SET tracking-table-max-keys 5", "CONFIG GET tracking-table-max-keys",
        "CONFIG SET tracking-table-max-keys 1000000", "CONFIG SET acllog-max-len -1", "CONFIG SET acllog-max-len 5",
        "CONFIG GET acllog-max-len", "CONFIG SET acllog-max-len 128", "CONFIG SET hz 1000", "CONFIG GET hz",
        "CONFIG SET hz 0", "CONFIG GET hz", "CONFIG SET hz 10", "CONFIG SET maxmemory-clients 101%",
        "CONFIG SET maxmemory-clients 50%", "CONFIG GET maxmemory-clients", "CONFIG SET maxmemory-clients 0",
        "CONFIG SET protected-mode maybe", "CONFIG SET protected-mode yes", "CONFIG GET protected-mode",
    ],
    "several settings": [
        "CONFIG SET dir /tmp", "CONFIG SET dbfilename x", "CONFIG SET enable-debug-command yes", "CONFIG SET aclfile x",
        "CONFIG SET hz 20 aclfile x", "CONFIG SET hz 20 dir x", "CONFIG GET hz", "CONFIG SET hz 20 timeout -1",
        "CONFIG GET hz", "CONFIG SET hz 20 maxclients 100000000 timeout x", "CONFIG GET hz",
        "CONFIG SET hz 20 Timeout 3", "CONFIG GET hz", "CONFIG SET HZ 10 timeout 0", "CONFIG GET timeout TIMEOUT",
        "CONFIG GET Hz", "CONFIG GET nope n[o]pe", "CONFIG GET h[a-z] nope", "CONFIG SET hz 10 hz 10",
        "CONFIG SET hz 10 HZ 10", "CONFIG SET requirepass", "CONFIG REWRITE", "CONFIG REWRITE x",
    ],
}  # fmt: skip
