"""Runs a command as systemd runs a unit's, as far as a process can do that to itself: system call filter, address
families, no capabilities, no new privileges, no memory that is both writable and executable, limits, umask.

Started by test_systemd.py, with the unit's settings as JSON: `python sandbox.py SETTINGS COMMAND ...`. The filter is
made with libseccomp, as systemd makes its own.
"""

import ctypes
import json
import os
import resource
import sys

SCMP_ACT_ALLOW, SCMP_ACT_ERRNO_EPERM = 0x7FFF0000, 0x00050001  # seccomp.h of libseccomp
SCMP_CMP_EQ = 4
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 24, 38, 65  # linux/prctl.h
CAPABILITIES = 64


class Comparison(ctypes.Structure):
    """scmp_arg_cmp."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def filter_calls(allowed: list[str], families: list[int]) -> None:
    """Let through these calls, and socket(2) for these families; all others fail with EPERM."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(SCMP_ACT_ERRNO_EPERM))

    def allow(name: str, comparison: Comparison | None = None) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # below: of another architecture
            given = ctypes.byref(comparison) if comparison else None
            code = library.seccomp_rule_add_array(context, SCMP_ACT_ALLOW, number, int(comparison is not None), given)
            assert code == 0, (name, code)

    for name in allowed:
        if name != "socket":
            allow(name)
    for family in families:
        allow("socket", Comparison(0, SCMP_CMP_EQ, family, 0))
    assert library.seccomp_load(context) == 0


def main() -> None:
    """Shut ourselves in, and become the command."""
    settings = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    os.umask(int(settings["umask"], 8))
    for name, value in settings["limits"].items():
        _, hard = resource.getrlimit(getattr(resource, name))
        asked = resource.RLIM_INFINITY if value == "infinity" else int(value)
        try:
            resource.setrlimit(getattr(resource, name), (asked, asked))
        except ValueError:  # not even root may raise it here
            resource.setrlimit(getattr(resource, name), (hard, hard))
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    libc.prctl(PR_SET_MDWE, 1, 0, 0, 0)  # Linux 6.3
    filter_calls(settings["calls"], settings["families"])
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
