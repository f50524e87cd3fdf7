"""What is said to both servers about a connection's own state: transactions, reply modes, pauses, protocols, and broken
bytes.

Replies are compared byte by byte; where ours may differ, the line stands in ALLOWED or a pattern in MASKS, with the
reason.

SESSION_SCRIPTS are lines on one connection, one reply each. CONVERSATIONS are steps of several connections. STREAMS are
bytes sent as they are on a connection of their own, half-closed behind them, and everything that comes back.
"""

from pathlib import Path
from typing import NamedTuple

from tests.compat.wire import CommandLine, encode

GONE = -1
BLOCKED = -2


class Step(NamedTuple):
    """What one of several clients sends, and how many replies (or messages) it then reads.

    `{2}` in a line stands for the number that the server has given to client 2. An empty line sends nothing. In place
    of a number of replies: GONE, the server has hung up; BLOCKED, the server keeps the client waiting, which it does
    before the next step is taken (two connections' bytes are read in either order).
    """

    client: int
    line: CommandLine
    replies: int = 1


V72 = "Redis 7.2 answers so; Debian's is 7.0.15"

TABLE = Path(__file__).parents[1] / "server" / "commands" / "redis_commands.tsv"
SINCE_7_2 = {"waitaof", "client|setinfo", "client|no-touch", "cluster|myshardid"}
"""Commands that Debian's redis-server does not know."""

NOT_OURS = {
    *("bitcount", "bitfield", "bitfield_ro", "bitop", "bitpos", "getbit", "setbit"),
    *("pfadd", "pfcount", "pfdebug", "pfmerge", "pfselftest"),
    *("eval", "eval_ro", "evalsha", "evalsha_ro", "fcall", "fcall_ro", "function", "script"),
    *("failover", "migrate", "psync", "replconf", "sync"),
}
"""Commands that we answer as unknown ones (tests/server/commands/test_registry.py has the reasons)."""


def wrong_arities() -> list[CommandLine]:
    """For every command one argument too few, and one too many where their number is bounded."""
    lines: list[CommandLine] = []
    for row in TABLE.read_text().splitlines():
        name, arity = [*row.split("\t"), ""][:2]
        words = name.split("|")
        if name.startswith("#") or {name, words[0]} & NOT_OURS or name in SINCE_7_2:
            continue
        for count in {abs(int(arity)) - 1, int(arity) + 1 if int(arity) > 0 else 0} - {0}:
            if count >= len(words):
                lines.append([*words, *["1"] * (count - len(words))])
    return lines


