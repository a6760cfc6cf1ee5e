"""llama.cpp through the C interface of llama-cpp-python, whose own `generate` has no batches."""

# pyright: reportMissingImports=false
import ctypes
import json
import time
from pathlib import Path

import gguf
import llama_cpp
import ml_dtypes
import numpy as np
from checkpoint import BOS, EOS, vocabulary
from protocol import Generate, Job, Timeline, lockstep, measure
from safetensors import safe_open

FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "f32": gguf.LlamaFileType.ALL_F32,
}
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must live as long as llama.cpp may log
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load(job: Job) -> Generate:
    path = job.work / f"{job.variant}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        write_gguf(job.model, unfinished, job.variant)
        unfinished.rename(path)
    llama_cpp.llama_log_set(SILENT, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if model is None:
        raise SystemExit(f"llama.cpp cannot load {path.name}")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def generate(prompts: list[list[int]], output_len: int) -> Timeline:
        rows, length = len(prompts), len(prompts[0])
        context = new_context(model, rows, length, output_len, job.threads)
        batch = llama_cpp.llama_batch_init(rows * length, 0, 1)
        marks = [time.perf_counter()]
        fill(batch, prompts, start=0)
        tokens = step(context, batch, rows, vocab_size)
        marks.append(time.perf_counter())
        outputs = [[token] for token in tokens]
        for position in range(length, length + output_len - 1):
            fill(batch, [[token] for token in tokens], start=position)
            tokens = step(context, batch, rows, vocab_size)
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
            marks.append(time.perf_counter())
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return lockstep(marks, outputs)

    return generate


def new_context(model: object, rows: int, length: int, output_len: int, threads: int) -> object:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = rows * -(-(length + output_len) // 256) * 256  # a context per sequence is a multiple of 256
    parameters.n_seq_max = rows
    parameters.n_batch = parameters.n_ubatch = max(512, rows * length)
    parameters.n_threads = parameters.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, parameters)
    if context is None:
        raise SystemExit(f"llama.cpp cannot make a context of {parameters.n_ctx} tokens for {rows} sequences")
    return context


def fill(batch: llama_cpp.llama_batch, tokens: list[list[int]], start: int) -> None:
    """Puts the same number of tokens of every sequence into the batch; only the last of each gives logits."""
    place = 0
    for row, sequence in enumerate(tokens):
        for offset, token in enumerate(sequence):
            batch.token[place] = token
            batch.pos[place] = start + offset
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = row
            batch.logits[place] = offset == len(sequence) - 1
            place += 1
    batch.n_tokens = place


def step(context: object, batch: llama_cpp.llama_batch, rows: int, vocab_size: int) -> list[int]:
    """One call of the model; the rows' greedy tokens."""
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit(f"llama_decode failed on {batch.n_tokens} tokens of {rows} sequences")
    logits = llama_cpp.llama_get_logits(context)
    flat = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * (rows * vocab_size))).contents
    return np.frombuffer(flat, np.float32).reshape(rows, vocab_size).argmax(axis=1).tolist()


def write_gguf(model: Path, path: Path, variant: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(FILE_TYPES[variant])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    words = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3 if token in (BOS, EOS) else 1 for token in range(len(words))])
    writer.add_token_merges(["a b"])  # llama.cpp refuses an empty list; the tokenizer is never asked
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    with safe_open(model / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118 - the file is not iterable
            add_tensor(writer, name.removesuffix(".weight"), file.get_tensor(name), config, variant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, config: dict, variant: str) -> None:
    if name.startswith("model.layers."):
        layer, _, name = name.removeprefix("model.layers.").partition(".")
        target = f"blk.{layer}.{NAMES[name]}.weight"
    else:
        target = f"{NAMES[name]}.weight"
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith(projection):  # llama.cpp rotates neighbouring pairs, Hugging Face's layout rotates halves
            rows, columns = values.shape
            pairs = values.reshape(config[heads], 2, rows // config[heads] // 2, columns)
            values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
    if values.ndim == 1 or variant == "f32":
        writer.add_tensor(target, values.astype(np.float32))
    elif variant == "f16":
        writer.add_tensor(target, values.astype(np.float32).astype(np.float16))
    else:
        raw = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16)).view(np.uint8)
        writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


measure(load)
