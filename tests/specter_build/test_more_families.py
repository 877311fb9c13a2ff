"""The other ten families: logits and greedy tokens equal transformers', whatever a config says.

What is exact here is transformers itself in float64; in float32 it is off by rounding, and so may
Specter be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specter_build.architectures import ARCHITECTURES
from specter_build.checkpoint import Checkpoint
from specter_build.pipeline import build
from specter_build.recipe import Recipe
from specter_runtime.config import GenerationLimits, RuntimeConfig, SamplingConfig
from specter_runtime.draft_engine import SelfDrafter
from specter_runtime.experts import ExpertProvider, ResidentExperts, Routing
from specter_runtime.governor import Governor, Lookahead
from specter_runtime.kv_cache import KVCache
from specter_runtime.session import Session
from specter_runtime.speculative_decoder import SpeculativeDecoder
from tests.checkpoints import (
    COMMON,
    FAMILIES,
    fuse_experts,
    make_checkpoint,
    make_tokenizer,
    recipe_dict,
)
from tests.models import open_model, same_bits
from tests.oracles import array

NUM_ROWS, GREEDY_TOKENS = 80, 64
WIDE = {"moe_intermediate_size": 48, "intermediate_size": 96}
LATENT = {
    **WIDE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 10000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN3 = FAMILIES["qwen3_moe"][2]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": (
        "qwen2_moe",
        {**WIDE, "num_experts": 8, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 8,
            "intermediate_size": 48,
            "lm_head_bias": True,
            "attention_bias": True,
            "router_jitter_noise": 0.1,
        },
    ),
    "phimoe, longrope": (
        "phimoe",
        {"num_local_experts": 8, "intermediate_size": 48, "rope_parameters": LONGROPE},
    ),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v2, groups and yarn": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2}),
    "deepseek_v3, biased": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 8, "intermediate_size": 48, "head_dim": 16, "sliding_window": 20},
    ),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 8,
            "intermediate_size": 48,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **WIDE,
            "n_routed_experts": 8,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**WIDE, "moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"num_experts": 8, "moe_topk": 2, "intermediate_size": 48, "head_dim": 16},
    ),
    "hunyuan_v1_moe, alpha": (
        "hunyuan_v1_moe",
        {
            "num_experts": 8,
            "moe_topk": 2,
            "intermediate_size": 48,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 8, "intermediate_size": 48, "head_dim": 16},
    ),
    "qwen3_moe, yarn": ("qwen3_moe", {**QWEN3, "rope_parameters": YARN}),
    "qwen3_moe, linear": (
        "qwen3_moe",
        {
            **QWEN3,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "mixtral, llama3": ("mixtral", {**FAMILIES["mixtral"][2], "rope_parameters": LLAMA3}),
}
FUSED_ONLY = ("gpt_oss", "granitemoe")
FIRST_OF_FAMILY = {family: name for name, (family, _) in reversed(CASES.items())}


def make(folder: Path, case: str) -> PreTrainedModel:
    """Write one of the cases as a checkpoint."""
    return make_family(folder, *CASES[case])


def make_family(folder: Path, family: str, overrides: dict[str, Any]) -> PreTrainedModel:
    """Write a random checkpoint; norms, biases and sinks are not what they are initialized to."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(COMMON | overrides))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            elif "correction" in name:
                tensor.normal_(0, 0.03)  # no more than scores differ, or it alone would choose
            elif "bias" in name or "sinks" in name:
                tensor.normal_(0, 0.3)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return model


def root_mean_square(values: Any) -> float:
    return float(np.sqrt((values**2).mean()))


