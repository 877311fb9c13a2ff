"""Write a checkpoint of a real shape with random weights, sharded as the hub does.

    python benchmarks/make_random_checkpoint.py olmoe DIR --set intermediate_size=1024
    python benchmarks/make_random_checkpoint.py qwen3_moe DIR --set num_hidden_layers=8

The first is OLMoE-1B-7B's shape, 13.8 GB; what is not set is transformers' default of the family.
Weights are Gaussian (standard deviation 0.02, norms 1), bfloat16, seeded; the tokenizer is the
demo's. What it is for: size, memory and speed of a build. What it is not for: routing, recall or
acceptance, since random routers choose as good as uniformly. Needs transformers for the
configuration only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import torch
import yaml
from transformers import AutoConfig

from specter_build.architectures import find_architecture, read_config
from specter_runtime.experts import expert_shapes
from specter_runtime.roles import dense_shapes
from specter_runtime.shards import write_tensors
from specter_runtime.units import format_bytes

SHARD_BYTES = 5 * 10**9
TOKENIZER = Path(__file__).resolve().parent.parent / "artifacts" / "demo-moe"


@click.command()
@click.argument("family")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Of the configuration."
)
@click.option("--seed", default=0, show_default=True)
def main(family: str, folder: Path, overrides: tuple[str, ...], seed: int) -> None:
    """Write FAMILY's checkpoint to FOLDER."""
    values = {key: yaml.safe_load(value) for key, _, value in (o.partition("=") for o in overrides)}
    folder.mkdir(parents=True)
    AutoConfig.for_model(family, dtype="bfloat16", **values).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    torch.manual_seed(seed)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards(folder), start=1):
        name = f"model-{number:05d}.safetensors"
        total += write_tensors(folder / name, shard, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        click.echo(f"{name}: {format_bytes(total)} in all", err=True)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def shards(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors of the whole model, a file's worth at a time."""
    shard: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(folder):
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            yield shard
            shard = {}
        is_norm = len(shape) == 1
        tensor = torch.ones(shape) if is_norm else torch.randn(shape).mul_(0.02)
        shard[name] = tensor.to(torch.bfloat16)
    yield shard


def tensor_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the layout with one tensor an expert."""
    raw = json.loads((folder / "config.json").read_text())
    config = read_config(raw, str(folder))
    names = find_architecture(raw, str(folder)).bundle_names()
    for layer in (None, *range(config.num_hidden_layers)):
        for role, shape in dense_shapes(config, layer).items():
            yield names[role].format(layer=layer), shape
        for expert in range(config.num_experts if layer in config.moe_layers else 0):
            for role, shape in expert_shapes(config).items():
                yield names[role].format(layer=layer, expert=expert), shape


if __name__ == "__main__":
    main()
