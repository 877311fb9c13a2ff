"""Text to ids and back, whole characters only, and the chat template with its one BOS."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, processors
from transformers import AutoTokenizer

from specter_runtime.errors import SpecterError
from specter_runtime.tokenizer import Tokenizer
from tests.checkpoints import make_tokenizer

BOS, EOS = 256, 257
SETTINGS = settings(deadline=None, max_examples=60)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hé"}]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte."""
    folder = tmp_path_factory.mktemp("byte-level")
    make_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece's way, as Mixtral's: spaces are U+2581, unknown characters are bytes."""
    folder = tmp_path_factory.mktemp("byte-fallback")
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc", "\u2581a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = FastTokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def edit_tokenizer(folder: Path, edit: Callable[[FastTokenizer], object]) -> Tokenizer:
    """A byte-level tokenizer whose tokenizer.json was changed by ``edit``."""
    make_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = FastTokenizer.from_file(path)
    edit(tokenizer)
    tokenizer.save(path)
    return Tokenizer(folder)


def edit_config(folder: Path, **values: Any) -> Tokenizer:
    """A byte-level tokenizer with ``values`` added to its tokenizer_config.json."""
    make_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return Tokenizer(folder)


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    return list(map(tokenizer.decode_stream(), token_ids))


# ---- streaming ------------------------------------------------------------------------------


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u6f22", "\U0001f600"])
@pytest.mark.parametrize("before", ["", "x", "\u5b57"])
def test_a_character_is_emitted_whole_with_its_last_byte(
    byte_level: Tokenizer, before: str, character: str
) -> None:
    size, size_before = len(character.encode()), len(before.encode())
    pieces = pieces_of(byte_level, byte_level.encode(before + character))
    assert len(pieces) == size_before + size
    assert pieces[size_before:] == [""] * (size - 1) + [character]


@SETTINGS
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")))
def test_streamed_pieces_add_up_to_the_text(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str
) -> None:
    """U+FFFD is left out: it stands for bytes that are no character (yet)."""
    for tokenizer in (byte_level, byte_fallback):
        token_ids = tokenizer.encode(text)
        assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)
    assert byte_level.decode(byte_level.encode(text)) == text


@SETTINGS
@given(token_ids=st.lists(st.integers(0, 257), max_size=12))
def test_streaming_any_bytes_gives_the_decoded_text_up_to_what_is_incomplete(
    byte_level: Tokenizer, token_ids: list[int]
) -> None:
    streamed = "".join(pieces_of(byte_level, token_ids))
    decoded = byte_level.decode(token_ids)
    assert decoded.startswith(streamed)
    assert set(decoded[len(streamed) :]) <= {"\ufffd"}


def test_special_tokens_are_not_part_of_the_text(byte_level: Tokenizer) -> None:
    token_ids = [BOS, *byte_level.encode("ab"), EOS]
    assert byte_level.decode(token_ids) == "ab"
    assert pieces_of(byte_level, token_ids) == ["", "a", "b", ""]


def test_streams_do_not_share_state(byte_level: Tokenizer) -> None:
    first, second = byte_level.decode_stream(), byte_level.decode_stream()
    start, end = byte_level.encode("\u00e9")
    assert [first(start), second(start), first(end), second(end)] == ["", "", "\u00e9", "\u00e9"]


# ---- encoding -------------------------------------------------------------------------------


def test_vocab_size_counts_added_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == 258


def test_special_tokens_are_added_unless_asked_not_to(tmp_path: Path) -> None:
    tokenizer = edit_tokenizer(tmp_path, _begin_with_bos)
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == [BOS, *plain]
    assert BOS not in plain


def _begin_with_bos(tokenizer: FastTokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda t: t.enable_truncation(max_length=4), id="truncation"),
        pytest.param(lambda t: t.enable_padding(length=40, pad_id=EOS), id="padding"),
    ],
)
def test_text_is_never_cut_or_filled_up(
    tmp_path: Path, edit: Callable[[FastTokenizer], object]
) -> None:
    """A tokenizer.json may hold the settings of the batches it was trained with."""
    tokenizer = edit_tokenizer(tmp_path, edit)
    assert tokenizer.decode(tokenizer.encode("ten letters")) == "ten letters"
    assert len(tokenizer.encode("ten letters")) == len("ten letters")


@pytest.mark.parametrize(
    ("eos_token", "expected"),
    [
        ("<eos>", {EOS}),
        ({"content": "<eos>", "special": True}, {EOS}),
        ("<not in the vocabulary>", set()),
        (None, set()),
        ("", set()),
    ],
)
def test_end_token_is_what_the_config_names(
    tmp_path: Path, eos_token: object, expected: set[int]
) -> None:
    assert edit_config(tmp_path, eos_token=eos_token).eos_token_ids == expected


# ---- chat templates -------------------------------------------------------------------------


def expected_chat(tokenizer: Tokenizer) -> list[int]:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return [BOS, *encode("[user]h\u00e9"), EOS, *encode("[assistant]")]


@pytest.mark.parametrize(
    "chat_template",
    [
        pytest.param(TEMPLATE, id="string"),
        pytest.param(
            [
                {"name": "tool_use", "template": "{{ raise_exception('wrong one') }}"},
                {"name": "default", "template": TEMPLATE},
            ],
            id="named",
        ),
    ],
)
def test_a_template_in_the_config_is_used(tmp_path: Path, chat_template: object) -> None:
    tokenizer = edit_config(tmp_path, chat_template=chat_template)
    assert tokenizer.encode_chat(MESSAGES) == expected_chat(tokenizer)


def test_a_template_file_goes_before_the_config(tmp_path: Path) -> None:
    tokenizer = edit_config(tmp_path, chat_template="wrong one")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert tokenizer.encode_chat(MESSAGES) == expected_chat(tokenizer)


def test_a_conversation_begins_with_one_bos(tmp_path: Path) -> None:
    """The template writes it, the post-processor would write it again."""
    tokenizer = edit_tokenizer(tmp_path, _begin_with_bos)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert tokenizer.encode_chat(MESSAGES).count(BOS) == 1


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    bos = {"content": "<bos>", "lstrip": False, "special": True}
    tokenizer = edit_config(tmp_path, chat_template="{{ bos_token }}", bos_token=bos)
    assert tokenizer.encode_chat(MESSAGES) == [BOS]


TEMPLATES = {
    "blocks leave no blank lines": "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n"
    "  {% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "an unset token is empty": "{{ unk_token }}.",
    "methods of text": "{{ messages[0]['content'].strip() | upper }}",
    "JSON is not escaped for HTML": "{{ {'a': \"<b> & 'c'\"} | tojson }}",
    "JSON is indented on request": "{{ {'a': [1]} | tojson(indent=2) }}",
    "JSON keeps its order and its letters": "{{ {'b': '\u00e9', 'a': 1} | tojson }}",
    "generation marks": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_chats_equal_those_of_transformers(tmp_path: Path, template: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": " yes "}]
    tokenizer = edit_config(tmp_path, chat_template=template)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    reference.chat_template = template
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == text


def test_a_missing_template_names_the_folder_and_the_way_out(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    with pytest.raises(SpecterError, match="no chat template; use --prompt") as caught:
        Tokenizer(tmp_path).encode_chat(MESSAGES)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", id="refuses"),
        pytest.param("{% for %}", id="syntax"),
        pytest.param("{{ messages[0].content + 1 }}", id="type"),
        pytest.param("{{ messages[0].missing.attribute }}", id="undefined"),
        pytest.param("{{ 1 / 0 }}", id="arithmetic"),
        pytest.param("{{ messages.append(1) }}", id="not allowed"),
    ],
)
def test_a_template_that_fails_is_an_error_with_its_reason(tmp_path: Path, template: str) -> None:
    tokenizer = edit_config(tmp_path, chat_template=template)
    with pytest.raises(SpecterError, match=r"chat template failed: .+") as caught:
        tokenizer.encode_chat(MESSAGES)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "chat_template",
    [
        pytest.param([{"name": "rag", "template": "x"}], id="no default"),
        pytest.param([{"template": "x"}], id="no name"),
        pytest.param(["x"], id="no objects"),
        pytest.param([{"name": "default"}], id="no template"),
        pytest.param(5, id="number"),
    ],
)
def test_a_malformed_template_is_an_error(tmp_path: Path, chat_template: object) -> None:
    tokenizer = edit_config(tmp_path, chat_template=chat_template)
    with pytest.raises(SpecterError, match=r"chat.template") as caught:
        tokenizer.encode_chat(MESSAGES)
    assert str(tmp_path) in str(caught.value)


def test_a_template_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(SpecterError, match=r"chat_template\.jinja"):
        Tokenizer(tmp_path).encode_chat(MESSAGES)


# ---- files that will not do -----------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b'{"model": {"type": "BPE"}}', b"\xff\xfe"]
)
def test_a_malformed_or_missing_tokenizer_file_is_named(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecterError, match=r"cannot be read as a tokenizer: .+") as caught:
        Tokenizer(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"'])
def test_a_malformed_tokenizer_config_is_named(tmp_path: Path, content: bytes) -> None:
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(content)
    with pytest.raises(SpecterError, match="JSON") as caught:
        Tokenizer(tmp_path)
    assert str(path) in str(caught.value)


def test_a_tokenizer_without_config_encodes(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
