"""The families of models: their special tokens under their real ids, what a prompt of theirs is, and what ends one."""

from dataclasses import replace

import templates
from family_files import Family

_LLAMA2 = Family(
    template=templates.LLAMA2,
    kind="metaspace",
    tokens={"<unk>": 0, "<s>": 1, "</s>": 2},
    bos="<s>",
    eos="</s>",
    config_end="</s>",
    generation_end="</s>",
    stops={2},
    older_files=True,
    prompt="<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello! </s><s>[INST] Bye? [/INST]",
)
_LLAMA3 = Family(
    template=templates.LLAMA3,
    tokens={
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
        "<|python_tag|>": 128010,
    },
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    config_end="<|eot_id|>",
    generation_end=("<|end_of_text|>", "<|eot_id|>"),
    stops={128001, 128009},
    prompt=(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
)
_LLAMA31 = replace(
    _LLAMA3,
    template=templates.LLAMA31,
    config_end=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    generation_end=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    stops={128001, 128008, 128009},
    prompt=_LLAMA3.prompt.replace(
        "Be brief.", "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief."
    ),
)
_GUARD = replace(
    _LLAMA31,
    template=templates.LLAMA_GUARD,
    takes_system=False,
    prompt=(
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nTask: is there anything unsafe in what User said?"
        "\n\n<BEGIN UNSAFE CONTENT CATEGORIES>\nS1: Crimes.\nS2: Secrets.\n<END UNSAFE CONTENT CATEGORIES>\n\n"
        "<BEGIN CONVERSATION>\n\nUser: Hi\n\nAgent: Hello!\n\nUser: Bye?\n\n<END CONVERSATION>\n\n"
        "Judge User in one line.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
)
_GEMMA = Family(
    template=templates.GEMMA,
    kind="gemma",
    tokens={"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 106, "<end_of_turn>": 107},
    bos="<bos>",
    eos="<eos>",
    config_end="<eos>",
    generation_end=("<eos>", "<end_of_turn>"),
    stops={1, 107},
    takes_system=False,
    prompt=(
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\nBye?<end_of_turn>\n<start_of_turn>model\n"
    ),
)
_QWEN25 = Family(
    template=templates.QWEN2,
    tokens={"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
    bos=None,
    eos="<|im_end|>",
    adds_bos=False,
    config_end="<|im_end|>",
    generation_end=("<|im_end|>", "<|endoftext|>"),
    stops={151643, 151645},
    prompt=(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye?<|im_end|>\n<|im_start|>assistant\n"
    ),
)
_MISTRAL_V3 = replace(
    _LLAMA2,
    template=templates.MISTRAL_V3,
    tokens={**_LLAMA2.tokens, "[INST]": 3, "[/INST]": 4, "[TOOL_CALLS]": 5, "[AVAILABLE_TOOLS]": 6},
    older_files=False,
    prompt="<s>[INST] Hi[/INST] Hello!</s>[INST] Be brief.\n\nBye?[/INST]",
)

FAMILIES = {
    "llama-2": _LLAMA2,
    "llama-3": _LLAMA3,
    "llama-3.1": _LLAMA31,
    "llama-guard-3-8b": _GUARD,
    "llama-guard-3-1b": replace(_GUARD, template=templates.LLAMA_GUARD_OF_PARTS),
    "llama-4": Family(
        template=templates.LLAMA4,
        template_file="jinja",
        tokens={
            "<|begin_of_text|>": 200000,
            "<|end_of_text|>": 200001,
            "<|header_start|>": 200005,
            "<|header_end|>": 200006,
            "<|eom|>": 200007,
            "<|eot|>": 200008,
        },
        bos="<|begin_of_text|>",
        eos="<|eot|>",
        config_end=("<|end_of_text|>", "<|eom|>", "<|eot|>"),
        within_text_config=True,
        stops={200001, 200007, 200008},
        prompt=(
            "<|begin_of_text|><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
            "<|header_start|>user<|header_end|>\n\nHi<|eot|><|header_start|>assistant<|header_end|>\n\nHello!<|eot|>"
            "<|header_start|>user<|header_end|>\n\nBye?<|eot|><|header_start|>assistant<|header_end|>\n\n"
        ),
    ),
    "gemma": _GEMMA,
    "gemma-3": replace(
        _GEMMA,
        template=templates.GEMMA3,
        template_file="json",
        tokens={**_GEMMA.tokens, "<start_of_turn>": 105, "<end_of_turn>": 106, "<image_soft_token>": 262144},
        config_end=None,
        stops={1, 106},
        takes_system=True,
        prompt=_GEMMA.prompt.replace("Hi", "Be brief.\n\nHi"),
    ),
    "qwen2.5": _QWEN25,
    "qwen3": replace(
        _QWEN25,
        template=templates.QWEN3,
        template_file="named",
        tokens={**_QWEN25.tokens, "<think>": 151667, "</think>": 151668},
        not_special=frozenset({"<think>", "</think>"}),
    ),
    "smollm": replace(
        _QWEN25,
        template=templates.CHATML,
        tokens={"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
        bos="<|im_start|>",
        older_files=True,
        generation_end="<|im_end|>",
        stops={2},
    ),
    "phi-3": Family(
        template=templates.PHI3,
        kind="metaspace",
        tokens={
            **_LLAMA2.tokens,
            "<|endoftext|>": 32000,
            "<|assistant|>": 32001,
            "<|system|>": 32006,
            "<|end|>": 32007,
            "<|user|>": 32010,
        },
        swallows_spaces=frozenset({"</s>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"}),
        not_special=frozenset({"</s>"}),
        bos="<s>",
        eos="<|endoftext|>",
        config_end="<|endoftext|>",
        generation_end=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        stops={32000, 32001, 32007},
        prompt=(
            "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n"
            "<|user|>\nBye?<|end|>\n<|assistant|>\n"
        ),
    ),
    "phi-4": Family(
        template=templates.PHI4,
        tokens={"<|endoftext|>": 100257, "<|im_start|>": 100264, "<|im_end|>": 100265, "<|im_sep|>": 100266},
        bos="<|endoftext|>",
        eos="<|im_end|>",
        adds_bos=False,
        config_end="<|im_end|>",
        generation_end="<|im_end|>",
        stops={100265},
        prompt=(
            "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
            "<|im_start|>assistant<|im_sep|>Hello!<|im_end|><|im_start|>user<|im_sep|>Bye?<|im_end|>"
            "<|im_start|>assistant<|im_sep|>"
        ),
    ),
    "mistral-v0.1": replace(
        _LLAMA2,
        template=templates.MISTRAL,
        takes_system=False,
        prompt="<s>[INST] Hi [/INST]Hello!</s> [INST] Bye? [/INST]",
    ),
    "mixtral": replace(
        _LLAMA2,
        template=templates.MIXTRAL,
        prompt="<s> [INST] Be brief.\n\nHi [/INST] Hello!</s> [INST] Bye? [/INST]",
    ),
    "mistral-v0.3": _MISTRAL_V3,
    "mistral-nemo": replace(
        _MISTRAL_V3,
        template=templates.MISTRAL_NEMO,
        kind="bytes",
        prompt="<s>[INST]Hi[/INST]Hello!</s>[INST]Be brief.\n\nBye?[/INST]",
    ),
    "mistral-small": replace(
        _MISTRAL_V3,
        template=templates.MISTRAL_SMALL,
        kind="bytes",
        tokens={**_MISTRAL_V3.tokens, "[SYSTEM_PROMPT]": 17, "[/SYSTEM_PROMPT]": 18},
        within_text_config=True,
        prompt="<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello!</s>[INST]Bye?[/INST]",
    ),
    "gpt-oss": Family(
        template=templates.HARMONY,
        template_file="jinja",
        tokens={
            "<|startoftext|>": 199998,
            "<|endoftext|>": 199999,
            "<|return|>": 200002,
            "<|channel|>": 200005,
            "<|start|>": 200006,
            "<|end|>": 200007,
            "<|message|>": 200008,
            "<|call|>": 200012,
        },
        bos="<|startoftext|>",
        eos="<|return|>",
        adds_bos=False,
        config_end="<|return|>",
        generation_end=("<|return|>", "<|endoftext|>", "<|call|>"),
        stops={199999, 200002, 200012},
        prompt=(
            "<|start|>system<|message|>You answer.\nKnowledge cutoff: 2024-06\nCurrent date: TODAY\n\n"
            "Reasoning: medium\n\n# Valid channels: analysis, commentary, final.<|end|>"
            "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hi<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hello!<|end|><|start|>user<|message|>Bye?<|end|>"
            "<|start|>assistant"
        ),
    ),
}
