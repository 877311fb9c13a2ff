"""What a model is and how it is run: frozen records with Hugging Face's field names.

``ModelConfig`` holds only what changes the result. The build derives it from a foreign
``config.json`` through ``specter_build.architectures``; the runtime reads it from the manifest.
Nothing here is mutated after construction; derived values are properties.

Called by: manifest, model, session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["bfloat16", "float16", "float32"]
QKNorm = Literal["none", "head", "full"]

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One mixture-of-experts decoder.

    Attributes not found under the same name in Hugging Face configs:
        qk_norm: RMS norm of queries and keys: ``none``, one per ``head``, or over the ``full``
            projection.
        dense_layers: layers whose MLP is dense (``intermediate_size``) instead of routed.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: QKNorm
    clip_qkv: float | None
    intermediate_size: int | None
    dense_layers: tuple[int, ...]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.dense_layers)

    @property
    def expert_num_weights(self) -> int:
        """Weights of one routed expert: gate, up and down projection."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token adds to the KV cache over all layers."""
        per_layer = 2 * self.num_key_value_heads * self.head_dim * DTYPE_BYTES[dtype]
        return per_layer * self.num_hidden_layers


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How a token is drawn. Temperature 0 is greedy; 0 for ``top_k`` and 1 for ``top_p`` is off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """How a bundle is run on this machine.

    Attributes:
        memory_budget_bytes: everything resident in fast memory, draft included; ``None`` takes
            the plan's.
        num_draft_tokens: tokens drafted per window; ``None`` takes the plan's; 0 is plain decoding.
        dtype: precision of activations, dense weights and KV cache; ``None`` takes the
            checkpoint's. Expert shards keep the checkpoint's bits in any case.
        max_context_tokens: room in the KV cache; ``None`` takes the plan's.
        num_io_threads: threads that read expert shards.
        num_threads: threads of torch's operators; ``None`` leaves torch's default.
        prefetch: whether the draft's routing moves experts ahead of verification.
        load_timeout_seconds: how long a prefetch in flight may keep verification waiting before
            the expert is read again in the foreground.
    """

    memory_budget_bytes: int | None = None
    num_draft_tokens: int | None = None
    dtype: DType | None = None
    max_context_tokens: int | None = None
    num_io_threads: int = 2
    num_threads: int | None = None
    prefetch: bool = True
    load_timeout_seconds: float = 10.0
    verify_hashes: bool = False


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """When generation stops: at any of ``eos_token_ids`` or after ``max_new_tokens`` (>= 1)."""

    max_new_tokens: int = 128
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
