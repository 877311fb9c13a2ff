"""Train the demo mixture-of-experts language model on Python source code.

Everything Specter shows about experts (which are hot, how well a draft predicts them, what a cache
saves) needs a router that has *learnt* something: with random weights it spreads tokens almost
evenly and there is nothing to predict. This script makes a checkpoint whose experts are trained and
specialized, small enough to commit, from data that is on every machine with Python.

Data: the sources of Python's standard library (PSF-2.0) and, with ``--packages``, those of
installed packages, each under its own licence. Files are held out before training, so that the
printed ``val`` loss is about text the model has not seen.

The length of a run is given in minutes, not steps, because a laptop is the intended machine: the
learning rate follows the clock and reaches its floor in time on a fast machine or a slow one. The
price is that weights are not reproducible bit by bit.

Usage:
    python recipes/demo/train.py OUT --minutes 55
    python recipes/demo/train.py OUT2 --init OUT --minutes 30 --lr 1e-3 --packages numpy torch

Needs torch, transformers, tokenizers and numpy; runs on the CPU.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

TokenIds = npt.NDArray[np.int32]

VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
END_OF_TEXT = "<|endoftext|>"

# Tests repeat themselves, encodings and help topics are tables, lib2to3 holds Python 2, Inductor
# holds templates of generated code.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "_inductor",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "testing",
        "tests",
    }
)
MAX_FILE_BYTES = 400_000
MIN_NON_ASCII_CHARS = 500

HELD_OUT_PART = 50  # one file in this many
WARMUP_STEPS = 100
FLAT_PART = 0.3  # of the run at the full learning rate, before the cosine
FLOOR = 0.02  # of the learning rate, at the end
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
NUM_EVAL_BATCHES = 8
SECONDS_BETWEEN_REPORTS = 60.0

# Independent streams, so that one more evaluation does not change what is trained on.
SEED_WEIGHTS = 0
SEED_SPLIT = 0
SEED_EVAL = 1
SEED_TRAIN = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for; see ``parse_args`` for the meaning of each field."""

    out: Path
    minutes: float
    batch: int
    seq: int
    lr: float
    init: Path | None
    packages: tuple[str, ...]


def main() -> None:
    """Train a checkpoint and save it, tokenizer included, in Hugging Face's layout."""
    options = parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED_WEIGHTS)

    texts = list(read_sources(stdlib_root()))
    print(f"files {len(texts)}, {sum(map(len, texts)) / 1e6:.1f} M characters")
    tokenizer = load_or_train_tokenizer(texts, options.init)
    save_tokenizer(tokenizer, options.out)
    train_ids, held_out_ids = encode_corpus(tokenizer, texts, options.packages)
    print(f"tokens {len(train_ids)}, held out {len(held_out_ids)}")

    model = load_or_create_model(options.init, end_of_text_id(tokenizer))
    print(f"parameters {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M")
    num_steps = train(model, train_ids, held_out_ids, options)
    print(f"final val {held_out_loss(model, held_out_ids, options):.3f}, steps {num_steps}")
    save_model(model, options.out)


def parse_args() -> Options:
    """Read the command line and refuse what would only fail after minutes of work."""
    parser = argparse.ArgumentParser(
        description="Train the demo mixture-of-experts language model on Python source code."
    )
    add = parser.add_argument
    add("out", type=Path, help="folder to write the checkpoint to")
    add("--minutes", type=float, default=60.0, help="length of the run (default: %(default)s)")
    add("--batch", type=int, default=12, help="sequences in a step (default: %(default)s)")
    add("--seq", type=int, default=256, help="tokens in a sequence (default: %(default)s)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    add("--init", type=Path, help="checkpoint to go on from; its tokenizer is kept")
    add("--packages", nargs="*", default=[], help="installed packages to train on as well")
    args = parser.parse_args()

    if args.minutes <= 0 or args.lr <= 0 or args.batch < 1:
        parser.error("--minutes, --lr and --batch must be positive")
    if not 2 <= args.seq <= MAX_POSITIONS:
        parser.error(f"--seq must be between 2 and {MAX_POSITIONS}, got {args.seq}")
    if args.init is not None and not (args.init / "tokenizer.json").is_file():
        parser.error(f"--init {args.init}: not a checkpoint folder, it has no tokenizer.json")
    missing = [name for name in args.packages if not package_root(name).is_dir()]
    if missing:
        parser.error(f"--packages: not installed as a folder here: {', '.join(missing)}")
    return Options(**{**vars(args), "packages": tuple(args.packages)})


def stdlib_root() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def package_root(name: str) -> Path:
    """Return the folder an installed package's sources would be in."""
    return Path(sysconfig.get_path("purelib")) / name


def read_sources(root: Path) -> Iterator[str]:
    """Yield the Python files under a folder that are worth learning from, in sorted order."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        if path.stat().st_size > MAX_FILE_BYTES:  # generated, as a rule
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.isascii() or len(text) > MIN_NON_ASCII_CHARS:
            yield text


def load_or_train_tokenizer(texts: list[str], init: Path | None) -> Tokenizer:
    """Take the tokenizer of ``init``, or train a byte-level BPE on the texts."""
    if init is not None:
        return Tokenizer.from_file(str(init / "tokenizer.json"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # All 256 bytes are in the alphabet, so any text can be encoded, also what is not Python.
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write the tokenizer as transformers expects it, one token serving as bos, eos and pad."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
    wrapped.save_pretrained(out)


def encode_corpus(
    tokenizer: Tokenizer, texts: list[str], packages: Iterable[str]
) -> tuple[TokenIds, TokenIds]:
    """Split the texts by file and return the ids to train on and the ids held out.

    Packages are only trained on. The held-out loss of a run with them is then comparable with that
    of a run without.
    """
    order = np.random.default_rng(SEED_SPLIT).permutation(len(texts)).tolist()
    held_out = set(order[: len(texts) // HELD_OUT_PART])
    held_out_ids = encode(tokenizer, (texts[i] for i in sorted(held_out)))
    train_parts = [encode(tokenizer, (texts[i] for i in order if i not in held_out))]
    train_parts += [encode(tokenizer, read_sources(package_root(name))) for name in packages]
    return np.concatenate(train_parts), held_out_ids


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenIds:
    """Return the ids of the texts end to end, each closed by the end-of-text token."""
    end = end_of_text_id(tokenizer)
    parts = [np.array([*tokenizer.encode(text).ids, end], dtype=np.int32) for text in texts]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of the token between files, which a tokenizer from elsewhere may not have."""
    token_id = tokenizer.token_to_id(END_OF_TEXT)
    if token_id is None:
        raise SystemExit(f"the tokenizer has no token {END_OF_TEXT!r}: not made by this script")
    return int(token_id)


def load_or_create_model(init: Path | None, end_id: int) -> Qwen3MoeForCausalLM:
    """Return the model to train, in float32 and with the load-balancing loss switched on.

    Without that loss a few experts take all tokens early on and the others are never trained.
    """
    if init is not None:
        return Qwen3MoeForCausalLM.from_pretrained(
            init, dtype=torch.float32, output_router_logits=True
        )
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )
    return Qwen3MoeForCausalLM(config)


