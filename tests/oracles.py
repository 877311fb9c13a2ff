"""Slow, obvious re-implementations in float64, written from papers; they import nothing of ours.

Shapes: ``T`` rows, ``S`` positions seen, ``H`` query heads, ``G`` key/value heads, ``C`` width of a
head, ``D`` hidden size, ``E`` experts, ``K`` experts per token, ``V`` vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Distribution = Callable[[tuple[int, ...]], Sequence[float]]
"""Tokens drawn so far -> probability of each next token."""

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding to nearest: half the gap between 1 and its successor."""


def gamma(num_roundings: float, dtype: str = "float32") -> float:
    """Relative error of a product of ``num_roundings`` factors (1 + d), each |d| <= unit roundoff.

    A sum of n products in any order is off by at most gamma(n) times the sum of their magnitudes.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1 and equation 3.4.
    """
    product = num_roundings * UNIT_ROUNDOFF[dtype]
    return product / (1 - product)


def array(tensor: Any) -> Array:
    """A tensor's values, widened without loss."""
    return tensor.double().numpy()


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def rms_norm(hidden: Array, weight: Array, eps: float) -> Array:
    """arXiv 1910.07467, equation 4, with eps inside the root."""
    return hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(heads: Array, positions: Sequence[int], theta: float) -> Array:
    """arXiv 2104.09864, equation 34, pairs being (i, i + C/2): ``[T, heads, C]``."""
    half = heads.shape[-1] // 2
    out = np.empty_like(heads)
    for row, position in enumerate(positions):
        for i in range(half):
            angle = position * theta ** (-i / half)
            low, high = heads[row, :, i], heads[row, :, i + half]
            out[row, :, i] = low * math.cos(angle) - high * math.sin(angle)
            out[row, :, i + half] = high * math.cos(angle) + low * math.sin(angle)
    return out


def attention(queries: Array, keys: Array, values: Array) -> Array:
    """Causal attention of the last T of S positions; head h reads group h // (H / G): [T, H * C].

    Sources: arXiv 1706.03762, equation 1; arXiv 2305.13245, section 2.2.
    """
    (num_new, num_heads, width), (num_seen, num_groups, _) = queries.shape, keys.shape
    out = np.zeros((num_new, num_heads, width))
    for row, head in np.ndindex(num_new, num_heads):
        visible = num_seen - num_new + row + 1
        group = head // (num_heads // num_groups)
        scores = keys[:visible, group] @ queries[row, head] / math.sqrt(width)
        out[row, head] = softmax(scores) @ values[:visible, group]
    return out.reshape(num_new, -1)


