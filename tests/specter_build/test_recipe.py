"""A recipe file is read strictly: every mistake is named with its file and key path."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from specter_build.recipe import Recipe, load_recipe
from specter_runtime.errors import RecipeError
from specter_runtime.units import parse_bytes

FULL: Mapping[str, Any] = {
    "model": "checkpoint",
    "revision": "main",
    "output": "bundle",
    "shard_encoding": "packed",
    "draft": {
        "method": "gptq",
        "bits": 4,
        "group_size": 32,
        "symmetric": True,
        "clip": "mse",
        "min_tokens": 64,
        "from": None,
    },
    "calibration": {
        "files": ["a.txt", "b.jsonl"],
        "num_sequences": 8,
        "sequence_length": 64,
        "seed": 1,
    },
    "predictor": {"layers_ahead": 3},
    "plan": {
        "memory_budget": 1_000_000,
        "max_context_tokens": 128,
        "num_draft_tokens": 4,
        "dtype": "bfloat16",
    },
    "hardware": {
        "link_bytes_per_second": 1e9,
        "link_latency_seconds": 1e-4,
        "memory_bytes_per_second": 1e10,
        "pass_overhead_seconds": 2e-3,
    },
}
"""Every key there is."""

ALTERNATIVES: Mapping[str, Any] = {
    "shard_encoding": "raw",
    "draft.method": "awq",
    "draft.bits": 3,
    "draft.group_size": 64,
    "draft.symmetric": False,
    "draft.clip": "none",
    "draft.min_tokens": 65,
    "calibration.files": ["a.txt"],
    "calibration.num_sequences": 9,
    "calibration.sequence_length": 65,
    "calibration.seed": 2,
    "predictor.layers_ahead": 0,
    "plan.memory_budget": 1_000_001,
    "plan.max_context_tokens": 129,
    "plan.num_draft_tokens": "auto",
    "plan.dtype": "float32",
    "hardware.link_bytes_per_second": 2e9,
    "hardware.link_latency_seconds": 0.0,
    "hardware.memory_bytes_per_second": 2e10,
    "hardware.pass_overhead_seconds": 0.0,
}
"""Another legal value for every key that shapes a bundle."""

COUPLED = {"draft.from"}
"""Keys that go with one value of another only."""

LOCATIONS = {"model": "other", "revision": None, "output": "elsewhere"}


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The full recipe with one key set (or added)."""
    recipe = deepcopy(dict(FULL))
    *parents, last = path.split(".")
    section = recipe
    for parent in parents:
        section = section[parent]
    section[last] = value
    return recipe


def without(path: str) -> dict[str, Any]:
    recipe = with_value(path, None)
    *parents, last = path.split(".")
    section = recipe[parents[0]] if parents else recipe
    del section[last]
    return recipe


def write(folder: Path, content: Mapping[str, Any] | str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(dict(content)))
    return path


def refusal(folder: Path, content: Mapping[str, Any] | str, *overrides: str) -> str:
    """The message with which a recipe is refused; it must name the file."""
    path = write(folder, content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert str(path) in str(caught.value)
    return str(caught.value)


def leaf_keys(section: Mapping[str, Any], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, value in section.items():
        path = f"{prefix}{name}"
        keys |= leaf_keys(value, f"{path}.") if isinstance(value, Mapping) else {path}
    return keys


def test_full_recipe_keeps_every_value(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, FULL)).model_dump() == FULL


def test_recipe_needs_only_what_has_no_sensible_default(tmp_path: Path) -> None:
    optional = {
        "revision": None,
        "shard_encoding": "auto",
        "draft.method": "rtn",
        "draft.symmetric": True,
        "draft.clip": "none",
        "draft.min_tokens": None,
        "draft.from": None,
        "calibration.files": [],
        "predictor.layers_ahead": 2,
        "plan.max_context_tokens": 4096,
        "plan.num_draft_tokens": "auto",
        "plan.dtype": "auto",
        "hardware.link_latency_seconds": 0.0,
        "hardware.pass_overhead_seconds": 0.0,
    }
    short, complete = deepcopy(dict(FULL)), deepcopy(dict(FULL))
    for path, default in optional.items():
        *parents, last = path.split(".")
        for recipe, action in ((short, "drop"), (complete, "set")):
            section = recipe[parents[0]] if parents else recipe
            if action == "drop":
                del section[last]
            else:
                section[last] = default
    assert load_recipe(write(tmp_path, short)).model_dump() == complete


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("outputs", "output"),
        ("calibratoin", "calibration"),
        ("draft.bit", "bits"),
        ("draft.groupsize", "group_size"),
        ("predictor.layer_ahead", "layers_ahead"),
        ("plan.memory_bugdet", "memory_budget"),
        ("hardware.link_latency", "link_latency_seconds"),
    ],
)
def test_unknown_key_is_refused_with_its_path_and_the_nearest_known_key(
    tmp_path: Path, path: str, nearest: str
) -> None:
    assert f"{path}: unknown key; did you mean {nearest!r}?" in refusal(
        tmp_path, with_value(path, 1)
    )


