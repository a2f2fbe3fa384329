"""What the engine needs of a tokenizer: the bytes of its tokens, and prompts as token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from guided_smc.errors import ModelError, PromptError, TokenizerMismatchError
from guided_smc.vocabulary import Vocabulary

WELL_KNOWN_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
)
"""End tokens whether or not a model's configuration says so (where they are special tokens).

A chat model is trained to end a turn with one of these, but its configuration, written for the
base model, often names only the end of a document (or the other way round). A text would then run
through the end of the turn and into the next one.
"""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def vocabulary_from_tokenizer(
    tokenizer: Any, *, width: int, generation_config: Any = None, config: Any = None
) -> Vocabulary:
    """Bytes, end tokens and special tokens of every id that the model gives a logit.

    Bytes are read from the tokenizer's own tables, since decoding an id alone goes through text
    and loses what is no whole UTF-8 character. Byte-level BPE, and SentencePiece with or without
    byte fallback, are supported: there, a token's text does not depend on its neighbours.

    Args:
        tokenizer: A fast transformers tokenizer.
        width: The model's logit width `V`. Ids that the tokenizer does not know are padding.
        generation_config: The model's generation config, for its end tokens.
        config: The model's config, for its end tokens (those of its text part, too).

    Returns:
        The vocabulary, `V` ids wide. End tokens are those of the generation config, the config
        and the tokenizer, and `WELL_KNOWN_END_TOKENS`.

    Raises:
        ModelError: A slow tokenizer, one whose tokens have no text of their own (WordPiece), one
            with more ids than the model has logits, or a model without end tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"the tokenizer is a slow one ({type(tokenizer).__name__}), which does not tell the "
            "bytes of its tokens: use a model that has a tokenizer.json"
        )
    to_bytes = _token_decoder(backend)
    own = backend.get_vocab(with_added_tokens=False)
    added = dict(tokenizer.added_tokens_decoder)

    tokens: list[bytes | None] = [None] * width
    # A model may have fewer logits than its tokenizer has ids only where those ids do not occur.
    beyond = [text for text, i in own.items() if i >= width]
    if beyond:
        raise ModelError(
            f"the tokenizer has {len(beyond)} tokens (such as {beyond[0]!r}) beyond the model's "
            f"{width} logits: it belongs to another model"
        )
    for text, i in own.items():
        tokens[i] = to_bytes(text)
    for i, token in added.items():
        if i < width and token.content not in own:
            # Added tokens are matched in the text itself; only SentencePiece's spaces are marked.
            literal = to_bytes.is_byte_level
            tokens[i] = token.content.encode() if literal else to_bytes(token.content)

    special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    # A token without text could be drawn for ever inside a text.
    special |= {i for i, data in enumerate(tokens) if data == b""}
    special = {i for i in special if 0 <= i < width}

    ends = set(_end_ids(generation_config)) | set(_end_ids(config)) | set(_end_ids(tokenizer))
    if hasattr(config, "get_text_config"):
        ends |= set(_end_ids(config.get_text_config()))
    ends |= {i for i, t in added.items() if i in special and t.content in WELL_KNOWN_END_TOKENS}
    ends = {i for i in ends if 0 <= i < width}
    if not ends:
        raise ModelError(
            "the model has no end token: neither its configuration nor its tokenizer names one "
            "(set `tokenizer.eos_token` or `generation_config.eos_token_id`)"
        )
    return Vocabulary(tokens, ends, special)


def check_same_tokenizer(target: Vocabulary, draft: Vocabulary) -> None:
    """Check that an id stands for the same token in both models.

    Logit widths may differ by padding. The sets of end tokens may differ, as those of a base
    model and its chat model do: the target's count, and the draft need only know them as
    something else than text.

    Raises:
        TokenizerMismatchError: With the first difference.
    """
    for i in range(max(len(target), len(draft))):
        of_target, of_draft = _describe(target, i), _describe(draft, i)
        if of_target == of_draft:
            continue
        sizes = int(target.real.sum()), int(draft.real.sum())
        counts = f" ({sizes[0]} tokens against {sizes[1]})" if sizes[0] != sizes[1] else ""
        raise TokenizerMismatchError(
            f"draft and target have different tokenizers{counts}: id {i} is {of_target} in the "
            f"target and {of_draft} in the draft. Use a draft of the same model family, or none"
        )