def swiglu(hidden: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """arXiv 2002.05202, equation 6, without biases."""
    gate = hidden @ gate_proj.T
    return (gate / (1 + np.exp(-gate)) * (hidden @ up_proj.T)) @ down_proj.T


def swiglu_error(
    hidden: Array, gate_proj: Array, up_proj: Array, down_proj: Array, dtype: str = "float32"
) -> Array:
    """A bound on the error of ``swiglu`` whose results are rounded to ``dtype``, to first order.

    Products are summed in float32 in any case: gamma(n) times the product of magnitudes; what is
    stored is rounded once. As |silu'| < 1.1, an error passes the activation at most 1.1 times as
    large, and evaluating it takes no more than 4 roundings (exp, 1 + x, quotient, its own).
    """
    rounding = gamma(1, dtype)

    def product(left: Array, left_error: Array | float, right: Array) -> Array:
        sizes = np.abs(left) @ np.abs(right).T
        error: Array = left_error @ np.abs(right).T if isinstance(left_error, np.ndarray) else 0.0
        return error + gamma(left.shape[-1]) * sizes + rounding * np.abs(left @ right.T)

    gate, up = hidden @ gate_proj.T, hidden @ up_proj.T
    activated = gate / (1 + np.exp(-gate))
    activated_error = 1.1 * product(hidden, 0.0, gate_proj) + gamma(4, dtype) * np.abs(activated)
    inner = activated * up
    inner_error = np.abs(activated) * product(hidden, 0.0, up_proj)
    inner_error += np.abs(up) * activated_error + rounding * np.abs(inner)
    return product(inner, inner_error, down_proj)


def route(
    hidden: Array, router: Array, num_experts_per_tok: int, norm_topk_prob: bool
) -> tuple[npt.NDArray[np.int64], Array]:
    """Softmax over all experts, then the K most probable, renormalized or not: two ``[T, K]``."""
    probabilities = softmax(hidden @ router.T)
    selected = np.argsort(-probabilities, axis=-1, kind="stable")[:, :num_experts_per_tok]
    weights = np.take_along_axis(probabilities, selected, axis=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return selected, weights


def mix_experts(
    hidden: Array,
    selected: npt.NDArray[np.int64],
    weights: Array,
    experts: Sequence[tuple[Array, Array, Array]],
    left_out: Collection[int] = (),
    expert_function: Callable[..., Array] = swiglu,
) -> Array:
    """Each row's weighted sum of its experts.

    A row's weights over experts that are not left out are scaled to the sum of all its weights.
    """
    out = np.zeros_like(hidden)
    for row in range(hidden.shape[0]):
        chosen = list(zip(selected[row].tolist(), weights[row].tolist(), strict=True))
        served = [(expert, weight) for expert, weight in chosen if expert not in left_out]
        served_sum = sum(weight for _, weight in served)
        for expert, weight in served:
            output = expert_function(hidden[row : row + 1], *experts[expert])[0]
            out[row] += weight * weights[row].sum() / served_sum * output
    return out


def decoder_logits(
    token_ids: Sequence[int], tensors: Mapping[str, Array], config: Mapping[str, Any]
) -> Array:
    """Logits ``[T, V]`` of a whole decoder over tensors named as in transformers' memory.

    Queries and keys are normed over all heads or head by head, as the norm's width says; a layer
    without router is dense.
    """
    width, eps = config["head_dim"], config["rms_norm_eps"]
    hidden = tensors["model.embed_tokens.weight"][list(token_ids)]
    for layer in range(config["num_hidden_layers"]):
        t = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = rms_norm(hidden, t["input_layernorm.weight"], eps)

        def heads(name: str, t: Mapping[str, Array] = t, normed: Array = normed) -> Array:
            out = normed @ t[f"self_attn.{name}_proj.weight"].T
            out = out + t.get(f"self_attn.{name}_proj.bias", 0.0)
            norm = t.get(f"self_attn.{name}_norm.weight")
            if norm is not None and len(norm) != width:
                out = rms_norm(out, norm, eps)
            if config.get("clip_qkv") is not None:
                out = np.clip(out, -config["clip_qkv"], config["clip_qkv"])
            out = out.reshape(len(token_ids), -1, width)
            return rms_norm(out, norm, eps) if norm is not None and len(norm) == width else out

        positions, theta = range(len(token_ids)), config["rope_theta"]
        queries, keys = (rotate(heads(name), positions, theta) for name in "qk")
        attended = attention(queries, keys, heads("v"))
        hidden = hidden + attended @ t["self_attn.o_proj.weight"].T
        hidden = hidden + t.get("self_attn.o_proj.bias", 0.0)
        normed = rms_norm(hidden, t["post_attention_layernorm.weight"], eps)
        if "mlp.gate.weight" in t:
            routing = route(
                normed,
                t["mlp.gate.weight"],
                config["num_experts_per_tok"],
                config["norm_topk_prob"],
            )
            fused, down = t["mlp.experts.gate_up_proj"], t["mlp.experts.down_proj"]
            experts = [(*np.split(fused[e], 2), down[e]) for e in range(len(fused))]
            hidden = hidden + mix_experts(normed, *routing, experts)
        else:
            dense = (t[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            hidden = hidden + swiglu(normed, *dense)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return rms_norm(hidden, tensors["model.norm.weight"], eps) @ head.T


def filtered_probabilities(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float
) -> list[float]:
    """Temperature, then top-k (ties at its edge kept), then top-p, of one row.

    Top-p: the most probable tokens, until their sum reaches ``top_p`` (arXiv 1904.09751, section
    3.1); the lower id first among equals.
    """
    scaled = [logit / temperature for logit in logits]
    kept = set(range(len(logits)))
    if 0 < top_k < len(logits):
        edge = sorted(scaled, reverse=True)[top_k - 1]
        kept = {i for i in kept if scaled[i] >= edge}
    if top_p < 1:
        probabilities = _normalized(scaled, kept)
        ranked = sorted(kept, key=lambda i: (-scaled[i], i))
        kept, mass = set(), 0.0
        for token in ranked:
            kept.add(token)
            mass += probabilities[token]
            if mass >= top_p:
                break
    return _normalized(scaled, kept)


def _normalized(scaled: Sequence[float], kept: Collection[int]) -> list[float]:
    largest = max(scaled[i] for i in kept)
    powers = [math.exp(x - largest) if i in kept else 0.0 for i, x in enumerate(scaled)]
    total = math.fsum(powers)
    return [power / total for power in powers]


def top_p_margin(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> float:
    """Distance of ``top_p`` from the nearest sum of most probable tokens, where rounding rules."""
    probabilities = sorted(filtered_probabilities(logits, temperature, top_k, 1.0), reverse=True)
    return min(abs(mass - top_p) for mass in itertools.accumulate(probabilities))


def speculative_outcomes(
    draft: Distribution, target: Distribution, vocab_size: int, num_draft_tokens: int
) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of committed tokens of one window, by enumeration.

    For every drafted sequence: accept token after token with probability min(1, target / draft);
    at the first rejection draw from the positive part of target - draft, after the last acceptance
    from the target. Source: arXiv 2211.17192, algorithm 1.
    """
    outcomes: dict[tuple[int, ...], float] = {}

    def add(tokens: tuple[int, ...], probability: float) -> None:
        if probability > 0:
            outcomes[tokens] = outcomes.get(tokens, 0.0) + probability

    for drafted in itertools.product(range(vocab_size), repeat=num_draft_tokens):
        reach = math.prod(draft(drafted[:i])[token] for i, token in enumerate(drafted))
        for i, token in enumerate(drafted):
            if reach == 0:
                break
            row, draft_row = target(drafted[:i]), draft(drafted[:i])
            accept = min(1.0, row[token] / draft_row[token])
            excess = [max(0.0, t - d) for t, d in zip(row, draft_row, strict=True)]
            for recovered, part in enumerate(excess):
                if part:
                    share = part / math.fsum(excess)
                    add((*drafted[:i], recovered), reach * (1 - accept) * share)
            reach *= accept
        for bonus, probability in enumerate(target(drafted)):
            add((*drafted, bonus), reach * probability)
    return outcomes


def continued(
    outcomes: dict[tuple[int, ...], float], target: Distribution, vocab_size: int, length: int
) -> dict[tuple[int, ...], float]:
    """The same outcomes, each continued by the target's own sampling to ``length`` tokens."""
    result: dict[tuple[int, ...], float] = {}
    for tokens, probability in outcomes.items():
        for tail in itertools.product(range(vocab_size), repeat=length - len(tokens)):
            whole = (*tokens, *tail)
            tail_probability = sequence_probability(target, whole, len(tokens))
            result[whole] = result.get(whole, 0.0) + probability * tail_probability
    return result


def sequence_probability(target: Distribution, tokens: tuple[int, ...], start: int = 0) -> float:
    """Probability that the target draws ``tokens[start:]`` after ``tokens[:start]``."""
    return math.prod(target(tokens[:i])[tokens[i]] for i in range(start, len(tokens)))


def gptq_targets(
    weight: Array,
    hessian: Array,
    codes: Array,
    scales: Array,
    zero_points: Array,
    dampening: float,
) -> tuple[Array, Array, Array]:
    """What GPTQ rounds when it has rounded as in ``codes`` before: ``[N, M]``, in units of a code.

    One weight of a row after the other, in descending order of the Hessian's diagonal. The error of
    the weight just rounded is made up for by all that are left (set F), by equation 2 of arXiv
    2210.17323 with the inverse taken anew for every F: delta = -(w_q - quant(w_q)) / [H_F^-1]_qq
    times column q of H_F^-1. The mean of the diagonal times ``dampening`` is added to it first.

    Args:
        weight: ``[N, M]``.
        hessian: ``[M, M]``.
        codes: ``[N, M]``.
        scales: of each weight's group, ``[N, M]``.
        zero_points: likewise.
        dampening: see above.

    Returns:
        The values; the sums of magnitudes of all that was added to the weights they come from; and
        the magnitudes of these weights and their zero points.
    """
    damped = hessian + np.eye(len(hessian)) * dampening * np.diag(hessian).mean()
    rest, updates = weight.copy(), np.zeros_like(weight)
    targets = np.empty_like(weight)
    order = np.argsort(-np.diag(hessian), kind="stable")
    for step, column in enumerate(order):
        left = order[step:]
        targets[:, column] = rest[:, column] / scales[:, column] + zero_points[:, column]
        quantized = scales[:, column] * (codes[:, column] - zero_points[:, column])
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        error = (rest[:, column] - quantized) / inverse[0, 0]
        rest[:, left] -= np.outer(error, inverse[:, 0])
        updates[:, left[1:]] += np.abs(np.outer(error, inverse[1:, 0]))
    return targets, updates / np.abs(scales), np.abs(weight / scales) + np.abs(zero_points)


def e4m3(code: int) -> float:
    """The number that a byte is in fp8 e4m3, from its bits. Source: arXiv 2209.05433, table 1."""
    sign, exponent, fraction = -1.0 if code >> 7 else 1.0, code >> 3 & 0xF, code & 0x7
    if (exponent, fraction) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def e2m1(code: int) -> float:
    """The number that four bits are in fp4 e2m1. Source: OCP Microscaling Formats v1.0, 5.3.3."""
    sign, exponent, fraction = -1.0 if code >> 3 else 1.0, code >> 1 & 0x3, code & 0x1
    if exponent == 0:
        return sign * fraction / 2
    return sign * (1 + fraction / 2) * 2.0 ** (exponent - 1)


def e8m0(code: int) -> float:
    """The power of two that a byte is as a block's scale. Source: ibid., 5.4.1."""
    return 2.0 ** (code - 127)
