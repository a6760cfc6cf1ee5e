"""Decides what each step computes, and takes in what came of it.

A request has `num_tokens` and `num_computed`, and a step closes some of the gap. A step is planned before the one
before it has been read, so `schedule` counts a slice as computed at once, and `update` fills in the tokens later.

First come, first served. Memory that runs out is taken from whoever was started last, which starts again later with its
output kept; the first never gives way, so there is always progress. Nobody gives way for ever: after a few times a
request is lasting, and when it runs again others give way for it, also those before it. As many of these run at a time
as there is memory for, whatever they come to need; the next of them waits, and those behind it pass.

A sequence that grows beyond `Limits.rope_switch` is computed anew, because all its keys are rotated otherwise then.

Where no layer sees further back than `Limits.reach` tokens, a request gives back what is out of reach as it goes on,
and never has more than `Limits.most_blocks`, however long it gets.

A request that another engine computes the prompt of gets blocks and a slot like any other, and has nothing to do until
the prompt has come. One that is computed for another engine leaves its blocks behind until they are taken.

A request whose adapter is not on the device waits for it, and those behind it pass.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hex_llm import faults
from hex_llm.engine.adapters import Adapters
from hex_llm.engine.block_pool import BlockPool, extend_keys
from hex_llm.engine.limits import Limits
from hex_llm.engine.making import Making
from hex_llm.engine.output import Output, Stats
from hex_llm.engine.request import FinishReason, Request, TokenLogprobs
from hex_llm.engine.step import Logprobs, Slice, StepResult

MOST_PREEMPTIONS = 4  # of a request, for want of memory


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    tokens: int  # that still fit
    prefills: int  # that still fit
    promised: int = 0  # blocks that requests which sit this step out are waiting for
    kept: int = 0  # blocks for lasting requests whose turn is still to come
    slices: list[Slice] = field(default_factory=list)


class Scheduler:
    def __init__(self, limits: Limits, adapters: Adapters | None = None):
        self.limits = limits
        self.adapters = adapters or Adapters(0)
        self.pool = BlockPool(limits.num_blocks)
        self.running: dict[str, Request] = {}  # in the order in which they were started
        self._lasting: dict[str, Request] = {}  # of those that run: they give way no more
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # in the order in which they came
        self._numbers = itertools.count()  # of requests, as they come
        self._slots = list(reversed(range(limits.max_running)))
        self._num_scheduled = 0  # steps
        self._num_read = 0  # steps
        self._num_preemptions = 0
        self._num_prefix_queries = 0  # tokens
        self._num_prefix_hits = 0  # tokens
        self._begun: list[str] = []  # requests that were started for the first time, until somebody asks
        self.held: dict[str, list[int]] = {}  # the blocks of requests that were handed over and not taken yet
        self.coming: dict[str, Request] = {}  # of those that run: they wait for what is in their blocks
        self._new_coming: list[Request] = []  # until somebody asks
        self._making = Making()

    def add(self, request: Request) -> None:
        request.number = next(self._numbers)
        self.waiting[request.id] = request
        self.adapters.wait(request)

    def find(self, request_id: str) -> Request | None:
        return self.running.get(request_id) or self.waiting.get(request_id)

    def take_begun(self) -> list[str]:
        """The requests that were started for the first time since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def take_coming(self) -> list[Request]:
        """The requests that have got blocks since the last call, for another engine to fill: all but the first
        `num_computed` tokens."""
        coming, self._new_coming = self._new_coming, []
        return coming

    def complete(self, request_id: str, token: int) -> Request | None:
        """All that a request has waited for is here, and the token after it. None where it is not waited for."""
        request = self.coming.pop(request_id, None)
        if request is not None:
            first, request.num_computed = request.num_computed, request.num_known
            request.is_coming, request.source = False, ""
            if self.limits.prefix_caching:
                self._remember(request, first, request.num_computed)
            self._making.end(request)
            request.output.append(token)
        return request

    def release(self, request_id: str) -> bool:
        """Gives free what was kept of a request that was handed over."""
        blocks = self.held.pop(request_id, None)
        if blocks is not None:
            self.pool.release(blocks, after=self._num_scheduled)
            self.pool.reclaim(self._num_read)
        return blocks is not None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request, wherever it is. Tokens still under way to it are dropped when they come."""
        request.finish_reason = reason
        if request.slot >= 0:
            self._stop(request)
        else:
            del self.waiting[request.id]
            self.adapters.leave(request)

    def schedule(self) -> list[Slice]:
        """Plans one step: decodes first, then what has been started, then new requests with what is left.

        Not chunked, a step only decodes when there is nothing to prefill.
        """
        if self.limits.rope_switch is not None:
            # The youngest first: each goes to the front of those that wait.
            for request in reversed(list(self.running.values())):
                if request.num_pending and self._outgrown(request):
                    self._put_back(request)
        running = list(self.running.values())
        if self.limits.reach is not None:
            for request in running:
                self._give_back(request)
            self.pool.reclaim(self._num_read)
        plan = _Plan(tokens=self._step_tokens(running), prefills=self.limits.max_prefills)
        if self._lasting:
            self._keep_room(plan)
        if self.limits.chunked:
            self._advance(plan, running)
            self._admit(plan)
        else:
            self._advance(plan, [request for request in running if request.num_pending > 1])
            self._admit(plan)
            if not plan.slices:
                self._advance(plan, [request for request in running if request.num_pending == 1])
        if plan.prefills < self.limits.max_prefills:
            plan.slices.sort(key=lambda s: (s.length > 1, s.fresh))
        if plan.slices:
            self._num_scheduled += 1
        return plan.slices

    def update(self, step: Sequence[Slice], result: StepResult) -> list[Output]:
        """Takes in the oldest step that has not been read; returns what each request gained by it."""
        self._num_read += 1
        outputs = []
        tokens, finite = result.tokens.tolist(), result.finite.tolist()
        if faults.ARE_SET:
            rows = zip(step, finite, strict=True)
            finite = [good and not (piece.samples and faults.reach("engine.row")) for piece, good in rows]
        for row, piece in enumerate(step):
            request = piece.request
            request.num_in_flight -= piece.samples
            if request.finish_reason is not None:
                continue
            if piece.samples and not finite[row]:
                # The prefix may be what is broken: nobody else shall meet it.
                self.pool.forget(request.keys)
                self.finish(request, FinishReason.ERROR)
                outputs.append(
                    Output(request.id, (), None, request.finish_reason, request.num_cached, request.num_preemptions)
                )
                continue
            if request.slot >= 0 and self.limits.prefix_caching:
                self._remember(request, piece.start, piece.start + piece.length)
            if result.prompt_logprobs and (logprobs := result.prompt_logprobs[row]):
                _extend_prompt_logprobs(piece, logprobs)
            if piece.samples:
                outputs.append(self._append(request, tokens[row], result.logprobs, row))
        self.pool.reclaim(self._num_read)
        return outputs

    def restart(self) -> None:
        """The device has forgotten everything, and what it made of steps that were not read: all that runs is computed
        again.
        """
        for request in (*self.running.values(), *self.waiting.values()):
            request.num_in_flight = 0
        self._num_read = self._num_scheduled
        for request in reversed(list(self.running.values())):  # the youngest first, as in `schedule`
            self._put_back(request)
        self.pool.reclaim(self._num_read)
        self.pool.forget_all()

    def preempt_youngest(self) -> None:
        """As if its memory were wanted; nothing, where that would leave nobody to want it, or it never is any more."""
        if len(self.running) > 1 and self._next_victim() is (youngest := next(reversed(self.running.values()))):
            self._preempt(youngest)

    def stats(self) -> Stats:
        return Stats(
            running=len(self.running) - len(self.coming),
            waiting=len(self.waiting),
            blocks=self.pool.num_blocks,
            blocks_used=self.pool.num_blocks - self.pool.num_free,
            blocks_cached=self.pool.num_cached,
            total_steps=self._num_scheduled,
            total_preemptions=self._num_preemptions,
            total_prefix_queries=self._num_prefix_queries,
            total_prefix_hits=self._num_prefix_hits,
            blocks_held=len(set(itertools.chain.from_iterable(self.held.values()))),  # several may share some
            coming=len(self.coming),
        )

    def check(self) -> None:
        """Asserts that no block and no slot is lost or shared by mistake."""
        owned = (request.blocks[request.num_freed :] for request in self.running.values())
        self.pool.check(itertools.chain(owned, self.held.values()))
        assert self.coming.items() <= self.running.items(), "a request waits for its blocks and has none"
        lasting = {name for name, each in self.running.items() if _lasts(each)}
        assert self._lasting.keys() == lasting, "one that gives way no more might have to"
        self._making.check(self.running)
        self.adapters.check(self.running.values(), self.waiting.values())
        for request in self.running.values():
            assert request.num_freed <= self.limits.first_block(request.num_computed), "a block was freed too early"
            assert len(request.blocks) - request.num_freed <= self.limits.most_blocks, "a request has too many blocks"
        slots = [*self._slots, *(request.slot for request in self.running.values())]
        assert sorted(slots) == list(range(self.limits.max_running)), "a slot is lost, or given twice"
        for request in self.waiting.values():
            assert (request.slot, request.blocks, request.num_freed, request.num_computed) == (-1, [], 0, 0)
        numbers = [request.number for request in self.waiting.values()]
        assert numbers == sorted(numbers), "somebody waits behind one that came later"
        assert not any(request.num_pending > 1 for request in list(self.running.values())[:-1])

    def _step_tokens(self, running: Sequence[Request]) -> int:
        """Room in the next step: less where requests decode that a large step would hold up."""
        limits = self.limits
        if limits.chunked and limits.mixed_tokens is not None and any(request.num_pending == 1 for request in running):
            return limits.mixed_tokens
        return limits.step_tokens

    def _advance(self, plan: _Plan, requests: Sequence[Request]) -> None:
        """Moves running requests on, oldest first, so that one that must give way has no slice in the plan yet.

        Only the youngest can have more than a token to go: nobody is admitted after one whose slice was cut short.
        """
        for request in requests:
            pending = request.num_pending
            if request.slot < 0 or not pending:  # preempted below, or waiting for its last token
                continue
            if not (request.is_seated or plan.prefills):
                continue
            length = min(pending, plan.tokens)
            num_old_blocks = len(request.blocks)
            if self._grow(plan, request, request.num_computed + length):
                self._take(plan, request, length, pending, num_old_blocks)

    def _keep_room(self, plan: _Plan) -> None:
        """Has others give way for what lasting requests can take of this step, before anybody has a slice of it."""
        for request in self._lasting.values():
            length = min(request.num_pending, plan.tokens)
            plan.kept += self._num_lacking(request, request.num_computed + length)
        while plan.kept > self.pool.num_free + self.pool.num_retired and (victim := self._next_victim()):
            self._preempt(victim)

    def _next_victim(self) -> Request | None:
        """Who gives way next. One whose blocks are being filled has nothing to give but what another engine has done
        for it."""
        able = (each for each in reversed(self.running.values()) if not (each.is_coming or each.id in self._lasting))
        return next(able, None)

    def _num_lacking(self, request: Request, num_tokens: int) -> int:
        return max(-(-num_tokens // self.limits.block_size) - len(request.blocks), 0)

    def _grow(self, plan: _Plan, request: Request, num_tokens: int) -> bool:
        """Gets a request the blocks for `num_tokens` tokens. Where it cannot have them now it sits this step out:
        either memory comes back when a step under way has been read, or what another engine fills has come, or it is
        the one that gave way.
        """
        need = self._num_lacking(request, num_tokens)
        if not need:
            return True
        if request.id in self._lasting:
            plan.kept -= need
        while need > self.pool.num_free + self.pool.num_retired - plan.promised - plan.kept:
            victim = self._next_victim()
            if victim is None:
                break
            self._preempt(victim)
            if victim is request:
                return False
        if need > self.pool.num_free - plan.kept:
            plan.promised += need
            return False
        request.blocks += self.pool.allocate(need)
        return True

    def _give_back(self, request: Request) -> None:
        """Takes the blocks back that only steps under way can still look at."""
        first = self.limits.first_block(request.num_computed)
        if first > request.num_freed:
            self.pool.release(request.blocks[request.num_freed : first], after=self._num_scheduled)
            request.num_freed = first

    def _admit(self, plan: _Plan) -> None:
        """Starts waiting requests, oldest first, with blocks for all they have to compute, or as many as they will
        ever need at once: from then on what they give back makes up for what they gain.

        Where a running request sits the step out, nobody is started in its stead.
        """
        self.adapters.allot(self.waiting.values())
        queue = iter(list(self.waiting.values()) if self._slots else ())
        may_last = True
        while self._slots and plan.prefills and plan.tokens and not plan.promised:
            request = next(queue, None)
            # Nobody is left, or a token it was preempted without is still to come.
            if request is None or request.last_step > self._num_read:
                break
            if self.pool.num_free <= len(self.running):  # as `acquire` would find, but for a long prompt late
                break
            if not self.adapters.has(request):
                continue
            if _lasts(request):
                # Those behind one of these pass it, but for others of these: with less to come they always might.
                may_last = may_last and self._may_last(request)
                if not may_last:
                    continue
            if self._outgrown(request):
                request.is_long, request.keys = True, []
            keys = self._usable_keys(request)
            found = self.pool.find(keys, self.limits.reach_blocks)
            if self._making.has(request, keys[len(found) :]):
                continue
            count = -(-request.num_tokens // self.limits.block_size)
            if request.source:  # what its next token does not see need not come
                found = max(found, [0] * self.limits.first_block(request.num_known), key=len)
            else:
                count = min(count, found.count(0) + self.limits.most_blocks)
            blocks = self.pool.acquire(found, count - len(found), spare=self._spare(request))
            if blocks is None:
                break
            self._start(request, blocks, len(found))
            self._making.begin(request, keys[len(found) :])
            if request.source:
                request.is_coming = True
                self.coming[request.id] = request
                self._new_coming.append(request)
                continue
            pending = request.num_pending
            self._take(plan, request, min(pending, plan.tokens), pending, num_old_blocks=0)

    def _spare(self, request: Request) -> int:
        """How many blocks are to stay free beside those that a request starts with.

        One to grow into for each that runs. Progress rests on it: where prefills go first, one that gave way would
        otherwise take the very block back that it gave way for, again and again. Twice as many each time that it gave
        way, so that it seldom does so often.
        """
        return len(self.running) << (0 if _lasts(request) else request.num_preemptions)

    def _may_last(self, request: Request) -> bool:
        """Whether memory is enough for all that lasting requests can come to need, if this is to be one of them."""
        size, most = self.limits.block_size, self.limits.most_blocks
        lasting = (*self._lasting.values(), request)
        needs = (min(-(-(len(each.prompt) + each.max_output) // size), most) for each in lasting)
        return sum(needs) <= self.pool.num_blocks

    def _start(self, request: Request, blocks: list[int], num_found: int) -> None:
        """Makes a request one of those that run. The first so many of its blocks are computed."""
        del self.waiting[request.id]
        self.running[request.id] = request
        if _lasts(request):
            self._lasting[request.id] = request
        request.slot = self._slots.pop()
        self.adapters.begin(request)
        request.blocks, request.num_freed = blocks, blocks.count(0)
        request.num_computed = num_found * self.limits.block_size
        is_first, request.has_begun = not request.has_begun, True
        if is_first:
            self._begun.append(request.id)
        # One that brings a part of its answer was counted where that was computed, or is.
        if self.limits.prefix_caching and is_first and not (request.output or request.source):
            self._num_prefix_queries += len(request.prompt)
            self._num_prefix_hits += request.num_computed
            request.num_cached = request.num_computed // self.limits.prefix_unit * self.limits.prefix_unit

    def _usable_keys(self, request: Request) -> list[bytes]:
        """The keys under which a request may find blocks: never that of the last token, whose logits are wanted."""
        if not self.limits.prefix_caching or request.sampling.prompt_logprobs is not None:
            return []
        return extend_keys(request, (request.num_known - 1) // self.limits.block_size, self.limits.block_size)

    def _outgrown(self, request: Request) -> bool:
        """Whether a request was computed as a short sequence, and is one no longer."""
        switch = self.limits.rope_switch
        return switch is not None and not request.is_long and request.num_tokens > switch

    def _take(self, plan: _Plan, request: Request, length: int, pending: int, num_old_blocks: int) -> None:
        """Adds a slice to the plan, and counts it as computed."""
        samples, fresh = length == pending, not request.is_seated
        old = 0 if fresh else num_old_blocks
        plan.slices.append(Slice(request, request.num_computed, length, samples, fresh, old))
        plan.tokens -= length
        plan.prefills -= length > 1 or fresh
        request.is_seated = True
        request.num_computed += length
        request.num_in_flight += samples

    def _preempt(self, request: Request) -> None:
        """Takes a request's memory away, for others."""
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._put_back(request)

    def _put_back(self, request: Request) -> None:
        """Has a request start again, output kept, ahead of all that came later. As a rule that is all that wait."""
        self._stop(request)
        request.num_computed = 0
        request.last_step = self._num_scheduled
        ahead = itertools.takewhile(lambda each: each.number < request.number, self.waiting.values())
        in_front = [request.id, *reversed([each.id for each in ahead])]
        self.waiting[request.id] = request
        for name in in_front:
            self.waiting.move_to_end(name, last=False)
        self.adapters.wait(request)

    def _stop(self, request: Request) -> None:
        """Takes slot and blocks back. The blocks wait until no step under way can touch them, and those of a request
        that was handed over until they are taken.
        """
        del self.running[request.id]
        self._lasting.pop(request.id, None)
        self._slots.append(request.slot)
        request.slot, request.is_seated, request.is_coming = -1, False, False
        self.coming.pop(request.id, None)
        self._making.end(request)
        self.adapters.end(request)
        blocks = request.blocks[request.num_freed :]
        request.blocks, request.num_freed = [], 0
        if request.finish_reason == FinishReason.HANDED_OVER:
            self.held[request.id] = blocks
        else:
            self.pool.release(blocks, after=self._num_scheduled)
            self.pool.reclaim(self._num_read)

    def _remember(self, request: Request, start: int, stop: int) -> None:
        """Offers the blocks that are filled with these tokens to later requests; also those given back since that was
        planned, which nobody gets before it has been read.
        """
        size = self.limits.block_size
        first, end = start // size, stop // size
        if first < end:
            keys = extend_keys(request, end, size)
            for index in range(first, end):
                self.pool.remember(request.blocks[index], keys[index])

    def _append(self, request: Request, token: int, logprobs: Logprobs | None, row: int) -> Output:
        request.output.append(token)
        if token in request.stop_ids:
            self.finish(request, FinishReason.STOP)
        elif len(request.output) >= request.max_output:
            self.finish(request, FinishReason.HANDED_OVER if request.hands_over else FinishReason.LENGTH)
        wanted, found = request.sampling.logprobs, None
        if wanted is not None:
            assert logprobs is not None, "a request of the step asked for logprobs"
            found = (_token_logprobs(logprobs, row, wanted),)
        first = len(request.output) == 1 and request.sampling.prompt_logprobs is not None
        prompt_logprobs = tuple(request.prompt_logprobs) if first else None
        return Output(
            request.id,
            (token,),
            found,
            request.finish_reason,
            request.num_cached,
            request.num_preemptions,
            prompt_logprobs,
        )


def _lasts(request: Request) -> bool:
    """Whether a request gives way no more, from its next start on."""
    return request.num_preemptions >= MOST_PREEMPTIONS


def _token_logprobs(logprobs: Logprobs, row: int, count: int) -> TokenLogprobs:
    top = zip(logprobs.top_ids[row, :count].tolist(), logprobs.top[row, :count].tolist(), strict=True)
    return TokenLogprobs(float(logprobs.own[row]), int(logprobs.rank[row]), tuple(top))


def _extend_prompt_logprobs(piece: Slice, logprobs: Logprobs) -> None:
    """Keeps what a slice says of the prompt and is not known yet, from before a preemption."""
    request = piece.request
    count = request.sampling.prompt_logprobs
    assert count is not None
    known = request.prompt_logprobs
    for position in range(len(known), min(piece.start + piece.length + 1, len(request.prompt))):
        known.append(_token_logprobs(logprobs, position - piece.start - 1, count))