def test_every_family_has_a_case() -> None:
    assert set(ARCHITECTURES) == set(FIRST_OF_FAMILY) | set(FAMILIES)
    assert len(ARCHITECTURES) >= 12


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_up_to_rounding(tmp_path: Path, case: str) -> None:
    reference = make(tmp_path, case)
    token_ids = torch.randint(0, 256, (NUM_ROWS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = reference(token_ids[None]).logits[0]
        exact = array(reference.double()(token_ids[None]).logits[0])
    opened = open_model(tmp_path)
    # Both are sums of the same products in float32, in other orders (latent attention multiplies
    # its factors in another one, too): errors of one kind, not of one size. Twice the root mean
    # square over 80 x 260 logits is far outside what order alone does to it.
    their_error = root_mean_square(array(theirs) - exact)
    for rows_per_block, experts in ((1, opened.experts), (NUM_ROWS, Checkpoint(tmp_path))):
        cache = opened.cache(NUM_ROWS)
        ours = opened.rows(token_ids.tolist(), cache, experts, rows_per_block)
        assert root_mean_square(array(ours) - exact) < 2 * their_error
    assert their_error < 1e-5 * root_mean_square(exact)  # else this could not fail


@pytest.mark.parametrize("family", [f for f in FIRST_OF_FAMILY if f not in FUSED_ONLY])
def test_fused_experts_are_the_same_tensors(tmp_path: Path, family: str) -> None:
    make(tmp_path, FIRST_OF_FAMILY[family])
    separate = open_model(tmp_path)
    fuse_experts(tmp_path)
    fused = open_model(tmp_path)
    assert same_bits(list(separate.dense_tensors.values()), list(fused.dense_tensors.values()))
    for key, weights in separate.weights.items():
        assert same_bits(
            list(weights.tensors().values()), list(fused.weights[key].tensors().values())
        )


@pytest.mark.parametrize("family", FIRST_OF_FAMILY)
def test_greedy_tokens_through_a_bundle_equal_transformers(tmp_path: Path, family: str) -> None:
    reference = make(tmp_path / "checkpoint", FIRST_OF_FAMILY[family])
    (tmp_path / "text.txt").write_text("def calibrate(text):\n    return text\n" * 8)
    recipe = recipe_dict(
        tmp_path / "checkpoint",
        tmp_path / "bundle",
        calibration={"files": ["text.txt"], "num_sequences": 2, "sequence_length": 32},
        plan={"memory_budget": "8MiB", "dtype": "float32", "max_context_tokens": 128},
    )
    build(Recipe.model_validate(recipe), tmp_path)
    prompt = list(b"def main(")
    with Session.open(tmp_path / "bundle") as session:
        memory = session.memory
    scarce = RuntimeConfig(  # two slots more than one token's experts in a layer
        memory_budget_bytes=memory.used_bytes - (memory.num_slots - 4) * memory.slot_bytes,
        num_draft_tokens=4,
        bound_by_slots=False,
    )
    with Session.open(tmp_path / "bundle", scarce) as session:
        tokens = list(session.generate_ids(prompt, GREEDY_TOKENS, stop_at_eos=False))
        assert session.num_draft_tokens == 4
        assert session.stats.cache.misses > 0
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0]
    assert tokens == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert len(set(tokens)) > 4  # else there would be little to compare


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_an_unquantized_draft_routes_and_predicts_as_the_target(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in FAMILIES:
        make_checkpoint(tmp_path, family)
    else:
        make(tmp_path, FIRST_OF_FAMILY[family])
    opened = open_model(tmp_path)
    draft_experts = ResidentExperts(opened.weights)
    routes: dict[bool, list[torch.Tensor]] = {True: [], False: []}  # of the draft, of the target
    forward = opened.model.forward

    def recorded(
        token_ids: Sequence[int],
        kv_cache: KVCache,
        provider: ExpertProvider,
        rows_per_block: int,
        **options: Any,
    ) -> tuple[list[torch.Tensor], list[Routing]]:
        blocks, routings = forward(
            token_ids, kv_cache, provider, rows_per_block=rows_per_block, **options
        )
        if rows_per_block == 1:  # [layers, T, K]
            selected = torch.stack([routing.selected_experts for routing in routings])
            routes[provider is draft_experts].append(selected)
        return blocks, routings

    monkeypatch.setattr(opened.model, "forward", recorded)
    drafter = SelfDrafter(opened.model, draft_experts, ())
    governor = Governor([Lookahead(4)])
    decoder = SpeculativeDecoder(
        opened.model, opened.experts, drafter, None, opened.cache(64), governor, SamplingConfig()
    )
    with torch.inference_mode():
        passes = list(decoder.generate(list(b"def "), GenerationLimits(21)))
    assert [len(token_ids) for token_ids in passes] == [1, 5, 5, 5, 5]
    assert decoder.stats.num_accepted == decoder.stats.num_drafted == 16
    drafted = torch.cat(routes[True], dim=1)
    # a pass of the target has one row more: that of the last token drafted
    verified = torch.cat([selected[:, :-1] for selected in routes[False]], dim=1)
    assert torch.equal(drafted, verified)
    assert drafted.shape[1:] == (16, opened.config.num_experts_per_tok)
    assert len(drafted.unique()) > 2  # else there would be little to compare
