"""Sampling draws what the parameters say, and a row's token depends on that row alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hex_llm.runner.logits import Penalties, Rules, apply_rules, penalize
from hex_llm.runner.sampler import SamplingRows, choose_any, choose_drawn, choose_filtered, choose_greedy
from tests.runner.sampling_reference import distribution, penalized, ruled

FOREVER = np.iinfo(np.int32).max
DRAWS = 20_000
VOCAB = 300  # one shape for most tests: they share a compilation; no multiple of a chunk

CHOOSERS = {
    "any": jax.jit(choose_any),
    "greedy": jax.jit(choose_greedy),
    "drawn": jax.jit(choose_drawn),
    "filtered": jax.jit(partial(choose_filtered, implementation="reference")),
}


def make_rows(num_rows, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, position=7) -> SamplingRows:
    """Each parameter is one number or one per row; seeds differ unless they are given."""
    seed = np.arange(num_rows) if seed is None else seed

    def per_row(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value), (num_rows,)).astype(dtype))

    return SamplingRows(
        temperature=per_row(temperature, np.float32),
        top_p=per_row(top_p, np.float32),
        top_k=per_row(top_k, np.int32),
        min_p=per_row(min_p, np.float32),
        seed=per_row(seed, np.uint32),
        position=per_row(position, np.int32),
    )


def make_logits(shape, seed=0, scale=2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def draw(logits, **parameters) -> np.ndarray:
    """One token per row of `logits` [S, V], or `DRAWS` tokens from one row [V]."""
    logits = np.asarray(logits, np.float32)
    if logits.ndim == 1:
        logits = np.broadcast_to(logits, (DRAWS, len(logits)))
    return np.asarray(CHOOSERS["any"](jnp.asarray(logits), make_rows(len(logits), **parameters))[0])


def assert_drawn_from(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Only tokens that may be drawn are, and each as often as it should be."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert not np.any(counts[expected == 0]), "a token was drawn that had been filtered out"
    expected = expected * len(tokens)
    order = np.argsort(-expected)
    rare = order[expected[order] < 10]
    common = order[: len(order) - len(rare)]
    observed = [*counts[common], counts[rare].sum()]
    predicted = [*expected[common], expected[rare].sum()]
    if predicted[-1] < 10:  # too few to judge by themselves
        observed[-2:], predicted[-2:] = [sum(observed[-2:])], [sum(predicted[-2:])]
    assert len(predicted) > 1
    assert stats.chisquare(observed, predicted).pvalue > 1e-4


PARAMETERS = [
    {},
    {"temperature": 0.4},
    {"temperature": 5.0},
    {"top_k": 2},
    {"top_k": 40},
    {"top_k": 10_000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.7},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 30, "top_p": 0.8},
    {"temperature": 3.0, "min_p": 0.3, "top_p": 0.5},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_tokens_follow_the_distribution_of_their_parameters(parameters):
    logits = make_logits(VOCAB)
    assert_drawn_from(draw(logits, **parameters), distribution(logits, **parameters))


def test_positions_of_one_seed_are_as_random_as_seeds_of_one_position():
    logits = make_logits(VOCAB)
    tokens = draw(logits, seed=2**32 - 1, position=np.arange(DRAWS))
    assert_drawn_from(tokens, distribution(logits))
    repeats = np.mean(tokens[1:] == tokens[:-1])  # neighbours in a text are independent of each other
    assert repeats == pytest.approx(np.sum(distribution(logits) ** 2), abs=0.02)


@pytest.mark.parametrize("vocab", [1, 128, 1000])
def test_any_size_of_vocabulary_is_drawn_from(vocab):
    logits = make_logits(vocab, scale=1.0)
    tokens = draw(logits)
    if vocab == 1:
        assert not tokens.any()
    else:
        assert_drawn_from(tokens, distribution(logits))
        assert_drawn_from(draw(logits, top_p=0.9, top_k=100), distribution(logits, top_p=0.9, top_k=100))


def test_rows_with_parameters_of_their_own_draw_from_what_is_left_and_from_all_of_it():
    rng = np.random.default_rng(1)
    kinds, repeats = 50, DRAWS // 50
    logits = np.full((kinds, VOCAB), -np.inf, np.float32)
    logits[:, rng.choice(VOCAB, 12)] = make_logits((kinds, 12), seed=2, scale=1.0)
    parameters = {
        "temperature": rng.choice([0, 0.5, 1, 2, 10], kinds),
        "top_k": rng.choice([-1, 0, 1, 2, 5, 12, 50], kinds),
        "top_p": rng.choice([0.1, 0.5, 0.9, 1], kinds),
        "min_p": rng.choice([0, 0, 0.1, 0.6, 1], kinds),
    }
    drawn = draw(np.repeat(logits, repeats, 0), **{name: np.repeat(v, repeats) for name, v in parameters.items()})
    for kind, tokens in enumerate(drawn.reshape(kinds, repeats)):
        expected = distribution(logits[kind], **{name: v[kind] for name, v in parameters.items()})
        assert set(tokens) <= set(np.flatnonzero(expected))
        assert set(tokens) >= set(np.flatnonzero(expected > 0.05))


def penalties_of(vocab: int, prompt, output, num_rows=1, **strengths) -> Penalties:
    counts = np.zeros(vocab, np.int16)
    counts[list(prompt)] = 1
    np.add.at(counts, output, 2)
    strengths = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0} | strengths
    return Penalties(
        **{name: jnp.full(num_rows, value, jnp.float32) for name, value in strengths.items()},
        counts=jnp.asarray(np.broadcast_to(counts, (num_rows, vocab))),
    )


@pytest.mark.parametrize(
    "strengths",
    [
        {"repetition": 1.7},
        {"repetition": 0.5},
        {"presence": 1.5},
        {"frequency": 0.6},
        {"frequency": -0.3},
        {"repetition": 1.3, "presence": 0.4, "frequency": 0.2},
    ],
    ids=str,
)
def test_penalties_change_what_is_drawn_as_vllm_does(strengths):
    logits, prompt, output = make_logits(VOCAB, scale=1.0), [1, 2, 2, 3, 40], [2, 3, 3, 3, 7, 8, 9, 10, 10]
    penalties = penalties_of(VOCAB, prompt, output, **strengths)
    changed = np.asarray(jax.jit(penalize)(jnp.asarray(logits[None]), penalties))[0]
    expected = penalized(logits, prompt, output, **strengths)
    np.testing.assert_allclose(changed, expected, rtol=1e-5, atol=1e-6)
    assert_drawn_from(draw(changed), distribution(expected))


def test_no_penalty_leaves_the_logits_as_they_are():
    logits = make_logits((1, 50))
    logits[0, 5] = -np.inf
    same = penalize(jnp.asarray(logits), penalties_of(50, [1, 5], [2, 5]))
    np.testing.assert_array_equal(same, logits)


def rules_of(*rules, recent=(), places=8, prefix_length=3) -> Rules:
    """Rules of one row, each (id, bias, until, prefix), in scattered places."""
    ids, bias = np.full((1, places), -1, np.int32), np.full((1, places), 99, np.float32)
    until, prefix = (
        np.full((1, places), FOREVER, np.int32),
        np.full((1, places, prefix_length), -1, np.int32),
    )
    for place, (token, value, end, before) in zip(reversed(range(places)), rules, strict=False):
        ids[0, place], bias[0, place], until[0, place] = token, value, end
        prefix[0, place, prefix_length - len(before) :] = before
    latest = [*[-1] * prefix_length, *recent][-prefix_length:]
    return Rules(*(jnp.asarray(x) for x in (ids, bias, until, prefix, np.array([latest], np.int32))))


def follow(logits: np.ndarray, rules: Rules, position: int) -> np.ndarray:
    changed = jax.jit(apply_rules)(jnp.asarray(logits[None]), rules, jnp.array([position], jnp.int32))
    return np.asarray(changed)[0]


def test_logit_bias_changes_what_is_drawn():
    logits, bias = make_logits(VOCAB, scale=1.0), {3: 2.5, 49: -100.0, 0: -1.0}
    changed = follow(logits, rules_of(*((token, b, FOREVER, ()) for token, b in bias.items())), 12)
    expected = ruled(logits, [], 0, logit_bias=bias)
    np.testing.assert_allclose(changed, expected, rtol=1e-5, atol=1e-6)
    assert_drawn_from(draw(changed), distribution(expected))


@pytest.mark.parametrize("history", [[], [5], [4, 5], [9, 4, 5], [4, 5, 6], [9, 9, 4]])
def test_bad_words_are_never_finished_and_nothing_else_is_touched(history):
    logits, words = make_logits(VOCAB, scale=0.5), [[7], [5, 8], [9, 4, 5, 10], [4, 11]]
    rules = rules_of(*((word[-1], -np.inf, FOREVER, word[:-1]) for word in words), recent=history)
    changed = follow(logits, rules, len(history))
    expected = ruled(logits, history, len(history), bad_words=words)
    np.testing.assert_array_equal(changed, expected.astype(np.float32))
    assert_drawn_from(draw(changed), distribution(expected))


@pytest.mark.parametrize("num_output", [0, 3, 4, 9])
def test_stop_tokens_wait_for_min_tokens(num_output):
    logits, num_prompt, stop_ids = make_logits(VOCAB, scale=0.5), 11, [2, 17]
    rules = rules_of(*((token, -np.inf, num_prompt + 4, ()) for token in stop_ids))
    changed = follow(logits, rules, num_prompt + num_output)
    expected = ruled(logits, [], num_output, min_tokens=4, stop_ids=stop_ids)
    np.testing.assert_array_equal(changed, expected.astype(np.float32))
    assert_drawn_from(draw(changed), distribution(expected))


def test_rules_on_one_token_add_up_and_a_ban_wins_over_any_bias():
    logits = np.zeros(6, np.float32)
    logits[4], logits[5] = np.inf, -np.inf
    changed = follow(
        logits,
        rules_of(
            (1, 2.0, FOREVER, ()),
            (1, 3.0, FOREVER, ()),
            (2, np.inf, FOREVER, ()),
            (2, -np.inf, FOREVER, ()),
            (2, -np.inf, FOREVER, ()),
            (4, -np.inf, FOREVER, ()),
            (5, np.inf, FOREVER, ()),
        ),
        0,
    )
    np.testing.assert_array_equal(changed, [0, 5, -np.inf, 0, -np.inf, -np.inf])


def test_each_row_follows_its_own_rules():
    rules = [rules_of((1, 5.0, 10, ())), rules_of((2, 5.0, 20, ())), rules_of((3, 5.0, FOREVER, (4,)))]
    together = jax.tree.map(lambda *rows: jnp.concatenate(rows), *rules)
    changed = apply_rules(jnp.zeros((3, 5)), together, jnp.array([10, 10, 10], jnp.int32))
    np.testing.assert_array_equal(changed, [[0] * 5, [0, 0, 5, 0, 0], [0] * 5])


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"top_k": 1, "temperature": 50.0}], ids=str)
def test_greedy_takes_the_first_of_the_likeliest(parameters):
    logits = make_logits((256, 1000))
    logits[:, [333, 334, 700]] = 50
    assert np.all(draw(logits, **parameters) == 333)
    others = draw(logits, **{"temperature": 1.0, "top_k": 0, **parameters, "seed": np.arange(256) + 256})
    assert np.all(others == 333)


def test_greedy_rows_among_others_stay_greedy():
    logits = make_logits((256, 1000))
    greedy = np.arange(256) % 3 == 0
    tokens = draw(logits, temperature=np.where(greedy, 0, 8), top_p=np.where(greedy, 0.9, 1))
    likeliest = np.argmax(logits, -1)
    np.testing.assert_array_equal(tokens[greedy], likeliest[greedy])
    assert np.mean(tokens[~greedy] == likeliest[~greedy]) < 0.2


def test_as_many_equal_peaks_as_top_k_leaves_over_are_all_it_leaves_over():
    logits = np.full(300, -9.0, np.float32)
    logits[[4, 200]] = 3.0
    logits[77] = 2.9
    assert set(draw(logits, top_k=2)) == {4, 200}
    assert set(draw(logits, top_k=3)) == {4, 77, 200}


def test_equal_logits_stay_or_go_together():
    logits = np.full(VOCAB, -3, np.float32)
    logits[[10, 60, 110, 160]] = 2
    logits[5] = 3
    filters: list[dict] = [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}]
    for parameters in filters:
        tokens = draw(logits, **parameters)
        assert set(tokens) == {5, 10, 60, 110, 160}
        assert_drawn_from(tokens, distribution(logits, **parameters))


@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
def test_masked_tokens_are_never_drawn(parameters):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[VOCAB - 1] = -5e3
    assert set(draw(logits, **parameters)) == {VOCAB - 1}
    logits[7] = -5e3
    assert set(draw(logits, **parameters)) == {7, VOCAB - 1}


@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 1e-4}], ids=str)
def test_extreme_logits_are_drawn_from(parameters):
    logits = make_logits(VOCAB)
    logits[:50] -= 3e38
    logits[50:60] = 1e4
    assert set(draw(logits, **parameters)) == set(range(50, 60))


BATCHES = {
    "drawn from all": {},
    "filtered": {"top_k": 100, "top_p": 0.9, "min_p": 0.001},
    "mixed": {
        "top_k": np.tile([0, 20], 16),
        "top_p": np.tile([1, 1, 0.8, 1], 8),
        "temperature": np.tile([1, 0, 1.5, 0.7, 2, 1, 1, 1], 4),
    },
}


@pytest.mark.parametrize("flat", [False, True], ids=["peaked", "flat"])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_row_draws_the_same_token_alone_in_a_batch_elsewhere_and_beside_padding(batch, flat):
    logits = make_logits((32, 5000), scale=0.01 if flat else 2)
    parameters = {name: np.broadcast_to(value, 32) for name, value in BATCHES[batch].items()}
    parameters |= {"seed": np.arange(32) * 7919, "position": np.arange(32) * 3}

    def tokens(order, logits=logits, **changed) -> np.ndarray:
        picked = {name: np.asarray(v)[order] for name, v in (parameters | changed).items()}
        return draw(logits[order], **picked)

    together = tokens(np.arange(32))
    assert len(set(together)) > 16
    alone = np.concatenate([tokens([row]) for row in range(32)])
    np.testing.assert_array_equal(alone, together)
    shuffled = np.random.default_rng(3).permutation(32)
    np.testing.assert_array_equal(tokens(shuffled), together[shuffled])
    padding = {"temperature": np.zeros(13), "seed": np.zeros(13), "position": np.zeros(13)}
    defaults = {"temperature": np.ones(32)} | parameters
    padded = draw(
        np.concatenate([logits, np.zeros((13, 5000), np.float32)]),
        **{
            name: np.concatenate([v, padding.get(name, np.ones(13) if name == "top_p" else np.zeros(13))])
            for name, v in defaults.items()
        },
    )
    np.testing.assert_array_equal(padded[:32], together)


def test_another_seed_or_another_position_is_another_draw():
    logits = np.broadcast_to(make_logits(1000, scale=0.1), (256, 1000))
    first = draw(logits, seed=1, position=np.arange(256))
    assert np.mean(first == draw(logits, seed=2, position=np.arange(256))) < 0.05
    assert np.mean(first == draw(logits, seed=1, position=np.arange(256) + 1)) < 0.05
    np.testing.assert_array_equal(first, draw(logits, seed=1, position=np.arange(256)))


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {}, {"top_p": 0.9, "top_k": 10}], ids=str)
def test_a_row_of_nan_harms_no_other(parameters):
    logits = make_logits((32, 300))
    spoilt = logits.copy()
    spoilt[3], spoilt[8, 299], spoilt[9], spoilt[10, 4], spoilt[11] = np.nan, np.nan, -np.inf, np.inf, np.inf
    bad = np.isin(np.arange(32), [3, 8, 9, 10, 11])
    tokens = draw(spoilt, **parameters)
    np.testing.assert_array_equal(tokens[~bad], draw(logits, **parameters)[~bad])
    assert np.all((tokens >= 0) & (tokens < 300))


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_rows_of_no_use_are_told_from_the_others(chooser):
    logits = make_logits((8, VOCAB))
    logits[1, 7], logits[2, -1], logits[3], logits[4], logits[5, 40] = np.nan, np.nan, np.nan, -np.inf, np.inf
    logits[6, 1:] = -np.inf
    _, usable = CHOOSERS[chooser](jnp.asarray(logits), make_rows(8))
    np.testing.assert_array_equal(usable, [True, False, False, False, False, False, True, True])


@pytest.mark.parametrize("scale", [0.1, 2])
def test_a_row_draws_the_same_token_whatever_function_its_batch_goes_through(scale):
    logits = jnp.asarray(make_logits((256, 5000), scale=scale))
    greedy, filtered = np.arange(256) % 4 == 0, np.arange(256) % 4 == 1
    rng = np.random.default_rng(2)
    parameters = {
        "temperature": np.where(greedy, rng.choice([0, 1], 256), rng.choice([0.3, 1, 2.5], 256)),
        "top_k": np.where(filtered, rng.choice([2, 20, 400], 256), np.where(greedy, 1, 0)),
        "top_p": np.where(filtered, rng.choice([0.2, 0.9, 1], 256), 1),
        "min_p": np.where(filtered, rng.choice([0, 0.02], 256), 0),
    }
    tokens = {name: np.asarray(choose(logits, make_rows(256, **parameters))[0]) for name, choose in CHOOSERS.items()}
    np.testing.assert_array_equal(tokens["filtered"], tokens["any"])
    np.testing.assert_array_equal(tokens["drawn"][~filtered], tokens["any"][~filtered])
    np.testing.assert_array_equal(tokens["greedy"][greedy], tokens["any"][greedy])
    assert np.any(tokens["drawn"][filtered] != tokens["any"][filtered])


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_every_platform_can_compile_it_and_nothing_sorts_or_branches_where_a_host_would_wait(chooser, platform):
    logits = jax.ShapeDtypeStruct((256, 128_256), jnp.float32)
    rows = jax.eval_shape(lambda: make_rows(256))
    text = CHOOSERS[chooser].trace(logits, rows).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.sort" not in text
    assert "top_k" not in text
    assert ("stablehlo.case" in text) == (chooser == "any")
    assert ("stablehlo.while" in text) == (chooser == "any")