def test_unknown_key_like_no_other_is_refused_with_the_known_keys(tmp_path: Path) -> None:
    message = refusal(tmp_path, with_value("draft.zzz", 1))
    assert "draft.zzz: unknown key; known keys are method, bits, group_size, symmetric" in message


@pytest.mark.parametrize(
    "path",
    [
        "model",
        "output",
        "draft",
        "calibration",
        "plan",
        "hardware",
        "draft.bits",
        "draft.group_size",
        "calibration.num_sequences",
        "calibration.sequence_length",
        "calibration.seed",
        "plan.memory_budget",
        "hardware.link_bytes_per_second",
        "hardware.memory_bytes_per_second",
    ],
)
def test_missing_key_is_named_by_its_path(tmp_path: Path, path: str) -> None:
    assert f"  {path}: missing" in refusal(tmp_path, without(path))


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    recipe = with_value("draft.bit", 4)
    recipe["calibration"]["seed"] = -1
    del recipe["plan"]["memory_budget"]
    message = refusal(tmp_path, recipe)
    for part in ("draft.bit: unknown key", "calibration.seed:", "plan.memory_budget: missing"):
        assert part in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model", 3),
        ("output", ["bundle"]),
        ("draft", [4]),
        ("draft", None),
        ("draft.bits", "4"),
        ("draft.bits", 4.0),
        ("draft.group_size", "32"),
        ("draft.group_size", 32.0),
        ("draft.symmetric", 1),
        ("draft.symmetric", "true"),
        ("calibration.files", "a.txt"),
        ("calibration.files", [1]),
        ("calibration.num_sequences", True),
        ("calibration.sequence_length", "64"),
        ("calibration.seed", 1.5),
        ("predictor.layers_ahead", "2"),
        ("predictor.layers_ahead", True),
        ("plan.memory_budget", True),
        ("plan.memory_budget", 1.5),
        ("plan.memory_budget", [1]),
        ("plan.num_draft_tokens", "4"),
        ("plan.num_draft_tokens", True),
        ("plan.max_context_tokens", "128"),
        ("hardware.link_bytes_per_second", "1e9"),
        ("hardware.link_bytes_per_second", True),
    ],
)
def test_wrong_type_is_refused_and_never_converted(tmp_path: Path, path: str, value: Any) -> None:
    message = refusal(tmp_path, with_value(path, value))
    assert f"  {path}" in message
    assert repr(value) in message or repr(value[0]) in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("shard_encoding", "zip"),
        ("draft.method", "hqq"),
        ("draft.clip", "max"),
        ("draft.min_tokens", 0),
        ("draft.bits", 5),
        ("draft.group_size", 7),
        ("draft.group_size", 1025),
        ("calibration.num_sequences", 0),
        ("calibration.sequence_length", 1),
        ("calibration.seed", -1),
        ("predictor.layers_ahead", -1),
        ("predictor.layers_ahead", 5),
        ("plan.memory_budget", 0),
        ("plan.memory_budget", -1),
        ("plan.memory_budget", "4 cows"),
        ("plan.max_context_tokens", 0),
        ("plan.num_draft_tokens", -1),
        ("plan.num_draft_tokens", 65),
        ("plan.num_draft_tokens", "many"),
        ("plan.dtype", "int8"),
        ("hardware.link_bytes_per_second", 0.0),
        ("hardware.link_latency_seconds", -1e-9),
        ("hardware.memory_bytes_per_second", float("nan")),
        # json has no infinity: plan.json would not be JSON
        ("hardware.link_latency_seconds", float("inf")),
    ],
)
def test_value_out_of_range_is_refused_by_key_path(tmp_path: Path, path: str, value: Any) -> None:
    message = refusal(tmp_path, with_value(path, value))
    assert f"  {path}" in message
    assert repr(value) in message


