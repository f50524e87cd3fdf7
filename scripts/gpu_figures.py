"""Make the figures of a GPU in docs/performance.md again: row by row, each result in FOLDER/NAME.json.

Usage: python scripts/gpu_figures.py FOLDER [NAME ...]     (all of them, within an hour; without FOLDER: lists)

It runs `kvredis bench` of the interpreter that runs it, which needs torch, transformers and, for vllm*, vLLM. The arena
takes 2 MiB hugepages where some are reserved: `sysctl -w vm.nr_hugepages=20000` is enough for all.
"""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Figure(NamedTuple):
    """A command of `kvredis bench`, and the seconds after which it is interrupted."""

    limit_s: int
    words: str


STORING = "store-overhead --tier none,cpu,remote,lane,disk --compute model"
FIGURES = {
    "swap": Figure(200, "swap --repeats 7"),
    "swap-prefill": Figure(120, "swap --shape 8b --chunk-tokens 256 --repeats 9 --beside-prefill"),
    "swap-copies": Figure(60, "swap --shape 8b --chunk-tokens 256 --repeats 9 --beside-copies"),
    "store-overhead": Figure(120, f"{STORING} --budgets 1024"),
    "store-overhead-wide": Figure(300, f"{STORING} --budgets 768,512,256 --repeats 3"),
    "store-overhead-narrow": Figure(200, f"{STORING} --budgets 64,32 --prompts 2 --tokens 2048"),
    "prefill": Figure(200, "prefill --shape 3b"),
    "prefill-auto": Figure(250, "prefill --shape 3b --auto --prompts 6 --repeats 5"),
    "hit-sweep": Figure(
        400,
        "hit-sweep --shape 3b --rates 0,0.5 --chunk-tokens 248 --arms recompute,gpu,cpu,lane --repeats 5 --limit-s 330",
    ),
    "long-prefill": Figure(300, "long-prefill --shape 7b --prompts 4 --outputs 2,16 --repeats 2"),
    "vllm": Figure(400, "vllm --arms none,offloading,lane,lane+layers --repeats 9"),
    "vllm-tiers": Figure(300, "vllm --arms none,offloading,memory,tcp --repeats 5"),
    "pd": Figure(400, "pd"),  # on a host with two GPUs
    "alpha": Figure(120, "alpha"),  # on a host with two GPUs; with one through the host's memory
}
GRACE_S = 20
"""What an interrupted bench may take to end its servers and engines."""


def command(name: str, folder: Path) -> list[str]:
    """What makes a figure."""
    words = shlex.split(FIGURES[name].words.format(folder=shlex.quote(str(folder))))
    return [sys.executable, "-m", "kvredis", "bench", *words, "--json", str(folder / f"{name}.json")]


def made(name: str, folder: Path) -> bool:
    """Make a figure, and say whether it was made."""
    began_s = time.monotonic()
    with subprocess.Popen(command(name, folder)) as process:
        try:
            status = process.wait(FIGURES[name].limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
    print(f"==== {name}: exit {status} after {time.monotonic() - began_s:.0f} s", flush=True)
    return status == 0


def main(arguments: Sequence[str]) -> int:
    """Make what is named, or all; or list them."""
    if not arguments:
        for name, figure in FIGURES.items():
            print(f"{name:<22} kvredis bench {figure.words}")
        return 0
    folder, names = Path(arguments[0]), arguments[1:] or list(FIGURES)
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        print(f"no figure is called {', '.join(unknown)}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not made(name, folder)]
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
