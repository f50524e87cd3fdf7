"""The extensions in C, which pyproject.toml cannot name yet but as an experiment; all else is in pyproject.toml.

Each has a way in Python behind the same function, so an installation on a machine without a compiler goes on without.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("kvredis.storage.memory._native", ["storage/memory/_native.c"], optional=True),
        Extension("kvredis.storage._leasing", ["storage/_leasing.c"], optional=True),
        Extension("kvredis.backends.resp._recvmsg", ["backends/resp/_recvmsg.c"], optional=True),
        Extension("kvredis.server.protocol._plain", ["kvredis/server/protocol/_plain.c"], optional=True),
    ]
)
