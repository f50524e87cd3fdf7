"""ACL as Debian's redis-server 7.0.15 and ours must answer it alike.

Left out is what 7.2 says differently, which ours follows: the words of NOPERM and of DRYRUN's refusals, what is
among a user's flags (so GETUSER is asked of a user that skips sanitizing), the rules of a user in their own order (so
those asked for here have one order only), three more fields in ACL LOG, a HELLO that fails after its AUTH. A script
takes its users away again: the next one finds the default user alone.
"""

from tests.compat.wire import CommandLine

HASH = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"

ACL_SCRIPTS: dict[str, list[CommandLine]] = {
    "acl": [
        "ACL", "ACL FOO", "ACL WHOAMI", "ACL WHOAMI x", "ACL USERS", "ACL USERS x", "ACL LIST x", "ACL CAT", "acl cat",
        "ACL CAT nope", ["ACL", "CAT", "x" * 200], "ACL CAT a b", "ACL CAT hash x", "ACL CAT transaction x",
        "ACL GETUSER", "ACL GETUSER nope", "ACL GETUSER a b", "ACL SETUSER", "ACL DELUSER", "ACL DELUSER nope",
        "ACL DELUSER default", "ACL DELUSER nope default", "ACL LOG RESET", "ACL LOG", "ACL LOG 5", "ACL LOG x",
        "ACL LOG -1", "ACL LOG 1 2", "ACL log reset", "ACL GENPASS 0", "ACL GENPASS -1", "ACL GENPASS x",
        "ACL GENPASS 4097", "ACL GENPASS 1 2", "ACL LOAD", "ACL SAVE", "ACL LOAD x", "ACL SAVE x", "ACL DRYRUN",
        "ACL DRYRUN a", "ACL DRYRUN nope get k", "ACL DRYRUN default nope k", "ACL DRYRUN default get",
        "ACL DRYRUN default GET k", "ACL DRYRUN default config", "ACL DRYRUN default config nope",
        "ACL DRYRUN default config get *", "ACL DRYRUN default set k v x y z", ["ACL", "DRYRUN", "a\0b", "get", "k"],
        "ACL DRYRUN default CONFIG GET", "AUTH nobody x", "AUTH default x", "AUTH", "ACL LOG RESET", "ACL HELP x",
    ],
    "acl-errors": [
        "ACL SETUSER u", *[["ACL", "SETUSER", "u", rule] for rule in (
            "foo", "onn", "", "+nope", "-nope", "+@nope", "-@nope", "+@", "+", "-", "+config|nope", "-config|nope",
            "+config|", "+nope|", "+config|set|x", "-select|0", "+get|a|b", "%~x", "%Q~x", "%RR~x", "%WW~x", "%",
            "~a b", "&a b", "~a\0b", "<nope", "!" + HASH, "!nope", "#nope", "#" + HASH.upper(), "#" + HASH + "0", "(",
            "(+get", "(+nope)", "(~a ~*)", "(~* ~a)", "(foo)", "(on)", "(>p)", "(%Q~x)", "+select|0|1", "on\0x",
            "+get\0x", "resetkey", "all", "@all",
        )],
        "ACL SETUSER u allkeys ~x", "ACL SETUSER u ~* ~x", "ACL SETUSER u ~* %R~x", "ACL SETUSER u &* &x",
        "ACL SETUSER u allchannels &x", "ACL SETUSER u ~x ~* resetkeys ~x", "ACL SETUSER u (+get ~x",
        "ACL SETUSER u on >p +@all foo", "ACL SETUSER u (~a) (~b", "AUTH u p",
        ["ACL", "SETUSER", "a b"], ["ACL", "SETUSER", "a\0b"], ["ACL", "SETUSER", "a\tb", "on"], "ACL DELUSER u",
        "ACL USERS", "ACL LOG RESET",
    ],
    "acl-users": [
        "ACL SETUSER u skip-sanitize-payload", "ACL GETUSER u",
        "ACL SETUSER u on >secret ~a* %R~b %W~c &news:* &* resetchannels &news:* +get", "ACL GETUSER u",
        "ACL SETUSER u >secret #" + HASH, "ACL GETUSER u", "ACL SETUSER u %R~c %W~b %rw~d ~a*", "ACL GETUSER u",
        "ACL SETUSER u nopass", "ACL GETUSER u", "ACL SETUSER u >p <p", "ACL GETUSER u", "ACL SETUSER u resetpass",
        "ACL SETUSER u (~x +get) (%R~y &c +@all) ( ~z  -@all )", "ACL GETUSER u", "ACL SETUSER u (+get ~q %W~r)",
        "ACL GETUSER u", "ACL SETUSER u clearselectors allkeys allchannels +@all", "ACL GETUSER u",
        "ACL SETUSER u -get", "ACL GETUSER u", "ACL SETUSER u -@all +CONFIG|GET", "ACL GETUSER u",
        "ACL SETUSER u +config", "ACL GETUSER u", "ACL SETUSER u -@all +select|0 +SELECT|1",
        "ACL GETUSER u", "ACL SETUSER u +select", "ACL GETUSER u", "ACL SETUSER u nocommands +@transaction",
        "ACL GETUSER u", "ACL SETUSER u allcommands -@transaction", "ACL GETUSER u", "ACL SETUSER u reset",
        "ACL SETUSER u skip-sanitize-payload OFF", "ACL GETUSER u", "ACL SETUSER v", "ACL USERS", "ACL SETUSER a:1 on",
        ["ACL", "SETUSER", "é"], "ACL USERS", "ACL DELUSER v nope a:1 v", ["ACL", "DELUSER", "é", "u"], "ACL USERS",
    ],
    "acl-login": [
        "ACL SETUSER u on >one >two +@all ~* &*", "ACL SETUSER o off nopass +@all ~* &*", "AUTH u three", "AUTH u one",
        "ACL WHOAMI", "AUTH o x", "ACL WHOAMI", "AUTH default any", "ACL WHOAMI", "AUTH u two", "ACL SETUSER u off",
        "ACL WHOAMI", "SET k v", "GET k", "AUTH u two", "ACL SETUSER u on resetpass", "AUTH u two", "AUTH default x",
        "ACL SETUSER u nopass", "AUTH u anything", "ACL WHOAMI", "RESET", "ACL WHOAMI", "HELLO 2 AUTH u",
        "HELLO 2 AUTH o x", "ACL WHOAMI", "CLIENT KILL USER o",
        "CLIENT KILL USER nobody", "ACL DELUSER u o", "DEL k", "ACL LOG RESET",
    ],
    "acl-dryrun": [
        "ACL SETUSER u ~rw:* %R~r:* %W~w:* &news:* +@all -@dangerous +config|get (~sel +get &other)",
        *["ACL DRYRUN u " + line for line in (
            "get rw:1", "set rw:1 v", "get r:1", "set w:1 v", "set rw:1 v get", "exists w:1 r:1 rw:1", "strlen w:1",
            "type w:1", "ttl r:1", "del w:1", "mget r:1 rw:2", "mset w:1 a w:2 b", "getrange r:1 0 1", "append rw:1 x",
            "incr rw:1", "expire w:1 10", "persist w:1", "copy r:1 w:1", "rename rw:1 w:1", "renamenx rw:1 w:2",
            "getdel rw:1", "getex rw:1", "setnx w:1 v", "touch r:1", "unlink w:1", "object encoding w:1",
            "memory usage w:1", "dump r:1", "lcs r:1 rw:1", "publish news:1 x", "subscribe news:1 news:2",
            "psubscribe news:*", "unsubscribe other", "punsubscribe x*", "spublish news:1 x", "ssubscribe news:1",
            "get sel", "config get x", "ping", "auth x", "hello", "quit", "reset", "scan 0",
            "watch r:1",
        )],
        "ACL DELUSER u",
    ],
}  # fmt: skip
