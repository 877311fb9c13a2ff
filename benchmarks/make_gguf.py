"""Convert a Mixtral checkpoint in bfloat16 to GGUF, bit for bit, for llama.cpp.

    pip install gguf
    python benchmarks/make_gguf.py artifacts/smolmoe smolmoe.gguf

Matrices stay bfloat16, norms and routers become float32, as llama.cpp has them. Its architecture
``llama`` rotates neighbouring dimensions of a head where Mixtral rotates halves, so the rows of q
and k are put in that order; no product changes. The tokenizer's fields are for byte-level BPE that
splits text as SmolLM does: feed token ids to models with another one. Written a tensor at a time:
memory is that of one layer's experts of one kind.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch

from specter_build.checkpoint import Checkpoint
from specter_runtime.config import ModelConfig
from specter_runtime.units import format_bytes

ARCHITECTURE = "llama"
EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
PRE_TOKENIZER = "smollm"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types in GGUF


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file: made of one of the checkpoint's, or a stack of several.

    Attributes:
        num_heads: of a projection whose rows are reordered; 0 for others.
    """

    name: str
    sources: tuple[str, ...]
    is_stack: bool = False
    is_float32: bool = False
    num_heads: int = 0


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(checkpoint: Path, out: Path) -> None:
    """Convert CHECKPOINT to OUT."""
    if out.exists():
        raise click.UsageError(f"{out} exists; name another file or remove it")
    if importlib.util.find_spec("gguf") is None:
        raise click.UsageError("the package gguf is missing: pip install gguf")
    opened = Checkpoint(checkpoint)
    found = (opened.config.model_type, opened.dense_dtype, opened.expert_numbers.dtype)
    if found != ("mixtral", "bfloat16", "bfloat16"):
        raise click.UsageError(f"{checkpoint}: {', '.join(found)}; expected mixtral in bfloat16")
    partial = out.with_name(out.name + ".partial")
    write(opened, partial)
    partial.rename(out)


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write metadata, then the tensors, one at a time."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    raw_config = read_json(checkpoint.folder / "config.json")
    add_config(writer, checkpoint.config, raw_config)
    add_tokenizer(writer, read_json(checkpoint.folder / "tokenizer.json"), raw_config)
    tensors = list(list_tensors(checkpoint.config))
    for tensor in tensors:
        shape = tuple(checkpoint.tensor(tensor.sources[0]).shape)
        if tensor.is_stack:
            shape = (len(tensor.sources), *shape)
        dtype = np.dtype(np.float32 if tensor.is_float32 else np.uint16)
        kind = GGMLQuantizationType.F32 if tensor.is_float32 else GGMLQuantizationType.BF16
        nbytes = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(tensor.name, shape, dtype, nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = 0
    for tensor in tensors:
        data = convert(tensor, checkpoint.tensor)
        writer.write_tensor_data(data)
        total += data.nbytes
        if tensor.is_stack:
            click.echo(f"{tensor.name}: {format_bytes(total)} in all", err=True)
    writer.close()


def add_config(writer: Any, model: ModelConfig, raw_config: dict[str, Any]) -> None:
    """Write what llama.cpp needs to know of the network."""
    rope = raw_config.get("rope_parameters") or raw_config
    if rope.get("rope_type", "default") != "default" or rope.get("rope_scaling"):
        raise click.UsageError("a scaled rotary embedding is not converted")
    writer.add_block_count(model.num_hidden_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.moe_intermediate_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_vocab_size(model.vocab_size)
    writer.add_expert_count(model.num_experts)
    writer.add_expert_used_count(model.num_experts_per_tok)


def add_tokenizer(writer: Any, tokenizer: dict[str, Any], raw_config: dict[str, Any]) -> None:
    """Write vocabulary, merges and special tokens."""
    tokens, types = vocabulary(tokenizer, raw_config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(raw_config["bos_token_id"])
    writer.add_eos_token_id(raw_config["eos_token_id"])


def vocabulary(tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Tokens and their types by id; ids that the tokenizer leaves out get names of their own."""
    tokens = [f"[unused {i}]" for i in range(vocab_size)]
    types = [NORMAL] * vocab_size
    for token, token_id in tokenizer["model"]["vocab"].items():
        tokens[token_id] = token
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def list_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors in the order of the file."""
    yield Tensor("token_embd.weight", ("model.embed_tokens.weight",))
    if not model.tie_word_embeddings:
        yield Tensor("output.weight", ("lm_head.weight",))
    yield Tensor("output_norm.weight", ("model.norm.weight",), is_float32=True)
    for layer in range(model.num_hidden_layers):
        to, of = f"blk.{layer}.", f"model.layers.{layer}."
        attention, moe = f"{of}self_attn.", f"{of}block_sparse_moe."
        for name, source in (("attn_norm", "input"), ("ffn_norm", "post_attention")):
            yield Tensor(f"{to}{name}.weight", (f"{of}{source}_layernorm.weight",), is_float32=True)
        for letter, num_heads in (
            ("q", model.num_attention_heads),
            ("k", model.num_key_value_heads),
            ("v", 0),
        ):
            source = f"{attention}{letter}_proj.weight"
            yield Tensor(f"{to}attn_{letter}.weight", (source,), num_heads=num_heads)
        yield Tensor(f"{to}attn_output.weight", (f"{attention}o_proj.weight",))
        yield Tensor(f"{to}ffn_gate_inp.weight", (f"{moe}gate.weight",), is_float32=True)
        for name, short in EXPERTS.items():
            sources = (f"{moe}experts.{e}.{short}.weight" for e in range(model.num_experts))
            yield Tensor(f"{to}{name}.weight", tuple(sources), is_stack=True)


def convert(tensor: Tensor, read: Callable[[str], torch.Tensor]) -> npt.NDArray[Any]:
    """A tensor's data: float32, or the bits of bfloat16 as uint16."""
    if tensor.is_float32:
        return read(tensor.sources[0]).float().numpy()
    parts = [read(name).view(torch.uint16).numpy() for name in tensor.sources]
    if tensor.num_heads:
        parts = [interleave_halves(part, tensor.num_heads) for part in parts]
    return np.stack(parts) if tensor.is_stack else parts[0]


def interleave_halves(
    weight: npt.NDArray[Any],  # [H * C, D]
    num_heads: int,
) -> npt.NDArray[Any]:
    """Row i of a head's first half becomes its row 2i, row i of the second half row 2i + 1."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])  # [H, 2, C / 2, D]
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file."""
    value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return value


if __name__ == "__main__":
    main()
