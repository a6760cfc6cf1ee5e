"""Chat templates in the manner of the models that people serve, written for these tests."""

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
{{- bos_token }}
{%- if date is not defined %}
    {%- if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% else %}{% set date = '?' %}{% endif %}
{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start|>system<|stop|>\\n\\nToday: ' + date + '\\n\\n' + system + '<|eot|>' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<|start|>' + message.role + '<|stop|>\\n\\n' + (call.function | tojson) + '<|eot|>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|stop|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{% for message in messages %}
    {% set who = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + who + '\\n' + message['content'] | trim + '<end>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}
"""

MISTRAL = """\
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

QWEN = """\
{%- macro write(role, text) -%}
    {{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endmacro -%}
{%- if messages[0].role != 'system' %}{{ write('system', 'You help.') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- write('user', '<tool_response>' ~ message.content ~ '</tool_response>') }}
    {%- elif message.role == 'assistant' and '</think>' in message.content %}
        {{- write('assistant', message.content.split('</think>')[-1].lstrip('\\n')) }}
    {%- else %}
        {{- write(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

STYLES = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "chatml": CHATML,
}
