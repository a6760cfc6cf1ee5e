"""The requests of a run: when they come, and how long they and their answers are."""

import math
from dataclasses import dataclass

import numpy as np

from hex_llm.errors import ConfigError


@dataclass(slots=True, eq=False)
class Request:
    """What was asked for, and how far it has come. Times are seconds since the start of the run."""

    number: int
    arrival_s: float
    prompt: int  # tokens
    answer: int  # tokens

    computed: int = 0  # tokens of those that have to be computed before the next of the answer, planned ones included
    output: int = 0  # tokens sampled, planned ones included; while it decodes the worker knows how many
    end_tick: int = -1  # the worker's decode step that brings its last token, while it decodes
    first_s: float = math.nan
    last_s: float = math.nan
    preemptions: int = 0

    fetches: bool = False  # its pages have to come from another worker
    unsent: int = 0  # tokens whose pages wait for room there
    sent: int = 0  # tokens
    complete_s: float = math.nan  # when all of them had come


@dataclass(frozen=True, slots=True)
class Load:
    """Requests come at random, `rate` of them a second. Lengths have a mean and a spread, which is the standard
    deviation over the mean, of a lognormal distribution; a spread of 0 makes them all alike. Prompt and answer together
    have at most `longest` tokens: what is drawn longer is cut.

    With `concurrency`, a request also waits until fewer than so many are under way, and counts as coming then.
    """

    rate: float  # inf: all at once
    prompt: int
    answer: int
    prompt_spread: float = 0.0
    answer_spread: float = 0.0
    longest: int | None = None
    count: int = 1000
    seed: int = 0
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.longest is not None and self.prompt + self.answer > self.longest:
            raise ConfigError(
                f"--input_len={self.prompt} and --output_len={self.answer} make {self.prompt + self.answer} tokens; a"
                f" request can have {self.longest}."
            )


def draw_requests(load: Load) -> list[Request]:
    """The same for every rate, but for the times between them, which are scaled."""
    arrivals, lengths = (np.random.default_rng((load.seed, part)) for part in range(2))
    due = np.cumsum(arrivals.exponential(size=load.count)) / load.rate
    prompts = _lengths(load.prompt, load.prompt_spread, load.count, lengths)
    answers = _lengths(load.answer, load.answer_spread, load.count, lengths)
    if load.longest is not None:
        answers = np.minimum(answers, load.longest - 1)
        prompts = np.minimum(prompts, load.longest - answers)
    return [
        Request(number, arrival, prompt, answer)
        for number, (arrival, prompt, answer) in enumerate(
            zip(due.tolist(), prompts.tolist(), answers.tolist(), strict=True)
        )
    ]


def _lengths(mean: int, spread: float, count: int, random: np.random.Generator) -> np.ndarray:
    variance = math.log1p(spread**2)
    drawn = random.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    return np.maximum(np.rint(drawn), 1).astype(int)
