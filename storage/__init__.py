"""The store: arena, allocator, index, policy, and their interface, Store. No sockets, no event loop, no YAML.

The store counts on the global interpreter lock: `Lease.release`, `Store.fetch` and others read and write one attribute
where a lock of their own would cost more than the rest. So a free-threaded Python is refused here, where all begins.
"""

import sys

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "kvredis does not run without the global interpreter lock: start a free-threaded Python with PYTHON_GIL=1 or "
        "-X gil=1, or take a usual one"
    )
