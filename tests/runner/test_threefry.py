import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.runner.threefry import threefry


def words(*values):
    return tuple(jnp.array([value], jnp.uint32) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that come with the authors' Random123
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(counter, key, expected):
    assert tuple(int(word[0]) for word in threefry(words(*key), words(*counter))) == expected


def test_it_is_what_jax_computes():
    random = np.random.default_rng(0)
    for _ in range(5):
        key, counter = (random.integers(0, 2**32, 2, np.uint32) for _ in range(2))
        ours = [int(word[0]) for word in threefry(words(*key), words(*counter))]
        theirs = jax.extend.random.threefry_2x32(jnp.asarray(key), jnp.asarray(counter))
        assert ours == np.asarray(theirs).tolist()
