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
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens as ``tokenizer.json`` post-processes them."""
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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: self._special_token(name) for name in names}
        try:
            text = environment.from_string(template).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except jinja2.TemplateError as exc:
            raise SpecterError(f"{self._folder}: the chat template failed: {exc}") from exc
        return self.encode(text, add_special_tokens=False)

    def _chat_template(self) -> str:
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text("utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # named templates
            named = {item["name"]: item["template"] for item in template}
            template = named.get("default")
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


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
