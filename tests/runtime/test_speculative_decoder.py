"""The loop: whatever the drafter proposes, the target's own tokens come out and nothing else stays.

Models here are resident: no bundle, no cache, no threads. Prefetching and caching around the same
loop are tested in ``test_expert_cache.py``, ``test_session.py`` and end to end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from specter_build.quantize_draft import quantize_layer
from specter_build.recipe import DraftRecipe
from specter_runtime.config import GenerationLimits, RuntimeConfig, SamplingConfig
from specter_runtime.draft_engine import Draft, Drafter, RoutingObserver, SelfDrafter
from specter_runtime.errors import SpecterError
from specter_runtime.experts import Batch, ExpertProvider, PackedExperts, Routing
from specter_runtime.governor import Governor, Lookahead
from specter_runtime.kv_cache import KVCache
from specter_runtime.predictor import Prediction
from specter_runtime.session import Session
from specter_runtime.speculative_decoder import SpeculativeDecoder
from tests import oracles
from tests.checkpoints import make_checkpoint
from tests.models import OpenModel, cache_contents, open_model, random_model, same_bits

PROMPT = [7, 3, 11]
NUM_TOKENS = 12
CAPACITY = len(PROMPT) + NUM_TOKENS - 1  # the last token is never run
GREEDY = SamplingConfig()
DRAFT_SIZES = tuple(range(9))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    """Two layers of eight experts; its greedy tokens hardly repeat."""
    folder = tmp_path_factory.mktemp("target")
    return random_model(folder, num_hidden_layers=2, hidden_size=32, seed=3)


@pytest.fixture(scope="module")
def quantized(target: OpenModel) -> PackedExperts:
    """The draft's experts, at 2 bits: near enough to be right now and then."""
    recipe = DraftRecipe(bits=2, group_size=16, symmetric=True)
    packed = quantize_layer(target.weights, recipe, [2] * target.config.num_experts, None).packed
    return PackedExperts(packed)


@pytest.fixture(scope="module")
def expected(target: OpenModel) -> list[int]:
    """The target's greedy tokens, one row at a time, without the decoder."""
    return list(itertools.islice(greedy_tokens(target, PROMPT), NUM_TOKENS))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=1.0)], ids=str)
def test_model_that_overflows_its_dtype_is_an_error_and_no_nonsense(
    tmp_path: Path, sampling: SamplingConfig
) -> None:
    """Weights that bfloat16 holds and float16 does not."""
    make_checkpoint(tmp_path, dtype=torch.bfloat16, num_hidden_layers=1, hidden_size=32)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][5, 3] = 1e5
    save_file(tensors, path)
    limits = GenerationLimits(3)
    for dtype in (torch.bfloat16, torch.float16):
        opened = open_model(tmp_path, dtype)
        drafter = SelfDrafter(opened.model, opened.experts, ())
        decoder, _ = make_decoder(opened, drafter, 2, sampling)
        if dtype == torch.bfloat16:
            assert sum(map(len, decoder.generate(PROMPT, limits))) == 3
        else:
            with pytest.raises(SpecterError, match=r"logits are not finite: .* torch\.float16"):
                list(decoder.generate(PROMPT, limits))


def greedy_tokens(target: OpenModel, prompt: list[int]) -> Iterator[int]:
    cache = target.cache(CAPACITY + 1)
    logits = target.rows(prompt, cache, rows_per_block=len(prompt))
    while True:
        token = int(logits[-1].argmax())
        yield token
        logits = target.rows([token], cache)


@dataclass
class ScriptedDrafter:
    """Proposes the target's tokens up to position ``right`` of a window, then wrong ones.

    Like any drafter it leaves entries of its own in the cache; ``asked`` is what it was asked for.
    """

    target: OpenModel
    tokens: list[int]
    right: int
    asked: list[int] = field(default_factory=list)

    def propose(
        self,
        last_token_id: int,
        num_draft_tokens: int,
        kv_cache: KVCache,
        sampling: SamplingConfig,
        generator: torch.Generator,
        on_routings: RoutingObserver,
    ) -> Draft:
        self.asked.append(num_draft_tokens)
        start = kv_cache.length - len(PROMPT) + 1
        proposed = self.tokens[start : start + num_draft_tokens]
        for i in range(self.right, len(proposed)):
            proposed[i] = (proposed[i] + 1) % self.target.config.vocab_size
        self.target.rows([last_token_id, *proposed[:-1]], kv_cache)
        return Draft(proposed, None)


