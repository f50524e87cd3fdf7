"""`kvredis bench workload`: the prompts that hit rates are measured with, to look at or to feed to another engine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvredis.bench.core.prompts import VOCABULARY, PromptPlan, workload
from kvredis.bench.core.shapes import BLOCK_TOKENS
from kvredis.storage.errors import KVRedisError

from .options import writable


@click.command(
    "workload",
    epilog="""\b
Example: kvredis bench workload --input-len 1000 --hit-rate 0.8 --num-prompts 200
Example: kvredis bench workload --input-len 1000 --hit-rate 0.5 --num-prompts 200 --json prompts.json""",
)
@click.option("--input-len", type=click.IntRange(1), required=True, metavar="N", help="Tokens of each prompt.")
@click.option("--hit-rate", type=float, required=True, metavar="H", help="Which part all prompts share, from 0 to 1.")
@click.option("--num-prompts", type=click.IntRange(1), required=True, metavar="N", help="How many prompts.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed, the same tokens.")
@click.option(
    "--vocab-size", type=click.IntRange(1), default=VOCABULARY, show_default=True, help="Tokens are below it."
)
@click.option("--block-tokens", type=click.IntRange(1), default=BLOCK_TOKENS, show_default=True, help="Of one block.")
@click.option(
    "--json",
    "json_path",
    callback=writable,
    metavar="FILE",
    help="Write the prompts as JSON; - is standard output.",
)
def prompts(block_tokens: int, json_path: str | None, **numbers: float) -> None:
    """Make prompts that share a prefix of exactly round(H x N) tokens and differ from the next token on.

    The tokens depend on the numbers given here and on nothing else, on any machine. Prints what they are; --json has
    the tokens too.
    """
    try:
        plan = PromptPlan(**numbers)  # type: ignore[arg-type]
        made = workload(plan, block_tokens)
    except KVRedisError as error:
        raise click.ClickException(str(error)) from error
    if json_path == "-":
        click.echo(json.dumps(made))
        return
    click.echo(f"{plan.num_prompts} prompts of {plan.input_len} tokens below {plan.vocab_size}, seed {plan.seed}")
    click.echo(
        f"shared prefix: {plan.shared_tokens} tokens, {made['full_blocks_shared']} full blocks of {block_tokens}"
    )
    click.echo(f"tokens of its own: {plan.own_tokens} in each prompt")
    click.echo(f"sha256: {made['sha256']}")
    if json_path:
        Path(json_path).write_text(json.dumps(made) + "\n")
        click.echo(f"Prompts: {json_path}")
