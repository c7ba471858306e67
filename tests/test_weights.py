"""Weights in and out of Hugging Face folders: names, bits, layouts and memory.

Against transformers' own models they are tested in `test_weights_hf.py`, what is
refused and what a crash leaves in `test_weight_files.py`.
"""

import dataclasses
import json
from pathlib import Path

import checkpoint_memory
import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import (
    LLAMA,
    MODELS,
    QWEN2,
    QWEN3,
    assert_same,
    random_params,
    shardings,
)

from thundersync_jax.config.model import ModelConfig
from thundersync_jax.hf import files, weights

pytestmark = pytest.mark.usefixtures("quick_programs")

MESHES = [(1, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)]


def read_all(folder):
    """The tensors of a folder, by the library of the format."""
    tensors = {}
    for path in Path(folder).glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_files_hold_the_transposed_parameters_under_published_names(name, tmp_path):
    config = MODELS[name]
    params = random_params(config)
    weights.save(tmp_path, config, params)
    stored = read_all(tmp_path)
    p = jax.tree.map(np.asarray, params)
    layer = p["layers"]
    n, kv, h, d = config.heads, config.kv_heads, config.head_dim, config.width

    def same(name, expected):
        np.testing.assert_array_equal(stored.pop(name), expected)

    same("model.embed_tokens.weight", p["embed"])
    same("model.norm.weight", p["final_norm"])
    for i in range(config.layers):
        at = f"model.layers.{i}"
        for theirs, ours, heads in (
            ("q", "query", n),
            ("k", "key", kv),
            ("v", "value", kv),
        ):
            rows = layer[ours][i].reshape(d, heads * h).T
            same(f"{at}.self_attn.{theirs}_proj.weight", rows)
            if config.attention_bias:
                bias = layer[f"{ours}_bias"][i].reshape(heads * h)
                same(f"{at}.self_attn.{theirs}_proj.bias", bias)
        same(f"{at}.self_attn.o_proj.weight", layer["output"][i].reshape(n * h, d).T)
        if config.qk_norm:
            same(f"{at}.self_attn.q_norm.weight", layer["query_norm"][i])
            same(f"{at}.self_attn.k_norm.weight", layer["key_norm"][i])
        same(f"{at}.input_layernorm.weight", layer["attention_norm"][i])
        same(f"{at}.post_attention_layernorm.weight", layer["mlp_norm"][i])
        same(f"{at}.mlp.gate_proj.weight", layer["gate"][i].T)
        same(f"{at}.mlp.up_proj.weight", layer["up"][i].T)
        same(f"{at}.mlp.down_proj.weight", layer["down"][i].T)
    if not config.tied_embeddings:
        same("lm_head.weight", p["unembed"])
    assert not stored


@pytest.mark.parametrize("shard_bytes", [5e9, 8_000])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parameters_survive_saving_and_loading_bit_for_bit(mesh, shard_bytes, tmp_path):
    for name, config in MODELS.items():
        folder = tmp_path / name
        params = random_params(config)
        weights.save(folder, config, params, most_shard_bytes=shard_bytes)
        found = len(list(folder.glob("*.safetensors")))
        assert found == 1 if shard_bytes > 1e9 else found > 3
        expected = shardings(config, mesh)
        read = ModelConfig(path=str(folder))
        assert dataclasses.replace(read, path=None) == config
        loaded = weights.load(folder, read, expected)
        assert_same(loaded, params)
        assert jax.tree.map(lambda x: x.sharding, loaded) == expected


@pytest.mark.parametrize("dtype", weights.STORED_DTYPES)
def test_any_stored_dtype_becomes_float32(dtype, tmp_path):
    params = random_params(QWEN2)
    weights.save(tmp_path, QWEN2, params, dtype)
    loaded = weights.load(tmp_path, QWEN2, shardings(QWEN2))

    def rounded(x):
        return np.asarray(x).astype(dtype).astype(np.float32)

    assert_same(loaded, jax.tree.map(rounded, params))
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    count = sum(x.size for x in jax.tree.leaves(params))
    stored = (tmp_path / files.ONE_FILE).stat().st_size
    assert 0 < stored - sizes[dtype] * count < 20_000  # the header
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["dtype"] == dtype


