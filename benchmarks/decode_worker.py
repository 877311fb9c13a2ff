"""One measurement: decode given prompts greedily with one engine, print what it took as JSON.

    python benchmarks/decode_worker.py JOB

Started by ``vs_peers``, which describes JOB and what is printed, each time as a fresh process. It
runs by itself: an engine's interpreter needs that engine and nothing of ours. Prompts come as token
ids. A token's time is when its id is known; the prompt and the first token are not counted. With
``warm_up`` everything is decoded twice, and the second pass is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MARGIN_BYTES = 64 << 20  # allocator slack and what torch takes for its first operators
GROUPS = Path("/sys/fs/cgroup/memory")
ROOMY = 1 << 62
MAX_CONTEXT_TOKENS = 512

Job = dict[str, Any]
Measured = dict[str, Any]
Decode = Callable[[list[int]], Measured]
"""From a prompt to new tokens, their times and what else the engine counts."""


def main() -> None:
    """Measure and print."""
    job: Job = json.loads(sys.argv[1])
    with ENGINES[job["engine"]](job) as (decode, about):
        for _ in range(2 if job["warm_up"] else 1):
            sets = {name: decode(ids) for name, ids in job["prompts"].items()}
    print(json.dumps({"sets": sets, **about}))


@contextmanager
def specter(job: Job) -> Iterator[tuple[Decode, Measured]]:
    """Our runtime; the budget is what the cap leaves when all libraries are loaded."""
    from specter_runtime.torch_environment import set_torch_environment

    set_torch_environment()
    from specter_runtime.config import RuntimeConfig
    from specter_runtime.session import Session

    budget = ROOMY
    if job["cap_bytes"] is not None:
        budget = job["cap_bytes"] - group_bytes() - MARGIN_BYTES
    config = RuntimeConfig(
        budget,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        num_threads=job["num_threads"],
        **job["options"],
    )
    with Session.open(Path(job["model"]), config) as session:

        def decode(ids: list[int]) -> Measured:
            tokens = list(session.generate_ids(ids, job["max_new_tokens"], stop_at_eos=False))
            cache = session.stats.cache
            return measured(
                tokens,
                session.stats.committed_seconds,
                cache.loaded_bytes,
                stall_seconds=cache.stall_seconds,
                link_busy_seconds=cache.link_busy_seconds,
            )

        yield decode, {"num_slots": session.memory.num_slots}


@contextmanager
def llama_cpp(job: Job) -> Iterator[tuple[Decode, Measured]]:
    """llama.cpp on a mapped file, through llama-cpp-python, which does not warm up."""
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(
        job["model"],
        n_ctx=MAX_CONTEXT_TOKENS,
        n_threads=job["num_threads"],
        n_threads_batch=job["num_threads"],
        use_mmap=True,
        verbose=False,
    )

    def step(ids: list[int]) -> int:
        model.eval(ids)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())

    def decode(ids: list[int]) -> Measured:
        model.reset()
        return decode_stepwise(step, ids, job["max_new_tokens"])

    yield decode, {}


@contextmanager
def accelerate(job: Job) -> Iterator[tuple[Decode, Measured]]:
    """Transformers with accelerate: experts are read from the disk at every use of a layer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(job["num_threads"])
    devices = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
    devices["lm_head"] = "cpu"
    for layer in range(AutoConfig.from_pretrained(job["model"]).num_hidden_layers):
        parts = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate")
        devices |= dict.fromkeys((f"model.layers.{layer}.{part}" for part in parts), "cpu")
        devices[f"model.layers.{layer}.mlp.experts"] = "disk"
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.bfloat16, device_map=devices, offload_folder=job["scratch"]
    )

    def decode(ids: list[int]) -> Measured:
        cache = DynamicCache()

        def step(ids: list[int]) -> int:
            out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
            return int(out.logits[0, -1].argmax())

        return decode_stepwise(step, ids, job["max_new_tokens"])

    with torch.inference_mode():
        yield decode, {}


ENGINES = {"specter": specter, "llama.cpp": llama_cpp, "accelerate": accelerate}


def decode_stepwise(
    step: Callable[[list[int]], int], prompt: list[int], max_new_tokens: int
) -> Measured:
    """Feed the prompt, then every token that comes out.

    Bytes are those that the process had read from storage, page faults in mapped files included.
    """
    tokens = [step(prompt)]
    seconds = [time.perf_counter()]
    before = storage_bytes()
    while len(tokens) < max_new_tokens:
        tokens.append(step(tokens[-1:]))
        seconds.append(time.perf_counter())
    return measured(tokens, seconds, storage_bytes() - before)


def measured(
    tokens: Sequence[int], seconds: Sequence[float], loaded_bytes: int, **totals: float
) -> Measured:
    """Means over the tokens behind the first; ``totals`` are sums over them."""
    num_steps = len(tokens) - 1
    return {
        "tokens": list(tokens),
        "tpot_seconds": (seconds[-1] - seconds[0]) / num_steps,
        "bytes_per_token": loaded_bytes / num_steps,
        **{f"{name}_per_token": total / num_steps for name, total in totals.items()},
    }


def group_bytes() -> int:
    """What counts in this process's memory group, shared libraries included if it read them."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    [path] = [path for _, controllers, path in lines if "memory" in controllers.split(",")]
    return int((GROUPS / path.lstrip("/") / "memory.usage_in_bytes").read_text())


def storage_bytes() -> int:
    """Bytes that this process has had read from storage so far."""
    return proc_field("/proc/self/io", "read_bytes")


def proc_field(path: str, name: str) -> int:
    """A number in a file of lines ``name: number``."""
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(fields[name].split()[0])


if __name__ == "__main__":
    main()