class PromptEncoder:
    """Turns what users give as prompts into token ids.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary: The model's vocabulary.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def writes_tools_as(self, mark: str) -> bool:
        """Whether the chat template tells of tools, in a form that has `mark` in it."""
        if not self.has_chat_template:
            return False
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        try:
            told = self._render([{"role": "user", "content": "?"}], [tool])
        except Exception:  # whatever a template may raise: it does not take them
            return False
        return mark in told

    def encode(
        self,
        prompt: Any,
        *,
        chat: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a prompt, at least one.

        Args:
            prompt: A string, a list of messages (dicts with `role` and `content`), or token ids.
                Where the last message is the assistant's, the model continues it.
            chat: Whether a string is a user's message or plain text. Default: a message if the
                tokenizer has a chat template. Plain text gets the tokenizer's own special tokens
                (such as a begin token), but no end token.
            tools: Of messages: handed to the chat template, which may tell the model of them.

        Raises:
            PromptError: Empty or malformed messages, a chat template that is missing or refuses
                the messages, ids that the model does not have, or nothing to begin with.
        """
        if isinstance(prompt, str):
            as_message = self.has_chat_template if chat is None else chat
            if as_message:
                ids = self._encode_messages([{"role": "user", "content": prompt}])
            else:
                ids = self._encode_text(prompt)
        elif isinstance(prompt, list | tuple) and prompt and _is_id(prompt[0]):
            if chat:
                raise PromptError("token ids cannot be encoded as a chat: leave out chat=True")
            ids = self._checked_ids(prompt)
        else:
            messages = _checked_messages(prompt)
            if chat is False:
                raise PromptError("messages are a chat: leave out chat=False, or give a string")
            ids = self._encode_messages(messages, tools)
        return ids or [self._first_token()]

    def continuation(self, text: str) -> list[int]:
        """Token ids of a text that goes on from a prompt: no special tokens around it."""
        return self._tokenize(text, add_special_tokens=False)

    def _first_token(self) -> int:
        """What an empty text begins with: models need one token to condition on."""
        bos = self._tokenizer.bos_token_id
        if bos is not None and 0 <= bos < len(self._vocabulary):
            return int(bos)
        eos = self._tokenizer.eos_token_id
        if eos is not None and 0 <= eos < len(self._vocabulary):
            return int(eos)
        raise PromptError(
            "the prompt is empty, and the tokenizer has no begin or end token to start from: give "
            "at least one character"
        )

    def _encode_text(self, text: str) -> list[int]:
        ids = self._tokenize(text, add_special_tokens=True)
        bare = self._tokenize(text, add_special_tokens=False)
        if ids and ids[-1] in self._vocabulary.eos_ids and bare[-1:] != ids[-1:]:
            ids = ids[:-1]
        bos = self._tokenizer.bos_token_id
        if bos is not None and bare[:1] == [bos] and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def _encode_messages(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        if not self.has_chat_template:
            raise PromptError(
                "the model has no chat template, so that it takes no messages: give a string "
                "(with chat=False or nothing)"
            )
        if messages[-1]["role"] == "assistant" and not messages[-1]["content"] and messages[1:]:
            messages = messages[:-1]
        try:
            text = self._render(messages, tools)
        except Exception as error:
            # Templates raise errors of jinja's, or any that an expression in them may cause.
            raise PromptError(
                f"the chat template refuses message {self._first_refused(messages)}: {error}"
            ) from error
        # The template writes the begin token itself, where the model wants one.
        return self._tokenize(text, add_special_tokens=False)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        continues = messages[-1]["role"] == "assistant"
        return self._tokenizer.apply_chat_template(
            messages,
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )

    def _first_refused(self, messages: list[dict[str, Any]]) -> str:
        """Index and role of the first message with which the template fails."""
        at = len(messages) - 1
        for i in range(len(messages)):
            try:
                self._render(messages[: i + 1])
            except Exception:
                at = i
                break
        return f"{at} (role {messages[at]['role']!r})"

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # verbose=False: that a prompt is longer than the context is the engine's to report.
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded["input_ids"])

    def _checked_ids(self, ids: Sequence[Any]) -> list[int]:
        checked = []
        for position, i in enumerate(ids):
            if not _is_id(i):
                raise PromptError(f"prompt[{position}] is {i!r}; token ids are integers")
            if not 0 <= i < len(self._vocabulary):
                raise PromptError(
                    f"prompt[{position}] is token id {i}; the model has ids 0 to "
                    f"{len(self._vocabulary) - 1}"
                )
            if self._vocabulary.tokens[i] is None:
                raise PromptError(
                    f"prompt[{position}] is token id {i}, which is padding: no token has this id"
                )
            checked.append(int(i))
        return checked


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _checked_messages(prompt: Any) -> list[dict[str, Any]]:
    """The messages as plain dicts; unknown keys are left to the template."""
    if not isinstance(prompt, list | tuple):
        raise PromptError(
            f"a prompt is a string, a list of messages, or a list of token ids, not "
            f"{type(prompt).__name__}"
        )
    if not prompt:
        raise PromptError("the prompt is an empty list: give at least one message")
    messages = []
    for i, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise PromptError(
                f"message {i} is {type(message).__name__}, not a dict with 'role' and 'content'"
            )
        for key in ("role", "content"):
            if key not in message:
                raise PromptError(f"message {i} has no {key!r}: {dict(message)!r}")
            if not isinstance(message[key], str):
                raise PromptError(
                    f"the {key!r} of message {i} is {type(message[key]).__name__}, not a string"
                )
        messages.append(dict(message))
    return messages


