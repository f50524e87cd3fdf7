"""Which weights KV is of: it depends on them bit by bit, and they change in place.

A worker adds up its tensors (parameters and persistent buffers; LoRA adapters beside them are in a request's own keys).
Bits are taken in tiles of 8 rows by 128 bytes. Within a tile every word has a place; tiles are mixed and added up in
any order, so that what ranks of a tensor-parallel engine hold of a tensor adds up to what one rank alone would have:

    sum      of tiles: fmix64(sum of g(word * odd(place in the tile))), g(y) = y ^ (y >> 32), modulo 2^64; of zeros 0
    table    by name of the tensor, its dtype and its sum on this rank
    identity the first 16 hex digits of sha256 over name, dtype and sum of all tensors, sorted; the sum is that of all
             ranks, or, where all ranks have the same (a tensor that each holds whole), that one

Engines of different tensor-parallel sizes find the same identity where shards are cut at multiples of 8 rows or 128
bytes of a row, which real models' are, where padding is zeros, and where weights are kept as loaded. They differ where
heads are repeated on several ranks, where shards that are alike by chance (all ones) are taken for copies, and where a
kernel wants its weights packed by the size of the shard. Then nothing is shared, and nothing is wrong. What a sum does
not see is whole tiles that change places within one tensor.

To add up 16 GB takes a GPU some tens of milliseconds and a CPU seconds, so it is done at the start, after whatever may
have changed the weights, and when a probe differs: a row, a column and more of every tensor, which an optimizer's step,
load_weights or a merged adapter cannot leave as they were.

Keys name the weights (KeyWeights), so that engines with others do not find them and those with the same do: new weights
are a new name, nothing is deleted, and weights that come back find what is theirs. FreshPages knows which of the
engine's pages hold KV of the present ones. Workers tell which weights they compute with (WeightsWatch), at the start
and whenever it is not what a step's keys say.
"""

import contextlib
import ctypes
import hashlib
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from weakref import ref

import torch
from torch.nn.functional import pad

from kvredis.adapters.engine.tensors import DeviceEvent, event_on, outside_pools

logger = logging.getLogger(__name__)

TILE_ROWS = 8
TILE_WORDS = 16
WORD_BYTES = 8
CHUNK_BYTES = {"cuda": 32 * 1024 * 1024, "cpu": 1024 * 1024}
"""Of a tensor at a time: three temporaries of that size are taken. It should stay in the processor's cache."""
PROBE_WORDS_MAX = {"cuda": 4 * 1024 * 1024, "cpu": 512 * 1024}
"""Of all tensors on a device, 4 bytes each: 32 MiB of places on a GPU."""
PROBE_WORDS_LEAST = 256
PROBE_BYTES = 4
DIGITS = 16
_MASK = (1 << 64) - 1


class TensorSum(NamedTuple):
    """What a rank has of one tensor."""

    dtype: str
    total: int


Table = Mapping[str, TensorSum]
"""Of one rank, by the tensor's name."""


def digest_of(table: Table) -> str:
    """What tells one rank's weights apart: 16 hex digits."""
    spelled = "\n".join(f"{name} {one.dtype} {one.total:x}" for name, one in sorted(table.items()))
    return hashlib.sha256(spelled.encode()).hexdigest()[:DIGITS]


def identity_of(tables: Sequence[Table]) -> str:
    """What tells the weights of a whole engine apart, from the tables of all its ranks: 16 hex digits."""
    whole: dict[str, TensorSum] = {}
    for name in sorted({name for table in tables for name in table}):
        found = [table[name] for table in tables if name in table]
        total = found[0].total if len(set(found)) == 1 else sum(each.total for each in found) & _MASK
        whole[name] = TensorSum(found[0].dtype, total)
    return digest_of(whole)


class Weight(NamedTuple):
    """A tensor that is part of what a model computes, and where the model has it."""

    name: str
    module: torch.nn.Module
    key: str
    tensor: torch.Tensor


