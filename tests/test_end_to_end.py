"""Recipe -> bundle -> tokens, against transformers and against plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specter_runtime.config import RuntimeConfig
from specter_runtime.session import Session

PROMPTS = ("def fibonacci(n):\n", "import os\n\nclass ", "    for name in names:\n")
NUM_TOKENS = 48
DRAFT_TOKENS = (0, 1, 2, 4, 8, 16)
MINIMUM_BUDGET = 26 * 2**20  # dense, draft, KV cache and buffers take all but a few slots


def generate(
    bundle: Path, prompt: str, num_tokens: int = NUM_TOKENS, **config: object
) -> list[int]:
    with Session.open(bundle, RuntimeConfig(**config)) as session:  # type: ignore[arg-type]
        return list(session.generate_ids(session.tokenizer.encode(prompt), num_tokens))


def test_tiny_bundle_decodes(tiny_bundle: Path) -> None:
    assert len(generate(tiny_bundle, "hello", 16)) == 16


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_transformers_in_float32(
    demo_bundle: Path, demo_checkpoint: Path, prompt: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        expected = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    new_tokens = expected[0, inputs["input_ids"].shape[1] :].tolist()
    for num_draft_tokens in DRAFT_TOKENS:
        tokens = generate(demo_bundle, prompt, dtype="float32", num_draft_tokens=num_draft_tokens)
        assert tokens == new_tokens, f"K = {num_draft_tokens}"
