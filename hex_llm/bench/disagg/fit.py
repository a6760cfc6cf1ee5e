"""From measured steps to `Times`: least squares with nothing below 0, in which every point counts by its share."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hex_llm.bench.disagg.rates import Steps
from hex_llm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Point:
    """Of decodes, one step of `count` sequences that have `tokens` tokens each; of prompts, the time in which `count`
    that come at once and have `tokens` each are all computed.
    """

    count: int
    tokens: float
    seconds: float


def fit_decode(points: Sequence[Point]) -> tuple[float, float, float]:
    """Seconds of a step, of each sequence in it, and of each token that they have."""
    rows = [(1.0, point.count, point.count * point.tokens) for point in points]
    return _fit(
        rows,
        points,
        "decode steps must tell sequences from context: measure at least three, with two or more numbers of"
        " sequences and two or more contexts",
    )


def fit_prefill(points: Sequence[Point], steps: Steps) -> tuple[float, float, float]:
    """Seconds of a step, of each token, and of each token that a token sees."""
    rows = []
    for point in points:
        total = point.count * point.tokens
        full, rest = divmod(total, steps.tokens)
        padded = full * steps.tokens + (steps.padded(int(rest)) if rest else 0)
        rows.append((full + bool(rest), padded, point.count * point.tokens**2 / 2))
    return _fit(
        rows,
        points,
        "prompts must tell steps, tokens and context apart: measure at least three lengths",
    )


def _fit(rows: Sequence[tuple[float, float, float]], points: Sequence[Point], lack: str) -> tuple[float, float, float]:
    """The best solution without a negative number is the best one over some of the columns, so all are tried."""
    seconds = np.array([point.seconds for point in points])
    matrix = np.array(rows, float) / seconds[:, None]
    scale = np.abs(matrix).max(axis=0)
    if np.linalg.matrix_rank(matrix / scale, tol=1e-3) < 3:
        raise ConfigError(f"The {len(points)} measured {lack}.")
    best, least = np.zeros(3), np.inf
    for size in (3, 2, 1):
        for columns in map(list, itertools.combinations(range(3), size)):
            found = np.linalg.lstsq(matrix[:, columns] / scale[columns], np.ones(len(points)), rcond=None)[0]
            error = float(np.sum((matrix[:, columns] / scale[columns] @ found - 1) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[columns] = found / scale[columns]
    return float(best[0]), float(best[1]), float(best[2])


def read_points(text: str, flag: str) -> list[Point]:
    """Of a text such as 1:1500:4.14,64:1500:7.66, in milliseconds."""
    points = []
    for word in text.split(","):
        try:
            count, tokens, milliseconds = word.split(":")
            point = Point(int(count), int(tokens), float(milliseconds) / 1000)
        except ValueError:
            point = Point(0, 0, 0.0)
        if not (point.count >= 1 and point.tokens >= 0 and 0 < point.seconds < np.inf):
            raise ConfigError(
                f"--{flag}={text}: {word!r} must be how many, tokens of each, and milliseconds above 0, such as"
                " 64:1500:7.66."
            )
        points.append(point)
    return points


def offline_points(path: Path) -> tuple[list[Point], list[Point]]:
    """Of decodes and of prompts, from what `hex-llm bench offline --json` wrote."""
    try:
        rounds = json.loads(path.read_text())["rounds"]
        decodes, prompts = [], []
        for each in rounds:
            count, given, made = each["requests"], each["input_tokens"], each["output_tokens"]
            prompts.append(Point(count, given // count, float(each["first_token_s"])))
            if made > count and each["decode_tokens_per_s"] > 0:  # else there were no steps of decodes alone
                decodes.append(Point(count, (given + made / 2) / count, count / each["decode_tokens_per_s"]))
    except OSError as error:
        raise ConfigError(f"--measured={path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        raise ConfigError(f"--measured={path} is no result of hex-llm bench offline --json.") from None
    return decodes, prompts
