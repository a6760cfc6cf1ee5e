"""transformers and torch in a process of their own: commands come in as lines of JSON, and so do answers go out.

Runs in the environment that `scripts/setup oracle` makes, in whichever python torch is to be had for.
"""

import json
import os
import sys
from pathlib import Path

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # some virtual machines announce AMX and stop at its use
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_utils import remove_tied_weights_from_state_dict


def make(folder, config, model_class, seed, max_shard_size):
    """Saves a random model whose norms and biases are random too, which a newborn model's are not."""
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def shapes(config):
    """The names and shapes of the tensors that a model of any size would be saved as, without making them."""
    config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    tensors = remove_tied_weights_from_state_dict(model.state_dict(), model)
    return {name: list(tensor.shape) for name, tensor in revert_weight_conversion(model, tensors).items()}


def mxfp4(blocks, scales, out):
    packed, exponents = (torch.from_numpy(np.load(path)) for path in (blocks, scales))
    np.save(out, convert_moe_packed_tensors(packed, exponents, dtype=torch.float32).numpy())


def bitsandbytes(folder, settings, target, out):
    """Saves a model in few bits, and what the library says that its matrices stand for."""
    import bitsandbytes as library

    named = json.loads(Path(folder, "config.json").read_text())["architectures"]
    model = getattr(transformers, named[0]).from_pretrained(
        folder, dtype=torch.float32, quantization_config=transformers.BitsAndBytesConfig(**settings)
    )
    model.save_pretrained(target)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, library.nn.Linear4bit):
            found[name] = library.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif isinstance(module, library.nn.Linear8bitLt):
            found[name] = library.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    np.savez(out, **{name: matrix.float().numpy() for name, matrix in found.items()})


def compressed_tensors(arrays, form, weights, module, target, out):
    """Saves a matrix, rounded by scales and zeros that are given, and what the library says that it then stands for."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from safetensors.torch import save_file

    given = {name: torch.from_numpy(array) for name, array in np.load(arrays).items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(given, scheme)
    save_file({f"{module}.{name}": tensor.contiguous() for name, tensor in stored.items()}, target)
    np.save(out, compressor.decompress(stored, scheme)["weight"].float().numpy())


class Models:
    """The last model asked for stays loaded."""

    def __init__(self):
        self.folder = None
        self.model = None

    def load(self, folder):
        if folder != self.folder:
            named = json.loads(Path(folder, "config.json").read_text())["architectures"]
            model_class = getattr(transformers, named[0])
            self.model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            self.folder = folder
        return self.model

    @torch.no_grad()
    def logits(self, folder, tokens, out):
        np.save(out, self.load(folder)(torch.tensor([tokens])).logits[0].numpy())

    def adapter(self, folder, target, settings):
        """Saves a random adapter, both of whose halves are random, which a newborn one's are not."""
        from peft import LoraConfig, get_peft_model

        seed = settings.pop("seed", 0)
        torch.manual_seed(seed)
        adapted = get_peft_model(self.load(folder), LoraConfig(**settings))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.1)
        adapted.save_pretrained(target)
        self.folder = None  # it has been changed

    @torch.no_grad()
    def merged_logits(self, folder, adapter, tokens, out):
        from peft import PeftModel

        merged = PeftModel.from_pretrained(self.load(folder), adapter).merge_and_unload()
        self.folder = None
        np.save(out, merged(torch.tensor([tokens])).logits[0].numpy())

    @torch.no_grad()
    def generate(self, folder, tokens, num_tokens):
        ids = torch.tensor([tokens])
        model = self.load(folder)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(tokens) :].tolist()


def main():
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever the libraries print must not pass for an answer
    models = Models()
    commands = {
        "make": make,
        "shapes": shapes,
        "mxfp4": mxfp4,
        "bitsandbytes": bitsandbytes,
        "compressed_tensors": compressed_tensors,
        "logits": models.logits,
        "adapter": models.adapter,
        "merged_logits": models.merged_logits,
        "generate": models.generate,
    }
    print(json.dumps({"result": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"result": commands[call.pop("command")](**call)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
