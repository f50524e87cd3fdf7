"""`kvredis doctor`: what this machine has, what the configuration asks of it, and the line that mends the difference.

Each part can be asked for alone: memory.py, disk.py, gpu.py and system.py. All of them read the machine through
Machine, and judge as `kvredis serve` will, by its own code.
"""

import json
from collections.abc import Callable
from pathlib import Path

import click

from kvredis.backends.config.schema import Config
from kvredis.cli.config import check_store, config_file_option, load_config
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.arena import Machine
from kvredis.storage.memory.hugepages import HUGEPAGE_BYTES
from kvredis.storage.memory.memory_limits import gib
from kvredis.storage.options import parse_size

from .disk import disk, disk_facts
from .finding import Finding, report
from .gpu import gpu
from .memory import hugepage_facts, memlock, memory, numa
from .system import limits, network, server_options, software

Part = Callable[[Config, Machine], list[Finding]]


@click.group(invoke_without_command=True, epilog="Example: kvredis doctor hugepages --size 5GB")
@click.option("--quick", is_flag=True, help="Do not measure the disk.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@config_file_option
@click.pass_context
def doctor(ctx: click.Context, quick: bool, as_json: bool, config_file: Path | None) -> None:
    """Say what this machine has, what the configuration asks of it, and the line that mends it (exit 1 if any)."""
    if ctx.invoked_subcommand is None:
        report(ctx, examine(load_config(config_file), _machine(ctx), measure=not quick), as_json)


@doctor.command(epilog="Example: kvredis doctor hugepages --size 5GB")
@click.option("--size", default="5.0", show_default=True, help="The arena: GiB as a number, or with a unit (5GB).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def hugepages(ctx: click.Context, size: str, as_json: bool) -> None:
    """Print how many 2 MiB pages an arena of SIZE needs, and how to have them now and after a reboot."""
    nbytes = parse_size(size, key="size", source="--size")
    facts = hugepage_facts(nbytes, _machine(ctx))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo(f"{gib(nbytes)} needs {facts['pages_needed']} pages of 2 MiB")
        click.echo(f"pool now: {facts['pool_total']} pages, {facts['pool_free']} free")
        if facts["default_page_bytes"] != HUGEPAGE_BYTES:
            click.echo(f"(/proc/meminfo counts another pool: pages of {facts['default_page_bytes']} bytes)")
        if facts["ok"]:
            click.echo("enough")
        elif facts["obstacle"]:
            click.echo(f"not to be had: {facts['obstacle']}")
        else:
            click.echo("not enough; these lines, as root, make room:")
            click.echo(f"  now:         {facts['command']}")
            click.echo(f"  every boot:  {facts['persistent']}")
    ctx.exit(0 if facts["ok"] else 1)


doctor.add_command(disk)


def _of_memory(config: Config, machine: Machine) -> list[Finding]:
    findings, gpu_locks = gpu(config) if config.page_lock else ([], False)
    locked = [finding for finding in findings if finding.ok is False]
    return [*memory(config, machine), *numa(machine), memlock(config, machine, gpu_locks=gpu_locks), *locked]


def _of_gpu(config: Config, machine: Machine) -> list[Finding]:
    return gpu(config)[0]


def _of_system(config: Config, machine: Machine) -> list[Finding]:
    return [*network(config, machine), *limits(config), server_options(config), *software(machine)]


PARTS: dict[str, tuple[Part, str]] = {
    "memory": (_of_memory, "Print whether the arena gets its room and pages, and may be locked; and the NUMA nodes."),
    "gpu": (_of_gpu, "Print the GPUs, and whether their driver page-locks memory of ours."),
    "system": (_of_system, "Print whether ports, open files and options are as a server needs them, and the versions."),
}


def _add_part(name: str, part: Part, told: str) -> None:
    @doctor.command(name, help=told, epilog=f"Example: kvredis doctor {name} --json")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @config_file_option
    @click.pass_context
    def command(ctx: click.Context, as_json: bool, config_file: Path | None) -> None:
        report(ctx, part(load_config(config_file), _machine(ctx)), as_json)


for _name, (_part, _told) in PARTS.items():
    _add_part(_name, _part, _told)


def examine(config: Config, machine: Machine, *, measure: bool = False) -> list[Finding]:
    """Look at everything that the store and the server depend on; `measure` writes to the disk tier's directory for a
    second. Leaves nothing behind."""
    gpus, gpu_locks = gpu(config)
    return [
        *memory(config, machine),
        *numa(machine),
        memlock(config, machine, gpu_locks=gpu_locks),
        *gpus,
        *_disk(config, machine, measure),
        *_of_system(config, machine),
    ]


def _machine(ctx: click.Context) -> Machine:
    """Give the machine that a test handed in, else this one."""
    return ctx.obj if isinstance(ctx.obj, Machine) else Machine()


def _disk(config: Config, machine: Machine, measure: bool) -> list[Finding]:
    try:
        if config.remote_url is None:  # else it is an engine's configuration, and those may keep nothing
            check_store(config)
    except ConfigError as error:
        return [Finding("disk tier", False, str(error))]
    facts = disk_facts(config, machine, measure=measure)
    if facts is None:
        return [Finding("disk tier", None, "none is configured")]
    asked = config.disk is not None
    needed = gib(facts.limit_bytes) if asked else ""
    return [Finding("disk tier", facts.obstacle is None if asked else None, facts.told(), needed, facts.fix)]
