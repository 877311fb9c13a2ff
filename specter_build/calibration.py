"""The token sequences on which routing is profiled.

Texts are tokenized one by one and joined, each followed by the end-of-text token where the model
has one; the stream is cut into sequences without overlap, of which a seeded draw takes as many as
the recipe asks for. Same files, tokenizer and seed give the same sequences.

Called by: pipeline.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specter_build.recipe import CalibrationRecipe
from specter_runtime.errors import RecipeError
from specter_runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Texts in file order, their SHA-256 and the names of their files."""

    texts: list[str]
    sha256: str
    sources: list[str]


def read_texts(recipe: CalibrationRecipe, folder: Path) -> CalibrationText:
    """Read the recipe's text files, or the text that ships with the package.

    Args:
        recipe: names the files.
        folder: what relative paths are relative to.

    Raises:
        RecipeError: a file is missing, malformed or empty; names it and the line.
    """
    if recipe.files:
        paths = [(name, folder / name) for name in recipe.files]
    else:
        shipped = importlib.resources.files("specter_build") / "data" / "calibration.jsonl"
        with importlib.resources.as_file(shipped) as path:
            paths = [(f"specter_build:{path.name}", path)]
    texts: list[str] = []
    digest = hashlib.sha256()
    for name, path in paths:
        try:
            content = path.read_bytes()
            text = content.decode("utf-8")
        except OSError as exc:
            raise RecipeError(f"calibration.files: {name}: cannot be read: {exc.strerror}") from exc
        except UnicodeDecodeError as exc:
            raise RecipeError(f"calibration.files: {name}: not UTF-8 text: {exc}") from exc
        digest.update(hashlib.sha256(content).digest())
        texts += _parse_jsonl(name, text) if path.suffix == ".jsonl" else [text]
    if not any(texts):
        raise RecipeError("calibration.files: there is no text in them")
    return CalibrationText(texts, digest.hexdigest(), [Path(name).name for name, _ in paths])


def _parse_jsonl(name: str, text: str) -> list[str]:
    texts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as exc:
            raise RecipeError(f"calibration.files: {name}, line {number}: not JSON: {exc}") from exc
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise RecipeError(
                f"calibration.files: {name}, line {number}: expected an object with a string 'text'"
            )
        if not _is_unicode(record["text"]):
            raise RecipeError(
                f"calibration.files: {name}, line {number}: the text holds half a character "
                "(a lone surrogate)"
            )
        texts.append(record["text"])
    return texts


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def make_sequences(
    texts: Sequence[str], tokenizer: Tokenizer, recipe: CalibrationRecipe, eos_token_id: int | None
) -> torch.Tensor:
    """Token ids, int64 ``[num_sequences, sequence_length]``.

    Raises:
        RecipeError: the text is too short; states how many sequences it gives.
    """
    stream: list[int] = []
    for text in texts:
        stream += tokenizer.encode(text, add_special_tokens=False)
        if eos_token_id is not None:
            stream.append(eos_token_id)
    length = recipe.sequence_length
    available = len(stream) // length
    if available < recipe.num_sequences:
        raise RecipeError(
            f"calibration.num_sequences: {recipe.num_sequences} sequences of {length} tokens asked "
            f"for, the text gives {available}"
        )
    sequences = np.array(stream[: available * length], dtype=np.int64).reshape(available, length)
    chosen = np.random.default_rng(recipe.seed).permutation(available)[: recipe.num_sequences]
    return torch.from_numpy(sequences[np.sort(chosen)])
