"""The release: what a tag must agree with, and that the workflows call what there is and try every Python we name."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "release_check.py"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CHANGELOG = "# Changelog\n\n## 1.2.0 - 2026-11-22\n\n- All of it.\n- And more.\n\n## 1.1.0 - 2026-10-01\n\n- Before.\n"


def workflow(path: Path) -> dict[str, Any]:
    """A workflow as it is read; YAML 1.1 takes the key `on` for true."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return {("on" if key is True else key): value for key, value in loaded.items()}


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    """Its jobs by their names."""
    found = workflow(path)["jobs"]
    assert isinstance(found, dict)
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    """Every step of every job."""
    for job in jobs(path).values():
        yield from job["steps"]


def release() -> dict[str, dict[str, Any]]:
    """The jobs that make a release."""
    return jobs(ROOT / ".github" / "workflows" / "release.yml")


def behind(job: str) -> set[str]:
    """All that must have gone well before a job of the release begins."""
    needs = release()[job].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(behind(each) for each in direct))


class Tree:
    """A package and a changelog to be released."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "kvredis").mkdir()
        self.write("1.2.0", CHANGELOG)

    def write(self, version: str, changelog: str) -> None:
        """Put them there."""
        (self.root / "kvredis" / "__init__.py").write_text(f'"""Text."""\n\n__version__ = "{version}"\n')
        (self.root / "CHANGELOG.md").write_text(changelog)

    def check(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run the script on it."""
        command = [sys.executable, str(SCRIPT), "--root", str(self.root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """One that may be released as v1.2.0."""
    return Tree(tmp_path)


def test_a_tag_that_agrees_is_released_with_the_newest_entry_as_its_notes(tree: Tree) -> None:
    notes = tree.root / "notes.md"
    done = tree.check("v1.2.0", "--notes", str(notes))
    assert (done.returncode, done.stderr) == (0, "")
    assert notes.read_text() == "- All of it.\n- And more.\n"


@pytest.mark.parametrize("tag", ["1.2.0", "v1.2", "v1.2.0-dirty", "version", ""])
def test_a_tag_of_another_form_is_refused(tag: str, tree: Tree) -> None:
    done = tree.check(tag)
    assert done.returncode == 1
    assert "is no v followed by a version" in done.stderr


@pytest.mark.parametrize(
    ("version", "changelog", "said"),
    [
        ("1.3.0", CHANGELOG, ["kvredis/__init__.py says 1.3.0"]),
        ("1.2.0", CHANGELOG.replace("1.2.0", "1.2.1"), ["the newest entry of CHANGELOG.md is 1.2.1"]),
        ("1.2.0", CHANGELOG.replace("2026-11-22", "unreleased"), ["dated 'unreleased', not YYYY-MM-DD"]),
        ("1.2.0", CHANGELOG.replace("2026-11-22", "2026-13-40"), ["dated '2026-13-40', not YYYY-MM-DD"]),
        ("1.2.0", CHANGELOG.replace("- All of it.\n- And more.\n", ""), ["says nothing"]),
        ("1.2.0", "# Changelog\n", ["has no entry"]),
        ("1.1.0", CHANGELOG.replace("1.2.0", "1.3.0"), ["says 1.1.0", "CHANGELOG.md is 1.3.0"]),
    ],
)
def test_what_does_not_agree_is_named_and_no_notes_are_written(
    version: str, changelog: str, said: list[str], tree: Tree
) -> None:
    tree.write(version, changelog)
    notes = tree.root / "notes.md"
    done = tree.check("v1.2.0", "--notes", str(notes))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == len(said)
    for part in said:
        assert part in done.stderr
    assert not notes.exists()


def test_a_package_without_a_version_is_refused(tree: Tree) -> None:
    (tree.root / "kvredis" / "__init__.py").write_text("__version__ = version()\n")
    done = tree.check("v1.2.0")
    assert done.returncode == 1
    assert "kvredis/__init__.py says None" in done.stderr


def test_a_candidate_is_a_release_too(tree: Tree) -> None:
    tree.write("1.2.0rc1", CHANGELOG.replace("1.2.0", "1.2.0rc1"))
    assert tree.check("v1.2.0rc1").returncode == 0


def test_nothing_but_the_date_stands_between_this_tree_and_its_release() -> None:
    here = re.search(r'^__version__ = "(.+)"$', (ROOT / "kvredis" / "__init__.py").read_text(), re.MULTILINE)
    assert here is not None
    done = subprocess.run([sys.executable, str(SCRIPT), f"v{here[1]}"], capture_output=True, text=True, timeout=60)
    undated = f"the entry {here[1]} of CHANGELOG.md is dated 'unreleased', not YYYY-MM-DD"
    assert done.stderr.strip() in ("", undated)


def test_there_are_a_gate_a_night_and_a_release() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"ci", "nightly", "release"}
    assert ".ci/run" in [step.get("run") for step in steps(ROOT / ".github" / "workflows" / "ci.yml")]
    night = ROOT / ".github" / "workflows" / "nightly.yml"
    assert "make nightly" in [step.get("run") for step in steps(night)]
    assert "schedule" in workflow(night)["on"]
    assert workflow(ROOT / ".github" / "workflows" / "release.yml")["on"] == {"push": {"tags": ["v*"]}}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_only_what_is_there(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in steps(path):
        assert ("run" in step) != ("uses" in step)
        called = str(step.get("run", ""))
        for name in re.findall(r"(?<![\w./])((?:scripts|\.ci)/[\w.-]+)", called):
            script = ROOT / name
            assert script.is_file(), f"{name} is not there"
            assert script.suffix == ".py" or script.stat().st_mode & 0o111, f"{name} cannot be run"
        for target in re.findall(r"\bmake ([\w./-]+)", called):
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) or target.endswith(".stamp"), target


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_line_of_releases_and_jobs_have_limits(path: Path) -> None:
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", step["uses"])
    for job in jobs(path).values():
        assert 0 < job["timeout-minutes"] <= (240 if path.stem == "nightly" else 60)


def test_every_python_that_the_package_names_is_tried_and_no_other() -> None:
    prefix = "Programming Language :: Python :: "
    named = [line.removeprefix(prefix) for line in PROJECT["project"]["classifiers"] if line.startswith(prefix)]
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    tried = jobs(ROOT / ".github" / "workflows" / "ci.yml")["gate"]["strategy"]["matrix"]["python"]
    assert tried == named
    assert release()["try"]["strategy"]["matrix"]["python"] == named
    wheels = [f"cp{version.replace('.', '')}-manylinux_x86_64" for version in named]
    assert PROJECT["tool"]["cibuildwheel"]["build"] == wheels


def test_tools_read_the_source_as_the_oldest_python_does() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_one_job_each_may_publish(path: Path) -> None:
    assert workflow(path)["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
    assert more == ({} if path.stem != "release" else {"pypi": {"id-token": "write"}, "github": {"contents": "write"}})


def test_nothing_is_published_that_was_not_checked_built_tried_and_documented() -> None:
    assert behind("pypi") == {"check", "gate", "build", "try", "docs"}
    assert behind("github") == behind("pypi") | {"pypi"}
    assert release()["pypi"]["environment"]["name"] == "pypi"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")


def test_what_a_job_of_the_release_takes_another_has_left() -> None:
    left, taken = set(), set()
    for job in release().values():
        for step in job["steps"]:
            name = step.get("with", {}).get("name")
            left |= {name} if step.get("uses", "").startswith("actions/upload-artifact@") else set()
            taken |= {name} if step.get("uses", "").startswith("actions/download-artifact@") and name else set()
    assert taken
    assert taken <= left
