"""What is said to both servers, and where ours may answer differently from Debian's 7.0.15, each with the reason.

A script runs on a fresh connection to an empty server, in RESP2 and then in RESP3.
"""

from tests.compat.wire import CommandLine

V72 = "Redis 7.2 answers so; Debian's is 7.0.15"
OURS = "our own text: only the shape is Redis'"

BIG = b"x" * 100_000
BINARY = bytes(range(256))

SCRIPTS: dict[str, list[CommandLine]] = {
    "connection": [
        "PING", "PING hello", "PING a b", "ping", "PiNg", "ECHO hello", "ECHO", "ECHO a b", ["ECHO", b""],
        ["ECHO", BINARY], ["PING", BIG], "SELECT 1", "SELECT 16", "SELECT -1", "SELECT a", "SELECT 99999999999",
        "SELECT 99999999999999999999", "SELECT 01", "SELECT", "SELECT 0", "HELLO 4", "HELLO x", "HELLO 2 FOO",
        "HELLO 2 SETNAME", "HELLO 2 AUTH a", "HELLO 2 AUTH nobody x", ["HELLO", "2", "SETNAME", "a b"],
        "AUTH a", "AUTH a b", "AUTH a b c", "AUTH default x", "AUTH", "RESET", "RESET x", "CLIENT GETNAME",
    ],
    "errors": [
        "FOO", "FOO a b", ["FOO", "x" * 200], ["FOO", "a" * 100, "b" * 100, "c"], ["FOO", "a\r\nb"], ["F\0O", "a\0b"],
        ["x" * 200], "GET", "GET a b", "get", "SET a", "MGET", "MSET a", "MSET a b c", "CLIENT", "CLIENT FOO",
        "client foo bar", ["CLIENT", "a\0b"], ["CLIENT", "y" * 200], "CLIENT SETNAME", "CLIENT ID x", "OBJECT",
        "OBJECT FOO k", "MEMORY FOO", "CONFIG", "CONFIG FOO", "COMMAND FOO", "SENTINEL MASTERS", "", ["", "a"],
    ],
    "client": [
        "CLIENT GETNAME", "CLIENT SETNAME me", "CLIENT GETNAME", ["CLIENT", "SETNAME", "a b"],
        ["CLIENT", "SETNAME", "é"], ["CLIENT", "SETNAME", b""], "CLIENT GETNAME", "HELLO 2 SETNAME you",
        "CLIENT GETNAME", "CLIENT NO-EVICT ON", "CLIENT NO-EVICT off", "CLIENT NO-EVICT x", "CLIENT KILL ID x",
        "CLIENT KILL ID 0", "CLIENT KILL ID 9999999", "CLIENT KILL 1.2.3.4:5", "CLIENT KILL foo bar",
        "CLIENT KILL TYPE foo", "CLIENT KILL USER nobody", "CLIENT KILL ADDR 1.2.3.4:5", "CLIENT KILL SKIPME x",
        "CLIENT KILL ID 9999999 ADDR 1.2.3.4:5 SKIPME no", "CLIENT KILL ID 1 ADDR",
        "CLIENT LIST TYPE foo", "CLIENT LIST TYPE pubsub", "CLIENT LIST ID a", "CLIENT LIST ID 99999999",
        "CLIENT LIST foo", "CLIENT LIST foo bar", "CLIENT MAINT_NOTIFICATIONS ON moving-endpoint-type internal-ip",
    ],
    "keys": [
        "EXISTS k", "TYPE k", "TTL k", "PTTL k", "DEL k", "UNLINK k", "TOUCH k", "PERSIST k", "EXPIRE k 10",
        "RANDOMKEY", "KEYS *", "DBSIZE", "SET k v", "SET l w", "EXISTS k", "EXISTS k k l nope", "TYPE k", "TTL k",
        "PTTL k", "DBSIZE", "KEYS k", "KEYS [a-k]", "KEYS ?", "KEYS nope*", "TOUCH k l nope", "DEL k k nope",
        "UNLINK l", "DBSIZE", "EXISTS", "DEL", "UNLINK", "TOUCH", "TYPE", "KEYS", "KEYS a b", "DBSIZE x",
        "RANDOMKEY x", ["SET", BINARY, BINARY], ["GET", BINARY], ["EXISTS", BINARY], "KEYS *", "RANDOMKEY",
        ["DEL", BINARY], ["SET", b"", b""], ["GET", b""], "KEYS *", "KEYS **", "SET only 1", "SELECT 3", "GET only",
        "DBSIZE", "SET three 3", "SELECT 0", "DBSIZE", "FLUSHDB", "DBSIZE", "SELECT 3", "DBSIZE", "FLUSHALL ASYNC",
        "DBSIZE", "FLUSHALL FOO", "FLUSHALL SYNC", "FLUSHDB ASYNC SYNC", "flushdb sync",
    ],
    "glob": [
        ["MSET", *[word for key in ("hello", "hallo", "hxllo", "heello", "h]llo", "h-llo", "h*llo", "h\\llo", "a.b+c(",
                                    "h^llo", "he\nllo")
                   for word in (key, "1")]],
        *[["KEYS", pattern] for pattern in (
            "nope", "hello", "h*llo.", "HELLO", "h\\*llo", "h[a]llo", "h[^aex]llo?", "a.b+c(", "a?b?c?", "[h", "[h-",
            "hell[n-p]", "hell[p-n", "h[\\]]llo", "h[]]llo", "h[]llo", "h\\\\llo", "h[\\^]llo", "*n*", "he??l*",
            "h?llo\\", "", "he?llo", "hello*****", "*****hello", "h[b-z]llo[", "he[\n]llo",
        )],
    ],
    "expiry": [
        "SET k v", "EXPIRE k 100", "TTL k", "EXPIRE k 100 NX", "EXPIRE k 200 GT", "TTL k", "EXPIRE k 300 LT",
        "EXPIRE k 50 LT", "TTL k", "EXPIRE k 60 XX", "PERSIST k", "PERSIST k", "TTL k", "EXPIRE k 10 GT",
        "EXPIRE k 10 XX", "EXPIRE k 10 LT", "PERSIST k", "EXPIRE k 10 nx", "EXPIRE k 10 NX XX", "EXPIRE k 10 NX GT",
        "EXPIRE k 10 GT LT", "EXPIRE k 5 XX GT", "EXPIRE k 10 FOO", "EXPIRE k abc", "EXPIRE k 1.5",
        "EXPIRE k 9223372036854775807", "PEXPIRE k 9223372036854775807", "EXPIRE k -9223372036854775808",
        "expire k 9223372036854775", "EXPIRE nope abc", "EXPIRE nope 10 FOO", "EXPIRE nope 10", "EXPIRE k",
        "PEXPIRE k 100000", "TTL k", "EXPIRE k -1", "EXISTS k", "SET k v", "PEXPIRE k 0", "GET k", "SET k v EX 100",
        "TTL k", "SET k v", "TTL k", "SET k v PX 100000", "TTL k", "SET k w KEEPTTL", "TTL k", "TTL", "PTTL a b",
        "PERSIST", "SET k v PXAT 1", "EXISTS k", "SET k v EXAT 99999999999", "PTTL k x",
    ],
    "scan": [
        "SCAN 0", "SCAN", "SCAN x", "SCAN -", "SCAN 1x", "SCAN +0", ["SCAN", b""], "SCAN 0 COUNT 0", "SCAN 0 COUNT x",
        "SCAN 0 COUNT", "SCAN 0 COUNT -1", "SCAN 0 FOO 1", "SCAN 0 MATCH", "SET k v", "SCAN 0", "SCAN 0 MATCH k*",
        "SCAN 0 MATCH x*", "SCAN 0 TYPE string", "SCAN 0 type STRING", "SCAN 0 TYPE list", "SCAN 0 COUNT 1000",
        "SCAN 0 MATCH k MATCH x", "scan 0 match k count 5 type string",
    ],
    "strings": [
        "GET k", "SET k v", "GET k", "SET k w NX", "SET n v XX", "SET k w XX", "SET k x GET", "SET n v NX GET",
        "SET k v EX 0", "SET k v EX -1", "SET k v EX abc", "SET k v PX 9223372036854775807",
        "SET k v EX 9223372036854775807", "SET k v EX", "SET k v FOO", "SET k v NX XX", "SET k v EX 10 PX 10",
        "SET k v EX 10 KEEPTTL", "SET k v nx", "set k v eX 10", "SETNX k v", "SETNX m v", "SETNX m", "MSET a 1 b 2",
        "MGET a b nope", "MGET a a", "STRLEN a", "STRLEN nope", "SET r 0123456789", "GETRANGE r 0 -1",
        "GETRANGE r 2 4", "GETRANGE r -3 -1", "GETRANGE r 5 2", "GETRANGE r 0 100", "GETRANGE r -100 2",
        "GETRANGE r 100 200", "GETRANGE r -1 -5", "GETRANGE r a 1", "GETRANGE nope 0 -1", "GETRANGE r 0",
        ["SET", "big", BIG], ["GET", "big"], "STRLEN big", "GETRANGE big 99998 -1", ["MSET", "big", BIG, "s", "t"],
        "MGET big s nope big", ["SET", "big", BIG, "NX"], ["SET", "big", BIG, "FOO"], ["SETNX", "big", BIG],
        ["SET", "big", BINARY * 100, "XX", "GET"], "GET big", ["SET", "bin", BINARY], "GET bin",
    ],
    "objects": [
        "OBJECT ENCODING k", "OBJECT IDLETIME k", "OBJECT REFCOUNT k", "OBJECT FREQ k", "SET k v", "SET i 123",
        "OBJECT ENCODING k", "OBJECT ENCODING i", ["SET", "e", "x" * 44], "OBJECT ENCODING e", ["SET", "r", "x" * 45],
        "OBJECT ENCODING r", ["SET", "big", BIG], "OBJECT ENCODING big", "OBJECT IDLETIME k", "OBJECT REFCOUNT k",
        "OBJECT FREQ k", "OBJECT ENCODING", "object encoding k", "SET i 01", "OBJECT ENCODING i",
        "SET i 9223372036854775807", "OBJECT ENCODING i", "SET i 9223372036854775808", "OBJECT ENCODING i",
        "MEMORY USAGE nope", "MEMORY USAGE nope SAMPLES x", "MEMORY USAGE k SAMPLES", "MEMORY USAGE k SAMPLES -1",
        "MEMORY USAGE k FOO 1", "MEMORY USAGE", "OBJECT HELP", "MEMORY HELP",
    ],
    "config": [
        "CONFIG GET nope", "CONFIG GET timeout", "CONFIG GET databases", "CONFIG GET appendonly", "CONFIG GET save",
        "CONFIG GET maxmemory", "CONFIG GET maxmemory-policy", "config get TIMEOUT", "CONFIG GET tim*t",
        "CONFIG GET hz hz", "CONFIG SET hz 20", "CONFIG GET hz", "CONFIG SET hz 10", "CONFIG SET nope 1",
        "CONFIG SET hz abc", "CONFIG SET hz 20 nope 1", "CONFIG SET hz 20 hz 30", "CONFIG SET a b c", "CONFIG SET hz",
        "CONFIG SET databases 3", "CONFIG SET unixsocket x", "CONFIG SET maxclients 0",
        "CONFIG SET lazyfree-lazy-user-del maybe", "CONFIG SET loglevel foo", "CONFIG SET appendfsync foo",
        "CONFIG SET notify-keyspace-events Q", "CONFIG SET notify-keyspace-events KEA",
        "CONFIG GET notify-keyspace-events", "CONFIG SET notify-keyspace-events lxEg",
        "CONFIG GET notify-keyspace-events", ["CONFIG", "SET", "notify-keyspace-events", b""], "CONFIG SET save foo",
        ["CONFIG", "SET", "save", "900 1 300 10"], "CONFIG GET save", ["CONFIG", "SET", "save", b""],
        "CONFIG SET client-output-buffer-limit foo", "CONFIG SET slowlog-max-len -1",
        "CONFIG SET client-query-buffer-limit 10", "CONFIG SET client-query-buffer-limit 2gb",
        "CONFIG GET client-query-buffer-limit", "CONFIG SET client-query-buffer-limit 1073741824",
        "CONFIG SET client-query-buffer-limit 1x", "CONFIG SET maxmemory 64mb", "CONFIG GET requirepass",
        "CONFIG RESETSTAT", "CONFIG RESETSTAT x", "CONFIG REWRITE", "CONFIG HELP", "CONFIG GET",
    ],
    "command": [
        "COMMAND INFO nope", "COMMAND INFO get", "COMMAND INFO set", "COMMAND INFO setnx GET strlen getrange touch",
        "COMMAND INFO config|get",
        "COMMAND INFO config|nope", "COMMAND INFO memory|usage", "COMMAND INFO exists del scan flushall hello",
        "COMMAND DOCS nope", "COMMAND DOCS get", "COMMAND COUNT", "COMMAND COUNT x",
        "COMMAND LIST FILTERBY MODULE x", "COMMAND LIST FILTERBY ACLCAT nope", "COMMAND LIST FILTERBY PATTERN ping",
        "COMMAND LIST FILTERBY PATTERN PING", "COMMAND LIST FILTERBY FOO x", "COMMAND LIST FILTERBY", "COMMAND LIST x",
        "COMMAND GETKEYS get k", "COMMAND GETKEYS mset a b c d", "COMMAND GETKEYS MGET a b c",
        "COMMAND GETKEYS memory usage k", "COMMAND GETKEYS nope k", "COMMAND GETKEYS ping a", "COMMAND GETKEYS get k l",
        "COMMAND GETKEYS get", "COMMAND GETKEYS", "COMMAND GETKEYSANDFLAGS set a b",
        "COMMAND GETKEYSANDFLAGS set a b ex 1 get",
        "COMMAND GETKEYSANDFLAGS mget a b", "COMMAND HELP",
    ],
    "info": ["INFO nope", "INFO cluster", "INFO CLUSTER nope cluster", "INFO modules", "INFO modules cluster foo"],
}  # fmt: skip

ALLOWED: dict[CommandLine, str] = {
    "HELLO 2 SETNAME you": "the version is ours (7.4.0-shaped), the connection's number too",
    "OBJECT HELP": OURS,
    "MEMORY HELP": OURS,
    "CONFIG HELP": OURS,
    "COMMAND HELP": OURS,
    "COMMAND DOCS get": OURS,
    "COMMAND COUNT": "no commands of other types",
    "COMMAND GETKEYS get": f"{V72}: there the arity of command|getkeys is -3",
}
"""Lines that ours may answer differently. A test sees to it that each of them still does."""
