"""What backends/resp/_recvmsg.c offers to wire.py."""

from collections.abc import Sequence

from _typeshed import WriteableBuffer

def receive(descriptor: int, views: Sequence[WriteableBuffer], flags: int, /) -> int: ...
