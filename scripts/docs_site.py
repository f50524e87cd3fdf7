"""The parts of the documentation site that the code knows better than a writer: an mkdocs hook.

Reference pages are made out of the tables that the program itself runs on (configuration keys, settings, commands, the
command line, metrics), pictures out of the recorded results in bench/results. All of it is made while the site is
built and never checked in, so none of it can be old.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvredis.backends.config.lmcache import FOREIGN_KEYS, FORMER_NAMES
from kvredis.backends.config.parsers import shown
from kvredis.backends.config.rules import ENTRIES
from kvredis.backends.config.schema import KEYS
from kvredis.backends.config.sources import Key
from kvredis.bench.pictures import draw_file
from kvredis.cli.main import main
from kvredis.cli.serve import serve
from kvredis.server.commands import load_families
from kvredis.server.commands.registry import COMMANDS, Command
from kvredis.server.config.settings import SETTINGS, Effect
from kvredis.server.metrics.metrics import BLOCKS, CLIENTS, DISK, GPU, MEMORY, SERVER, TIMES, Figure, Kind
from kvredis.server.metrics.prometheus import LMCACHE

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results"

GROUPS: Final = {
    "kv": "Beyond Redis",
    "string": "Strings",
    "generic": "Keys",
    "pubsub": "Publish and subscribe",
    "transactions": "Transactions",
    "connection": "Connection",
    "server": "Server",
    "cluster": "Cluster",
}
"""The command table's groups in the order of the page, the most particular first."""

METRICS: Final[Mapping[str, tuple[Figure, ...]]] = {
    "The server": SERVER,
    "Clients and what they send": CLIENTS,
    "What is looked for and stored": BLOCKS,
    "Memory": MEMORY,
    "Disk": DISK,
    "GPU memory": GPU,
    "Times": TIMES,
}

PICTURE: Final = re.compile(r"\]\(plots/([\w.-]+)\.png\)")

