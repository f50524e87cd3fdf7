"""Valid sessions, which the mutator damages: every command of the table in the shapes that clients send.

A line is a template; a word of one capital letter stands for something that is drawn anew each time (WORDS below).
test_corpus.py sees to it that every command of the table is here or in LEFT_OUT, each with its reason.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Final

from tests.fuzz.dumps import dump
from tests.server.live import MIB, pattern

Line = list[bytes]
Session = list[Line]

KEYS: Final = 12
SMALL_BYTES: Final = (0, 1, 2, 3, 10, 44, 45, 300)
LARGE_BYTES: Final = (4_000, 16_382, 16_383, 16_384, 16_385, 20_000, 65_536, 100_000)
HUGE_BYTES: Final = (300_000, MIB)
INTEGERS: Final = (
    *("0", "1", "-1", "2", "5", "10", "100", "-100", "1000000", "01", "+1", "1.5", "x", "", "-0", "4294967296"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "99999999999999999999"),
)
FLOATS: Final = ("0.1", "-5.0e3", "1e400", "nan", "inf", "3", "x", "0x10", " 1", "1e-400", "")
MANY: Final = (17, 100, 1000, 1025, 3000)
PATTERNS: Final = ("*", "f*", "f[0-5]", "f[^a]?", "nope*", "\\f0", "[", "[a-", "**********x", "?")
CHANNELS: Final = ("news", "news.a", "__keyspace@0__:f1", "__keyevent@0__:set", "", "__redis__:invalidate")
TIMES: Final = ("1", "5", "1000", "99999", "0", "-1", "x", "9223372036854775807", "1700000000500")

CLUSTER: Final = (
    *(
        "addslots",
        "addslotsrange",
        "bumpepoch",
        "count-failure-reports",
        "countkeysinslot",
        "delslots",
        "delslotsrange",
    ),
    *("failover", "flushslots", "forget", "getkeysinslot", "help", "info", "keyslot", "links", "meet", "myid"),
    *("myshardid", "nodes", "replicas", "replicate", "reset", "saveconfig", "set-config-epoch", "setslot", "shards"),
    *("slaves", "slots", "nope"),
)

TEMPLATES: Final = """
    SET K V/SET K V NX/SET K V XX GET/SET K V EX T/set K V px T/SET K V KEEPTTL/SET K V EXAT T/SET K V FOO/SET K
    SETNX K V/SETEX K T V/PSETEX K T V/GETSET K V/GETDEL K/GETEX K/GETEX K EX T/GETEX K PERSIST/GETEX K PXAT T
    GET K/get K/Get K/GET K K/MGET K K K/MGET K/MSET K V K V/MSET K V K/MSETNX K V K S/APPEND K S/STRLEN K
    SETRANGE K N S/SETRANGE K 20000 S/GETRANGE K N N/SUBSTR K N N/INCR K/DECR K/INCRBY K N/DECRBY K N/INCRBYFLOAT K F
    LCS K K/LCS K K LEN/LCS K K IDX MINMATCHLEN N WITHMATCHLEN
    DEL K/DEL K K K/UNLINK K/EXISTS K/EXISTS K K K/TOUCH K K/TYPE K/RENAME K K/RENAMENX K K/COPY K K/COPY K K DB D
    COPY K K DB D REPLACE/MOVE K D/RANDOMKEY/KEYS P/DBSIZE/SCAN N/SCAN 0 MATCH P COUNT N TYPE string/SCAN 0 COUNT 1000
    EXPIRE K T/EXPIRE K T NX/EXPIRE K T GT/PEXPIRE K T LT/PEXPIRE K T/EXPIREAT K T/PEXPIREAT K T XX/TTL K/PTTL K
    EXPIRETIME K/PEXPIRETIME K/PERSIST K/DUMP K/RESTORE K T R/RESTORE K 0 R REPLACE/
    RESTORE K T R REPLACE ABSTTL IDLETIME N FREQ N/SELECT D
    OBJECT ENCODING K/OBJECT FREQ K/OBJECT IDLETIME K/OBJECT REFCOUNT K/OBJECT HELP/OBJECT FOO K
    MULTI/EXEC/DISCARD/WATCH K K/UNWATCH
    SUBSCRIBE C C/PSUBSCRIBE P/UNSUBSCRIBE/UNSUBSCRIBE C/PUNSUBSCRIBE/PUNSUBSCRIBE P/PUBLISH C V/SSUBSCRIBE C
    SUNSUBSCRIBE/SUNSUBSCRIBE C/SPUBLISH C S/PUBSUB CHANNELS P/PUBSUB NUMSUB C/PUBSUB NUMPAT/PUBSUB SHARDCHANNELS
    PUBSUB SHARDNUMSUB C/PUBSUB HELP
    PING/PING S/ECHO V/HELLO/HELLO 2/HELLO 3/HELLO 3 SETNAME me/HELLO 3 AUTH default S/HELLO N/AUTH S/AUTH default S
    RESET/QUIT
    CLIENT ID/CLIENT INFO/CLIENT LIST/CLIENT LIST TYPE normal/CLIENT LIST ID 1 2/CLIENT GETNAME/CLIENT SETNAME me
    CLIENT SETINFO lib-name me/CLIENT SETINFO lib-ver S/CLIENT NO-EVICT ON/CLIENT NO-TOUCH ON/CLIENT NO-TOUCH OFF
    CLIENT REPLY ON/CLIENT REPLY SKIP/CLIENT REPLY OFF/CLIENT HELP/CLIENT UNPAUSE/CLIENT UNBLOCK N
    CLIENT UNBLOCK N ERROR
    CLIENT KILL ID 888888888/CLIENT KILL ADDR S/CLIENT KILL S/CLIENT KILL TYPE S/CLIENT GETREDIR/CLIENT TRACKINGINFO
    CLIENT TRACKING ON/CLIENT TRACKING ON BCAST PREFIX f PREFIX P/CLIENT TRACKING ON OPTIN/CLIENT TRACKING ON OPTOUT
    CLIENT TRACKING ON NOLOOP/CLIENT TRACKING ON REDIRECT N/CLIENT TRACKING OFF/CLIENT CACHING YES/CLIENT CACHING NO
    CONFIG GET P/CONFIG GET maxmemory* tim*/CONFIG SET hz N/CONFIG SET slowlog-log-slower-than N hz N/CONFIG RESETSTAT
    CONFIG SET notify-keyspace-events KEA/CONFIG SET notify-keyspace-events S/CONFIG REWRITE/CONFIG HELP
    CONFIG SET latency-monitor-threshold N/CONFIG SET slowlog-max-len N/CONFIG SET acllog-max-len 10
    INFO/INFO all/INFO everything/INFO S/INFO memory keyspace/COMMAND/COMMAND COUNT/COMMAND DOCS get/COMMAND INFO get S
    COMMAND LIST/COMMAND LIST FILTERBY PATTERN P/COMMAND LIST FILTERBY ACLCAT read/COMMAND GETKEYS MSET K V K V
    COMMAND GETKEYSANDFLAGS GET K/COMMAND HELP
    MEMORY USAGE K/MEMORY USAGE K SAMPLES N/MEMORY STATS/MEMORY DOCTOR/MEMORY PURGE/MEMORY HELP/MEMORY MALLOC-STATS
    SLOWLOG GET/SLOWLOG GET N/SLOWLOG LEN/SLOWLOG RESET/SLOWLOG HELP/LATENCY LATEST/LATENCY HISTORY S/LATENCY RESET
    LATENCY DOCTOR/LATENCY HISTOGRAM/LATENCY HISTOGRAM get S/LATENCY GRAPH S/LATENCY HELP/MONITOR
    ACL WHOAMI/ACL CAT/ACL CAT read/ACL LIST/ACL USERS/ACL GETUSER default/ACL GETUSER S/ACL LOG/ACL LOG N/ACL LOG RESET
    ACL SETUSER fuzzed on >S ~P &C +@all -S/ACL SETUSER fuzzed (+get ~K) (%R~P +@read)/ACL DELUSER fuzzed/ACL GENPASS
    ACL GENPASS N/ACL DRYRUN default GET K/ACL SAVE/ACL LOAD/ACL HELP
    WAIT 0 5/WAIT 1 5/WAITAOF 0 0 5/WAITAOF 1 0 5/TIME/LASTSAVE/ROLE/LOLWUT/LOLWUT VERSION N/MODULE LIST
    MODULE HELP/MODULE LOAD S/MODULE LOADEX S/MODULE UNLOAD S/RESTORE-ASKING K 0 S
    SAVE/BGSAVE/BGSAVE SCHEDULE/BGREWRITEAOF/REPLICAOF NO ONE/SLAVEOF NO ONE/READONLY/READWRITE/ASKING
    CLUSTER X/CLUSTER X N/CLUSTER X N N
    DEBUG SLEEP 0/DEBUG OBJECT K/DEBUG JMAP/DEBUG PROTOCOL map/DEBUG SET-ACTIVE-EXPIRE 1/DEBUG HELP
    PREFETCH K K/PREFETCH K JOB/KV.PREFETCH K K/KV.PREFETCH K K PRIORITY N JOB/KV.PREFETCH K JOB DEADLINE T/
    KV.PREFETCH JOB PRIORITY N DEADLINE/KV.JOB N/KV.JOB N WAIT 1/KV.JOB N CANCEL/KV.JOB N WAIT/KV.JOB S WAIT S
    KV.RESERVE K N/KV.RESERVE K 20000/KV.WRITE I 0 V/KV.WRITE I N V/KV.COMMIT I/KV.COMMIT I NX PX T/KV.ABORT I
    KV.LANE/KV.ATTACH/KV.LEASE 0 K K/KV.LEASE 1 K/KV.LEASE N K/KV.RELEASE N/KV.RELEASE 512 N/KV.LEND/KV.REVOKE N/
    KV.PUT K N N/KV.PUT K 0 100 NX PX T/KV.FILL I N N N/KV.SPLICE N N/
    KV.MATCH K K K/KV.MATCH K K WAIT 1/KV.MATCH K WAIT S/KV.EXPECT K K/KV.EXPECT K PX T/
    KV.META K/KV.SCAN N/KV.SCAN 0 MATCH P COUNT N/KV.TIERS/LPUSH K S/EVAL S 0
    HSET K S S/NOPE/SENTINEL MASTERS
