"""Prompts, models, /tokenize and /detokenize."""

from typing import Any

from tests.server.bad_inputs.case import (
    CHAT_BODY,
    COMPLETION_BODY,
    COMPLETIONS,
    DETOKENIZE,
    MESSAGES,
    TOKENIZE,
    Case,
    chat,
    completion,
)

UNSUPPORTED, TOO_LONG = "unsupported_parameter", "context_length_exceeded"


def tokenize(name: str, param: str | None, says: str, body: Any, code: str | None = None) -> Case:
    return Case(name=name, route=TOKENIZE, body=body, param=param, says=says, code=code)


def detokenize(name: str, param: str | None, says: str, body: Any, code: str | None = None) -> Case:
    return Case(name=name, route=DETOKENIZE, body=body, param=param, says=says, code=code)


def no_model(name: str, model: str, says: str, route: str = COMPLETIONS) -> Case:
    body = (CHAT_BODY if route != COMPLETIONS else COMPLETION_BODY) | {"model": model}
    return Case(name=name, route=route, body=body, param="model", says=says, status=404, code="model_not_found")


PROMPTS = (
    Case(name="no prompt at all", route=COMPLETIONS, body={"max_tokens": 2}, param="prompt", says="missing"),
    completion("a prompt that is null", "prompt", "missing", prompt=None),
    completion("an empty prompt", "prompt", "empty", prompt=""),
    completion("an empty list of prompts", "prompt", "empty", prompt=[]),
    completion("a list with an empty prompt", "prompt", "empty", prompt=[""]),
    completion("a list with an empty list of tokens", "prompt", "empty", prompt=[[]]),
    completion("an empty prompt after a good one", "prompt[1]", "empty", prompt=["hi", ""]),
    completion("a prompt that is a number", "prompt", "prompt=5", prompt=5),
    completion("a prompt that is true", "prompt", "true", prompt=True),
    completion("a prompt that is an object", "prompt", "an object", prompt={"text": "hi"}),
    completion("a list with null for a prompt", "prompt", "null", prompt=[None]),
    completion("a list with an object for a prompt", "prompt", "an object", prompt=[{"prompt": "hi"}]),
    completion("texts and tokens mixed", "prompt[1]", "same kind", prompt=["hi", [5, 6]]),
    completion("tokens and texts mixed", "prompt[1]", "'hi'", prompt=[[5, 6], "hi"]),
    completion("a text among tokens", "prompt[1]", "'x'", prompt=[5, "x"]),
    completion("tokens within a list within a list", "prompt[0]", "a list of 2", prompt=[[[5, 6]]]),
    completion("a token below zero", "prompt[1]", "-1", prompt=[5, -1]),
    completion("a token with a fraction", "prompt[0]", "5.5", prompt=[5.5]),
    completion("a token with a point on /v1", "prompt[0]", "5.0", prompt=[5.0]),
    completion("a token that is true", "prompt[0]", "true", prompt=[True, 5]),
    completion("a token that is null", "prompt[1]", "null", prompt=[5, None]),
    completion("a token beyond 32 bits", "prompt[0]", "2147483647", prompt=[2**31]),
    completion("a token that wraps to a good one in 32 bits", "prompt[0]", "4294967301", prompt=[2**32 + 5]),
    completion("a token of twenty digits", "prompt[0]", "must be a token", prompt=[10**20]),
    completion("a token that the model does not have", "prompt", "319", prompt=[5, 320]),
    completion("a token that no list of prompts has", "prompt", "100000", prompt=[[5], [100_000]]),
    completion("too many prompts", "prompt", "128 (--max_prompts)", prompt=["hi"] * 129),
    completion("too many lists of tokens", "prompt", "has 200 entries", prompt=[[5]] * 200),
    completion("n times prompts beyond the limit", "n", "256 (--max_sequences)", prompt=["hi"] * 100, n=3),
    completion("a prompt as long as the context", "prompt", "256 tokens", TOO_LONG, prompt="x" * 256),
    completion("a prompt longer than the context", "prompt", "300 tokens", TOO_LONG, prompt=[5] * 300),
    completion("a prompt far longer than the context", "prompt", "characters", TOO_LONG, prompt="x" * 200_000),
    completion("a prompt of a million tokens", "prompt", "1000000 tokens", TOO_LONG, prompt=[5] * 1_000_000),
    completion("one long prompt among short ones", "prompt", "256 tokens", TOO_LONG, prompt=["hi", "x" * 280]),
    completion("a suffix", "suffix", "'end'", UNSUPPORTED, suffix="end"),
    completion("an echo as a string", "echo", "'yes'", echo="yes"),
    completion("special tokens as a number", "add_special_tokens", "true or false", add_special_tokens=1),
    completion("tensors for a prompt", "prompt_embeds", "texts or tokens", UNSUPPORTED, prompt_embeds="gASVAAAA"),
    completion("messages for a completion", "messages", "/v1/chat/completions", UNSUPPORTED, messages=MESSAGES),
    completion("stream options without a stream for a completion", "stream_options", "stream is not true",
               stream_options={}),
    completion("a tool for a completion", "tools", "not a field", UNSUPPORTED, tools=[]),
    completion("a completion by a JSON schema", "response_format", "does not exist yet", UNSUPPORTED,
               response_format={"type": "json_object"}),
    completion("a completion guided by a grammar", "guided_grammar", "x", UNSUPPORTED, guided_grammar="x"),
    completion("an empty salt for a completion", "cache_salt", "1 to 256", cache_salt=""),
)  # fmt: skip

