"""One GPU that runs vLLM 0.8.5 (V1) with LoRA, as events on a virtual clock: schedule, run, postprocess.

    waiting ──admit──► prefill (chunks of one step's token budget) ──► decode, one token a step ──► done
       ▲                                                                  │
       └───────── preempt: youngest first, its KV blocks are freed and recomputed later ◄┘

Differences to Motet: requests are first come, first served, but one whose adapter would be the (A_max + 1)th of the batch is
passed over; adapters have A_max slots, and the least recently batched one is replaced; KV blocks are taken as tokens come and
freed by preempting the youngest request. Decodes are scheduled before prefills, a step has at most `max_batched_tokens` tokens,
and every decode advances in every step.

Because of the last rule nothing is kept per request and step. A request that enters decode in step k ends in step k plus its
remaining tokens, and takes a new KV block in every sixteenth step: two tables indexed by step replace the loop over the
batch. Steps between two events (arrival, end of a request) have durations that grow linearly with the context, so they are
advanced in one go by the sum of an arithmetic series; `advance_in_one_go=False` walks them one by one (a test compares).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from motet.twin.vllm.client import ApiServer, Client, Outcome, Requests
from motet.twin.vllm.steps import VllmStepModel

KV_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The server's settings. Token counts are per GPU."""

    a_max: int  # adapter slots (max_loras)
    s_max: int  # rank each slot is sized for (max_lora_rank)
    kv_tokens: int
    max_num_seqs: int = 2048
    max_batched_tokens: int = 2048