def weights_of(models: Sequence[torch.nn.Module]) -> Iterator[Weight]:
    """Every parameter and persistent buffer once. Modules that wrap one for LoRA adapters leave no trace in names."""
    seen: set[int] = set()
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in seen:
                    continue
                if tensor.device.type != "meta":
                    seen.add(id(tensor))
                    place = f"{path}.{key}".replace(".base_layer.", ".")
                    yield Weight(f"{number}:{place}" if number else place, module, key, tensor)


# -- sums of all bits --------------------------------------------------------------------------------------------------


def table_of(models: Sequence[torch.nn.Module]) -> dict[str, TensorSum]:
    """The sums of all weights, which are added up behind what the current stream was given; waits for them."""
    names, totals = [], []
    with torch.no_grad():
        for weight in weights_of(models):
            names.append((weight.name, str(weight.tensor.dtype).removeprefix("torch.")))
            totals.append(sum_of(weight.tensor.detach()))
    by_device: dict[torch.device, list[int]] = {}
    for at, total in enumerate(totals):
        by_device.setdefault(total.device, []).append(at)
    found: dict[int, int] = {}
    for places in by_device.values():  # one copy for all: each waits
        values = torch.stack([totals[at] for at in places]).tolist()
        found |= {at: value & _MASK for at, value in zip(places, values, strict=True)}
    return {name: TensorSum(dtype, found[at]) for at, (name, dtype) in enumerate(names)}


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of one tensor's tiles, int64, on its device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    odd = _odd(tensor.device)
    for words in _rows_of_words(tensor):
        words = _padded(words, TILE_WORDS, TILE_ROWS)
        mixed = words.view(-1, TILE_ROWS, words.shape[1] // TILE_WORDS, TILE_WORDS) * odd
        mixed ^= mixed >> 32
        total += _mixed(mixed.sum((1, 3))).sum()
    return total


def _rows_of_words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in runs of whole tiles' rows: (rows, words), int64, what a row lacks of a whole word being zeros."""
    if tensor.ndim == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous():
        tensor = tensor.t()  # as it lies: quantized weights are turned when they are loaded
    table = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor
    width = math.prod(table.shape[1:])
    nbytes = max(width * table.dtype.itemsize, 1)
    limit = CHUNK_BYTES.get(tensor.device.type, CHUNK_BYTES["cpu"])
    if table.is_contiguous():
        table = table.reshape(-1, table.shape[-1])
        nbytes = max(table.shape[-1] * table.dtype.itemsize, 1)
    step = max(limit // nbytes // TILE_ROWS, 1) * TILE_ROWS
    columns = max(limit // TILE_ROWS // (TILE_WORDS * WORD_BYTES), 1) * TILE_WORDS * WORD_BYTES
    for start in range(0, table.shape[0], step):
        rows = table[start : start + step].contiguous().flatten(1).view(torch.uint8)  # copied where strides ask for it
        for at in range(0, rows.shape[1], columns):  # one row may be all there is
            part = _padded(rows[:, at : at + columns], WORD_BYTES)
            lies = part.is_contiguous() and not (part.storage_offset() % WORD_BYTES or part.stride(0) % WORD_BYTES)
            part = part if lies else part.clone(memory_format=torch.contiguous_format)
            yield part.view(torch.int64)


def _padded(table: torch.Tensor, columns: int, rows: int = 1) -> torch.Tensor:
    """Behind it zeros, up to multiples of these. torch's pad copies though there is nothing to add."""
    right, below = -table.shape[1] % columns, -table.shape[0] % rows
    return pad(table, (0, right, 0, below)) if right or below else table


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's fmix64 of int64, by shifts that bring zeros in from the left; of 0 it is 0."""
    value = (value ^ _shifted(value, 33)) * -49064778989728563  # 0xff51afd7ed558ccd
    value = (value ^ _shifted(value, 33)) * -4265267296055464877  # 0xc4ceb9fe1a85ec53
    return value ^ _shifted(value, 33)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


_ODD: dict[torch.device, torch.Tensor] = {}


def _odd(device: torch.device) -> torch.Tensor:
    """(8, 1, 16) odd numbers of 64 bits, one for each place in a tile."""
    found = _ODD.get(device)
    if found is None:
        digests = [hashlib.sha256(b"tile %d" % at).digest() for at in range(TILE_ROWS * TILE_WORDS)]
        numbers = [int.from_bytes(digest[:WORD_BYTES], "little", signed=True) | 1 for digest in digests]
        there = torch.tensor(numbers, dtype=torch.int64).view(TILE_ROWS, 1, TILE_WORDS)
        found = _ODD[device] = outside_pools(lambda: there.to(device))
    return found


# -- probes ------------------------------------------------------------------------------------------------------------


_Known = tuple[ref[torch.nn.Module], str, str, ref[torch.Tensor], int, int | None]
"""A tensor as it was when the weights were added up: its module, which of its dictionaries has it under which key, its
address, and how often torch has counted a write, None for one of inference mode, where torch does not. Nothing is kept
alive: a model that another one takes the place of is to be freed."""


def _known(weight: Weight) -> _Known:
    held = "_buffers" if weight.key in weight.module._buffers else "_parameters"
    tensor = weight.tensor
    with torch._C.DisableTorchFunctionSubclass():  # as it is asked later
        version = None if tensor.is_inference() else tensor._version
        return ref(weight.module), held, weight.key, ref(tensor), tensor.data_ptr(), version


def _are_same(every: Sequence[_Known]) -> bool:
    """Whether they are there still, and were not written through torch."""
    # WHY without: vLLM's parameters have a __torch_function__, which each question would call. Of 198 tensors 405 us
    # became 40, and the engine waits.
    with torch._C.DisableTorchFunctionSubclass():
        for module, held, key, known, address, version in every:
            tensor: torch.Tensor | None = getattr(module(), held, {}).get(key)
            if tensor is None or tensor is not known() or tensor.data_ptr() != address:
                return False
            if version is not None and tensor._version != version:
                return False
    return True


@dataclass(slots=True)
class _Window:
    """All memory of a device from the lowest tensor on, as words of 4 bytes, and the places in it that are probed."""

    words: torch.Tensor
    places: torch.Tensor

    def read(self) -> torch.Tensor:
        """A sum of what is there, in which every place has a weight of its own."""
        found = self.words[self.places].to(torch.int64) * (self.places | 1)
        found ^= found >> 32
        return found.sum()


class Probe:
    """A look at a sample of the weights, on its way; `result` waits for it, in whatever thread. `here` is page-locked
    memory for it, which goes to `free` when the look is not wanted any more: taking such memory anew may take a
    millisecond of a step."""

    def __init__(self, values: Sequence[torch.Tensor], here: torch.Tensor, free: deque[torch.Tensor]) -> None:
        self._event: DeviceEvent | None = None
        self._here, self._free = here, free
        for at, value in enumerate(values):
            here[at : at + 1].copy_(value.view(1), non_blocking=True)
            if value.device.type == "cuda":
                self._event = DeviceEvent(event_on(torch.cuda.current_stream(value.device)), value.device)

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the device failed
            if self.done():
                self._free.append(self._here)

    def done(self) -> bool:
        """Whether `result` waits for nothing."""
        return self._event is None or self._event.query()

    def result(self) -> tuple[int, ...]:
        """What was seen. Raises RuntimeError when the device failed."""
        if self._event is not None:
            self._event.synchronize()
        return tuple(self._here.tolist())


class Prober:
    """Looks at a sample of tensors that stay where they are."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = [ref(model) for model in models]
        with torch.no_grad():
            weights = list(weights_of(models))
            self._known = list(map(_known, weights))
            self._windows = list(_opened([each.tensor for each in weights]))
        self._free: deque[torch.Tensor] = deque()

    def probe(self, models: Sequence[torch.nn.Module]) -> Probe | None:
        """A look behind what the current stream was given; None where a model or a tensor is another, or was written
        through torch. Takes some tenths of a millisecond, and waits for nothing."""
        if [model() for model in self._models] != list(models) or not _are_same(self._known):
            return None
        with torch.no_grad():
            values = [window.read() for window in self._windows]
            try:
                here = self._free.popleft()
            except IndexError:
                on_gpu = any(value.device.type == "cuda" for value in values)
                here = torch.empty(len(values), dtype=torch.int64, pin_memory=on_gpu)
            return Probe(values, here, self._free)


def _opened(tensors: Sequence[torch.Tensor]) -> Iterator[_Window]:
    """A window for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, mine in by_device.items():
        limit = PROBE_WORDS_MAX.get(device.type, PROBE_WORDS_MAX["cpu"])
        most = max(limit // len(mine), PROBE_WORDS_LEAST)
        base = min(tensor.data_ptr() for tensor in mine) // PROBE_BYTES
        here = torch.cat([sampled_words(each, most) + (each.data_ptr() // PROBE_BYTES - base) for each in mine])
        if here.numel():
            words = _window(base * PROBE_BYTES, int(here.max()) + 1, device)
            yield _Window(words, outside_pools(partial(here.to, device)))


def sampled_words(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Which of a tensor's words of 4 bytes, as they lie in memory, a probe looks at: a row, a column, and others."""
    if tensor.data_ptr() % PROBE_BYTES or not (tensor.is_contiguous() or tensor.t().is_contiguous()):
        return torch.empty(0, dtype=torch.int64)  # none that a model's weights are
    count = tensor.nbytes // PROBE_BYTES
    if count <= most:
        return torch.arange(count)
    lies = tensor if tensor.is_contiguous() else tensor.t()
    width = max(lies.shape[-1] * lies.dtype.itemsize // PROBE_BYTES, 1)
    rows = max(count // width, 1)
    row = torch.arange(min(width, most // 2)) + rows // 2 * width
    # Rows are stepped through from end to end where there are too many: each expert of a layer has many.
    column = torch.linspace(0, rows - 1, min(rows, most // 2), dtype=torch.float64).long() * width + width // 3
    return torch.cat([row, column])[:most].clamp(max=count - 1)


class _Memory:
    """Device memory by its address, as __cuda_array_interface__ describes it."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {"shape": (words,), "typestr": "<i4", "data": (address, False), "version": 2}


def _window(address: int, words: int, device: torch.device) -> torch.Tensor:
    """Memory from `address` on, most of which is not ours to read, as a tensor."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.as_tensor(_Memory(address, words), device=device)
    return torch.frombuffer((ctypes.c_char * (words * PROBE_BYTES)).from_address(address), dtype=torch.int32)


# -- what a worker knows -----------------------------------------------------------------------------------------------


class Check:
    """Whether a step's keys are of the weights that the step computes with. Asked by the engine and by threads that
    move KV."""

    def __init__(self, watch: "WeightsWatch", number: int, probe: Probe | None, *, holds: bool) -> None:
        self._watch = watch
        self._number = number
        self._probe = probe
        self._holds = holds

    def done(self) -> bool:
        """Whether `holds` waits for nothing."""
        return self._probe is None or self._probe.done()

    def holds(self) -> bool:
        """Wait for the answer; False also where the device failed."""
        probe = self._probe
        if probe is not None:
            seen = None
            with contextlib.suppress(RuntimeError):
                seen = probe.result()
            self._holds = self._watch.saw(self._number, seen)
            self._probe = None
        return self._holds


@dataclass(slots=True)
class WeightsReport:
    """What a worker tells of its weights behind a step: its digest, its table where the scheduler does not have it, and
    the first step that is known to have been computed with them."""

    digest: str
    since: int
    table: Table | None = None


@dataclass(slots=True)
class WeightsWatch:
    """One rank's weights: what they are, and whether they still are that. `models` gives the modules, none where they
    cannot be found: then keys are of this process alone, until its weights may have changed.

    `begin` is the engine's; what it returns may be asked by any thread.
    """

    models: Callable[[], Sequence[torch.nn.Module]]
    table: Table = field(default_factory=dict)
    digest: str = ""
    _prober: Prober | None = None
    _seen: tuple[int, ...] | None = None
    _is_suspect: bool = False
    _differed: tuple[int, tuple[int, ...] | None] | None = None
    """The first step whose probe was another, and what it saw."""
    _report: WeightsReport | None = None

    def look(self) -> Table:
        """Add all of it up, unless that was done."""
        if not self.digest:
            self._add_up()
        return self.table

    def suspect(self) -> None:
        """Suspect that the weights are others by the next step."""
        self._is_suspect = True

    @property
    def is_suspect(self) -> bool:
        """Whether the next step adds all of it up."""
        return self._is_suspect

    def begin(self, number: int, digest: str, *, is_full: bool = False) -> Check:
        """Compare the weights as they are now with those that a step's keys are of. Adds all of it up, and waits for
        that, where they may have changed."""
        if not self.digest or is_full or self._is_suspect:
            since = self._looked_again(number)
            table = None if self.digest == digest else self.table
            self._report = WeightsReport(self.digest, since, table)
            return Check(self, number, None, holds=self.digest == digest)
        if self.digest != digest:
            return Check(self, number, None, holds=False)  # the scheduler has not heard yet
        models = self.models()
        probe = None if self._prober is None else self._prober.probe(models)
        if probe is None and models:
            return self.begin(number, digest, is_full=True)
        return Check(self, number, probe, holds=True)

    def failed(self) -> Check:
        """The answer where nothing could be compared."""
        return Check(self, 0, None, holds=False)

    def saw(self, number: int, seen: tuple[int, ...] | None) -> bool:
        """Hear what a step's probe has seen, and say whether it is what was there when all was added up."""
        if seen is not None and seen == self._seen:
            return True
        if self._differed is None or number < self._differed[0]:
            self._differed = number, seen
        self._is_suspect = True
        return False

    def report(self) -> WeightsReport | None:
        """What is to be told behind this step, once."""
        report, self._report = self._report, None
        return report

    def _looked_again(self, number: int) -> int:
        """Add all of it up; the first step that has been computed with that."""
        differed, self._differed, self._is_suspect = self._differed, None, False
        self._add_up()
        # What a probe saw there is what it sees now: between the two nothing has changed.
        return differed[0] if differed is not None and differed[1] == self._seen else number

    def _add_up(self) -> None:
        models = self.models()
        self._prober, self._seen = None, None
        self.table = table_of(models) if models else {"unknown": TensorSum("", secrets.randbits(64))}
        self.digest = digest_of(self.table)
        if models:
            try:
                self._prober = Prober(models)
                probe = self._prober.probe(models)
                self._seen = None if probe is None else probe.result()
            except Exception as error:  # whatever a device says to a tensor that is none of torch's: it is slower
                logger.warning("The model's weights are added up whole in each step that moves KV: %s", error)
                self._prober = None


WAIT_STEPS_MAX = 64
"""So many steps after a reset the workers' answer is waited for; an answer comes with the first. Then nothing is
loaded until it is there."""
STEPS_MAX = 16
"""Of which it is remembered what they wrote: more than are scheduled ahead of their results."""

Pages = frozenset[tuple[int, int]]
"""The engine's pages, by group."""


class KeyWeights:
    """What keys say of the weights. `tables` are the workers', by rank; without any nothing is said or compared."""

    def __init__(self, tables: Mapping[int, Table]) -> None:
        self.epoch = 0
        """How often keys have become others."""
        self.digests: tuple[str, ...] = ()
        """Of each rank, what a step's keys expect it to have."""
        self._tables = dict(tables)
        self._identity = self._salt = ""
        self._unheard: set[int] = set()
        self._asks = self._forgets = False
        self._steps_waited = 0
        self._take()

    @property
    def suffix(self) -> str:
        """What follows the model's name in keys."""
        weights = f"+w{self._identity}" if self._identity else ""
        return weights + (f"+reset{self._salt}" if self._salt else "")

    @property
    def is_waiting(self) -> bool:
        """Whether it is being found out which weights there are now."""
        return bool(self._unheard) and self._steps_waited <= WAIT_STEPS_MAX

    @property
    def is_unknown(self) -> bool:
        """Whether no worker has told in time."""
        return bool(self._unheard) and not self.is_waiting

    def reset(self, *, forgets: bool) -> None:
        """Take the weights for others from now on. Where they are the same, and the engine `forgets`, its keys become
        its own."""
        self._forgets |= forgets
        self._unheard, self._steps_waited, self._asks = set(self._tables), 0, bool(self._tables)
        if not self._tables:
            self._forget()

    def step(self) -> bool:
        """A step goes to the workers: whether they are to look at all of their weights."""
        asks, self._asks = self._asks, False
        self._steps_waited += bool(self._unheard)
        return asks

    def heard(self, reports: Mapping[int, WeightsReport]) -> int | None:
        """What workers have told, by rank. Where the weights have become others: the first step that was computed with
        these on all ranks."""
        changed = {rank: report for rank, report in reports.items() if report.table is not None}
        self._unheard -= reports.keys()
        before = self._identity
        self._tables |= {rank: report.table for rank, report in changed.items() if report.table is not None}
        self._take()
        if self._identity != before:
            self.epoch += 1
            self._salt, self._forgets = "", False
            return max(report.since for report in changed.values())
        if self._forgets and not self._unheard:
            self._forget()
        return None

    def _forget(self) -> None:
        if self._forgets:
            self._forgets, self._salt = False, secrets.token_hex(4)
            self.epoch += 1

    def _take(self) -> None:
        tables = [table for _, table in sorted(self._tables.items())]
        self._identity = identity_of(tables) if tables else ""
        self.digests = tuple(map(digest_of, tables))


class FreshPages:
    """Which of the engine's pages hold KV that the present weights have computed. Its own prefix cache may hold others:
    what is computed behind them must not be stored under keys of these weights."""

    def __init__(self) -> None:
        self._pages: set[tuple[int, int]] | None = None  # all of them, until the weights change
        self._steps: deque[tuple[int, list[tuple[str, int, bool, Pages]]]] = deque(maxlen=STEPS_MAX)
        self._now: list[tuple[str, int, bool, Pages]] = []

    @property
    def are_all(self) -> bool:
        """Whether the weights have never changed."""
        return self._pages is None

    def cover(self, pages: Iterable[tuple[int, int]]) -> bool:
        """Whether all of these are."""
        return self._pages is None or self._pages.issuperset(pages)

    def written(self, request: str, computed: int, pages: Pages, *, anew: bool, is_stale: bool) -> None:
        """A step gives a request these pages, to write them behind its first `computed` tokens."""
        self._now.append((request, computed, anew, pages))
        if self._pages is not None:
            self._pages = self._pages - pages if is_stale else self._pages | pages

    def loaded(self, pages: Iterable[tuple[int, int]]) -> None:
        """These are loaded, under keys of the present weights."""
        if self._pages is not None:
            self._pages.update(pages)

    def step(self, number: int) -> None:
        """All that was told since the last call is step `number`."""
        self._steps.append((number, self._now))
        self._now = []

    def changed(self, since: int) -> None:
        """The weights are others, with which step `since` was the first to compute."""
        clean: set[str] = set()
        self._pages = set()
        for number, entries in (*self._steps, (since, self._now)):
            for request, computed, anew, pages in entries if number >= since else ():
                if not computed:
                    clean.add(request)
                elif anew:  # behind pages that may be older
                    clean.discard(request)
                if request in clean:
                    self._pages |= pages
