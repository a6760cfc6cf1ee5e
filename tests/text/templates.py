"""Chat templates of the shape that the families of models have, in our own words."""

LLAMA2 = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set turns = messages[1:] -%}
    {%- set preface = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
{%- else -%}
    {%- set turns = messages -%}
    {%- set preface = '' -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 is even) -%}
        {{- raise_exception('user and assistant take turns here') -}}
    {%- endif -%}
    {%- set text = (preface if loop.first else '') + turn['content'] -%}
    {%- if turn['role'] == 'user' -%}
        {{- bos_token + '[INST] ' + text.strip() + ' [/INST]' -}}
    {%- else -%}
        {{- ' ' ~ text.strip() ~ ' ' ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

LLAMA3 = """\
{%- for message in messages %}
    {{- bos_token if loop.first }}
    {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

LLAMA31 = """\
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- set tools = custom_tools if custom_tools is defined else tools %}
{%- if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- set system, turns = '', messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, turns = messages[0]['content'] | trim, messages[1:] %}
{%- endif %}
{{- bos_token + head('system') }}
{%- if builtin_tools is defined or tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in turns %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- head('ipython') + (message.content | tojson if message.content is iterable else message.content) }}
        {{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('One call at a time.') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
    {%- else %}
        {{- head(message['role']) + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""


def _guard(content: str) -> str:
    """Llama Guard: the whole conversation is one turn of a user, about which the model gives its judgement."""
    return (
        """\
{%- set last = 'User' if messages | length is odd else 'Agent' %}
{{- bos_token + '<|start_header_id|>user<|end_header_id|>\\n\\nTask: is there anything unsafe in what ' + last }}
{{- ' said?\\n\\n<BEGIN UNSAFE CONTENT CATEGORIES>\\n' }}
{%- if categories is defined %}
    {%- for key, text in categories.items() %}{{ key + ': ' + text + '\\n' }}{% endfor %}
{%- else %}{{ 'S1: Crimes.\\nS2: Secrets.\\n' }}{% endif %}
{{- '<END UNSAFE CONTENT CATEGORIES>\\n\\n<BEGIN CONVERSATION>\\n\\n' }}
{%- for message in messages %}
    {%- if message['role'] not in ('user', 'assistant') or (message['role'] == 'user') != (loop.index0 is even) %}
        {{- raise_exception('User and Agent take turns here.') }}
    {%- endif %}
    {{- ('User: ' if message['role'] == 'user' else 'Agent: ') }}
"""
        + content
        + """\
    {{- '\\n\\n' }}
{%- endfor %}
{{- '<END CONVERSATION>\\n\\nJudge ' + last + ' in one line.<|eot_id|>' }}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
"""
    )


LLAMA_GUARD = _guard("    {{- message['content'] | trim }}\n")
# As its sibling that also sees pictures: it finds no text in a content that is a string.
LLAMA_GUARD_OF_PARTS = _guard(
    "    {%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] | trim }}{% endfor %}\n"
)

LLAMA4 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}{{ '<|image|>' }}{% elif part['type'] == 'text' %}{{ part['text'] | trim }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role here.') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 is even) %}{{ raise_exception('Take turns.') }}{% endif %}
    {%- set who = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + who + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

GEMMA3 = """\
{{ bos_token }}
{%- set preface, turns = '', messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set said = messages[0]['content'] -%}
    {%- set preface, turns = (said if said is string else said[0]['text']) + '\\n\\n', messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 is even) -%}{{ raise_exception('Take turns.') }}{%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {{- preface if loop.first -}}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}{%- else -%}{{ part['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

QWEN2 = """\
{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

QWEN3 = """\
{%- macro write(role, text) -%}
    {{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endmacro -%}
{%- set ns = namespace(searching=true, asked=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching, ns.asked = false, messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.role == 'tool' %}
        {{- write('user', '<tool_response>\\n' ~ text ~ '\\n</tool_response>') }}
    {%- elif message.role == 'assistant' and '</think>' in text %}
        {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set said = text.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = '<think>\\n' + thought + '\\n</think>\\n\\n' if loop.index0 > ns.asked else '' %}
        {{- write('assistant', thought + said) }}
    {%- else %}
        {{- write(message.role, text) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

PHI3 = """\
{% for message in messages if message['role'] in ('system', 'user', 'assistant') %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""

PHI4 = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 is even) %}{{ raise_exception('Take turns.') }}{% endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- message['content'] + eos_token + ' ' }}
    {%- endif %}
{%- endfor %}
"""


def _mistral(opening: str, closing: str, answer: str, *, system: str) -> str:
    """Later ones of Mistral, which differ in spaces; `system` says in which user's turn the system's words are."""
    return (
        """\
{%- set system, turns = none, messages %}
{%- if messages[0]['role'] == 'system' %}{% set system, turns = messages[0]['content'], messages[1:] %}{% endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in turns if message.role in ('user', 'assistant') and not message.tool_calls %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('Take turns.') }}{% endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {{- 'OPENING' }}
        {%- if system is not none and message == users[SYSTEM] %}{{ system + '\\n\\n' }}{% endif %}
        {{- message['content'] + 'CLOSING' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- 'ANSWER' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, after a system message.') }}
    {%- endif %}
{%- endfor %}
""".replace("OPENING", opening)
        .replace("CLOSING", closing)
        .replace("ANSWER", answer)
        .replace("SYSTEM", system)
    )


MIXTRAL = _mistral(" [INST] ", " [/INST]", " ", system="0")
MISTRAL_V3 = _mistral("[INST] ", "[/INST]", " ", system="-1")
MISTRAL_NEMO = _mistral("[INST]", "[/INST]", "", system="-1")

MISTRAL_SMALL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set text = message['content'] if message['content'] is string else message['content'][0]['text'] %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' }}
        {%- if message['content'] is string %}
            {{- text }}
        {%- else %}
            {%- for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '[IMG]' }}{% endfor %}
        {%- endif %}
        {{- '[/INST]' }}
    {%- elif message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + text + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- text + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

HARMONY = """\
{%- macro tell(tool) %}
    {%- for name, value in tool.function.items() %}{{ '// ' ~ name ~ ': ' ~ value }}{% endfor %}
{%- endmacro %}
{%- set identity = model_identity if model_identity is defined else 'You answer.' %}
{{- '<|start|>system<|message|>' + identity + '\\nKnowledge cutoff: 2024-06' }}
{{- '\\nCurrent date: ' + strftime_now('%Y-%m-%d') }}
{{- '\\n\\nReasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium') }}
{{- '\\n\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- set turns = messages %}
{%- if messages[0].role in ('developer', 'system') %}
    {%- set turns = messages[1:] %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content }}
    {%- if tools %}{{ '\\n\\n# Tools\\n\\n' }}{% for tool in tools %}{{ tell(tool) }}{% endfor %}{% endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(call=none) %}
{%- for message in turns %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set last.call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + last.call.name + '<|channel|>commentary json<|message|>' }}
        {{- last.call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if '<|channel|>' in message.content %}{{ raise_exception('Channels have fields of their own.') }}{% endif %}
        {%- set last.call = none %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if last.call is none %}{{ raise_exception('Nobody called a tool.') }}{% endif %}
        {{- '<|start|>functions.' + last.call.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

# No model's: the blocks that templates for training have.
TRAINING = """\
{%- set ns = namespace(last=-1, calls=0) -%}
{%- for message in messages if message.role == 'user' -%}
    {%- set ns.last = loop.index0 -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if message.role == 'user' -%}
        {{- '[INST]' + message.content + '[/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set ns.calls = ns.calls + 1 -%}
        {%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {%- break -%}
    {%- endif -%}
{%- endfor -%}
{{- ns.last if ns.calls > 99 -}}
"""

STYLES = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "llama31": LLAMA31,
    "guard": LLAMA_GUARD,
    "llama4": LLAMA4,
    "gemma": GEMMA,
    "gemma3": GEMMA3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "chatml": CHATML,
    "phi3": PHI3,
    "phi4": PHI4,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "mistral-v3": MISTRAL_V3,
    "mistral-nemo": MISTRAL_NEMO,
    "mistral-small": MISTRAL_SMALL,
    "harmony": HARMONY,
    "training": TRAINING,
}