@dataclass
class Parts:
    """What the drafters under test are made of."""

    target: OpenModel
    expected: list[int]
    quantized: PackedExperts

    def itself(self, eos: Sequence[int] = ()) -> Drafter:
        return SelfDrafter(self.target.model, self.target.experts, eos)

    def from_quantized(self) -> Drafter:
        return SelfDrafter(self.target.model, self.quantized, ())

    def scripted(self, right: int) -> ScriptedDrafter:
        return ScriptedDrafter(self.target, self.expected, right)


@pytest.fixture
def parts(target: OpenModel, expected: list[int], quantized: PackedExperts) -> Parts:
    return Parts(target, expected, quantized)


DRAFTERS: dict[str, Callable[[Parts], Drafter]] = {
    "the target itself": lambda parts: parts.itself(),
    "quantized": lambda parts: parts.from_quantized(),
    "always wrong": lambda parts: parts.scripted(0),
    "right for one": lambda parts: parts.scripted(1),
    "right for three": lambda parts: parts.scripted(3),
}


def make_decoder(
    target: OpenModel,
    drafter: Drafter,
    num_draft_tokens: int,
    sampling: SamplingConfig = GREEDY,
    capacity: int = CAPACITY,
    experts: ExpertProvider | None = None,
) -> tuple[SpeculativeDecoder, KVCache]:
    cache = target.cache(capacity)
    return (
        SpeculativeDecoder(
            target.model,
            experts or target.experts,
            drafter,
            None,
            cache,
            Governor([Lookahead(num_draft_tokens)]),
            sampling,
        ),
        cache,
    )


def decode(
    target: OpenModel,
    drafter: Drafter,
    num_draft_tokens: int,
    limits: GenerationLimits,
    sampling: SamplingConfig = GREEDY,
) -> list[list[int]]:
    """Committed tokens, pass by pass."""
    decoder, _ = make_decoder(target, drafter, num_draft_tokens, sampling)
    return list(decoder.generate(PROMPT, limits))


# ---- greedy: lossless -----------------------------------------------------------------------


def test_the_expected_tokens_are_worth_comparing(expected: list[int]) -> None:
    assert len(set(expected)) > NUM_TOKENS // 2


def pass_lengths(num_draft_tokens: int, right: int) -> list[int]:
    """Of the prompt's pass and of windows of which ``right`` tokens at most are accepted."""
    lengths = [1]
    while (remaining := NUM_TOKENS - sum(lengths)) > 0:
        lengths.append(1 + min(right, num_draft_tokens, remaining - 1))
    return lengths


@pytest.mark.parametrize("num_draft_tokens", DRAFT_SIZES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_tokens_are_the_targets_own(parts: Parts, name: str, num_draft_tokens: int) -> None:
    """And exactly the drafted tokens before the first wrong one are accepted."""
    drafter = DRAFTERS[name](parts)
    passes = decode(parts.target, drafter, num_draft_tokens, GenerationLimits(NUM_TOKENS))
    assert [token for tokens in passes for token in tokens] == parts.expected
    if name != "quantized":
        right = drafter.right if isinstance(drafter, ScriptedDrafter) else num_draft_tokens
        assert list(map(len, passes)) == pass_lengths(num_draft_tokens, right)


def test_the_target_as_its_own_draft_is_always_accepted(parts: Parts) -> None:
    decoder, _ = make_decoder(parts.target, parts.itself(), 4)
    list(decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS)))
    assert decoder.stats.num_accepted == decoder.stats.num_drafted > 0
    assert decoder.stats.acceptance_rate == 1.0


