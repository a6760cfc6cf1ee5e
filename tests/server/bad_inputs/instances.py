"""/generate: Vertex's instances and parameters, chats among them, adapters."""

from typing import Any

from tests.server.bad_inputs.case import GENERATE, INSTANCE, MESSAGES, Case, chat, completion, instance

UNSUPPORTED, TOO_LONG = "unsupported_parameter", "context_length_exceeded"
FORMAT = {"@requestFormat": "chatCompletions"}
CHAT_INSTANCE = {**FORMAT, "messages": MESSAGES, "max_tokens": 2}


def generate(name: str, param: str | None, says: str, body: Any, code: str | None = None) -> Case:
    return Case(name=name, route=GENERATE, body=body, param=param, says=says, code=code)


def parameters(name: str, param: str, says: str, code: str | None = None, /, **fields: Any) -> Case:
    """One good instance, and these parameters."""
    body = {"instances": [{"prompt": "hi"}], "parameters": {"max_tokens": 2, **fields}}
    return generate(name, f"parameters.{param}", says, body, code)


def chat_instance(name: str, param: str, says: str, code: str | None = None, /, **fields: Any) -> Case:
    return generate(name, f"instances[0].{param}", says, {"instances": [CHAT_INSTANCE | fields]}, code)


CASES = (
    generate("no instances and no prompt", "prompt", "missing", {}),
    generate("parameters alone", "parameters", "'parameters'", {"parameters": {"max_tokens": 2}}, UNSUPPORTED),
    generate("instances that are null", "instances", "null", {"instances": None}),
    generate("an empty list of instances", "instances", "an empty list", {"instances": []}),
    generate("instances that are an object", "instances", "an object", {"instances": INSTANCE}),
    generate("instances that are a string", "instances", "'hi'", {"instances": "hi"}),
    generate("too many instances", "instances", "128 (--max_instances)", {"instances": [INSTANCE] * 129}),
    generate("an instance that is a string", "instances[0]", "'hi'", {"instances": ["hi"]}),
    generate("an instance that is null", "instances[1]", "null", {"instances": [INSTANCE, None]}),
    generate("an instance that is a list", "instances[0]", "a list of 1", {"instances": [[INSTANCE]]}),
    generate("an empty instance", "instances[0].prompt", "missing", {"instances": [{}]}),
    generate("a bad instance after a good one", "instances[1].top_k", "-7",
             {"instances": [INSTANCE, INSTANCE | {"top_k": -7}]}),
    generate("a field beside instances", "temperature", "parameters",
             {"instances": [INSTANCE], "temperature": 0}, UNSUPPORTED),
    generate("a request format beside instances", "@requestFormat", "parameters",
             {"instances": [INSTANCE], **FORMAT}, UNSUPPORTED),
    generate("parameters that are a list", "parameters", "a list of 1", {"instances": [INSTANCE], "parameters": [1]}),
    generate("parameters that are a string", "parameters", "'x'", {"instances": [INSTANCE], "parameters": "x"}),
    generate("parameters that are false", "parameters", "false", {"instances": [INSTANCE], "parameters": False}),
    generate("a bare body with an empty prompt", "prompt", "empty", {"prompt": ""}),
    generate("a bare body with a bad value", "top_p", "7", {"prompt": "hi", "top_p": 7}),
    generate("a bare body with a field that nobody knows", "banana", "'banana'", {"prompt": "hi", "banana": 1},
             UNSUPPORTED),
    instance("a prompt that is null in an instance", "prompt", "missing", prompt=None),
    instance("an empty prompt in an instance", "prompt", "empty", prompt=""),
    instance("a prompt that is a number in an instance", "prompt", "prompt=5", prompt=5),
    instance("a list of texts in an instance", "prompt[0]", "'hi'", prompt=["hi"]),
    instance("a token with a fraction in an instance", "prompt[0]", "5.5", prompt=[5.5]),
    instance("a token below zero in an instance", "prompt[0]", "-5", prompt=[-5.0]),
    instance("a token that the model does not have in an instance", "prompt", "320", prompt=[320.0]),
    instance("a token of three hundred digits in an instance", "prompt[0]", "must be a token", prompt=[1e300]),
    instance("a prompt longer than the context in an instance", "prompt", "256 tokens", TOO_LONG, prompt="x" * 270),
    instance("a prompt far longer than the context in an instance", "prompt", "characters", TOO_LONG,
             prompt="x" * 50_000),
    instance("a field that nobody knows in an instance", "banana", "banana", UNSUPPORTED, banana=1),
    instance("messages without a request format", "messages", "@requestFormat", UNSUPPORTED, messages=MESSAGES),
    instance("a stream as a string in an instance", "stream", "'yes'", stream="yes"),
    instance("no tokens in a piece", "streaming_tokens", "from 1", streaming_tokens=0),
    instance("half a token in a piece", "streaming_tokens", "0.5", streaming_tokens=0.5),
    instance("a raw response as a string", "raw_response", "'true'", raw_response="true"),
    instance("an empty salt in an instance", "cache_salt", "1 to 256", cache_salt=""),
    instance("a tool in an instance", "tools", "not a field", UNSUPPORTED, tools=[]),
    instance("a JSON object from an instance", "response_format", "does not exist yet", UNSUPPORTED,
             response_format={"type": "json_object"}),
    instance("a model that is a number in an instance", "model", "model=5", model=5),
    generate("instances with salts that differ", "instances[1].cache_salt", "instances[0]",
             {"instances": [INSTANCE, INSTANCE | {"cache_salt": "s"}]}),
    generate("instances of which one is streamed", "instances[1].stream", "instances[0]",
             {"instances": [INSTANCE, INSTANCE | {"stream": True}]}),
    generate("instances of which one is raw", "instances[1].raw_response", "instances[0]",
             {"instances": [INSTANCE, INSTANCE | {"raw_response": True}]}),
    parameters("a temperature below zero in parameters", "temperature", "-1", temperature=-1),
    parameters("a top_k with a fraction in parameters", "top_k", "0.5", top_k=0.5),
    parameters("max_tokens as a string in parameters", "max_tokens", "'2'", max_tokens="2"),
    parameters("max_tokens beyond the context in parameters", "max_tokens", "256 tokens", TOO_LONG, max_tokens=1e6),
    parameters("a field that nobody knows in parameters", "banana", "banana", UNSUPPORTED, banana=[]),
    parameters("an n of two in parameters", "n", "one prediction", UNSUPPORTED, n=2),
    parameters("a request format that nobody knows in parameters", "@requestFormat", "'chat'",
               **{"@requestFormat": "chat"}),
    instance("a request format in other words", "@requestFormat", "'chatcompletions'",
             **{"@requestFormat": "chatcompletions"}),
    instance("a request format that is a list", "@requestFormat", "a list of 1", **{"@requestFormat": ["x"]}),
    generate("a bare body with a request format that nobody knows", "@requestFormat", "chatCompletions",
             {"prompt": "hi", "@requestFormat": 5}),
    chat_instance("a chat without messages in an instance", "messages", "missing", messages=None),
    chat_instance("a chat with a prompt in an instance", "prompt", "/v1/completions", UNSUPPORTED, prompt="hi"),
    chat_instance("a role that nobody knows in an instance", "messages[0].role", "'x'",
                  messages=[{"role": "x", "content": "hi"}]),
    chat_instance("a temperature below zero in a chat in an instance", "temperature", "-2", temperature=-2),
    chat_instance("max_tokens of zero in a chat in an instance", "max_tokens", "from 1", max_tokens=0),
    generate("a chat in a bare body without messages", "messages", "missing", FORMAT),
    generate("chats and prompts mixed", "instances", "1 of 2", {"instances": [CHAT_INSTANCE, INSTANCE]}),
    generate("two chats that are streamed", "instances[0].stream", "2 chats",
             {"instances": [CHAT_INSTANCE | {"stream": True}] * 2}),
    generate("chats that ask for too many answers", "instances", "256 (--max_sequences)",
             {"instances": [CHAT_INSTANCE | {"n": 128}] * 3}),
    *(
        instance(f"an adapter {where}", "dynamic-lora", says, UNSUPPORTED, **{"dynamic-lora": value})
        for where, says, value in (
            ("in a bucket", "'gs://bucket/adapter'", "gs://bucket/adapter"),
            ("by a path", "'../../etc'", "../../etc"),
            ("by an address of the web", "'http://example.com/a'", "http://example.com/a"),
            ("that is a number", "dynamic-lora=7", 7),
            ("that is an object", "an object", {"uri": "gs://a"}),
            ("with a NUL", "\\x00", "gs://bucket/\0"),
        )
    ),
    parameters("an adapter in parameters", "dynamic-lora", "'gs://a/b'", UNSUPPORTED, **{"dynamic-lora": "gs://a/b"}),
    chat_instance("an adapter of a chat", "dynamic-lora", "'gs://a/b'", UNSUPPORTED, **{"dynamic-lora": "gs://a/b"}),
    instance("an adapter by another name", "lora_id", "'a'", UNSUPPORTED, lora_id="a"),
    chat("an adapter beside a conversation", "dynamic-lora", "--enable_lora", UNSUPPORTED, **{"dynamic-lora": "a"}),
    completion("an adapter beside a prompt", "lora_path", "--enable_lora", UNSUPPORTED, lora_path="a"),
)  # fmt: skip
