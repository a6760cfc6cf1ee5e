"""Several engines as one: each request goes where it costs least, and on to another where that engine is lost.

The cost is what a replica has to compute already, and what of the request's prompt it would have to compute beside; so
a request goes where its prefix is, unless that replica is far busier.

When a replica is lost its requests go on elsewhere with the tokens that they have, as after a preemption: a token
depends on those before it and on the request's seed, not on who computes it.

Where some engines are for prompts and the others for answers, a request goes to one of the first, and as soon as that
has begun with it also to one of the second, which fetches what the first computes. While there are none of one kind,
those of the other do all.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from hex_llm.engine.affinity import Belief
from hex_llm.engine.block_pool import extend_keys
from hex_llm.engine.client import EngineClient, Sink, tell_failure
from hex_llm.engine.entry import AnswerSink, Entry, Group, PromptSink
from hex_llm.engine.output import Output, Stats
from hex_llm.engine.replica import Load, Replica, add_up, last_words
from hex_llm.engine.request import FinishReason, Request
from hex_llm.engine.wire import Alive, Found, Ready, Starting
from hex_llm.errors import EngineDead, HexError, Unavailable
from hex_llm.topology import Topology

logger = logging.getLogger(__name__)

MAX_REPLAYS = 2
# After so many times that its blocks could not be had, the engine that computes a prompt goes on with it.
MAX_LOST = 2
# How many outstanding tokens a token counts for that a replica has not cached: it makes the request wait as they do,
# and it is work beside. So what has the same prompt as one that is being computed waits for that.
_RECOMPUTED = 2
_FIRST_MEAN = 256.0  # tokens of an answer, before any has ended
_WINDOW = 64  # answers that the mean looks back on


class Router:
    """Towards the server one engine. `found` is what the first replica knows of the model; `ready` is done when all of
    them have been ready once; `lost` is set when none is left, or when one fails before it was ever ready.
    """

    def __init__(self, num_replicas: int, *, num_prefill: int = 0, queue_timeout: float = math.inf):
        """The first `num_prefill` are for prompts, and then the others for answers; where it is 0, all are for both."""
        loop = asyncio.get_running_loop()
        self.found: asyncio.Future[Found] = loop.create_future()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.lost = asyncio.Event()
        self.exit_code: int | None = None  # that the engine which was lost last has said, where it has
        self.on_step: Callable[[Sequence[Output]], None] = lambda outputs: None
        self.on_send: Callable[[int, bool], None] = lambda replica, again: None
        self._num_prefill = num_prefill
        kinds = Topology(num_prefill, num_replicas - num_prefill) if num_prefill else None
        names = [kinds.name(index) if kinds else f"replica {index}" for index in range(num_replicas)]
        self.replicas = tuple(Replica(index, name.capitalize()) for index, name in enumerate(names))
        self._queue_timeout = queue_timeout
        self._entries: dict[str, Entry] = {}
        self._groups: dict[str, Group] = {}
        self._held: dict[str, Entry] = {}  # that nobody can take at the moment, oldest first
        self._num_sent = 0
        self._num_ended = 0
        self._mean_length = _FIRST_MEAN
        self._gone = add_up([])  # what those have counted that are no more

    def join(self, replica: int, client: EngineClient) -> None:
        """An engine has connected, for the first time or again."""
        there = self.replicas[replica]
        before, there.client = there.client, client
        if before is not None:  # it has gone, and its connection has not heard of that yet
            before.give_up()
        there.num_joined += 1
        client.on_step = lambda outputs: self.on_step(outputs)
        client.on_change = lambda: self._changed(there, client)
        self._changed(there, client)

    def drop(self, replica: int) -> None:
        """Takes a replica out that has fallen silent, without waiting for its connection to end."""
        if (client := self.replicas[replica].client) is not None:
            client.give_up()

    def add(self, request: Request, sink: Sink, group: str = "") -> None:
        """Hands a request over. `group` is one for all sequences of an HTTP request, and no other's: once one of them
        has begun, the others are not given up for having waited too long.
        """
        if self.lost.is_set():
            raise EngineDead("The engine has stopped; the server is about to end.")
        name = group or request.id
        entry = Entry(self, request, sink, self._groups.get(name) or Group(name))
        self._place(entry)
        self._entries[request.id] = entry
        self._groups[name] = entry.group
        entry.group.size += 1

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends requests; their sinks hear no more. Those that have ended before are passed over."""
        entries = [entry for request_id in request_ids if (entry := self._entries.get(request_id))]
        sent: defaultdict[EngineClient, list[str]] = defaultdict(list)
        for entry in entries:
            for client in entry.clients():
                sent[client].append(entry.sent_id)
        for client, ids in sent.items():
            client.abort(ids, reason)
        for entry in entries:
            self.end(entry, completed=reason == FinishReason.STOP)

    def close(self) -> None:
        for each in self.replicas:  # none of them shall take over what another leaves
            each.belief = None
        for client in self._clients():
            client.close()

    def silence(self, replica: int) -> tuple[float, bool]:
        """Seconds since a replica was last heard of, and whether it may be compiling, which takes long. One that is
        not connected has nothing to say.
        """
        client = self.replicas[replica].client
        return (0.0, True) if client is None else client.silence()

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_up(self) -> int:
        return sum(each.is_up for each in self.replicas)

    @property
    def progress(self) -> Starting:
        """Of the first replica that is not ready."""
        starting = [client.progress for client in self._clients() if client.ready is None]
        return starting[0] if starting else Starting("starting", 0.0)

    @property
    def stats(self) -> Stats | None:
        """All replicas together. What only ever grows still holds what those brought that have gone."""
        heard = any(client.alive is not None for client in self._clients())
        return self._alive().stats if heard else None

    @property
    def late_compiles(self) -> int:
        return self._alive().late_compiles

    @property
    def late_compile_seconds(self) -> float:
        return self._alive().late_compile_seconds

    @property
    def invariant_violations(self) -> int:
        return self._alive().invariant_violations

    def _alive(self) -> Alive:
        return add_up([self._gone, *(client.alive for client in self._clients() if client.alive is not None)])

    def _clients(self) -> list[EngineClient]:
        return [each.client for each in self.replicas if each.client is not None]

    def _changed(self, there: Replica, client: EngineClient) -> None:
        if client.found is not None and not self.found.done():  # else nobody waits for it any more
            self.found.set_result(client.found)
        if client.lost:
            self._lose(there, client)
        elif client.ready is not None and not there.is_up:
            there.ready = client.ready
            there.belief = Belief(client.ready.limits.num_blocks - 1)
            readies = [each.ready for each in self.replicas if each.ready is not None]
            if len(readies) == len(self.replicas) and not self.ready.done():
                # What one of them has no room for, no request may ask for.
                self.ready.set_result(min(readies, key=lambda ready: ready.limits.num_blocks))
            for entry in list(self._held.values()):
                self.resend(entry)

    def _lose(self, there: Replica, client: EngineClient) -> None:
        """What it had to do comes next, one request after the other, to `replay`."""
        there.belief = None
        if there.client is client:  # else it is back already
            there.client = None
        if client.alive is not None:
            self._gone = add_up([self._gone, last_words(client.alive)])
        if there.ready is None or not self._clients():
            self.exit_code = client.exit_code
            self.lost.set()
            for entry in list(self._held.values()):
                self.fail(entry, EngineDead("The engine stopped before it had the request.", status=500))
        elif there.num_requests:
            logger.warning("%s is lost; the others take over its %d requests.", there.name, there.num_requests)

    def go_on(self, entry: Entry, *, again: bool = False) -> None:
        """Sends a request, whose prompt is being computed, also to an engine that goes on with it."""
        first, handed = entry.load, entry.handed
        decode = [each for each in self._up() if self._is_for_answers(each)]
        if not decode or entry.num_lost == MAX_LOST:
            self.resend(entry)
            return
        assert first is not None
        assert first.replica.ready is not None
        assert handed is not None
        keys = self._keys(decode[0], handed)
        num_answer = self._expected(entry.request)
        fullness = {each: each.fullness(each.num_uncached(handed, keys) + num_answer) for each in decode}
        # What the sequences of a group share goes to one engine, and once, while that has room for them.
        joined = [each for each in decode if each.index == entry.group.answers and fullness[each][0] <= 1]
        there = min(joined or decode, key=lambda each: fullness[each])
        request = replace(
            handed,
            hands_over=False,
            max_output=entry.request.max_output,
            sampling=replace(handed.sampling, prompt_logprobs=None),  # they come with the first token
            source=first.replica.ready.pages,
        )
        try:
            self._send(entry, there, request, AnswerSink(entry), keys)
        except HexError as error:
            self.fail(entry, error)
        else:
            entry.next_load = Load(there, 0, num_answer, handed.num_known + num_answer)
            entry.group.answers = there.index
            self.on_send(there.index, again)

    def replay(self, entry: Entry, error: HexError) -> None:
        """The replica is lost that had a request: another one takes it over."""
        if self.lost.is_set() or entry.num_replays == MAX_REPLAYS:
            self.fail(entry, error)
        else:
            entry.num_replays += 1
            self.resend(entry)

    def replay_answer(self, entry: Entry, error: HexError) -> None:
        assert entry.next_load is not None
        if entry.handed is not None and entry.num_replays < MAX_REPLAYS and not self.lost.is_set():
            entry.num_replays += 1
            entry.next_load.end()
            entry.next_load = None
            entry.early = []
            self.go_on(entry, again=True)
        else:
            self.replay(entry, error)

    def resend(self, entry: Entry) -> None:
        entry.leave()
        try:
            self._place(entry)
        except HexError as error:
            self.fail(entry, error)

    def _up(self) -> list[Replica]:
        return [each for each in self.replicas if each.is_up]

    def _is_for_answers(self, replica: Replica) -> bool:
        return replica.index >= self._num_prefill

    def _place(self, entry: Entry) -> None:
        """Sends a request where it costs least, or holds it where nobody can take it."""
        request = entry.request
        up = self._up()
        # What several replicas died of, perhaps, shall not take the last one with it.
        if not up or (len(up) == 1 and entry.num_replays == MAX_REPLAYS):
            self._hold(entry)
            return
        prefill = [each for each in up if not self._is_for_answers(each)]
        keys = self._keys(up[0], request)
        uncached = {each: each.num_uncached(request, keys) for each in prefill or up}
        there = min(uncached, key=lambda each: self._rank(each, uncached[each]))
        entry.num_sent += 1
        several = prefill and len(prefill) < len(up) and entry.num_lost < MAX_LOST
        if entry.num_lost == MAX_LOST:
            logger.warning("Request %s is one engine's now: its blocks could not be had from it.", request.id)
        if several and request.max_output - len(request.output) > 1:
            output = list(request.output)
            entry.handed = replace(
                _unanswered(request), id=entry.sent_id, output=output, hands_over=True, max_output=len(output) + 1
            )
            sent, sink, num_answer = entry.handed, PromptSink(entry), 0
        else:
            sent, sink, num_answer = replace(_unanswered(request), id=entry.sent_id), entry, self._expected(request)
        self._send(entry, there, sent, sink, keys)
        self._held.pop(request.id, None)
        entry.load = Load(there, uncached[there], num_answer)
        self.on_send(there.index, entry.num_replays + entry.num_lost > 0)

    def _send(self, entry: Entry, there: Replica, request: Request, sink: Sink, keys: Sequence[bytes]) -> None:
        assert there.client is not None
        assert there.belief is not None
        waited = None if entry.group.begun else time.monotonic() - entry.arrival
        there.client.add(request, sink, entry.group.name, waited)
        self._num_sent += 1
        there.last_sent = self._num_sent
        there.belief.enter(keys)

    def _expected(self, request: Request) -> int:
        """How many tokens of its answer are still to come, as far as anybody can know."""
        return min(request.max_output - len(request.output), round(self._mean_length))

    def _rank(self, replica: Replica, num_uncached: int) -> tuple[int, ...]:
        """A request goes where it is lowest, given how much of the request would have to be computed there."""
        return replica.num_outstanding + _RECOMPUTED * num_uncached, replica.num_requests, replica.last_sent

    def _hold(self, entry: Entry) -> None:
        self._held[entry.request.id] = entry
        if self._queue_timeout < math.inf:
            wait = self._queue_timeout
            if not entry.group.begun:
                wait -= time.monotonic() - entry.arrival
            asyncio.get_running_loop().call_later(max(wait, 0.0), self._expire, entry)

    def _expire(self, entry: Entry) -> None:
        """Gives up a request that nobody has begun with, or that nobody is left for who could take the risk."""
        if self._held.get(entry.request.id) is not entry:
            return
        if not entry.group.begun:
            waited = f"The request waited for more than {self._queue_timeout:g} s for an engine to begin with it."
            self.fail(entry, Unavailable(waited, code="queue_timeout"))
        elif entry.num_replays == MAX_REPLAYS:
            self.fail(entry, EngineDead("The engine stopped again and again with the request.", status=500))

    def fail(self, entry: Entry, error: HexError) -> None:
        self.end(entry, completed=False)
        tell_failure(entry.sink, error)

    def end(self, entry: Entry, *, completed: bool) -> None:
        """Forgets a request. Where its answer is complete, its replica has that in its cache too."""
        request, load, group = entry.request, entry.load, entry.group
        if self._entries.pop(request.id, None) is None:  # it ended before, and its sink could not take that in
            return
        self._held.pop(request.id, None)
        group.size -= 1
        if not group.size:
            del self._groups[group.name]
        entry.leave()
        if completed:
            self._num_ended = min(self._num_ended + 1, _WINDOW)
            self._mean_length += (len(request.output) - self._mean_length) / self._num_ended
            if load is not None and (belief := load.replica.belief) is not None:
                belief.enter(self._keys(load.replica, request))

    def _keys(self, there: Replica, request: Request) -> list[bytes]:
        """Of the blocks that a replica has when it has computed all but the last token. They go with the request, so
        that the engine need not work them out again.
        """
        assert there.ready is not None
        limits = there.ready.limits
        if len(self.replicas) == 1 or not limits.prefix_caching:
            return []
        return extend_keys(request, (request.num_known - 1) // limits.block_size, limits.block_size)


def _unanswered(request: Request) -> Request:
    """The request without what its client has been told already: that came with the first token."""
    if request.output and request.sampling.prompt_logprobs is not None:
        return replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
    return request
