"""From what a client asked for to a request that can be served, or a refusal that says why not."""

from collections.abc import Collection, Sequence

import numpy as np

from hex_llm.engine.limits import Limits
from hex_llm.engine.request import Request, SamplingParams
from hex_llm.engine.sampling import check_rules, check_vocabulary, fold_seed, shown
from hex_llm.errors import ContextTooLong, RequestError


def new_request(
    id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    limits: Limits,
    *,
    end_ids: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    seed: int = 0,
    index: int = 0,
    adapter: str = "",
    adapter_source: str = "",
    caller: str = "",
    cache_salt: str = "",
) -> Request:
    """The `index`-th of the `sampling.n` requests for a prompt. RequestError where it cannot be served.

    `end_ids` are the model's end tokens, `bad_words` those of `sampling` as tokens, and `seed` counts where
    `sampling` has none.
    """
    check_vocabulary(sampling, limits.vocab_size)
    tokens = _tokens(prompt)
    request = Request(
        id=id,
        prompt=tokens.tolist(),
        sampling=sampling,
        max_output=resolve_max_output(len(tokens), sampling.max_tokens, limits),
        stop_ids=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else end_ids),
        bad_words=tuple(tuple(word) for word in bad_words),
        seed=fold_seed(seed if sampling.seed is None else sampling.seed, index),
        adapter=adapter,
        adapter_source=adapter_source,
        caller=caller,
        cache_salt=cache_salt,
    )
    _check_bounds(request, tokens, limits)
    return request


def check_request(request: Request, limits: Limits) -> None:
    """Refuses a request, whoever made it, that would index out of an array on the device: RequestError."""
    check_vocabulary(request.sampling, limits.vocab_size)
    tokens = _tokens(request.prompt)
    resolve_max_output(len(tokens), request.max_output, limits)
    _check_bounds(request, tokens, limits)
    if len(request.output) >= request.max_output:
        raise RequestError(
            f"The request comes with {len(request.output)} tokens of an answer that may have {request.max_output}."
        )
    if request.output:
        _check_tokens(_tokens(request.output), "answer", limits)
    if len(request.keys) * limits.block_size > request.num_known:
        raise RequestError(f"The request comes with {len(request.keys)} keys for {request.num_known} tokens.")


def _tokens(prompt: object) -> np.ndarray:
    try:
        tokens = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):  # lists of several lengths, among others
        tokens = None
    if tokens is None or tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise RequestError(
            f"The prompt must be a list of whole numbers, its tokens; it is {shown(prompt)}.", param="prompt"
        )
    return tokens


def _check_bounds(request: Request, tokens: np.ndarray, limits: Limits) -> None:
    check_rules(request.sampling, request.bad_words, len(request.stop_ids), limits.vocab_size)
    assert bool(request.sampling.bad_words) <= bool(request.bad_words), "bad words need their tokens"
    # Where another engine goes on with it, the output here is one token of many.
    if request.sampling.min_tokens > request.max_output and not request.hands_over:
        raise RequestError(
            f"min_tokens={request.sampling.min_tokens} is more than the {request.max_output} tokens "
            "that the output may have.",
            param="min_tokens",
        )
    if request.adapter and not limits.num_adapters:
        raise RequestError(
            f"The request names the adapter {shown(request.adapter_source)}, and adapters are not served here."
        )
    assert bool(request.adapter) == bool(request.adapter_source), "an adapter has an identity and a source"
    _check_tokens(tokens, "prompt", limits)


def _check_tokens(tokens: np.ndarray, name: str, limits: Limits) -> None:
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"The {name} has the token {token}; tokens of this model go from 0 to {limits.vocab_size - 1}.",
                param="prompt",
            )


def resolve_max_output(num_prompt: int, max_tokens: int | None, limits: Limits) -> int:
    """How many tokens a request may yield: `max_tokens`, or as many as the context has room for."""
    if not num_prompt:
        raise RequestError("The prompt is empty; it must have at least one token.", param="prompt")
    context = f"the context is {limits.max_model_len} tokens"
    if limits.context < limits.max_model_len:
        context = (
            f"the KV cache of {limits.num_blocks - 1} blocks of {limits.block_size} tokens "
            f"holds {limits.kv_tokens} tokens"
        )
    room = limits.context - num_prompt
    if room < 1:
        raise ContextTooLong(
            f"The prompt has {num_prompt} tokens; {context}, and one must be left for the output.", param="prompt"
        )
    if max_tokens is None:
        return room
    if max_tokens < 1:
        raise RequestError(f"max_tokens={max_tokens} must be at least 1.", param="max_tokens")
    if max_tokens > room:
        raise ContextTooLong(
            f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together "
            f"{num_prompt + max_tokens}; {context}.",
            param="max_tokens",
        )
    return max_tokens
