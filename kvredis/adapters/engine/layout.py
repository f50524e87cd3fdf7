"""ChunkLayout: what a chunk of KV looks like, in one value, so that keys, block headers and tensors cannot disagree.

It knows no tensor library: a server, a planner or a command line can size a chunk without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

FORMAT = "kvredis-kv-1"
"""Version of the block's layout and of the key's canonical bytes; part of every fingerprint."""

AXES = "layers,2,tokens,kv_heads,head_dim"
"""Order of a block's axes, slowest first: one layer is one contiguous range, K before V. One plane: 1 for the 2."""


class Dtype(NamedTuple):
    """How one element is stored: its size and its name in a safetensors header."""

    nbytes: int
    safetensors: str


DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {
        "fp16": Dtype(2, "F16"),
        "bf16": Dtype(2, "BF16"),
        "fp32": Dtype(4, "F32"),
        "fp8_e4m3": Dtype(1, "F8_E4M3"),
        "fp8_e5m2": Dtype(1, "F8_E5M2"),
        "u8": Dtype(1, "U8"),  # bytes that only the engine understands: fp8 with its scales beside it, fp4
    }
)
"""The element types that a block may hold, by kvredis' name."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Shape and identity of one rank's KV chunks.

    `kv_heads` are this rank's heads. An engine replaces `chunk_tokens` by its configuration's chunk_size.
    `model` must tell apart any two models whose KV must not be mixed (weights, not only shapes). `planes` is 2 for K
    and V, 1 where there is one vector a token and head: the latent of MLA, or K and V behind each other. `part` says
    which of the model's layers these are where not all, as in vLLM's groups of layers; "" stands for all.
    With `splits_heads` each rank has as many heads as the others and no other one has them: what the ranks of one
    engine store together an engine of more or fewer ranks can read. `span` names the layers of a pipeline's stage among
    those of `part`.
    Raises ValueError for sizes below one, an unknown dtype, other planes or a rank outside the world.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    chunk_tokens: int = 256
    model: str = ""
    rank: int = 0
    world_size: int = 1
    planes: int = 2
    part: str = ""
    splits_heads: bool = False
    span: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "chunk_tokens", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"a chunk layout needs {name} >= 1, not {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown KV dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.planes not in (1, 2):
            raise ValueError(f"a token has K and V or one vector: planes is 1 or 2, not {self.planes}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")

    @property
    def shard(self) -> str:
        """What of a chunk this rank has, as keys spell it: a rank's number, `1/4` where ranks split the heads,
        `1/4:8-15` where there are stages as well."""
        name = f"{self.rank}/{self.world_size}" if self.splits_heads and self.world_size > 1 else f"{self.rank}"
        return f"{name}:{self.span}" if self.span else name

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token: all planes of every layer and head of this rank."""
        return self.planes * self.layers * self.kv_heads * self.head_dim * DTYPES[self.dtype].nbytes

    def chunk_bytes(self, tokens: int | None = None) -> int:
        """Payload bytes of a chunk of `tokens` tokens (a full chunk by default), without the block's header."""
        return self.bytes_per_token * (self.chunk_tokens if tokens is None else tokens)

    def shape(self, tokens: int | None = None) -> tuple[int, int, int, int, int]:
        """(layers, planes, tokens, kv_heads, head_dim), row-major, of a chunk of `tokens` tokens."""
        return (self.layers, self.planes, self.chunk_tokens if tokens is None else tokens, self.kv_heads, self.head_dim)
