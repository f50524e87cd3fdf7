"""What backends/resp/_recvmsg.c offers to recvmsg.py."""

from collections.abc import Sequence

from _typeshed import WriteableBuffer

def receive(descriptor: int, views: Sequence[WriteableBuffer], flags: int, /) -> int: ...
