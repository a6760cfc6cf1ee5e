"""Writes the tokenizer, the template and the end tokens of a family of models as its folders on the hub have them.

Ordinary tokens are bytes and letters only, so that the files are small.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

ASKED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye?"},
]
INSTRUCTED = [{"role": "system", "content": "Be brief."}, *ASKED]


@dataclass(frozen=True, kw_only=True)
class Family:
    """`prompt` is what the template makes of INSTRUCTED, or of ASKED where the family takes no system message.

    The ends are names of tokens, as `tokenizer_config.json` (`eos`), `config.json` and `generation_config.json` have
    them: one, which is written as a number, several, or none.
    """

    tokens: Mapping[str, int]
    stops: set[int]
    prompt: str
    template: str
    kind: Literal["bytes", "metaspace", "gemma"] = "bytes"
    bos: str | None
    eos: str
    adds_bos: bool = True
    config_end: str | tuple[str, ...] | None = None
    generation_end: str | tuple[str, ...] | None = None
    takes_system: bool = True
    within_text_config: bool = False
    template_file: Literal["config", "named", "jinja", "json"] = "config"
    older_files: bool = False  # special_tokens_map.json and added_tokens.json tell of the tokens
    not_special: frozenset[str] = frozenset()
    swallows_spaces: frozenset[str] = frozenset()  # those after the token

    @property
    def messages(self) -> list[dict[str, str]]:
        return INSTRUCTED if self.takes_system else ASKED

    def compact(self) -> dict[str, int]:
        """The special tokens behind the ordinary ones, for a model with few embeddings."""
        first = len(_ORDINARY[self.kind])
        return {name: first + place for place, name in enumerate(self.tokens)}


def _ordinary_bytes() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _ordinary_pieces() -> list[str]:
    printable = [chr(code) for code in range(0x21, 0x7F)]
    return [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *printable]


_ORDINARY = {"bytes": _ordinary_bytes(), "metaspace": _ordinary_pieces(), "gemma": _ordinary_pieces()}


def write_family(
    family: Family, folder: Path, *, compact: bool = False, sizes: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Writes all files of the family but the weights, `sizes` into config.json; the ids of its special tokens."""
    ids = family.compact() if compact else dict(family.tokens)
    _rust_tokenizer(family, ids).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": family.bos, "eos_token": family.eos, "add_bos_token": family.adds_bos}
    if family.older_files:
        special = {"bos_token": family.bos, "eos_token": {"content": family.eos, "lstrip": False, "rstrip": False}}
        _write(folder, "special_tokens_map", {name: value for name, value in special.items() if value})
        _write(folder, "added_tokens", ids)
    else:
        added = {str(id): _added(family, name).__getstate__() for name, id in ids.items()}
        config["added_tokens_decoder"] = added
    match family.template_file:
        case "config":
            config["chat_template"] = family.template
        case "named":
            named = {"tool_use": "{{ raise_exception('not this one') }}", "default": family.template}
            config["chat_template"] = [{"name": name, "template": template} for name, template in named.items()]
        case "jinja":
            (folder / "chat_template.jinja").write_text(family.template)
        case "json":
            _write(folder, "chat_template", {"chat_template": family.template})
    _write(folder, "tokenizer_config", config)
    ends = {"bos_token_id": ids.get(family.bos or ""), **_end(family.config_end, ids)}
    _write(folder, "config", {**(sizes or {}), **({"text_config": ends} if family.within_text_config else ends)})
    _write(folder, "generation_config", _end(family.generation_end, ids))
    return ids


def _write(folder: Path, name: str, values: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(values))


def _end(names: str | tuple[str, ...] | None, ids: Mapping[str, int]) -> dict[str, Any]:
    if names is None:
        return {}
    return {"eos_token_id": ids[names] if isinstance(names, str) else [ids[name] for name in names]}


def _added(family: Family, name: str) -> AddedToken:
    special = name not in family.not_special
    return AddedToken(name, special=special, normalized=False, rstrip=name in family.swallows_spaces)


def _rust_tokenizer(family: Family, ids: Mapping[str, int]) -> RustTokenizer:
    free = iter(id for id in range(2**20) if id not in ids.values())
    vocabulary = {name: next(free) for name in _ORDINARY[family.kind]} | dict(ids)
    tokenizer: Any
    if family.kind == "bytes":
        tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        begins = [normalizers.Prepend("▁")] if family.kind == "metaspace" else []
        strips = [decoders.Strip(" ", 1, 0)] if family.kind == "metaspace" else []
        tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([*begins, normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
        )
    if family.adds_bos:
        special = [(family.bos, ids[family.bos or ""])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=special)
    added = [_added(family, name) for name in ids]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer
