"""Whatever happens to replicas and requests, no request is lost, none ends twice, and none is answered otherwise."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.engine.router import MAX_REPLAYS, Router
from hex_llm.errors import EngineDead, Unavailable
from tests.engine.fake_porter import FakePorter
from tests.engine.fake_replicas import FakeReplica, Sink, add, check_empty, connected, routed
from tests.engine.fakes import VOCAB, alone, logprobs_alone

ACTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2**32)),
    st.tuples(st.just("step"), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(0, 2)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("die"), st.integers(0, 2)),
    st.tuples(st.just("join"), st.integers(0, 2)),
    st.tuples(st.just("ready"), st.integers(0, 2)),
    st.tuples(st.just("expire"), st.integers(0, 2)),
    st.tuples(st.just("drop"), st.integers(0, 2)),
    st.tuples(st.just("mute"), st.integers(0, 2)),
    st.tuples(st.just("unmute"), st.integers(0, 2)),
)


CHANGES = [
    {},
    {"max_running": 1},
    {"prefix_caching": False},
    {"num_blocks": 17},
    {"rope_switch": 12},
    {"step_tokens": 8},
    {"reach": 6, "step_tokens": 8},
    {"num_adapters": 1, "num_blocks": 17},
]
ADAPTERS = ["", "a", "b", "c"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(ACTS, max_size=80), st.sampled_from([1, 2, 3]), st.sampled_from(CHANGES))
def test_whatever_happens_every_request_ends_once_with_the_tokens_of_an_undisturbed_run(acts, num_replicas, changes):
    _run(acts, num_replicas, 0, changes)


@pytest.mark.parametrize("topology", [(2, 1), (3, 1), (3, 2), (4, 3)], ids=str)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_so_it_does_where_prompts_and_answers_are_computed_by_several_engines(topology, changes):
    heard: Counter[str] = Counter()
    for seed in range(20):
        rng = random.Random(f"{seed} {topology} {changes}")
        names = rng.choices(
            ["add", "step", "abort", "die", "join", "ready", "expire", "drop", "mute", "unmute"],
            [20, 100, 2, 2, 3, 3, 0.2, 0.2, 3, 6],
            k=150,
        )
        acts = [(name, rng.getrandbits(32)) for name in names]
        heard += _run(acts, topology[0], topology[1], changes)
    assert min(heard[name] for name in ("Wanted", "Came", "Complete", "Taken")) > 0, heard
    assert heard["Lost"] + heard["Left"] > 0, heard


def _run(acts, num_replicas, num_prefill, changes) -> "Counter[str]":
    """Says how often replicas heard what from their porters."""
    heard: Counter[str] = Counter()

    @routed(num_replicas, num_prefill=num_prefill)
    async def run(router: Router) -> None:
        model = FakeReplica(**changes).engine._runner.model  # type: ignore[attr-defined]
        port: dict[str, FakePorter] = {}
        porters: list[FakePorter] = []

        def new_replica() -> FakeReplica:
            if not num_prefill:
                return FakeReplica(**changes)
            porters.append(FakePorter(port, str(len(porters))))
            return FakeReplica(porter=porters[-1], **changes)

        replicas = connected(router, new_replica)
        sinks: list[Sink] = []
        aborted: set[int] = set()
        for act, number in acts:
            place = number % num_replicas
            if router.lost.is_set():
                break
            match act:
                case "add":
                    sinks.append(_random_request(router, random.Random(number), "num_adapters" in changes))
                case "abort" if sinks:
                    index = number % len(sinks)
                    if not sinks[index].ended:
                        aborted.add(index)
                    router.abort([sinks[index].request.id])
                case "step":
                    replicas[place].step()
                case "die":
                    replicas[place].die()
                case "drop":
                    router.drop(place)
                case "join" if replicas[place].dead or number % 5 == 0:
                    replicas[place].die()
                    replicas[place] = new_replica()
                    router.join(place, replicas[place].client)
                case "ready":
                    replicas[place].get_ready()
                case "expire":
                    replicas[place].expire()
                case "mute":
                    replicas[place].mute()
                case "unmute":
                    replicas[place].unmute()
        for replica in replicas:
            replica.unmute()
        if not router.lost.is_set():
            for place in range(num_replicas):
                if replicas[place].dead or replicas[place].client.lost:
                    replicas[place].die()
                    replicas[place] = new_replica()
                    router.join(place, replicas[place].client)
                replicas[place].get_ready()
            while any(replica.is_busy for replica in replicas):
                for replica in replicas:
                    replica.step()
            for replica in replicas:
                replica.engine.check()
                assert replica.engine.is_idle
                if replica.porter:
                    replica.porter.check_empty()
        check_empty(router)
        for index, sink in enumerate(sinks):
            _check_ended(sink, aborted=index in aborted, model=model)
        heard.update(name for porter in porters for name in porter.heard)

    run()
    return heard


def _random_request(router: Router, rng: random.Random, with_adapters: bool) -> Sink:
    group = rng.choice(["", "one", "two"])
    sink = add(
        router,
        [rng.randrange(3) for _ in range(rng.choice([1, 5, 9, 20]))],
        rng.choice([1, 3, 20]),
        group=group,
        seed=rng.choice([None, 7]),
        stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 3])),
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=rng.choice([None, None, 1]),
        stop_after=rng.choice([0, 0, 2]),
        raise_after=rng.choice([0, 0, 0, 3]),
        adapter=rng.choice(ADAPTERS) if with_adapters else "",
    )
    entry = router._entries[sink.request.id]

    def check(error) -> None:
        if isinstance(error, Unavailable):
            assert not entry.group.begun, "one of its group had begun"
        elif isinstance(error, EngineDead):
            assert router.lost.is_set() or entry.num_replays == MAX_REPLAYS, "another replica could have gone on"
        else:
            assert len(sink.tokens) == sink.raise_after

    sink.on_fail = check
    return sink


def _check_ended(sink: Sink, *, aborted: bool, model) -> None:
    request, tokens = sink.request, sink.tokens
    expected = alone(request, model)
    assert tokens == expected[: len(tokens)]
    assert len(sink.waited) <= 1
    if sink.finish_reason is not None and not sink.errors:
        assert tokens == expected
    elif sink.errors:
        assert not (tokens and isinstance(sink.errors[0], Unavailable))
    else:
        assert sink.stopped or aborted
    if tokens and request.sampling.prompt_logprobs is not None:
        assert [output.prompt_logprobs is not None for output in sink.outputs] == [True] + [False] * (len(tokens) - 1)
    if request.sampling.logprobs is not None:
        about = logprobs_alone(request, [*request.prompt, *tokens], model)[len(request.prompt) - 1 :]
        assert [each.logprob for output in sink.outputs for each in output.logprobs] == [each.logprob for each in about]
