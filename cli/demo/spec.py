"""What the demo's processes tell each other, as JSON files; free of torch, because the parent needs none."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes; its KV is 2 * layers * kv_heads * head_dim * 4 bytes per token in float32."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


@dataclass(frozen=True, slots=True)
class Spec:
    """What the parent asks for: `runs` times the prompt `ids`. `config` are overrides of the configuration's defaults;
    with `redis_port` the same KV is put into the plain Redis there and loaded from it as well."""

    shape: Shape
    seed: int
    ids: list[int]
    max_new_tokens: int
    vocabulary: int
    config: dict[str, Any]
    runs: int
    redis_port: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Spec":
        """The spec that the parent wrote as JSON of `asdict`."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


@dataclass(frozen=True, slots=True)
class Run:
    """What one request saw. `ttft_s` is from token ids in hand to the first new token, with hash, lookup and load;
    `load_s` has what copies into the model's cache took, `copy_s`, in it."""

    ttft_s: float
    lookup_s: float
    copy_s: float
    total_s: float
    prompt_tokens: int
    hit_tokens: int
    need_to_load: int
    loaded_tokens: int
    loaded_bytes: int
    load_s: float
    stored_tokens: int
    store_s: float
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Beside:
    """What the same KV takes by other ways: one copy within memory, and GETs of a plain Redis (None: not asked)."""

    memcpy_s: float
    redis_s: float | None