def test_float64_models_lose_nothing(tmp_path):
    with jax.enable_x64(True):
        config = dataclasses.replace(QWEN3, dtype="float64")
        params = random_params(config)
        weights.save(tmp_path, config, params, "float64")
        loaded = weights.load(tmp_path, config, shardings(config))
        assert_same(loaded, params)
        assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype(np.float64)}


def test_files_of_other_writers_are_read_wherever_tensors_lie(tmp_path):
    """Any order, and a header of an odd length: nothing is aligned."""
    weights.save(tmp_path, LLAMA, params := random_params(LLAMA))
    path = tmp_path / files.ONE_FILE
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    save_file(dict(reversed(tensors.items())), path)
    assert_same(weights.load(tmp_path, LLAMA, shardings(LLAMA)), params)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert_same(weights.load(tmp_path, LLAMA, shardings(LLAMA)), params)


def test_blocks_do_not_change_what_is_read(tmp_path, monkeypatch):
    weights.save(tmp_path, LLAMA, params := random_params(LLAMA), "bfloat16")
    whole = weights.load(tmp_path, LLAMA, shardings(LLAMA, (1, 8, 1)))
    monkeypatch.setattr(files, "_BLOCK_BYTES", 100)
    assert_same(weights.load(tmp_path, LLAMA, shardings(LLAMA, (1, 1, 8))), whole)
    assert not np.array_equal(whole["embed"], params["embed"])  # rounded


def test_a_part_reads_its_own_rows_and_a_block_at_a_time(tmp_path, monkeypatch):
    weights.save(tmp_path, QWEN3, params := random_params(QWEN3))
    embedding = files.stored(tmp_path)[files.EMBEDDING]
    read, parts = files._read, []
    monkeypatch.setattr(
        files, "_read", lambda *given: parts.append(given[1:]) or read(*given)
    )
    monkeypatch.setattr(files, "_BLOCK_BYTES", 256)  # four rows
    part, out = [slice(10, 20), slice(2, 5)], np.empty((10, 3), np.float32)
    files.copy_part(embedding, (48, 16), (0, 1), part, out)
    rows = [slice(10, 14), slice(14, 18), slice(18, 20)]
    assert parts == [(part, slice(2, 5)) for part in rows]
    assert np.array_equal(out, np.asarray(params["embed"])[10:20, 2:5])


def test_the_folder_keeps_what_belongs_to_the_model(tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    weights.save(
        source, QWEN3, random_params(QWEN3), generation={"eos_token_id": [1, 7]}
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "x"):
        (source / name).write_text(f'"{name}"')
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"eos_token_id": 7}))

    config = ModelConfig(path=str(source))
    params = weights.load(source, config, shardings(config))
    weights.save(saved, config, params, "bfloat16", metadata={"policy_version": "12"})
    names = {path.name for path in saved.iterdir()}
    weight_files = {"config.json", "generation_config.json", "model.safetensors"}
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names == weight_files | copied
    assert (saved / "tokenizer.json").read_text() == '"tokenizer.json"'
    told = json.loads((saved / "config.json").read_text())
    assert (told["eos_token_id"], told["dtype"]) == (7, "bfloat16")
    generation = json.loads((saved / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 7]
    with safe_open(saved / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt", "policy_version": "12"}
    # In place: the weights change and nothing else.
    before = {path: path.read_bytes() for path in saved.glob("*.json")}
    weights.write_tensors(saved, config, params)
    assert before == {path: path.read_bytes() for path in saved.glob("*.json")}


def test_loading_holds_little_beside_the_parameters():
    """Neither whole tensors of the file nor the parts of all devices at once."""
    config = dataclasses.replace(
        QWEN3, layers=2, width=512, mlp_width=16_384, vocab_size=30_000
    )
    for dtype in checkpoint_memory.DTYPES:
        peak = checkpoint_memory.measure(config, dtype)
        assert peak.parameters > 150e6
        assert peak.after - peak.before < peak.parameters + 40e6, dtype
