"""Sessions of several clients that are held with both servers: pub/sub, keyspace events, client-side caching.

A step is a client's name and what it says, `a GET k`; lines with ` ; ` between them are sent in one piece, and a pair
has the words of a line one by one. After each step every client reads all that it has been sent. `{b}` in a line is the
number of client b; after QUIT a client is gone. Each script is held in RESP2 and in RESP3.
"""

from tests.compat.wire import Word

Step = str | tuple[str, list[Word]]

NO_EVENTS: list[Word] = ["CONFIG", "SET", "notify-keyspace-events", b""]

V72_ORDER = "Redis 7.2 sends what a client causes itself after the reply; Debian's 7.0.15 before it"

PUBSUB_SCRIPTS: dict[str, list[Step]] = {
    "subscribe": [
        "a SUBSCRIBE x y x", "a PSUBSCRIBE x* x*", "a SSUBSCRIBE x s", "b PUBLISH x hi", "b PUBLISH xx hi",
        "b SPUBLISH x hi",
        ("b", ["PUBLISH", "y", bytes(range(256))]),
        ("b", ["PUBLISH", "y", b""]), "b PUBLISH nobody hi", "b SPUBLISH y hi", "b PUBLISH x", "b SPUBLISH x",
        "a PING", "a PING hi", "a PING a b", "a UNSUBSCRIBE y nope", "a UNSUBSCRIBE", "a UNSUBSCRIBE",
        "b PUBLISH x hi", "a PUNSUBSCRIBE x*", "a PUNSUBSCRIBE", "a SUNSUBSCRIBE x", "a SUNSUBSCRIBE",
        "a SUNSUBSCRIBE", "a PING", "a GET k", "b PUBLISH x hi", "a SUBSCRIBE", "a PSUBSCRIBE", "a SSUBSCRIBE",
    ],
    "subscriber mode": [
        "a SUBSCRIBE x", "a GET k", "a SET k v", "a CLIENT ID x", "a ECHO hi", "a MULTI x", "a FOO", "a GET",
        "a UNSUBSCRIBE x", "a GET k", "a PSUBSCRIBE x", "a GET k", "a PUNSUBSCRIBE x", "a GET k", "a SSUBSCRIBE x",
        "a GET k", "a RESET", "a GET k", "b PUBLISH x hi", "b SPUBLISH x hi", "b PUBSUB CHANNELS", "b PUBSUB NUMPAT",
        "a SUBSCRIBE x", "a QUIT", "b PUBLISH x hi",
    ],
    "pubsub": [
        "b PUBSUB", "b PUBSUB FOO", "b PUBSUB CHANNELS", "b PUBSUB CHANNELS a b", "b PUBSUB NUMSUB", "b PUBSUB NUMPAT",
        "b PUBSUB NUMPAT x", "b PUBSUB SHARDCHANNELS x y", "a SUBSCRIBE x yy", "c SUBSCRIBE x", "a PSUBSCRIBE p*",
        "c PSUBSCRIBE p*", "c PSUBSCRIBE q", "c SSUBSCRIBE s", "b PUBSUB CHANNELS y?", "b pubsub channels Y?",
        "b PUBSUB NUMSUB x yy s", "b PUBSUB NUMPAT", "b PUBSUB SHARDCHANNELS", "b PUBSUB SHARDCHANNELS t*",
        "b PUBSUB SHARDNUMSUB s x", "b PUBLISH pp hi", "c QUIT", "b PUBSUB NUMSUB x yy s", "b PUBSUB NUMPAT",
        "b PUBSUB SHARDCHANNELS",
    ],
    "own messages": [
        "a MULTI", "a SUBSCRIBE x y", "a PING", "a PUBLISH x in-multi", "a SSUBSCRIBE s", "a PSUBSCRIBE z",
        "a PUNSUBSCRIBE z", "a UNSUBSCRIBE x", "a EXEC", "b PUBLISH y hi", "a PUBLISH y own",
        "a PUBLISH y one ; GET k ; PUBLISH y two ; PING", "a UNSUBSCRIBE y",
    ],
    "patterns": [
        "a PSUBSCRIBE h?llo", "b PUBLISH hello 1", "b PUBLISH hllo 1", "a PUNSUBSCRIBE h?llo", "a PSUBSCRIBE h[^e]llo",
        "b PUBLISH hello 1", "b PUBLISH hallo 1", "a PUNSUBSCRIBE h[^e]llo", "a PSUBSCRIBE h\\*llo",
        "b PUBLISH h*llo 1", "b PUBLISH hxllo 1", "a PUNSUBSCRIBE h\\*llo", ("a", ["PSUBSCRIBE", b""]),
        ("b", ["PUBLISH", b"", "1"]), "b PUBLISH x 1",
    ],
    "commands": [
        "a COMMAND INFO subscribe psubscribe ssubscribe unsubscribe punsubscribe sunsubscribe publish spublish",
        "a COMMAND INFO pubsub|channels pubsub|numpat pubsub|numsub pubsub|shardchannels pubsub|shardnumsub",
        "a COMMAND INFO client|tracking client|caching client|getredir client|trackinginfo pubsub|help",
        "a COMMAND GETKEYS SSUBSCRIBE a b", "a COMMAND GETKEYS SPUBLISH a b", "a COMMAND GETKEYS PUBLISH a b",
    ],
}  # fmt: skip

