"""The compiled parts, which pyproject.toml cannot name yet but as an experiment; all else is in pyproject.toml.

The store's core and the server's hot path are Cython and there is no other way: building needs a C compiler, and says
so in one line without one. The others have a way in Python behind the same function.
"""

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

NO_COMPILER = "kvredis needs a C compiler to be built (Debian, Ubuntu: apt install gcc), or a wheel for this platform"


class Build(build_ext):
    """Building, with a word to people who have no compiler."""

    def build_extension(self, ext: Extension) -> None:
        """As setuptools, but for the last line of the error."""
        try:
            super().build_extension(ext)
        except (CompileError, PlatformError) as error:
            if ext.optional:
                raise
            raise SystemExit(f"error: {ext.name}: {error}\n{NO_COMPILER}") from error


COMPILED = [
    Extension("kvredis.storage._core", ["storage/_core.pyx"]),
    Extension("kvredis.server.protocol._hot", ["kvredis/server/protocol/_hot.pyx"]),
    Extension("kvredis.server.shm._places", ["kvredis/server/shm/_places.pyx"]),
]

setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension("kvredis.storage.memory._native", ["storage/memory/_native.c"], optional=True),
        Extension("kvredis.storage.disk._checksum", ["storage/disk/_checksum.c"], optional=True),
        Extension("kvredis.backends.resp._recvmsg", ["backends/resp/_recvmsg.c"], optional=True),
        *cythonize(COMPILED, build_dir="build/cython"),
    ],
)
