"""The connector's scheduler side: what it remembers of each request, so that it can tell its workers what to move.

An engine asks which prefix of a prompt is stored, gives pages, computes a part of the prompt in each step, takes pages
away again and ends requests in any order. Here that becomes loads and stores of whole chunks (paged/jobs.py). Nothing
is known of the engine but numbers: tests drive it without one.

A page that was given away while its content was still being stored belongs to another request, or to another group of
layers: they share one pool. So each step lists the pages that are written from now on (`Step.taken`), and a worker ends
whatever still reads one of them.

Recurrent layers have no pages by position. The engine hands their states over, each in a page of its own with the
number of tokens before it (`snapshots`), and what is loaded of them is the one behind the last token of a hit.
"""

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvredis.adapters.engine.keys import ChunkKey, keys_of_bytes, token_bytes
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.paged.jobs import ChunkMove, LoadJob, StoreJob
from kvredis.backends.base import Backend, Tier
from kvredis.backends.remote.backend import RemoteBlocks

from .kv_layout import LayerGroup
from .lookup import OWN, Found, Lookups, Sharing
from .request import REST_TOKENS, Prompt, Request, SchedulingOptions, Step
from .stored_events import Offered, StoredEvents, digest_of
from .weights import FreshPages, KeyWeights, WeightsReport

logger = logging.getLogger(__name__)

NO_PAGE = 0
"""vLLM's null block: where a sliding window has let go of a page, or never had one."""
SHARD = re.compile(rb"\{[^}]*\}")
"""Of a key, which part of its chunk it is (engine/keys.py)."""
NO_KEY = b"-{0@-}"
"""No chunk has it."""
LOOKUP_S_LEAST = 0.05
"""A server's answer is waited for at least so long: the thread that asks may be late itself, by a few steps."""

COUNTERS = (
    *("lookups", "lookups_without_hit", "lookups_given_up", "lookup_tokens", "hit_tokens", "skipped_tokens"),
    *("waits", "waits_given_up"),
    *("load_tokens", "loaded_tokens", "store_tokens"),
)
"""Tokens to be loaded, those of loads that came whole, and those that were offered for storing."""
HIT_RATES_MAX = 1024
PLACES = ("engine", "memory", "disk", "remote", "miss")
"""Where the tokens looked up were, nearest first; each is counted once, so that the sum is lookup_tokens."""

Tables = Sequence[Sequence[int]]
"""Of each of the engine's groups, a request's pages in the order of the tokens."""
Narrow = Callable[[Sequence[bytes], int, int], int]
"""Of the chunks found behind what is computed (their keys, tokens each, and all tokens that would be computed without
them), how many are worth loading."""
PaysToStore = Callable[[int, int], bool | None]
"""Whether storing so many bytes of each rank takes less than computing so many tokens, None while that is unknown."""
ComputeSeconds = Callable[[int], float | None]
"""How long computing so many tokens takes, None while that is unknown."""


