"""The reach leaves over the tokens that top_k, top_p and min_p say, whichever way it is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.reach import gpu
from hex_llm.kernels.reach.api import reach
from hex_llm.kernels.reach.filters import ALL, GRAIN, Filters, depth

VOCAB = 1000


def filters_of(logits, *, temperature=1.0, top_k=np.inf, top_p=np.inf, min_p=0.0) -> Filters:
    def per_row(value):
        return jnp.asarray(np.broadcast_to(np.asarray(value, np.float32), logits.shape[:1]))

    return Filters(
        peak=jnp.max(jnp.asarray(logits), axis=-1),
        temperature=per_row(temperature),
        top_k=per_row(top_k),
        top_p=per_row(top_p),
        min_p=per_row(min_p),
    )


IMPLEMENTATIONS = ("reference", "halving")
REACH = {
    name: jax.jit(lambda logits, filters, name=name: reach(logits, filters, implementation=name))
    for name in IMPLEMENTATIONS
}


def kept(implementation, logits, **parameters) -> np.ndarray:
    """Which tokens stay, [S, V] bool."""
    filters = filters_of(logits, **parameters)
    return np.asarray(
        depth(jnp.asarray(logits), filters) < REACH[implementation](jnp.asarray(logits), filters)[:, None]
    )


def kept_by_sorting(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The same of one row, with float64 and sorts."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights[weights < max(min_p, np.exp(-ALL * GRAIN))] = 0
    if top_k < np.inf:
        weights[weights < np.sort(weights)[::-1][: int(top_k)][-1]] = 0
    if top_p < np.inf:
        ordered = np.sort(weights)[::-1]
        weights[weights < ordered[np.argmax(np.cumsum(ordered) >= top_p * ordered.sum())]] = 0
    return weights > 0


def random_case(seed, rows=64):
    """Logits with ties and holes, and filters of every kind."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(0, 1, (rows, VOCAB)) * rng.choice([0.1, 1, 3], (rows, 1))).astype(np.float32)
    rounded = rng.random(rows) < 0.3
    logits[rounded] = np.round(logits[rounded], 1)
    logits[:, rng.choice(VOCAB, 100)] = -np.inf
    return logits, {
        "temperature": rng.choice([0.3, 1, 1, 2], rows),
        "top_k": rng.choice([np.inf, np.inf, 1, 2, 20, 899, 5000], rows),
        "top_p": rng.choice([np.inf, np.inf, 0.001, 0.3, 0.9, 0.999], rows),
        "min_p": rng.choice([0, 0, 0.02, 0.9], rows),
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_tokens_that_stay_are_those_that_sorting_finds(implementation, seed):
    logits, parameters = random_case(seed)
    stays = kept(implementation, logits, **parameters)
    wrong = [
        row
        for row in range(len(logits))
        if not np.array_equal(stays[row], kept_by_sorting(logits[row], *(p[row] for p in parameters.values())))
    ]
    assert len(wrong) <= 1, "one may have two tokens within a grain, or lie where float32 rounds otherwise"


def test_both_ways_leave_the_same_tokens_at_the_size_of_a_real_vocabulary():
    logits = np.random.default_rng(0).normal(0, 2, (4, 128_256)).astype(np.float32)
    parameters = {"top_k": [40, np.inf, 1000, np.inf], "top_p": [0.9, 0.95, np.inf, 0.5], "temperature": [1, 1, 1, 0.2]}
    stays = [kept(implementation, logits, **parameters) for implementation in IMPLEMENTATIONS]
    np.testing.assert_array_equal(*stays)
    assert stays[0][2].sum() == 1000


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_all_stay_without_filters_and_ties_stay_together(implementation):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, 10:] = -1
    logits[2] = np.linspace(0, -1e-2, VOCAB)
    stays = kept(implementation, logits, top_k=[np.inf, 10, 5], top_p=[np.inf, np.inf, np.inf])
    np.testing.assert_array_equal(stays.sum(axis=1), [VOCAB, 10, 5])
    stays = kept(implementation, logits, top_k=[1, 11, np.inf], top_p=[0.1, np.inf, 0.5])
    np.testing.assert_array_equal(stays.sum(axis=1), [VOCAB, VOCAB, 499])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_within_a_grain_stay_together_and_those_in_two_do_not(implementation):
    logits = np.full((2, VOCAB), -5, np.float32)
    logits[:, :3] = [[0, -1.2 * GRAIN, -1.8 * GRAIN], [0, -1.2 * GRAIN, -2.2 * GRAIN]]
    assert kept(implementation, logits, top_k=2).sum(axis=1).tolist() == [3, 2]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_beyond_the_reach_of_the_noise_never_stay(implementation):
    logits = np.full((2, VOCAB), -33, np.float32)
    logits[:, 7], logits[:, 9] = 0, -31
    stays = kept(implementation, logits, top_k=[np.inf, VOCAB])
    assert [set(np.flatnonzero(row)) for row in stays] == [{7, 9}] * 2
    assert REACH[implementation](jnp.asarray(logits), filters_of(logits)).tolist() == [ALL, ALL]


@pytest.mark.usefixtures("simulator")
def test_the_kernel_leaves_the_same_tokens(monkeypatch):
    monkeypatch.setattr(gpu, "_MOST_PARTS", gpu._PARTS)  # one block at a time is simulated
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (4, 600)).astype(np.float32)  # no multiple of a unit, and blocks without one
    logits[1] = np.round(logits[1], 1)
    logits[:, 100:150] = -np.inf
    parameters = {"top_k": [np.inf, 20, 7, np.inf], "top_p": [0.9, 0.5, np.inf, np.inf], "min_p": [0, 0, 0, 0.1]}
    filters = filters_of(logits, **parameters)
    found = gpu.reach(jnp.asarray(logits), filters)
    stays = np.asarray(depth(jnp.asarray(logits), filters) < found[:, None])
    np.testing.assert_array_equal(stays, kept("reference", logits, **parameters))
    assert len(set(stays.sum(axis=1))) == 4


def test_an_implementation_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="'cuda'"):
        reach(jnp.zeros((1, 8)), filters_of(np.zeros((1, 8))), implementation="cuda")