SESSION_SCRIPTS: dict[str, list[CommandLine]] = {
    "multi": [
        "MULTI", "SET a 1", "GET a", "INCR a", "GET nope", "MGET a nope", "EXEC", "EXEC", "MULTI", "EXEC",
        "DISCARD", "MULTI", "SET a 2", "DISCARD", "GET a", "DISCARD", "MULTI x", "EXEC x", "DISCARD x", "UNWATCH x",
        "WATCH", "MULTI", "MULTI", "SET a 3", "EXEC", "GET a", "MULTI", "WATCH a", "SET a 4", "EXEC", "GET a",
        "MULTI", "PING", "PING hello", "ECHO x", "SELECT 3", "SET k three", "DBSIZE", "SELECT 0", "EXEC", "DBSIZE",
        "MULTI", "SET k v", "INCR k", "APPEND k w", "EXEC", "GET k", "multi", "Set k x", "exec", "MULTI", "TYPE k",
        "SET k v EX 100", "TTL k", "PERSIST k", "DEL k nope", "EXISTS k", "FLUSHDB", "DBSIZE", "EXEC", "MULTI",
        ["SET", "b", b"\r\n\0"], "GET b", ["SET", "big", b"x" * 100_000], "GET big", "STRLEN big", "EXEC", "MULTI",
        "UNWATCH", "EXEC", "MULTI", "HELLO 2", "EXEC", "MULTI", "CLIENT GETNAME", "CONFIG GET timeout", "EXEC",
        "MULTI", "OBJECT ENCODING b", "EXEC",
    ],
    "execabort": [
        "MULTI", "FOO a", "SET a 1", "EXEC", "GET a", "MULTI", "SET a", "EXEC", "MULTI", "GET", "GET a", "DISCARD",
        "EXEC", "MULTI", "CLIENT FOO", "EXEC", "MULTI", "CLIENT SETNAME", "EXEC", "MULTI", "EXEC x", "SET a 1",
        "EXEC", "MULTI", "DISCARD x", "EXEC", "MULTI", "MULTI x", "EXEC", "MULTI", "MULTI", "EXEC", "MULTI",
        "WATCH", "EXEC", "MULTI", "SUBSCRIBE", "EXEC", "MULTI", "MONITOR", "EXEC", "MULTI", "SHUTDOWN NOSAVE",
        "EXEC", "MULTI", "CONFIG", "EXEC", "MULTI", "SET a 1 FOO", "SET a 1 EX 0", "INCRBY a x", "EXPIRE a x",
        "GETRANGE a x y", "SELECT 99", "EXEC", "MULTI", "COMMAND FOO", "DBSIZE", "EXEC", "MULTI", "", "EXEC",
        "EXISTS a",
    ],
    "watch": [
        "WATCH a", "MULTI", "SET a 1", "EXEC", "WATCH a", "SET a 2", "MULTI", "SET a 3", "EXEC", "GET a", "MULTI",
        "SET a 4", "EXEC", "WATCH a", "SET a 5", "UNWATCH", "MULTI", "SET a 6", "EXEC", "WATCH a", "SET a 7",
        "DISCARD", "MULTI", "DISCARD", "MULTI", "GET a", "EXEC", "WATCH a b c a", "DEL b", "MULTI", "GET a", "EXEC",
        "WATCH b", "SET b 1", "MULTI", "EXEC", "WATCH b", "EXPIRE b 100", "MULTI", "EXEC", "WATCH b",
        "EXPIRE b 100", "MULTI", "EXEC", "WATCH b", "PERSIST b", "MULTI", "EXEC", "WATCH b", "TOUCH b", "GET b",
        "MULTI", "EXEC", "WATCH b", "SET b 1", "MULTI", "EXEC", "WATCH nope", "DEL nope", "MULTI", "EXEC",
        "WATCH nope", "FLUSHDB", "MULTI", "EXEC", "SET b 1", "WATCH b", "FLUSHALL", "MULTI", "EXEC", "SET b 1",
        "WATCH b", "SELECT 1", "SET b 2", "SELECT 0", "MULTI", "EXEC", "WATCH b", "SELECT 1", "MULTI", "EXEC",
        "SELECT 0", "WATCH b", "SWAPDB 0 1", "MULTI", "EXEC", "WATCH b", "SWAPDB 2 3", "MULTI", "EXEC", "WATCH b",
        "RENAME b c", "MULTI", "EXEC", "WATCH b c", "COPY c b", "MULTI", "EXEC", "WATCH b", "APPEND b x", "MULTI",
        "EXEC", "WATCH b", "INCR n", "MULTI", "EXEC", "WATCH b", "MULTI", "FOO", "EXEC", "MULTI", "EXEC", "WATCH b",
        "SET b 1", "MULTI", "FOO", "EXEC", "WATCH b", "SET b x NX", "MULTI", "EXEC", "WATCH b", "SET b x", "RESET",
        "MULTI", "GET b", "EXEC",
    ],
    "reset": [
        "RESET", "RESET x", "reset", "MULTI", "SET a 1", "RESET", "EXEC", "GET a", "SELECT 5", "SET five 5", "RESET",
        "GET five", "CLIENT SETNAME me", "RESET", "CLIENT GETNAME", "WATCH a", "SET a 1", "RESET", "MULTI", "EXEC",
        "CLIENT NO-EVICT on", "RESET", "MULTI", "RESET", "DISCARD",
    ],
    "hello": [
        "HELLO", "HELLO 2", "HELLO 3", "GET nope", "HELLO 2", "GET nope", "HELLO 1", "HELLO 4", "HELLO 0",
        "HELLO -1", "HELLO x", "HELLO 3.0", "HELLO 99999999999999999999", "HELLO 3 FOO", "GET nope", "HELLO 3 AUTH",
        "HELLO 3 AUTH default", "HELLO 3 AUTH default x", "HELLO 3 AUTH nobody x", "GET nope", "HELLO 3 SETNAME",
        "HELLO 3 SETNAME me", "CLIENT GETNAME", ["HELLO", "3", "SETNAME", "a b"],
        ["HELLO", "3", "SETNAME", b"\xff"], "CLIENT GETNAME", "HELLO 2 SETNAME a SETNAME b", "CLIENT GETNAME",
        ["HELLO", "2", "SETNAME", b""], "CLIENT GETNAME", "HELLO 2 AUTH default x SETNAME y",
        "HELLO 2 SETNAME y AUTH nobody x", "CLIENT GETNAME", "hello 3 setname z", "CLIENT GETNAME",
        "HELLO 3 AUTH a b c", "MULTI", "HELLO 2", "EXEC", "GET nope", "MULTI", "HELLO 9", "EXEC",
    ],
    "client errors": [
        "CLIENT PAUSE", "CLIENT PAUSE x", "CLIENT PAUSE -1", "CLIENT PAUSE 1.5", "CLIENT PAUSE 10 FOO",
        "CLIENT PAUSE 99999999999999999999", "CLIENT PAUSE 10 WRITE x", "CLIENT PAUSE 0", "CLIENT UNPAUSE",
        "CLIENT UNPAUSE x", "CLIENT PAUSE 0 ALL", "client pause 0 write", "CLIENT UNPAUSE", "CLIENT REPLY",
        "CLIENT REPLY FOO", "CLIENT REPLY ON", "client reply on", "CLIENT REPLY ON x", "CLIENT UNBLOCK",
        "CLIENT UNBLOCK x", "CLIENT UNBLOCK 999999", "CLIENT UNBLOCK 999999 FOO", "CLIENT UNBLOCK 999999 TIMEOUT",
        "CLIENT UNBLOCK 999999 error", "CLIENT UNBLOCK 999999 ERROR x", "CLIENT GETREDIR", "CLIENT GETREDIR x",
        "CLIENT CACHING", "CLIENT CACHING FOO", "CLIENT CACHING YES", "CLIENT CACHING NO", "CLIENT TRACKING",
        "CLIENT TRACKING FOO", "CLIENT TRACKING OFF", "CLIENT TRACKINGINFO", "CLIENT NO-EVICT",
        "CLIENT NO-EVICT FOO", "CLIENT KILL", "CLIENT KILL a", "CLIENT INFO x", "CLIENT GETNAME x",
        "CLIENT SETNAME a b",
    ],
    "server errors": [
        "WAIT 0 0", "WAIT x 0", "WAIT 0 x", "WAIT 0 -1", "WAIT 1 1", "SWAPDB 0 16", "SWAPDB x 0", "SWAPDB 0 x",
        "SWAPDB 0 0", "ROLE", "CLUSTER INFO", "CLUSTER SLOTS", "READONLY", "READWRITE", "ASKING",
        "REPLICAOF NO ONE", "MODULE LIST", "DEBUG SLEEP 0", "DEBUG", "MONITOR x", "SHUTDOWN FOO",
        "SHUTDOWN SAVE NOSAVE", "SHUTDOWN ABORT", "SLOWLOG FOO", "SLOWLOG GET x", "SLOWLOG GET -2", "SLOWLOG RESET",
        "LATENCY FOO", "LATENCY LATEST", "LATENCY RESET", "LATENCY HISTORY x", "MEMORY FOO", "MEMORY PURGE",
        "ACL FOO", "ACL WHOAMI", "ACL USERS", "PUBSUB FOO", "PUBSUB NUMPAT", "CONFIG FOO", "OBJECT FOO k",
        "LASTSAVE x", "TIME x", "LOLWUT VERSION x",
    ],
    "subscriber": [
        "SUBSCRIBE a", "GET k", "PING", "PING x", "SET k v", "MULTI", "FOO", "GET", "HELLO 9", "CLIENT GETNAME",
        "PSUBSCRIBE p*", "UNSUBSCRIBE a", "GET k", "PUNSUBSCRIBE", "GET k", "SSUBSCRIBE s", "GET k", "ECHO x",
        "SUNSUBSCRIBE", "UNSUBSCRIBE", "PING", "SUBSCRIBE a", "RESET", "GET k", "MULTI", "SUBSCRIBE a", "EXEC",
    ],
    "wrong arity": wrong_arities(),
    "getkeys": [
        f"COMMAND {which} {line}"
        for line in (
            "GET k", "SET k v", "SET k v NX GET EX 10", "SETNX k v", "SETEX k 1 v", "PSETEX k 1 v", "GETSET k v",
            "GETDEL k", "GETEX k EX 1", "MGET a b c", "MSET a 1 b 2", "MSETNX a 1 b 2", "APPEND k v", "STRLEN k",
            "SETRANGE k 0 v", "GETRANGE k 0 1", "SUBSTR k 0 1", "INCR k", "DECR k", "INCRBY k 1", "DECRBY k 1",
            "INCRBYFLOAT k 1", "LCS a b IDX", "DEL a b", "UNLINK a b", "EXISTS a b", "TOUCH a b", "TYPE k",
            "RENAME a b", "RENAMENX a b", "COPY a b REPLACE", "EXPIRE k 1", "PEXPIRE k 1", "EXPIREAT k 1",
            "PEXPIREAT k 1", "EXPIRETIME k", "PEXPIRETIME k", "TTL k", "PTTL k", "PERSIST k", "DUMP k",
            "RESTORE k 0 v", "OBJECT ENCODING k", "OBJECT FREQ k", "OBJECT IDLETIME k", "OBJECT REFCOUNT k",
            "MOVE k 1", "WATCH a b", "MEMORY USAGE k SAMPLES 1", "DEBUG OBJECT k", "PING x", "SCAN 0", "KEYS *",
            "PUBLISH a b", "SUBSCRIBE a", "SPUBLISH a b", "SSUBSCRIBE a b", "SUNSUBSCRIBE a", "CLIENT ID",
            "CONFIG GET a", "SWAPDB 0 1", "FLUSHALL SYNC", "NOPE a", "CLIENT NOPE", "GET a b", "MSET a",
            "MEMORY USAGE",
        )
        for which in ("GETKEYS", "GETKEYSANDFLAGS")
    ],
    "command": [
        "COMMAND COUNT", "COMMAND COUNT x", "COMMAND DOCS nope", "COMMAND DOCS x y", "COMMAND INFO nope",
        "COMMAND INFO nope x", "COMMAND LIST x", "COMMAND LIST FILTERBY", "COMMAND LIST FILTERBY FOO x",
        "COMMAND LIST FILTERBY ACLCAT nope", "COMMAND LIST FILTERBY PATTERN get",
        "COMMAND LIST FILTERBY PATTERN nope*", "COMMAND LIST FILTERBY MODULE m",
        "COMMAND LIST FILTERBY PATTERN a b", "COMMAND FOO", "COMMAND GETKEYS", "COMMAND GETKEYSANDFLAGS",
        "command getkeys get k",
    ],
}  # fmt: skip

