"""What is compiled is there, and both ways can be chosen of what has two."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvredis.cli.doctor.system import EXTENSIONS
from kvredis.storage.memory.copy import KINDS

IN_USE = """
from kvredis.backends.resp.wire import receive
from kvredis.storage.memory.copy import KIND
print(KIND, receive.__name__)
"""


def in_use(setting: str) -> list[str]:
    """Ask a process with this KVREDIS_NATIVE for what it copies and receives with."""
    environment = {**os.environ, "KVREDIS_NATIVE": setting}
    done = subprocess.run([sys.executable, "-c", IN_USE], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_an_environment_variable_turns_the_extensions_off() -> None:
    assert in_use("0") == ["python", "receive_in_python"]
    assert KINDS[-1] == "python"


@pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler, so installing has left the extensions out"
)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_where_there_is_a_compiler_the_extensions_are_built_and_not_older_than_their_source(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not built: make test builds it"
    assert spec.origin is not None
    place = Path(__file__).parents[1] / name.replace(".", "/")
    for source in filter(Path.exists, map(place.with_suffix, (".c", ".pyx", ".pxd"))):
        assert Path(spec.origin).stat().st_mtime_ns >= source.stat().st_mtime_ns, f"{name} is old: make test"
    kind, receiver = in_use("1")
    assert kind != "python"
    assert receiver != "receive_in_python"
