"""Keys and values of all layers for one sequence, with room fixed in advance.

Target and draft share one cache: the draft appends temporary entries behind the committed ones,
``truncate`` drops them, and verification writes the target's own in their place.

Called by: model, speculative_decoder.
"""

from __future__ import annotations

import torch

from specter_runtime.config import ModelConfig
from specter_runtime.errors import CapacityError


class KVCache:
    """Per layer: keys ``[capacity, G, C]`` and values of the model's own width.

    With latent attention values are a part of the keys and are not stored again.

    The position comes first, so that the first ``S`` positions are one contiguous block whatever
    the capacity is: what a row computes does not depend on the room behind it.
    """

    def __init__(
        self, config: ModelConfig, capacity_tokens: int, dtype: torch.dtype, num_layers: int = -1
    ) -> None:
        """Allocate zeroed room for ``capacity_tokens`` in ``num_layers`` layers (-1: all)."""
        num_heads, width = config.key_shape
        keys = (capacity_tokens, num_heads, width)
        values = (capacity_tokens, num_heads, config.value_width)
        layers = range(config.num_hidden_layers if num_layers < 0 else num_layers)
        self._keys = [torch.zeros(keys, dtype=dtype) for _ in layers]
        self._values = [torch.zeros(values, dtype=dtype) for _ in layers]
        self.capacity_tokens = capacity_tokens
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(t.nbytes for t in (*self._keys, *self._values))

    def write(
        self,
        layer: int,
        start: int,
        keys: torch.Tensor,  # [T, G, C]
        values: torch.Tensor,  # [T, G, C]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store T positions from ``start`` and return all keys and values up to the last of them.

        ``length`` does not move: a pass writes layer by layer and calls ``advance`` at its end.

        Raises:
            CapacityError: there is no room.
        """
        stop = start + keys.shape[0]
        all_keys, all_values = self.room(layer, stop)
        all_keys[start:stop] = keys
        all_values[start:stop] = values
        return all_keys[:stop], all_values[:stop]  # [S, G, C]

    def room(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, to be written up to position ``stop - 1``.

        Raises:
            CapacityError: there is no room.
        """
        if stop > self.capacity_tokens:
            raise CapacityError(
                f"the KV cache has room for {self.capacity_tokens} tokens, {stop} are needed"
            )
        return self._keys[layer], self._values[layer]

    def advance(self, num_tokens: int) -> None:
        """Count ``num_tokens`` more as held: all layers have written them."""
        self.length += num_tokens

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.length = length
