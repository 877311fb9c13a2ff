"""What is put into the file, without writing one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import make_gguf
from specter_build.architectures import read_config
from specter_runtime.config import ModelConfig

HEADS, WIDTH, HIDDEN = 3, 8, 5


def model(**overrides: Any) -> ModelConfig:
    raw = {
        "model_type": "mixtral",
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **overrides,
    }
    return read_config(raw, "config.json")


def rotate(
    x: npt.NDArray[np.float64], pairs: list[tuple[int, int]], position: int
) -> npt.NDArray[np.float64]:
    """Turn each pair of dimensions of each head by its angle (arXiv 2104.09864, eq. 34)."""
    out = np.empty_like(x)
    for i, (first, second) in enumerate(pairs):
        angle = position * 10000.0 ** (-2 * i / WIDTH)
        a, b = x[:, first], x[:, second]
        out[:, first] = a * np.cos(angle) - b * np.sin(angle)
        out[:, second] = a * np.sin(angle) + b * np.cos(angle)
    return out


def test_interleaved_rows_turn_as_halves_did() -> None:
    generator = np.random.default_rng(0)
    halves = [(i, i + WIDTH // 2) for i in range(WIDTH // 2)]
    neighbours = [(2 * i, 2 * i + 1) for i in range(WIDTH // 2)]

    def project(weight: npt.NDArray[np.float64], x: npt.NDArray[np.float64]) -> Any:
        return (weight @ x).reshape(HEADS, WIDTH)

    q, k = generator.normal(size=(2, HEADS * WIDTH, HIDDEN))
    x, y = generator.normal(size=(2, HIDDEN))
    moved_q, moved_k = (make_gguf.interleave_halves(weight, HEADS) for weight in (q, k))
    turned = rotate(project(q, x), halves, 7)
    moved = rotate(project(moved_q, x), neighbours, 7)
    flat = make_gguf.interleave_halves(turned.reshape(-1, 1), HEADS)
    np.testing.assert_allclose(moved, flat.reshape(HEADS, WIDTH), rtol=1e-12)
    np.testing.assert_allclose(
        (moved * rotate(project(moved_k, y), neighbours, 4)).sum(1),
        (turned * rotate(project(k, y), halves, 4)).sum(1),
        rtol=1e-12,
    )


def test_every_tensor_of_a_checkpoint_is_used_once() -> None:
    tensors = list(make_gguf.list_tensors(model(tie_word_embeddings=False)))
    sources = [source for tensor in tensors for source in tensor.sources]
    assert len(set(sources)) == len(sources) == 3 + 2 * (2 + 4 + 1 + 3 * 4)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    tied = list(make_gguf.list_tensors(model()))
    assert {t.name for t in tensors} - {t.name for t in tied} == {"output.weight"}


def test_data_are_the_bits_of_the_checkpoint() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        source: torch.randn(24, 6, generator=generator).bfloat16()
        for tensor in make_gguf.list_tensors(model())
        for source in tensor.sources
    }
    by_name = {tensor.name: tensor for tensor in make_gguf.list_tensors(model())}

    def data(name: str) -> npt.NDArray[Any]:
        return make_gguf.convert(by_name[name], weights.__getitem__)

    def bits(name: str) -> npt.NDArray[Any]:
        return weights[f"model.layers.1.{name}.weight"].view(torch.uint16).numpy()

    up = data("blk.1.ffn_up_exps.weight")
    assert up.shape == (4, 24, 6)
    np.testing.assert_array_equal(up[2], bits("block_sparse_moe.experts.2.w3"))
    np.testing.assert_array_equal(data("blk.1.attn_v.weight"), bits("self_attn.v_proj"))
    keys = data("blk.1.attn_k.weight")  # one head: rows 0, 12, 1, 13, ...
    np.testing.assert_array_equal(keys[:4], bits("self_attn.k_proj")[[0, 12, 1, 13]])
    queries = data("blk.1.attn_q.weight")  # three heads of eight rows
    np.testing.assert_array_equal(queries[8:11], bits("self_attn.q_proj")[[8, 12, 9]])
    router = data("blk.1.ffn_gate_inp.weight")
    assert router.dtype == np.float32
    np.testing.assert_array_equal(
        router, weights["model.layers.1.block_sparse_moe.gate.weight"].float().numpy()
    )


def test_ids_without_a_token_have_names_of_their_own() -> None:
    tokenizer = {
        "model": {"vocab": {"a": 1, "b": 2}},
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True},
            {"id": 3, "content": "<x>", "special": False},
        ],
    }
    tokens, types = make_gguf.vocabulary(tokenizer, 6)
    assert tokens[:4] == ["<s>", "a", "b", "<x>"]
    assert len(set(tokens)) == 6
    assert types == [make_gguf.CONTROL, 1, 1, make_gguf.USER_DEFINED, 1, 1]