def test_the_quantized_draft_is_right_now_and_then(parts: Parts) -> None:
    """Else the tests with it would be those of a perfect or of a useless drafter."""
    decoder, _ = make_decoder(parts.target, parts.from_quantized(), 4)
    list(decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS)))
    assert 0 < decoder.stats.num_accepted < decoder.stats.num_drafted


def test_a_prompt_of_several_chunks_is_run_to_its_end(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token after a prompt in chunks of 4 is that after the prompt in one block."""
    monkeypatch.setattr("specter_runtime.speculative_decoder.PROMPT_CHUNK_TOKENS", 4)
    prompt = list(range(40, 50))
    decoder, cache = make_decoder(parts.target, parts.itself(), 2)
    passes = decoder.generate(prompt, GenerationLimits(4))
    tokens = [token for committed in passes for token in committed]
    assert tokens == list(itertools.islice(greedy_tokens(parts.target, prompt), 4))
    assert cache.length == len(prompt) + 3


# ---- where it ends --------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 8])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, NUM_TOKENS])
def test_max_new_tokens_is_respected_exactly(
    parts: Parts, max_new_tokens: int, num_draft_tokens: int
) -> None:
    limits = GenerationLimits(max_new_tokens)
    passes = decode(parts.target, parts.itself(), num_draft_tokens, limits)
    assert [token for tokens in passes for token in tokens] == parts.expected[:max_new_tokens]


def test_windows_are_shortened_near_the_end(parts: Parts) -> None:
    """No more is drafted than can be committed beside the bonus token; the last needs no draft."""
    for max_new_tokens, asked in ((12, [5, 4]), (9, [5, 1]), (8, [5])):
        drafter = parts.scripted(99)
        decode(parts.target, drafter, 5, GenerationLimits(max_new_tokens))
        assert drafter.asked == asked


@pytest.mark.parametrize("num_draft_tokens", [0, 5, 8])
def test_a_cache_for_all_but_the_last_token_is_enough(parts: Parts, num_draft_tokens: int) -> None:
    """Room for what is committed is room for what is drafted."""
    decoder, cache = make_decoder(parts.target, parts.scripted(2), num_draft_tokens)
    list(decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS)))
    assert cache.length == cache.capacity_tokens == len(PROMPT) + NUM_TOKENS - 1


@pytest.mark.parametrize("stops_drafting", [True, False])
@pytest.mark.parametrize("position", [0, 1, 2, 4, 5])
def test_an_end_token_inside_a_window_ends_the_output_right_there(
    parts: Parts, position: int, stops_drafting: bool
) -> None:
    """Also when the drafter does not know it and drafts past it."""
    end = parts.expected[position]
    assert end not in parts.expected[:position]
    drafter = parts.itself([end] if stops_drafting else [])
    decoder, _ = make_decoder(parts.target, drafter, 4)
    limits = GenerationLimits(NUM_TOKENS, frozenset({end, 1000}))
    tokens = [token for tokens in decoder.generate(PROMPT, limits) for token in tokens]
    assert tokens == parts.expected[: position + 1]
    assert decoder.stats.num_new_tokens == position + 1


def test_the_self_drafter_ends_behind_an_end_token(parts: Parts) -> None:
    end = parts.expected[2]
    cache = parts.target.cache(CAPACITY)
    parts.target.rows(PROMPT, cache, rows_per_block=len(PROMPT))
    draft = parts.itself([end]).propose(
        parts.expected[0], 8, cache, GREEDY, torch.Generator(), lambda routings: None
    )
    assert draft.token_ids == parts.expected[1:3]


def test_a_drafter_may_propose_less_than_asked_or_nothing(parts: Parts) -> None:
    class Lazy(ScriptedDrafter):
        def propose(self, last_token_id: int, num_draft_tokens: int, *rest: object) -> Draft:
            fewer = len(self.asked) % 3
            if fewer == 0:
                self.asked.append(num_draft_tokens)
                return Draft([], None)
            return super().propose(last_token_id, min(fewer, num_draft_tokens), *rest)  # type: ignore[arg-type]

    drafter = Lazy(parts.target, parts.expected, 99)
    passes = decode(parts.target, drafter, 8, GenerationLimits(NUM_TOKENS))
    assert [token for tokens in passes for token in tokens] == parts.expected


# ---- what stays behind ----------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [1, 5])
@pytest.mark.parametrize("name", ["quantized", "always wrong", "right for one"])
def test_rejected_draft_tokens_leave_no_trace_in_kv_cache(
    parts: Parts, name: str, num_draft_tokens: int
) -> None:
    """After every pass, the cache is that of plain decoding of what is committed."""
    target = parts.target
    decoder, cache = make_decoder(target, DRAFTERS[name](parts), num_draft_tokens)
    plain = target.cache(CAPACITY)
    target.rows(PROMPT, plain, rows_per_block=len(PROMPT))
    num_committed = 0
    for tokens in decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS)):
        num_committed += len(tokens)
        for token in parts.expected[plain.length - len(PROMPT) : num_committed - 1]:
            target.rows([token], plain)
        assert cache.length == plain.length == len(PROMPT) + num_committed - 1
        assert same_bits(cache_contents(cache, target.config), cache_contents(plain, target.config))


def test_an_abandoned_generation_leaves_the_decoder_usable(parts: Parts) -> None:
    decoder, _ = make_decoder(parts.target, parts.from_quantized(), 4)
    abandoned = decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS))
    next(abandoned), next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    passes = decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS))
    assert [token for tokens in passes for token in tokens] == parts.expected
    assert decoder.stats.num_new_tokens == NUM_TOKENS


class FailingExperts:
    """Experts of a model, of which those of the second layer cannot be had at times."""

    def __init__(self, target: OpenModel) -> None:
        self._experts = target.experts
        self.fails = False

    def experts(self, routing: Routing) -> Iterator[Batch]:
        if self.fails and routing.layer == 1:
            raise OSError("no such expert")
        yield from self._experts.experts(routing)


@pytest.mark.parametrize("fails_in", ["draft", "target"])
def test_a_failure_leaves_the_decoder_usable(parts: Parts, fails_in: str) -> None:
    failing = FailingExperts(parts.target)
    draft_experts, experts = (
        failing if fails_in == where else parts.target.experts for where in ("draft", "target")
    )
    drafter = SelfDrafter(parts.target.model, draft_experts, ())
    decoder, _ = make_decoder(parts.target, drafter, 4, experts=experts)
    generation = decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS))
    next(generation), next(generation)
    failing.fails = True
    with pytest.raises(OSError, match="no such expert"):
        next(generation)
    failing.fails = False
    passes = decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS))
    assert [token for tokens in passes for token in tokens] == parts.expected


class RecordingPrefetcher:
    """Notes what it is told; stands in for the I/O behind it, not for the decoder."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def observe(self, routings: Sequence[object]) -> None:
        self.events.append(len(routings))

    def end_window(self) -> None:
        self.events.append("end")


@pytest.mark.parametrize("abandon", [True, False])
def test_the_prefetcher_hears_of_every_drafted_token_and_of_every_windows_end(
    parts: Parts, abandon: bool
) -> None:
    prefetcher = RecordingPrefetcher()
    cache = parts.target.cache(CAPACITY)
    decoder = SpeculativeDecoder(
        parts.target.model,
        parts.target.experts,
        parts.itself(),
        prefetcher,  # type: ignore[arg-type]
        cache,
        Governor([Lookahead(3)]),
        GREEDY,
    )
    generation = decoder.generate(PROMPT, GenerationLimits(9))
    window = [2, 2, 2, "end"]  # three drafted tokens of two layers each
    next(generation)
    assert prefetcher.events == []
    next(generation)
    assert prefetcher.events == window
    if abandon:
        generation.close()  # type: ignore[attr-defined]
        assert prefetcher.events == [*window, "end"]
    else:
        assert list(map(len, generation)) == [4]
        assert prefetcher.events == [*window, *window, "end"]


def test_a_paused_generation_leaves_inference_mode_to_the_caller(tiny_bundle: Path) -> None:
    """What the caller computes between two tokens must not become an inference tensor."""
    with Session.open(tiny_bundle, RuntimeConfig(num_draft_tokens=2)) as session:
        generation = session.generate_ids(PROMPT, 8)
        next(generation)
        between = torch.ones(1)
        generation.close()  # type: ignore[attr-defined]
    assert not between.is_inference()
    assert not torch.is_inference_mode_enabled()


# ---- governed -------------------------------------------------------------------------------


class ScriptedGovernor(Governor):
    """Learns other times than it is told: those that the test says each way takes."""

    def __init__(self, ways: Sequence[Lookahead], seconds: Callable[[int, Lookahead], float]):
        super().__init__(ways)
        self._seconds = seconds
        self.observed: list[tuple[Lookahead, int]] = []

    def observe(self, way: Lookahead, seconds: float, num_tokens: int) -> None:
        assert seconds > 0
        super().observe(way, self._seconds(len(self.observed), way), num_tokens)
        self.observed.append((way, num_tokens))


PLAIN, PREDICTS, FOUR = Lookahead(0), Lookahead(0, predicts=True), Lookahead(4)
SCRIPTS: dict[str, Callable[[int, Lookahead], float]] = {
    "plain wins": lambda window, way: 1.0 if way == PLAIN else 9.0,
    "the draft wins": lambda window, way: 1.0 if way == FOUR else 9.0,
    "the predictor wins": lambda window, way: 1.0 if way == PREDICTS else 9.0,
    "all alike": lambda window, way: 1.0,
    "now one, now the other": lambda window, way: 9.0 if (window // 20) % 2 == (way == FOUR) else 1,
}


class HearingPrefetcher(RecordingPrefetcher):
    """Notes passes with predictions as well."""

    def begin_pass(self) -> None:
        self.events.append("pass")

    def end_pass(self, num_layers: int) -> None:
        assert self.events.pop() == "pass"
        self.events.append(f"{num_layers} layers foretold")

    def observe_prediction(self, predictions: Sequence[Prediction]) -> None:
        raise AssertionError("the model has no predictor")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("draft", ["the target itself", "quantized", "nothing resident"])
def test_greedy_tokens_do_not_depend_on_what_the_governor_chooses(
    parts: Parts, script: str, draft: str
) -> None:
    num_tokens = 90
    expected = list(itertools.islice(greedy_tokens_of(parts.target, num_tokens), num_tokens))
    governor = ScriptedGovernor([PLAIN, PREDICTS, FOUR], SCRIPTS[script])
    drafters = {
        "the target itself": parts.itself,
        "quantized": parts.from_quantized,
        "nothing resident": lambda: SelfDrafter(parts.target.model, PackedExperts({}), ()),
    }
    prefetcher = HearingPrefetcher()
    decoder = SpeculativeDecoder(
        parts.target.model,
        parts.target.experts,
        drafters[draft](),
        prefetcher,  # type: ignore[arg-type]
        parts.target.cache(len(PROMPT) + num_tokens),
        governor,
        GREEDY,
    )
    passes = list(decoder.generate(PROMPT, GenerationLimits(num_tokens)))
    assert [token for tokens in passes for token in tokens] == expected
    counts = decoder.stats.windows_by_lookahead
    assert counts.keys() == {"K = 0", "K = 0 + predictor", "K = 4"}
    assert counts.total() == decoder.stats.num_windows == len(passes) - 1
    assert prefetcher.events.count("2 layers foretold") == counts["K = 0 + predictor"]
    assert [n for _, n in governor.observed] == [len(tokens) for tokens in passes[1:]][
        : len(governor.observed)
    ]
    if script == "plain wins":
        assert counts["K = 4"] == counts["K = 0 + predictor"] == 2
    if script == "the draft wins" and draft == "the target itself":
        assert counts["K = 4"] > counts["K = 0"] + counts["K = 0 + predictor"]


def greedy_tokens_of(target: OpenModel, num_tokens: int) -> Iterator[int]:
    cache = target.cache(len(PROMPT) + num_tokens)
    logits = target.rows(PROMPT, cache, rows_per_block=len(PROMPT))
    for _ in range(num_tokens):
        token = int(logits[-1].argmax())
        yield token
        logits = target.rows([token], cache)


def test_windows_that_are_cut_short_teach_nothing(parts: Parts) -> None:
    """Of 12 tokens, the first is the prompt's; windows of 1 + 4, 1 + 4 and 1 + 0 are left."""
    governor = ScriptedGovernor([FOUR], lambda window, way: 1.0)
    decoder = SpeculativeDecoder(
        parts.target.model,
        parts.target.experts,
        parts.itself(),
        None,
        parts.target.cache(CAPACITY),
        governor,
        GREEDY,
    )
    passes = list(decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS)))
    assert [len(tokens) for tokens in passes] == [1, 5, 5, 1]
    assert governor.observed == [(FOUR, 5), (FOUR, 5)]


