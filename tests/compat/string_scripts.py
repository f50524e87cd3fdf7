"""Scripts for the commands on strings and keys, shaped as those of scripts.py: every option, every error, every edge.

What answers by the clock, and what 7.2 answers otherwise than 7.0, stands in no script.
"""

from tests.compat.wire import CommandLine

BIG = b"x" * 100_000
BINARY = bytes(range(256))
INT64_MAX = "9223372036854775807"
INT64_MIN = "-9223372036854775808"
FAR = "99999999999"
FLOATS = (
    "0", "1", "-1", "0.1", "3.0e3", "5.", ".5", ".", "-0", "-0.0", "+1", "1e", "1e+", "e5", "inf", "-inf", "INFINITY",
    "nan", "0x", "0x10", "0x1.8p3", "1_0", " 1", "1 ", "", "1e4931", "1e4933", "1e-4950", "1e-4960", "1e-20",
    "9223372036854775807", "18446744073709551616", "0.30000000000000004", "123456789.123456789", "1e99999999999",
    "0e99999999999", "--1", "1.2.3", "1\0",
)  # fmt: skip


def _set_and(line: CommandLine, value: bytes) -> list[CommandLine]:
    """`value` under k, and then `line`."""
    return [["SET", "k", value], line]


STRING_SCRIPTS: dict[str, list[CommandLine]] = {
    "set options": [
        "SET k v EX 10 EX 20000", "TTL k", "SET k v PX 10 PX 2000000", "SET k v EX 10 PX 10", "SET k v EXAT 10 EX 10",
        f"SET k v EXAT {FAR} KEEPTTL", f"SET k v KEEPTTL PXAT {FAR}000", "SET k v KEEPTTL KEEPTTL", "SET k v GET GET",
        "SET k v NX NX", "SET k v XX XX", "SET k v XX NX", "SET k v PERSIST", "SET k v EX 10 PERSIST", "SET k",
        "SET k v EX 9223372036854775", "SET k v EX 9223372036854776", f"SET k v PX {INT64_MAX}", "SET k v EXAT 0",
        "SET k v PXAT -1", "SET k v EX +1", "SET k v EX 01", "SET k v EX 1.0", ["SET", "k", "v", "EX", ""], "TTL k",
        f"SET k v EXAT {FAR}", "EXPIRETIME k", "SET k w", "TTL k", "SET k v GET EX 0", "GET k", "SET k v XX GET",
        "SET nope v XX GET", "SET k w NX GET", "GET k", "set k x keepttl get",
    ],
    "setex and getset": [
        "SETEX k 10 v", "GET k", "TTL k", "SETEX k 0 v", "SETEX k -1 v", "SETEX k x v", "SETEX k 10", "SETEX k 10 v w",
        f"SETEX k {INT64_MAX} v", "SETEX k 9223372036854775 v", "PSETEX k 100000 w", "TTL k", "GET k", "PSETEX k 0 v",
        f"PSETEX k {INT64_MAX} v", "PSETEX k 1.5 v", "PSETEX k", ["SETEX", "big", "100", BIG], "STRLEN big",
        ["SETEX", "big", "0", BIG], ["PSETEX", "big", "x", BIG], ["PSETEX", "big", "100000", BINARY * 90], "GET big",
        "GETSET k new", "TTL k", "GETSET nope a", "GET nope", "GETSET k", "GETSET k a b", ["GETSET", "big", BIG],
        ["GETSET", "big", b""], "GETSET big x", "GETDEL big", "GETDEL big", "GETDEL", "GETDEL a b", "EXISTS big",
        ["SET", "big", BIG], "GETDEL big", "EXISTS big",
    ],
    "getex": [
        "GETEX nope", "GETEX nope EX 0", "GETEX nope FOO", "SET k v", "GETEX k", "TTL k", "GETEX k EX 100", "TTL k",
        "GETEX k ex 100 EX 200", "TTL k", "GETEX k PERSIST", "TTL k", "GETEX k PERSIST PERSIST", "GETEX k PX 100000",
        "TTL k", f"GETEX k EXAT {FAR}", "EXPIRETIME k", f"GETEX k PXAT {FAR}123", "PEXPIRETIME k", "GETEX k EX 0",
        "GETEX k EX -1", "GETEX k EX x", "GETEX k EX", "GETEX k EX 10 PX 10", "GETEX k EX 10 PERSIST",
        "GETEX k PERSIST EX 10", "GETEX k NX", "GETEX k XX", "GETEX k GET", "GETEX k KEEPTTL", "GETEX k FOO", "GETEX",
        f"GETEX k PX {INT64_MAX}", "GETEX k EX 9223372036854776", "GETEX k", "GETEX k EXAT 1", "EXISTS k",
        "SET k v", "GETEX k PXAT 1", "EXISTS k", ["SET", "big", BIG], "GETEX big EX 100", "GETEX big EX 0",
        "GETEX big PXAT 1", "GETEX big",
    ],
    "msetnx": [
        "MSETNX a 1 b 2", "MSETNX b 3 c 4", "MGET a b c", "MSETNX c 1 c 2", "GET c", "MSETNX", "MSETNX a",
        "MSETNX a 1 b",
        ["MSETNX", "big", BIG, "small", "s"], ["MSETNX", "big", b"", "e", "s"], ["MSETNX", "x", BIG, "y"], "STRLEN big",
        ["MSET", "x", BIG, "y"], "EXISTS x y e", ["MSETNX", "", "", "f", BIG], "MGET  f", ["MSETNX", "d1", BIG, "d1",
        "z"],
        "GET d1", "SET t v EX 100", "MSET t w", "TTL t",
    ],
    "append": [
        "APPEND k abc", "APPEND k def", "GET k", ["APPEND", "k", b""], ["APPEND", "empty", b""], "EXISTS empty",
        "OBJECT ENCODING k", "SET n 12", "APPEND n 3", "GET n", "INCR n", "APPEND", "APPEND k", "APPEND k a b",
        "SET t v EX 100", "APPEND t w", "TTL t", ["APPEND", "big", BIG], ["APPEND", "big", BIG], "STRLEN big",
        "GETRANGE big 99990 100010", ["APPEND", "big", BINARY], "GETRANGE big -256 -1", ["SET", "e", b"y" * 16_380],
        ["APPEND", "e", "abcd"], "GET e", ["APPEND", "e", b"z" * 20], "STRLEN e", "GETRANGE e 16375 -1",
    ],
    "setrange": [
        "SETRANGE k 0 abc", "SETRANGE k 1 X", "GET k", "SETRANGE k 6 end", "GET k", "SETRANGE new 3 x", "GET new",
        ["SETRANGE", "k", "100", b""], ["SETRANGE", "nope", "100", b""], "EXISTS nope", "SETRANGE k -1 x",
        "SETRANGE k x x", "SETRANGE k 1.5 x", ["SETRANGE", "k", "-1", b""], "SETRANGE k 536870912 x",
        "SETRANGE nope 536870912 x", ["SETRANGE", "nope", "536870912", b""], f"SETRANGE k {INT64_MAX} x",
        f"SETRANGE k {INT64_MIN} x", "SETRANGE k 9223372036854775808 x", "SETRANGE k", "SETRANGE k 1",
        "SETRANGE k 1 a b", "SET t v EX 100", "SETRANGE t 0 w", "TTL t", "SETRANGE big 99999 x", "STRLEN big",
        "GETRANGE big 99990 -1", "SETRANGE big 5 abc", "GETRANGE big 0 20", ["SETRANGE", "big", "50", BIG],
        "STRLEN big", "GETRANGE big 40 60", "SET small abc", "SETRANGE small 16383 x", "STRLEN small",
        "SETRANGE small 20000 y", "GETRANGE small 16380 16390", "SET n 10", "SETRANGE n 1 5", "INCR n",
        "OBJECT ENCODING n",
    ],
    "substr": [
        "SUBSTR nope 0 -1", "SET k hello", "SUBSTR k 1 3", "SUBSTR k -3 -1", "SUBSTR k 3 1", "SUBSTR k a 1",
        "SUBSTR k 0",
        "SUBSTR k 0 1 2", f"SUBSTR k {INT64_MIN} {INT64_MAX}", f"GETRANGE k {INT64_MIN} -1",
        "GETRANGE k 0 9223372036854775808", ["SET", "e", b""], "GETRANGE e 0 -1", "GETRANGE e -1 -1", "GETRANGE e 0 0",
    ],
    "counters": [
        "INCR n", "INCR n", "DECR n", "GET n", "INCRBY n 10", "DECRBY n 20", "INCRBY n -5", "DECRBY n -5", "DECR new",
        "INCRBY n2 5", "DECRBY n3 5", "INCR", "INCR a b", "DECR", "INCRBY n", "INCRBY n x", "INCRBY n 1.5",
        "DECRBY n x",
        "INCRBY n 1 2", f"SET m {INT64_MAX}", "INCR m", "GET m", "INCRBY m -1", "INCRBY m 1", "INCRBY m 1",
        f"SET l {INT64_MIN}", "DECR l", "INCRBY l -1", "DECRBY l 1", f"DECRBY l {INT64_MIN}", f"DECRBY z {INT64_MIN}",
        f"INCRBY z {INT64_MIN}", f"INCRBY z {INT64_MIN}", "INCRBY z 9223372036854775808", "SET s abc", "INCR s",
        "INCRBY s x", "DECRBY s 1", ["SET", "s", " 1"], "INCR s", "SET s 01", "INCR s", "SET s +1", "INCR s",
        "SET s -0",
        "INCR s", "SET s 1.0", "INCR s", ["SET", "s", b""], "INCR s", ["SET", "s", b"1\0"], "INCR s",
        "SET s 9223372036854775808", "INCR s", ["SET", "s", BIG], "INCR s", "SET t 5 EX 100", "INCR t", "TTL t",
        "INCRBYFLOAT t 1", "TTL t",
    ],
    "incrbyfloat": [
        "INCRBYFLOAT f 10.5", "INCRBYFLOAT f 0.1", "GET f", "INCRBYFLOAT f -5", "SET f 5.0e3", "INCRBYFLOAT f 2.0e2",
        "SET f 3.0e3", "INCRBYFLOAT f 0", "INCRBYFLOAT f", "INCRBYFLOAT f a", "INCRBYFLOAT f 1 2",
        "INCRBYFLOAT new 1.5",
        *[line for text in FLOATS for line in (["INCRBYFLOAT", "x", text], ["SET", "y", text], "INCRBYFLOAT y 1.25",
                                               "DEL x")],
        ["SET", "f", BIG], "INCRBYFLOAT f 1", "SET f 1e4932", "INCRBYFLOAT f 1e4932", "SET f inf", "INCRBYFLOAT f -inf",
        ["SET", "f", b"1" + b"0" * 4900], "INCRBYFLOAT f 0.5", ["SET", "f", b"0." + b"3" * 5000], "INCRBYFLOAT f 1",
        ["SET", "f", b"1" * 5119], "INCRBYFLOAT f 1", ["SET", "f", b"0" * 5119], "INCRBYFLOAT f 1",
        ["SET", "f", b"0" * 5120], "INCRBYFLOAT f 1",
    ],
    "lcs": [
        "MSET a ohmytext b mynewtext", "LCS a b", "LCS a b LEN", "LCS a b IDX", "LCS a b IDX MINMATCHLEN 4",
        "LCS a b IDX MINMATCHLEN 4 WITHMATCHLEN", "LCS a b WITHMATCHLEN", "LCS a b IDX WITHMATCHLEN MINMATCHLEN 0",
        "LCS a b IDX MINMATCHLEN -1", "LCS a b MINMATCHLEN x", "LCS a b MINMATCHLEN", "LCS a b LEN IDX", "LCS a b FOO",
        "LCS a", "LCS", "lcs a b len len", "LCS a nope", "LCS nope nope2 LEN", "LCS nope a IDX", "LCS a a IDX",
        "LCS b a",
        "LCS b a IDX", "LCS a b LEN MINMATCHLEN 3", "MSET c abcabcabc d cbacbacba", "LCS c d IDX WITHMATCHLEN",
        "LCS c d",
        "LCS d c IDX WITHMATCHLEN", "LCS d c", ["SET", "long", b"abcdefgh" * 300], ["SET", "other", b"hgfacbed" * 250],
        "LCS long other", "LCS long other LEN", "LCS long other IDX MINMATCHLEN 3", "LCS other long IDX WITHMATCHLEN",
        ["SET", "big", BIG], "LCS big big", "LCS big a", ["SET", "bin", BINARY], ["SET", "rev", BINARY[::-1]],
        "LCS bin rev IDX", ["SET", "e", b""], "LCS e a", "LCS e e IDX",
    ],
    "rename": [
        "RENAME nope k", "RENAME nope nope", "RENAMENX nope k", "SET k v", "RENAME k k", "RENAMENX k k", "RENAME k l",
        "GET l", "EXISTS k", "SET m w EX 100", "RENAME l m", "GET m", "TTL m", "SET n x EX 100", "RENAME n o", "TTL o",
        "RENAMENX o m", "RENAMENX o p", "TTL p", "RENAME", "RENAME a", "RENAME a b c", "RENAMENX a", ["SET", "big",
        BIG],
        "RENAME big big2", "STRLEN big2", "RENAME big2 m", "STRLEN m", ["RENAME", "m", b""], ["STRLEN", b""], "DBSIZE",
        ["RENAMENX", b"", BINARY], ["GETRANGE", BINARY, "0", "3"], "KEYS *",
    ],
    "copy": [
        "COPY nope k", "SET k v", "COPY k k", "COPY k k DB 0", "COPY k l", "GET l", "COPY k l", "SET k w", "COPY k l",
        "COPY k l REPLACE", "GET l", "SET t v EX 100", "COPY t u", "TTL u", "COPY t k replace", "TTL k",
        "COPY k k DB 1",
        "COPY k k DB 1", "COPY k k DB 1 REPLACE", "SELECT 1", "GET k", "TTL k", "SELECT 0", "COPY k l DB",
        "COPY k l DB x",
        "COPY k l DB 16", "COPY k l DB -1", "COPY k l DB 99999999999", "COPY k l FOO", "COPY k", "COPY",
        "COPY k m DB 1 DB 2 REPLACE REPLACE", "SELECT 2", "GET m", "SELECT 0", ["SET", "big", BIG], "COPY big big2",
        "DEL big", "STRLEN big2", "COPY big2 big DB 0 REPLACE", "GET big",
    ],
    "move and swapdb": [
        "MOVE nope 1", "SET k v EX 100", "MOVE k 0", "MOVE k x", "MOVE k 16", "MOVE k -1", "MOVE k 99999999999",
        "MOVE k 99999999999999999999", "MOVE k", "MOVE", "MOVE k 1 2", "MOVE k 1", "EXISTS k", "SET k w", "MOVE k 1",
        "SELECT 1", "GET k", "TTL k", "SELECT 0", "GET k", "SWAPDB 0 1", "GET k", "TTL k", "DBSIZE", "SELECT 1",
        "GET k",
        "SWAPDB 0 1", "GET k", "TTL k", "SWAPDB 1 1", "SWAPDB x 1", "SWAPDB 1 x", "SWAPDB 0 16", "SWAPDB -1 0",
        "SWAPDB 99999999999 0", "SWAPDB 0 99999999999", "SWAPDB 0", "SWAPDB", ["SET", "big", BIG], "MOVE big 2",
        "SELECT 2", "GET big", "SWAPDB 2 9", "EXISTS big", "SELECT 9", "STRLEN big", "KEYS *", "EXPIRE big 100",
        "SWAPDB 9 3", "SELECT 3", "TTL big", "PERSIST big", "DEL big", "DBSIZE",
    ],
    "expiry at": [
        "SET k v", f"EXPIREAT k {FAR}", "EXPIRETIME k", "PEXPIRETIME k", f"PEXPIREAT k {FAR}123", "EXPIRETIME k",
        "PEXPIRETIME k", f"PEXPIREAT k {FAR}500", "EXPIRETIME k", f"EXPIREAT k {FAR} NX", f"EXPIREAT k {FAR} GT",
        f"EXPIREAT k {FAR} LT", f"EXPIREAT k {FAR} LT", f"EXPIREAT k {FAR}0 XX GT", "EXPIRETIME k",
        "EXPIREAT k 10 NX XX",
        "PEXPIREAT k 10 GT LT", "EXPIREAT k 10 FOO", "EXPIREAT k x", "EXPIREAT k 9223372036854775", "EXPIRETIME k",
        "EXPIREAT k 9223372036854776", f"PEXPIREAT k {INT64_MAX}", "PEXPIRETIME k", "PEXPIREAT k 9223372036854775808",
        "EXPIREAT k", "PEXPIREAT k", "EXPIRETIME", "PEXPIRETIME a b", "EXPIRETIME nope", "PEXPIRETIME nope",
        "EXPIREAT nope 1", "PERSIST k", "EXPIRETIME k", "PEXPIRETIME k", "EXPIREAT k 1", "EXISTS k", "SET k v",
        "PEXPIREAT k -1", "EXISTS k", "SET k v", f"EXPIREAT k {INT64_MIN}", "EXISTS k", "PEXPIREAT k 0", "EXISTS k",
        "SET k v", "EXPIREAT k 1 GT", "EXISTS k", "EXPIREAT k 1 LT", "EXISTS k",
    ],
    "dump": [
        "DUMP nope", "DUMP", "DUMP a b", *[line for value in (
            b"", b"a", b"0", b"-1", b"127", b"128", b"-128", b"-129", b"32767", b"32768", b"-32768", b"-32769",
            b"2147483647", b"2147483648", b"-2147483648", b"-2147483649", b"01", b"-0", b"+1", b"9223372036854775807",
            b"hello world", bytes(range(20)), bytes(range(64)), BINARY, BINARY[::-1] + BINARY[:100],
        ) for line in _set_and("DUMP k", value)],
    ],
    "restore": [
        "RESTORE k 0 x", "RESTORE k", "RESTORE k 0", "RESTORE k x x", "RESTORE k -1 x", "RESTORE k 0 x FOO",
        "RESTORE k 0 x IDLETIME", "RESTORE k 0 x IDLETIME x", "RESTORE k 0 x IDLETIME -1", "RESTORE k 0 x FREQ 256",
        "RESTORE k 0 x FREQ -1", "RESTORE k 0 x FREQ x", "RESTORE k 0 x IDLETIME 1 FREQ 1",
        "RESTORE k 0 x FREQ 1 IDLETIME 1",
        "SET k v", "RESTORE k 0 x", "RESTORE k x x", "RESTORE k x x REPLACE", "RESTORE k 0 x REPLACE ABSTTL",
        ["RESTORE", "n", "0", b"\x00\xc0\n\n\x00n\x9fWE\x0e\xaec\xbb"], "GET n", "restore n 0 x replace", "GET n",
        ["RESTORE", "k", "0", BIG], ["RESTORE", "k", "0", BIG, "REPLACE"], "GET k",
    ],
    "in a transaction": [
        "MULTI", ["SETEX", "a", "100", BIG], ["GETSET", "b", BIG], ["MSETNX", "c", BIG, "d", "1"], ["APPEND", "a", BIG],
        "INCR n", "RENAME a z", "COPY z y", "LCS n n", "EXEC", "STRLEN z", "STRLEN y", "STRLEN c", "MULTI",
        ["SETEX", "q", "0", BIG], ["RESTORE", "r", "0", BIG], ["MSETNX", "c", BIG, "e"], "EXEC", "MULTI",
        ["SETEX", "q", "10", BIG], "DISCARD", "EXISTS q r", "DBSIZE",
        *[line for watched in (
            ("WATCH z", "RENAME y z"), ("WATCH y", "SWAPDB 0 1"), ("WATCH z", "SWAPDB 0 1"), ("WATCH nope",
            "SWAPDB 0 1"),
            ("SWAPDB 0 1", "WATCH b", "FLUSHALL"), ("SET k v", "WATCH k", "GETEX k"), ("WATCH k", "GETEX k EX 100"),
            ("WATCH k", "PERSIST k"), ("WATCH k", "MOVE k 3"), ("SET k v", "WATCH k", "COPY k k2"),
            ("WATCH k2", "COPY k k2 REPLACE"), ("WATCH k2", "SETRANGE k2 0 x"), ("WATCH nope", "RENAME k nope"),
            ("WATCH n", "INCR n"), ("WATCH n", "INCR k2"), ("WATCH n", "GETDEL n"), ("WATCH n", "MSETNX n 1 k2 1"),
        ) for line in (*watched, "MULTI", "PING", "EXEC")],
    ],
    "scan": [
        "SCAN 0 COUNT 9223372036854775807", "SCAN 0 COUNT 9223372036854775808", "SCAN 18446744073709551615",
        "SCAN 18446744073709551616", "SCAN 0 COUNT 10 COUNT 0", "SCAN 0 MATCH", "SCAN 0 TYPE",
        "MSET a 1 b 2", "SCAN 0 COUNT 1000 TYPE hash", "SCAN 0 COUNT 1000 MATCH [a]", "KEYS", "KEYS a b", "RANDOMKEY x",
    ],
    "arity": [
        line for name in (
            "SETEX", "PSETEX", "GETSET", "GETDEL", "GETEX", "MSETNX", "APPEND", "SETRANGE", "SUBSTR", "INCR", "DECR",
            "INCRBY", "DECRBY", "INCRBYFLOAT", "LCS", "RENAME", "RENAMENX", "COPY", "EXPIREAT", "PEXPIREAT",
            "EXPIRETIME",
            "PEXPIRETIME", "MOVE", "SWAPDB", "DUMP", "RESTORE", "RESTORE-ASKING",
        ) for line in (name, [name.lower(), "a"], [name, *"abcdef"])
    ],
    "command info": [
        "COMMAND INFO append setrange substr incr decr incrby decrby incrbyfloat getset getdel setex psetex msetnx",
        "COMMAND INFO move swapdb expireat pexpireat expiretime pexpiretime dump restore restore-asking persist",
        "COMMAND GETKEYS rename a b", "COMMAND GETKEYS lcs a b", "COMMAND GETKEYS lcs a b LEN",
        "COMMAND GETKEYS msetnx a 1 b 2", "COMMAND GETKEYS copy a b DB 1", "COMMAND GETKEYS restore k 0 x REPLACE",
        "COMMAND GETKEYS swapdb 0 1", "COMMAND GETKEYSANDFLAGS getdel a",
    ],
}  # fmt: skip
"""By name; each runs on an empty server, in both protocols."""
