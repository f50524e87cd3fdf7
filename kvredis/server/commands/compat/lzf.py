"""Reading LZF, the compression of strings in a DUMP of Redis. Nothing here writes it: KV blocks do not compress.

The format (liblzf): a control byte below 32 is followed by that many bytes and one more, taken literally; any other
says how long a piece of what came out before is repeated (its upper three bits, a further byte if they are all ones,
plus 2) and how far back it begins (its lower five bits and the next byte, plus 1).
"""

from typing import Final

EXPANSION_MAX: Final = 88
"""A repetition takes three bytes and gives 264: nothing grows more than that."""


def decompress(data: memoryview, room: memoryview) -> bool:
    """Fill `room`, whose length must be that of the text, from `data`; False when they do not fit each other."""
    at, end = 0, 0
    data_end, room_end = len(data), len(room)
    while at < data_end:
        control = data[at]
        at += 1
        if control < 32:
            length = control + 1
            if at + length > data_end or end + length > room_end:
                return False
            room[end : end + length] = data[at : at + length]
            at += length
        else:
            length = control >> 5
            if length == 7:
                if at >= data_end:
                    return False
                length += data[at]
                at += 1
            if at >= data_end:
                return False
            distance = ((control & 31) << 8) + data[at] + 1
            at += 1
            length += 2
            start = end - distance
            if start < 0 or end + length > room_end:
                return False
            if distance >= length:
                room[end : end + length] = room[start : start + length]
            else:  # it repeats what it writes itself
                piece = bytes(room[start:end])
                room[end : end + length] = (piece * (length // distance + 1))[:length]
        end += length
    return end == room_end
