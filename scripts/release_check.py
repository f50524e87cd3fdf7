"""Say whether a tag may become a release: the package and the changelog say the same version, and the changelog when.

Usage: python scripts/release_check.py v0.1.0 [--notes FILE]     (the entry's text goes to FILE: the release's notes)
"""

import argparse
import ast
import re
import sys
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TAG = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
ENTRY = re.compile(r"^## (?P<version>\S+) - (?P<when>.+)$", re.MULTILINE)


class Entry(NamedTuple):
    """The newest part of the changelog: `## VERSION - WHEN`, and what is below it up to the next."""

    version: str
    when: str
    text: str


def package_version(source: str) -> str | None:
    """Give the string that `__version__` is set to at the top of kvredis/__init__.py; None when there is none."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))):
                return version
    return None


def newest_entry(changelog: str) -> Entry | None:
    """Give the first entry; None when there is none."""
    found = list(ENTRY.finditer(changelog))
    if not found:
        return None
    end = found[1].start() if len(found) > 1 else len(changelog)
    return Entry(found[0]["version"], found[0]["when"].strip(), changelog[found[0].end() : end].strip())


def obstacles(tag: str, source: str, changelog: str) -> list[str]:
    """List what stands against releasing `tag`, a line each; empty when nothing does."""
    named = TAG.fullmatch(tag)
    if named is None:
        return [f"the tag {tag!r} is no v followed by a version, such as v1.2.3 or v1.2.3rc1"]
    version, against = named[1], []
    if (own := package_version(source)) != version:
        against.append(f"the tag says {version}, kvredis/__init__.py says {own}")
    entry = newest_entry(changelog)
    if entry is None:
        return [*against, "CHANGELOG.md has no entry: ## VERSION - YYYY-MM-DD"]
    if entry.version != version:
        against.append(f"the tag says {version}, the newest entry of CHANGELOG.md is {entry.version}")
    try:
        date.fromisoformat(entry.when)
    except ValueError:
        against.append(f"the entry {entry.version} of CHANGELOG.md is dated {entry.when!r}, not YYYY-MM-DD")
    if not entry.text:
        against.append(f"the entry {entry.version} of CHANGELOG.md says nothing")
    return against


def main() -> int:
    """Print what is in the way and exit 1; write the notes and exit 0 when nothing is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tag")
    parser.add_argument("--notes", type=Path, help="file for the entry's text")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to look at")
    asked = parser.parse_args()
    source = (asked.root / "kvredis" / "__init__.py").read_text(encoding="utf-8")
    changelog = (asked.root / "CHANGELOG.md").read_text(encoding="utf-8")
    against = obstacles(asked.tag, source, changelog)
    for line in against:
        print(line, file=sys.stderr)
    if against:
        return 1
    entry = newest_entry(changelog)
    assert entry is not None
    if asked.notes is not None:
        asked.notes.write_text(entry.text + "\n", encoding="utf-8")
    print(f"{asked.tag}: the package and the changelog agree, {entry.when}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
