"""Numbers in a command line: finite ones, since click's own range lets nan through, which no bound excludes."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A number within bounds, and no nan or infinity, which no clock waits for and no JSON knows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click's; fails for what is not finite."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number
