"""What the option table knows of each field of `engine_core.config.EngineConfig` but its type and default."""

from __future__ import annotations

from server.options.reader import Doc, size

MODEL, MEMORY, SCHEDULER = "Model", "Device and memory", "Scheduler"
WORKERS = "Workers and replicas"


def _max_model_len(text: str) -> int | None:
    return None if text in ("-1", "auto") else size(text)


def _dtype(text: str) -> str:
    name = text.removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


_TASKS = ("generate", "embed", "token_embed", "classify", "token_classify")
_DTYPES = ("auto", "bfloat16", "float16", "float32")

ENGINE_DOCS = {
    "model": Doc(MODEL, "Folder or hub id of the model, or demo for the built-in one. MODEL for short."),
    "revision": Doc(MODEL, "Branch, tag or commit of the model on the hub."),
    "download_dir": Doc(MODEL, "Where downloads are kept, in place of the hub's usual cache."),
    "hf_overrides": Doc(MODEL, "Values to put over those of the model's config.json."),
    "runner": Doc(
        MODEL,
        "What the model does: generate text, or pool texts to vectors, labels and scores. auto goes by the "
        "checkpoint. A model that generates also pools, with the same weights.",
        ("auto", "generate", "pooling"),
    ),
    "convert": Doc(
        MODEL,
        "What to make of a model that was trained for something else; auto goes by the checkpoint.",
        ("auto", "none", "embed", "classify", "reward"),
    ),
    "tasks": Doc(
        MODEL,
        "What to offer, if not all that the model does: " + ", ".join(_TASKS) + ". Commas may divide them.",
        _TASKS,
    ),
    "pooler_config": Doc(
        MODEL,
        "How hidden states become vectors and labels, put over what the model's files say: task, "
        "pooling_type, seq_pooling_type, tok_pooling_type, use_activation, dimensions, logit_mean, "
        "logit_sigma, step_tag_id, returned_token_ids.",
    ),
    "trust_remote_code": Doc(MODEL, "Run Python code that comes with the model."),
    "load_format": Doc(
        MODEL, "Form of the weights; dummy makes random ones.", ("auto", "safetensors", "pt", "dummy")
    ),
    "model_impl": Doc(
        MODEL, "Our own model code, or that of transformers.", ("auto", "facet", "vllm", "transformers")
    ),
    "dtype": Doc(MODEL, "Number format; auto is the checkpoint's. Also: half, float.", _DTYPES, read=_dtype),
    "quantization": Doc(
        MODEL,
        "What the weights of linear layers become when they are loaded, on the CPU: int8 or int4 weights, or "
        "int8 weights and inputs (int8-dynamic).",
        ("int8", "int8-dynamic", "int4"),
        short="-q",
    ),
    "max_model_len": Doc(
        MODEL,
        "Longest prompt plus output, in tokens; 32k and 1M work. Not given, -1 or auto: what the model and "
        "the memory allow.",
        least=1,
        read=_max_model_len,
    ),
    "seed": Doc(MODEL, "Seed of everything random at start, such as dummy weights."),
    "device": Doc(MEMORY, "Where to run; auto takes CUDA if it is there.", ("auto", "cpu", "cuda")),
    "cpu_threads": Doc(
        MEMORY,
        "Threads of a forward pass on the CPU, in each worker; default: all cores allowed, shared among the "
        "machine's workers.",
        least=1,
        most=1024,
    ),
    "gpu_memory_utilization": Doc(MEMORY, "Share of the device's memory to use.", least=0.01, most=1),
    "kv_cache_memory_bytes": Doc(
        MEMORY, "Size of the KV cache, in place of a share; 4G and 800m work.", least=1, read=size
    ),
    "block_size": Doc(
        MEMORY, "Tokens in a block of the KV cache; default: 64 on CUDA, 32 on the CPU.", least=1
    ),
    "num_gpu_blocks_override": Doc(MEMORY, "Blocks of the KV cache, in place of what fits.", least=1),
    "tensor_parallel_size": Doc(
        WORKERS, "Workers that share every layer of the model.", least=1, short="-tp"
    ),
    "pipeline_parallel_size": Doc(
        WORKERS,
        "Runs of layers into which the model is cut, each with workers of its own.",
        least=1,
        short="-pp",
    ),
    "distributed_executor_backend": Doc(
        WORKERS,
        "How workers run: in the engine's process (uni), in processes of their own (mp), or placed over the "
        "machines of a Ray cluster (ray). Default: uni for one worker, mp for more.",
        ("uni", "mp", "ray"),
    ),
    "nnodes": Doc(WORKERS, "Machines over which one model is spread, without Ray.", least=1),
    "node_rank": Doc(WORKERS, "Which of those this one is; all but 0 are started with --headless.", least=0),
    "master_addr": Doc(WORKERS, "Address of the machine with --node-rank 0, as the others reach it."),
    "master_port": Doc(
        WORKERS, "Port there, for the workers to join; the next one is theirs too.", least=1, most=65534
    ),
    "cluster_key": Doc(
        WORKERS,
        "A secret, the same on all machines, without which none may join: best set as a variable, which no "
        "list of processes shows. Any long random text.",
    ),
    "max_num_seqs": Doc(SCHEDULER, "Most sequences in a step; default: from the device.", least=1),
    "max_num_batched_tokens": Doc(SCHEDULER, "Most tokens in a step; default: from the device.", least=1),
    "max_num_queued_reqs": Doc(
        SCHEDULER, "Waiting requests beyond which new ones get 503 and Retry-After (default: 8192).", least=0
    ),
    "enable_prefix_caching": Doc(SCHEDULER, "Keep what was computed for prompts that begin alike."),
    "enable_chunked_prefill": Doc(SCHEDULER, "Read long prompts in pieces, between the steps of others."),
    "long_prefill_token_threshold": Doc(
        SCHEDULER, "Most prompt tokens of one sequence in a step while others run; 0 is no bound.", least=0
    ),
    "scheduling_policy": Doc(SCHEDULER, "Order of requests.", ("fcfs", "priority")),
    "steps_ahead": Doc(
        SCHEDULER, "Steps planned while one runs; --no-async-scheduling is 0.", least=0, most=4
    ),
}