class Scheduling:
    """One engine's requests. One thread calls it: the scheduler's."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        backend: Backend,
        options: SchedulingOptions,
        narrow: Narrow | None = None,
        weights: KeyWeights | None = None,
        compute_s: ComputeSeconds | None = None,
        pays_to_store: PaysToStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = list(groups)
        self.weights = KeyWeights({}) if weights is None else weights
        """Which ones keys are of."""
        self._fresh = FreshPages()
        self.options = options
        self.counters = dict.fromkeys((*COUNTERS, *(f"{place}_tokens" for place in PLACES)), 0)
        self.hit_rates: deque[float] = deque(maxlen=HIT_RATES_MAX)
        """The shares of their prompts that hits were, the latest of them; the reader empties it."""
        self.events: StoredEvents | None = None
        """Where blocks are told of, once `tell_events` has been called."""
        self._backend = backend
        self._narrow = narrow
        self._compute_s = compute_s
        self._pays_to_store = pays_to_store
        self._clock = clock
        self._lookups = Lookups(self.groups, backend)
        self._has_announced = False
        """Whether something may have to be withdrawn."""
        self._has_other_names = False
        """Whether the log has been told that what an engine hands over is not found here."""
        self._is_late = False
        """Whether the last answer was given up, as the log has been told."""
        self._page_tokens = max(group.page_tokens for group in groups)
        self._states = [place for place, group in enumerate(groups) if group.is_state]
        self._ranks = max(group.layout.world_size for group in groups)
        self._by_token = [place for place, group in enumerate(groups) if not group.is_state]
        self._requests: dict[str, Request] = {}
        self._step = Step()
        self._steps = 0
        self._layouts: tuple[str, list[ChunkLayout]] | None = None
        """The suffix of the weights, and the groups' layouts with it."""
        self._hits: deque[tuple[int, tuple[object, ...]]] = deque()
        """What `tell_hits` logs, and in which step it was found."""
        self._loading: dict[str, frozenset[bytes]] = {}
        """The keys of the chunks that are on their way, by request."""

    # -- a request comes ---------------------------------------------------------------------------------------------

    def match(self, prompt: Prompt, computed: int) -> int | None:
        """Tokens that are stored behind the first `computed`, which the engine has itself. None: ask again. A server
        has not answered yet; or a load that is under way leaves no room for this one, or brings the same chunks; or
        workers have not told yet which weights there are. Asks the backend once for each attempt of a request, waits
        for no server, and changes nothing."""
        request = self.follow(prompt)
        if not self.options.loads or self.weights.is_unknown:
            self._announce(request)
            return 0
        if self.weights.is_waiting:
            return None  # a step is on its way that tells
        if request.loaded_attempt == prompt.attempt:
            return 0  # that load has failed: what is missing is computed
        if request.asked_attempt != prompt.attempt or request.computed != computed:
            is_new, request.computed = request.asked_attempt != prompt.attempt, computed
            if is_new:
                if (answer := self._answer(request)) is None:
                    return None
                self._note(request, answer)
            request.asked_attempt = prompt.attempt
            request.answer = self._worth(request, is_new)
        return self._within_bounds(request)

    def allocated(self, name: str, tables: Tables, external: int) -> None:
        """Note the pages that the engine has given a request; `external` tokens behind its own are to be loaded into
        them now."""
        request = self._requests.get(name)
        if request is None or not external:
            return
        self._count_loaded(request)
        request.tables, request.loading = [list(table) for table in tables], external
        request.loaded_attempt = request.prompt.attempt
        stop = request.computed + external
        moves = [move for place in range(len(self.groups)) for move in self._loads(request, place, stop)]
        self.counters["load_tokens"] += external
        is_awaited = request.answered.is_awaited and stop > request.keys[0][request.answered.missed or 0].start
        waits_s = self._patience_s(len(request.prompt.tokens) - request.computed) if is_awaited else 0.0
        request.is_awaited = is_awaited
        self.counters["waits"] += is_awaited
        self._step.moves.loads.append(LoadJob(name, moves, waits_s))
        parts = self._parts_of if request.answered.ranks else None
        self._loading[name] = frozenset(
            [move.key for move in moves] if parts is None else [part for move in moves for part in parts(move)]
        )
        pages = {(self.groups[move.group].group, page) for move in moves for page in move.pages}
        self._step.taken |= {page for _, page in pages}
        self._fresh.loaded(pages)

    def awaits(self, name: str) -> bool:
        """Whether a request's load takes as long as another engine computes."""
        request = self._requests.get(name)
        return request is not None and request.is_awaited

    def sources(self, name: str, external: int) -> dict[Tier, int]:
        """Where the tokens of a load come from that `allocated` has been told of; asks no server."""
        request, found = self._requests.get(name), dict[Tier, int]()
        if request is None:
            return found
        begin, stop = request.computed, request.computed + external
        chunks = [chunk for chunk in self._stored(request) if chunk.stop > begin and chunk.start < stop]
        for chunk, tier in zip(chunks, self._backend.tiers_of([chunk.key for chunk in chunks]), strict=True):
            found[tier] = found.get(tier, 0) + min(chunk.stop, stop) - max(chunk.start, begin)
        return found

    # -- a step ------------------------------------------------------------------------------------------------------

    def scheduled(self, name: str, tables: Tables | None, computed: int, count: int, *, anew: bool = False) -> None:
        """The step computes `count` tokens of a request behind the first `computed`. `tables` are the pages that were
        added, or all of them where they were given `anew`."""
        self._step.is_idle = False
        request = self._current(name)
        if tables is None and (request is None or computed + count < request.quiet_until):
            return  # a step that decodes, as most do
        taken: set[tuple[int, int]] = set()
        if request is not None and tables is not None and (anew or not request.tables):
            request.tables = [[] for _ in tables]
        for number, table in enumerate(tables or ()):
            before = computed // self._tokens_of_page(number)
            begin = 0 if anew else before  # for a request that was never matched, which takes pages all the same
            if request is not None:
                begin = len(request.tables[number])
                request.tables[number].extend(table)
            taken |= {(number, page) for page in table[max(before - begin, 0) :] if page != NO_PAGE}
        self._step.taken |= {page for _, page in taken}
        is_stale = self._is_stale(request, computed, anew=anew)
        self._fresh.written(name, computed, frozenset(taken), anew=anew, is_stale=is_stale)
        if request is not None and self.options.stores and not is_stale:
            done = min(computed + count, len(request.prompt.tokens))
            parts = [self._stores(request, place, computed, done) for place in range(len(self.groups))]
            if self.events is not None:
                self._offer(self.events, request, parts)
            if moves := [move for part in parts for move in part]:
                self.counters["store_tokens"] += max(map(self._tokens_of, parts))
                self._step.moves.stores.append(StoreJob(name, moves, done, head_first=self._announces(request)))
        if request is not None:
            request.quiet_until = self._next_stored(request)

    def snapshots(self, handed_over: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
        """States of recurrent layers, by request: the engine's group, the page, and how many tokens are before. They
        are whole when this step's forward pass is over. Behind `scheduled` of the same step."""
        for name, states in handed_over.items():
            request = self._current(name)
            if request is None or request.is_stale or not self.options.stores:
                continue
            stored, chunk = request.snapshot, self.groups[0].layout.chunk_tokens
            moves: list[ChunkMove] = []
            for number, page, tokens in sorted(states, key=lambda state: state[2]):
                at = tokens // chunk - 1
                if tokens % chunk or page == NO_PAGE or not self._is_worth_storing(request, at + 1, stored):
                    continue
                places = [place for place in self._states if self.groups[place].group == number]
                moves += [ChunkMove(request.keys[place][at].key, place, (page,)) for place in places]
                request.snapshot = at + 1
            if moves:
                moves.sort(key=lambda move: move.group)  # one group behind the other, and in each the head first
                self._store_too(name, moves, request.snapshot * chunk)

    def _store_too(self, name: str, moves: list[ChunkMove], total: int) -> None:
        """Behind what this step stores of the request, so that a state is seen when what is before it is."""
        for job in self._step.moves.stores:
            if job.request == name:
                job.moves += moves
                return
        self._step.moves.stores.append(StoreJob(name, moves, total))

    def _is_worth_storing(self, request: Request, count: int, stored: int) -> bool:
        """Whether the states behind the first `count` chunks are to be stored, where those behind `stored` are."""
        keys = request.keys[self._states[0]] if self._states else []
        if not stored < count <= len(keys):
            return False
        if count >= len(keys) - 1:
            return True  # the last one; vLLM has none behind the last chunk where a model drafts
        chunk, bound = self.groups[0].layout.chunk_tokens, self.options.state_bytes
        if bound is None and self._pays_to_store is not None:
            nbytes = sum(self.groups[place].layout.chunk_bytes(1) for place in self._states)
            if (pays := self._pays_to_store(nbytes, (count - stored) * chunk)) is not None:
                return pays
        state_bytes = sum(self._bytes_of(place, 1) for place in self._states)
        kv_bytes = sum(self._bytes_of(place, chunk) for place in self._by_token)
        gap = -(-state_bytes // (kv_bytes or state_bytes)) if bound is None else len(keys) * state_bytes / (bound or 1)
        return count - stored >= gap

    def _bytes_of(self, place: int, tokens: int) -> int:
        """Of all ranks."""
        layout = self.groups[place].layout
        return layout.chunk_bytes(tokens) * layout.world_size

    def step(self) -> Step:
        """Everything since the last call, for the workers."""
        step, self._step = self._step, Step()
        self.tell_hits(self._steps)
        self._steps += 1
        step.number, step.weights, step.check_weights = self._steps, self.weights.digests, self.weights.step()
        self._fresh.step(step.number)
        return step

    def tell_hits(self, before: float = math.inf) -> None:
        """Log what `match` has found, in the steps before that one: a line in the log is written when no request waits
        for its load to begin."""
        while self._hits and self._hits[0][0] < before:
            logger.info(
                "Reqid: %s, Total tokens %d, LMCache hit tokens: %d, need to load: %d%s", *self._hits.popleft()[1]
            )

    # -- a request goes ----------------------------------------------------------------------------------------------

    def loaded(self, name: str, *, failed: bool = False) -> None:
        """Note that a load is over. Where it failed, all that the request has is offered for storing again."""
        self._loading.pop(name, None)
        request = self._requests.get(name)
        if request is not None and failed:
            self.counters["waits_given_up"] += request.is_awaited
            self._offer_again(request)
        elif request is not None:
            self._count_loaded(request)

    def lost(self, pages: set[int]) -> None:
        """These pages of the only group hold nothing: what their requests have is offered for storing again."""
        for request in self._requests.values():
            if request.tables and not pages.isdisjoint(request.tables[0]):
                self._offer_again(request)

    def finished(self, name: str) -> None:
        """Forget a request that has ended, or was given up; a load that is under way is not wanted any more."""
        request = self._requests.pop(name, None)
        if request is not None and request.lookup is not None:
            request.lookup.cancel()
        if request is not None:
            self._withdraw(request)
        if name in self._loading:
            self._step.moves.cancelled.append(name)
        elif request is not None:
            self._count_loaded(request)

    def unstored(self, keys: list[bytes]) -> None:
        """Tell others that some of these do not come: their store was dropped, or ended before its end."""
        if keys and self._has_announced:
            self._lookups.withdraw(keys)

    def weights_told(self, reports: Mapping[int, WeightsReport]) -> None:
        """What workers have told of their weights, by rank."""
        since = self.weights.heard(reports)
        if since is not None:
            logger.info(
                "The model's weights have changed: keys end their model's name with %s now", self.weights.suffix
            )
            self._fresh.changed(since)

    def tell_events(self) -> None:
        """From now on note which blocks are stored and which are gone."""
        passes = isinstance(self._backend, RemoteBlocks)
        self.events = StoredEvents(self._lookups.present, self._backend.tiers_of, passes=passes)

    @property
    def chunks_loading(self) -> int:
        """Of all requests."""
        return sum(map(len, self._loading.values()))

    def close(self) -> None:
        """Ask no more."""
        self._lookups.close()

    # -- keys and what is there --------------------------------------------------------------------------------------

    def follow(self, prompt: Prompt) -> Request:
        """Note what a request is, or that its tokens have become more."""
        earlier = request = self._requests.get(prompt.request)
        epoch = self.weights.epoch
        if request is None or len(request.prompt.tokens) != len(prompt.tokens) or request.epoch != epoch:
            request = Request(prompt, self._keys(prompt), next=[0] * len(self.groups), epoch=epoch)
            if earlier is not None and earlier.lookup is not None:
                earlier.lookup.cancel()  # of other keys
            if earlier is not None and earlier.epoch != epoch:
                request.tables, request.computed = earlier.tables, earlier.computed
                request.loaded_attempt, request.loading = earlier.loaded_attempt, earlier.loading
            elif earlier is not None:
                whole = len(earlier.prompt.tokens) // self.groups[0].layout.chunk_tokens  # one that was not is another
                request.tables, request.found = earlier.tables, min(earlier.found, whole)
                request.next = [min(at, whole) for at in earlier.next]
                request.snapshot = min(earlier.snapshot, whole)
                request.loaded_attempt, request.loading = earlier.loaded_attempt, earlier.loading
                request.is_stale, request.stale_epoch = earlier.is_stale, earlier.stale_epoch
            self._requests[prompt.request] = request
        if earlier is not None and earlier.prompt.attempt != prompt.attempt:
            request.next = [0] * len(self.groups)  # pages that were taken away may not have been stored before
            request.quiet_until = request.snapshot = 0
        request.prompt = prompt
        return request

    def _current(self, name: str) -> Request | None:
        """The request, under keys of the present weights."""
        request = self._requests.get(name)
        if request is not None and request.epoch != self.weights.epoch:
            return self.follow(request.prompt)
        return request

    def _is_stale(self, request: Request | None, computed: int, *, anew: bool) -> bool:
        """Whether KV of other weights is among what a request has computed before this step."""
        if request is None or self._fresh.are_all:
            return request is None
        if anew or request.stale_epoch != request.epoch:
            request.stale_epoch = request.epoch
            request.is_stale = not self._fresh.cover(
                (number, page)
                for number, table in enumerate(request.tables)
                for page in table[: -(-computed // self._tokens_of_page(number))]
                if page != NO_PAGE
            )
        return request.is_stale

    def handed_over(self, name: str) -> str:
        """The name under which another engine finds what is stored of a request's first chunk, "" where that is
        nothing."""
        request = self._requests.get(name)
        return self._name_of(request) if request is not None and self.options.stores else ""

    def is_for_others(self, name: str) -> bool:
        """Whether another engine waits for what is stored of a request."""
        request = self._requests.get(name)
        return request is not None and request.prompt.for_others

    def has_grown(self, name: str, tokens: int) -> bool:
        """Whether a request that has so many tokens now has whole chunks that `follow` does not know of yet."""
        request, chunk = self._requests.get(name), self.groups[0].layout.chunk_tokens
        return request is not None and tokens // chunk > len(request.prompt.tokens) // chunk

    def _keys(self, prompt: Prompt) -> list[list[ChunkKey]]:
        tokens, suffix = prompt.tokens, self.weights.suffix
        if rest := len(tokens) % self._page_tokens:
            tokens = tokens[: len(tokens) - rest]
        data = token_bytes(tokens)
        if self._layouts is None or self._layouts[0] != suffix:
            layouts = [replace(group.layout, model=group.layout.model + suffix) for group in self.groups]
            self._layouts = suffix, layouts
        keys = []
        for layout in self._layouts[1]:
            chunk = layout.chunk_tokens
            extras: dict[int, bytes] = {}
            for position, extra in prompt.extras:
                extras[position // chunk] = extras.get(position // chunk, b"") + extra
            unfull, algorithm = self.options.unfull, self.options.algorithm
            keys.append(keys_of_bytes(data, layout, unfull=unfull, algorithm=algorithm, extras=extras))
        return keys

    def _answer(self, request: Request) -> Found | None:
        """What of a request is stored; None while the answer, or KV that another engine computes, is waited for. It is
        asked for here, and given up when waiting takes as long as computing would."""
        lookup, count, sharing = request.lookup, self._loadable(request), self._sharing(request)
        if lookup is None:
            lookup = request.lookup = self._lookups.find(request.keys, count, sharing)
            request.announced, request.is_waiting, request.asked_s = lookup, False, self._clock()
        if lookup.done and lookup.answer.is_coming and not request.is_waiting:
            lookup = request.lookup = self._lookups.wait(request.keys, count, lookup.answer, sharing)
            request.announced, request.is_waiting, request.asked_s = lookup, True, self._clock()
            self.counters["waits"] += 1
        if lookup.done:
            request.lookup = None
            self._is_late = False
            return lookup.answer
        waited_s, total = self._clock() - request.asked_s, len(request.prompt.tokens)
        patience_s = self._patience_s(total - request.computed)
        if waited_s < patience_s:
            return None
        lookup.cancel()
        request.lookup = None
        self.counters["waits_given_up" if request.is_waiting else "lookups_given_up"] += 1
        if not self._is_late:
            text = "KV cache lookup of %s was given up after %.3f s, %d tokens are computed: the server is slow or hung"
            if request.is_waiting:
                text = "KV of %s that another engine computes has not come in %.3f s: of %d tokens the rest is computed"
            logger.warning(text, request.prompt.request, waited_s, total - request.computed)
        self._is_late = True
        return lookup.answer

    def _sharing(self, request: Request) -> Sharing:
        prompt, options = request.prompt, self.options
        announces = self._announces(request)
        self._has_announced |= announces
        is_ours = bool(prompt.handed_over) and prompt.handed_over == self._name_of(request)
        if prompt.handed_over and not is_ours and not self._has_other_names:
            self._has_other_names = True
            text = (
                "the engine that has computed %s stores KV under other names: its model, weights or chunks are others"
            )
            logger.warning(text, prompt.request)
        waits = options.waits or is_ours or prompt.is_promised
        return Sharing(announces, waits, prompt.is_promised, waits and options.streams and not announces)

    def _announces(self, request: Request) -> bool:
        return self.options.stores and (self.options.announces or request.prompt.for_others)

    def _name_of(self, request: Request) -> str:
        """What all ranks' keys of a prompt's first chunk have in common, "" where it has none."""
        keys = request.keys[0]
        return SHARD.sub(b"", keys[0].key).decode() if keys else ""

    def _announce(self, request: Request) -> None:
        """Tell others what is computed of a request that nothing is loaded for, once."""
        if request.announced is None and self._sharing(request).announces and not self.weights.is_unknown:
            request.announced = self._lookups.announce(request.keys, len(request.keys[0]))

    def _withdraw(self, request: Request) -> None:
        """Tell others that what has been announced of a request and not been offered for storing does not come."""
        if request.announced is None:
            return
        request.announced.cancel()
        left = [
            name
            for place, at in request.announced.answer.announced
            if at >= (request.snapshot if self.groups[place].is_state else request.next[place])
            for name in self._lookups.of_ranks(request.keys, place, at)
        ]
        if left:
            self._lookups.withdraw(left)

    def _patience_s(self, tokens: int) -> float:
        """How long an answer is worth waiting for that may save so many tokens' computing."""
        compute_s = None if self._compute_s is None else self._compute_s(tokens)
        most_s = self.options.lookup_s_max
        return most_s if compute_s is None else min(max(compute_s, LOOKUP_S_LEAST), most_s)

    def _loadable(self, request: Request) -> int:
        """How many chunks of a request may be loaded, if they are stored."""
        total, count = len(request.prompt.tokens), len(request.keys[0])
        if (
            count
            and request.keys[0][-1].stop == total
            and any(group.is_state or group.first_kept(total) == total for group in self.groups)
        ):
            # The last token is computed for its logits. It sees a window that is let go of behind it, or the state
            # before itself, which the one behind it does not tell.
            count -= 1
        return count

    def _note(self, request: Request, answer: Found) -> None:
        """Take over what is stored of a request, and count it."""
        total, keys = len(request.prompt.tokens), request.keys[0]
        self.counters["lookups"] += 1
        self.counters["lookup_tokens"] += total
        request.answered = answer
        request.found = found = answer.up_to(len(keys))
        if self._states:
            request.snapshot = found
        self.counters["hit_tokens"] += keys[found - 1].stop if found else 0
        is_missed = answer.missed is not None and not answer.is_awaited
        if self.events is not None and is_missed and self.groups[0].window is None:
            self.events.missed([keys[answer.missed or 0].key])
        self.counters["lookups_without_hit"] += not found
        # An engine that stores nothing would otherwise look for KV of weights that it has no more, and find none.
        self._step.compares |= not found and not self.options.stores
        if found:
            self.hit_rates.append(keys[found - 1].stop / total)

    def _worth(self, request: Request, is_new: bool) -> int:
        """Tokens to load of what was found."""
        keys, computed, total = self._stored(request), request.computed, len(request.prompt.tokens)
        hit = keys[request.found - 1].stop if request.found else 0
        chosen = [chunk for chunk in keys[: request.found] if chunk.stop > computed]
        bound = (self.options.max_load_chunks - len(self._states)) // max(len(self._by_token), 1)
        chosen = chosen[: bound // self._parts(request)]
        if self._narrow is not None and chosen:
            each = chosen[0].stop - chosen[0].start
            chosen = chosen[: self._narrow([chunk.key for chunk in chosen], each, total - computed)]
        reached = keys.index(chosen[-1]) + 1 if chosen else 0
        if reached < request.found:  # windows and states were looked at where the whole ends
            left = request.answered.up_to(reached)
            chosen = chosen[: max(len(chosen) - (reached - left), 0)]
        need = chosen[-1].stop - computed if chosen else 0
        found, why = max(hit - computed, 0), ""
        if 0 < need < (least := self._least(computed)):
            need, why = 0, f" < min_retrieve {least}, nothing is loaded"
        elif need < found:
            why = f"; the other {found - need} are computed"
        # As LMCache has it: a full hit's last token is computed, and what is below the minimum is said to be needed.
        said = max(min(hit, total - 1) - computed, 0)
        if not is_new:
            return need
        needed = said if need in (0, found) else need
        self._hits.append((self._steps, (request.prompt.request, total, min(hit, total - 1), needed, why)))
        self.counters["skipped_tokens"] += found - need
        self._count_places(request, total)
        return need

    def _stored(self, request: Request) -> list[ChunkKey]:
        """The first group's chunks, where engines of other sizes have stored them by their first ranks' keys."""
        keys, ranks = request.keys[0], request.answered.ranks
        if not ranks:
            return keys
        names = [self._lookups.of_ranks(request.keys, 0, at, ranks.get((0, at), OWN))[0] for at in range(len(keys))]
        return [chunk._replace(key=name) for chunk, name in zip(keys, names, strict=True)]

    def _parts(self, request: Request) -> int:
        """In how many parts a rank loads a chunk of the request, at most."""
        return max((max(ranks // self._ranks, 1) for ranks in request.answered.ranks.values()), default=1)

    def _parts_of(self, move: ChunkMove) -> list[bytes]:
        """As many names as a rank loads a chunk in parts, of which the first is its key."""
        return [move.key, *(move.key + b"/%d" % part for part in range(1, move.ranks // self._ranks))]

    def _least(self, computed: int) -> int:
        """Fewer tokens than this are not loaded behind the `computed` that the engine has."""
        least, rest = self.options.min_load_tokens, self.options.min_rest_tokens
        if not computed:
            return least
        return max(least, min(REST_TOKENS, self.groups[0].layout.chunk_tokens) if rest is None else rest)

    def _count_loaded(self, request: Request) -> None:
        self.counters["loaded_tokens"] += request.loading
        request.loading = 0

    def _count_places(self, request: Request, total: int) -> None:
        chunks = self._stored(request)[: request.found]
        for chunk, tier in zip(chunks, self._backend.tiers_of([chunk.key for chunk in chunks]), strict=True):
            self.counters[f"{tier}_tokens"] += max(chunk.stop - max(chunk.start, request.computed), 0)
        known = max(chunks[-1].stop if chunks else 0, request.computed)
        self.counters["engine_tokens"] += request.computed
        self.counters["miss_tokens"] += total - known

    def _within_bounds(self, request: Request) -> int | None:
        under_way, chunk = self.chunks_loading, self.groups[0].layout.chunk_tokens
        first, stop = request.computed // chunk, -(-(request.computed + request.answer) // chunk)
        chunks = (stop - first) * len(self._by_token) * self._parts(request) + len(self._states)
        if request.answer and under_way and under_way + chunks > self.options.max_load_chunks:
            return None
        if self.options.waits_for_shared and self._is_coming(request, range(first, stop)):
            return None
        return request.answer

    def _is_coming(self, request: Request, chunks: range) -> bool:
        """Whether one load that is under way brings half of these chunks or more. When it is over the engine has them
        in its own pages: 32 requests that share a prefix load it once."""
        by_token = [request.keys[place] for place in self._by_token or self._states]
        wanted = {keys[at].key for keys in by_token for at in chunks if at < len(keys)}
        return any(2 * len(wanted & coming) >= len(wanted) for coming in self._loading.values()) if wanted else False

    # -- chunks and pages --------------------------------------------------------------------------------------------

    def _loads(self, request: Request, place: int, stop: int) -> list[ChunkMove]:
        """Chunks for the tokens from `computed` on. What the engine has of the first one is not written: the pages that
        a move names are the last ones of its chunk."""
        group, moves = self.groups[place], []
        if group.is_state:
            return [self._load_of_state(request, place, stop)]
        kept = max(request.computed, group.first_kept(stop))
        for at, chunk in enumerate(request.keys[place]):
            if chunk.stop <= kept or chunk.stop > stop:
                continue
            first = max(chunk.start, kept // group.page_tokens * group.page_tokens)
            pages = self._pages(request, group, first, chunk.stop)
            while pages and pages[0] == NO_PAGE:
                pages = pages[1:]
            if pages and NO_PAGE not in pages:
                moves.append(ChunkMove(chunk.key, place, pages, request.answered.ranks.get((place, at), OWN)))
        return moves

    def _load_of_state(self, request: Request, place: int, stop: int) -> ChunkMove:
        """The state behind the first `stop` tokens, in the page that the engine has given it. Where it has given none
        the load fails, of a key that no chunk has: what comes without its state must not be taken for computed."""
        group, table = self.groups[place], self._table(request, self.groups[place])
        at, slot = stop // group.layout.chunk_tokens - 1, stop // group.page_tokens - 1
        page = table[slot] if slot < len(table) else NO_PAGE
        is_end = stop % group.layout.chunk_tokens == 0 and page != NO_PAGE
        return ChunkMove(request.keys[place][at].key if is_end else NO_KEY, place, (page,))

    def _stores(self, request: Request, place: int, computed: int, done: int) -> list[ChunkMove]:
        """Chunks that are complete with this step and have all of their pages still."""
        group, keys, moves = self.groups[place], request.keys[place], []
        if group.is_state:
            request.next[place] = len(keys)
            return []
        request.next[place] = max(request.next[place], request.found)
        while request.next[place] < len(keys) and keys[request.next[place]].stop <= done:
            chunk = keys[request.next[place]]
            request.next[place] += 1
            if chunk.start < group.first_kept(computed) // group.page_tokens * group.page_tokens:
                continue  # a window has let go of its first pages
            pages = self._pages(request, group, chunk.start, chunk.stop)
            if len(pages) * group.page_tokens == chunk.stop - chunk.start and NO_PAGE not in pages:
                moves.append(ChunkMove(chunk.key, place, pages))
        return moves

    def _next_stored(self, request: Request) -> float:
        """How many tokens a request has when the next chunk of it is complete."""
        if not self.options.stores or request.is_stale:
            return math.inf
        left = (keys[at].stop for keys, at in zip(request.keys, request.next, strict=True) if at < len(keys))
        return min(left, default=math.inf)

    def _offer_again(self, request: Request) -> None:
        """What was loaded is not there: all that the request has is offered for storing."""
        request.found, request.next, request.loading = 0, [0] * len(self.groups), 0
        request.snapshot = 0
        request.quiet_until = 0

    def _offer(self, events: StoredEvents, request: Request, parts: Sequence[Sequence[ChunkMove]]) -> None:
        tokens = request.prompt.tokens
        for place, part in enumerate(parts):
            wanted, parent, blocks = {move.key for move in part}, None, []
            for at, chunk in enumerate(request.keys[place][: request.next[place]]):
                if chunk.key in wanted:
                    mine = tuple(tokens[chunk.start : chunk.stop])
                    names = tuple(self._lookups.of_ranks(request.keys, place, at))
                    group, origin = self.groups[place].group, request.prompt.origin
                    blocks.append(Offered(names, parent, mine, group, origin, chunk.start))
                parent = digest_of(chunk.key)
            if blocks:
                events.offered(request.prompt.request, blocks)

    def _pages(self, request: Request, group: LayerGroup, start: int, stop: int) -> tuple[int, ...]:
        table = self._table(request, group)
        return tuple(table[start // group.page_tokens : stop // group.page_tokens])

    def _table(self, request: Request, group: LayerGroup) -> list[int]:
        return request.tables[group.group] if group.group < len(request.tables) else []

    def _tokens_of(self, moves: Sequence[ChunkMove]) -> int:
        return sum(len(move.pages) * self.groups[move.group].page_tokens for move in moves)

    def _tokens_of_page(self, number: int) -> int:
        return next((group.page_tokens for group in self.groups if group.group == number), self._page_tokens)
