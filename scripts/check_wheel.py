"""Say whether a wheel holds every module of every room, and every extension: a room that is reached through a link is
easily lost, and an extension that could not be built is left out without an error.

Usage: python scripts/check_wheel.py dist/kvredis-*.whl
"""

import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTENSION_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def modules_of_the_tree() -> set[str]:
    """List every module under kvredis/, the linked rooms included, as the wheel for this interpreter should name it."""
    package = ROOT / "kvredis"
    rooms = [folder for folder in package.iterdir() if folder.is_dir() and folder.name != "__pycache__"]
    modules = [path for room in rooms for kind in ("*.py", "*.pyi", "*.html") for path in room.rglob(kind)]
    built = [
        path.with_suffix(EXTENSION_SUFFIX) for room in rooms for kind in ("*.c", "*.pyx") for path in room.rglob(kind)
    ]
    paths = [*package.glob("*.py"), *modules, *built]
    return {path.relative_to(ROOT).as_posix() for path in paths} | {"kvredis/py.typed"}


def main() -> int:
    """Compare; print what is missing or should not be there."""
    packed = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name}
    wanted = modules_of_the_tree()
    missing, strange = sorted(wanted - packed), sorted(packed - wanted)
    rooms = sorted({name.split("/")[1] for name in packed if name.count("/") > 1})
    print(f"{sys.argv[1]}: {len(packed)} files, rooms: {', '.join(rooms)}")
    for name in missing:
        print(f"missing: {name}")
    for name in strange:
        print(f"should not be there: {name}")
    return 1 if missing or strange else 0


if __name__ == "__main__":
    sys.exit(main())
