"""What leaves the engine: values, never a request."""

from dataclasses import dataclass

import msgspec

from hex_llm.engine.request import FinishReason, TokenLogprobs


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request gained by one step. One is made and sent for every token, so both are to be cheap."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token, where asked for
    finish_reason: FinishReason | None = None  # set on the last output of a request
    num_cached: int = 0  # tokens of the prompt that were not computed again
    num_preemptions: int = 0  # times that it has given way so far
    # With the first token, where asked for: one entry per token of the prompt, None for the first.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine at one moment. What starts with `total` only ever grows."""

    running: int  # but for those that are `coming`
    waiting: int
    blocks: int  # that can be given out
    blocks_used: int  # by running requests, or waiting for a step under way
    blocks_cached: int  # free, and holding a prefix that a request may find
    total_steps: int
    total_preemptions: int
    total_prefix_queries: int  # tokens of prompts looked up in the prefix cache
    total_prefix_hits: int  # and those found
    total_ooms: int = 0  # steps that found no memory on the device
    # Of requests that go from one engine to another. All but the first are counted where they go on.
    blocks_held: int = 0  # of those used: kept for another engine to fetch
    coming: int = 0  # requests that wait for their blocks
    total_received: int = 0  # requests whose blocks have come
    total_received_blocks: int = 0
    total_received_bytes: int = 0
    total_transfer_seconds: float = 0.0  # that it took to carry them, part by part
    total_exposed_seconds: float = 0.0  # from the first token's being there to the last block's
    total_transfers_lost: int = 0  # requests whose blocks could not be had
    adapters: int = 0  # on the device
    adapters_used: int = 0  # of those: by running requests
    adapters_loading: int = 0  # that requests wait for, and that are not on the device yet
    total_adapter_loads: int = 0  # onto the device
    total_adapter_evictions: int = 0  # from there, for another
