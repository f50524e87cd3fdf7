"""`kvredis doctor`: what this machine has, what the configuration asks of it, and the line that mends the difference.

A finding is ok, not ok, or neither (a fact that nothing asked for). Only "not ok" makes the exit status 1.
"""

import importlib.util
import json
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kvredis.backends.config import Config
from kvredis.server.startup import check_options
from kvredis.storage.arena import HugepageMode, Machine
from kvredis.storage.errors import ConfigError
from kvredis.storage.hugepages import (
    HUGEPAGE_BYTES,
    HugepagePool,
    anonymous_thp,
    meminfo,
    pages_needed,
    shmem_thp,
    shmem_thp_usable,
)
from kvredis.storage.limits import gib, memory_obstacle
from kvredis.storage.options import parse_size
from kvredis.storage.pagelock import cuda_driver

from .configuring import check_store, config_file_option, load_config, server_options_of, told_where
from .doctor_disk import disk, disk_facts

FILES_BESIDE_CLIENTS = 32
"""Open files that the server needs besides its connections, as Redis counts them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `ok` None means that nothing asks for it; `fix` is a line to type or to change."""

    name: str
    ok: bool | None
    found: str
    needed: str = ""
    fix: str = ""


@click.group(invoke_without_command=True, epilog="Example: kvredis doctor hugepages --size 5GB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@config_file_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, config_file: Path | None) -> None:
    """Say what this machine has, what the configuration asks of it, and the line that mends it (exit 1 if any)."""
    if ctx.invoked_subcommand is None:
        report(ctx, examine(load_config(config_file), _machine(ctx)), as_json)


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
        else:
            click.echo("not enough; these lines, as root, make room:")
            click.echo(f"  now:         {facts['command']}")
            click.echo(f"  every boot:  {facts['persistent']}")
    ctx.exit(0 if facts["ok"] else 1)


doctor.add_command(disk)


def hugepage_facts(nbytes: int, machine: Machine) -> dict[str, int | str | bool]:
    """Compare the 2 MiB pool with what an arena of `nbytes` needs, with the lines that grow it."""
    pool = HugepagePool.read(machine.sys_root, machine.proc_root)
    pages = pages_needed(nbytes)
    count = pool.pages_to_set(pages)
    sysctl = pool.default_page_bytes == HUGEPAGE_BYTES
    return {
        "bytes": nbytes,
        "pages_needed": pages,
        "page_bytes": HUGEPAGE_BYTES,
        "supported": pool.supported,
        "pool_total": pool.total,
        "pool_free": pool.unpromised,
        "pool_overcommit": pool.overcommit,
        "default_page_bytes": pool.default_page_bytes,
        "ok": pool.available >= pages,
        "command": pool.grow_command(pages),
        "persistent": (
            f"vm.nr_hugepages={count}   (in /etc/sysctl.conf)"
            if sysctl
            else f"hugepagesz=2M hugepages={count}   (on the kernel's command line)"
        ),
    }


def examine(config: Config, machine: Machine) -> list[Finding]:
    """Look at everything that the store and the server depend on. Allocates nothing, and leaves nothing behind."""
    nbytes = config.capacity_bytes
    return [
        _memory(nbytes, machine),
        _hugepages(config, machine),
        _shmem_thp(config, machine),
        Finding("THP (process memory)", None, anonymous_thp(machine.sys_root)),
        _memlock(config),
        _disk(config, machine),
        _open_files(config),
        _server_options(config),
        Finding("uvloop", None, *_uvloop()),
        Finding("GPU driver", None, *_gpu()),
    ]


def report(ctx: click.Context, findings: list[Finding], as_json: bool) -> None:
    """Print the findings and exit: 1 if one is not ok."""
    if as_json:
        click.echo(json.dumps({finding.name: asdict(finding) for finding in findings}, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = {True: "ok", False: "NO", None: "--"}[finding.ok]
            needed = f"; needed: {finding.needed}" if finding.needed else ""
            click.echo(f"{mark}  {finding.name:{width}}  {finding.found}{needed}")
            if finding.fix:
                click.echo(f"    {'':{width}}  {finding.fix}")
    ctx.exit(1 if any(finding.ok is False for finding in findings) else 0)


def _machine(ctx: click.Context) -> Machine:
    """Give the machine that a test handed in, else this one."""
    return ctx.obj if isinstance(ctx.obj, Machine) else Machine()


def _memory(nbytes: int, machine: Machine) -> Finding:
    available = meminfo(machine.proc_root).get("MemAvailable", 0)
    obstacle = memory_obstacle(nbytes, machine.sys_root, machine.proc_root)
    fix = "" if obstacle is None else f"{obstacle}: lower max_local_cpu_size, or use hugepages that the pool has"
    return Finding("memory", obstacle is None, f"{gib(available)} available", gib(nbytes), fix)


def _hugepages(config: Config, machine: Machine) -> Finding:
    facts = hugepage_facts(config.capacity_bytes, machine)
    enough = bool(facts["ok"])
    asked = config.hugepage_mode is HugepageMode.REQUIRE
    found = f"{facts['pool_total']} pages of 2 MiB, {facts['pool_free']} free"
    return Finding(
        "hugepages",
        enough or (False if asked else None),
        found if facts["supported"] else "none in this kernel",
        f"{facts['pages_needed']} pages",
        "" if enough else str(facts["command"]),
    )


def _shmem_thp(config: Config, machine: Machine) -> Finding:
    usable = shmem_thp_usable(machine.sys_root)
    asked = config.hugepage_mode is HugepageMode.THP
    fix = "" if usable else "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Finding(
        "THP (memfd)", usable if asked else None, shmem_thp(machine.sys_root), "advise" if asked else "", fix
    )


def _memlock(config: Config) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    enough = unlimited or soft >= config.capacity_bytes or os.geteuid() == 0
    found = "unlimited" if unlimited else f"{soft // 1024} KiB" + (" (root may exceed it)" if os.geteuid() == 0 else "")
    return Finding(
        "memlock",
        enough if config.page_lock else None,
        found,
        f"{config.capacity_bytes // 1024} KiB",
        "" if enough else "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit file",
    )


def _disk(config: Config, machine: Machine) -> Finding:
    try:
        if config.remote_url is None:  # else it is an engine's configuration, and those may keep nothing
            check_store(config)
    except ConfigError as error:
        return Finding("disk tier", False, str(error))
    facts = disk_facts(config, machine)
    if facts is None:
        return Finding("disk tier", None, "none is configured")
    asked = config.disk is not None
    needed = gib(facts.limit_bytes) if asked else ""
    return Finding("disk tier", facts.obstacle is None if asked else None, facts.told(), needed, facts.fix)


def _open_files(config: Config) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.maxclients + FILES_BESIDE_CLIENTS
    enough = hard == resource.RLIM_INFINITY or hard >= needed
    return Finding(
        "open files",
        enough,
        "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard}",
        f"{needed} for maxclients {config.maxclients}",
        "" if enough else f"ulimit -Hn {needed}, or LimitNOFILE={needed} in the unit file",
    )


def _server_options(config: Config) -> Finding:
    """Certificates and settings, which `kvredis serve` would refuse to start with."""
    try:
        with told_where(config):
            check_options(server_options_of(config))
    except ConfigError as error:
        return Finding("server options", False, str(error))
    tls = f"TLS with {config.tls_cert_file}" if config.tls_port else "no TLS"
    return Finding("server options", True, f"usable, {tls}")


def _uvloop() -> tuple[str, str, str]:
    if importlib.util.find_spec("uvloop") is not None:
        return "installed", "", ""
    return "not installed", "", f"{sys.executable} -m pip install uvloop"


def _gpu() -> tuple[str, str, str]:
    if cuda_driver() is None:
        return "no driver library (libcuda.so.1)", "", ""
    return "driver library present", "", ""
