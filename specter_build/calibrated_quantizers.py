"""GPTQ and AWQ for one expert, by llm-compressor's own code.

**GPTQ.** llm-compressor's ``quantize_weight`` takes a weight, a Hessian and the grid of every group
and returns the quantized weight: nothing else of the model has to be there. The grids handed in are
``quantizers.choose_grid``'s, with scales that bfloat16 holds exactly, so codes are chosen for the
very scales that are stored; that this is so is checked on every result. Columns are taken in
descending order of the Hessian's diagonal ("activation ordering", llm-compressor's default); groups
stay those of the columns as stored.

**AWQ** multiplies input channels of a weight by s and divides what feeds them by s, so that
channels with large activations lose less to rounding (arXiv 2306.00978, section 3.2). The division
has to be folded into whatever comes before:

- *down_proj*: its inputs are products with rows of up_proj. Columns of down_proj x s and rows of
  up_proj / s are the same expert, exactly. This is what is done.
- *gate_proj and up_proj*: their inputs come from a norm that the router and all other experts of
  the layer share. Nothing of one expert's own could take the factor up, so it is **not** done.
- The clamped activation of gpt-oss is not linear in up_proj: nothing is exact, AWQ is refused.

The search for s (20 candidates, between no scaling and mean activation over mean weight, judged by
the output error of the quantized down_proj) is ``AWQModifier``'s on a pair of linear layers that
hold this one expert. The modifier's event loop cannot run without an accelerator (it pins memory),
so its search is called directly; llm-compressor is therefore held to one minor version.

Everything runs on the CPU: llm-compressor's GPU kernel does not take the negative scales of a
symmetric grid. llm-compressor is imported when it is needed, by ``load``.

Called by: quantize_draft.  Next: quantizers.
"""

from __future__ import annotations

import contextlib
import io
import sys

import torch

from specter_build.quantizers import Grid, GridFormat, choose_grid, pack
from specter_runtime.errors import RecipeError
from specter_runtime.packed import PackedTensor, dequantize

PACKAGES = ("llmcompressor", "compressed-tensors")
"""Distributions whose versions shape the result."""

DAMPENING = 0.01
"""Share of the Hessian's mean diagonal that is added to it. Source: arXiv 2210.17323, section 4."""


def load(method: str) -> None:
    """Import what ``method`` needs; takes seconds the first time.

    Raises:
        RecipeError: llm-compressor is not installed, or not in a version that has what is called.
    """
    try:
        # llm-compressor logs to standard output, which is the caller's: there is no accelerator, it
        # says at each call. While it is imported that goes to standard error, then nowhere.
        with contextlib.redirect_stdout(sys.stderr):
            import llmcompressor.modifiers.gptq.gptq_quantize
            import llmcompressor.modifiers.transform.awq

            llmcompressor.configure_logger(llmcompressor.LoggerConfig(disabled=True))
    except ImportError as exc:
        raise RecipeError(
            f"draft.method: {method} needs llm-compressor, which cannot be imported ({exc}); "
            "install it with: pip install 'specter-moe[quantize]', or use method: rtn"
        ) from exc


def hessian(rows: torch.Tensor) -> torch.Tensor:
    """Sum over rows ``[n, M]`` of their outer products: float32 ``[M, M]``.

    Half of the Hessian of the squared output error of any weight that these rows are inputs of
    (arXiv 2210.17323, section 3); a factor does not change what GPTQ does. A row multiplied by its
    routing weight counts as much as it does in the layer's output.
    """
    wide = rows.to(torch.float32)
    return wide.T @ wide


def quantize_gptq(
    weight: torch.Tensor,  # [N, M]
    hessian: torch.Tensor,  # [M, M]
    form: GridFormat,
) -> PackedTensor | None:
    """Quantize a weight so that the output error over the Hessian's rows stays small.

    A column whose input was always zero is rounded to nearest.

    Returns:
        None if the Hessian cannot be factorized.

    Raises:
        ValueError: weight, Hessian or result holds NaN or infinity.
    """
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    grid = choose_grid(weight, form)
    if not torch.isfinite(hessian).all():
        raise ValueError("the Hessian of its calibration tokens holds NaN or infinity")
    settings = QuantizationArgs(
        num_bits=form.bits,
        type="int",
        symmetric=form.symmetric,
        strategy="group",
        group_size=form.group_size,
        actorder="static",
    )
    middle = 1 << (form.bits - 1)  # llm-compressor's codes and zero points are signed
    quantized, _, failed = quantize_weight(
        weight.to(torch.float32, copy=True).unsqueeze(0),
        _alive(hessian).unsqueeze(0),
        grid.divisors.unsqueeze(0),
        (grid.zero_points - middle).unsqueeze(0),
        None,
        settings,
        percdamp=DAMPENING,
    )
    return None if failed.any() else _to_packed(quantized[0], grid, form)


