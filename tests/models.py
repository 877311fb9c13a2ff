"""Checkpoints opened as models in memory: no bundle, no threads, no files once opened."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specter_build.checkpoint import Checkpoint
from specter_runtime.config import ModelConfig
from specter_runtime.experts import (
    Batch,
    Expert,
    ExpertKey,
    ExpertProvider,
    ResidentExperts,
    Routing,
    StoredExpert,
)
from specter_runtime.kv_cache import KVCache
from specter_runtime.model import MoETransformer
from tests.checkpoints import make_checkpoint


@dataclass(frozen=True)
class OpenModel:
    """A network and all of its experts."""

    config: ModelConfig
    model: MoETransformer
    weights: dict[ExpertKey, StoredExpert]
    dense_tensors: dict[str, torch.Tensor]

    @property
    def experts(self) -> ResidentExperts:
        return ResidentExperts(self.weights)

    def cache(self, capacity_tokens: int) -> KVCache:
        return KVCache(self.config, capacity_tokens, self.model.dtype)

    def rows(
        self,
        token_ids: Sequence[int],
        kv_cache: KVCache,
        provider: ExpertProvider | None = None,
        rows_per_block: int = 1,
    ) -> torch.Tensor:
        """Logits ``[T, V]`` of tokens behind those in the cache."""
        blocks, _ = self.model.forward(
            token_ids, kv_cache, provider or self.experts, rows_per_block=rows_per_block
        )
        return self.model.logits(blocks)


class ShuffledExperts:
    """Hands out experts in an order of its own, leaves some out, and keeps book."""

    def __init__(
        self,
        weights: Mapping[ExpertKey, Expert],
        seed: int = 0,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        self._weights = weights
        self._random = random.Random(seed)
        self._left_out = left_out
        self.asked: list[tuple[int, list[int]]] = []

    def experts(self, routing: Routing) -> Iterator[Batch]:
        expert_ids = routing.expert_ids()
        self.asked.append((routing.layer, expert_ids))
        shuffled = self._random.sample(expert_ids, len(expert_ids))
        served = [e for e in shuffled if e not in self._left_out]
        while served:
            size = self._random.randint(1, len(served))
            yield [(e, self._weights[ExpertKey(routing.layer, e)]) for e in served[:size]]
            del served[:size]


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> OpenModel:
    """The network of a checkpoint, computing in ``dtype``."""
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    tensors: dict[str, torch.Tensor] = {}
    for layer in (None, *range(config.num_hidden_layers)):
        tensors |= checkpoint.dense_tensors(layer)
    keys = [ExpertKey(layer, e) for layer in config.moe_layers for e in range(config.num_experts)]
    return OpenModel(
        config,
        MoETransformer(config, tensors, checkpoint.family.bundle_names(), dtype),
        {key: checkpoint.expert(key) for key in keys},
        tensors,
    )


def random_model(
    folder: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **overrides: Any
) -> OpenModel:
    """A model of random weights, through a checkpoint in ``folder``."""
    make_checkpoint(folder, family, **overrides)
    return open_model(folder, dtype)


def cache_contents(kv_cache: KVCache, config: ModelConfig) -> list[torch.Tensor]:
    """Copies of all keys and values that the cache holds, layer by layer, through its interface."""
    length = kv_cache.length
    contents = []
    for layer in range(config.num_hidden_layers):
        keys = torch.empty(0, *config.key_shape)
        values = torch.empty(0, config.key_shape[0], config.value_width)
        contents += [t.clone() for t in kv_cache.write(layer, length, keys, values)]
    return contents


def same_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal to the bit, NaN and the sign of 0 included."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        for a, b in zip(left, right, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
