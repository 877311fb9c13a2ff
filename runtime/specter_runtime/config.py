"""What a model is and how it is run: frozen records with Hugging Face's field names.

``ModelConfig`` holds only what changes the result: what is computed and, for fp8, which weights the
stored codes stand for. The build derives it from a foreign ``config.json`` through
``specter_build.architectures``; the runtime reads it from the manifest. Nothing here is mutated
after construction; derived values are properties.

Called by: manifest, model, session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["bfloat16", "float16", "float32"]
ExpertDType = Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "mxfp4"]
Encoding = Literal["raw", "packed"]
Eviction = Literal["reuse", "lru"]
PredictorKind = Literal["fitted", "router", "none"]
QKNorm = Literal["none", "head", "full"]
Scoring = Literal["softmax", "sigmoid", "softmax_topk", "sparsemixer"]

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ExpertNumbers:
    """How a checkpoint, and so a shard, stores the numbers of routed experts.

    Attributes:
        dtype: of the matrices.
        scale_dtype: of the block scales of fp8 matrices; None for the others (the scales of mxfp4
            are exponents in bytes).
        bias_dtype: of the biases; None in families without.
    """

    dtype: ExpertDType
    scale_dtype: DType | None = None
    bias_dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, reduced to what the runtime needs of any scaling.

    Attributes:
        inverse_frequencies: one a pair of rotated dimensions, float32 values.
        attention_factor: multiplies cosines and sines (YaRN, LongRoPE).
        interleaved: pairs are neighbours (2i, 2i + 1) instead of (i, i + half).
    """

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """From router logits to chosen experts and their weights.

    Attributes:
        scoring: ``softmax`` over all experts, ``sigmoid`` of each, ``softmax_topk`` over the chosen
            ones only, or ``sparsemixer`` (arXiv 2409.12136) with ``jitter_eps``.
        norm_topk_prob: whether the chosen weights are scaled to sum to 1 ...
        norm_min: ... dividing by no less than this.
        routed_scaling_factor: multiplies the weights last.
        correction_bias: a bias that is added for the choice only, stored as ``[E]`` (``flat``) or
            ``[1, E]`` (``row``).
        bias: whether the router has a bias in its logits.
        n_group, topk_group: of ``n_group`` groups of experts ``topk_group`` may be chosen from.
        group_score: a group counts as its best expert (``max``) or its best two (``top2``).
    """

    scoring: Scoring = "softmax"
    norm_topk_prob: bool = False
    norm_min: float = 0.0
    routed_scaling_factor: float = 1.0
    correction_bias: Literal["none", "flat", "row"] = "none"
    bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["max", "top2"] = "top2"
    jitter_eps: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434): a latent and a rotated key are cached."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One mixture-of-experts decoder.

    Attributes not found under the same name in Hugging Face configs:
        attention_scaling: multiplies query-key products.
        attention_bias, attention_out_bias: of the q, k, v and of the output projection.
        qk_norm: RMS norm of queries and keys: ``none``, one per ``head``, or over the ``full``
            projection; before rotation unless ``qk_norm_after_rope``.
        attention_sinks: each head has a logit that takes part in the softmax and has no value.
        sliding_layers: layers that see ``sliding_window`` positions only.
        latent: set for latent attention; then there is one key/value head.
        norm: root-mean-square norm, or layer norm with a bias.
        swiglu_limit: set for the clamped SwiGLU of gpt-oss; None is silu(gate) * up.
        expert_bias: routed experts have biases.
        shared_intermediate_size: width of the shared expert; 0 if there is none.
        shared_gate: the shared expert's output is gated by a sigmoid.
        dense_layers: layers whose MLP is dense (``intermediate_size``) instead of routed.
        fp8_block_size: rows and columns that share a scale in those matrices that are stored in
            fp8: all, some or none of them.
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
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_scaling: float
    rope: RopeConfig
    routing: RoutingConfig
    latent: LatentConfig | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: QKNorm = "none"
    qk_norm_after_rope: bool = False
    clip_qkv: float | None = None
    attention_sinks: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    norm: Literal["rms", "layer"] = "rms"
    swiglu_limit: float | None = None
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    lm_head_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    intermediate_size: int | None = None
    dense_layers: tuple[int, ...] = ()
    fp8_block_size: tuple[int, int] | None = None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.dense_layers)

    @property
    def expert_num_weights(self) -> int:
        """Weights of one routed expert's three matrices."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads and width of what the KV cache holds as keys: ``[G, C]``."""
        if self.latent is None:
            return self.num_key_value_heads, self.head_dim
        return 1, self.latent.kv_lora_rank + self.latent.qk_rope_head_dim

    @property
    def value_width(self) -> int:
        """Width of a head of values in the KV cache; 0 when values are a part of the keys."""
        return self.head_dim if self.latent is None else 0

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token adds to the KV cache over all layers."""
        num_heads, width = self.key_shape
        per_layer = num_heads * (width + self.value_width) * DTYPE_BYTES[dtype]
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
        num_draft_tokens: tokens drafted per window; 0 is plain decoding; ``None`` takes the plan's
            or, when decoding greedily, lets the governor choose.
        dtype: precision of activations, dense weights and KV cache; ``None`` takes the
            checkpoint's. Expert shards keep the checkpoint's bits in any case.
        max_context_tokens: room in the KV cache; ``None`` takes the plan's.
        num_io_threads: threads that read expert shards.
        num_threads: threads of torch's operators; ``None`` leaves torch's default.
        prefetch: whether the draft's routing moves experts ahead of verification.
        predictor: what moves experts ahead where nothing is drafted: ``fitted``, what the build
            has fitted (nothing if the bundle holds none), ``router``, the next layer's router asked
            a layer too early, or ``none``; ``None`` takes the plan's.
        governor: whether the number of draft tokens, where it is left open, is decided by measured
            time; if not, the plan's is taken.
        draft_stop: whether a greedy draft ends where a token is not worth verifying.
        bound_by_slots: whether fewer tokens are drafted than asked for where the experts of a
            window would outgrow the slots.
        eviction: what gives way in a full cache: ``reuse``, what the routers have wanted least of
            late, or ``lru``, what has not been used for longest; ``None`` takes the plan's.
        overlap: whether experts are computed as they arrive; if not, all of a layer are awaited.
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
    predictor: PredictorKind | None = None
    governor: bool = True
    draft_stop: bool = True
    bound_by_slots: bool = True
    eviction: Eviction | None = None
    overlap: bool = True
    load_timeout_seconds: float = 10.0
    verify_hashes: bool = False


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """When generation stops: at any of ``eos_token_ids`` or after ``max_new_tokens`` (>= 1)."""

    max_new_tokens: int = 128
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
