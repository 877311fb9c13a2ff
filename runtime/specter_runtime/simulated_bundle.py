"""A bundle on a machine that need not be there: its shapes, its routes, the policies worth asking.

Called by: measure_hardware, specter_build.  Next: simulator, session (for dividing memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specter_runtime.bundle_loader import Bundle, load_bundle
from specter_runtime.config import DTYPE_BYTES, DType, ModelConfig, RuntimeConfig
from specter_runtime.errors import BundleError, CapacityError
from specter_runtime.expert_store import ShardExpertStore
from specter_runtime.experts import ExpertKey, expert_nbytes
from specter_runtime.hardware import Hardware
from specter_runtime.manifest import read_json
from specter_runtime.memory import draft_nbytes
from specter_runtime.roles import FLOAT32_ROLES, dense_shapes
from specter_runtime.session import bundle_memory
from specter_runtime.shards import align_up, read_header, read_tensors
from specter_runtime.simulator import Policy, Routes, Shape, Simulated, simulate

ROUTES_FILE = "routes.safetensors"
REPORT_FILE = "report.json"
PROMPT_SHARE = 4
"""A sequence's first quarter counts as the prompt."""

MAX_SEQUENCES, MAX_TOKENS = 4, 160
"""Of the recorded routes, what is replayed: enough for a rate, little enough to wait for."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the table: how it is run, and how it divides the memory.

    Attributes:
        policy: for the simulator.
        config: for the division of memory.
        is_raw: whether shards and slots hold the checkpoint's own bytes, whatever the bundle has.
    """

    policy: Policy
    config: RuntimeConfig
    is_raw: bool = False


class SimulatedBundle:
    """What of a bundle the simulator needs, read once."""

    def __init__(self, root: Path) -> None:
        """Read it.

        Raises:
            BundleError: it is damaged, or older than what is replayed.
        """
        self._bundle = load_bundle(root)
        self._report = read_json(root / REPORT_FILE)
        self.texts = read_routes(root / ROUTES_FILE)
        self.hottest_first = [ExpertKey(*pair) for pair in self._bundle.plan.initial_residents]

    @property
    def planned_budget_bytes(self) -> int:
        """The plan's memory budget."""
        return self._bundle.plan.memory_budget_bytes

    @property
    def draft_bits(self) -> float:
        """Bits a weight of the draft, scales included."""
        return float(self._report["draft"]["bits_per_weight"])

    def table(
        self, hardware: Hardware, memory_budget_bytes: int, num_draft_tokens: int
    ) -> list[dict[str, Any]]:
        """A row for each policy that the budget has room for.

        Raises:
            CapacityError: the budget is too small for the bundle as it is; states the minimum.
        """
        rows: list[dict[str, Any]] = []
        for name, arm in self.arms(num_draft_tokens).items():
            try:
                num_slots, found = self.run(arm, hardware, memory_budget_bytes)
            except CapacityError:
                if not rows:  # the first arm is the bundle as it is
                    raise
                continue
            rows.append(row(name, num_slots, found))
        return rows

    def arms(self, num_draft_tokens: int) -> dict[str, Arm]:
        """What is compared, by name; K is for the arms that draft."""
        predictor = self._report["predictor"]
        plain = RuntimeConfig(num_draft_tokens=0, predictor="none")
        lru = Policy(eviction="lru", overlap=False)
        early = Policy(
            eviction="lru", foresight="router", recall=tuple(predictor["early_router"][:1])
        )
        fitted = Policy(foresight="fitted", recall=tuple(predictor["recall"]))
        found = {
            "specter": Arm(Policy(), plain),
            "plain LRU": Arm(Policy(eviction="lru"), plain),
            "no overlap": Arm(Policy(overlap=False), plain),
            "fitted predictor": Arm(fitted, RuntimeConfig(num_draft_tokens=0, predictor="fitted")),
            "raw shards": Arm(Policy(), plain, is_raw=True),
            "lru": Arm(lru, plain, is_raw=True),
            "lru+router": Arm(
                early, RuntimeConfig(num_draft_tokens=0, predictor="router"), is_raw=True
            ),
            "oracle": Arm(Policy(foresight="oracle"), plain),
        }
        for wrong in (0.25, 0.5, 0.75):
            policy = Policy(foresight="oracle", wrong_share=wrong)
            found[f"oracle, {wrong:.0%} wrong"] = Arm(policy, plain)
        if num_draft_tokens:
            draft = Policy(num_draft_tokens, is_governed=False, foresight="draft")
            config = RuntimeConfig(
                num_draft_tokens=num_draft_tokens, bound_by_slots=False, predictor="none"
            )
            found[f"a draft of {num_draft_tokens}"] = Arm(draft, config)
        if not predictor["recall"]:
            del found["fitted predictor"], found["lru+router"]
        return found

    def num_slots(self, arm: Arm, memory_budget_bytes: int) -> int:
        """Slots of an arm at a budget.

        Raises:
            CapacityError: the budget is too small; states the minimum.
        """
        slot_bytes = self._slot_bytes(is_raw=arm.is_raw)
        return bundle_memory(self._bundle, arm.config, memory_budget_bytes, slot_bytes).num_slots

    def run(self, arm: Arm, hardware: Hardware, memory_budget_bytes: int) -> tuple[int, Simulated]:
        """Slots of an arm at a budget, and what it comes to on a machine.

        Raises:
            CapacityError: the budget is too small; states the minimum.
        """
        num_slots = self.num_slots(arm, memory_budget_bytes)
        shape = shape_of(self._bundle, is_raw=arm.is_raw)
        found = simulate(shape, hardware, arm.policy, num_slots, self.texts, self.hottest_first)
        return num_slots, found

    def _slot_bytes(self, *, is_raw: bool) -> int:
        manifest = self._bundle.manifest
        if is_raw:
            return align_up(expert_nbytes(manifest.model, manifest.experts.numbers))
        return ShardExpertStore.of(self._bundle).slot_bytes