def bits_table(*overrides: Mapping[str, Any], default: int = 4) -> dict[str, Any]:
    return {"default": default, "overrides": [dict(override) for override in overrides]}


EIGHT_BITS = {"layers": [0], "experts": [1, 2], "bits": 8}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            bits_table(EIGHT_BITS) | {"defalt": 4},
            "bits.defalt: unknown key; did you mean 'default'",
        ),
        ({"default": 4}, "draft.bits.overrides: missing"),
        (bits_table(), "draft.bits.overrides"),
        (bits_table(EIGHT_BITS, default=5), "draft.bits.default"),
        (
            bits_table(EIGHT_BITS | {"expert": [1]}),
            "draft.bits.overrides.0.expert: unknown key; did you mean 'experts'?",
        ),
        (bits_table(EIGHT_BITS | {"bits": 16}), "draft.bits.overrides.0.bits"),
        (bits_table(EIGHT_BITS | {"bits": 2.0}), "draft.bits.overrides.0.bits"),
        (bits_table(EIGHT_BITS | {"experts": []}), "draft.bits.overrides.0.experts"),
        (bits_table(EIGHT_BITS | {"layers": "first"}), "draft.bits.overrides.0.layers"),
        ([4], "draft.bits"),
    ],
)
def test_malformed_bits_are_refused_by_key_path(tmp_path: Path, table: Any, message: str) -> None:
    assert message in refusal(tmp_path, with_value("draft.bits", table))


@pytest.mark.parametrize("option", [{"method": "gptq"}, {"clip": "mse"}], ids=str)
def test_without_stand_ins_how_they_are_made_has_no_effect(
    tmp_path: Path, option: dict[str, str]
) -> None:
    draft = {"bits": 0, "group_size": 16}
    assert "with bits: 0 nothing is quantized" in refusal(
        tmp_path, with_value("draft", draft | option)
    )
    recipe = Recipe.model_validate(with_value("draft", draft))
    model = SimpleNamespace(num_experts=3, moe_layers=(1, 2))
    assert recipe.draft.widths(model) == ((0, 0, 0), (0, 0, 0))  # type: ignore[arg-type]


def test_min_tokens_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    assert "min_tokens has no effect on rtn" in refusal(tmp_path, with_value("draft.method", "rtn"))


GIVEN = {"method": "given", "from": "../quantized", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "rtn"}, "method: given and from: belong together"),
        ({"from": None}, "method: given and from: belong together"),
        ({"bits": 3}, "a given draft has bits: 4"),
        ({"clip": "mse"}, "clip has no effect on it"),
        ({"min_tokens": 8}, "min_tokens has no effect on given"),
    ],
)
def test_option_that_has_no_effect_on_a_given_draft_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    load_recipe(write(tmp_path, with_value("draft", GIVEN)))
    assert message in refusal(tmp_path, with_value("draft", GIVEN | changes))


def test_digest_has_the_name_of_a_given_draft_and_not_where_it_lies() -> None:
    digests = [
        digest(with_value("draft", GIVEN | {"from": path}))
        for path in ("../quantized", "/elsewhere/quantized", "../other")
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [("model: a\nmodel: b\n", "model", 2), ("draft:\n  bits: 4\n  bits: 8\n", "bits", 3)],
)
def test_key_that_stands_twice_is_refused_with_its_line(
    tmp_path: Path, text: str, key: str, line: int
) -> None:
    message = refusal(tmp_path, text)
    assert f"key {key!r} stands twice" in message
    assert f"line {line}" in message


