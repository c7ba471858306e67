"""config.json of a Hugging Face folder: the model it describes, and what is refused."""

import dataclasses
import json
import math
import shutil
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thundersync_jax import flags
from thundersync_jax.config import Config, model_folder
from thundersync_jax.config.model import SHAPE, ModelConfig, from_dict
from thundersync_jax.config.model_folder import RopeScaling
from thundersync_jax.config.settings import config_dict
from thundersync_jax.errors import ConfigError
from thundersync_jax.hf import files
from thundersync_jax.models import layers

# Published files, shortened to what decides the model, and some of what does not.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MODELS = {
    "Qwen3-0.6B": (
        QWEN3,
        ModelConfig(
            vocab_size=151_936,
            layers=28,
            width=1024,
            mlp_width=3072,
            heads=16,
            kv_heads=8,
            head_dim=128,
            rope_theta=1e6,
            qk_norm=True,
        ),
    ),
    "Qwen2.5-0.5B": (
        QWEN2,
        ModelConfig(
            vocab_size=151_936,
            layers=24,
            width=896,
            mlp_width=4864,
            heads=14,
            kv_heads=2,
            head_dim=64,
            rope_theta=1e6,
            attention_bias=True,
        ),
    ),
    "Llama-3.1-8B": (
        LLAMA,
        ModelConfig(
            vocab_size=128_256,
            layers=32,
            width=4096,
            mlp_width=14_336,
            heads=32,
            kv_heads=8,
            head_dim=128,
            rope_theta=5e5,
            rope=RopeScaling("llama3", 8.0, 8192, 1.0, 4.0),
            norm_eps=1e-5,
            tied_embeddings=False,
        ),
    ),
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def folder(where, values, **changes):
    """Writes a config.json; a value of `...` leaves the key out."""
    where.mkdir(exist_ok=True)
    values = {k: v for k, v in (values | changes).items() if v is not ...}
    (where / "config.json").write_text(json.dumps(values))
    return str(where)


def read(where, values, **changes):
    return ModelConfig(path=folder(where, values, **changes))


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_is_this_model(name, tmp_path):
    values, expected = MODELS[name]
    config = read(tmp_path, values)
    assert dataclasses.replace(config, path=None) == expected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "rope",
    [
        RopeScaling(),
        RopeScaling("linear", 2.0),
        RopeScaling("llama3", 8.0, 512, 2.0, 3.0),
        RopeScaling("yarn", 4.0, 512),
        RopeScaling("yarn", 4.0, 512, 1.0, 4.0, 16.0, 2.0, 1.2, False),
    ],
    ids=lambda rope: rope.kind,
)
def test_what_is_written_is_read_back(name, rope, tmp_path):
    config = dataclasses.replace(MODELS[name][1], rope=rope, tied_embeddings=False)
    values = files.config_json(config, "bfloat16")
    assert dataclasses.replace(read(tmp_path, values), path=None) == config
    assert values["dtype"] == "bfloat16"
    longest = {"llama3": 4096, "yarn": 2048}.get(rope.kind, 32_768)
    assert values["max_position_embeddings"] == longest
    # Either spelling is enough.
    for left_out in (["rope_parameters"], ["rope_theta", "rope_scaling"]):
        fewer = {key: value for key, value in values.items() if key not in left_out}
        assert dataclasses.replace(read(tmp_path, fewer), path=None) == config


def test_a_written_config_keeps_what_the_source_says_besides():
    source = {**LLAMA, "original_max_position_embeddings": 5}
    values = files.config_json(MODELS["Llama-3.1-8B"][1], "float32", source)
    assert values["eos_token_id"] == [128001, 128008, 128009]
    assert values["max_position_embeddings"] == 131072
    assert "original_max_position_embeddings" not in values  # it would win