CONVERSATIONS: dict[str, list[Step]] = {
    "a watched key changed by another": [
        Step(1, "SET k 1"), Step(1, "WATCH k"), Step(2, "SET k 2"), Step(1, "MULTI"), Step(1, "SET k 3"),
        Step(1, "EXEC"), Step(1, "GET k"), Step(1, "WATCH k"), Step(1, "MULTI"), Step(1, "SET k 4"),
        Step(2, "DEL k"), Step(1, "EXEC"), Step(2, "EXISTS k"), Step(1, "WATCH k"), Step(2, "SELECT 1"),
        Step(2, "SET k other"), Step(1, "MULTI"), Step(1, "EXEC"), Step(1, "WATCH k"), Step(2, "FLUSHALL"),
        Step(1, "MULTI"), Step(1, "EXEC"), Step(1, "SET k 1"), Step(1, "WATCH k"), Step(2, "FLUSHALL"),
        Step(1, "MULTI"), Step(1, "EXEC"), Step(1, "WATCH k"), Step(2, "SWAPDB 0 1"), Step(1, "MULTI"),
        Step(1, "EXEC"), Step(1, "WATCH k"), Step(2, "SELECT 0"), Step(2, "SET k 1"), Step(2, "DEL k"),
        Step(1, "MULTI"), Step(1, "EXEC"), Step(1, "SET k 1"), Step(1, "WATCH k"), Step(2, "PEXPIRE k -1"),
        Step(1, "MULTI"), Step(1, "EXEC"), Step(1, "WATCH k"), Step(2, "SET l 1"), Step(2, "RENAME l k"),
        Step(1, "MULTI"), Step(1, "EXEC"), Step(1, "WATCH k"), Step(2, "GET k"), Step(2, "TOUCH k"),
        Step(2, "SET other 1"), Step(1, "MULTI"), Step(1, "GET k"), Step(1, "EXEC"),
    ],
    "a transaction is not seen before EXEC": [
        Step(1, "MULTI"), Step(1, "SET k 1"), Step(2, "GET k"), Step(1, "INCR k"), Step(2, "EXISTS k"),
        Step(1, "EXEC"), Step(2, "GET k"), Step(1, "MULTI"), Step(1, "PUBLISH c hello"), Step(2, "SUBSCRIBE c"),
        Step(1, "EXEC"), Step(2, "", 1),
    ],
    "killed clients are gone": [
        Step(2, "CLIENT SETNAME victim"), Step(1, "CLIENT KILL ID {2}"), Step(1, "CLIENT KILL ID {2}"),
        Step(2, "", GONE), Step(3, "MULTI"), Step(3, "SET k v"), Step(1, "CLIENT KILL TYPE normal ID {3}"),
        Step(3, "", GONE), Step(1, "GET k"), Step(4, "SUBSCRIBE c"), Step(1, "PUBLISH c x"), Step(4, "", 1),
        Step(1, "CLIENT KILL TYPE pubsub"), Step(4, "", GONE), Step(1, "PUBLISH c x"), Step(5, "PING"),
        Step(1, "CLIENT KILL ID {5} SKIPME no"), Step(5, "", GONE), Step(1, "CLIENT KILL ID {1}"),
        Step(1, "CLIENT KILL ID {1} SKIPME yes"), Step(1, "CLIENT KILL ID {1} SKIPME no"), Step(1, "", GONE),
    ],
    "a blocked client is unblocked": [
        Step(1, "WAIT 1 0", BLOCKED), Step(2, "CLIENT UNBLOCK {1}"), Step(1, "", 1), Step(1, "PING"),
        Step(1, "WAIT 1 0", BLOCKED), Step(2, "CLIENT UNBLOCK {1} ERROR"), Step(1, "", 1), Step(1, "WAIT 2 0", BLOCKED),
        Step(2, "CLIENT UNBLOCK {1} TIMEOUT"), Step(1, "", 1), Step(2, "CLIENT UNBLOCK {1}"), Step(1, "MULTI"),
        Step(1, "WAIT 1 0"), Step(1, "EXEC"), Step(1, "WAIT 1 0", BLOCKED), Step(2, "CLIENT KILL ID {1}"),
        Step(2, "CLIENT UNBLOCK {1}"),
    ],
    "a paused server answers what it may": [
        Step(1, "SET k 1"), Step(1, "CLIENT PAUSE 100000 WRITE"), Step(2, "GET k"), Step(2, "PING"),
        Step(2, "SET k 2", 0), Step(1, "GET k"), Step(1, "CLIENT UNPAUSE"), Step(2, "", 1), Step(1, "GET k"),
        Step(1, "CLIENT PAUSE 20"), Step(2, "GET k", 0), Step(1, "CLIENT UNPAUSE"), Step(2, "", 1),
        Step(2, "MULTI"), Step(2, "SET k 3"), Step(1, "CLIENT PAUSE 100000 WRITE"), Step(2, "EXEC", 0),
        Step(1, "CLIENT UNPAUSE"), Step(2, "", 1), Step(1, "CLIENT PAUSE 100000 WRITE"), Step(2, "MULTI"),
        Step(2, "SET k 3", 0), Step(1, "CLIENT UNPAUSE"), Step(2, "", 1), Step(2, "GET k"), Step(2, "EXEC"),
        Step(1, "CLIENT PAUSE 100000 WRITE"), Step(2, "PUBLISH c x", 0), Step(1, "CLIENT UNPAUSE"), Step(2, "", 1),
        Step(1, "CLIENT PAUSE 1"), Step(2, "GET k"),
    ],
    "a password shuts out those who come later": [
        Step(1, "CONFIG SET requirepass secret"), Step(1, "PING"), Step(2, "PING"), Step(2, "GET k"),
        Step(2, "FOO"), Step(2, "GET"), Step(2, "MULTI"), Step(2, "EXEC"), Step(2, "HELLO"), Step(2, "HELLO 3"),
        Step(2, "HELLO 2 AUTH default x"), Step(2, "CLIENT ID"), Step(2, "COMMAND"), Step(2, "SUBSCRIBE c"),
        Step(2, "RESET"), Step(2, "AUTH x"), Step(2, "AUTH default x"), Step(2, "AUTH nobody secret"),
        Step(2, "AUTH a b c"), Step(2, "AUTH"), Step(2, "AUTH secret"), Step(2, "GET k"), Step(2, "AUTH x"),
        Step(2, "GET k"), Step(2, "RESET"), Step(2, "GET k"), Step(2, "AUTH default secret"), Step(2, "GET k"),
        Step(3, "QUIT"), Step(4, "HELLO 2 AUTH default secret SETNAME me"), Step(4, "CLIENT GETNAME"),
        Step(1, "CONFIG GET requirepass"), Step(1, ["CONFIG", "SET", "requirepass", b""]), Step(5, "PING"),
        Step(2, "RESET"), Step(2, "PING"), Step(2, "AUTH secret"), Step(2, "AUTH default secret"),
    ],
    "an expired key counts as changed": [
        Step(1, "SET k 1 PX 10000"), Step(1, "WATCH k"), Step(2, "PEXPIREAT k 1"), Step(1, "MULTI"), Step(1, "EXEC"),
        Step(2, "EXISTS k"),
    ],
}  # fmt: skip

