"""Token bytes, end tokens, prompts, and the check of two tokenizers."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import llguidance.hf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post_processors
from transformers import PreTrainedTokenizerFast

from guided_smc.errors import ModelError, PromptError, TokenizerMismatchError
from guided_smc.models.tokenization import (
    PromptEncoder,
    check_same_tokenizer,
    vocabulary_from_tokenizer,
)
from guided_smc.vocabulary import Vocabulary

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level(special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), merges=(), **kwargs):
    """A byte-level BPE tokenizer: the special tokens, 256 bytes, then the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **kwargs)


def sentencepiece(add_bos=False, **kwargs):
    """A SentencePiece-like BPE tokenizer with byte fallback."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{b:02X}>": 3 + b for b in range(256)})
    for token in ["▁", "a", "b", "▁a", "ab", "▁ab", "é"]:
        vocab[token] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if add_bos:
        backend.post_processor = post_processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **kwargs
    )


def encoder(tokenizer, *, extra_width=0):
    width = len(tokenizer) + extra_width
    return PromptEncoder(tokenizer, vocabulary_from_tokenizer(tokenizer, width=width))


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["naïve café", "中文 🙂", "tab\tand\nline", "a  b"])
def test_byte_level_tokens_spell_any_text(text):
    tokenizer = byte_level(merges=[("Ã", "©"), ("Ġ", "c")], eos_token="<|im_end|>")
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=len(tokenizer))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert vocabulary.decode_bytes(ids) == text.encode()


def test_a_token_that_is_part_of_a_character_gives_its_raw_bytes():
    tokenizer = byte_level(merges=[("a", "Ã")], eos_token="<|im_end|>")
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=len(tokenizer))
    assert vocabulary.tokens[tokenizer.convert_tokens_to_ids("aÃ")] == b"a\xc3"
    assert vocabulary.tokens[tokenizer.convert_tokens_to_ids("Ã")] == b"\xc3"


def test_every_byte_has_its_token_also_those_that_utf8_never_uses():
    tokenizer = byte_level(eos_token="<|im_end|>")
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=len(tokenizer))
    ordinary = {vocabulary.tokens[i] for i in range(len(vocabulary)) if vocabulary.ordinary[i]}
    assert ordinary == {bytes([b]) for b in range(256)}


@pytest.mark.parametrize("text", ["ab a b", "café", "中 ab", "\n\x00ab"])
def test_sentencepiece_tokens_spell_any_text(text):
    tokenizer = sentencepiece()
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=len(tokenizer))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert vocabulary.decode_bytes(ids) == (" " + text).encode()
    assert vocabulary.tokens[3 + 0xAB] == b"\xab"
    assert vocabulary.tokens[tokenizer.convert_tokens_to_ids("▁ab")] == b" ab"


def test_unigram_with_metaspace_gives_bytes():
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁a", -1.0), ("b", -2.0), ("▁", -3.0), ("<0x41>", -9)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=6)
    # Without byte fallback, a token that looks like a byte's is the text it shows.
    assert vocabulary.tokens == (b"", b"", b" a", b"b", b" ", b"<0x41>")


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bytes_agree_with_those_of_the_grammar_engine(make):
    tokenizer = make() if make is sentencepiece else make(eos_token="<|im_end|>")
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=len(tokenizer))
    peer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    # llguidance keeps the byte 0xFF for marking special tokens.
    compared = [
        i for i, t in enumerate(vocabulary.tokens) if vocabulary.ordinary[i] and t != b"\xff"
    ]
    assert len(compared) >= 255
    assert all(vocabulary.tokens[i] == peer.decode_bytes([i]) for i in compared)


def test_ids_beyond_the_tokenizer_and_in_gaps_are_padding():
    tokenizer = byte_level(eos_token="<|im_end|>")
    n = len(tokenizer)
    backend = Tokenizer(models.BPE(vocab={"<|end|>": 0, "a": 1, "b": 4}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    gapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")

    assert vocabulary_from_tokenizer(tokenizer, width=n + 5).tokens[n:] == (None,) * 5
    assert vocabulary_from_tokenizer(gapped, width=6).tokens == (b"", b"a", None, None, b"b", None)


def test_added_tokens_that_are_not_special_carry_their_text():
    tokenizer = byte_level(eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("héé", special=False)])
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=len(tokenizer))
    tool, accented = tokenizer.convert_tokens_to_ids(["<tool>", "héé"])
    assert vocabulary.tokens[tool] == b"<tool>"
    assert vocabulary.tokens[accented] == "héé".encode()
    assert vocabulary.ordinary[tool] and vocabulary.ordinary[accented]


def test_an_added_token_that_merging_also_makes_keeps_the_bytes_that_were_merged():
    tokenizer = byte_level(merges=[("Ã", "©")], eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken("Ã©", special=False)])
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=len(tokenizer))
    (merged,) = tokenizer("é")["input_ids"]
    assert vocabulary.tokens[merged] == "é".encode()


def test_special_tokens_have_no_text_and_are_not_ordinary():
    tokenizer = byte_level(special=("<|endoftext|>", "<file>"), eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    vocabulary = vocabulary_from_tokenizer(tokenizer, width=len(tokenizer))
    for token in ("<|endoftext|>", "<file>", "<pad>"):
        i = tokenizer.convert_tokens_to_ids(token)
        assert vocabulary.tokens[i] == b"" and not vocabulary.ordinary[i], token


def test_tokens_that_depend_on_their_neighbours_are_refused():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[UNK]")
    with pytest.raises(ModelError, match="WordPiece"):
        vocabulary_from_tokenizer(tokenizer, width=3)


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ModelError, match="slow"):
        vocabulary_from_tokenizer(SimpleNamespace(eos_token_id=0), width=3)


def test_a_tokenizer_larger_than_the_model_is_refused():
    tokenizer = byte_level(eos_token="<|im_end|>")
    with pytest.raises(ModelError, match="100 logits"):
        vocabulary_from_tokenizer(tokenizer, width=100)


# --- end tokens ---------------------------------------------------------------------------------


def test_end_tokens_are_gathered_from_both_configs_and_the_tokenizer():
    names = ("<a>", "<b>", "<c>", "<d>", "<e>", "<f>")
    tokenizer = byte_level(special=names, eos_token="<a>")
    config = SimpleNamespace(
        eos_token_id=1, get_text_config=lambda: SimpleNamespace(eos_token_id=[2])
    )
    vocabulary = vocabulary_from_tokenizer(
        tokenizer,
        width=len(tokenizer),
        generation_config=SimpleNamespace(eos_token_id=[3, 4]),
        config=config,
    )
    assert vocabulary.eos_ids == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    "token", ["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>"]
)
def test_a_well_known_end_token_counts_only_where_it_is_special(token):
    special = byte_level(special=("<eos>", token), eos_token="<eos>")
    assert vocabulary_from_tokenizer(special, width=len(special)).eos_ids == (0, 1)

    text = byte_level(special=("<eos>",), eos_token="<eos>")
    text.add_tokens([AddedToken(token, special=False)])
    vocabulary = vocabulary_from_tokenizer(text, width=len(text))
    assert vocabulary.eos_ids == (0,)
    assert vocabulary.tokens[text.convert_tokens_to_ids(token)] == token.encode()


def test_a_model_without_end_tokens_is_refused():
    tokenizer = byte_level(special=("<x>",))
    config = SimpleNamespace(eos_token_id=None)
    with pytest.raises(ModelError, match="end token"):
        vocabulary_from_tokenizer(tokenizer, width=len(tokenizer), config=config)
    with pytest.raises(ModelError, match="end token"):
        beyond = SimpleNamespace(eos_token_id=10_000)
        vocabulary_from_tokenizer(tokenizer, width=len(tokenizer), config=beyond)


# --- prompts ------------------------------------------------------------------------------------


def test_a_string_is_a_user_message_where_there_is_a_chat_template():
    tokenizer = byte_level(eos_token="<|im_end|>", chat_template=CHATML)
    prompts = encoder(tokenizer)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompts.encode("hi")) == expected
    assert prompts.encode("hi", chat=True) == prompts.encode("hi")
    assert prompts.encode([{"role": "user", "content": "hi"}]) == prompts.encode("hi")
    assert tokenizer.decode(prompts.encode("hi", chat=False)) == "hi"


def test_a_string_is_plain_text_where_there_is_no_chat_template():
    tokenizer = byte_level(eos_token="<|im_end|>")
    prompts = encoder(tokenizer)
    assert tokenizer.decode(prompts.encode("hi")) == "hi"
    with pytest.raises(PromptError, match="no chat template"):
        prompts.encode("hi", chat=True)
    with pytest.raises(PromptError, match="no chat template"):
        prompts.encode([{"role": "user", "content": "hi"}])


def test_plain_text_gets_the_begin_token_once_and_no_end_token():
    tokenizer = sentencepiece(add_bos=True)
    assert tokenizer("ab")["input_ids"][-1] == 2
    prompts = encoder(tokenizer)
    plain = prompts.encode("ab")
    assert plain[0] == 1 and plain.count(1) == 1 and 2 not in plain
    assert prompts.encode("<s>ab").count(1) == 1
    assert prompts.encode("ab</s>")[-1] == 2, "an end token that the user wrote stays"


def test_a_template_that_writes_the_begin_token_gets_no_second_one():
    tokenizer = sentencepiece(add_bos=True, chat_template=STRICT)
    ids = encoder(tokenizer).encode("ab")
    assert ids.count(1) == 1 and ids[0] == 1 and 2 not in ids


def test_a_last_message_of_the_assistant_is_continued():
    tokenizer = byte_level(eos_token="<|im_end|>", chat_template=CHATML)
    prompts = encoder(tokenizer)
    user = {"role": "user", "content": "hi"}
    begun = prompts.encode([user, {"role": "assistant", "content": "Sure: {"}])
    assert tokenizer.decode(begun).endswith("<|im_start|>assistant\nSure: {")
    empty = prompts.encode([user, {"role": "assistant", "content": ""}])
    assert empty == prompts.encode([user])


def test_keys_of_messages_that_are_not_known_are_left_to_the_template():
    tokenizer = byte_level(eos_token="<|im_end|>", chat_template=CHATML)
    prompts = encoder(tokenizer)
    message = {"role": "user", "content": "hi", "name": "Ann"}
    assert prompts.encode([message]) == prompts.encode("hi")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty list"),
        ({"role": "user", "content": "hi"}, "not dict"),
        (None, "not NoneType"),
        (["hi"], "message 0 is str"),
        ([{"role": "user", "content": "hi"}, {"role": "user"}], "message 1 has no 'content'"),
        ([{"content": "hi"}], "message 0 has no 'role'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'content' of message 0 is list"),
        ([{"role": 1, "content": "hi"}], "'role' of message 0 is int"),
    ],
)
def test_a_malformed_message_is_named(messages, words):
    tokenizer = byte_level(eos_token="<|im_end|>", chat_template=CHATML)
    with pytest.raises(PromptError, match=re.escape(words)):
        encoder(tokenizer).encode(messages)


def test_the_message_that_a_template_refuses_is_named():
    tokenizer = sentencepiece(chat_template=STRICT)
    messages = [{"role": r, "content": "a"} for r in ("user", "assistant", "system", "user")]
    with pytest.raises(PromptError, match=r"message 2 \(role 'system'\): roles must alternate"):
        encoder(tokenizer).encode(messages)


def test_token_ids_are_taken_as_they_are():
    tokenizer = byte_level(eos_token="<|im_end|>", chat_template=CHATML)
    prompts = encoder(tokenizer)
    assert prompts.encode([5, 0, 7]) == [5, 0, 7]
    assert prompts.encode((5, 0, 7), chat=False) == [5, 0, 7]
    with pytest.raises(PromptError, match="chat=True"):
        prompts.encode([5], chat=True)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([5, 10_000], "prompt[1] is token id 10000"),
        ([-1], "prompt[0] is token id -1"),
        ([5, "a"], "prompt[1] is 'a'"),
        ([5, True], "prompt[1] is True"),
        ([5, 260], "prompt[1] is token id 260, which is padding"),
    ],
)
def test_token_ids_that_the_model_does_not_have_are_refused(ids, words):
    tokenizer = byte_level(eos_token="<|im_end|>")
    prompts = encoder(tokenizer, extra_width=5)
    with pytest.raises(PromptError, match=re.escape(words)):
        prompts.encode(ids)


def test_an_empty_prompt_begins_with_the_begin_token_or_else_the_end_token():
    begin = byte_level(bos_token="<|im_start|>", eos_token="<|im_end|>")
    assert encoder(begin).encode("") == [1]
    end = byte_level(eos_token="<|im_end|>")
    assert encoder(end).encode("") == [2]
    assert encoder(sentencepiece(add_bos=True)).encode("") == [1]


def test_an_empty_prompt_with_nothing_to_begin_with_is_refused():
    tokenizer = byte_level(special=("</s>",))
    with pytest.raises(PromptError, match="empty"):
        encoder(tokenizer).encode("")


def test_a_prompt_longer_than_the_context_is_encoded_without_noise(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = byte_level(eos_token="<|im_end|>", model_max_length=8)
    with caplog.at_level(logging.WARNING):
        assert len(encoder(tokenizer).encode("a" * 50)) == 50
        assert not caplog.records
        tokenizer("a" * 50)
        assert caplog.records, "the noise that is kept back"


# --- two tokenizers -----------------------------------------------------------------------------


def test_vocabularies_that_differ_by_padding_or_in_their_set_of_end_tokens_are_the_same():
    tokens = [b"a", b"b", b"", b""]
    target = Vocabulary(tokens, eos_ids=[2, 3])
    draft = Vocabulary([*tokens, None, None], eos_ids=[2], special_ids=[3])
    check_same_tokenizer(target, draft)
    check_same_tokenizer(draft, target)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (Vocabulary([b"a", b"c", b""], [2]), "id 1 is b'b' in the target and b'c' in the draft"),
        (Vocabulary([b"a", b"b", b"", b"d"], [2]), "(3 tokens against 4): id 3 is no token"),
        (Vocabulary([b"a", b"b", b".", b""], [3]), "id 2 is a special token"),
        (Vocabulary([b"", b"b", b""], [2], [0]), "id 0 is b'a' in the target and a special token"),
    ],
)
def test_the_first_difference_of_two_tokenizers_is_told(draft, words):
    target = Vocabulary([b"a", b"b", b""], eos_ids=[2])
    with pytest.raises(TokenizerMismatchError, match=re.escape(words)):
        check_same_tokenizer(target, draft)


# --- the real model -----------------------------------------------------------------------------


@pytest.mark.model
def test_the_small_models_text_survives_its_tokens():
    from guided_smc.models.loading import load_pretrained

    loaded = load_pretrained("smollm2-135m")
    vocabulary = vocabulary_from_tokenizer(
        loaded.tokenizer,
        width=loaded.model.config.vocab_size,
        generation_config=loaded.model.generation_config,
        config=loaded.model.config,
    )
    ends = set(loaded.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert set(vocabulary.eos_ids) == ends
    text = '{"naïve": "中文 🙂",\n    "n": 12}'
    prompts = PromptEncoder(loaded.tokenizer, vocabulary)
    assert vocabulary.decode(prompts.encode(text, chat=False)) == text
    chat = loaded.tokenizer.decode(prompts.encode("Hello"))
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


TOOLS = (
    "{% if tools %}Call as <tool_call> with: {% for t in tools %}{{ t['function']['name'] }} "
    "{% endfor %}{% endif %}" + CHATML
)


def test_a_template_that_takes_tools_is_handed_them():
    tokenizer = byte_level(eos_token="<|im_end|>", chat_template=TOOLS)
    encoder = PromptEncoder(tokenizer, vocabulary_from_tokenizer(tokenizer, width=300))
    assert encoder.writes_tools_as("<tool_call>")
    assert not encoder.writes_tools_as("[TOOL_CALLS]")
    tool = {"type": "function", "function": {"name": "weather"}}
    ids = encoder.encode([{"role": "user", "content": "hi"}], tools=[tool])
    assert "with: weather <|im_start|>user" in tokenizer.decode(ids)


@pytest.mark.parametrize("template", [CHATML, None, "{{ raise_exception('no') }}"])
def test_a_template_that_takes_no_tools_writes_none(template):
    tokenizer = byte_level(eos_token="<|im_end|>", chat_template=template)
    encoder = PromptEncoder(tokenizer, vocabulary_from_tokenizer(tokenizer, width=300))
    assert not encoder.writes_tools_as("<tool_call>")
