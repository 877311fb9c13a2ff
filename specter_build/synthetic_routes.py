"""Routes of a model that is known by its shape and by what is published about its routing.

Each expert of a layer has a logit that is part fixed and part wandering: a standard normal variable
that stays, and a stationary process of first order that forgets at a given pace. Each token takes
the experts of the largest logits. Two numbers thus say how a model routes, the share of the
variance that stays and the correlation from one token to the next; both are found by a search over
a grid for those whose routes come nearest to what is published: hit rates of LRU caches by slots,
unions of experts by window, the share of the previous token's experts.

Called by: benchmarks.  Next: fidelity, specter_runtime.simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from specter_build.fidelity import lru_hit_curve, one_hot, window_union
from specter_runtime.simulator import Routes

SPREAD = 1.5
"""Standard deviation of a logit: only probabilities depend on it, choices do not."""
SHARES = tuple(i / 20 for i in range(20))
CORRELATIONS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
NUM_FITTED_TOKENS, NUM_FITTED_LAYERS = 512, 4
NUM_BURN_IN = 64
"""Tokens at the start that do not count: caches are empty."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RoutingStatistics:
    """What is published of a model's routing; empty where nothing is.

    Attributes:
        lru_hits: slots a layer -> hit rate of an LRU cache, token by token.
        unions: tokens in a window -> mean number of different experts.
        repeated: share of a token's experts that the token before used, too; None: not known.
        hottest_hits: share of all layers' experts, the most used -> share of the demands for them.
    """

    lru_hits: Mapping[int, float] = field(default_factory=dict)
    unions: Mapping[int, float] = field(default_factory=dict)
    repeated: float | None = None
    hottest_hits: Mapping[float, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is published."""
        return self == RoutingStatistics()


@dataclass(frozen=True, slots=True)
class RoutingModel:
    """How routes are made.

    Attributes:
        num_experts: of a layer.
        num_chosen: experts a token.
        fixed_share: of a logit's variance, what stays.
        correlation: of the rest, from one token to the next.
    """

    num_experts: int
    num_chosen: int
    fixed_share: float
    correlation: float

    def logits(self, num_tokens: int, num_layers: int, seed: int) -> Logits:
        """Router logits, ``[T, L, E]``."""
        rng = np.random.default_rng(seed)
        shape = num_layers, self.num_experts
        fixed = rng.standard_normal(shape)
        wandering = np.empty((num_tokens, *shape))
        wandering[0] = rng.standard_normal(shape)
        step = np.sqrt(1 - self.correlation**2)
        for i in range(1, num_tokens):
            wandering[i] = self.correlation * wandering[i - 1] + step * rng.standard_normal(shape)
        mixed = np.sqrt(self.fixed_share) * fixed + np.sqrt(1 - self.fixed_share) * wandering
        logits: Logits = (SPREAD * mixed).astype(np.float32)
        return logits

    def routes(
        self,
        num_tokens: int,
        num_prompt_tokens: int,
        num_layers: int,
        *,
        recall: float = 1.0,
        acceptance: float = 1.0,
        seed: int = 0,
    ) -> Routes:
        """A text, with a draft of it.

        Args:
            num_tokens: of prompt and what follows.
            num_prompt_tokens: of the prompt.
            num_layers: with routed experts.
            recall: share of the target's experts that the draft chooses, too.
            acceptance: share of the draft's tokens that are the target's.
            seed: of everything.
        """
        rng = np.random.default_rng(seed + 1)
        logits = self.logits(num_tokens, num_layers, seed)
        selected = choose(logits, self.num_chosen)
        # Of what is wrong in a draft's choice, what comes instead is anything but the right ones.
        others = rng.random(logits.shape)
        np.put_along_axis(others, selected, -1.0, axis=-1)
        wrong = choose(others, self.num_chosen)
        drafted = np.where(rng.random(selected.shape) < recall, selected, wrong)
        agrees = rng.random(num_tokens) < acceptance
        return Routes(
            num_prompt_tokens=num_prompt_tokens,
            selected=torch.from_numpy(selected),
            probs=torch.from_numpy(logits).softmax(-1),
            drafted=torch.from_numpy(drafted),
            agrees=agrees,
            confidence=np.where(agrees, 1.0, 0.5).astype(np.float32),
        )


def choose(logits: npt.NDArray[np.floating], num_chosen: int) -> npt.NDArray[np.int64]:
    """The experts of the largest logits: ``[..., K]``."""
    return np.argpartition(-logits, num_chosen - 1, axis=-1)[..., :num_chosen].astype(np.int64)


def fit(
    num_experts: int, num_chosen: int, published: RoutingStatistics
) -> tuple[RoutingModel, float]:
    """The model nearest to what is published, and the root mean square of what is left.

    Hit rates and shares count as they are, unions as shares of a layer's experts. Without anything
    published it is uniform routing, which is what one assumes who knows nothing.
    """
    best = RoutingModel(num_experts, num_chosen, 0.0, 0.0), 0.0
    if published.is_empty:
        return best
    least = np.inf
    for share, correlation in product(SHARES, CORRELATIONS):
        model = RoutingModel(num_experts, num_chosen, share, correlation)
        error = misfit(model, published)
        if error < least:
            best, least = (model, error), error
    return best


def misfit(model: RoutingModel, published: RoutingStatistics) -> float:
    """Root mean square of the differences between a model's statistics and the published ones."""
    logits = model.logits(NUM_FITTED_TOKENS, NUM_FITTED_LAYERS, seed=0)
    selected = choose(logits, model.num_chosen)
    found = measure(selected, model.num_experts, published)
    differences = [
        *(found.lru_hits[slots] - hits for slots, hits in published.lru_hits.items()),
        *(
            (found.unions[window] - union) / model.num_experts
            for window, union in published.unions.items()
        ),
        *(found.hottest_hits[share] - hits for share, hits in published.hottest_hits.items()),
    ]
    if published.repeated is not None and found.repeated is not None:
        differences.append(found.repeated - published.repeated)
    return float(np.sqrt(np.mean(np.square(differences))))


def measure(
    selected: npt.NDArray[np.int64], num_experts: int, like: RoutingStatistics
) -> RoutingStatistics:
    """The same statistics of routes ``[T, L, K]``, means of the layers.

    The hottest are those of the first half, their demands those of the second.
    """
    routes = torch.from_numpy(selected).transpose(0, 1)  # layers take the place of sequences
    hot = one_hot(routes, num_experts)  # [L, T, E]
    curve = lru_hit_curve(routes, num_experts, NUM_BURN_IN) if like.lru_hits else []
    unions = {
        window: float(window_union(hot, window).sum(-1).to(torch.float64).mean())
        for window in like.unions
    }
    repeated = float((hot[:, 1:] & hot[:, :-1]).sum(-1).to(torch.float64).mean())
    early, late = (half.sum(1).flatten() for half in torch.tensor_split(hot, 2, dim=1))
    hottest = early.argsort(descending=True, stable=True)
    return RoutingStatistics(
        {slots: curve[slots - 1] for slots in like.lru_hits},
        unions,
        repeated / selected.shape[2],
        {
            share: float(late[hottest[: round(share * len(late))]].sum() / late.sum())
            for share in like.hottest_hits
        },
    )