STREAMS: dict[str, list[bytes]] = {
    "reply modes": [
        encode("PING") + b"CLIENT REPLY OFF\r\nPING\r\nGET a\r\nFOO\r\nSET a 1\r\nCLIENT REPLY ON\r\nGET a\r\n",
        b"CLIENT REPLY SKIP\r\nPING x\r\nPING y\r\n",
        b"CLIENT REPLY SKIP\r\nCLIENT REPLY SKIP\r\nPING x\r\nPING y\r\n",
        b"CLIENT REPLY OFF\r\nCLIENT REPLY SKIP\r\nPING x\r\nCLIENT REPLY ON\r\nPING y\r\n",
        b"CLIENT REPLY SKIP\r\nFOO\r\nFOO\r\n",
        b"CLIENT REPLY SKIP\r\nCLIENT REPLY ON\r\nPING\r\n",
        b"CLIENT REPLY OFF\r\nMULTI\r\nSET a 2\r\nEXEC\r\nCLIENT REPLY ON\r\nGET a\r\n",
        b"MULTI\r\nCLIENT REPLY OFF\r\nPING\r\nEXEC\r\nPING\r\nCLIENT REPLY ON\r\nPING\r\n",
        b"CLIENT REPLY OFF\r\nRESET\r\nPING\r\n",
        b"CLIENT REPLY OFF\r\nQUIT\r\nPING\r\n",
        b"CLIENT REPLY OFF\r\n*x\r\n",
        b"CLIENT REPLY OFF\r\nHELLO 3\r\nCLIENT REPLY ON\r\nGET nope\r\n",
        b"CLIENT REPLY OFF\r\nCLIENT REPLY\r\nCLIENT REPLY FOO\r\nCLIENT REPLY ON\r\n",
    ],
    "inline": [
        b"PING\r\n", b"PING\n", b"\r\n\r\nPING\r\n", b"\n\nPING\n", b"  PING  \r\n", b"PING \t x\r\n",
        b"ping hello\r\n", b'SET k "a\\x41\\n\\r\\t\\a\\b\\"\\\\b"\r\nGET k\r\n', b"SET k 'a\\'b\\n'\r\nGET k\r\n",
        b'SET k ""\r\nGET k\r\n', b'PING "a\r\nPING\r\n', b"PING 'a\r\nPING\r\n", b'PING "a"b\r\nPING\r\n',
        b"PING 'a'b\r\nPING\r\n", b'PING a"b c"\r\n', b'PING "\\xzz\\x4"\r\n', b"PING \0x\r\n", b"PING a\0b\r\n",
        b"FOO a b\r\n", b"GET\r\n", b"QUIT\r\nPING\r\n", b"SET k v\r\nGET k\r\n" + encode("GET k") + b"GET k\n",
        b"PING", b"PING x" * 20_000, b"x" * 70_000, b"\r", b"\r\n", b"PING\r\r\n", b"ECHO \xff\xfe\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nPING\r\n", b"Host: x\r\n",
        b"post x\r\n", b"host: x\r\nPING\r\n", b"PING a  b\r\n",
    ],
    "broken counts": [
        b"PING\r\n" + head + b"\r\nPING\r\n"
        for head in (
            b"*0", b"*-1", b"*-10", b"*-2147483648", b"*", b"*abc", b"*+1", b"*01", b"* 1", b"*1 ", b"*-0",
            b"*2147483648",
            b"*9000000000000000000", b"*99999999999999999999", b"*1.5", b"*1x", b"*0x1", b"*\0",
        )
    ],
    "broken lengths": [
        b"PING\r\n*2\r\n$4\r\nPING\r\n" + head + b"\r\nx\r\nPING\r\n"
        for head in (
            b"$-1", b"$-2", b"$+4", b"$04", b"$ 4", b"$", b"$x", b"$4x", b"$1.0", b"$536870913",
            b"$9223372036854775808",
            b"$99999999999999999999", b":1", b"+OK", b"-ERR", b"*1", b"", b"PING", b"\r", b"\0", b"\xff",
        )
    ],
    "too much": [
        b"*40\r\nAPPEND\r\n$1\r\nk\r\n", b"*40\r\n$3\r\nDE\r\n$1\r\nk\r\n$1\r\nn\r\n",
        b"*40\r\n$x\r\nDEL\r\n$1\r\nk\r\n",
        b"*" + b"1" * 70_000, b"*1\r\n$" + b"1" * 70_000, b"*1" + b"\n" * 3, b"PING\r\n*" + b"1" * 70_000,
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$" + b"0" * 70_000,
    ],
    "cut short": [
        b"*1\r\n$4\r\nPIN", b"*1\r\n$4\r\nPING\r", b"*2\r\n$4\r\nECHO\r\n", b"*1\r\n", b"*1",
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\nab",
        encode("SET k v") + b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000\r\n" + b"x" * 50_000, b"",
        encode("PING") * 3 + b"*1\r\n$4\r\nPI", b"MULTI\r\nSET k v\r\n", b"SUBSCRIBE a\r\n",
        b"*0\r\n*0\r\n*-1\r\n" + encode("PING"),
    ],
    "the end": [
        encode("QUIT") + encode("PING"), encode("QUIT x") + encode("PING"), b"MULTI\r\nSET k v\r\nQUIT\r\nPING\r\n",
        encode("PING") + encode("QUIT"), b"SUBSCRIBE a\r\nQUIT\r\nPING\r\n", b"quit\r\nPING\r\n",
    ],
    "messages and replies": [
        b"HELLO 3\r\nSUBSCRIBE a\r\nPUBLISH a x\r\nGET nope\r\nUNSUBSCRIBE\r\nPING\r\n",
        b"SUBSCRIBE a b a\r\nPING\r\nUNSUBSCRIBE a\r\nUNSUBSCRIBE b\r\nUNSUBSCRIBE\r\nPING\r\n",
        b"HELLO 3\r\nMULTI\r\nSUBSCRIBE a\r\nPUBLISH a x\r\nEXEC\r\nPING\r\n",
    ],
}  # fmt: skip