def train(
    model: Qwen3MoeForCausalLM, train_ids: TokenIds, held_out_ids: TokenIds, options: Options
) -> int:
    """Train until the time is up and return the number of steps.

    About once a minute the losses are printed and the weights put into ``last.pt``: a run that is
    stopped early is not lost altogether.
    """
    optimizer = create_optimizer(model, options.lr)
    rng = np.random.default_rng(SEED_TRAIN)
    budget_seconds = options.minutes * 60
    num_steps, last_report = 0, -math.inf
    model.train()
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < budget_seconds:
        lr = learning_rate(options.lr, num_steps, elapsed / budget_seconds)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = train_step(model, optimizer, sample_batch(train_ids, rng, options))
        num_steps += 1
        if time.monotonic() - last_report > SECONDS_BETWEEN_REPORTS:
            last_report = time.monotonic()
            speed = num_steps * options.batch * options.seq / (last_report - start)
            val = held_out_loss(model, held_out_ids, options)
            print(
                f"step {num_steps} min {elapsed / 60:.1f} loss {loss:.3f} "
                f"val {val:.3f} tok/s {speed:.0f}",
                flush=True,
            )
            torch.save(model.state_dict(), options.out / "last.pt")
    return num_steps


def create_optimizer(model: Qwen3MoeForCausalLM, lr: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only: decay on a norm's gain only distorts it."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(peak: float, num_steps: int, progress: float) -> float:
    """Return the rate for the next step: warm-up by steps, then flat, then a cosine by the clock.

    Args:
        peak: The highest rate.
        num_steps: Steps done so far.
        progress: Part of the time that has passed, 0 to 1.
    """
    rate = peak * min(1.0, (num_steps + 1) / WARMUP_STEPS)
    if progress < FLAT_PART:
        return rate
    angle = math.pi * (progress - FLAT_PART) / (1 - FLAT_PART)
    return rate * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(angle)))


def train_step(
    model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> float:
    """Do one step on a batch [B, T] and return its loss, load balancing included."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch, labels=batch).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return float(loss.item())


def sample_batch(ids: TokenIds, rng: np.random.Generator, options: Options) -> torch.Tensor:
    """Cut ``batch`` windows of ``seq`` tokens at random places: int64 ids [B, T]."""
    starts = rng.integers(0, len(ids) - options.seq - 1, options.batch)
    windows = np.stack([ids[start : start + options.seq] for start in starts])
    return torch.from_numpy(windows.astype(np.int64))


@torch.no_grad()
def held_out_loss(model: Qwen3MoeForCausalLM, held_out_ids: TokenIds, options: Options) -> float:
    """Return the mean loss in nats a token, on the same held-out windows at every call."""
    rng = np.random.default_rng(SEED_EVAL)
    losses = []
    model.eval()
    for _ in range(NUM_EVAL_BATCHES):
        batch = sample_batch(held_out_ids, rng, options)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch, output_router_logits=False).logits  # [B, T, V]
        predicted = logits[:, :-1].float().flatten(0, 1)  # [B * (T - 1), V]
        losses.append(cross_entropy(predicted, batch[:, 1:].flatten()).item())
    model.train()
    return sum(losses) / len(losses)


def save_model(model: Qwen3MoeForCausalLM, out: Path) -> None:
    """Write the checkpoint in bfloat16 and drop the intermediate weights, which it replaces."""
    model.config.output_router_logits = False
    model.to(torch.bfloat16).eval().save_pretrained(out)
    (out / "last.pt").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