def shape_of(bundle: Bundle, *, is_raw: bool) -> Shape:
    """What of a bundle takes time; raw: as if its shards held the checkpoint's own bytes."""
    manifest = bundle.manifest
    config, draft, numbers = manifest.model, manifest.draft, manifest.experts.numbers
    is_packed = manifest.experts.encoding == "packed" and not is_raw
    return make_shape(
        config,
        bundle.plan.dtype,
        manifest.experts.nbytes if is_packed else expert_nbytes(config, numbers),
        draft_nbytes(config, draft.bits, draft.group_size, draft.symmetric, numbers),
        is_packed=is_packed,
    )


def make_shape(
    config: ModelConfig, dtype: DType, shard_bytes: int, draft_bytes: int, *, is_packed: bool
) -> Shape:
    """What of a model takes time.

    Args:
        config: the model.
        dtype: of dense weights.
        shard_bytes: of an expert's data.
        draft_bytes: of all stand-ins, which count as if all were of one size.
        is_packed: whether shards are packed.
    """

    def nbytes(layer: int | None) -> int:
        total = 0
        for role, shape in dense_shapes(config, layer).items():
            width = 4 if role in FLOAT32_ROLES else DTYPE_BYTES[dtype]
            total += torch.Size(shape).numel() * width
        return total

    return Shape(
        moe_layers=config.moe_layers,
        num_experts=config.num_experts,
        dense_bytes=tuple(map(nbytes, range(config.num_hidden_layers))),
        common_bytes=config.vocab_size * config.hidden_size * DTYPE_BYTES[dtype],
        shard_bytes=shard_bytes,
        slot_bytes=align_up(shard_bytes),
        is_packed=is_packed,
        stand_in_bytes=draft_bytes // (len(config.moe_layers) * config.num_experts),
        expert_num_weights=config.expert_num_weights,
        bytes_per_weight=DTYPE_BYTES[dtype],
    )


def read_routes(path: Path) -> list[Routes]:
    """The first sequences' routes.

    Raises:
        BundleError: the file is damaged, or lacks what is replayed; names it.
    """
    tensors = read_tensors(path, read_header(path, BundleError))
    wanted = ("target.router_probs", "draft_confidence", "target.selected_experts")
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise BundleError(f"{path}: missing {missing[0]!r}; build the bundle again")
    return make_texts(tensors)


def make_texts(tensors: Mapping[str, torch.Tensor]) -> list[Routes]:
    """The first sequences of recorded routes: the tensors of ``ROUTES_FILE``."""
    return [_text(tensors, i) for i in range(min(MAX_SEQUENCES, len(tensors["token_ids"])))]


def _text(tensors: Mapping[str, torch.Tensor], index: int) -> Routes:
    def by_token(name: str, dtype: torch.dtype) -> torch.Tensor:
        rows = tensors[name][:, index, :MAX_TOKENS]  # [L, T, ...]
        return rows.transpose(0, 1).to(dtype).contiguous()

    num_tokens = min(MAX_TOKENS, tensors["token_ids"].shape[1])
    return Routes(
        num_prompt_tokens=max(1, num_tokens // PROMPT_SHARE),
        selected=by_token("target.selected_experts", torch.int64),
        probs=by_token("target.router_probs", torch.float32),
        drafted=by_token("draft.selected_experts", torch.int64),
        agrees=tensors["draft_agrees"][index, :MAX_TOKENS].numpy(),
        confidence=tensors["draft_confidence"][index, :MAX_TOKENS].to(torch.float32).numpy(),
    )


def row(name: str, num_slots: int, found: Simulated) -> dict[str, Any]:
    """One row of the table, in the units in which it is printed."""
    return {
        "policy": name,
        "slots": num_slots,
        "TPOT ms": round(found.tpot_seconds * 1e3, 2),
        "draft ms": round(found.draft_seconds * 1e3, 2),
        "compute ms": round(found.compute_seconds * 1e3, 2),
        "stall ms": round(found.stall_seconds * 1e3, 2),
        "overhead ms": round(found.overhead_seconds * 1e3, 2),
        "MB a token": round(found.bytes_per_token / 1e6, 2),
        "link busy": round(found.link_busy_share, 3),
        "hits": round(found.hit_rate, 4),
        "tokens a pass": round(found.mean_acceptance_length, 2),
    }