class SimulatedVllm:
    """vLLM's scheduler, adapter slots, KV blocks and clock in one run; see `run`."""

    def __init__(
        self, config: EngineConfig, steps: VllmStepModel, requests: Requests, api: ApiServer, *, advance_in_one_go: bool = True
    ) -> None:
        longest = max((p + o for p, o in zip(requests.prompt_tokens, requests.output_tokens, strict=True)), default=0)
        if longest > config.kv_tokens:
            raise ValueError(f"a request of {longest} tokens does not fit into {config.kv_tokens} KV tokens")
        self.config = config
        self.steps = steps.table(config.a_max, config.s_max, config.max_batched_tokens, len(requests.ranks))
        self.load_s = [steps.load_s(rank, config.s_max) for rank in requests.ranks]
        self.scan_s = steps.scan_s
        self.one_go = advance_in_one_go
        self.work = requests
        self.client = Client(requests, api)
        self.now_s = 0.0
        self.end_s = requests.duration_s  # of what is simulated
        self.step = 0
        n = len(requests.prompt_tokens)
        adapters = len(requests.ranks)
        # waiting: one queue per adapter; the heads of queues whose adapter is in the batch, and of the others, in heaps
        self.queues: list[deque[tuple[int, int]]] = [deque() for _ in range(adapters)]  # of (order, request)
        self.heads_in: list[tuple[int, int]] = []  # of (order, adapter)
        self.heads_out: list[tuple[int, int]] = []
        self.waiting = 0
        self.waiting_in = 0  # of those, with an adapter that is in the batch
        self.arrivals_seen = 0
        self.front = 0  # orders of preempted requests: below all others, newest lowest
        # the batch
        self.running: dict[int, None] = {}  # in order of admission
        self.batch_of = [0] * adapters  # running requests per adapter
        self.distinct = 0
        self.idle: OrderedDict[int, None] = OrderedDict()  # adapters in a slot but not in the batch, oldest first
        self.loads = 0
        self.decoding = 0
        self.context_tokens = 0  # of the decoding requests
        self.partial: int | None = None  # a prompt that did not fit into one step's budget
        self.partial_done = 0  # its tokens that are computed
        # KV blocks
        self.free_blocks = config.kv_tokens // KV_BLOCK_TOKENS
        self.grows_at = [0] * KV_BLOCK_TOKENS  # decoding requests by the step (mod 16) in which they need a block
        self.preemptions = 0
        # per request
        self.generated = [0] * n
        self.joined_step = [-1] * n  # step whose end made it a decode; -1 while it is none
        self.joined_tokens = [0] * n  # tokens in its KV cache then
        self.ends_step = [0] * n
        self.ends: dict[int, list[int]] = {}
        self.end_steps: list[int] = []  # heap of the keys of `ends`

    def run(self) -> Outcome:
        """Simulate the workload's window. Returns what its client would have measured."""
        self.advance(self.work.duration_s)
        return self.client.outcome(self.work.duration_s, preemptions=self.preemptions, loads=self.loads)

    def advance(self, end_s: float) -> None:
        """Simulate until `end_s`, or until nothing runs and nothing arrives before it. The last step may end later."""
        self.end_s = end_s
        while self.now_s < end_s:
            self._arrive()
            self.client.labelled()
            if not self.running and not self.waiting:
                next_s = self.client.next_arrival_s()
                if next_s >= end_s:
                    break
                self.client.idle_until(next_s)
                self.now_s = next_s
                continue
            prefills, prefill_tokens, load_s, scanned = self._schedule()
            self._run(prefills, prefill_tokens, load_s + scanned * self.scan_s)
            self._postprocess(prefills)

    # ---- schedule

    def _arrive(self) -> None:
        for request in self.client.arrivals(self.now_s):
            self.arrivals_seen += 1
            self._enqueue(request, self.arrivals_seen, front=False)

    def _enqueue(self, request: int, order: int, *, front: bool) -> None:
        adapter = self.work.adapter[request]
        queue = self.queues[adapter]
        self.waiting += 1
        if self.batch_of[adapter]:
            self.waiting_in += 1
        if not queue:
            self.client.queued(adapter)
        if front:
            queue.appendleft((order, request))
        else:
            queue.append((order, request))
        if front or len(queue) == 1:
            heapq.heappush(self.heads_in if self.batch_of[adapter] else self.heads_out, (order, adapter))

    def _schedule(self) -> tuple[list[int], int, float, int]:
        """The decisions of one step: (requests whose prompt ends, prompt tokens, adapter load seconds, queue entries looked
        at).
        """
        budget = self.config.max_batched_tokens - self.decoding
        growing = self.grows_at[self.step % KV_BLOCK_TOKENS]
        preempted = False
        while growing > self.free_blocks:
            growing, budget = self._preempt(growing, budget)
            preempted = True
        self.free_blocks -= growing
        prefills: list[int] = []
        tokens = 0
        if self.partial is not None:
            tokens, preempted = self._continue_partial(budget, prefills, preempted)
        if preempted:
            return prefills, tokens, 0.0, 0
        load_s, admitted_tokens, scanned = self._admit(budget - tokens, prefills)
        return prefills, tokens + admitted_tokens, load_s, scanned

    def _continue_partial(self, budget: int, prefills: list[int], preempted: bool) -> tuple[int, bool]:
        request = self.partial
        assert request is not None
        left = self.work.prompt_tokens[request] + self.generated[request] - self.partial_done
        chunk = min(left, budget)
        blocks = _blocks(self.partial_done + chunk) - _blocks(self.partial_done)
        if blocks > self.free_blocks:  # it is the youngest
            self._preempt(0, 0)
            return 0, True
        self.free_blocks -= blocks
        self.partial_done += chunk
        if chunk == left:
            prefills.append(request)
            self.partial = None
        return chunk, preempted

    def _admit(self, budget: int, prefills: list[int]) -> tuple[float, int, int]:
        load_s = 0.0
        tokens = 0
        while self.waiting and budget > 0:
            if len(self.running) >= self.config.max_num_seqs:
                return load_s, tokens, 0
            adapter = self._next_adapter()
            if adapter is None:  # every waiting request would need one more slot than there are
                return load_s, tokens, self.waiting
            _, request = self.queues[adapter][0]
            needs = self.work.prompt_tokens[request] + self.generated[request]
            chunk = min(needs, budget)
            blocks = _blocks(chunk)
            if blocks > self.free_blocks:
                break
            self._dequeue(adapter)
            load_s += self._enter(request, adapter)
            self.free_blocks -= blocks
            budget -= chunk
            tokens += chunk
            if chunk == needs:
                prefills.append(request)
            else:
                self.partial, self.partial_done = request, chunk
        if self.waiting and self.distinct == self.config.a_max:  # those ahead of the first that could go were passed over
            return load_s, tokens, self.waiting // (self.waiting_in + 1)
        return load_s, tokens, 0

    def _next_adapter(self) -> int | None:
        """The adapter of the first waiting request that vLLM would take; None when no request has a slot."""
        first = self._top(self.heads_in, in_batch=True)
        if self.distinct >= self.config.a_max:
            return None if first is None else first[1]
        other = self._top(self.heads_out, in_batch=False)
        if first is None or (other is not None and other < first):
            first = other
        return None if first is None else first[1]

    def _top(self, heads: list[tuple[int, int]], *, in_batch: bool) -> tuple[int, int] | None:
        while heads:
            order, adapter = heads[0]
            queue = self.queues[adapter]
            if queue and queue[0][0] == order and (self.batch_of[adapter] > 0) == in_batch:
                return heads[0]
            heapq.heappop(heads)  # outdated
        return None

    def _dequeue(self, adapter: int) -> None:
        queue = self.queues[adapter]
        queue.popleft()
        self.waiting -= 1
        if self.batch_of[adapter]:
            self.waiting_in -= 1
        if queue:
            heapq.heappush(self.heads_in if self.batch_of[adapter] else self.heads_out, (queue[0][0], adapter))
        else:
            self.client.unqueued(adapter)

    def _enter(self, request: int, adapter: int) -> float:
        """Put a request into the batch. Returns the seconds to load its adapter into a slot."""
        self.running[request] = None
        self.batch_of[adapter] += 1
        if self.batch_of[adapter] > 1:
            return 0.0
        self.client.entered(adapter)
        self.distinct += 1
        queue = self.queues[adapter]
        self.waiting_in += len(queue)
        if queue:
            heapq.heappush(self.heads_in, (queue[0][0], adapter))
        if adapter in self.idle:
            del self.idle[adapter]
            return 0.0
        if self.distinct + len(self.idle) > self.config.a_max:
            self.idle.popitem(last=False)
        self.loads += 1
        return self.load_s[adapter]

    def _leave(self, request: int) -> None:
        adapter = self.work.adapter[request]
        self.batch_of[adapter] -= 1
        if self.batch_of[adapter]:
            return
        self.client.left(adapter)
        self.distinct -= 1
        self.idle[adapter] = None
        queue = self.queues[adapter]
        self.waiting_in -= len(queue)
        if queue:
            heapq.heappush(self.heads_out, (queue[0][0], adapter))

    def _preempt(self, growing: int, budget: int) -> tuple[int, int]:
        """Send the youngest request back to the queue. Returns the changes of (growing requests, token budget)."""
        request, _ = self.running.popitem()
        self.preemptions += 1
        if request == self.partial:
            self.free_blocks += _blocks(self.partial_done)
            self.partial = None
        else:
            held = self.step - 1 - self.joined_step[request]
            grows_now = self._phase(request) == self.step % KV_BLOCK_TOKENS
            growing -= grows_now
            self.generated[request] += held
            self._stop_decoding(request, held)
            budget += 1
        self._leave(request)
        self.front -= 1
        self._enqueue(request, self.front, front=True)
        return growing, budget

    # ---- run

    def _run(self, prefills: list[int], prefill_tokens: int, extra_s: float) -> None:
        """Let time pass: one step, or all steps up to the next event if the batch cannot change before it."""
        rows = self.decoding + len(prefills)
        tokens = self.decoding + prefill_tokens
        mixed = prefill_tokens > 0
        first_s = self.steps.seconds(tokens, rows, self.context_tokens, self.distinct, mixed=mixed) + extra_s
        count, took_s = 1, first_s
        if self.one_go and not mixed and self.decoding:
            growth_s = self.steps.context_s * self.decoding
            count = self._steps_until_event(first_s, growth_s)
            took_s = count * first_s + growth_s * count * (count - 1) / 2
            rounds, rest = divmod(count - 1, KV_BLOCK_TOKENS)
            self.free_blocks -= rounds * self.decoding
            for ahead in range(1, rest + 1):
                self.free_blocks -= self.grows_at[(self.step + ahead) % KV_BLOCK_TOKENS]
        self.client.stepped(self.now_s, took_s, count, self.decoding, len(self.running))
        self.now_s += took_s
        self.step += count - 1  # the last of them is the one that `_postprocess` ends
        self.context_tokens += count * self.decoding

    def _steps_until_event(self, first_s: float, growth_s: float) -> int:
        count = self.end_steps[0] - self.step + 1
        spare = self.free_blocks // self.decoding  # every request takes at most one block in 16 steps
        count = min(count, spare * KV_BLOCK_TOKENS + 1)
        gap_s = min(self.client.next_arrival_s(), self.end_s) - self.now_s
        if gap_s <= first_s:
            return 1
        # the smallest n whose n steps reach the arrival: n first + growth n (n - 1) / 2 >= gap
        linear = first_s - growth_s / 2
        steps = 2 * gap_s / (math.sqrt(linear * linear + 2 * growth_s * gap_s) + linear)
        return max(1, count if steps >= count else math.ceil(steps))

    # ---- postprocess

    def _postprocess(self, prefills: list[int]) -> None:
        for request in self.ends.pop(self.step, ()):
            if self.ends_step[request] == self.step and self.joined_step[request] >= 0:
                self._stop_decoding(request, self.step - self.joined_step[request])
                self._finish(request)
        while self.end_steps and self.end_steps[0] <= self.step:
            heapq.heappop(self.end_steps)
        for request in prefills:
            self._start_decoding(request)
        self.step += 1

    def _start_decoding(self, request: int) -> None:
        tokens = self.work.prompt_tokens[request] + self.generated[request]
        self.generated[request] += 1
        if self.generated[request] == 1:
            self.client.first_token(request, self.now_s)
        left = self.work.output_tokens[request] - self.generated[request]
        if left <= 0:
            self.free_blocks += _blocks(tokens)
            self._finish(request)
            return
        self.joined_step[request] = self.step
        self.joined_tokens[request] = tokens
        self.decoding += 1
        self.context_tokens += tokens + 1
        self.grows_at[self._phase(request)] += 1
        last = self.step + left
        self.ends_step[request] = last
        if last not in self.ends:
            self.ends[last] = []
            heapq.heappush(self.end_steps, last)
        self.ends[last].append(request)

    def _stop_decoding(self, request: int, steps: int) -> None:
        """Remove a request from the decodes after `steps` of them, and free its blocks."""
        tokens = self.joined_tokens[request] + steps
        self.grows_at[self._phase(request)] -= 1
        self.decoding -= 1
        self.context_tokens -= tokens + 1
        self.free_blocks += _blocks(tokens)
        self.joined_step[request] = -1

    def _finish(self, request: int) -> None:
        del self.running[request]
        self._leave(request)
        self.client.finished(request, self.now_s)

    def _phase(self, request: int) -> int:
        """The step modulo 16 in which a decoding request needs a new block, because its last block has 16 tokens."""
        return (self.joined_step[request] + 1 - self.joined_tokens[request]) % KV_BLOCK_TOKENS


def _blocks(tokens: int) -> int:
    return -(-tokens // KV_BLOCK_TOKENS)
