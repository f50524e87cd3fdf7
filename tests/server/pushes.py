"""What servers send unasked, as tests expect it and as a raw client reads it."""

from tests.server.live import Client


def message(*words: str, resp: int = 2) -> bytes:
    """A pub/sub message as its subscriber receives it."""
    head = b">%d\r\n" if resp == 3 else b"*%d\r\n"
    return head % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word.encode()) for word in words)


def invalidation(*keys: bytes) -> bytes:
    """What a RESP3 client is told of keys that have changed at one time."""
    return b">2\r\n$10\r\ninvalidate\r\n*%d\r\n" % len(keys) + b"".join(b"$%d\r\n%b\r\n" % (len(k), k) for k in keys)


async def speak_resp3(client: Client) -> None:
    """HELLO 3, its reply read to the end."""
    await client.send("HELLO", "3")
    while await client.read_line() != b"modules\r\n":
        pass
    assert await client.read_line() == b"*0\r\n"


async def read_message(client: Client) -> list[bytes]:
    """The words and numbers of the next message or confirmation."""
    head = await client.read_line()
    assert head[:1] in (b"*", b">"), head
    words = []
    for _ in range(int(head[1:])):
        line = await client.read_line()
        words.append(line[1:-2] if line[:1] == b":" else (await client.read(int(line[1:]) + 2))[:-2])
    return words


async def subscribe(client: Client, command: str, name: str) -> None:
    """Subscribe and see it confirmed."""
    await client.send(command, name)
    assert (await read_message(client))[:2] == [command.lower().encode(), name.encode()]
