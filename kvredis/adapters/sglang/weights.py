"""The identity of an SGLang engine's weights, and its change when they are updated.

SGLang gives a storage backend no model. It makes the backend beneath its Scheduler, though, when it starts as well as
when a backend is attached later, so the scheduler is on the stack, and its workers have the models (`caller`). All
changes of weights that SGLang knows (from disk, tensors, a process group, IPC, or by RDMA between begin and end) go
through `model_runner.weight_updater`, which is replaced by one that tells of them first.

SGLang does not tell its storage of new weights, it only flushes its own cache: between the two, pages of the old
weights still lie in host memory. So from the beginning of a change the store is left alone, until the host pool is
cleared, which SGLang does when its storage threads have ended; then the keys are those of the new weights.
"""

import hashlib
import json
import logging
import sys
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

CHANGES: Final = frozenset({
    "update_weights_from_disk", "update_weights_from_distributed", "load_weights_from_distributed",
    "update_weights_from_tensor", "update_weights_from_ipc", "begin_weight_update", "end_weight_update",
})  # fmt: skip
"""Methods of SGLang's WeightUpdater (0.5.17 to 0.5.23) that write to weights."""
CHUNK_WORDS: Final = 2**21
"""Words of 8 bytes that are summed at once: with its temporaries 64 MiB of the model's device."""
MIX: Final = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""SplitMix64's constants (Steele, Lea and Flood, 2014), as signed numbers."""
PAUSED_TAG: Final = "weights"
"""How SGLang calls the weights in release_memory_occupation."""
WITHOUT_MEANING: Final = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Of a model's configuration, what its KV does not depend on; the dtype is that of the weights."""


def caller() -> Any:
    """The SGLang Scheduler beneath whose calls this runs; None where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if getattr(owner, "tp_worker", None) is not None:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


class EngineWeights:
    """The weights of the models of `scheduler`. `on_change` is called before they are written to."""

    def __init__(self, scheduler: Any, on_change: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._runners = _runners(scheduler)
        self._on_change = on_change
        self.facts = self.agreed([self._told("target"), self._told("draft")])
        """What the target's keys and a draft's keys carry, the same on all ranks of tensor parallelism."""
        for role, runner in self._runners:
            self._watch(role, runner)

    @property
    def are_away(self) -> bool:
        """Whether release_memory_occupation has taken the weights from the device: no byte of them may be read."""
        updater = getattr(self._scheduler, "weight_updater", None)
        return PAUSED_TAG in (getattr(updater, "offload_tags", None) or ())

    def refresh(self) -> None:
        """Look at the weights again; all ranks must do it together."""
        self.facts = self.agreed([self._told("target"), self._told("draft")])

    def agreed(self, mine: list[str]) -> list[str]:
        """One value for all ranks of each of `mine`, which every rank must ask for at the same time."""
        group = getattr(self._scheduler, "tp_cpu_group", None)
        if group is None or torch.distributed.get_world_size(group) == 1:
            return mine
        everyones: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everyones, mine, group=group)
        return [hashlib.sha256(" ".join(each).encode()).hexdigest()[:32] for each in zip(*everyones, strict=True)]

    def _told(self, role: str) -> str:
        models = [runner.model for name, runner in self._runners if name.startswith(role)]
        if not models:
            return ""
        try:
            whole = hashlib.sha256(_configuration(self._scheduler).encode() if role == "target" else b"")
            for model in models:
                whole.update(checksum(named_weights(model)).encode())
        except Exception:
            logger.exception("The weights cannot be read: this engine's KV is found by no other")
            return uuid.uuid4().hex
        return whole.hexdigest()[:32]

    def _watch(self, role: str, runner: Any) -> None:
        updater = getattr(runner, "weight_updater", None)
        if not any(hasattr(updater, name) for name in CHANGES):
            logger.warning(
                "This SGLang does not tell of new weights of its %s model: end the engine where they change", role
            )
            return
        if isinstance(updater, WatchedUpdater):  # a backend that was attached before
            updater = updater.watched
        runner.weight_updater = WatchedUpdater(updater, self._on_change)


class WatchedUpdater:
    """SGLang's WeightUpdater `watched`, which calls `on_change` before it writes to weights."""

    def __init__(self, watched: Any, on_change: Callable[[], None]) -> None:
        self.watched = watched
        self._on_change = on_change

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.watched, name)
        if name not in CHANGES:
            return found

        def told(*arguments: Any, **named: Any) -> Any:
            self._on_change()
            return found(*arguments, **named)

        return told


def named_weights(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The parameters of `model`, and those buffers that a checkpoint would have; others follow from its
    configuration."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def checksum(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """32 hexadecimal digits of names, dtypes, shapes and all bytes, which are read where they lie.

    A tensor's sum is of its words, each mixed with its place, modulo 2 ** 64: one changed word always changes it.
    """
    sums = [
        (name, str(tensor.dtype), tuple(tensor.shape), _sum(tensor.detach()))
        for name, tensor in sorted(weights, key=lambda pair: pair[0])
    ]
    # one wait for the device, behind all of them
    told = [(name, dtype, shape, int(total)) for name, dtype, shape, total in sums]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=whole.device)
    for start in range(0, whole.numel(), CHUNK_WORDS * 8):
        part = whole[start : start + CHUNK_WORDS * 8]
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8))
        words = part.view(torch.int64)
        places = torch.arange(start // 8, start // 8 + words.numel(), dtype=torch.int64, device=words.device)
        total += _mixed(words ^ _mixed(places)).sum()
    return total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer, a bijection of 64-bit words."""
    words = words * MIX[0]
    words = (words ^ _shifted(words, 30)) * MIX[1]
    words = (words ^ _shifted(words, 27)) * MIX[2]
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right with zeros: torch's own shift of signed words would let in the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _runners(scheduler: Any) -> list[tuple[str, Any]]:
    """Roles ("target", or one that begins with "draft") and ModelRunners of a scheduler."""
    found = [("target", scheduler.tp_worker.model_runner)]
    draft = getattr(scheduler, "draft_worker", None)
    if draft is None:
        return found
    if callable(getattr(draft, "weight_update_runners", None)):  # 0.5.23
        return found + list(draft.weight_update_runners())
    inner = getattr(draft, "_draft_worker", None)
    runner = getattr(draft, "draft_model_runner", None) or getattr(inner, "draft_runner", None)  # 0.5.17
    return [*found, ("draft", runner)] if runner is not None else found


def _configuration(scheduler: Any) -> str:
    """The model's configuration as JSON. Two of one model's weights may differ in it (rope, the window)."""
    configuration = getattr(getattr(scheduler, "model_config", None), "hf_config", None)
    if configuration is None:
        return ""
    facts = {name: value for name, value in configuration.to_dict().items() if name not in WITHOUT_MEANING}
    return json.dumps(facts, sort_keys=True, default=str)