def _alive(hessian: torch.Tensor) -> torch.Tensor:
    """A copy in which inputs that were always zero have a diagonal like the others.

    ``quantize_weight`` sets the weights of such inputs to zero; other texts may need them.
    """
    copy = hessian.clone()
    diagonal = copy.diagonal()
    diagonal[diagonal == 0] = diagonal.mean()
    return copy


def _to_packed(quantized: torch.Tensor, grid: Grid, form: GridFormat) -> PackedTensor:
    """The codes that the quantized weight ``[N, M]`` stands for; exact, or refused."""
    num_columns = quantized.shape[1]
    if not torch.isfinite(quantized).all():
        raise ValueError("the quantized weight holds NaN or infinity")
    divisors, zero_points = (
        part.repeat_interleave(form.group_size, dim=1)[:, :num_columns]
        for part in (grid.divisors, grid.zero_points)
    )
    codes = (quantized / divisors + zero_points).round()
    stored = Grid(grid.divisors.to(torch.bfloat16), grid.zero_points)
    packed = pack(codes, stored, form)
    if not torch.equal(dequantize(packed, torch.float32), quantized):
        raise ValueError("llm-compressor chose values that are not on the grid it was given")
    return packed


def search_awq_scales(
    up_proj: torch.Tensor,  # [I, D]
    down_proj: torch.Tensor,  # [D, I]
    inner: torch.Tensor,  # [n, I]
    form: GridFormat,
) -> torch.Tensor:
    """Factors s, float32 ``[I]``: quantize down_proj x s and up_proj / s instead.

    The search's own grids span each group's largest magnitude evenly to both sides, whatever
    ``form.clip`` says; they only rank candidates.

    Args:
        up_proj: not changed; the search needs to know that it exists.
        down_proj: not changed.
        inner: float32 inputs of down_proj, each times its routing weight.
        form: of the stand-in; its group size must divide I.

    Raises:
        ValueError: down_proj or the rows hold NaN or infinity.
    """
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.isfinite(down_proj).all() or not torch.isfinite(inner).all():
        raise ValueError("down_proj or its calibration inputs hold NaN or infinity")
    smooth, balance = _linear(up_proj), _linear(down_proj)
    _attach_format(balance, form)
    mapping = ResolvedMapping(
        "up_proj", smooth, [balance], ["down_proj"], parent=balance, parent_name="down_proj"
    )
    modifier = AWQModifier()
    cache = IntermediatesCache(None, None)
    cache.append({"input": inner})
    modifier._parent_args_cache[balance] = cache
    sums = [inner.abs().sum(dim=0), torch.tensor(len(inner))]
    modifier._smooth_activation_stats["up_proj"] = sums
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar for every expert
        outputs = modifier._run_samples(balance)
        weights = {balance: balance.weight.clone()}
        scales: torch.Tensor = modifier._compute_best_scale(mapping, outputs, weights)
    return scales.to(torch.float32)


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    """A linear layer on a float32 copy of a weight."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    wide = weight.to(torch.float32, copy=True)
    layer.weight = torch.nn.Parameter(wide, requires_grad=False)
    return layer


def _attach_format(layer: torch.nn.Linear, form: GridFormat) -> None:
    """Tell the search how a layer will be quantized; its forward pass stays as it is."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        disable_quantization,
        initialize_module_for_quantization,
    )

    settings = QuantizationArgs(
        num_bits=form.bits,
        type="int",
        symmetric=form.symmetric,
        strategy="group",
        group_size=form.group_size,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    initialize_module_for_quantization(layer, scheme)
    disable_quantization(layer)