EFFECTS: Final = {
    Effect.LIVE: ("Changed while it runs", "`CONFIG SET` changes these at once; `CONFIG REWRITE` keeps them."),
    Effect.FIXED: (
        "Decided at start",
        "`CONFIG SET` refuses these as Redis does; set the configuration key, where it names one.",
    ),
    Effect.PROTECTED: ("Protected", "Reported, and never changed by a client."),
    Effect.IGNORED: (
        "Taken, without an effect",
        "Tools and test suites set these on a Redis. They are checked, kept and reported, and steer nothing, "
        "because what they are for does not exist here.",
    ),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is generated to the files of the site. Called by mkdocs."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    for name, picture in pictures():
        files.append(File.generated(config, f"plots/{name}", content=picture))
    return files


# -- configuration


def configuration_page() -> str:
    """The table of configuration keys, with every name that a key goes by."""
    served = {parameter.name or "" for parameter in serve.params}
    both = [key for key in KEYS.values() if not key.server and key.name in served]
    engine = [key for key in KEYS.values() if not key.server and key.name not in served]
    server = [key for key in KEYS.values() if key.server]
    return "\n".join(
        [
            *_front("Configuration keys", "Every configuration key with its default, variable, flag and meaning."),
            "Made from the table in `backends/config/schema.py`. Precedence, lowest first: defaults, the YAML file",
            "that `LMCACHE_CONFIG_FILE` or `--config-file` names, `LMCACHE_*` and `KVREDIS_*` variables, flags.",
            "`kvredis config show --origin` says which of them each value is from, `kvredis config check FILE` what is",
            "wrong or odd about a file; [Configure it](../configure.md) has an example and the forms of `remote_url`.",
            "Sizes are in GiB or carry a unit; units are powers of 1024, as in redis.conf.",
            "",
            *_keys("Engine and server", "The store's memory, disk and eviction.", both, served),
            *_keys("Engine", "What an engine does with prompts and with a server.", engine, served),
            *_keys("Server", "Under `kvredis:` in the file.", server, served),
            *_entries(),
            *_foreign(),
        ]
    )


def _keys(title: str, text: str, keys: list[Key], served: set[str]) -> Iterator[str]:
    yield from (f"## {title}", "", text, "", "| key, variable, flag | default | meaning |", "|---|---|---|")
    for key in keys:
        names = [f'<strong id="{key.name}">`{key.name}`</strong>', f"`{key.env}`"]
        names += [f"`{_flag(key)}`"] if key.name in served else []
        yield f'| <span class="kv-names">{"<br>".join(names)}</span> | {_default(key)} | {_cell(key.help)} |'
    yield ""


def _flag(key: Key) -> str:
    """The key's option as `kvredis serve` has it."""
    found = next(each for each in serve.params if each.name == key.name)
    return "/".join(found.opts + found.secondary_opts) + ("" if found.secondary_opts else f" {key.metavar}")


def _default(key: Key) -> str:
    if key.default is None or key.default == "" or key.default == {}:
        return "none"
    return f"`{json.dumps(shown(key.default))}`"


def _entries() -> Iterator[str]:
    yield from (
        "## Entries of extra_config",
        "",
        "LMCache's bag of further settings, as far as they mean something.",
        "",
    )
    yield from ("| entry | stands for |", "|---|---|")
    for name, entry in ENTRIES.items():
        target = f"[`{entry.stands_for}`](#{entry.stands_for})" if entry.stands_for else "the connection to a server"
        yield f"| `{name}` | {target} |"
    yield ""


def _foreign() -> Iterator[str]:
    yield from ("## Names without an effect here", "")
    yield "LMCache reads these; kvredis takes them with one line of warning that says so."
    yield from ("", ", ".join(f"`{name}`" for name in sorted(FOREIGN_KEYS)) + ".", "")
    yield "Former names, which are taken for what they became: "
    yield ", ".join(f"`{old}` ({new})" for old, new in sorted(FORMER_NAMES.items())) + "."
    yield ""


def settings_page() -> str:
    """The table of settings that CONFIG GET knows."""
    lines = [
        *_front("Settings of a running server", "What CONFIG GET reports and CONFIG SET changes."),
        "Made from the table in `kvredis/server/config/settings.py`. The names are Redis'. Those that have a",
        "configuration key are told under [Configuration](configuration.md); of the others, what CONFIG SET takes can",
        "be set at the start under `kvredis: settings:`.",
        "",
    ]
    for effect, (title, text) in EFFECTS.items():
        lines += [f"## {title}", "", text, "", "| setting | at the start |", "|---|---|"]
        for name, setting in sorted(SETTINGS.items()):
            if setting.effect is effect:
                lines.append(f"| `{name}` | {_first_value(name, setting.default, read=setting.read is not None)} |")
        lines.append("")
    return "\n".join(lines)


def _first_value(name: str, default: str, *, read: bool) -> str:
    key = name.replace("-", "_")
    if key in KEYS:
        return f"[`{key}`](configuration.md#{key})"
    if read:
        return "what the server is"
    return f"`{default}`" if default else "empty"


# -- commands


def commands_page() -> str:
    """The command table: what COMMAND DOCS says, to be read."""
    load_families()
    lines = [
        *_front("Commands", "Every command that the server knows, from its own command table."),
        f"The server knows {len(COMMANDS)} commands. What Redis has too answers as Redis 7.2 does, in RESP2 and RESP3;",
        "what it does not have is told with examples in [Commands beyond Redis](own-commands.md). `COMMAND DOCS` tells",
        "a client the same as this page.",
        "",
    ]
    for group, title in GROUPS.items():
        lines += [f"## {title}", ""]
        for found in sorted((each for each in COMMANDS.values() if each.group == group), key=lambda each: each.name):
            lines += _command(found, "###")
            for part in found.subcommands.values():
                lines += _command(part, "####")
    return "\n".join(lines)


def _command(found: Command, level: str) -> Iterator[str]:
    name = found.name.upper().replace("|", " ")
    yield from (f"{level} {name} {{ #{anchor(found)} }}", "")
    if found.subcommands:
        yield from (found.summary, "")
        return
    yield from ("```text", f"{name} {found.syntax}".rstrip(), "```", "", found.summary, "")
    facts = [f"since {found.since}", f"complexity {found.complexity.rstrip('.')}"]
    facts += [f"flags {', '.join(found.flags)}"] if found.flags else []
    facts += [f"ACL {', '.join('@' + each for each in found.categories)}"]
    yield "<small>" + "; ".join(facts) + "</small>"
    yield from ("", f"[Examples](own-commands.md#{anchor(found)})", "") if found.group == "kv" else ("",)


def anchor(found: Command) -> str:
    """Where a command is told on its page."""
    return found.name.replace("|", "-").replace(".", "-")


# -- the command line


def cli_page() -> str:
    """Every command of `kvredis` with its options, as `--help` has them."""
    lines = [
        *_front("Command line", "Every subcommand of kvredis with its options."),
        "Made from the program's own `--help`. The exit status is 0 for done, 1 for failed, 2 for bad usage or",
        "configuration.",
        "",
    ]
    for path, command in tree():
        lines += _cli_command(path, command)
    return "\n".join(lines)


def tree() -> Iterator[tuple[list[str], click.Command]]:
    """Every command of the command line with the words that lead to it, groups before their parts."""

    def walk(path: list[str], command: click.Command) -> Iterator[tuple[list[str], click.Command]]:
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=path[-1])
            for name in command.list_commands(context):
                part = command.get_command(context, name)
                if part is not None and not part.hidden:
                    yield from walk([*path, name], part)

    yield from walk(["kvredis"], main)


