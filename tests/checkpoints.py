"""Tiny random checkpoints and recipes for tests; transformers writes them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 260
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    # Wide enough that logits spread and routers decide: at transformers' 0.02 everything ties.
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 24,
            "num_experts": 8,
            "moe_intermediate_size": 48,
            "intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_local_experts": 8, "intermediate_size": 48},
    ),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 8, "intermediate_size": 48}),
}


def make_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a family, in float32, with norms that are not all ones."""
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(COMMON | own | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def make_checkpoint(
    folder: Path,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    **overrides: Any,
) -> PreTrainedModel:
    """Write a random checkpoint with a byte-level tokenizer; returns the model in ``dtype``."""
    model = make_model(family, seed, **overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer(folder)
    return model


def fuse_experts(folder: Path) -> None:
    """Rewrite a single-file checkpoint with 3-D expert tensors, named as in transformers 5."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        if f"{prefix}block_sparse_moe.experts.0.w1.weight" in tensors:
            block, names = f"{prefix}block_sparse_moe.", ("w1", "w3", "w2")
        elif f"{prefix}mlp.experts.0.gate_proj.weight" in tensors:
            block, names = f"{prefix}mlp.", ("gate_proj", "up_proj", "down_proj")
        else:
            continue  # a dense layer
        parts: list[list[torch.Tensor]] = []
        for name in names:
            expert = itertools.count()
            parts.append([])
            while (tensor := f"{block}experts.{next(expert)}.{name}.weight") in tensors:
                parts[-1].append(tensors.pop(tensor))
        gate_up = [torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)]
        tensors[f"{prefix}mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}mlp.experts.down_proj"] = torch.stack(parts[2])
        for name in [name for name in tensors if name.startswith(block)]:
            tensors[name.replace(block, f"{prefix}mlp.")] = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})


def store_fp8(
    folder: Path, block_size: tuple[int, int], scale_dtype: torch.dtype = torch.float32
) -> None:
    """Rewrite a single-file checkpoint in fp8 with block scales, as DeepSeek's and Qwen's are.

    Every projection of attention, experts and dense MLPs is; embeddings, norms, routers and the
    head are not.
    """
    path, (rows, columns) = folder / "model.safetensors", block_size
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        stored[name] = tensor
        is_projection = name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
        if is_projection or ".block_sparse_moe.experts." in name:
            scales = torch.empty(-(-len(tensor) // rows), -(-tensor.shape[1] // columns))
            codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
            for i, j in itertools.product(*map(range, scales.shape)):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = (tensor[block].abs().max().float() / 448).to(scale_dtype)
                codes[block] = (tensor[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = codes, scales.to(scale_dtype)
    save_file(stored, path, metadata={"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block_size),
    }
    edit_config(folder, quantization_config=quantization)


def store_mxfp4(folder: Path, seed: int = 0) -> None:
    """Rewrite a single-file gpt-oss checkpoint with experts of random mxfp4 codes."""
    path = folder / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, num_columns, num_rows = tensors.pop(name).shape  # stored transposed
        blocks = (num_experts, num_rows, num_columns // 32)
        codes = torch.randint(0, 256, (*blocks, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(120, 126, blocks, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes, exponents
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_tokenizer(folder: Path) -> None:
    """One token a byte, ids 256 (begin) and 257 (end) special; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)} | {"<bos>": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)


def recipe_dict(model: Path, output: Path, **sections: Any) -> dict[str, Any]:
    """A recipe for tiny checkpoints; ``sections`` are merged into the sections of that name."""
    recipe: dict[str, Any] = {
        "model": str(model),
        "output": str(output),
        "draft": {"bits": 4, "group_size": 16},
        "calibration": {"num_sequences": 4, "sequence_length": 64, "seed": 0},
        "plan": {
            "memory_budget": "3MiB",
            "max_context_tokens": 256,
            "num_draft_tokens": 4,
        },
        "hardware": {"link_bytes_per_second": 1e9, "memory_bytes_per_second": 1e10},
    }
    for name, value in sections.items():
        recipe[name] = recipe.get(name, {}) | value if isinstance(value, dict) else value
    return recipe


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path