@pytest.mark.parametrize(
    ("text", "found"), [("", "NoneType"), ("- a\n- b\n", "list"), ("4\n", "int"), ("text", "str")]
)
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, found: str) -> None:
    assert f"expected a mapping of keys, found {found}" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "model: [1,\n",
        "model: 'a\n",
        "\tmodel: a\n",
        "model: !!python/object/apply:os.system ['true']\n",
        "model: a\n? [b, c]\n: d\n",
        "output: 2024-13-45\n",
        "draft: {bits: !!int four}\n",
    ],
    ids=["open list", "open quote", "tab", "python tag", "list as key", "no date", "no integer"],
)
def test_malformed_yaml_is_refused(tmp_path: Path, text: str) -> None:
    assert "not valid YAML" in refusal(tmp_path, text)


def test_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"model: \xff\xfe\n")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="cannot be read") as caught:
        load_recipe(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_overrides_replace_values_before_they_are_checked(tmp_path: Path) -> None:
    overrides = [
        "draft.bits=8",
        "output=a=b",  # only the first equals sign separates
        "calibration.files=[x.txt]",
        "plan.num_draft_tokens=auto",
        "draft.bits=3",  # the last one wins
    ]
    recipe = load_recipe(write(tmp_path, with_value("draft.bits", "wrong")), overrides)
    assert recipe.draft.bits == 3
    assert recipe.output == "a=b"
    assert recipe.calibration.files == ["x.txt"]
    assert recipe.plan.num_draft_tokens == "auto"


def test_override_may_make_a_section(tmp_path: Path) -> None:
    overrides = ["draft.bits=2", "draft.group_size=16"]
    assert load_recipe(write(tmp_path, without("draft")), overrides).draft.group_size == 16


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.bits", "--set draft.bits: expected key=value"),
        ("model.name=x", "--set model.name=x: 'model' is not a section"),
        ("draft.bits.deep=x", "'bits' is not a section"),
        ("draft.bits=[4", "--set draft.bits=[4: value is not valid YAML"),
        ("output=2024-13-45", "--set output=2024-13-45: value is not valid YAML"),
    ],
)
def test_malformed_override_is_refused_with_its_text(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, FULL), [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.bit=4", "draft.bit: unknown key; did you mean 'bits'?"),
        ("draft.bits='4'", "draft.bits"),
        ("=4", "unknown key"),
    ],
)
def test_override_is_checked_like_the_file(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, FULL, override)


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("48MiB", 48 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("7kb", 7_000),
        ("3KiB", 3_072),
        ("123", 123),
        ("123B", 123),
        (1_000_000, 1_000_000),
    ],
)
def test_sizes_are_bytes_with_decimal_or_binary_units(
    tmp_path: Path, size: str | int, nbytes: int
) -> None:
    recipe = load_recipe(write(tmp_path, with_value("plan.memory_budget", size)))
    assert recipe.plan.memory_budget == nbytes


@pytest.mark.parametrize("size", ["", "GiB", "-1", "1e9", "4 TiB", "0x10", "1..5MB", "1 000"])
def test_what_is_not_a_size_is_refused_with_examples(size: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write e\.g\. 4GiB"):
        parse_bytes(size)


def digest(recipe: Mapping[str, Any]) -> str:
    return Recipe.model_validate(recipe).digest()


@pytest.mark.parametrize("path", sorted(LOCATIONS))
def test_digest_ignores_where_model_and_bundle_lie(path: str) -> None:
    assert digest(with_value(path, LOCATIONS[path])) == digest(FULL)


@pytest.mark.parametrize("path", sorted(ALTERNATIVES))
def test_digest_changes_with_everything_that_shapes_the_bundle(path: str) -> None:
    assert digest(with_value(path, ALTERNATIVES[path])) != digest(FULL)


def test_every_key_is_covered_by_a_digest_test() -> None:
    recipe = Recipe.model_validate(FULL).model_dump()
    assert leaf_keys(recipe) == {*LOCATIONS, *ALTERNATIVES, *COUPLED}


def test_digest_does_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    reversed_keys = {
        name: dict(reversed(value.items())) if isinstance(value, dict) else value
        for name, value in reversed(FULL.items())
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(reversed_keys, sort_keys=False))
    assert load_recipe(path).digest() == digest(FULL)
