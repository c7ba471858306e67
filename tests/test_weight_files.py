"""Files of weights: what is refused, and what a crash leaves."""

import dataclasses
import json
import os
import shutil
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_models import MODELS, QWEN3, assert_same, random_params, shardings

from thundersync_jax.config import Config, ModelConfig, model_folder
from thundersync_jax.errors import ConfigError
from thundersync_jax.hf import files, weights
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.run import placement

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """A saved model, in its own words."""
    weights.save(tmp_path, QWEN3, random_params(QWEN3))
    return tmp_path


def rewrite(folder, change):
    path = folder / files.ONE_FILE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def alter(folder, name, key, value):
    """Says something else of a tensor in the header."""
    path = folder / files.ONE_FILE
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[name][key] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def cut(folder, size):
    path = folder / files.ONE_FILE
    path.write_bytes(path.read_bytes()[:size])


def put(name, value):
    return lambda folder: rewrite(folder, lambda found: found.update({name: value}))


UP = "model.layers.1.mlp.up_proj.weight"
ONES = np.ones((48, 16), np.float32)
NAN = np.where(np.arange(24 * 16) == 300, np.nan, 1).astype(np.float32)
NAN = NAN.reshape(24, 16)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
WRONG = {
    rf"has no tensor {UP}, expected shape \[24, 16\]": lambda folder: rewrite(
        folder, lambda found: found.pop(UP)
    ),
    r"has a tensor model.extra of shape \[48, 16\], expected none": put(
        "model.extra", ONES
    ),
    rf"tensor {UP} of .*safetensors has shape \[48, 16\], expected \[24, 16\]": put(
        UP, ONES
    ),
    r"lm_head.weight of .* differs from model.embed_tokens.weight": put(
        files.HEAD, ONES
    ),
    rf"tensor {UP} of .* is stored as I8, expected one of F32, BF16": put(
        UP, np.ones((24, 16), np.int8)
    ),
    r"safetensors was to be read, but .* offset for tensor; expected a whole": (
        lambda folder: alter(folder, UP, "dtype", "BF16")
    ),
    r"safetensors was to be read, but .* invalid type: null.*; expected a whole": (
        lambda folder: alter(folder, UP, "data_offsets", None)
    ),
    r"safetensors was to be read, but .* file not fully covered": (
        lambda folder: cut(folder, -100)
    ),
    r"safetensors was to be read, but .* header length": lambda folder: cut(
        folder, 200
    ),
    r"safetensors was to be read, but it is empty; .* whole safe": lambda folder: cut(
        folder, 0
    ),
    r"safetensors was to be read, but it is a pointer of git-lfs \(`git lfs pull`": (
        lambda folder: (folder / files.ONE_FILE).write_text(POINTER)
    ),
    rf"tensor {UP} of .*safetensors holds NaN or infinity, in float32": put(UP, NAN),
    r"holds no model.safetensors and no model.safetensors.index.json": lambda folder: (
        folder / files.ONE_FILE
    ).unlink(),
    r"index.json has no weight_map": lambda folder: (
        folder / files.INDEX_FILE
    ).write_text('{"weight_map": {}}'),
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:40])
def test_wrong_tensors_are_refused_by_name(text, folder):
    WRONG[text](folder)
    with pytest.raises(ConfigError, match=text) as refused:
        weights.load(folder, QWEN3, shardings(QWEN3))
    assert "\n" not in str(refused.value)


def test_wrong_indices_are_refused(tmp_path):
    weights.save(tmp_path, QWEN3, random_params(QWEN3), most_shard_bytes=8_000)
    index = tmp_path / files.INDEX_FILE
    first, second = files.indexed(index)[:2]
    shutil.copy(tmp_path / first, tmp_path / "kept")
    (tmp_path / first).unlink()
    with pytest.raises(ConfigError, match=f"{first} was to be read, but there is none"):
        weights.check(tmp_path, QWEN3)
    shutil.copy(tmp_path / second, tmp_path / first)
    with pytest.raises(
        ConfigError, match=rf"tensor .* is in .*{first} and in .*{second}"
    ):
        weights.check(tmp_path, QWEN3)
    shutil.copy(tmp_path / "kept", tmp_path / first)
    weights.check(tmp_path, QWEN3)
    elsewhere = json.dumps({"weight_map": {"a": f"../{tmp_path.name}/{first}"}})
    for text in ('{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', elsewhere):
        index.write_text(text)
        with pytest.raises(ConfigError, match="has no weight_map of names and files"):
            weights.check(tmp_path, QWEN3)