# ---- statistics -----------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "num_draft_tokens"), [(0, 4), (2, 4), (99, 0)])
def test_counters_add_up(parts: Parts, right: int, num_draft_tokens: int) -> None:
    drafter = parts.scripted(right)
    decoder, _ = make_decoder(parts.target, drafter, num_draft_tokens)
    passes = list(decoder.generate(PROMPT, GenerationLimits(NUM_TOKENS)))
    counters = decoder.stats
    assert counters.num_prompt_tokens == len(PROMPT)
    assert counters.num_new_tokens == NUM_TOKENS
    assert counters.num_windows == len(passes) - 1
    assert counters.num_drafted == sum(drafter.asked)
    assert counters.num_accepted == sum(len(tokens) - 1 for tokens in passes)
    times = counters.committed_seconds
    assert times == sorted(times)
    assert len(set(times)) == len(passes)  # tokens of one verification share a time


# ---- sampling -------------------------------------------------------------------------------

SAMPLED_VOCABULARY, SAMPLED_LENGTH, NUM_SAMPLES = 3, 4, 300
SAMPLED_PROMPT = [1, 2]
FALSE_ALARM = 1e-5


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenModel, OpenModel]:
    """Two models of three tokens and one layer that disagree: target and draft."""
    sizes = {
        "vocab_size": SAMPLED_VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "initializer_range": 0.4,
    }
    folder = tmp_path_factory.mktemp("small-vocabulary")
    target = random_model(folder, seed=1, **sizes)
    other = random_model(tmp_path_factory.mktemp("other"), seed=2, **sizes)
    return target, other


