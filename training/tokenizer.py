"""The tokenizer of the default model: byte-level BPE with single digits, its chat format and its files."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END, USER, ASSISTANT, SYSTEM, END_OF_TEXT = SPECIAL_TOKENS = (
    "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end_of_text|>",
)  # fmt: skip
BEGIN_ID, END_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID, END_OF_TEXT_ID = range(len(SPECIAL_TOKENS))
VOCABULARY_SIZE = 2048

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception("the role '" + message['role'] + "' is not known: use system, user or assistant") -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def render(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """The text of a conversation, as the chat template writes it."""
    body = "".join(f"<|{message['role']}|>{message['content'].strip()}{END}" for message in messages)
    return BEGIN + body + (ASSISTANT if add_generation_prompt else "")


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of the texts; every digit stays a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