def test_an_index_of_one_file_is_that_files_model(folder):
    """Blaizzy/mlx-vlm#1464, ml-explore/mlx-swift-lm#408: both are in one folder."""
    expected = weights.load(folder, QWEN3, shardings(QWEN3))
    places = dict.fromkeys(load_file(folder / files.ONE_FILE), files.ONE_FILE)
    index = folder / files.INDEX_FILE
    index.write_text(json.dumps({"weight_map": places}))
    (folder / "adapter_model.safetensors").write_bytes(b"others")
    assert_same(weights.load(folder, QWEN3, shardings(QWEN3)), expected)
    # A further file that the index names belongs to the model as well.
    moved = {UP: load_file(folder / files.ONE_FILE)[UP]}
    rewrite(folder, lambda found: found.pop(UP))
    save_file(moved, folder / "more.safetensors")
    index.write_text(json.dumps({"weight_map": places | {UP: "more.safetensors"}}))
    assert_same(weights.load(folder, QWEN3, shardings(QWEN3)), expected)


def test_a_file_beside_an_index_of_others_is_refused(tmp_path):
    weights.save(tmp_path, QWEN3, random_params(QWEN3), most_shard_bytes=8_000)
    weights.check(tmp_path, QWEN3)
    save_file({"stray": ONES}, tmp_path / files.ONE_FILE)
    count = len(files.indexed(tmp_path / files.INDEX_FILE))
    with pytest.raises(ConfigError, match=f"which names {count} others.* Delete model"):
        weights.load(tmp_path, QWEN3, shardings(QWEN3))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("name", MODELS)
def test_a_weight_that_is_not_finite_is_refused_wherever_it_is(name, value, tmp_path):
    config = MODELS[name]
    weights.save(tmp_path, config, random_params(config), "float64")
    tensors = load_file(tmp_path / files.ONE_FILE)
    rng = np.random.default_rng(0)
    for tensor in rng.choice(sorted(tensors), 5, replace=False):
        changed = tensors[tensor].copy()
        changed.flat[rng.integers(changed.size)] = value
        save_file(tensors | {tensor: changed}, tmp_path / files.ONE_FILE)
        weights.check(tmp_path, config)  # looks at headers alone
        with pytest.raises(ConfigError, match=f"tensor {tensor} of .* holds NaN or"):
            weights.load(tmp_path, config, shardings(config))
    save_file(tensors, tmp_path / files.ONE_FILE)
    weights.load(tmp_path, config, shardings(config))


@pytest.mark.parametrize("key", ["layers", "width", "vocab_size", "mlp_width"])
def test_an_absurd_size_is_refused_from_the_headers(folder, key):
    path = folder / model_folder.CONFIG_FILE
    values = json.loads(path.read_text()) | {model_folder.SIZES[key]: 2**70}
    path.write_text(json.dumps(values))
    config = Config(model=ModelConfig(path=str(folder)))
    start = time.monotonic()
    with pytest.raises(ConfigError, match=rf"config\.json tells|shape \[.*{2**70}"):
        placement.initializer(config, Transformer(config.model), None)
    assert time.monotonic() - start < 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=VALUES | st.lists(st.integers(0, 2**63), max_size=3),
    length=st.integers(0, 2**64 - 1) | st.none(),
)
def test_whatever_a_header_says_is_one_line(key, value, length, headers):
    """A traceback for a null where offsets belong was one of many."""
    data = (headers / "whole").read_bytes()
    (headers / files.ONE_FILE).write_bytes(data)
    alter(headers, UP, key, value)
    if length is not None:
        text = (headers / files.ONE_FILE).read_bytes()[8:]
        (headers / files.ONE_FILE).write_bytes(length.to_bytes(8, "little") + text)
    try:
        weights.load(headers, QWEN3, shardings(QWEN3))
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.fixture(name="headers", scope="module")
def _headers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("headers")
    weights.save(folder, QWEN3, random_params(QWEN3))
    shutil.copy(folder / files.ONE_FILE, folder / "whole")
    return folder