def exact_distribution(
    opened: OpenModel, experts: ExpertProvider, sampling: SamplingConfig
) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of ``SAMPLED_LENGTH`` tokens, from the model's logits."""

    def row(prefix: tuple[int, ...]) -> list[float]:
        cache = opened.cache(8)
        logits = opened.rows([*SAMPLED_PROMPT, *prefix], cache, experts)[-1].tolist()
        return oracles.filtered_probabilities(
            logits, sampling.temperature, sampling.top_k, sampling.top_p
        )

    rows = {
        prefix: row(prefix)
        for length in range(SAMPLED_LENGTH)
        for prefix in itertools.product(range(SAMPLED_VOCABULARY), repeat=length)
    }
    return {
        tokens: oracles.sequence_probability(rows.__getitem__, tokens)
        for tokens in itertools.product(range(SAMPLED_VOCABULARY), repeat=SAMPLED_LENGTH)
    }


def chi_square_p_value(
    counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]
) -> float:
    """Of the counts under ``exact``; cells expected fewer than 5 times are taken together."""
    total = counts.total()
    assert all(exact[tokens] > 0 for tokens in counts), "an impossible sequence was drawn"
    large = [tokens for tokens, probability in exact.items() if probability * total >= 5]
    observed = [counts[tokens] for tokens in large]
    expected = [exact[tokens] * total for tokens in large]
    if total - sum(expected) >= 5:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    else:  # too little for a cell of its own
        observed[-1] += total - sum(observed)
        expected[-1] += total - sum(expected)
    return float(stats.chisquare(observed, expected).pvalue)


