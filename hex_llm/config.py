"""The settings of an engine and its server. A field of `Config` is a flag: its name, type, default and help.

Nothing else in the package declares these, and nobody changes a `Config` once it is built. What has to be derived
(block counts, buckets, the model's own numbers) is computed from it into types of its own.
"""

import argparse
import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from hex_llm.errors import ConfigError
from hex_llm.flags import FlagParser, flag, flags_of, markdown_tables, named
from hex_llm.topology import Role, Topology

_model = partial(flag, "Model")
_engine = partial(flag, "Inference engine")
_memory = partial(flag, "Memory")
_lora = partial(flag, "Dynamic LoRA")
_SERVER_GROUPS = ("Server", "Limits of the server")
_server, _limit = (partial(flag, group) for group in _SERVER_GROUPS)

_DEFAULT_SHARE = 0.9
_ON_WITH_TOPOLOGY = ("enable_chunked_prefill", "enable_prefix_cache_hbm")
DEFAULT_DECODE_PADDING = 8
_ADAPTER_NAME = re.compile(r"[^\s,=]{1,256}")
_FOUND = "what a checkpoint has in few bits is found by its config.json; leave the flag out."
QUANTIZATION_SYNONYMS = {"w8a8_int8": "w8a8", "w4a8_fp8": "w4a8", "w4afp8": "w4a8"}
_NO_FLOAT16 = "its range is too small for models trained in bfloat16; use bfloat16 or float32."

# Flags of Hex-LLM's first generation, as people may still have them in scripts.
RETIRED = {
    "log_level": "set the environment variable HEX_LLM_LOG_LEVEL instead.",
    "num_nodes": "use --num_hosts.",
    "use_ray": "use --worker_distributed_method=ray.",
    "batch_mode": "batching is always continuous; leave the flag out.",
    "tokens_pad_multiple": "use --prefill_len_padding.",
    "seqs_pad_multiple": "use --prefill_seqs_padding and --decode_seqs_padding.",
}