def test_a_missing_library_is_named_with_its_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"need safetensors.*thundersync_jax\[hf\]"):
        weights.check(folder, QWEN3)


def test_another_model_is_refused(folder):
    for changes in ({"layers": 4}, {"width": 8}, {"tied_embeddings": False}):
        with pytest.raises(ConfigError, match="expected"):
            weights.check(folder, dataclasses.replace(QWEN3, **changes))
    with pytest.raises(ConfigError, match="model.layers.2.* more of shape"):
        weights.check(folder, dataclasses.replace(QWEN3, layers=2))


def test_a_head_that_equals_tied_embeddings_is_accepted(folder):
    def add_head(tensors):
        tensors[files.HEAD] = tensors[files.EMBEDDING].copy()

    before = weights.load(folder, QWEN3, shardings(QWEN3))
    rewrite(folder, add_head)
    assert_same(weights.load(folder, QWEN3, shardings(QWEN3)), before)


@pytest.mark.parametrize("value, dtype", [(np.nan, "float32"), (1e5, "float16")])
def test_weights_that_are_not_finite_are_not_saved(value, dtype, folder):
    old = weights.load(folder, QWEN3, shardings(QWEN3))
    new = random_params(QWEN3, seed=1)
    new["layers"]["up"] = new["layers"]["up"].at[1, 2, 3].set(value)
    with pytest.raises(ValueError, match=f"{UP} is not finite in {dtype}"):
        weights.write_tensors(folder, QWEN3, new, dtype)
    assert_same(weights.load(folder, QWEN3, shardings(QWEN3)), old)


def test_parameters_of_another_shape_are_not_saved(folder):
    wide = dataclasses.replace(QWEN3, mlp_width=32)
    with pytest.raises(
        ValueError, match=r"layers.gate has shape \(3, 16, 24\), expected"
    ):
        weights.save(folder, wide, random_params(QWEN3))
    with pytest.raises(ConfigError, match="dtype of saved weights is 'int8'"):
        weights.write_tensors(folder, QWEN3, random_params(QWEN3), "int8")


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("shard_bytes", [5e9, 8_000])
def test_a_reader_finds_old_or_new_weights_whenever_the_writer_dies(
    shard_bytes, tmp_path, monkeypatch
):
    trees = [random_params(QWEN3, seed=seed) for seed in range(2)]
    cut_short = []

    def dying(original, name):
        def call(path, *arguments):
            cut_short.append(name)
            if len(cut_short) == dies_at:
                raise Killed
            return original(path, *arguments)

        return call

    outcomes = set()
    for dies_at in range(1, 1000):
        died = False
        folder = tmp_path / str(dies_at)
        weights.save(folder, QWEN3, trees[0], most_shard_bytes=shard_bytes)
        cut_short.clear()
        with monkeypatch.context() as patch:
            for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync")):
                patch.setattr(owner, name, dying(getattr(owner, name), name))
            try:
                weights.write_tensors(
                    folder, QWEN3, trees[1], most_shard_bytes=shard_bytes
                )
            except Killed:
                died = True
        loaded = weights.load(folder, QWEN3, shardings(QWEN3))
        same = [
            all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(tree)))
            for tree in trees
        ]
        assert sum(same) == 1
        outcomes.add(same.index(True))
        # The next one works as if nothing had been.
        weights.write_tensors(folder, QWEN3, trees[0], most_shard_bytes=shard_bytes)
        assert_same(weights.load(folder, QWEN3, shardings(QWEN3)), trees[0])
        names = {path.name for path in folder.iterdir()}
        assert not any(name.endswith(".partial") for name in names)
        shutil.rmtree(folder)
        if not died:
            break
    assert outcomes == {0, 1}
    assert dies_at > (2 if shard_bytes > 1e9 else 8)


def test_a_model_may_come_to_need_more_or_fewer_files(folder):
    params = random_params(QWEN3, seed=1)
    for most in (8_000, 3_000, 5e9, 8_000):
        weights.write_tensors(folder, QWEN3, params, most_shard_bytes=most)
        stored = {path.name for path in folder.glob("*.safetensors")}
        assert stored == {path.name for path in files.tensor_files(folder)}
        assert_same(weights.load(folder, QWEN3, shardings(QWEN3)), params)