class _token_decoder:
    """Maps a token as the tokenizer writes it to its bytes.

    Which tokenizers write what is told by their decoder: `ByteLevel` writes each byte as one
    printable character (GPT-2's table); SentencePiece's write a space as `▁`, and bytes that are
    not in its vocabulary as `<0xAB>`.
    """

    def __init__(self, backend: Any) -> None:
        parts = _decoder_parts(backend.decoder)
        kinds = {part["type"] for part in parts}
        self.is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._byte_of = _byte_level_table() if self.is_byte_level else {}
        self._replacements = [
            (part["pattern"]["String"], part["content"])
            for part in parts
            if part["type"] == "Replace" and "String" in part["pattern"]
        ] + [(part["replacement"], " ") for part in parts if part["type"] == "Metaspace"]
        if not self.is_byte_level and not self._replacements:
            names = ", ".join(sorted(kinds)) or "none"
            raise ModelError(
                "the text of this tokenizer's tokens depends on their neighbours, or is unknown "
                f"(its decoder: {names}): only byte-level BPE and SentencePiece tokenizers can be "
                "used"
            )

    def __call__(self, token: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes(self._byte_of[character] for character in token)
            except KeyError:
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte:
            return bytes([int(byte[1], 16)])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()


def _decoder_parts(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    # The pickle state of the parts of the `tokenizers` library is their JSON; the whole
    # tokenizer's (`to_str`) would carry the vocabulary and the merges.
    described = json.loads(decoder.__getstate__())
    return described["decoders"] if described["type"] == "Sequence" else [described]


def _byte_level_table() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + n): b for n, b in enumerate(others)})
    return table


def _end_ids(source: Any) -> Iterable[int]:
    """`eos_token_id` of a config or tokenizer: none, one, or several."""
    ids = getattr(source, "eos_token_id", None)
    if ids is None:
        return []
    return [int(i) for i in ids] if isinstance(ids, list | tuple) else [int(ids)]


def _describe(vocabulary: Vocabulary, i: int) -> str:
    token = vocabulary.tokens[i] if i < len(vocabulary) else None
    if i in vocabulary.special_ids:
        return "a special token"
    return "no token" if token is None else repr(token)
