"""An engine that runs its model as vLLM's model runner V2 does with async scheduling, without vLLM.

A request's position lies on the device, where no scheduler rolls it back, and one step is launched before the output of
the one before it is looked at.

The model computes in whole numbers below 251, which bfloat16 holds exactly, and every token depends on the KV of all
positions before it, read from the pages. So one wrong page makes wrong tokens, and wrong KV behind it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.adapters.vllm.paged_specs import names

PAGES, PAGE, HEADS, DIM, LAYERS = 200, 16, 2, 8, 2
WIDTH = HEADS * 2 * DIM
PRIME, VOCABULARY = 251, 997
WAIT_S = 30


class Model:
    """What a forward pass computes. `caches` are a tensor a layer: (pages, heads, tokens of a page, K and V)."""

    def __init__(self) -> None:
        self.caches = {name: torch.zeros(PAGES, HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16) for name in names(LAYERS)}
        self._spread = torch.arange(1, WIDTH + 1)

    def embedded(self, tokens: list[int]) -> torch.Tensor:
        """Hidden states of tokens, (tokens, WIDTH)."""
        return (torch.tensor(tokens)[:, None] * self._spread + 11) % PRIME

    def layer(self, number: int, hidden: torch.Tensor, table: list[int], start: int) -> torch.Tensor:
        """Write the KV of positions from `start` on, and give the hidden states behind that layer."""
        cache = self.caches[names(LAYERS)[number]]
        places = torch.arange(start, start + len(hidden))
        pages = torch.tensor(table + [0] * ((start + len(hidden) - 1) // PAGE + 1 - len(table)))
        kv = (hidden * 3 + places[:, None] * 5 + number * 7 + 1) % PRIME
        cache[pages[places // PAGE], :, places % PAGE] = kv.to(cache.dtype).view(-1, HEADS, 2 * DIM)
        seen = cache[pages].permute(0, 2, 1, 3).reshape(-1, WIDTH)[: start + len(hidden)].nan_to_num(1, 2, 3).long()
        weighed = (seen * torch.arange(1, len(seen) + 1)[:, None]).cumsum(0)
        return (hidden * 2 + weighed[start:] + 1) % PRIME

    def token(self, hidden: torch.Tensor) -> int:
        """The next one."""
        return int((hidden[-1] * self._spread).sum() % VOCABULARY)


@dataclass
class Request:
    """A request as vLLM's scheduler has it."""

    request_id: str
    prompt_token_ids: list[int]
    answers: int
    all_token_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    computed: int = 0
    placeholders: int = 0  # tokens of steps that are launched
    pages: list[int] = field(default_factory=list)
    status: str = "waiting"  # loading, ready, running
    known_pages: int = 0  # of which the runner has been told

    @property
    def output(self) -> list[int]:
        """What was generated."""
        return self.all_token_ids[len(self.prompt_token_ids) :]


@dataclass
class OnDevice:
    """A request as the runner has it: none of this is read back."""

    tokens: list[int]
    position: int
    table: list[int]


class Runner:
    """Model runner V2: what a scheduler says of a request's position counts when the request comes, and not again."""

    def __init__(self, model: Model, connector: Any) -> None:
        self.model, self.connector = model, connector
        self.requests: dict[str, OnDevice] = {}

    def execute(self, step: SimpleNamespace) -> SimpleNamespace:
        """One step: its loads, its forward pass, its stores, in vLLM 0.26's order."""
        for name in step.finished_req_ids:
            self.requests.pop(name, None)
        for new in step.scheduled_new_reqs:
            tokens = list(step.tokens[new.req_id])
            self.requests[new.req_id] = OnDevice(tokens, new.num_computed_tokens, list(new.block_ids[0]))
        cached = step.scheduled_cached_reqs
        for name, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.requests[name].table += pages[0] if pages else []
        if self.connector is None:
            return SimpleNamespace(sampled=self.forward(step), kv=None)
        self.connector.handle_preemptions(step.meta)
        self.connector.bind_connector_metadata(step.meta)
        self.connector.start_load_kv(None)
        sampled = self.forward(step)
        if step.num_scheduled_tokens:
            self.connector.wait_for_save()
        sent, received = self.connector.get_finished(step.finished_req_ids)
        told = SimpleNamespace(
            finished_sending=sent, finished_recving=received, kv_connector_worker_meta=None,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
        )  # fmt: skip
        self.connector.clear_connector_metadata()
        return SimpleNamespace(sampled=sampled, kv=told)

    def forward(self, step: SimpleNamespace) -> dict[str, int]:
        """Compute, layer by layer, all requests of the step; give the tokens that come of it."""
        begun: dict[str, tuple[OnDevice, int]] = {}
        hidden: dict[str, torch.Tensor] = {}
        for name, count in step.num_scheduled_tokens.items():
            one = self.requests[name]
            tokens = one.tokens[one.position : one.position + count]
            # Behind its tokens and its pages there are zeros: token 0, and vLLM's null block.
            hidden[name] = self.model.embedded(tokens + [0] * (count - len(tokens)))
            begun[name] = one, one.position
            one.position += count
        for number, layer in enumerate(names(LAYERS) if begun else []):
            if self.connector is not None:
                self.connector.wait_for_layer_load(layer)
            for name, (one, start) in begun.items():
                hidden[name] = self.model.layer(number, hidden[name], one.table, start)
            if self.connector is not None:
                self.connector.save_kv_layer(layer, self.model.caches[layer], None)
        sampled = {}
        for name, (one, _) in begun.items():
            if one.position >= len(one.tokens):
                sampled[name] = self.model.token(hidden[name])
                one.tokens.append(sampled[name])
        return sampled