def sample_counts(
    target: OpenModel, drafter: Drafter, sampling: SamplingConfig
) -> tuple[Counter[tuple[int, ...]], float]:
    """Sequences drawn with seeds 0, 1, ..., and the share of drafted tokens accepted."""
    counts: Counter[tuple[int, ...]] = Counter()
    cache = target.cache(8)
    drafted = accepted = 0
    with torch.inference_mode():
        for seed in range(NUM_SAMPLES):
            seeded = SamplingConfig(sampling.temperature, sampling.top_k, sampling.top_p, seed)
            governor = Governor([Lookahead(2)])
            decoder = SpeculativeDecoder(
                target.model, target.experts, drafter, None, cache, governor, seeded
            )
            passes = decoder.generate(SAMPLED_PROMPT, GenerationLimits(SAMPLED_LENGTH))
            counts[tuple(token for tokens in passes for token in tokens)] += 1
            drafted += decoder.stats.num_drafted
            accepted += decoder.stats.num_accepted
    return counts, accepted / drafted


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingConfig(1.0), id="plain"),
        pytest.param(SamplingConfig(0.8, top_k=2, top_p=0.95), id="filtered"),
    ],
)
def test_sampling_with_a_draft_keeps_the_targets_distribution(
    small_vocabulary: tuple[OpenModel, OpenModel], sampling: SamplingConfig
) -> None:
    """Chi-square over all sequences of four tokens; the first window drafts two of them.

    The seeds are fixed, so the outcome is; over a fresh choice of seeds a correct decoder would
    fail with probability 1e-5 in either case.
    """
    target, other = small_vocabulary
    exact = exact_distribution(target, target.experts, sampling)
    # The draft is the target's network over other experts: its distribution is another.
    drafter = SelfDrafter(target.model, other.experts, ())
    counts, acceptance_rate = sample_counts(target, drafter, sampling)
    assert chi_square_p_value(counts, exact) > FALSE_ALARM
    assert 0.2 < acceptance_rate < 0.95
    # The draft's own distribution would be told apart by as many samples.
    draft_exact = exact_distribution(target, other.experts, sampling)
    drawn_from_draft = Counter(
        {tokens: round(p * NUM_SAMPLES) for tokens, p in draft_exact.items() if exact[tokens] > 0}
    )
    assert chi_square_p_value(drawn_from_draft, exact) < FALSE_ALARM