def _cli_command(path: list[str], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path))
    name = " ".join(path)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from (f"{'#' * min(len(path) + 1, 4)} {name} {{ #{'-'.join(path)} }}", "", "```text", usage, "```", "")
    yield from _prose(command.help)
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    if len(records) > 1:  # every command has --help
        yield from ("| option | what |", "|---|---|")
        yield from (f"| `{option}` | {_cell(text)} |" for option, text in records if "--help" not in option)
        yield ""
    yield from _prose(command.epilog)


def _prose(text: str | None) -> Iterator[str]:
    r"""A help text as Markdown: examples are code, and what stands behind click's `\b` stays in its lines."""
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        lines = [line.strip() for line in paragraph.splitlines()]
        verbatim = bool(lines) and lines[0] == "\b"
        examples = [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]
        rest = [line for line in lines[verbatim:] if not line.startswith("Example: ")]
        if examples:
            yield from (f"Example{'s' * (len(examples) > 1)}:", "", "```sh", *examples, "```", "")
        if rest and verbatim and not examples:
            yield from ("```text", *rest, "```", "")
        elif rest:
            yield from (*(line.replace("<", "&lt;") + "  " * bool(examples) for line in rest), "")


# -- metrics


def metrics_page() -> str:
    """The table of figures that /metrics and INFO tell."""
    lines = [
        *_front("Metrics", "Every figure that /metrics and INFO tell, with its kind, label and meaning."),
        "`GET /metrics` on [`metrics_port`](configuration.md#metrics_port), in Prometheus' text format or OpenMetrics.",
        "`INFO kv` has the same figures under the same names without `kvredis_`, with a label's value behind it.",
        "How to scrape them is told under [Operations](../operations.md#metrics).",
        "",
    ]
    for title, table in METRICS.items():
        lines += [f"## {title}", "", "| metric | kind | label | meaning |", "|---|---|---|---|"]
        for figure in table:
            label = f"`{figure.label}`" if figure.label else ""
            lines.append(f"| `{figure.full_name}` | {figure.kind.value} | {label} | {_cell(figure.help)} |")
        lines.append("")
    lines += [
        "## What runs",
        "",
        "`kvredis_build_info` is 1 and has labels for the versions and what the arena is made",
    ]
    lines += ["of; `process_*` are those of every Prometheus client.", ""]
    lines += ["## Under LMCache's names", "", "So that a dashboard made for LMCache shows a server too; only what a"]
    lines += ["server can say truly.", "", "| metric | kind | meaning |", "|---|---|---|"]
    for name, (kind, text, _) in LMCACHE.items():
        suffix = "_total" if kind is Kind.COUNTER else ""
        lines.append(f"| `lmcache:{name}{suffix}` | {kind.value} | {_cell(text)} |")
    return "\n".join([*lines, ""])


# -- pictures


def pictures() -> Iterator[tuple[str, bytes]]:
    """Draw a PNG of each recorded result that the pages show, as `kvredis bench plot` does; BenchError if there is
    nothing to draw it from."""
    pages = (ROOT / "docs").rglob("*.md")
    shown = {name for page in pages for name in PICTURE.findall(page.read_text(encoding="utf-8"))}
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(shown):
            picture = Path(folder) / f"{name}.png"
            draw_file(RESULTS / f"{name}.json", picture)
            yield picture.name, picture.read_bytes()


def _front(title: str, description: str) -> Iterator[str]:
    yield from ("---", f"description: {description}", "---", "", f"# {title}", "")


def _cell(text: str) -> str:
    """Text for a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "configuration": configuration_page,
    "settings": settings_page,
    "commands": commands_page,
    "cli": cli_page,
    "metrics": metrics_page,
}
"""What is generated, by its name under reference/."""
