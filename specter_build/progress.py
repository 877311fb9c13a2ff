"""What an unfinished build has done so far, on disk: a killed build goes on from its last layer.

Beside the bundle's own files a work folder has ``progress/``: the digest of what is being built,
the profile of each finished layer, the predictors fitted so far, what later ones are still to be
fitted to, and both streams' hidden states behind the last layer. The hidden states are renamed into
place last, so a layer counts as done when everything of it is on disk; what a killed build left of
the next layer is written anew. Floats are stored as they are: a resumed build gives the bytes of an
uninterrupted one.

Called by: convert_layers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from specter_build.fit_predictor import FittedPredictor, Observation, PredictorQuality
from specter_build.report import LayerProfile
from specter_build.write_bundle import PROGRESS, PROGRESS_MARKER, discard_progress
from specter_runtime.errors import RecipeError
from specter_runtime.experts import Routing
from specter_runtime.manifest import predictor_names
from specter_runtime.shards import (
    Header,
    LazyTensors,
    read_header,
    read_tensor,
    read_tensors,
    write_tensors,
)

HIDDEN_FILE = "hidden.safetensors"
QUALITY_NAMES = ("recall", "early_recall")
"""What a predictor's file holds of its quality: float64, by number of layers ahead."""


class Progress:
    """The progress of one build; a work folder of another build is emptied.

    Attributes:
        next_layer: the first layer that is not done.
        profiles: of the routed layers that are done.
    """

    def __init__(self, work: Path, digest: str) -> None:
        """Open the progress of the build with this digest, or start it."""
        self._folder = work / PROGRESS
        self.next_layer = 0
        self.profiles: dict[int, LayerProfile] = {}
        marker = work / PROGRESS_MARKER
        if not marker.is_file() or marker.read_text() != digest:
            discard_progress(work)
            for path in work.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._folder.mkdir()
            marker.write_text(digest)
        hidden = self._folder / HIDDEN_FILE
        if hidden.is_file():
            self.next_layer = int(_read(hidden)["next_layer"])
            for path in sorted(self._folder.glob("layer-*.safetensors")):
                index = _layer_of(path)
                if index < self.next_layer:
                    self.profiles[index] = _read_profile(path, index)

    def hidden(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hidden states of target and draft behind the last finished layer; None before the first.

        Raises:
            RecipeError: the file is damaged; names it.
        """
        if self.next_layer == 0:
            return None
        tensors = _read(self._folder / HIDDEN_FILE)
        return tensors["target"], tensors["draft"]

    def observations(self, layers: Sequence[int]) -> list[Observation]:
        """What these finished layers showed, if it is still kept.

        Raises:
            RecipeError: a file is damaged; names it.
        """
        found = []
        for layer in layers:
            tensors = _read(self._observation_path(layer))
            found.append(
                Observation(
                    layer,
                    tensors["plain_input"],
                    tensors["scores"],
                    self.profiles[layer].target.selected_experts,
                    tuple(tensors["early_recall"].tolist()),
                )
            )
        return found

    def predictors(self) -> tuple[Mapping[str, torch.Tensor], dict[int, PredictorQuality]]:
        """All that were fitted, when the last layer is done: tensors and quality by layer.

        The tensors are those of the bundle's file, in its order, each read when asked for.

        Raises:
            RecipeError: a file is damaged; names it.
        """
        headers: dict[str, tuple[Path, Header]] = {}
        qualities: dict[int, PredictorQuality] = {}
        for path in sorted(self._folder.glob("predictor-*.safetensors")):
            layer, header = _layer_of(path), read_header(path, RecipeError)
            headers |= dict.fromkeys(predictor_names(layer), (path, header))
            rows = (read_tensor(path, header.entries[name]) for name in QUALITY_NAMES)
            qualities[layer] = PredictorQuality(*(tuple(row.tolist()) for row in rows))

        def read(name: str) -> torch.Tensor:
            path, header = headers[name]
            return read_tensor(path, header.entries[name])

        return LazyTensors(headers, read), qualities

    def save_predictor(self, predictor: FittedPredictor) -> None:
        """Write what was fitted, before the layer that it waited for counts as done."""
        names = (*predictor_names(predictor.layer), *QUALITY_NAMES)
        rows = map(_row, (predictor.quality.recall, predictor.quality.early_recall))
        tensors = dict(zip(names, (predictor.weight, predictor.bias, *rows), strict=True))
        write_tensors(self._folder / f"predictor-{predictor.layer:03d}.safetensors", tensors, {})

    def save(
        self,
        index: int,
        target: torch.Tensor,  # [N, T, D]
        draft: torch.Tensor,  # [N, T, D]
        profile: LayerProfile | None,
        observations: Sequence[Observation],
    ) -> None:
        """Count layer ``index`` as done; all its other files must be on disk.

        Args:
            index: the decoder layer.
            target: hidden states behind it.
            draft: the same of the draft.
            profile: what the layer showed; None if it is dense.
            observations: of all layers that later ones are still to be foretold from.
        """
        if profile is not None:
            assert profile.target.router_probs is not None, "the layers' runner keeps them"
            tensors = {
                "target.selected_experts": profile.target.selected_experts,
                "target.routing_weights": profile.target.routing_weights,
                "target.router_probs": profile.target.router_probs,
                "draft.selected_experts": profile.draft.selected_experts,
                "draft.routing_weights": profile.draft.routing_weights,
                "relative_error": torch.tensor(profile.relative_error, dtype=torch.float64),
                "fallback_experts": torch.tensor(profile.fallback_experts, dtype=torch.int64),
            }
            write_tensors(self._folder / f"layer-{index:03d}.safetensors", tensors, {})
            self.profiles[index] = profile
        for observation in observations:
            if observation.layer == index:
                tensors = {
                    "plain_input": observation.plain_input,
                    "scores": observation.scores,
                    "early_recall": _row(observation.early_recall),
                }
                write_tensors(self._observation_path(index), tensors, {})
        hidden = {"next_layer": torch.tensor(index + 1), "target": target, "draft": draft}
        unfinished = self._folder / f"{HIDDEN_FILE}.tmp"
        write_tensors(unfinished, hidden, {})
        os.replace(unfinished, self._folder / HIDDEN_FILE)
        self.next_layer = index + 1
        kept = {observation.layer for observation in observations}
        for path in self._folder.glob("observation-*.safetensors"):
            if _layer_of(path) not in kept:
                path.unlink()

    def _observation_path(self, layer: int) -> Path:
        return self._folder / f"observation-{layer:03d}.safetensors"


def _layer_of(path: Path) -> int:
    """The layer that a file's name ends with."""
    return int(path.stem.rpartition("-")[2])


def _row(numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _read(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(path, read_header(path, RecipeError))


def _read_profile(path: Path, index: int) -> LayerProfile:
    tensors = _read(path)
    target, draft = (
        Routing(
            index,
            tensors[f"{name}.selected_experts"],
            tensors[f"{name}.routing_weights"],
            tensors.get(f"{name}.router_probs"),
        )
        for name in ("target", "draft")
    )
    fallback = tuple(tensors["fallback_experts"].tolist())
    return LayerProfile(target, draft, float(tensors["relative_error"]), fallback)
