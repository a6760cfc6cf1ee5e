"""What transformers thinks of the tokens of prompts: `python -m benchmarks.h200_oracle MODEL PROMPTS OUT`.

PROMPTS is JSON, a list of lists of tokens. OUT gets, for each number type, the log-probability of every token but a
prompt's first, and the likeliest token in its place, one prompt after the other.
"""

# pyright: reportMissingImports=false
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@torch.no_grad()
def main(folder: str, prompts: str, out: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arrays = {}
    for name, dtype in DTYPES.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(device)
        logprobs, likeliest = [], []
        for tokens in json.loads(Path(prompts).read_text()):
            ids = torch.tensor([tokens], device=device)
            log_probabilities = model(ids).logits[0, :-1].float().log_softmax(-1)
            logprobs.append(log_probabilities.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy())
            likeliest.append(log_probabilities.argmax(-1).cpu().numpy())
        arrays[f"{name}_logprobs"] = np.concatenate(logprobs)
        arrays[f"{name}_likeliest"] = np.concatenate(likeliest)
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
