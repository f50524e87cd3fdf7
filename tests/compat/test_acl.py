"""Who may do what, decided by Debian's redis-server and by ours for the same random rules and the same command lines.

7.0.15 words a refusal differently and knows the same ones otherwise, so its words are brought into ours before they are
compared: which argument is to blame must be the same. 7.0 also writes a user's rules in an order of its own, so what a
user may do is compared, and not how it is written.
"""

import random

import pytest

from tests.compat.conftest import RunningServer
from tests.compat.wire import Wire

RULES = (
    "on", "nopass", "+@all", "-@all", "+@read", "-@read", "+@write", "-@write", "+@dangerous", "-@dangerous",
    "+@admin", "-@admin", "+@keyspace", "-@slow", "+@fast", "-@fast", "+@pubsub", "+@connection", "-@connection",
    "+@string", "+get", "-get", "+set", "-set", "+mget", "+config", "-config", "+config|get", "-config|get",
    "-config|set", "+client|id", "-client|id", "+client", "+select|0", "+SELECT|1", "-select", "+publish",
    "+psubscribe", "+acl|whoami", "+@hash", "-@transaction", "+@transaction", "allkeys", "resetkeys", "~a*", "~b?",
    "~[ab]1", "%R~a*", "%W~b*", "%RW~c", "%R~*", "%W~*", "~", "allchannels", "resetchannels", "&a*", "&b", "&*",
    "&a[12]", "(+get ~b1)", "(+@all %R~a* &b)", "(%W~a1 +set +del)", "(+publish &b)", "(+@read -mget ~*)",
    "(~* +select|0)", "clearselectors", "allcommands", "nocommands", "reset", "off", "-@all", "resetkeys",
    "resetchannels",
)  # fmt: skip

LINES = (
    "get a1", "get b1", "get c", "get zzz", "set a1 v", "set b1 v", "set a1 v GET", "set b1 v ex 10 get",
    "mget a1 a2", "mget a1 b1 c", "mset a1 v b1 v", "mset b1 v b2 v", "del a1 b1", "exists a1 b1 zzz", "strlen b1",
    "type b1", "ttl a1", "ttl b1", "expire b1 10", "touch a1 b1", "unlink b1", "object encoding a1", "object help",
    "memory usage b1", "config get x", "config set x y", "config resetstat", "client id", "client list",
    "client kill a", "select 0", "select 1", "publish a1 x", "publish b x", "subscribe a1 a2", "subscribe a1 b c",
    "psubscribe a*", "psubscribe a1 b", "unsubscribe zzz", "ssubscribe b", "spublish a2 x", "acl whoami", "acl list",
    "ping", "auth a b", "hello", "quit", "reset", "multi", "exec", "watch a1", "watch b1", "dbsize", "keys *",
    "scan 0", "flushall", "info", "command", "command docs", "debug sleep 0", "swapdb 0 1", "copy a1 b1",
    "rename a1 b1", "getdel b1", "append a1 x", "incr b1",
)  # fmt: skip

ROUNDS = 150


def decision(wire: Wire, line: str) -> bytes:
    """What ACL DRYRUN says of user u and a line, in the words of 7.2."""
    return wire.ask("ACL DRYRUN u " + line).partition(b"\r\n")[2].replace(b"This user", b"User u")


@pytest.mark.parametrize("seed", range(4))
def test_both_servers_let_the_same_lines_pass(seed: int, redis_server: RunningServer, kvredis: RunningServer) -> None:
    dice = random.Random(seed)
    with redis_server.connect() as theirs, kvredis.connect() as ours:
        for _ in range(ROUNDS):
            rules = dice.choices(RULES, k=dice.randint(1, 9))
            answers = [wire.ask(["ACL", "SETUSER", "u", *rules]) for wire in (theirs, ours)]
            assert answers[0] == answers[1], rules
            for line in dice.sample(LINES, 20):
                assert decision(ours, line) == decision(theirs, line), (rules, line)
            if dice.random() < 0.3:
                for wire in (theirs, ours):
                    wire.ask("ACL DELUSER u")
                    wire.ask("ACL SETUSER u")
        for wire in (theirs, ours):
            wire.ask("ACL DELUSER u")
