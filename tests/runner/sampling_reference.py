"""What sampling means, one row at a time, in plain float64 numpy with sorts and loops."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np


def distribution(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """The probability of each token of one row. Tokens of equal logit stay or go together."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0 or top_k == 1:
        return np.eye(len(logits))[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / temperature)
    weights[weights < min_p * weights.max()] = 0
    if top_k > 0:
        weights[weights < np.sort(weights)[::-1][:top_k][-1]] = 0
    if top_p < 1:
        ordered = np.sort(weights)[::-1]
        needed = int(np.argmax(np.cumsum(ordered) >= top_p * ordered.sum()))
        weights[weights < ordered[needed]] = 0
    return weights / weights.sum()


def penalized(
    logits: np.ndarray,
    prompt: Iterable[int],
    output: Sequence[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> np.ndarray:
    result = np.array(logits, np.float64)
    for token in {*prompt, *output}:
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= presence + frequency * list(output).count(token)
    return result


def ruled(
    logits: np.ndarray,
    history: Sequence[int],
    num_output: int,
    logit_bias: Mapping[int, float] = {},
    bad_words: Iterable[Sequence[int]] = (),
    min_tokens: int = 0,
    stop_ids: Iterable[int] = (),
) -> np.ndarray:
    """The logits of the token that follows `history`, of which the last `num_output` were sampled."""
    result = np.array(logits, np.float64)
    for token, bias in logit_bias.items():
        result[token] += bias
    for word in bad_words:
        *before, last = word
        if list(history[len(history) - len(before) :]) == before:
            result[last] = -np.inf
    if num_output < min_tokens:
        result[list(stop_ids)] = -np.inf
    return result
