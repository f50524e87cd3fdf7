"""Prompts with a known share of tokens in common: the workload that hit rates are measured with.

Every prompt begins with the same `shared_tokens` tokens and goes on with tokens of its own. The first own token differs
from prompt to prompt, so that no two prompts share more than they were asked to.

The generator, so that a reader can make the same tokens in any language: Mersenne Twister (MT19937), seeded with
`seed` as CPython's random.Random(seed) does; a token is floor(random() x vocab_size), where random() is the 53-bit
double that CPython promises never to change. Tokens are drawn in order: the shared prefix, then prompt by prompt what
is its own; after these, a first own token that an earlier prompt has is drawn anew until none has it. So a smaller hit
rate's prefix is the beginning of a larger one's, and fewer prompts are the first of many.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from .errors import BenchError

SCHEMA: Final = "kvredis.bench.workload/1"
VOCABULARY: Final = 32_000
_VOCABULARY_MAX: Final = 2**32  # the digest writes a token as four bytes


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """How many prompts of how many tokens, and which part of each is common to all.

    Raises BenchError when a number is out of its range, or when there are more prompts than the vocabulary has first
    tokens to tell them apart by.
    """

    input_len: int
    hit_rate: float
    num_prompts: int
    seed: int = 0
    vocab_size: int = VOCABULARY

    def __post_init__(self) -> None:
        for name in ("input_len", "num_prompts", "vocab_size"):
            if getattr(self, name) < 1:
                raise BenchError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.vocab_size > _VOCABULARY_MAX:
            raise BenchError(f"vocab_size must be at most {_VOCABULARY_MAX}, not {self.vocab_size}")
        if self.seed < 0:
            raise BenchError(f"seed must be at least 0, not {self.seed}: -1 would be the same seed as 1")
        if not 0 <= self.hit_rate <= 1:
            raise BenchError(f"hit_rate must be from 0 to 1, not {self.hit_rate}")
        if self.own_tokens and self.num_prompts > self.vocab_size:
            raise BenchError(
                f"{self.num_prompts} prompts cannot all go on differently with a vocabulary of {self.vocab_size} tokens"
            )

    @property
    def shared_tokens(self) -> int:
        """Tokens that all prompts begin with: hit_rate x input_len, rounded, a half to the even neighbour."""
        return round(self.hit_rate * self.input_len)

    @property
    def own_tokens(self) -> int:
        """Tokens that each prompt goes on with."""
        return self.input_len - self.shared_tokens


class Workload(TypedDict):
    """What `kvredis bench workload --json` writes. `prompts` may be left out: the rest says how to make them."""

    schema: str
    input_len: int
    hit_rate: float
    num_prompts: int
    seed: int
    vocab_size: int
    shared_tokens: int
    full_blocks_shared: int  # blocks of `block_tokens` tokens that lie wholly in the shared prefix
    block_tokens: int
    sha256: str  # see digest()
    prompts: list[list[int]]


def prompts(plan: PromptPlan) -> Iterator[list[int]]:
    """Yield the plan's prompts, each a new list of `input_len` tokens from 0 to vocab_size - 1."""
    source = random.Random(plan.seed)
    shared = _tokens(source, plan.shared_tokens, plan.vocab_size)
    firsts: set[int] = set()
    for _ in range(plan.num_prompts):
        own = _tokens(source, plan.own_tokens, plan.vocab_size)
        while own and own[0] in firsts:
            own[0] = int(source.random() * plan.vocab_size)
        firsts.update(own[:1])
        yield shared + own


def digest(made: Iterable[Sequence[int]]) -> str:
    """Give the SHA-256 of prompts: each as its length and then its tokens, little-endian unsigned 32-bit numbers."""
    digested = hashlib.sha256()
    for prompt in made:
        digested.update(struct.pack(f"<{len(prompt) + 1}I", len(prompt), *prompt))
    return digested.hexdigest()


def workload(plan: PromptPlan, block_tokens: int) -> Workload:
    """Make the prompts and what is worth knowing of them."""
    made = list(prompts(plan))
    return Workload(
        schema=SCHEMA,
        input_len=plan.input_len,
        hit_rate=plan.hit_rate,
        num_prompts=plan.num_prompts,
        seed=plan.seed,
        vocab_size=plan.vocab_size,
        shared_tokens=plan.shared_tokens,
        full_blocks_shared=plan.shared_tokens // block_tokens,
        block_tokens=block_tokens,
        sha256=digest(made),
        prompts=made,
    )


def _tokens(source: random.Random, count: int, vocab_size: int) -> list[int]:
    return [int(source.random() * vocab_size) for _ in range(count)]