def test_what_a_file_leaves_out_is_what_transformers_takes(tmp_path):
    keys = ["num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    absent = dict.fromkeys([*keys, "architectures", "rope_scaling", "hidden_act"], ...)
    config = read(tmp_path, LLAMA, **absent)
    assert (config.kv_heads, config.norm_eps, config.rope_theta) == (32, 1e-6, 1e4)
    assert not config.tied_embeddings and config.rope == RopeScaling()
    assert read(tmp_path, QWEN3, head_dim=...).head_dim == 128  # not 1024 / 16
    assert read(tmp_path, QWEN2, head_dim=None).head_dim == 64


def test_the_context_of_pretraining_is_found_where_transformers_finds_it(tmp_path):
    """At the top first, then beside the scaling, then the longest context."""

    def tokens(**changes):
        return read(tmp_path, QWEN2, **changes).rope.original_tokens

    inside = YARN | {"original_max_position_embeddings": 7}
    outside = {"original_max_position_embeddings": 9}
    without = {"type": "yarn", "factor": 4.0}
    assert tokens(rope_scaling=inside, **outside) == 9
    assert tokens(rope_scaling=inside) == 7
    assert tokens(rope_scaling=without) == 32768


@pytest.mark.parametrize(
    ("values", "changes", "longest"),
    [
        (QWEN3, {}, 40_960),
        (QWEN3, {"max_position_embeddings": ...}, math.inf),
        (LLAMA, {}, 131_072),  # its factor of 8 is part of it
        (QWEN2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, 65_536),
        (QWEN2, {"rope_scaling": YARN}, 131_072),
        (
            QWEN2,
            {"rope_scaling": YARN, "max_position_embeddings": 131_072},
            131_072,
        ),
    ],
)
def test_longest_context_counts_the_scaling_once(tmp_path, values, changes, longest):
    config = read(tmp_path, values, **changes)
    assert files.longest_context(config) == longest


def test_yarn_scales_of_attention_become_one_factor(tmp_path):
    scales = {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    config = read(tmp_path, QWEN2, rope_scaling=YARN | scales)
    # transformers 5.19, ROPE_INIT_FUNCTIONS["yarn"]
    assert abs(layers.attention_factor(config.rope) - 1.1557219901962608) < 1e-12


REFUSED = [
    (QWEN3, {"architectures": ["MistralForCausalLM"]}, "['MistralForCausalLM'] and"),
    (QWEN3, {"model_type": "qwen3_moe", "architectures": ...}, "'qwen3_moe', expected"),
    (QWEN2, {"architectures": ["Qwen2ForSequenceClassification"]}, "Classification"),
    (QWEN2, {"use_sliding_window": True}, "use_sliding_window true, expected false"),
    (
        QWEN3,
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types with 'sliding_attention'",
    ),
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act 'gelu', expected 'silu'"),
    (QWEN3, {"attention_bias": True}, "attention_bias true, expected false"),
    (LLAMA, {"attention_bias": True}, "attention_bias true, expected false"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias true, expected false"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}"),
    (QWEN2, {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config {}"),
    (QWEN2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    (
        QWEN2,
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        "rope_parameters with partial_rotary_factor 0.5",
    ),
    (
        QWEN2,
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling of type 'dynamic', expected one of default, linear, llama3, yarn",
    ),
    (QWEN2, {"rope_scaling": {"rope_type": "longrope"}}, "of type 'longrope'"),
    (QWEN2, {"rope_scaling": {"type": "mrope"}}, "of type 'mrope'"),
    (QWEN2, {"rope_scaling": YARN | {"finetuned": 1}}, "rope_scaling with finetuned 1"),
    (
        QWEN2,
        {"rope_scaling": YARN | {"factor": None}},
        "factor none, expected a number",
    ),
    (QWEN2, {"rope_scaling": YARN | {"factor": -1}}, "model.rope.factor is -1.0"),
    (QWEN2, {"rope_scaling": YARN | {"truncate": 1}}, "model.rope.truncate is 1"),
    (QWEN2, {"rope_scaling": [1]}, "rope_scaling [1], expected an object"),
    (LLAMA, {"hidden_size": ...}, "hidden_size none, expected a number"),
    (LLAMA, {"hidden_size": "4096"}, "hidden_size '4096', expected a number"),
    (QWEN3, {"num_key_value_heads": ...}, "num_key_value_heads none"),
    (QWEN3, {"num_attention_heads": 0}, "model.heads is 0"),
    (QWEN3, {"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'"),
    (QWEN3, {"layer_types": 5}, "layer_types 5, expected a list"),
    (QWEN2, {"rope_scaling": {"rope_type": [1]}}, "rope_scaling of type [1], expected"),
    (QWEN2, {"rope_theta": 10**400}, "expected a number"),
    (
        QWEN2,
        {"rope_scaling": YARN | {"factor": math.e, "mscale": 1, "mscale_all_dim": -10}},
        "mscale_all_dim -10, expected a number above 0",
    ),
]


@pytest.mark.parametrize(
    "values, changes, text", REFUSED, ids=[row[2][:30] for row in REFUSED]
)
def test_what_is_not_computed_is_refused_by_name(values, changes, text, tmp_path):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, values, **changes)
    line = str(refused.value)
    assert text in line and "\n" not in line
    assert line.startswith((str(tmp_path), "model.heads"))


NUMBERS = st.integers(-3, 3) | st.integers() | st.just(10**400) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [*YARN, "rope_type", "rope_theta", "mscale", "mscale_all_dim"]
            ),
            inner | st.sampled_from(["yarn", "linear", "llama3", "default"]),
        )
    ),
    max_leaves=6,
)
KEYS = sorted({*QWEN3, *QWEN2, *LLAMA, "layer_types", "rope_parameters"})


@settings(
    max_examples=1_000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    values=st.sampled_from([QWEN3, QWEN2, LLAMA]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2),
)
def test_whatever_a_config_json_holds_is_read_or_refused_in_one_line(
    values, changes, tmp_path
):
    try:
        files.longest_context(read(tmp_path, values, **changes))
    except ConfigError as error:
        assert "\n" not in str(error)


def test_a_folder_without_a_config_is_refused(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="config.json was to be read, but there is n"):
        ModelConfig(path=str(tmp_path))
    path.write_text('{"hidden_size": ')
    with pytest.raises(ConfigError, match="config.json was to be read, but Expecting"):
        ModelConfig(path=str(tmp_path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list, expected a JSON object"):
        ModelConfig(path=str(tmp_path))
    for text, why in (
        ("", "it is empty"),
        (
            "version https://git-lfs.github.com/spec/v1\noid",
            r"git-lfs \(`git lfs pull`",
        ),
        ("[" * 200_000, "maximum recursion depth"),
    ):
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=f"config.json was to be read, but .*{why}"
        ):
            ModelConfig(path=str(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="config.json was to be read, but it is no f"):
        ModelConfig(path=str(tmp_path))


def test_an_adapter_is_named(tmp_path):
    """Neph0s/CoSER#3: what is missing is its base model."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds an adapter .* Merge the adapter into"):
        ModelConfig(path=str(tmp_path))
    folder(tmp_path, QWEN3)  # beside a whole model it is nobody's concern
    ModelConfig(path=str(tmp_path))


def test_no_family_has_both_norms_and_biases():
    config = ModelConfig(qk_norm=True, attention_bias=True)
    with pytest.raises(ConfigError, match="no published family has both"):
        files.config_json(config, "float32")
    with pytest.raises(ConfigError, match="width is 66 with model.heads 4"):
        files.config_json(ModelConfig(width=66), "float32")


def test_a_path_decides_the_shape_and_replacing_it_replaces_the_shape(tmp_path):
    first = folder(tmp_path / "a", QWEN3)
    second = folder(tmp_path / "b", LLAMA)
    config = ModelConfig(path=first, dtype="bfloat16", layers=3)
    other = dataclasses.replace(config, path=second)
    assert other == ModelConfig(path=second, dtype="bfloat16")
    assert dataclasses.replace(other, path=first) == config
    assert config.layers == 28  # not the 3 that was given
    decided = model_folder.architecture(first)
    assert set(decided) == set(SHAPE)


def test_a_saved_config_is_read_back_also_without_its_folder(tmp_path):
    path = folder(tmp_path / "a", LLAMA)
    config = ModelConfig(path=path, dtype="bfloat16")
    saved = json.loads(json.dumps(config_dict(config)))
    assert ModelConfig(**saved) == config
    assert hash(ModelConfig(**saved)) == hash(config)
    shutil.rmtree(path)
    assert from_dict(saved) == dataclasses.replace(
        MODELS["Llama-3.1-8B"][1], dtype="bfloat16"
    )


@pytest.fixture(name="command")
def _command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))  # a config's folder joins it
    file = tmp_path / "plain_run.py"
    file.write_text(
        "from thundersync_jax.config import Config\nget_config = lambda: Config()\n"
    )

    def run(*arguments):
        """Exit status, the config that a command would be called with, what it said."""
        calls = []
        argv = ["program", f"--config={file}", "--workdir=w", *arguments]
        with pytest.raises(SystemExit) as ended:
            flags.run(lambda config, workdir: calls.append(config), argv=argv)
        return ended.value.code, calls, capsys.readouterr()

    return run


def test_a_path_on_the_command_line_is_enough(command, tmp_path):
    path = folder(tmp_path / "a", QWEN3)
    status, (config,), _ = command(f"--config.model.path={path}")
    assert status == 0
    assert config.model == ModelConfig(path=path)
    assert dataclasses.replace(config, model=ModelConfig()) == Config()
    _, _, shown = command(f"--config.model.path={path}", "--print_config")
    rows = {line.split()[0]: line.split()[1:3] for line in shown.out.splitlines()}
    assert rows["model.layers"] == ["28", "model.path"]
    assert rows["model.rope.kind"] == ["none", "model.path"]
    assert rows["model.dtype"] == ["float32", "default"]


@pytest.mark.parametrize(
    "setting", ["layers=3", "rope.factor=2", "tied_embeddings=true"]
)
def test_a_shape_beside_a_path_is_refused(setting, command, tmp_path):
    path = folder(tmp_path / "a", QWEN3)
    status, calls, shown = command(
        f"--config.model.{setting}", f"--config.model.path={path}"
    )
    assert (status, calls) == (2, [])
    name = setting.partition("=")[0]
    expected = f"ConfigError: --config.model.{name} was given with model.path {path}, "
    assert shown.err.startswith(expected)
    assert shown.err.count("\n") == 1
