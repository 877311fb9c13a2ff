"""Every family against transformers: logits, greedy tokens through a bundle, and refusals.

``oracles.decoder_logits`` in float64 is the judge: two float32 computations of one function differ
by rounding, and only the exact value tells how much of it is anybody's fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from specter_build.architectures import ARCHITECTURES, read_config
from specter_build.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from specter_build.pipeline import build
from specter_build.recipe import Recipe
from specter_runtime.config import RuntimeConfig
from specter_runtime.errors import CheckpointError
from specter_runtime.layers import rms_norm
from specter_runtime.session import Session
from tests import oracles
from tests.checkpoints import FAMILIES, fuse_experts, make_checkpoint, recipe_dict
from tests.models import OpenModel, open_model, same_bits
from tests.oracles import UNIT_ROUNDOFF, array, gamma

NUM_ROWS = 24
Edit = Callable[[Path], None]


# ---- checkpoints ----------------------------------------------------------------------------


def shard(folder: Path) -> None:
    """Spread a single-file checkpoint over three files and an index."""
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def fuse_and_shard(folder: Path) -> None:
    fuse_experts(folder)
    shard(folder)


def randomize_biases(folder: Path) -> None:
    """transformers begins with zeros, which no test could tell from none."""
    tensors = load_file(folder / SINGLE_FILE)
    biases = [tensor for name, tensor in tensors.items() if name.endswith(".bias")]
    assert biases
    for bias in biases:
        bias.uniform_(-1, 1, generator=torch.Generator().manual_seed(len(bias)))
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def edit_config(*dropped: str, **values: Any) -> Edit:
    """Change ``config.json``: drop keys, set others."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | values
        path.write_text(json.dumps({k: v for k, v in config.items() if k not in dropped}))

    return edit


def make_old_config(folder: Path) -> None:
    """``config.json`` as transformers 4 wrote it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    if config["model_type"] != "mixtral" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config))


def keep_required_fields(folder: Path) -> None:
    """A ``config.json`` that is silent wherever it may be."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    fields = ARCHITECTURES[config["model_type"]].fields
    needed = [field for field in fields if field.default is None and not field.optional]
    # Those two have a default that does not fit these shapes.
    kept = {"model_type", "architectures", "num_key_value_heads", "head_dim"}
    kept |= {key for field in needed for key in field.keys}
    path.write_text(json.dumps({key: value for key, value in config.items() if key in kept}))


@dataclass(frozen=True)
class Case:
    """A checkpoint: transformers' overrides, then what is done to the folder."""

    family: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    dtype: str = "float32"

    def make(self, folder: Path) -> None:
        dtype: torch.dtype = getattr(torch, self.dtype)
        make_checkpoint(folder, self.family, dtype=dtype, **self.overrides)
        for edit in self.edits:
            edit(folder)