class Engine:
    """vLLM's scheduler, as far as it touches a connector, with a runner. `budget` tokens are computed in a step."""

    def __init__(self, scheduler: Any = None, worker: Any = None, *, budget: int = 128) -> None:
        self.model, self.scheduler, self.budget = Model(), scheduler, budget
        if worker is not None:
            worker.register_kv_caches(self.model.caches)
        self.runner = Runner(self.model, worker)
        self.free = deque(range(1, PAGES))
        self.requests: list[Request] = []
        self.finished: set[str] = set()
        self._number = 0

    def generate(self, *prompts: list[int], answers: int = 6) -> list[list[int]]:
        """Complete prompts side by side."""
        mine = []
        for prompt in prompts:
            self._number += 1
            mine.append(Request(f"r{self._number}", prompt, answers, list(prompt)))
        self.requests += mine
        in_flight: deque[tuple[SimpleNamespace, SimpleNamespace]] = deque()
        until_s = time.monotonic() + WAIT_S
        while self.requests:
            assert time.monotonic() < until_s, "the requests do not end"
            step = self.schedule()
            in_flight.append((step, self.runner.execute(step)))
            if len(in_flight) > 1:
                self.update(*in_flight.popleft())
        for step, result in in_flight:
            self.update(step, result)
        return [each.output for each in mine]

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def schedule(self) -> SimpleNamespace:
        """The next step, though the one before it is not over."""
        step = SimpleNamespace(
            scheduled_new_reqs=[], num_scheduled_tokens={}, finished_req_ids=self.finished, tokens={}, meta=None,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
        )  # fmt: skip
        self.finished, left = set(), self.budget
        for request in self.requests:
            if request.status == "waiting":
                self._begin(request)
            if request.status in ("ready", "running") and left:
                left -= self._schedule_one(request, step, left)
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        if self.scheduler is not None:
            step.meta = self.scheduler.build_connector_meta(step)
        return step

    def _begin(self, request: Request) -> None:
        """Ask the connector for a new request, and give it the pages of what is to be loaded."""
        request.status = "ready"
        if self.scheduler is None:
            return
        external, is_ahead = self.scheduler.get_num_new_matched_tokens(request, 0)
        if external is None:
            request.status = "waiting"
            return
        if external:
            self._allocate(request, external)
            pages = SimpleNamespace(get_block_ids=lambda: (list(request.pages),))
            request.computed = external
            request.status = "loading" if is_ahead else "ready"
            self.scheduler.update_state_after_alloc(request, pages, external)

    def _schedule_one(self, request: Request, step: SimpleNamespace, left: int) -> int:
        known = len(request.all_token_ids) + request.placeholders
        wanted = len(request.prompt_token_ids) + request.answers - 1
        count = min(known - request.computed, left, wanted - request.computed)
        if count <= 0:
            return 0
        self._allocate(request, request.computed + count)
        if request.status == "ready":
            request.status = "running"
            new = SimpleNamespace(
                req_id=request.request_id, block_ids=(list(request.pages),), num_computed_tokens=request.computed
            )
            step.scheduled_new_reqs.append(new)
            step.tokens[request.request_id] = list(request.all_token_ids)
        else:
            added = request.pages[request.known_pages :]
            cached = step.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append((added,) if added else None)
            cached.num_computed_tokens.append(request.computed)
        request.known_pages = len(request.pages)
        step.num_scheduled_tokens[request.request_id] = count
        request.computed += count
        request.placeholders += request.computed >= known
        return count

    def _allocate(self, request: Request, tokens: int) -> None:
        while len(request.pages) * PAGE < tokens:
            request.pages.append(self.free.popleft())

    def update(self, step: SimpleNamespace, result: SimpleNamespace) -> None:
        """Take a step's output, when the next one is launched."""
        wrong: set[str] = set()
        if result.kv is not None:
            wrong = self._roll_back(result.kv.invalid_block_ids, step.num_scheduled_tokens)
            self.scheduler.update_connector_output(result.kv)
            for request in self.requests:
                if request.request_id in (result.kv.finished_recving or ()):
                    request.status = "ready"  # of a prompt that is there to its end the last token is computed
                    request.computed = min(request.computed, len(request.prompt_token_ids) - 1)
        for request in list(self.requests):
            token = result.sampled.get(request.request_id)
            if token is None:
                continue
            request.placeholders -= 1
            if request.request_id not in wrong:
                request.all_token_ids.append(token)
            if len(request.output) == request.answers:
                self._end(request)

    def _roll_back(self, invalid: set[int], counts: dict[str, int]) -> set[str]:
        """kv_load_failure_policy: recompute. The runner hears nothing of it."""
        wrong = set()
        for request in self.requests:
            if request.status == "waiting":
                continue
            computed = request.computed - counts.get(request.request_id, 0)
            for place in range(-(-computed // PAGE)):
                if request.pages[place] in invalid:
                    request.computed = place * PAGE
                    wrong.add(request.request_id)
                    break
        return wrong

    def _end(self, request: Request) -> None:
        self.requests.remove(request)
        self.finished.add(request.request_id)
        if self.scheduler is not None:
            self.scheduler.request_finished(request, request.pages)
        self.free.extend(request.pages)