def sampled(
    parts: Parts, drafter: Drafter, seed: int, num_draft_tokens: int = 3
) -> list[list[int]]:
    sampling = SamplingConfig(temperature=1.5, seed=seed)
    limits = GenerationLimits(NUM_TOKENS)
    return decode(parts.target, drafter, num_draft_tokens, limits, sampling)


def test_the_same_seed_gives_the_same_output_and_another_seed_another(parts: Parts) -> None:
    first, again, other = (sampled(parts, parts.from_quantized(), seed) for seed in (5, 5, 6))
    assert first == again != other


def test_a_decoder_starts_over_with_its_seed(parts: Parts) -> None:
    sampling = SamplingConfig(temperature=1.5, seed=5)
    decoder, _ = make_decoder(parts.target, parts.from_quantized(), 3, sampling)
    first, second = (list(decoder.generate(PROMPT, GenerationLimits(9))) for _ in range(2))
    assert first == second


def test_when_sampling_the_target_as_its_own_draft_is_always_accepted(parts: Parts) -> None:
    passes = sampled(parts, parts.itself(), seed=1, num_draft_tokens=4)
    assert list(map(len, passes)) == pass_lengths(4, right=99)


def test_when_sampling_a_draft_without_probabilities_is_rejected(parts: Parts) -> None:
    """Its tokens' chances are unknown; accepting any of them would bend the distribution."""
    passes = sampled(parts, parts.scripted(99), seed=1)
    assert list(map(len, passes)) == [1] * NUM_TOKENS