LAYOUTS: dict[str, tuple[Edit, ...]] = {
    "one tensor an expert": (),
    "sharded": (shard,),
    "fused": (fuse_experts,),
    "fused and sharded": (fuse_and_shard,),
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
CASES: dict[str, Case] = {
    **{family: Case(family) for family in FAMILIES},
    **{f"{family}, fused": Case(family, edits=(fuse_experts,)) for family in FAMILIES},
    **{f"{family}, old config": Case(family, ROPE, (make_old_config,)) for family in FAMILIES},
    **{f"{family}, silent": Case(family, edits=(keep_required_fields,)) for family in FAMILIES},
    "qwen3_moe, raw top-k": Case("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, biased": Case("qwen3_moe", {"attention_bias": True} | ROPE, (randomize_biases,)),
    "qwen3_moe, dense layer": Case("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe, sparse step": Case("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe, no head_dim": Case("qwen3_moe", {"head_dim": 16}, (edit_config("head_dim"),)),
    "qwen3_moe, all experts": Case("qwen3_moe", {"num_experts_per_tok": 8}),
    "qwen3_moe, float16": Case("qwen3_moe", {"tie_word_embeddings": True}, dtype="float16"),
    "qwen3_moe, default kv heads": Case(
        "qwen3_moe",
        {"num_attention_heads": 8, "num_key_value_heads": 4},
        (edit_config("num_key_value_heads"),),
    ),
    "mixtral, head_dim": Case("mixtral", {"head_dim": 24}),
    "mixtral, tied": Case("mixtral", {"tie_word_embeddings": True}),
    "mixtral, bfloat16": Case("mixtral", edits=(shard,), dtype="bfloat16"),
    "olmoe, renormalized top-k": Case("olmoe", {"norm_topk_prob": True}),
    "olmoe, biased": Case("olmoe", {"attention_bias": True}, (randomize_biases,)),
    "olmoe, clipped": Case("olmoe", {"clip_qkv": 0.8}),
    "olmoe, no kv heads": Case("olmoe", {"num_key_value_heads": None}),
}


def reference_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def exact_logits(reference: PreTrainedModel, token_ids: list[int]) -> oracles.Array:
    """In float64, of what transformers read from the checkpoint."""
    c = reference.config
    config = {
        "num_hidden_layers": c.num_hidden_layers,
        "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_parameters["rope_theta"],
        "num_experts_per_tok": c.num_experts_per_tok,
        "norm_topk_prob": getattr(c, "norm_topk_prob", True),
        "clip_qkv": getattr(c, "clip_qkv", None),
    }
    tensors = {name: array(tensor) for name, tensor in reference.state_dict().items()}
    return oracles.decoder_logits(token_ids, tensors, config)


def root_mean_square(values: oracles.Array) -> float:
    return float(np.sqrt((values**2).mean()))


# ---- logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_equal_those_of_transformers_up_to_rounding(tmp_path: Path, case: Case) -> None:
    case.make(tmp_path)
    reference = reference_model(tmp_path)
    token_ids = torch.randint(0, 256, (NUM_ROWS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = reference(token_ids[None]).logits[0]
    exact = exact_logits(reference, token_ids.tolist())
    opened = open_model(tmp_path)
    # Rounding errors of float32, relative to the logits' size. At least one rounding is made. At
    # most: a layer is some 16 products in a row, the longest over D terms; roundings of random
    # sign add up like sqrt(D), layers add up. (Measured: 1/6 to 1/3 of that.) Ours are of the same
    # kind as theirs, so their root mean square over all logits is no more than twice as large.
    size = root_mean_square(exact)
    layers, width = opened.config.num_hidden_layers, opened.config.hidden_size
    at_most = gamma(16 * layers * width**0.5) * size
    their_error = root_mean_square(array(theirs) - exact)
    assert UNIT_ROUNDOFF["float32"] * size < their_error < at_most
    for rows_per_block, experts in ((1, opened.experts), (NUM_ROWS, Checkpoint(tmp_path))):
        cache = opened.cache(NUM_ROWS)
        ours = opened.rows(token_ids.tolist(), cache, experts, rows_per_block)
        our_error = root_mean_square(array(ours) - exact)
        assert UNIT_ROUNDOFF["float32"] * size < our_error < 2 * their_error


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layouts_hold_the_same_tensors(tmp_path: Path, family: str) -> None:
    opened: dict[str, OpenModel] = {}
    for name, edits in LAYOUTS.items():
        Case(family, edits=edits).make(tmp_path / name)
        opened[name] = open_model(tmp_path / name)
    first, *others = opened.values()
    for other in others:
        assert other.config == first.config
        assert other.dense_tensors.keys() == first.dense_tensors.keys()
        assert same_bits(list(other.dense_tensors.values()), list(first.dense_tensors.values()))
        for key, weights in first.weights.items():
            theirs = other.weights[key]
            assert same_bits(
                [weights.gate_proj, weights.up_proj, weights.down_proj],
                [theirs.gate_proj, theirs.up_proj, theirs.down_proj],
            )


def test_norms_round_as_those_of_transformers_do() -> None:
    """To the bit, in bfloat16: rounding before the weight's product, not after."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 64, generator=generator).to(torch.bfloat16)
    norm = Qwen3MoeRMSNorm(64, eps=1e-6).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        assert torch.equal(rms_norm(hidden, norm.weight, 1e-6), norm(hidden))


# ---- greedy tokens through a bundle ---------------------------------------------------------

GREEDY_TOKENS = 64
SHALLOW = {"num_hidden_layers": 2}
BUNDLED: dict[str, Case] = {
    "qwen3_moe": Case("qwen3_moe", {"mlp_only_layers": [1]}),
    "mixtral": Case("mixtral", SHALLOW, (shard,)),
    "olmoe": Case("olmoe", SHALLOW, (make_old_config,)),
    "qwen3_moe, fused": Case("qwen3_moe", SHALLOW, (fuse_and_shard,), dtype="bfloat16"),
    "mixtral, fused": Case("mixtral", SHALLOW, (fuse_experts,), dtype="float16"),
    "olmoe, fused": Case("olmoe", SHALLOW | {"clip_qkv": 0.8}, (fuse_experts,)),
}


@pytest.mark.parametrize("case", BUNDLED.values(), ids=BUNDLED)
def test_greedy_tokens_through_a_bundle_equal_transformers(tmp_path: Path, case: Case) -> None:
    case.make(tmp_path / "checkpoint")
    (tmp_path / "text.txt").write_text("def calibrate(text):\n    return text\n" * 8)
    recipe = recipe_dict(
        tmp_path / "checkpoint",
        tmp_path / "bundle",
        calibration={"files": ["text.txt"], "num_sequences": 2, "sequence_length": 32},
        plan={"memory_budget": "8MiB", "dtype": "float32"},
    )
    build(Recipe.model_validate(recipe), tmp_path)
    with Session.open(tmp_path / "bundle") as session:
        memory = session.memory
    prompt = list(b"def main(")
    scarce = RuntimeConfig(  # two slots more than one token's experts in a layer
        memory_budget_bytes=memory.used_bytes - (memory.num_slots - 4) * memory.slot_bytes,
        num_draft_tokens=4,
        bound_by_slots=False,
    )
    with Session.open(tmp_path / "bundle", scarce) as session:
        tokens = list(session.generate_ids(prompt, GREEDY_TOKENS, stop_at_eos=False))
        assert session.num_draft_tokens == 4
        assert session.stats.cache.misses > 0
        assert session.stats.num_drafted > 0
    # If after every prefix of our output transformers' choice is our next token, then by induction
    # its own greedy output is ours.
    reference = reference_model(tmp_path / "checkpoint")
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0]
    assert tokens == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert len(tokens) == GREEDY_TOKENS
    assert len(set(tokens)) > 8  # else there would be little to compare


# ---- refusals -------------------------------------------------------------------------------


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A ``config.json`` with changes; None drops a key."""
    own = FAMILIES[family][2] if family in FAMILIES else {}
    config = json.loads(AutoConfig.for_model(family, **own).to_json_string()) | changes
    return {key: value for key, value in config.items() if key not in changes or value is not None}


UNKNOWN = {"rope_type": "spiral", "factor": 4.0, "rope_theta": 1e4}
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("qwen3_moe", {"rope_parameters": None, "rope_scaling": UNKNOWN}, ("rope_type", "'spiral'")),
    ("olmoe", {"rope_parameters": UNKNOWN}, ("rope_type", "'spiral'", "yarn")),
    ("olmoe", {"rope_parameters": {"rope_type": "linear"}}, ("rope parameter", "'factor'")),
    ("olmoe", {"rope_parameters": {"rope_type": "linear", "factor": "2x"}}, ("2x",)),
    (
        "mixtral",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.01}},
        ("partial_rotary_factor", "0.01"),
    ),
    ("deepseek_v3", {"topk_method": "greedy"}, ("topk_method", "'greedy'")),
    ("deepseek_v2", {"norm_topk_prob": True}, ("norm_topk_prob", "True")),
    ("ernie4_5_moe", {"use_bias": True}, ("use_bias", "True")),
    ("gpt_oss", {"layer_types": ["full_attention"]}, ("layer_types", "1 entries")),
    ("mixtral", {"sliding_window": 4096}, ("sliding_window", "4096")),
    ("qwen3_moe", {"use_sliding_window": True}, ("use_sliding_window", "True")),
    *((family, {"hidden_act": "gelu"}, ("hidden_act", "'gelu'")) for family in FAMILIES),
    *(
        (family, {"quantization_config": {"bits": 4}}, ("quantization_config.quant_method None",))
        for family in FAMILIES
    ),
    ("mixtral", {"model_type": "llama"}, ("model_type", "'llama'", "mixtral", "olmoe")),
    ("mixtral", {"model_type": None}, ("model_type", "None")),
    ("mixtral", {"model_type": ["mixtral"]}, ("model_type", "['mixtral']")),
    ("olmoe", {"num_experts": None}, ("num_experts", "missing")),
    ("qwen3_moe", {"hidden_size": None}, ("hidden_size", "missing")),
    ("mixtral", {"hidden_size": "64"}, ("hidden_size", "'64'", "int")),
    ("mixtral", {"hidden_size": 64.5}, ("hidden_size", "64.5")),
    ("mixtral", {"hidden_size": True}, ("hidden_size", "True")),
    ("qwen3_moe", {"norm_topk_prob": 1}, ("norm_topk_prob", "1", "bool")),
    ("olmoe", {"clip_qkv": "8"}, ("clip_qkv", "'8'", "float")),
    ("mixtral", {"hidden_size": -4}, ("hidden_size", "-4")),
    ("mixtral", {"num_key_value_heads": 3}, ("num_key_value_heads", "3")),
    ("mixtral", {"head_dim": 7}, ("head_dim", "7")),
    ("olmoe", {"num_experts_per_tok": 9}, ("num_experts_per_tok", "9")),
    ("qwen3_moe", {"decoder_sparse_step": 1000}, ("no layer with routed experts",)),
    ("qwen3_moe", {"rope_parameters": None, "rope_theta": "1e4"}, ("rope_theta", "'1e4'")),
    ("qwen3_moe", {"rope_parameters": {"rope_theta": 0}}, ("rope_theta", "0")),
    ("qwen3_moe", {"rope_parameters": ["default"]}, ("rope_parameters", "['default']")),
    ("qwen3_moe", {"rope_scaling": "linear"}, ("rope_scaling", "'linear'")),
    ("qwen3_moe", {"mlp_only_layers": 1}, ("mlp_only_layers", "1")),
    ("qwen3_moe", {"mlp_only_layers": ["1"]}, ("mlp_only_layers", "['1']")),
    ("qwen3_moe", {"decoder_sparse_step": "2"}, ("decoder_sparse_step", "'2'")),
]


@pytest.mark.parametrize(
    ("family", "changes", "named"), REFUSED, ids=[f"{f}-{c}" for f, c, _ in REFUSED]
)
def test_what_is_not_supported_is_refused_by_field_and_value(
    family: str, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(config_of(family, **changes), "folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json: ")
    assert not [part for part in named if part not in message], message


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 4096}),
        ("mixtral", {"sliding_window": None}),
        ("mixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("olmoe", {"rope_parameters": None, "rope_scaling": {"type": "default"}}),
        ("olmoe", {"unheard_of": 1}),
    ],
)
def test_what_changes_nothing_is_not_refused(family: str, changes: dict[str, Any]) -> None:
    read_config(config_of(family, **changes), "config.json")


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_null_key_value_heads_mean_one_for_each_query_head(family: str) -> None:
    config = config_of(family) | {"num_attention_heads": 32, "num_key_value_heads": None}
    assert read_config(config, "config.json").num_key_value_heads == 32


def test_all_problems_are_named_at_once() -> None:
    changes = {"hidden_act": "gelu", "sliding_window": 9, "hidden_size": "x", "vocab_size": None}
    with pytest.raises(CheckpointError) as caught:
        read_config(config_of("mixtral", **changes), "config.json")
    assert not [name for name in changes if name not in str(caught.value)]


def test_a_checkpoint_of_an_unknown_family_is_refused_by_its_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(model_type="gpt2")(tmp_path)
    with pytest.raises(CheckpointError, match="'gpt2' is not supported") as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