MASKS: dict[str, tuple[bytes, str]] = {
    "version": (rb"\$7\r\nversion\r\n\$\d\r\n[\d.]+\r\n", "ours is 7.4.0-shaped"),
    "login": (rb"the HELLO (<proto> )?AUTH", V72),
    "number": (rb"\$2\r\nid\r\n:\d+\r\n", "numbers of connections"),
}
"""Parts of replies that cannot be equal, blotted out of both."""

ALLOWED: dict[str, str] = {
    "COMMAND COUNT": "no commands of other types",
    "HELLO 3 AUTH a b c": f"{V72}: all options are read before the login is tried",
}
"""Lines that ours may answer differently. A test sees to it that each of them still does."""

NUL = "Redis' search for the end of the line stops at a NUL, so it waits for more and says nothing"
PUSH = f"{V72}: a message to oneself comes after the reply to the command that sent it"

ALLOWED_STREAMS: dict[bytes, str] = {
    b"MULTI\r\nCLIENT REPLY OFF\r\nPING\r\nEXEC\r\nPING\r\nCLIENT REPLY ON\r\nPING\r\n": (
        "Redis sends the head of EXEC's array and nothing of what is in it, and leaves the client out of step"
    ),
    b"PING \0x\r\n": NUL,
    b"PING a\0b\r\n": NUL,
    b"PING\r\n*\0\r\nPING\r\n": NUL,
    b"PING\r\n*2\r\n$4\r\nPING\r\n\0\r\nx\r\nPING\r\n": NUL,
    b"HELLO 3\r\nSUBSCRIBE a\r\nPUBLISH a x\r\nGET nope\r\nUNSUBSCRIBE\r\nPING\r\n": PUSH,
    b"HELLO 3\r\nMULTI\r\nSUBSCRIBE a\r\nPUBLISH a x\r\nEXEC\r\nPING\r\n": PUSH,
}
"""The same for streams."""