# vLLM's, as its users will try them.
VLLM = {
    "allowed_origins": "use --cors_origins; without it, no web page may call.",
    "api_key": "a key on the command line can be seen by everybody; use --api_key_file or HEXLLM_API_KEYS.",
    "attention_backend": "the kernel is chosen by the device and the model.",
    "compilation_config": "steps are compiled by XLA; --compilation_cache_dir says where they are kept.",
    "cpu_offload_gb": "weights are on devices only; --quantization makes them smaller.",
    "disable_fastapi_docs": "/docs is off unless --enable_docs.",
    "disable_log_stats": "the line about throughput comes only with work; HEX_LLM_LOG_LEVEL=warning silences it.",
    "disable_uvicorn_access_log": "use --disable_log_requests.",
    "distributed_executor_backend": "use --worker_distributed_method.",
    "enable_auto_tool_choice": "calling tools does not exist yet.",
    "enable_log_requests": "requests are logged; --disable_log_requests leaves them out.",
    "enable_prompt_tokens_details": "usage always has them; leave the flag out.",
    "enforce_eager": "use --no-enable_jit, which is for debugging only, or --no-warmup.",
    "generation_config": "the model's own generation_config.json counts where a request says nothing.",
    "hf_token": "a token on the command line can be seen by everybody; set the environment variable HF_TOKEN.",
    "kv_cache_memory_bytes": "use --num_blocks.",
    "kv_transfer_config": "use --disagg_topo.",
    "master_addr": "use --coordinator_address=HOST:PORT.",
    "master_port": "use --coordinator_address=HOST:PORT.",
    "max_cpu_loras": "--max_num_mem_cached_lora is of device memory, and the disk keeps all.",
    "nnodes": "use --num_hosts.",
    "node_rank": "use --host_rank.",
    "override_generation_config": "the model's own generation_config.json counts where a request says nothing.",
    "pipeline_parallel_size": "a model is not split by layers.",
    "response_role": "answers are the assistant's.",
    "root_path": "there is no prefix to paths.",
    "speculative_config": "speculative decoding does not exist yet.",
    "swap_space": "sequences that give way are computed again, not swapped out.",
    "tokenizer_revision": "--tokenizer=OWNER/NAME@REVISION names one.",
    "tool_call_parser": "calling tools does not exist yet.",
    "uvicorn_log_level": "set the environment variable HEX_LLM_LOG_LEVEL instead.",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting. A value that is out of range, or at odds with another, raises ConfigError."""

    model: str | None = _model(
        None,
        "Where the model is, in Hugging Face layout and with safetensors weights: a folder, a model of the Hugging Face"
        " Hub (OWNER/NAME, or OWNER/NAME@REVISION), or a place in Cloud Storage (gs://BUCKET/PATH). With"
        " --load_format=dummy, the name of a model that `hex-llm models` lists. Without it, the small model that comes"
        " with the package.",
    )
    tokenizer: str | None = _model(
        None,
        "Where the tokenizer is, as for --model. Without it, the model's own; of a model run by name, that of the small"
        " model.",
    )
    tokenizer_mode: Literal["auto", "slow"] = _model(
        "auto", "auto takes the fast tokenizer where there is one; slow takes the one written in Python."
    )
    trust_remote_code: bool = _model(
        False,
        "Kept for scripts that switch it off: code that comes with a model is never run.",
        refused={True: "there is no part that runs code shipped with a model, so it would change nothing."},
    )
    revision: str | None = _model(
        None, "Branch, tag or commit of a --model on the Hugging Face Hub, as OWNER/NAME@REVISION has it too."
    )
    download_dir: str | None = _model(
        None,
        "Folder that keeps what is downloaded. Without it, models of the Hugging Face Hub are where its own tools have"
        " them (HF_HOME), and those of Cloud Storage in hex_llm/models in the user's cache folder.",
    )
    download_timeout_s: float = _model(
        600.0, "Seconds without a byte, in spite of trying again, after which a download is given up.", above=0
    )
    load_format: Literal["auto", "dummy"] = _model(
        "auto",
        "auto reads the model's safetensors files; dummy makes random weights on the device, for measurements.",
        synonyms={"safetensors": "auto"},
        refused={"pt": "weights are read from safetensors files only."},
    )
    quantization: Literal["int8", "fp8", "int4", "w8a8", "w4a8"] | None = _model(
        None,
        "Bring a model's weights to few bits while they are loaded; with fp8, w8a8, which is int8, and w4a8, which is"
        " int4, tokens are rounded to 8 bits as well where they are multiplied. Weights that a checkpoint has in few"
        " bits are found by its config.json, and need no flag; w4a8 may be given for those of 4 bits, too.",
        synonyms=QUANTIZATION_SYNONYMS,
        refused=dict.fromkeys(("awq", "gptq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "mxfp4"), _FOUND),
    )
    check_weights: Literal["sample", "full", "off"] = _model(
        "sample", "Look for NaN and infinity while loading weights from files: in some of each tensor, in all, or not."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = _model(
        "auto",
        "Number type of weights and, unless --kv_cache_dtype says otherwise, of the KV cache. auto is bfloat16, but"
        " float32 for a float32 model on the CPU.",
        synonyms={"float": "float32"},
        refused={"float16": _NO_FLOAT16, "half": _NO_FLOAT16},
    )
    max_model_len: int | None = _model(
        None, "Most tokens of a sequence, prompt and output together. Without it, the model's own context length."
    )
    sliding_window: int | None = _model(
        None, "Attend to this many last tokens in place of the model's own window. An experiment: quality may suffer."
    )
    seed: int = _model(
        0, "Where the random numbers of requests without a seed of their own begin.", at_least=0, at_most=2**32 - 1
    )

    num_hosts: int = _engine(
        1, "Machines that serve together, each of which runs the same command. With Ray, one command is enough."
    )
    coordinator_address: str | None = _engine(
        None,
        "HOST:PORT of host 0, with --num_hosts: its address that the other hosts reach, and the first of the ports for"
        " the connections between them. Without it, what the environment of a TPU's host says, and port 7090.",
    )
    host_rank: int | None = _engine(
        None,
        "Which of --num_hosts this host is, from 0; host 0 answers HTTP. Without it, what the environment of a TPU's"
        " host says.",
        at_least=0,
    )
    disagg_topo: str | None = _engine(
        None,
        "Separate engines for prompts and for answers, as two counts: 3,1 is three and one. The first compute prompts"
        " and the first token, and hand the KV blocks to one of the others, which goes on. With it"
        " --enable_chunked_prefill and --enable_prefix_cache_hbm are on.",
    )
    kv_transfer_path: Literal["auto", "device", "jax", "host"] = _engine(
        "auto",
        "With --disagg_topo, how KV blocks go from one engine to another. device puts all engines into one process, in"
        " which blocks go from device to device, on a TPU over the chips' own links; the engines also fail together"
        " then, and the server with them. Otherwise each has a process of its own, and is started again when it fails:"
        " blocks go by jax.experimental.transfer, between engines of as many devices (jax), or through host memory,"
        " shared or over a socket (host). auto is host, which was the faster one on CPUs and on an H200.",
    )
    data_parallel_size: int = _engine(
        1,
        "Engines with a copy of the model each, on --tensor_parallel_size devices each. A request goes to one of them;"
        " where one is lost, the others take over and it is started again.",
    )
    tensor_parallel_size: int = _engine(1, "Devices that share one copy of the model.")
    decode_tensor_parallel_size: int | None = _engine(
        None, "With --disagg_topo, the devices of an engine for answers. Without it, --tensor_parallel_size."
    )
    worker_distributed_method: Literal["mp", "ray"] = _engine(
        "mp",
        "How engine processes are started: by this command itself (mp), or on a Ray cluster: the one that RAY_ADDRESS"
        " names, else one that is started here. Ray is an extra: pip install '.[ray]' in a checkout.",
    )
    enable_jit: bool = _engine(True, "Compile the steps. Off only to debug a model: it is many times slower.")
    warmup: bool = _engine(
        True,
        "Compile every step before the first request. Off, the first requests of each size wait for it; the largest"
        " steps are still compiled first where the device has memory of its own, to plan it.",
    )
    compilation_cache_dir: str | None = _engine(
        None,
        "Folder that keeps compiled steps for the next start; an empty text keeps none. Without it, what"
        " JAX_COMPILATION_CACHE_DIR says, else hex_llm/xla in the user's cache folder.",
    )
    async_scheduling: bool = _engine(
        True, "Plan the next step while the device computes this one. Off, the device waits for each plan."
    )
    max_prefill_seqs: int | None = _engine(
        None, "Most prompts that one step works on. Without it 1, or 16 with --enable_chunked_prefill."
    )
    prefill_seqs_padding: int = _engine(
        8,
        "A compiled step for prompts has room for --max_prefill_seqs sequences (for --max_decode_seqs with"
        " --enable_chunked_prefill), rounded up to a multiple of this, but never for more than it has tokens.",
    )
    prefill_len_padding: int = _engine(
        512,
        "Tokens in the smallest compiled step for prompts; with --enable_chunked_prefill steps go down to 128 all the"
        " same. Also the unit in which the cached tokens of a request are reported: prefixes are found block by block,"
        " and what was found is rounded down to a multiple of this.",
    )
    max_decode_seqs: int = _engine(
        256, "Most sequences that run at the same time.", aliases=("max_running_seqs", "max-num-seqs")
    )
    decode_seqs_padding: int = _engine(
        DEFAULT_DECODE_PADDING,
        "Sequences in the smallest compiled step for decoding, never more than --max_decode_seqs. On a GPU there is one"
        f" more, for a sequence alone, unless this is more than {DEFAULT_DECODE_PADDING}.",
    )
    decode_blocks_padding: int = _engine(
        128,
        "The page table has a row of blocks for each sequence, as long as --max_model_len needs and rounded up to a"
        " multiple of this.",
    )
    max_num_batched_tokens: int | None = _engine(
        None,
        "Most tokens in one step, prompts and decoding together. Without it, chosen from the other settings and the"
        " device: on a GPU with --enable_chunked_prefill 512 (or twice --max_decode_seqs if more) in a step that"
        " also decodes, which the others wait for, and up to 8192 in one that does not; with --disagg_topo at most"
        " 1024.",
    )
    enable_prefix_cache_hbm: bool = _engine(
        False,
        "Keep the KV blocks of finished prompts in device memory for prompts that begin the same way.",
        aliases=("enable-prefix-caching",),
    )
    enable_chunked_prefill: bool = _engine(
        False, "Cut prompts into pieces and mix them with decoding, so that a long prompt does not hold up the others."
    )

    hbm_utilization_factor: float = _memory(
        _DEFAULT_SHARE,
        "Share of the device memory still free after weights and temporaries that the KV cache may take. On the CPU it"
        " takes at most 1 GiB, or what one sequence of --max_model_len needs, and at most half of the free memory,"
        " whatever this says; --num_blocks overrides that.",
        above=0,
        at_most=1,
    )
    gpu_memory_utilization: float | None = _memory(
        None,
        "Share of the device memory for weights, temporaries and KV cache together, as in vLLM, but of what JAX takes"
        " of it: 93 % of a GPU's, unless XLA_CLIENT_MEM_FRACTION says otherwise. It takes the place of"
        " --hbm_utilization_factor, and has the same limits on the CPU.",
        above=0,
        at_most=1,
    )
    num_blocks: int | None = _memory(
        None,
        "Blocks of KV cache. With it, the two shares of memory are not looked at.",
        aliases=("num-gpu-blocks-override",),
    )
    block_size: Literal[8, 16, 32, 2048, 8192] = _memory(32, "Tokens in a block of KV cache.")
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = _memory(
        "auto",
        "Number type of the KV cache. auto is that of --dtype. fp8 takes half the bytes of bfloat16: 4 bits for the"
        " exponent, 3 for the fraction, no scales. int8 is more exact: it has a scale for each token and head, which"
        " takes 4 bytes more.",
        synonyms={"fp8_e4m3": "fp8"},
        refused={"fp8_e5m2": "its 2 bits for the fraction are too few; fp8 has 3, and a range that is large enough."},
    )

    enable_lora: bool = _lora(False, "Serve requests that name a LoRA adapter.")
    lora_modules: str | None = _lora(
        None,
        "Adapters that requests may name, as NAME=SOURCE with commas between. A source is a folder, OWNER/NAME of the"
        " Hugging Face Hub or gs://BUCKET/PATH. They are looked at when the server starts.",
    )
    lora_allowed_prefixes: str | None = _lora(
        None,
        "What the sources of all other adapters must be under, with commas between: gs://BUCKET/PATH/, OWNER/ or"
        " OWNER/NAME. Without it, requests have those of --lora_modules only.",
    )
    max_lora_rank: int = _lora(16, "Highest rank of an adapter.", at_most=512)
    enable_lora_cache: bool = _lora(True, "Keep adapters once they were loaded.")
    max_num_mem_cached_lora: int = _lora(16, "Adapters kept in device memory.", at_most=256, aliases=("max-loras",))

    host: str = _server("0.0.0.0", "Address to listen on.")
    port: int = _server(
        7080,
        "Port to listen on; 0 takes any that is free. Without it, what AIP_HTTP_PORT says.",
        at_least=0,
        at_most=65535,
    )
    api_server_count: int = _server(
        1, "Processes that answer HTTP on the port, for hosts where one is not enough.", at_most=64
    )
    served_model_name: str | None = _server(
        None, "Name of the model in answers; several, with commas between, all work. Without it, what --model says."
    )
    chat_template: str | None = _server(None, "A file with a chat template to take in place of the model's own.")
    chat_template_kwargs: str | None = _server(
        None, "Names, with commas between, that requests may set in chat_template_kwargs besides enable_thinking."
    )
    api_key_file: str | None = _server(
        None, "A file with API keys, one a line, read again at SIGHUP. HEXLLM_API_KEYS is another way. Without keys,"
        " everybody is served.",
    )  # fmt: skip
    prefix_cache_isolation: Literal["auto", "none", "key", "salt"] = _server(
        "auto",
        "Whose prefixes a request may find in the prefix cache: everybody's (none), those of the same API key (key), or"
        " those of the same cache_salt, which every request must then have (salt). auto is key where there are several"
        " keys, else none. A cache_salt narrows it further in any case.",
    )
    cors_origins: str | None = _server(
        None, "Web pages that may call the server from a browser, with commas between; * is all. Without it, none."
    )
    enable_docs: bool = _server(False, "Serve /docs and /openapi.json.")
    playground: bool = _server(
        True, "Serve a page at / to try the model with. It asks for an API key where the server wants one."
    )
    ssl_certfile: str | None = _server(
        None, "A file with the certificate, to speak https.", aliases=("ssl-certificate",)
    )
    ssl_keyfile: str | None = _server(None, "A file with the certificate's key.")
    disable_log_requests: bool = _server(False, "Do not log each request.")
    drain_timeout_s: float = _server(
        30.0, "Seconds that requests under way have to finish after SIGTERM.", at_least=0, aliases=("shutdown-timeout",)
    )
    step_timeout_s: float = _server(
        120.0,
        "Seconds without a sign of life from the engine after which it is given up, compiling not counted.",
        above=0,
    )
    oom_policy: Literal["rebuild", "exit"] = _server(
        "rebuild",
        "What an engine does when a step finds no memory on the device: begin again with all requests that run, and an"
        " empty cache, once in ten minutes (rebuild); or end (exit). Engines of several hosts, and of --disagg_topo,"
        " end.",
    )
    compile_timeout_s: float = _server(
        1800.0, "Seconds without progress at start, or compiling, after which the engine is given up.", above=0
    )

    max_body_bytes: int = _limit(16 * 2**20, "Bytes of a request's body.")
    max_json_depth: int = _limit(100, "Objects and lists within each other in a body.", at_most=1000)
    max_chunks: int = _limit(65536, "Chunks of a body that comes in chunks.")
    max_headers: int = _limit(256, "Headers of a request.")
    max_head_bytes: int = _limit(64 * 2**10, "Bytes of a request's line and headers.")
    head_timeout_s: float = _limit(10.0, "Seconds for a request's line and headers to arrive.", above=0)
    body_timeout_s: float = _limit(30.0, "Seconds for a body to arrive, and one more for every 100 KiB of it.", above=0)
    keep_alive_timeout_s: float = _limit(15.0, "Seconds that a connection may wait for its next request.", above=0)
    write_timeout_s: float = _limit(60.0, "Seconds that a client may take no bytes of its answer.", above=0)
    queue_timeout_s: float = _limit(60.0, "Seconds that a request may wait for the engine to begin with it.", above=0)
    request_timeout_s: float = _limit(3600.0, "Seconds that a request may take in all.", above=0)
    max_connections: int = _limit(4096, "Connections at a time, to each HTTP process.")
    max_queued_requests: int = _limit(
        1024,
        "Sequences that may wait beyond the --max_decode_seqs that run in each engine; n and lists of prompts count"
        " each.",
        at_least=0,
    )
    max_queued_tokens: int = _limit(
        4_000_000, "Tokens of prompts under way; more are refused until some have finished."
    )
    max_n: int = _limit(128, "Answers to one prompt.", at_most=128)
    max_prompts: int = _limit(128, "Prompts of one request.")
    max_instances: int = _limit(128, "Instances of one request to /generate.")
    max_sequences: int = _limit(256, "Answers of one request, n times its prompts.")
    max_messages: int = _limit(4096, "Messages of a conversation.")
    max_logprobs: int = _limit(20, "Alternatives for each token in logprobs.", at_least=0, at_most=20)
    max_stop_strings: int = _limit(4, "Stop strings of a request.", at_most=16)
    max_stop_length: int = _limit(1024, "Characters of a stop string, or of a bad word.", at_most=1024)
    max_stop_token_ids: int = _limit(1024, "Stop tokens of a request.", at_most=1024)
    max_logit_bias: int = _limit(1024, "Entries of a request's logit_bias.", at_most=1024)
    enable_prompt_logprobs: bool = _limit(
        False, "Take prompt_logprobs, and logprobs together with echo. A step with it computes much more than others."
    )
    template_timeout_s: float = _limit(2.0, "Seconds that a chat template may take.", above=0)
    template_memory_mib: int = _limit(256, "MiB that a chat template may take.")

    def __post_init__(self) -> None:
        for each in flags_of(Config):
            object.__setattr__(self, each.name, each.accept(getattr(self, each.name)))
        for name in ("model", "tokenizer"):
            if getattr(self, name) == "":
                raise ConfigError(f"--{name}= is empty; name a model, or leave the flag out.")
        for origin in (self.cors_origins or "*").split(","):
            if origin.strip() != "*" and not origin.strip().startswith(("http://", "https://")):
                raise ConfigError(
                    f"--cors_origins: {origin.strip()!r} is no origin such as https://example.com, nor *."
                )
        if self.gpu_memory_utilization is not None and self.hbm_utilization_factor != _DEFAULT_SHARE:
            raise _two_shares(self.hbm_utilization_factor, self.gpu_memory_utilization)
        self._check_hosts()
        self._check_adapters()
        self._settle_topology()
        if self.enable_prefix_cache_hbm and self.prefill_len_padding % self.block_size:
            raise ConfigError(
                f"--prefill_len_padding={self.prefill_len_padding} must be a multiple of"
                f" --block_size={self.block_size} with {self._cause('enable_prefix_cache_hbm')}: prefixes are found in"
                " whole blocks and reported in whole paddings."
            )
        self._check_step_tokens()

    def _check_hosts(self) -> None:
        for name in ("coordinator_address", "host_rank"):
            value = getattr(self, name)
            if value is not None and self.num_hosts == 1:
                raise ConfigError(f"--{name}={value} is for --num_hosts above 1.")
            if value is not None and self.worker_distributed_method == "ray":
                raise ConfigError(f"--{name}={value}: with --worker_distributed_method=ray, Ray knows the hosts.")
        if self.host_rank is not None and self.host_rank >= self.num_hosts:
            raise ConfigError(
                f"--host_rank={self.host_rank} is not below --num_hosts={self.num_hosts}; ranks begin at 0."
            )

    def _check_adapters(self) -> None:
        for name in ("lora_modules", "lora_allowed_prefixes"):
            if (value := getattr(self, name)) is not None and not self.enable_lora:
                raise ConfigError(f"--{name}={value} needs --enable_lora.")
        for name in self.adapter_sources:
            if name in self.served_names:
                raise ConfigError(f"--lora_modules: {name!r} is a name of the model itself.")

    def _settle_topology(self) -> None:
        topology = self.topology
        if topology is None:
            for name, alone in (("decode_tensor_parallel_size", None), ("kv_transfer_path", "auto")):
                if (value := getattr(self, name)) != alone:
                    raise ConfigError(f"--{name}={value} is for --disagg_topo.")
            return
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"--data_parallel_size={self.data_parallel_size} and --disagg_topo={topology} both say how many engines"
                " there are; give one."
            )
        if self.kv_transfer_path == "jax" and self.decode_tensor_parallel_size not in (None, self.tensor_parallel_size):
            raise ConfigError(
                f"--kv_transfer_path=jax is for engines of as many devices, not for"
                f" --tensor_parallel_size={self.tensor_parallel_size} and"
                f" --decode_tensor_parallel_size={self.decode_tensor_parallel_size}."
            )
        if self.one_process and (self.num_hosts > 1 or self.worker_distributed_method == "ray"):
            several = f"--num_hosts={self.num_hosts}" if self.num_hosts > 1 else "--worker_distributed_method=ray"
            raise ConfigError(
                f"--kv_transfer_path=device and {several} do not go together: all engines are in one process then,"
                " which has the devices of one host."
            )
        # Written in one way, so that hosts can compare; and so that what is checked is what engines do.
        for name, value in (("disagg_topo", str(topology)), *((name, True) for name in _ON_WITH_TOPOLOGY)):
            object.__setattr__(self, name, value)

    def _cause(self, name: str) -> str:
        """The flag that has switched on what the other one would."""
        return f"--{name}" if self.disagg_topo is None else "--disagg_topo"

    def _check_step_tokens(self) -> None:
        tokens = self.max_num_batched_tokens
        if tokens is None:
            return
        if tokens < self.max_decode_seqs:
            raise ConfigError(
                f"--max_num_batched_tokens={tokens} is less than --max_decode_seqs={self.max_decode_seqs}: a step"
                " has a token for every sequence that runs."
            )
        if self.enable_chunked_prefill and tokens < self.smallest_prefill:
            raise ConfigError(
                f"--max_num_batched_tokens={tokens} is less than {self.smallest_prefill}, the smallest step for prompts"
                f" with {self._cause('enable_chunked_prefill')}."
            )

    def model_len(self, context: int) -> int:
        """The most tokens of a sequence, for a model whose own context length is `context`."""
        if self.max_model_len is not None and self.max_model_len > context:
            raise ConfigError(
                f"--max_model_len={self.max_model_len} is beyond the model's context length of {context} tokens."
            )
        return self.max_model_len or context

    def of_engine(self) -> dict[str, Any]:
        """The settings that are not those of the server."""
        return {flag.name: getattr(self, flag.name) for flag in flags_of(Config) if flag.group not in _SERVER_GROUPS}

    def check_one_engine(self) -> None:
        """For what runs an engine itself: several of them, or one of several machines, take a server."""
        if self.disagg_topo is not None:
            raise ConfigError(f"--disagg_topo={self.disagg_topo} is for a server; without one there is one engine.")
        for name, alone in (("data_parallel_size", 1), ("num_hosts", 1), ("worker_distributed_method", "mp")):
            if (value := getattr(self, name)) != alone:
                raise ConfigError(f"--{name}={value} is for a server; without one, --{name}={alone} is all there is.")

    @property
    def served_names(self) -> tuple[str, ...]:
        """What requests may call the model; answers call it by the first."""
        if self.served_model_name:
            return tuple(name.strip() for name in self.served_model_name.split(","))
        return (self.model or "hex-mini",)

    @property
    def num_adapters(self) -> int:
        """Places for adapters on the devices."""
        return self.max_num_mem_cached_lora if self.enable_lora else 0

    @property
    def adapter_sources(self) -> Mapping[str, str]:
        """Where the adapters are that have names."""
        return _sources(self.lora_modules or "")

    @property
    def adapter_prefixes(self) -> tuple[str, ...]:
        """What the sources of all others must be under."""
        return tuple(_listed(self.lora_allowed_prefixes or ""))

    @property
    def topology(self) -> Topology | None:
        """Which engines there are, where they are of two kinds."""
        return None if self.disagg_topo is None else Topology.parse(self.disagg_topo)

    @property
    def num_engines(self) -> int:
        """Engines of the server, which are numbered from 0."""
        return self.data_parallel_size if self.topology is None else len(self.topology)

    @property
    def one_process(self) -> bool:
        """Whether all engines are in one, each on devices of its own."""
        return self.kv_transfer_path == "device"

    def role(self, index: int) -> Role | Literal[""]:
        """What an engine is for; empty where all do all."""
        return "" if self.topology is None else self.topology.role(index)

    def engine_name(self, index: int) -> str:
        """An engine as logs call it."""
        return f"replica {index}" if self.topology is None else self.topology.name(index)

    def of_worker(self, index: int) -> "Config":
        """The settings of one of the engines; of those, the same again."""
        if self.decode_tensor_parallel_size is None:
            return self
        size = self.decode_tensor_parallel_size if self.role(index) == "decode" else self.tensor_parallel_size
        return dataclasses.replace(self, tensor_parallel_size=size, decode_tensor_parallel_size=None)

    @property
    def prefill_seqs(self) -> int:
        """Most prompts that one step works on."""
        if self.max_prefill_seqs is not None:
            return self.max_prefill_seqs
        return 16 if self.enable_chunked_prefill else 1

    @property
    def smallest_prefill(self) -> int:
        """Tokens in the smallest compiled step for prompts."""
        # The last piece of a prompt is of any size, and what a step pads the decodes in it wait for.
        return min(self.prefill_len_padding, 128) if self.enable_chunked_prefill else self.prefill_len_padding

    @property
    def compilation_cache(self) -> str | None:
        """The folder, or the address of one, that keeps compiled steps; None keeps none."""
        if self.compilation_cache_dir is not None:
            return os.path.expanduser(self.compilation_cache_dir) or None  # noqa: PTH111 (a Path spoils "gs://")
        if jax_cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            return jax_cache
        user_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG rules say to take no notice of a relative path.
        return str((user_cache if user_cache.is_absolute() else Path.home() / ".cache") / "hex_llm" / "xla")

    @property
    def cache_folder(self) -> Path | None:
        """The same, if it is a folder."""
        cache = self.compilation_cache
        return Path(cache) if cache is not None and "://" not in cache else None

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> "Config":
        """The settings that the words of a command line give."""
        return parse_config(config_parser("hex-llm", "Settings of hex-llm.", server=True), argv)[0]

    @classmethod
    def from_keywords(cls, **given: Any) -> "Config":
        """The settings of an engine that keywords give, under any spelling that the command line knows."""
        settings = named(flags_of(cls), given)
        of_server = {flag.name for flag in flags_of(cls) if flag.group in _SERVER_GROUPS}
        if unused := sorted(of_server & settings.keys()):
            raise ConfigError(f"{', '.join(unused)}: a setting of the server, which an engine alone has no use for.")
        return cls(**settings)


def config_parser(prog: str, description: str, *, server: bool = False, **defaults: Any) -> FlagParser:
    """A parser of all settings, to which a command may add arguments of its own.

    `server` is for a command that serves: others do not know flags that they would ignore. `defaults` are those of the
    command, where they are not those of `Config`.
    """
    default_config = Config(**defaults)
    flags = [
        dataclasses.replace(each, default=getattr(default_config, each.name))
        for each in flags_of(Config)
        if server or each.group not in _SERVER_GROUPS
    ]
    return FlagParser(prog, description, flags)


def parse_config(parser: FlagParser, argv: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """The settings, and the arguments that the command added. The model may be given without its flag."""
    arguments, words = parser.parse(argv, RETIRED | VLLM)
    given = {flag.name: vars(arguments).pop(flag.name) for flag in parser.flags if flag.name in arguments}
    lists = [f"--{name}={given[name]},..." for name in ("served_model_name", "lora_modules") if name in given]
    if len(words) > 1 or (words and "model" in given and lists):
        hint = f" Several names have commas between: {' '.join(lists)}" if lists else ""
        raise ConfigError(f"Of {' '.join(map(repr, words))} only one can be the model.{hint}")
    for word in words:
        if given.setdefault("model", word) != word:
            raise ConfigError(f"{word!r} and --model={given['model']} name two models; give one.")
    # Config cannot tell a default from the same value given; a command line can.
    if given.keys() >= {"hbm_utilization_factor", "gpu_memory_utilization"}:
        raise _two_shares(given["hbm_utilization_factor"], given["gpu_memory_utilization"])
    for name in _ON_WITH_TOPOLOGY:
        if given.get("disagg_topo") is not None and given.get(name) is False:
            raise ConfigError(f"--no-{name} and --disagg_topo={given['disagg_topo']} do not go together; give one.")
    return Config(**{each.name: each.default for each in parser.flags} | given), arguments


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


@functools.cache  # requests ask for it
def _sources(text: str) -> Mapping[str, str]:
    sources: dict[str, str] = {}
    for each in _listed(text):
        name, _, source = (part.strip() for part in each.partition("="))
        if not source or not _ADAPTER_NAME.fullmatch(name):
            raise ConfigError(
                f"--lora_modules: {each[:200]!r} is not NAME=SOURCE, with a name of 1 to 256 characters and no space in"
                " it; several have commas between."
            )
        if name in sources:
            raise ConfigError(f"--lora_modules names two adapters {name!r}.")
        sources[name] = source
    return MappingProxyType(sources)


def _two_shares(hbm: float, gpu: float) -> ConfigError:
    return ConfigError(
        f"--hbm_utilization_factor={hbm} and --gpu_memory_utilization={gpu} both size the KV cache; give one."
    )


def flags_markdown() -> str:
    """The page docs/flags.md."""
    old, other = ("".join(f"| `--{name}` | {hint} |\n" for name, hint in each.items()) for each in (RETIRED, VLLM))
    return f"""{_HEADER}
{markdown_tables(flags_of(Config))}
{_FOOTER}{old}{_VLLM}{other}"""


_HEADER = """\
# Flags

This page is written by `hex-llm flags > docs/flags.md`; a test compares the two.

Every flag is read with underscores or with dashes (`--max_model_len`, `--max-model-len`) and under the other spellings
shown, those of Hex-LLM and of vLLM. A value follows after `=` or as the next word. Given twice, the last one counts.
From Python, the flags are the keyword arguments of `Config` (`Config(max_model_len=4096)`), and
`Config.from_args(["--max-model-len", "4096"])` reads the words of a command line.

The defaults shown are those of `Config`; a command may have its own, which its `--help` shows.

A value out of range, two flags that contradict each other and an unknown flag end the command with one line and exit
code 2.
"""

_FOOTER = """\
## Environment

| variable | values | default | meaning |
|---|---|---|---|
| `HEX_LLM_LOG_LEVEL` | a level of Python's `logging`, in any case | INFO | The least important lines to log. |
| `HEX_LLM_VERBOSE_LOG` | true or false | false | Lines name process, thread and code; prompts are logged, cut. |
| `HEXLLM_CLUSTER_KEY` | a text | none | With --num_hosts: by it hosts know each other; the same on all. |
| `HEXLLM_API_KEYS` | keys, with commas between | none | API keys, as in --api_key_file. |
| `AIP_HTTP_PORT` | a port | none | Set by Vertex AI: the port, where --port is not given. |
| `AIP_HEALTH_ROUTE` | a path | none | Set by Vertex AI: another path for /ping. |
| `AIP_PREDICT_ROUTE` | a path | none | Set by Vertex AI: another path for /generate. |
| `AIP_STORAGE_URI` | where a model is | none | Set by Vertex AI: the model, where --model is not given. |
| `HF_TOKEN` | a token | who is logged in | Who asks the Hugging Face Hub. |
| `HF_HOME` | a folder | ~/.cache/huggingface | Where models of the hub are kept, in hub. |
| `HF_ENDPOINT` | an address | the hub's own | Another server with the hub's interface. |
| `HF_HUB_OFFLINE` | 1 or 0 | 0 | The hub is not asked: what was downloaded has to do. |
| `GOOGLE_APPLICATION_CREDENTIALS` | a file | what Google's tools find | Who asks Cloud Storage. |
| `STORAGE_EMULATOR_HOST` | an address | none | A server in place of Cloud Storage, asked without credentials. |

## Flags of old

Hex-LLM's first generation had these. They are refused, with this hint:

| flag | hint |
|---|---|
"""

_VLLM = """
## Flags of vLLM that are not here

| flag | hint |
|---|---|
"""
