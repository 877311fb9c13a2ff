"""Text to token ids and back, and the chat template: thin over ``tokenizers`` and ``jinja2``.

Called by: session, specter_build.calibration.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from specter_runtime.errors import SpecterError


class Tokenizer:
    """The tokenizer of a checkpoint or bundle: ``tokenizer.json`` and what stands beside it."""

    def __init__(self, folder: Path) -> None:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises:
            SpecterError: ``tokenizer.json`` is missing or malformed; names the file.
        """
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as exc:  # tokenizers raises bare Exception
            raise SpecterError(f"{path}: cannot be read as a tokenizer: {exc}") from exc
        # A prompt is taken whole: settings that a training run left behind must not cut or pad it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self._config = self._read_config(folder / "tokenizer_config.json")

    @staticmethod
    def _read_config(path: Path) -> Mapping[str, Any]:
        if not path.is_file():
            return {}
        try:
            config = json.loads(path.read_text("utf-8"))
        except ValueError as exc:
            raise SpecterError(f"{path}: not valid JSON: {exc}") from exc
        if not isinstance(config, dict):
            raise SpecterError(f"{path}: expected a JSON object")
        return config

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The end token that ``tokenizer_config.json`` names, if it names one of the vocabulary."""
        token_id = self._tokenizer.token_to_id(self._special_token("eos_token"))
        return frozenset() if token_id is None else frozenset([token_id])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens as ``tokenizer.json`` post-processes them."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise SpecterError(f"the text is not UTF-8: {exc.reason}") from exc
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_stream(self) -> Callable[[int], str]:
        """A function from the next token id to the text that it completes.

        Whole characters only: a token that ends within a multi-byte character gives "" until the
        rest has come.
        """
        stream = DecodeStream(skip_special_tokens=True)

        def step(token_id: int) -> str:
            return stream.step(self._tokenizer, token_id) or ""

        return step

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        The template writes the special tokens, so the tokenizer adds none: one BOS, not two.

        Raises:
            SpecterError: there is no chat template, or it refuses the messages.
        """
        template = self._chat_template()
        environment = _template_environment()
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: self._special_token(name) for name in names}
        try:
            text = environment.from_string(template).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except Exception as exc:  # a template is a program of somebody else
            raise SpecterError(f"{self._folder}: the chat template failed: {exc}") from exc
        return self.encode(text, add_special_tokens=False)

    def check_chat_template(self) -> None:
        """Raise ``SpecterError`` if there is no chat template."""
        self._chat_template()

    def _chat_template(self) -> str:
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            try:
                return path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as exc:
                raise SpecterError(f"{path}: cannot be read: {exc}") from exc
        template = self._config.get("chat_template")
        if isinstance(template, list):  # named templates
            named = [item for item in template if isinstance(item, dict)]
            default = (item.get("template") for item in named if item.get("name") == "default")
            template = next(default, None)
        if not isinstance(template, str):
            raise SpecterError(
                f"{self._folder}: the model has no chat template; use --prompt instead"
            )
        return template

    def _special_token(self, name: str) -> str:
        token = self._config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        return token if isinstance(token, str) else ""


def _template_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: transformers' functions and filters."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant says, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # declared so by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
