"""The shipped recipes fit the published shapes of the models they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from specter_build.estimate import estimate
from specter_build.recipe import load_recipe
from specter_runtime.experts import expert_nbytes
from tests.conftest import REPOSITORY

YARN = {
    "rope_type": "yarn",
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
# Family, what differs from transformers' defaults of the family, and the routed weights in bfloat16
# as published or as they follow from published shapes (layers x experts x 3 x hidden x width).
SHAPES: dict[str, tuple[str, dict[str, Any], float]] = {
    "olmoe-1b-7b": ("olmoe", {"intermediate_size": 1024}, 12.9e9),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {"num_hidden_layers": 48, "head_dim": 128, "max_position_embeddings": 40960},
        58.0e9,
    ),
    "mixtral-8x7b": ("mixtral", {}, 90.2e9),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "moe_intermediate_size": 1408,
            "intermediate_size": 10944,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 163840,
            "rope_parameters": YARN,
        },
        28.8e9,
    ),
    "phi-3.5-moe": ("phimoe", {}, 80.5e9),
    "qwen1.5-moe-a2.7b": ("qwen2_moe", {}, 24.9e9),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        },
        38.2e9,
    ),
    "granite-3.1-1b-a400m": (
        "granitemoe",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "intermediate_size": 512,
            "vocab_size": 49155,
            "max_position_embeddings": 131072,
        },
        2.4e9,
    ),
    "glm-4.5-air": ("glm4_moe", {"head_dim": 128}, 199e9),
    "smolmoe": (  # as benchmarks/make_smolmoe.py writes it
        "mixtral",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
        5.1e9,
    ),
}


def test_every_recipe_has_a_shape() -> None:
    names = {path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")}
    assert names == set(SHAPES) | {"demo"}


@pytest.mark.parametrize("name", SHAPES)
def test_recipe_fits_the_model_it_names(tmp_path: Path, name: str) -> None:
    family, overrides, routed_bytes = SHAPES[name]
    AutoConfig.for_model(family, dtype="bfloat16", **overrides).save_pretrained(tmp_path)
    sizes = estimate(load_recipe(REPOSITORY / "recipes" / f"{name}.yaml"), tmp_path)
    config = sizes.config
    num_experts = len(config.moe_layers) * config.num_experts
    # published to three digits, granite and GLM to two
    assert num_experts * config.expert_num_weights * 2 == pytest.approx(routed_bytes, rel=0.02)
    assert not sizes.has_weights
    stored_bytes = num_experts * expert_nbytes(config, sizes.expert_numbers)
    is_mxfp4 = "quantization_config" in overrides  # 4 bits, and 8 for 32; biases
    expected = routed_bytes * (4.25 / 16 if is_mxfp4 else 1)
    assert stored_bytes == pytest.approx(expected, rel=0.02)
    assert sizes.encoding == ("raw" if is_mxfp4 else "packed")
    assert sizes.bundle_bytes > stored_bytes * (1 if is_mxfp4 else 12 / 16)
    assert sizes.memory.keys() == {0, 1, 2, 4, 8, 16}  # a draft fits the budget at every K
    for memory in sizes.memory.values():
        assert memory.used_bytes <= memory.budget_bytes
        assert memory.num_slots >= config.num_experts_per_tok
        assert memory.num_slots < num_experts  # else there would be nothing to offload
