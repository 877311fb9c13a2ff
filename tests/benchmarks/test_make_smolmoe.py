"""The parts of the script that need no model: routers, noise, tokenizer, refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks import make_smolmoe
from specter_runtime.tokenizer import Tokenizer


@pytest.fixture
def inputs() -> torch.Tensor:
    """Correlated features with a mean that dwarfs their spread, as in a trained model."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.logspace(0, -2, 24)
    mixing = torch.linalg.qr(torch.randn(24, 24, generator=generator))[0]
    return torch.randn(2000, 24, generator=generator) * spread @ mixing + 2


def test_router_has_the_scale_and_no_favourites(inputs: torch.Tensor) -> None:
    router = make_smolmoe.make_router(inputs, 32, make_smolmoe.seeded(0, 0))
    logits = inputs.double() @ router.T
    assert router.shape == (32, 24)
    assert torch.allclose(logits.mean(0), torch.zeros(32).double(), atol=1e-6)
    assert torch.allclose(logits.std(0, correction=0), torch.full((32,), 1.5).double())


def test_router_lies_in_the_leading_components_across_the_mean(inputs: torch.Tensor) -> None:
    router = make_smolmoe.make_router(inputs, 32, make_smolmoe.seeded(0, 0))
    mean = inputs.double().mean(0)
    unit = mean / mean.norm()
    across = inputs.double() @ (torch.eye(24).double() - torch.outer(unit, unit))
    leading = torch.linalg.svd(across, full_matrices=False)[2][: make_smolmoe.NUM_COMPONENTS]
    assert torch.allclose(router @ leading.T @ leading, router)
    assert torch.linalg.matrix_rank(router) == make_smolmoe.NUM_COMPONENTS


def test_layer_is_seeded_and_named_as_mixtral_is_on_disk(inputs: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(5)
    prefix = "model.layers.0."
    weights = {
        f"{prefix}input_layernorm.weight": torch.ones(24),
        f"{prefix}mlp.gate_proj.weight": torch.randn(40, 24, generator=generator),
        f"{prefix}mlp.up_proj.weight": torch.randn(40, 24, generator=generator),
        f"{prefix}mlp.down_proj.weight": 0.02 * torch.randn(24, 40, generator=generator),
    }

    def upcycle(seed: int, num_experts: int = 3) -> dict[str, torch.Tensor]:
        return dict(make_smolmoe.upcycle_layer(weights, inputs, 0, seed, 0.1, num_experts))

    first, second = upcycle(0), upcycle(0)
    assert len(first) == 2 + 3 * 3
    assert all(tensor.dtype == torch.bfloat16 for tensor in first.values())
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    experts = f"{prefix}block_sparse_moe.experts."
    w2 = [first[f"{experts}{expert}.w2.weight"] for expert in range(3)]
    base = weights[f"{prefix}mlp.down_proj.weight"]
    assert (w2[0].float() - base).std() / base.std() == pytest.approx(0.1, rel=0.1)
    assert not torch.equal(w2[0], w2[1])
    assert not torch.equal(w2[0], upcycle(1)[f"{experts}0.w2.weight"])
    # an expert does not depend on how many there are
    assert torch.equal(w2[1], upcycle(0, 2)[f"{experts}1.w2.weight"])


def test_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path: Path) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    tokens += ["12", "hi", "Ġhi"]
    fields: dict[str, Any] = {
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "h i", "Ġ hi"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "llama.context_length": 64,
    }
    make_smolmoe.write_tokenizer(tmp_path, fields)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("hi hi 12é")
    assert [tokens[i] for i in ids] == ["hi", "Ġhi", "Ġ", "1", "2", "Ã", "©"]
    assert tokenizer.decode(ids) == "hi hi 12é"
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert [tokens[i] for i in chat] == ["<|im_start|>", "hi", "<|im_end|>"]


def test_existing_folder_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_smolmoe.main, [str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path} exists" in result.output
