"""The scenarios of the suite: what is done to a server, and what must come of it."""

from typing import NamedTuple


class Scenario(NamedTuple):
    name: str
    done: str
    must: str
    tests: str  # the files, under tests/, that hold it


SCENARIOS = (
    Scenario(
        "F1",
        "the engine is killed (SIGKILL) under load, 20 times",
        "everybody told within 5 s; `/ping` 503 within 2 s; exit 70; no process left; the next start succeeds",
        "faults/test_processes.py",
    ),
    Scenario(
        "F2",
        "the engine hangs (SIGSTOP)",
        "found out within 10 s with a limit of 3, stacks in the log, exit 71, everybody told",
        "faults/test_processes.py",
    ),
    Scenario(
        "F3",
        "single requests fail, in the text process and in the sampler, among 20,000",
        "those alone fail; the others' answers are those of a clean run",
        "faults/test_injected.py",
    ),
    Scenario("F4", "the HTTP process is killed, 20 times", "the others gone within 2 s", "faults/test_processes.py"),
    Scenario("F5", "SIGTERM, idle", "exit 0 within 5 s", "faults/test_processes.py"),
    Scenario(
        "F6",
        "SIGTERM with 10,000 requests under way",
        "0 lost; `/ping` 503 within 0.2 s; new ones 503; `/live` 200; exit 0",
        "faults/test_processes.py",
    ),
    Scenario(
        "F7",
        "SIGTERM, and too little time to drain; a second SIGTERM",
        "the rest told `server_shutdown`; after a second one, exit within 3 s",
        "faults/test_processes.py",
    ),
    Scenario(
        "F8",
        "SIGTERM while the model is downloaded, memory planned, weights loaded, programs compiled",
        "exit within 5 s, no partial file under its name",
        "faults/test_starts.py",
    ),
    Scenario(
        "F9",
        "the device has no memory for weights, KV cache, programs",
        "exit 4 within 10 s, with the sums or the compiler's words; never 200 on `/ping`",
        "faults/test_injected.py",
    ),
    Scenario(
        "F10",
        "a step finds no memory, under 10,000 requests",
        "0 lost, all identical; a second time soon after: exit 4, everybody told",
        "faults/test_injected.py",
    ),
    Scenario(
        "F11",
        "1,000 clients leave, in every phase; 200 that wait half a second for long answers; some beside 10,000",
        "counted `cancelled`, all blocks back within 1 s; the next answer within 5 s; the first token afterwards within"
        " 10 % and 2 ms of before; who stays loses nothing",
        "faults/test_disconnects.py faults/test_injected.py",
    ),
    Scenario(
        "F12",
        "100 readers of 1 byte/s beside 28 others",
        "the others' tokens take at most 5 % longer; at most 100 MiB more; who stalls is cut off, 60 to 105 s"
        " after asking",
        "faults/test_slow_readers.py",
    ),
    Scenario(
        "F13",
        "ten times what the server can do",
        "goodput at least 0.9 of its peak; 99 in 100 refusals, 429 with Retry-After, within 50 ms; ten seconds later"
        " the first token comes within 1.2 times what it took before",
        "faults/test_overload.py",
    ),
    Scenario(
        "F14",
        "1,280 requests at once; thousands of idle connections",
        "`/ping` p99 within 250 ms, nothing reset, nothing lost",
        "faults/test_overload.py",
    ),
    Scenario(
        "F15",
        "prompts of 8 MB, and of one word of 1 MB, beside streams",
        "all 400 or 413 within 2 s; `/ping` p99 within 250 ms; the streams' gaps at p99 at most doubled",
        "faults/test_large_prompts.py",
    ),
    Scenario(
        "F16",
        "KV cache for one and a half of the longest requests that there may be, and requests that are made to give way",
        "all complete, identical; 0 leaked blocks; none gives way more than 4 times; never 5 s without a token",
        "faults/test_injected.py",
    ),
    Scenario("F17", "a request larger than all KV cache", "400 within 100 ms", "faults/test_large_prompts.py"),
    Scenario(
        "F18",
        "rows of NaN; NaN in a block that a prefix is found in",
        "that request alone fails; the block is not offered again",
        "faults/test_injected.py runner/test_device_runner.py",
    ),
    Scenario(
        "F19",
        "damaged weights, 20 kinds",
        "exit 3, file and tensor named, before a device is used; exit 6 where a source's sum is wrong; mixed"
        " types load",
        "faults/test_weights.py",
    ),
    Scenario("F20", "damaged config.json", "exit 2 or 3 within 5 s, the field named", "faults/test_configs.py"),
    Scenario(
        "F21",
        "booby-trapped repositories, every process under an audit hook",
        "no code of theirs runs, no pickle is opened; an endless template is 400 within 3 s",
        "faults/test_repositories.py faults/test_forbidden.py",
    ),
    Scenario(
        "F22",
        "tokenizers that are missing, damaged, without a template",
        "missing or damaged: exit 3; no template: chats are 400, completions served; a template that fails: 400",
        "faults/test_tokenizers.py",
    ),
    Scenario(
        "F23", "bad adapters beside 10,000 good requests", "all 4xx; no good request fails", "server/test_adapters.py"
    ),
    Scenario(
        "F24",
        "200 adapters over 16 places, with clients that leave",
        "each as in its run alone",
        "server/test_adapters.py",
    ),
    Scenario(
        "F25",
        "a hub and a Cloud Storage that fail in every way; adapters that come slowly beside streams",
        "what may pass is retried; what may not is exit 6 within 5 s; no partial file; the streams' gaps at p99 at most"
        " doubled",
        "download/test_faults.py server/test_remote_models.py server/test_adapters.py",
    ),
    Scenario(
        "F26",
        "a port that is taken or forbidden, a bad host",
        "exit 5 within 3 s, before the model",
        "faults/test_starts.py",
    ),
    Scenario("F27", "`/ping` during a start", "listens within 2 s; 503 until the first token", "faults/test_starts.py"),
    Scenario(
        "F28",
        "of several engines or hosts, one is killed, stopped, or misses a message",
        "0 lost, identical (copies); the replica ends within 30 s (hosts)",
        "faults/test_injected.py server/test_data_parallel.py multihost/test_hosts.py",
    ),
    Scenario(
        "F29",
        "an engine for prompts, or for answers, is killed or stopped while blocks are handed over",
        "0 lost, identical, 0 leaked blocks",
        "server/test_disaggregated_faults.py",
    ),
    Scenario(
        "F30",
        "2,000 prompts with secrets of their own and shared beginnings; chunks, adapters, clients that leave, requests"
        " that give way; blocks that nobody has are NaN; 3 seeds",
        "each answer as in its run alone",
        "faults/test_isolation.py",
    ),
    Scenario(
        "F31",
        "10,000 streamed texts, 5 tokenizers, random pieces and stop strings",
        "the pieces are the text",
        "faults/test_streaming_text.py",
    ),
    Scenario(
        "F32",
        "prompts of every length, batches of every size",
        "nothing compiled after the start",
        "faults/test_isolation.py",
    ),
    Scenario(
        "F33",
        "500 pairs of timings across two API keys",
        "AUC at most 0.55; `cached_tokens` 0",
        "faults/test_cache_isolation.py",
    ),
    Scenario(
        "F34",
        "100,000 mutated bodies; schemathesis on our OpenAPI; bytes that are nearly HTTP",
        "0 x 5xx, 0 hangs",
        "faults/test_fuzz_bodies.py faults/test_openapi.py faults/test_raw_http.py",
    ),
    Scenario(
        "F35",
        "few files, full and read-only disks, a damaged compile cache, clocks that jump",
        "goes on serving; idle below 5 % of a core",
        "faults/test_machine.py faults/test_forbidden.py",
    ),
)
