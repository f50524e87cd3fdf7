"""Runs a command in a network of its own: only the loopback, all ports free, and the addresses that our pages use.

Called inside `unshare --net`. A page says port 6379 and 10.0.0.1 because its readers do; here they are no other's.
"""

import fcntl
import os
import socket
import struct
import sys

ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
IFF_UP = 1


def bring_up() -> None:
    """Bring the loopback up and give it ADDRESSES too; OSError where the kernel does not let us."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
        for number, address in enumerate(ADDRESSES):
            name = f"lo:{number}".encode()
            for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.255")):
                where = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(control, request, struct.pack("16s16s8x", name, where))


if __name__ == "__main__":
    bring_up()
    os.execvp(sys.argv[1], sys.argv[1:])