"""

LEFT_OUT: Final = {
    "shutdown": "the server would do as it is told",
    "flushall": "takes the canaries along; test_socket_fuzz.py has a run of its own for it",
    "flushdb": "as flushall",
    "swapdb": "as flushall",
    "client|pause": "with any digit added it stops all clients for minutes; tests/faults has it",
    "failover": "needs replicas, which there are none of",
}
"""Commands that no session here says, and why."""

SWEEPING: Final = ("FLUSHALL", "FLUSHALL ASYNC", "FLUSHDB", "FLUSHDB SYNC", "SWAPDB D D", "SWAPDB 0 9", "FLUSHDB FOO")
"""Lines that may take every key, for runs that expect it."""

SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "transaction": ("WATCH K", "MULTI", "*", "SET K V", "GET K", "*", "MGET K K", "EXEC", "GET K"),
    "broken transaction": ("MULTI", "SET K V", "NOPE", "SET K", "MSET K V K V", "EXEC", "*"),
    "discarded transaction": ("MULTI", "SET K V", "MSET K V K V", "*", "DISCARD", "*"),
    "subscriber": ("SUBSCRIBE C C", "PSUBSCRIBE P", "PING", "PUBLISH C S", "GET K", "UNSUBSCRIBE", "*", "PUNSUBSCRIBE"),
    "subscriber 3": ("HELLO 3", "SUBSCRIBE C", "SSUBSCRIBE C", "PUBLISH C V", "SPUBLISH C S", "*", "RESET", "*"),
    "tracking": ("HELLO 3", "CLIENT TRACKING ON", "GET K", "MGET K K", "SET K V", "DEL K", "*", "CLIENT TRACKING OFF"),
    "broadcast": ("HELLO 3", "CLIENT TRACKING ON BCAST PREFIX f", "SET K V", "EXPIRE K T", "*", "MSET K S K S"),
    "silent": ("CLIENT REPLY OFF", "SET K V", "GET K", "*", "CLIENT REPLY ON", "CLIENT REPLY SKIP", "GET K", "PING"),
    "payloads": ("SET K V", "GET K", "SET K V", "MGET K K K", "MSET K V K V", "GETRANGE K 5 20000", "SET K V", "GET K"),
    "large replies": ("SET K H", "SET f1 H", "GET f1", "MGET f1 f1 K f1 K", "GET K", "GETRANGE f1 1 -1", "*", "GET f1"),
    "restored": ("RESTORE K 0 R REPLACE", "GET K", "DUMP K", "RESTORE K 0 R REPLACE", "APPEND K S", "STRLEN K", "*"),
    "counters": ("SET K 5", "INCR K", "DECRBY K N", "APPEND K S", "SETRANGE K 3 S", "INCRBYFLOAT K F", "GET K"),
    "parts": (
        "KV.RESERVE K 100000",
        "KV.WRITE I 0 V",
        "KV.WRITE I 5 V",
        "*",
        "KV.COMMIT I",
        "KV.WRITE I 0 V",
        "KV.ABORT I",
    ),
    "lane": ("KV.ATTACH", "KV.LEASE 0 K K", "SET K V", "DEL K", "KV.LEASE 1 K K", "KV.RELEASE 512 N", "KV.LEND", "*"),
    "monitor": ("MONITOR", "SET K V", "*", "RESET", "GET K"),
    "entering": ("AUTH S", "HELLO 3 AUTH default S SETNAME me", "CLIENT SETINFO lib-name me", "SELECT D", "*"),
    "waiting": ("SET K V", "WAIT 1 3", "GET K", "WAITAOF 0 1 3", "*"),
}
"""Sessions whose lines belong together; "*" is any line."""


def lines() -> list[str]:
    """Every template once."""
    return [line for row in TEMPLATES.split("\n") for line in row.strip().split("/") if line]


LINES: Final = lines()


@cache
def payload(length: int, seed: int) -> bytes:
    """A value of that length; few different ones, since making them would cost more than sending them."""
    return pattern(length, seed)


def small(rng: random.Random) -> bytes:
    """A short word, sometimes one that means something to the protocol."""
    pick = rng.randrange(8)
    if pick == 0:
        return rng.choice([b"\r\n", b"\0", b"\xff\xfe", b"*1\r\n$4\r\nPING\r\n", b"get", b"+OK\r\n", b"$-1\r\n"])
    if pick == 1:
        return str(rng.randrange(-5, 200)).encode()
    return payload(rng.choice(SMALL_BYTES), rng.randrange(3))


def value(rng: random.Random) -> bytes:
    """A value of any size from nothing to 1 MiB, the short ones being likelier."""
    pick = rng.randrange(60)
    if pick < 40:
        return small(rng)
    return payload(rng.choice(HUGE_BYTES if pick == 59 else LARGE_BYTES), rng.randrange(3))


def _one_of(words: tuple[str, ...]) -> Callable[[random.Random], bytes]:
    return lambda rng: rng.choice(words).encode()


WORDS: Final[dict[str, Callable[[random.Random], bytes]]] = {
    "K": lambda rng: b"f%d" % rng.randrange(KEYS),
    "V": value,
    "S": small,
    "N": _one_of(INTEGERS),
    "I": lambda rng: b"%d" % rng.randrange(1, 40),
    "F": _one_of(FLOATS),
    "T": _one_of(TIMES),
    "D": lambda rng: b"%d" % rng.choice([0, 0, 1, 9, 15]),
    "P": _one_of(PATTERNS),
    "C": _one_of(CHANNELS),
    "H": lambda rng: payload(rng.choice(HUGE_BYTES), rng.randrange(3)),
    "R": dump,
    "X": _one_of(CLUSTER),
}


def fill(template: str, rng: random.Random) -> Line:
    """One command made from its template."""
    line = []
    for word in template.split(" "):
        draw = WORDS.get(word)
        if draw is not None:
            line.append(draw(rng))
        elif word[0] in "~&%>-" and word[-1] in WORDS:  # the letters within ACL rules
            line.append(word[:-1].encode() + WORDS[word[-1]](rng))
        else:
            line.append(word.encode())
    return line


def many_keys(rng: random.Random) -> Line:
    """A lookup of many keys in one command, alike in length or not."""
    names = (b"EXISTS", b"MGET", b"DEL", b"KV.MATCH", b"TOUCH", b"exists")
    keys = [b"%0*d" % (rng.choice([3, 3, 3, 20]), n) for n in range(rng.choice(MANY))]
    if rng.random() < 0.3:
        keys[rng.randrange(len(keys))] = small(rng)
    return [rng.choice(names), *keys]


def session(rng: random.Random, extra: tuple[str, ...] = ()) -> Session:
    """What one client says, all of it valid; `extra` templates come among the others."""
    if rng.random() < 0.4:
        shape = SHAPES[rng.choice(list(SHAPES))]
        templates = [rng.choice(LINES) if line == "*" else line for line in shape]
    else:
        templates = rng.choices(LINES, k=rng.choice([1, 1, 2, 3, 4, 6, 10, 20]))
    if rng.random() < 0.3:
        templates.insert(0, "HELLO 3")
    if extra:
        templates.insert(rng.randrange(len(templates) + 1), rng.choice(extra))
    found = [fill(template, rng) for template in templates]
    if rng.random() < 0.04:
        found.insert(rng.randrange(len(found) + 1), many_keys(rng))
    return found
