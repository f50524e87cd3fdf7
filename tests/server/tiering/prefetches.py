"""What KV.PREFETCH and KV.JOB answer, as tests expect it and as a raw client reads it."""

from typing import Final

from tests.server.live import Client

Counts = dict[str, int | str]
JOB_COUNTS: Final = ("queued", "done", "failed", "dropped", "resident", "missing", "no-room")


async def read_map(client: Client) -> Counts | bytes:
    """A map of names to integers or words, as RESP2 and RESP3 have it; or an error's line."""
    head = await client.read_line()
    if head[:1] == b"-":
        return head
    pairs = int(head[1:]) // (2 if head[:1] == b"*" else 1)
    found: Counts = {}
    for _ in range(pairs):
        name = await client.read_bulk()
        assert name is not None
        line = await client.read_line()
        if line[:1] == b":":
            found[name.decode()] = int(line[1:])
        else:
            found[name.decode()] = (await client.read(int(line[1:]) + 2))[:-2].decode()
    return found


async def ask(client: Client, *words: str) -> Counts | bytes:
    """A command that is answered with a map."""
    await client.send(*words)
    return await read_map(client)


async def begin(client: Client, *words: str) -> str:
    """KV.PREFETCH with JOB; the job's number."""
    told = await ask(client, "KV.PREFETCH", *words, "JOB")
    assert isinstance(told, dict), told
    return str(told["job"])


def counts(queued: int = 0, resident: int = 0, missing: int = 0, no_room: int = 0) -> Counts:
    """What KV.PREFETCH answers."""
    return {"queued": queued, "resident": resident, "missing": missing, "no-room": no_room}


def job(status: str, **figures: int) -> Counts:
    """What KV.JOB answers."""
    return {"status": status, **{name: figures.get(name.replace("-", "_"), 0) for name in JOB_COUNTS}}
