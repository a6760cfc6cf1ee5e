"""What TPUs could do at most: the load of Google's guide for vLLM on v6e, and what tensor parallelism costs there.

    python -m benchmarks.tpu_roofline

Nothing runs: these are the figures of `hex_llm.bench.roofline`, in Markdown.
"""

from hex_llm.bench.roofline import ITEM, Machine, Part, Slice, served, step_parts, step_seconds, sums
from hex_llm.catalog.chips import CHIPS
from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import find
from hex_llm.loader.config_json import parse_config
from hex_llm.models.arch import Arch

V6E_8, V5E_8, V6E_1 = Machine(CHIPS["v6e"], (2, 4)), Machine(CHIPS["v5e"], (2, 4)), Machine(CHIPS["v6e"], (1, 1))
# Llama-3.3-70B, 1000 tokens in and out, as the guide prints them: requests at a time, and the output tokens a second
# and milliseconds per token of each that vLLM 0.12 had on eight chips.
GUIDE = ((64, 2494.80, 25.35), (128, 3544.46, 35.12))
CONTEXT = 1500
STEPS = (
    ("64 decodes", [Slice(1, CONTEXT)] * 64),
    ("256 decodes", [Slice(1, CONTEXT)] * 256),
    ("a prompt of 2048", [Slice(2048, 2048)]),
)
# Bits of a weight in memory: int4 has a scale of 32 and a zero of 16 for each 128.
FEW_BITS = (("bf16", 16.0), ("int8, fp8", 8.0), ("int4", 4.375))
SPLIT = (
    ("meta-llama/Llama-3.1-8B-Instruct", V5E_8),
    ("meta-llama/Llama-3.1-8B-Instruct", V6E_8),
    ("google/gemma-2-27b-it", V5E_8),
    ("google/gemma-2-27b-it", V6E_8),
    ("meta-llama/Llama-3.3-70B-Instruct", V6E_8),
)


def arch_of(name: str) -> Arch:
    entry = find(name)
    assert entry is not None, f"{name} is not in the catalog"
    return parse_config(config_of(entry), name).arch


def main() -> None:
    large, small = arch_of("meta-llama/Llama-3.3-70B-Instruct"), arch_of("meta-llama/Llama-3.1-8B-Instruct")
    print("| requests at once | roofline, tokens/s | ms per token | vLLM, tokens/s | ms per token | of the roofline |")
    print("|---|---|---|---|---|---|")
    for running, tokens, milliseconds in GUIDE:
        most = served(large, V6E_8, running=running, prompt=1000, output=1000)
        cells = f"{most.tokens_per_second:.0f} | {1e3 * most.seconds_per_token:.1f} | {tokens:.0f} | {milliseconds:.1f}"
        print(f"| {running} | {cells} | {tokens / most.tokens_per_second:.2f} |")
    alone = served(small, V6E_1, running=128, prompt=1800, output=128)
    print(
        f"\nLlama-3.1-8B on one v6e chip, 1800 in and 128 out, 128 at a time: {alone.tokens_per_second:.0f} tokens/s\n"
    )

    parts = step_parts(large, V6E_8, [Slice(1, CONTEXT)] * 64)
    print("Llama-3.3-70B on v6e-8, 64 decodes:", ", ".join(f"{p.name} {milliseconds_of(p, V6E_8)} ms" for p in parts))
    print()
    print("| model | machine | step | MB summed in a layer | MB sent in a step | ms of sums | ms of the rest | share |")
    print("|---|---|---|---|---|---|---|---|")
    for name, machine in SPLIT:
        arch = arch_of(name)
        for step, slices in STEPS:
            added = sums(arch, machine, sum(each.tokens for each in slices))
            seconds = added.seconds(machine.chip)
            rest = sum(p.seconds(machine.chip) for p in step_parts(arch, machine, slices) if p.name != "sums")
            summed = 2 * ITEM * sum(each.tokens for each in slices) * arch.embed_size
            print(
                f"| {name.rpartition('/')[2]} | {machine.chip.name}-8 | {step} | {summed / 1e6:.1f} | "
                f"{added.sent / 1e6:.0f} | {1e3 * seconds:.2f} | {1e3 * rest:.2f} | {seconds / (seconds + rest):.2f} |"
            )
    print()
    print("| model | machine | step | " + " | ".join(f"ms, {name}" for name, _ in FEW_BITS) + " |")
    print("|---|---|---" + "|---" * len(FEW_BITS) + "|")
    for arch, name, machine in ((small, "Llama-3.1-8B", V6E_1), (large, "Llama-3.3-70B", V6E_8)):
        for step, slices in STEPS:
            cells = [f"{1e3 * step_seconds(arch, machine, slices, bits=bits):.2f}" for _, bits in FEW_BITS]
            print(f"| {name} | {machine.chip.name}-{machine.devices} | {step} | {' | '.join(cells)} |")


def milliseconds_of(part: Part, machine: Machine) -> str:
    return f"{1e3 * part.seconds(machine.chip):.2f}"


if __name__ == "__main__":
    main()
