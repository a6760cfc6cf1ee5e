"""Conversations: roles, contents, parts, tools, templates, and what else a chat cannot have."""

from typing import Any

from tests.server.bad_inputs.case import CHAT_BODY, MESSAGES, Case, chat

UNSUPPORTED = "unsupported_parameter"


def message(name: str, param: str, says: str, code: str | None = None, /, **fields: Any) -> Case:
    """A chat whose only message has these fields."""
    return chat(name, f"messages[0].{param}", says, code, messages=[{"role": "user", "content": "hi", **fields}])


def part(name: str, param: str, says: str, value: Any, code: str | None = None) -> Case:
    """A message whose content is this part after a good one."""
    return message(name, f"content[1]{param}", says, code, content=[{"type": "text", "text": "hi"}, value])


TALK = (
    Case(name="no messages at all", body={"max_tokens": 2}, param="messages", says="missing"),
    chat("messages that are null", "messages", "missing", messages=None),
    chat("an empty list of messages", "messages", "an empty list", messages=[]),
    chat("messages that are a string", "messages", "'hi'", messages="hi"),
    chat("messages that are an object", "messages", "an object", messages={"role": "user", "content": "hi"}),
    chat("messages that are a number", "messages", "messages=1", messages=1),
    chat("a message that is a string", "messages[0]", "'hi'", messages=["hi"]),
    chat("a message that is null", "messages[1]", "null", messages=[*MESSAGES, None]),
    chat("a message that is a list", "messages[0]", "a list of 1", messages=[MESSAGES]),
    chat("an empty message", "messages[0].role", "missing", messages=[{}]),
    chat("a message without a role", "messages[0].role", "missing", messages=[{"content": "hi"}]),
    chat("a message without content", "messages[0].content", "missing", messages=[{"role": "user"}]),
    chat("too many messages", "messages", "4096 (--max_messages)", messages=MESSAGES * 4097),
    message("a role that nobody knows", "role", "'robot'", role="robot"),
    message("a role in capitals", "role", "'User'", role="User"),
    message("an empty role", "role", "''", role=""),
    message("a role that is a number", "role", "role=1", role=1),
    message("a role that is a list", "role", "a list of 1", role=["user"]),
    message("a role that is an object", "role", "an object", role={"user": 1}),
    message("a role of a thousand characters", "role", "1000 characters", role="u" * 1000),
    message("the function role of old", "role", "'function'", role="function", name="f"),
    message("a content that is null", "content", "missing", content=None),
    message("a content that is a number", "content", "content=5", content=5),
    message("a content that is true", "content", "true", content=True),
    message("a content that is an object", "content", "an object", content={"text": "hi"}),
    message("too many parts", "content", "4096", content=[{"type": "text", "text": "a"}] * 4097),
    part("a part that is a string", "", "'hi'", "hi"),
    part("a part that is null", "", "null", None),
    part("a part without a type", ".type", "null", {"text": "hi"}, UNSUPPORTED),
    part("a part with an image", ".type", "'image_url'",
         {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, UNSUPPORTED),
    part("a part with sound", ".type", "'input_audio'",
         {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, UNSUPPORTED),
    part("a part with a video", ".type", "'video_url'",
         {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, UNSUPPORTED),
    part("a part with a file", ".type", "'file'", {"type": "file", "file": {"file_id": "x"}}, UNSUPPORTED),
    part("a text part without text", ".text", "null", {"type": "text"}),
    part("a text part with a number", ".text", "text=5", {"type": "text", "text": 5}),
    part("a text part with one field more", "", "'cache_control'",
         {"type": "text", "text": "hi", "cache_control": {}}, UNSUPPORTED),
    message("a name that is a number", "name", "name=5", name=5),
    message("a name of too many characters", "name", "256", name="n" * 257),
    message("a field that messages do not have", "images", "'images'", UNSUPPORTED, images=[]),
    message("the function call of old", "function_call", "tool_calls", UNSUPPORTED, function_call={"name": "f"}),
    message("a message with sound", "audio", "text only", UNSUPPORTED, audio={"id": "x"}),
    message("tool calls that are an object", "tool_calls", "an object", tool_calls={"id": "x"}),
    message("a tool call that is a string", "tool_calls[0]", "'x'", tool_calls=["x"]),
    message("too many tool calls", "tool_calls", "128", tool_calls=[{}] * 129),
    message("an id of a tool call that is a number", "tool_call_id", "tool_call_id=5", tool_call_id=5),
    chat("a tool's message without content", "messages[0].content", "missing",
         messages=[{"role": "tool", "tool_call_id": "x"}]),
    chat("an assistant's message without content or calls", "messages[0].content", "missing",
         messages=[{"role": "assistant", "tool_calls": []}]),
    chat("a conversation longer than the context", "messages", "256 tokens", "context_length_exceeded",
         messages=[{"role": "user", "content": "x" * 300}]),
    chat("a conversation far longer than the context", "messages", "characters", "context_length_exceeded",
         messages=[{"role": "user", "content": "x" * 100_000}]),
    chat("a prompt for a chat", "prompt", "/v1/completions", UNSUPPORTED, prompt="hi"),
)  # fmt: skip

TEMPLATES = (
    chat("a template in a request", "chat_template", "never from a request", UNSUPPORTED,
         chat_template="{{ ''.__class__.__mro__ }}"),
    chat("a template that never ends in a request", "chat_template", "is not supported", UNSUPPORTED,
         chat_template="{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"),
    chat("variables of the template as a list", "chat_template_kwargs", "a list of 1", chat_template_kwargs=[1]),
    chat("variables of the template as a string", "chat_template_kwargs", "'{}'", chat_template_kwargs="{}"),
    chat("a variable that is not allowed", "chat_template_kwargs", "'tools'", chat_template_kwargs={"tools": []}),
    chat("a variable that would replace the messages", "chat_template_kwargs", "'messages'",
         chat_template_kwargs={"messages": []}),
    chat("a variable that would replace the template", "chat_template_kwargs", "'chat_template'",
         chat_template_kwargs={"chat_template": "x"}),
    chat("a variable that the template knows nothing of", "chat_template_kwargs", "'enable_thinking'",
         chat_template_kwargs={"enable_thinking": True}),
    chat("a variable of another type", "chat_template_kwargs", "true or false",
         chat_template_kwargs={"enable_thinking": "yes"}),
    chat("a variable with a long name", "chat_template_kwargs", "aaaa", chat_template_kwargs={"a" * 5000: 1}),
    chat("an answer that is opened and continued", "continue_final_message", "both true",
         continue_final_message=True, add_generation_prompt=True),
    chat("an add_generation_prompt of one", "add_generation_prompt", "true or false", add_generation_prompt=1),
    chat("special tokens in a chat", "add_special_tokens", "template", UNSUPPORTED, add_special_tokens=True),
)  # fmt: skip

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
_REGEX = "(a+)+$"

TOOLS_AND_STRUCTURE = (
    chat("a tool", "tools", "a list of 1", UNSUPPORTED, tools=[_TOOL]),
    chat("two hundred tools", "tools", "a list of 200", UNSUPPORTED, tools=[_TOOL] * 200),
    chat("tools that are an object", "tools", "an object", UNSUPPORTED, tools=_TOOL),
    chat("tools that are a string", "tools", "'f'", UNSUPPORTED, tools="f"),
    chat("a tool that must be chosen", "tool_choice", "'required'", UNSUPPORTED, tool_choice="required"),
    chat("a tool that is chosen by name", "tool_choice", "an object", UNSUPPORTED,
         tool_choice={"type": "function", "function": {"name": "f"}}),
    chat("the functions of old", "functions", "a list of 1", UNSUPPORTED, functions=[{"name": "f"}]),
    chat("a choice among the functions of old", "function_call", "an object", UNSUPPORTED, function_call={"name": "f"}),
    chat("a parallel_tool_calls as a string", "parallel_tool_calls", "'no'", parallel_tool_calls="no"),
    chat("an answer that is a JSON object", "response_format", "does not exist yet", UNSUPPORTED,
         response_format={"type": "json_object"}),
    chat("an answer by a JSON schema", "response_format", "does not exist yet", UNSUPPORTED, response_format=_SCHEMA),
    chat("an answer of a format that nobody knows", "response_format", "text", UNSUPPORTED,
         response_format={"type": "yaml"}),
    chat("a response format that is a string", "response_format", "'text'", UNSUPPORTED, response_format="text"),
    chat("an answer guided by a schema", "guided_json", "an object", UNSUPPORTED, guided_json={"type": "object"}),
    chat("an answer guided by a regular expression", "guided_regex", _REGEX, UNSUPPORTED, guided_regex=_REGEX),
    chat("an answer guided by choices", "guided_choice", "a list of 2", UNSUPPORTED, guided_choice=["a", "b"]),
    chat("an answer guided by a grammar", "guided_grammar", "root ::=", UNSUPPORTED, guided_grammar="root ::= root"),
    chat("structured outputs", "structured_outputs", "an object", UNSUPPORTED, structured_outputs={"regex": _REGEX}),
)  # fmt: skip

OTHER = (
    chat("an answer with sound", "modalities", "a list of 2", UNSUPPORTED, modalities=["text", "audio"]),
    chat("a voice", "audio", "text only", UNSUPPORTED, audio={"voice": "alloy", "format": "wav"}),
    chat("an effort of reasoning", "reasoning_effort", "'high'", UNSUPPORTED, reasoning_effort="high"),
    chat("a verbosity", "verbosity", "'low'", UNSUPPORTED, verbosity="low"),
    chat("a search on the web", "web_search_options", "web", UNSUPPORTED, web_search_options={}),
    chat("a predicted answer", "prediction", "not predicted", UNSUPPORTED,
         prediction={"type": "content", "content": "hi"}),
    chat("documents", "documents", "a list of 1", UNSUPPORTED, documents=[{"text": "hi"}]),
    chat("an answer to be kept", "store", "not kept", UNSUPPORTED, store=True),
    chat("a better service", "service_tier", "'priority'", UNSUPPORTED, service_tier="priority"),
    chat("a place before others", "priority", "-1", UNSUPPORTED, priority=-1),
    chat("an echo of a chat", "echo", "/v1/completions", UNSUPPORTED, echo=True),
    chat("metadata that are a list", "metadata", "a list of 1", metadata=["a"]),
    chat("a user of too many characters", "user", "256", user="u" * 257),
    chat("a user that is a number", "user", "user=5", user=5),
    chat("a request id with a new line", "request_id", "\\n", request_id="a\nb"),
    chat("a request id of too many characters", "request_id", "128", request_id="a" * 129),
    chat("an empty salt", "cache_salt", "1 to 256", cache_salt=""),
    chat("a salt of too many characters", "cache_salt", "257 characters", cache_salt="s" * 257),
    chat("a salt that is a number", "cache_salt", "cache_salt=5", cache_salt=5),
    chat("a salt in a list", "cache_salt", "a list of 1", cache_salt=["s"]),
    chat("a stream as a string", "stream", "'true'", stream="true"),
    chat("a stream of one", "stream", "true or false", stream=1),
    chat("stream options without a stream", "stream_options", "stream is not true",
         stream_options={"include_usage": True}),
    chat("stream options with stream false", "stream_options", "stream is not true", stream=False,
         stream_options={"include_usage": True}),
    chat("stream options that are a list", "stream_options", "a list of 1", stream=True, stream_options=[1]),
    chat("stream options that are true", "stream_options", "true", stream=True, stream_options=True),
    chat("a usage of one in stream options", "stream_options.include_usage", "true or false", stream=True,
         stream_options={"include_usage": 1}),
    chat("a stream option that nobody knows", "stream_options.include_costs", "'include_costs'", UNSUPPORTED,
         stream=True, stream_options={"include_costs": True}),
    chat("usage in every chunk and not at the end", "stream_options.continuous_usage_stats", "include_usage",
         stream=True, stream_options={"continuous_usage_stats": True}),
    chat("chunks that are padded", "stream_options.include_obfuscation", "not padded", UNSUPPORTED, stream=True,
         stream_options={"include_obfuscation": True}),
    chat("a field that nobody knows", "banana", "'banana'", UNSUPPORTED, banana=1),
    chat("a field that nobody knows and is null", "banana", "not a field", UNSUPPORTED, banana=None),
    chat("a field with a slip of the pen", "temprature", "did you mean temperature", UNSUPPORTED, temprature=1),
    chat("a field in capitals", "Temperature", "did you mean temperature", UNSUPPORTED, Temperature=1),
    chat("a field of ten thousand characters", "z" * 60, "10000 characters", UNSUPPORTED, **{"z" * 10_000: 1}),
    chat("a field without a name", "", "''", UNSUPPORTED, **{"": 1}),
    chat("a field that Python would know", "__class__", "'__class__'", UNSUPPORTED, __class__={"__init__": 1}),
    Case(name="an empty object", body={}, param="messages", says="missing"),
    Case(name="a chat in instances on /v1", body={"instances": [CHAT_BODY]}, param="instances", code=UNSUPPORTED,
         says="'instances'"),
)  # fmt: skip

CASES = (*TALK, *TEMPLATES, *TOOLS_AND_STRUCTURE, *OTHER)
