"""Good bodies for every route that takes one, each short to answer: what mutations begin with. And the flags of the
server that they are for.
"""

from typing import Any

from tests.server.bad_inputs.case import CHAT, COMPLETIONS, DETOKENIZE, GENERATE, MESSAGES, TOKENIZE

MODEL = "tiny"

# Few sequences and a short context, so that whatever is still good is answered soon.
FLAGS = (
    f"--served_model_name={MODEL}",
    "--max_model_len=96",
    "--max_n=4",
    "--max_prompts=4",
    "--max_instances=4",
    "--max_sequences=8",
    "--body_timeout_s=3",
    "--enable_prompt_logprobs",
    "--enable_prefix_cache_hbm",
    "--disable_log_requests",
)

_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "text", "text": "漢"}]},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "go", "name": "ann"},
]
_CALLS = [
    {"role": "user", "content": "t"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "4"},
]
_CHAT = {"@requestFormat": "chatCompletions", "messages": MESSAGES, "max_tokens": 2}

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": MESSAGES, "max_tokens": 2}),
    (CHAT, {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 2, "temperature": 0, "seed": 7}),
    (CHAT, {"model": "", "messages": _TALK, "max_tokens": 2, "n": 2, "top_p": 0.9, "user": "ann"}),
    (CHAT, {"messages": _CALLS, "max_tokens": 2, "stop": ["a", "b"], "tools": [], "tool_choice": "none"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 3, "stream": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "n": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 3, "logit_bias": {"7": -100}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "stream": True, "logprobs": True, "return_token_ids": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "response_format": {"type": "text"}, "store": False}),
    (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": "I"}], "continue_final_message": True,
            "add_generation_prompt": False, "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "presence_penalty": 1.5, "frequency_penalty": -0.5, "metadata": {}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "repetition_penalty": 1.1, "min_p": 0.1, "top_k": 5,
            "bad_words": ["no"], "cache_salt": "s", "request_id": "a-1"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 1, "min_tokens": 1, "stop_token_ids": [9]}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 2}),
    (COMPLETIONS, {"prompt": "hi"}),
    (COMPLETIONS, {"model": MODEL, "prompt": ["hi", "ho"], "max_tokens": 2, "n": 2, "seed": -1}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 2, "echo": True, "logprobs": 2}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 2, "temperature": 0.5, "best_of": 1}),
    (COMPLETIONS, {"prompt": "é漢🙂", "max_tokens": 3, "stream": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 3, "stream": True,
                   "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 2, "stream": True, "logit_bias": {"2": 100}}),  # ends at once
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 2, "stop": "x", "include_stop_str_in_output": True, "suffix": ""}),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 2, "stream": True, "echo": True}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 2, "add_special_tokens": False, "skip_special_tokens": False}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 2, "return_tokens_as_token_ids": True, "logprobs": 20}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 1, "logit_bias": {"0": 1.5, "319": -1}, "top_k": -1, "top_p": 1}),
    (GENERATE, {"prompt": "hi", "max_tokens": 2}),
    (GENERATE, {"instances": [{"prompt": "hi"}], "parameters": {"max_tokens": 2.0, "top_k": 10.0, "temperature": 0.0}}),
    (GENERATE, {"instances": [{"prompt": "hi", "max_tokens": 2}, {"prompt": [5.0, 6.0], "max_tokens": 1}]}),
    (GENERATE, {"instances": [{"prompt": "hi", "max_tokens": 3, "stream": True, "streaming_tokens": 2}]}),
    (GENERATE, {"prompt": "hi", "max_tokens": 3, "raw_response": True, "ignore_eos": True, "n": 1}),
    (GENERATE, {"prompt": "hi", "max_tokens": 3, "streaming_tokens": 1, "raw_response": True, "model": "any"}),
    (GENERATE, {"instances": [_CHAT]}),
    (GENERATE, {"instances": [_CHAT, _CHAT | {"n": 2, "temperature": 0.0}]}),
    (GENERATE, {**_CHAT, "stream": True, "model": "any"}),
    (GENERATE, {"instances": [{"@requestFormat": "chatCompletions", "messages": _TALK}],
                "parameters": {"max_tokens": 2, "dynamic-lora": ""}}),
    (TOKENIZE, {"prompt": "hi é漢🙂"}),
    (TOKENIZE, {"model": MODEL, "prompt": "hi", "add_special_tokens": False, "return_token_strs": True}),
    (TOKENIZE, {"messages": _TALK, "add_generation_prompt": True}),
    (DETOKENIZE, {"tokens": [1, 5, 6, 319]}),
    (DETOKENIZE, {"model": MODEL, "tokens": []}),
)  # fmt: skip
