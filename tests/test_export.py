"""A policy as a folder: what is written, and what is never written over."""

import dataclasses
import json

import chat_folders
import pytest
from tiny_models import QWEN3, random_params

from thundersync_jax.chat.templates import open_chat
from thundersync_jax.config import Config, ModelConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.export import export
from thundersync_jax.hf import weights

MODEL = ModelConfig(
    layers=1, width=16, mlp_width=32, heads=2, kv_heads=1, head_dim=8, qk_norm=True
)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def published(tmp_path):
    """A folder with more in its config.json than a shape."""
    folder = tmp_path / "published"
    export(Config(model=MODEL), folder=str(folder), initial=True)
    path = folder / "config.json"
    others = {"max_position_embeddings": 40_960, "attention_dropout": 0.125}
    path.write_text(json.dumps(json.loads(path.read_text()) | others))
    return folder


@pytest.mark.parametrize("spelled", ["{0}", "{0}/", "~/published", "{0}/../published"])
def test_the_folder_a_model_comes_from_is_never_written_over(
    published, monkeypatch, spelled
):
    monkeypatch.setenv("HOME", str(published.parent))
    before = files(published)
    config = Config(model=ModelConfig(path=str(published)))
    for path, folder in ((str(published), spelled), (spelled, str(published))):
        model = ModelConfig(path=path.format(published))
        config = dataclasses.replace(config, model=model)
        with pytest.raises(ConfigError, match=r"which is model\.path"):
            export(config, folder=folder.format(published), initial=True)
    assert files(published) == before


@pytest.mark.parametrize("untied", [False, True])
def test_all_that_is_no_shape_stays_as_it_was_published(published, tmp_path, untied):
    config = Config(model=ModelConfig(path=str(published)))
    target = tmp_path / "again"
    export(config, folder=str(target), initial=True, untied=untied)
    first, second = (
        json.loads((folder / "config.json").read_text())
        for folder in (published, target)
    )
    assert second == first | {"tie_word_embeddings": not untied}
    assert files(target).keys() == files(published).keys()


def test_a_folder_needs_a_name_and_a_policy(tmp_path):
    with pytest.raises(ConfigError, match="--folder is missing"):
        export(Config(model=MODEL), initial=True)
    with pytest.raises(ConfigError, match="--workdir is missing"):
        export(Config(model=MODEL), folder=str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="holds no policy"):
        export(Config(model=MODEL), tmp_path, folder=str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_servers_learn_how_much_their_cache_takes(tmp_path):
    config = Config(model=MODEL)
    folder = str(tmp_path / "x")
    report = export(config, folder=folder, initial=True, dtype="bfloat16")
    numbers = config.rollout.slots * config.rollout.context_tokens
    numbers *= 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim
    assert report["cache_bytes"] == 2 * numbers


@pytest.mark.parametrize("further", [None, "tool_use", "rag"])
def test_a_saved_folder_renders_as_the_one_it_came_from(further, tmp_path):
    """marin-community/marin#7406: the files of newer layouts were left behind."""
    source = chat_folders.write(tmp_path / "source", "qwen2")
    if further is not None:
        template = source / "chat_template.jinja"
        folder = source / "additional_chat_templates"
        folder.mkdir()
        text = template.read_text().replace("You help", further)
        (folder / f"{further}.jinja").write_text(text)
        if further == "tool_use":
            template.write_text(chat_folders.NO_TOOLS)
    out = tmp_path / "out"
    weights.save(out, QWEN3, random_params(QWEN3), tokenizer_from=source)
    for tools in ((), (chat_folders.CALCULATOR,)):
        chats = [open_chat(folder, tools=tools) for folder in (source, out)]
        assert len({chat.decode(chat.prompt("1 + 2")) for chat in chats}) == 1
    for path in source.rglob("*.jinja"):
        assert (out / path.relative_to(source)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("text", "why"), [("", "it is empty"), ("version https://git-lfs.x", "of git-lfs")]
)
def test_a_file_of_the_tokenizer_without_content_is_named(name, text, why, tmp_path):
    folder = chat_folders.write(tmp_path / "source", "qwen2")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name} is no .*{why}"):
        open_chat(folder)
