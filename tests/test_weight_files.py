"""Files of weights: what is refused, and what a crash leaves."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import QWEN3, assert_same, random_params, shardings

from thundersync_jax.errors import ConfigError
from thundersync_jax.hf import files, weights

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
    r"safetensors was to be read, but .* whole safe": lambda folder: cut(folder, 0),
    r"holds no model.safetensors and no model.safetensors.index.json": lambda folder: (
        folder / files.ONE_FILE
    ).unlink(),
    r"holds model.safetensors and model.safetensors.index.json": lambda folder: (
        folder / files.INDEX_FILE
    ).write_text("{}"),
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
