"""Which token sequences a calibration runs on: every one of the text, whole, drawn by seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specter_build.calibration import make_sequences, read_texts
from specter_build.recipe import CalibrationRecipe
from specter_runtime.errors import RecipeError
from specter_runtime.tokenizer import Tokenizer
from tests.checkpoints import make_tokenizer

TEXTS = ("def f(x):\n    return x\n", "", "naïve 数\n", "x" * 50)
END = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer(folder)


def recipe(**fields: Any) -> CalibrationRecipe:
    defaults = {"num_sequences": 2, "sequence_length": 8, "seed": 0}
    return CalibrationRecipe.model_validate(defaults | fields)


def pieces(tokenizer: Tokenizer, texts: Sequence[str], length: int, end: int | None) -> list[Any]:
    """All whole sequences of the text, in order; the rest is left over."""
    stream: list[int] = []
    for text in texts:
        for character in text:  # one token a byte: encoding by character is the same
            stream.extend(tokenizer.encode(character, add_special_tokens=False))
        if end is not None:
            stream.append(end)
    whole = range(0, len(stream) - length + 1, length)
    return [stream[start : start + length] for start in whole]


# ---- sequences ------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [END, None])
@pytest.mark.parametrize("length", [2, 7, 16])
def test_all_sequences_together_are_the_text_with_its_ends(
    tokenizer: Tokenizer, length: int, end: int | None
) -> None:
    expected = pieces(tokenizer, TEXTS, length, end)
    asked = recipe(num_sequences=len(expected), sequence_length=length)
    sequences = make_sequences(TEXTS, tokenizer, asked, end)
    assert sequences.dtype == torch.int64
    assert sequences.tolist() == expected


@pytest.mark.parametrize("seed", range(4))
def test_draw_takes_distinct_sequences_in_the_order_of_the_text(
    tokenizer: Tokenizer, seed: int
) -> None:
    available = pieces(tokenizer, TEXTS, 4, END)
    drawn = make_sequences(
        TEXTS, tokenizer, recipe(num_sequences=9, sequence_length=4, seed=seed), END
    ).tolist()
    assert len(drawn) == 9
    position = 0
    for sequence in drawn:  # a subsequence of what is available
        position = available.index(sequence, position) + 1


def test_seed_alone_decides_the_draw(tokenizer: Tokenizer) -> None:
    """Eight seeds draw 9 of 20 or more sequences: that all agree has a chance below 1e-30."""
    draws = [
        [
            make_sequences(
                TEXTS, tokenizer, recipe(num_sequences=9, sequence_length=4, seed=seed), END
            ).tolist()
            for seed in range(8)
        ]
        for _ in range(2)
    ]
    assert draws[0] == draws[1]
    assert any(draw != draws[0][0] for draw in draws[0])


def test_special_tokens_in_the_text_are_only_those_at_its_end(tokenizer: Tokenizer) -> None:
    sequences = make_sequences(["ab", "cd"], tokenizer, recipe(sequence_length=3), END)
    assert [row[-1] for row in sequences.tolist()] == [END, END]
    assert not {256, END} & set(sequences[:, :2].flatten().tolist())


def test_too_short_text_is_refused_with_what_it_gives(tokenizer: Tokenizer) -> None:
    with pytest.raises(RecipeError) as caught:
        make_sequences(["x" * 20], tokenizer, recipe(num_sequences=3), None)
    assert str(caught.value) == (
        "calibration.num_sequences: 3 sequences of 8 tokens asked for, the text gives 2"
    )


# ---- files ----------------------------------------------------------------------------------


def test_text_that_ships_is_there_and_the_same_each_time(tmp_path: Path) -> None:
    text = read_texts(recipe(), tmp_path)
    assert sum(map(len, text.texts)) > 10_000
    assert text.sources == ["specter_build:calibration.jsonl"]
    assert text == read_texts(recipe(), tmp_path)


def write_jsonl(path: Path, texts: Sequence[str], *, ensure_ascii: bool = True) -> None:
    lines = [
        json.dumps({"text": text, "id": i}, ensure_ascii=ensure_ascii)
        for i, text in enumerate(texts)
    ]
    path.write_text("\n\n".join(lines) + "\n", "utf-8")


def test_files_are_read_in_order_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("plain\r\ntext 数\n", "utf-8", newline="")
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    text = read_texts(recipe(files=["sub/b.txt", "a.jsonl"]), tmp_path)
    assert text.texts == ["plain\r\ntext 数\n", *TEXTS]
    assert text.sources == ["b.txt", "a.jsonl"]  # names only: no local paths in a bundle


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"], ids=ascii)
def test_jsonl_lines_end_at_newlines_only(tmp_path: Path, separator: str) -> None:
    """JSON allows U+2028 and its like bare in a string, where Python's splitlines would cut."""
    texts = [f"before{separator}after", "next"]
    lines = [f'{{"text": "{text}"}}' for text in texts]
    if ord(separator) < 0x20:  # a control character must be escaped
        lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), "utf-8", newline="")
    assert read_texts(recipe(files=["a.jsonl"]), tmp_path).texts == texts


def test_hash_is_of_the_contents_in_order(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one"), ("b.txt", "two"), ("c.txt", "one")):
        (tmp_path / name).write_text(content)

    def hash_of(*files: str) -> str:
        return read_texts(recipe(files=list(files)), tmp_path).sha256

    parts = [hashlib.sha256(content).digest() for content in (b"one", b"two")]
    assert hash_of("a.txt", "b.txt") == hashlib.sha256(b"".join(parts)).hexdigest()
    assert hash_of("a.txt", "b.txt") == hash_of("c.txt", "b.txt")
    assert hash_of("a.txt", "b.txt") != hash_of("b.txt", "a.txt")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", b'\n\n"text"\n', "line 3: expected an object with a string 'text'"),
        ("a.jsonl", b'{"content": "x"}', "line 1: expected an object with a string 'text'"),
        ("a.jsonl", b'{"text": 4}', "line 1: expected an object with a string 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1"),
        ("a.txt", b"\xff\xfe", "not UTF-8 text"),
        ("a.jsonl", b"\xff", "not UTF-8 text"),
    ],
)
def test_malformed_file_is_refused_by_name_and_line(
    tmp_path: Path, name: str, content: bytes, part: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read_texts(recipe(files=[name]), tmp_path)
    assert f"calibration.files: {name}" in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize("name", ["absent.txt", "folder"])
def test_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecipeError, match=f"files: {name}: cannot be read"):
        read_texts(recipe(files=[name]), tmp_path)


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", ""), ("a.jsonl", "\n"), ("a.jsonl", '{"text": ""}')]
)
def test_files_without_text_are_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RecipeError, match="there is no text in them"):
        read_texts(recipe(files=[name]), tmp_path)
