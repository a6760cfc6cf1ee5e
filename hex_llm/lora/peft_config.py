"""What adapter_config.json says, as PEFT writes it: which modules are adapted, by what rank, and how strongly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hex_llm.lora.files import CONFIG
from hex_llm.model_fields import LARGEST, Fields
from hex_llm.model_files import read_json

# Each makes an adapter more than two matrices beside a linear module of the base model, as it is, for every token.
_NOT_SERVED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "fan_in_fan_out",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "megatron_config",
)
_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias")
# What was of use when it was trained, and changes nothing of what it is. The parts of initializations say nothing that
# `init_lora_weights` does not.
_OF_TRAINING = (
    "init_lora_weights",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "qalora_group_size",
    "lora_dropout",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "ensure_weight_tying",
    "megatron_core",
    "runtime_config",
    "inference_mode",
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "peft_version",
)
# Others begin with a part of the base model's weights, which the base model of who trained it then was without.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
_METACHARACTERS = frozenset(r"\^$*+?{}[]()|")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Modules go by the names that the adapter's own tensors have."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]  # of modules whose names end so; the first that does counts
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    targets: tuple[str, ...] | None  # ends of the names of all modules that are adapted, if they are told so

    def is_target(self, module: str) -> bool:
        return self.targets is None or any(_ends(module, target) for target in self.targets)

    def rank_of(self, module: str) -> int:
        return _first(self.ranks, module, self.rank)

    def scaling_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _first[T](values: Mapping[str, T], module: str, default: T) -> T:
    return next((value for end, value in values.items() if _ends(module, end)), default)


def _ends(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def read_config(folder: Path, max_rank: int) -> PeftConfig:
    """CheckpointError where it is none, or where it is of an adapter that is not served."""
    fields = Fields(CONFIG, read_json(folder / CONFIG))
    fields.one_of("peft_type", {"LORA": None})
    fields.none_of(*_NOT_SERVED)
    fields.one_of("bias", {"none": None}, "none")
    fields.only(*_READ, *_OF_TRAINING)
    _check_start(fields)
    ranks, alphas = _pattern(fields, "rank_pattern"), _pattern(fields, "alpha_pattern")
    return PeftConfig(
        rank=_rank(fields, "r", max_rank),
        alpha=fields.number("lora_alpha"),
        ranks={name: _rank(ranks, name, max_rank) for name in ranks.values},
        alphas={name: alphas.number(name) for name in alphas.values},
        is_rank_stabilized=fields.flag("use_rslora", False),
        targets=_targets(fields),
    )


def _rank(fields: Fields, name: str, most: int) -> int:
    rank = fields.values.get(name)
    if isinstance(rank, int) and most < rank <= LARGEST:
        raise fields.refuse(name, f"is {rank}, and ranks up to {most} are served (--max_lora_rank)")
    return fields.integer(name, largest=most)


def _check_start(fields: Fields) -> None:
    start = fields.values.get("init_lora_weights")
    if start is None or isinstance(start, bool):
        return
    text = fields.text("init_lora_weights")
    if text not in _PLAIN_STARTS:
        known = ", ".join(_PLAIN_STARTS)
        raise fields.refuse(
            "init_lora_weights",
            f"is {text[:60]!r}, not true, false, {known}: it may be meant for a base model whose weights were changed",
        )


def _pattern(fields: Fields, name: str) -> Fields:
    """Values by the ends of names. PEFT reads them as regular expressions, which nobody should run for a stranger."""
    section = fields.section(name) or Fields(fields.source, {}, f"{name}.")
    for key in section.values:
        if not key or _METACHARACTERS & {*key}:
            raise fields.refuse(name, f"has {key[:60]!r}, and only names of modules are read, no patterns")
    return section


def _targets(fields: Fields) -> tuple[str, ...] | None:
    """A list has ends of names. A text is a pattern, which is not run: the tensors tell what it has matched."""
    if isinstance(fields.values.get("target_modules"), str):
        return None
    return fields.texts("target_modules") or None