EVENT_SCRIPTS: dict[str, list[Step]] = {
    "events": [
        "a CONFIG SET notify-keyspace-events KEA", "a PSUBSCRIBE __key*", "b SET k v", "b SET k v EX 100",
        "b DEL k nope", "b MSET k 1 l 2", "b INCR k", "b EXPIRE k 100", "b PERSIST k", "b RENAME k m", "b EXPIRE m -1",
        "b GET nope", "b SELECT 9", "b SET k v", "b COPY k k2", "b MOVE k 3", "b GETDEL k2", "b FLUSHALL",
    ],
    "events of every command": [
        "a CONFIG SET notify-keyspace-events KEAmn", "a PSUBSCRIBE __key*",
        *(f"b {line}" for line in (
            "GET k", "SETNX k 1", "SETNX k 2", "SET k 2 NX", "SET k 2 XX GET", "SETEX k 100 3", "PSETEX k 100000 4",
            "SET k 4 KEEPTTL", "GETSET k 5", "GETEX k EX 100", "GETEX k PERSIST", "GETEX k", "GETEX nope", "APPEND k 1",
            "APPEND n 1", "SETRANGE k 3 2", "SETRANGE m 3 x", "SETRANGE m 0 ", "INCR k2", "INCRBY k2 5", "DECR k2",
            "DECRBY k2 2", "INCRBYFLOAT k2 1.5", "INCR m", "MSET a 1 b 2 a 3", "MSETNX a 1 c 2", "MSETNX c 1 d 2",
            "MGET a nope nope2", "STRLEN nope", "EXISTS nope", "EXISTS a nope a nope", "TTL nope", "TYPE nope",
            "GETRANGE nope 0 1", "TOUCH nope a", "EXPIRE a 100", "PEXPIRE a 100000", "EXPIREAT a 99999999999",
            "PEXPIREAT a 99999999999999", "EXPIRE a 1 GT", "PERSIST a", "PERSIST a", "EXPIRE a -1", "SET a 1",
            "PEXPIREAT a 1", "SET a 1 PXAT 1 ; GET a", "SET a 1 PXAT 1 ; SET a 2 NX", "SET b 2 EXAT 1 ; DEL b",
            "RENAME c d", "RENAMENX d c", "RENAME c c", "SET d 1", "RENAMENX c d", "RENAME c d", "COPY d e",
            "COPY d e REPLACE", "COPY d e DB 3 REPLACE", "MOVE e 4", "MOVE nope 4", "GETDEL d", "GETDEL d",
            "UNLINK k n m", "DEL nope", "LCS x y", "OBJECT ENCODING nope", "DUMP nope", "SET r 1", "SWAPDB 0 5",
            "GET r", "FLUSHDB",
        )),
    ],
    "event letters": [
        "a CONFIG GET notify-keyspace-events", "a CONFIG SET notify-keyspace-events Exg$",
        "a CONFIG GET notify-keyspace-events", "a PSUBSCRIBE __key*", "b SET k v", "b DEL k",
        "b CONFIG SET notify-keyspace-events Kmn", "b SET k v", "b SET k v", "b GET nope",
        "b CONFIG SET notify-keyspace-events KE", "b SET k v", "b CONFIG SET notify-keyspace-events A", "b SET k v",
        "b CONFIG SET notify-keyspace-events EKEK$$", "b SET k v", "b CONFIG SET notify-keyspace-events KEQ",
        ("b", NO_EVENTS), "b SET k v", "b CONFIG GET notify-keyspace-events",
    ],
}  # fmt: skip

TRACKING_SCRIPTS: dict[str, list[Step]] = {
    "tracking lines": [
        "a CLIENT GETREDIR", "a CLIENT TRACKINGINFO", "a CLIENT CACHING YES", "a CLIENT CACHING foo",
        "a CLIENT TRACKING", "a CLIENT TRACKING foo", "a CLIENT TRACKING on foo",
        "a CLIENT TRACKING foo REDIRECT 99999", "a CLIENT TRACKING on PREFIX a", "a CLIENT TRACKING on PREFIX",
        "a CLIENT TRACKING off foo", "a CLIENT TRACKING off PREFIX a", "a CLIENT TRACKING on REDIRECT",
        "a CLIENT TRACKING on REDIRECT abc", "a CLIENT TRACKING on REDIRECT 0", "a CLIENT TRACKING on REDIRECT -1",
        "a CLIENT TRACKING on REDIRECT 99999", "a CLIENT TRACKING on REDIRECT {b} REDIRECT {b}",
        "a CLIENT TRACKING off REDIRECT 99999", "a CLIENT TRACKING on OPTIN OPTOUT",
        "a CLIENT TRACKING on BCAST OPTIN", "a CLIENT TRACKING on BCAST OPTIN OPTOUT",
        "a CLIENT TRACKING on OPTIN OPTOUT PREFIX a", "a CLIENT TRACKING on BCAST PREFIX a PREFIX ab",
        ("a", ["CLIENT", "TRACKING", "on", "BCAST", "PREFIX", b"a\x00b", "PREFIX", b"a\x00bc"]),
        ("a", ["CLIENT", "TRACKING", "on", "BCAST", "PREFIX", b"a\r\nb", "PREFIX", b"a\r\nbc"]),
        "a CLIENT TRACKINGINFO", "a CLIENT TRACKING on BCAST PREFIX b PREFIX a",
        "a CLIENT TRACKING on BCAST PREFIX ab", "a CLIENT TRACKING on BCAST PREFIX c",
        "a CLIENT TRACKING on BCAST PREFIX c", "a CLIENT TRACKING on BCAST", "a CLIENT TRACKINGINFO",
        "a CLIENT TRACKING on", "a CLIENT CACHING YES", "a CLIENT CACHING NO",
        "a CLIENT TRACKING on BCAST NOLOOP PREFIX zz", "a CLIENT TRACKING on OPTIN", "a CLIENT TRACKING off",
        "a CLIENT TRACKINGINFO", "a CLIENT TRACKING on OPTIN", "a CLIENT TRACKING on OPTIN",
        "a CLIENT TRACKING on OPTOUT", "a CLIENT TRACKING on BCAST", "a CLIENT CACHING NO", "a CLIENT CACHING foo",
        "a CLIENT CACHING yes", "a CLIENT TRACKINGINFO", "a CLIENT TRACKINGINFO", "a PING", "a CLIENT TRACKINGINFO",
        "a CLIENT GETREDIR", "a CLIENT TRACKING on", "a CLIENT TRACKINGINFO", "a CLIENT TRACKING on OPTOUT NOLOOP",
        "a CLIENT CACHING no", "a CLIENT TRACKINGINFO", "a CLIENT TRACKING on BCAST PREFIX a PREFIX a",
        "a CLIENT TRACKING off", "a CLIENT CACHING", "a CLIENT GETREDIR x", "a CLIENT TRACKINGINFO x",
        "a CLIENT TRACKING on REDIRECT {b}", "a CLIENT GETREDIR", "a CLIENT TRACKINGINFO", "a RESET",
        "a CLIENT TRACKINGINFO", "a CLIENT GETREDIR", "b PING",
    ],
    "default": [
        "a CLIENT TRACKING on", "a SET k 1", "a GET k", "a SET k 2", "a SET k 3", "a MGET k l m k", "b SET l 1",
        "b SET l 2", "b MSET k 1 m 1", "a GET k ; SET k 1 ; GET k ; SET k 2 ; PING", "a GET k", "b EXPIRE k 100",
        "a STRLEN k", "b PERSIST k", "b PERSIST k", "a EXISTS k", "b PEXPIRE k -1", "a GET nope", "b DEL nope",
        "b SET nope 1", "a GET k", "b APPEND k x", "a GETRANGE k 0 -1", "b INCR n", "b RENAME k kk", "a GET kk",
        "b GETDEL kk", "a SELECT 3", "a GET z", "b SET z 1", "a SELECT 0", "a GET z", "a CLIENT TRACKING off",
        "b SET z 1", "a GET z", "b SET z 1",
    ],
    "flush": [
        "a CLIENT TRACKING on NOLOOP", "c CLIENT TRACKING on BCAST PREFIX x", "a GET k", "b FLUSHALL", "b SET k 1",
        "a FLUSHALL", "a FLUSHDB", "c FLUSHDB ASYNC",
    ],
    "noloop": [
        "a CLIENT TRACKING on NOLOOP", "a GET k", "a SET k 1", "b SET k 1", "a GET k", "b SET k 1", "a SET k 1",
        "c CLIENT TRACKING on", "c GET k", "a GET k", "a SET k 1",
    ],
    "transactions": [
        "a CLIENT TRACKING on", "a MULTI", "a GET k", "a SET k 1", "a GET k", "a EXEC", "b SET k 2", "a GET k",
        "b MULTI", "b SET k 3", "b SET k 4", "b EXEC", "a MULTI", "a GET k", "a DISCARD", "b SET k 5",
    ],
    "optin": [
        "a CLIENT TRACKING on OPTIN", "a GET k", "b SET k 1", "a CLIENT CACHING YES", "a GET k", "a GET l",
        "b MSET k 1 l 1", "a CLIENT CACHING YES", "a PING", "a GET k", "b SET k 1", "a CLIENT CACHING YES",
        "a CLIENT GETREDIR", "a GET k", "b SET k 1", "a CLIENT CACHING YES", "a MULTI", "a GET k", "a GET l", "a EXEC",
        "a GET m", "b MSET k 1 l 1 m 1", "a MULTI", "a CLIENT CACHING YES", "a GET k", "a GET l", "a EXEC",
        "b MSET k 1 l 1",
    ],
    "caching stays": [
        "a CLIENT TRACKING on OPTIN", "a CLIENT CACHING YES", "a CLIENT TRACKING on OPTIN NOLOOP", "a GET k",
        "b SET k 1", "a CLIENT CACHING YES", "a CLIENT TRACKING off", "a CLIENT TRACKING on OPTIN",
        "a CLIENT TRACKINGINFO", "a GET k", "b SET k 1", "a CLIENT TRACKING off", "a CLIENT TRACKING on", "a GET k",
        "a CLIENT TRACKING off", "a CLIENT TRACKING on", "b SET k 1", "a GET k", "a CLIENT TRACKING off",
        "a CLIENT TRACKING on BCAST PREFIX x", "b SET k 1",
    ],
    "expired": [
        "a CLIENT TRACKING on", "a SET k 1 PXAT 1 ; GET k ; GET k", "b SET k 1", "a GET k", "b SET k 1 PXAT 1 ; GET k",
        "c CLIENT TRACKING on BCAST", "b SET k 1 PXAT 1 ; GET k ; PING",
    ],
    "redirect to oneself": [
        "a CLIENT ID x", "b PING", "b CLIENT TRACKING on REDIRECT {b}", "b GET k", "a SET k 1", "b GET k",
        "b SUBSCRIBE __redis__:invalidate", "a SET k 1",
    ],
    "optout": [
        "a CLIENT TRACKING on OPTOUT", "a GET k", "b SET k 1", "a CLIENT CACHING NO", "a GET k", "a GET l",
        "b MSET k 1 l 1", "a GET k", "a CLIENT CACHING NO", "b SET k 1",
    ],
    "broadcast": [
        "a CLIENT TRACKING on BCAST PREFIX x PREFIX y", "b MSET x2 1 y1 1 x1 1 z 1", "b SET z 1", "a SET x1 1",
        "b SET x1 1 ; SET x1 2 ; SET y2 2 ; DEL x1 ; DEL x1", "b DEL nope", "b DEL y1",
        "a SET x1 1 ; GET x1 ; SET x2 2 ; PING", "a MULTI", "a SET x1 1", "a SET x2 1", "a EXEC", "b EXPIRE x1 100",
        "c CLIENT TRACKING on BCAST NOLOOP", "c SET x1 1", "b SET x1 1", "c SET q 1", "b SET q 1 ; SET x2 1",
        "c CLIENT TRACKING off", "b SET q 1",
    ],
    "redirect": [
        "a CLIENT TRACKING on REDIRECT {b}", "a GET k", "c SET k 1", "b SUBSCRIBE __redis__:invalidate", "a GET k",
        "c SET k 1", "a GET k", "a SET k 1", "a CLIENT GETREDIR", "a CLIENT TRACKINGINFO", "c FLUSHALL",
        "b UNSUBSCRIBE", "b SUBSCRIBE other", "a GET k", "c SET k 1", "a CLIENT TRACKING on REDIRECT {b} NOLOOP",
        "a GET k", "a SET k 1", "a GET k", "b QUIT", "a CLIENT TRACKINGINFO", "c SET k 1", "a CLIENT TRACKINGINFO",
        "a CLIENT GETREDIR", "a CLIENT TRACKING on", "a CLIENT TRACKINGINFO", "a GET k", "c SET k 1",
    ],
    "redirected broadcast": [
        "a CLIENT TRACKING on BCAST REDIRECT {b} PREFIX x PREFIX y", "b SUBSCRIBE __redis__:invalidate",
        "a MSET x1 1 y1 1 z1 1", "c MSET x1 1 x2 1", "b QUIT", "c SET x1 1",
    ],
}  # fmt: skip

REORDERED: dict[tuple[str, str], str] = {
    ("own messages", "a EXEC"): V72_ORDER,
    ("own messages", "a PUBLISH y own"): V72_ORDER,
    ("own messages", "a PUBLISH y one ; GET k ; PUBLISH y two ; PING"): V72_ORDER,
}
"""Steps, by their script, whose replies may come in another order: the same ones, with equal bytes."""

ALLOWED: dict[tuple[str, str], str] = {}
"""Steps that ours may answer differently."""