MODELS = (
    no_model("a model that is not served", "gpt-4", "'gpt-4'"),
    no_model("a model that is not served for a chat", "gpt-4", "'gpt-4'", "/v1/chat/completions"),
    no_model("a model by a path", "../../etc/passwd", "'../../etc/passwd'"),
    no_model("a model by an absolute path", "/etc/hostname", "'/etc/hostname'"),
    no_model("a model by an address of the web", "http://169.254.169.254/model", "169.254"),
    no_model("a model in a bucket", "gs://bucket/model", "'gs://bucket/model'"),
    no_model("a model with a NUL in its name", "tiny\0", "tiny\\x00"),
    no_model("a model with a space behind its name", "tiny ", "'tiny '"),
    no_model("a model in capitals", "TINY", "'TINY'"),
    no_model("a model with a long name", "m" * 1000, "mmmm"),
    completion("a model that is a number", "model", "model=5", model=5),
    completion("a model that is a list", "model", "a list of 1", model=["tiny"]),
    chat("a model that is true", "model", "true", model=True),
    chat("a model with a name of too many characters", "model", "1024", model="m" * 1025),
    Case(name="a model that is not served to tokenize", route=TOKENIZE, body={"prompt": "hi", "model": "x"},
         param="model", says="'x'", status=404, code="model_not_found"),
    *(
        Case(name=f"a question about {name}", route=f"/v1/models/{path}", method="GET", param="model", says=says,
             status=404, code="model_not_found")
        for name, path, says in (
            ("a model that is not served", "gpt-4", "'gpt-4'"),
            ("a path", "../../../etc/passwd", "etc/passwd"),
            ("a path in percents", "..%2f..%2fetc%2fpasswd", "../../etc/passwd"),
            ("a NUL", "tiny%00", "\\x00"),
            ("what is no UTF-8", "%ff%fe", "There is no model"),
            ("a template", "%7B%7B7*7%7D%7D", "{{7*7}}"),
            ("a long name", "m" * 5000, "mmmm"),
        )
    ),
)  # fmt: skip

TOKENS = (
    tokenize("nothing to tokenize", "prompt", "neither", {}),
    tokenize("two things to tokenize", "prompt", "both", {"prompt": "hi", "messages": MESSAGES}),
    tokenize("a number to tokenize", "prompt", "prompt=5", {"prompt": 5}),
    tokenize("a list to tokenize", "prompt", "a list of 1", {"prompt": ["hi"]}),
    tokenize("no messages to tokenize", "messages", "an empty list", {"messages": []}),
    tokenize("a role that nobody knows to tokenize", "messages[0].role", "'x'",
             {"messages": [{"role": "x", "content": ""}]}),
    tokenize("a template to tokenize by", "chat_template", "never from a request",
             {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, UNSUPPORTED),
    tokenize("special tokens in messages to tokenize", "add_special_tokens", "template",
             {"messages": MESSAGES, "add_special_tokens": True}),
    tokenize("a generation prompt behind a text", "add_generation_prompt", "messages",
             {"prompt": "hi", "add_generation_prompt": True}),
    tokenize("an answer that is opened and continued to tokenize", "continue_final_message", "both true",
             {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}),
    tokenize("names of tokens as a string", "return_token_strs", "'yes'", {"prompt": "hi", "return_token_strs": "yes"}),
    tokenize("a temperature to tokenize with", "temperature", "not a field", {"prompt": "hi", "temperature": 1},
             UNSUPPORTED),
    tokenize("a text far longer than the context to tokenize", "prompt", "characters", {"prompt": "x" * 300_000},
             TOO_LONG),
    detokenize("nothing to detokenize", "tokens", "missing", {}),
    detokenize("a text to detokenize", "tokens", "'hi'", {"tokens": "hi"}),
    detokenize("a text among tokens to detokenize", "tokens[0]", "'5'", {"tokens": ["5"]}),
    detokenize("a token below zero to detokenize", "tokens[0]", "-1", {"tokens": [-1]}),
    detokenize("a token with a fraction to detokenize", "tokens[1]", "0.5", {"tokens": [5, 0.5]}),
    detokenize("a token that is true to detokenize", "tokens[0]", "true", {"tokens": [True]}),
    detokenize("a list of lists to detokenize", "tokens[0]", "a list of 1", {"tokens": [[5]]}),
    detokenize("a token beyond 32 bits to detokenize", "tokens[0]", "2147483647", {"tokens": [2**33]}),
    detokenize("a token that the model does not have to detokenize", "tokens", "319", {"tokens": [320]}),
    detokenize("more tokens than the context to detokenize", "tokens", "256 tokens", {"tokens": [5] * 257}, TOO_LONG),
    detokenize("a prompt to detokenize", "prompt", "not a field", {"tokens": [5], "prompt": "hi"}, UNSUPPORTED),
)  # fmt: skip

CASES = (*PROMPTS, *MODELS, *TOKENS)
