"""Settings are checked before any device work, and every refusal is one clear line."""

import dataclasses
import json

import pytest

from thundersync_jax.config import (
    Config,
    EnvConfig,
    EvaluationConfig,
    LatencyConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    TeacherConfig,
    VLLMConfig,
    WarmStartConfig,
    run,
)
from thundersync_jax.config.settings import (
    config_dict,
    differences,
    settings,
)
from thundersync_jax.engines.generation import STOP_IDS
from thundersync_jax.errors import ConfigError
from thundersync_jax.ops import exact_sum


@dataclasses.dataclass(frozen=True)
class Options:
    """What an environment's factory might read."""

    terms: int = 2  # numbers in a sum
    kinds: tuple[str, ...] = ("sum",)  # kinds of questions


WRONG = {
    "loss.pass_k is 1 with": lambda: Config(
        loss=LossConfig(advantage="pass_at_k", pass_k=1)
    ),
    "loss.baseline is 1e+31": lambda: LossConfig(
        advantage="fixed_baseline", baseline=1e31
    ),
    "loss.length_penalty is 1e+31": lambda: LossConfig(length_penalty=1e31),
    "loss.kl_coef is 1e+300": lambda: LossConfig(kl_coef=1e300),
    "model.layers is '2'": lambda: ModelConfig(layers="2"),
    "model.layers is 2.0": lambda: ModelConfig(layers=2.0),
    "model.layers is True": lambda: ModelConfig(layers=True),
    "model.layers is 0": lambda: ModelConfig(layers=0),
    "model.qk_norm is 1": lambda: ModelConfig(qk_norm=1),
    "model.dtype is 'fp8'": lambda: ModelConfig(dtype="fp8"),
    "model.heads is 4 with model.kv_heads 3": lambda: ModelConfig(kv_heads=3),
    "model.head_dim is 15": lambda: ModelConfig(head_dim=15),
    "optim.learning_rate is -0.1": lambda: OptimConfig(learning_rate=-0.1),
    "optim.learning_rate is nan": lambda: OptimConfig(learning_rate=float("nan")),
    "optim.b2 is 1.0": lambda: OptimConfig(b2=1.0),
    "optim.clip_norm is 0.0": lambda: OptimConfig(clip_norm=0.0),
    "optim.clip_norm is 'none'": lambda: OptimConfig(clip_norm="none"),
    "loss.constant is none": lambda: LossConfig(aggregation="constant"),
    "loss.constant is 9.0": lambda: LossConfig(constant=9),
    "loss.std_ddof is 2": lambda: LossConfig(std_ddof=2),
    "loss.std_ddof is 1 with loss.advantage 'mean_only'": lambda: LossConfig(
        advantage="mean_only", std_ddof=1
    ),
    "loss.std_eps is 0.1 with loss.advantage 'pass_at_k'": lambda: LossConfig(
        advantage="pass_at_k", std_eps=0.1
    ),
    "loss.pass_k is 2 with loss.advantage 'mean_std'": lambda: LossConfig(pass_k=2),
    "loss.baseline is 0.5 with loss.advantage 'leave_one_out'": lambda: LossConfig(
        advantage="leave_one_out", baseline=0.5
    ),
    "loss.baseline_decay is 0.5 with loss.advantage 'fixed_baseline'": lambda: (
        LossConfig(advantage="fixed_baseline", baseline_decay=0.5)
    ),
    "loss.baseline_decay is 1.5": lambda: LossConfig(
        advantage="tracked_baseline", baseline_decay=1.5
    ),
    "loss.kl_coef is -0.1": lambda: LossConfig(kl_coef=-0.1),
    "loss.kl_estimator is 'k4'": lambda: LossConfig(kl_coef=0.1, kl_estimator="k4"),
    "loss.kl_estimator is 'k1' with loss.kl_coef 0.0": lambda: LossConfig(
        kl_estimator="k1"
    ),
    "loss.entropy_coef is -1.0": lambda: LossConfig(entropy_coef=-1.0),
    "loss.length_penalty is -1.0": lambda: LossConfig(length_penalty=-1.0),
    "loss.length_free_tokens is 9 with loss.length_penalty 0.0": lambda: LossConfig(
        length_free_tokens=9
    ),
    "loss.length_free_tokens is 72 with at most 72 sampled tokens": lambda: Config(
        loss=LossConfig(length_penalty=0.5, length_free_tokens=72)
    ),
    "loss.importance_cap is 0.0": lambda: LossConfig(importance_cap=0.0),
    "loss.turn_credit is 'turns'": lambda: LossConfig(turn_credit="turns"),
    "rollout.slots is 3": lambda: RolloutConfig(slots=3),
    "rollout.temperature is 0.0": lambda: RolloutConfig(temperature=0),
    "rollout.turn_tokens is 96": lambda: RolloutConfig(turn_tokens=96),
    "rollout.turns is 0": lambda: RolloutConfig(turns=0),
    "rollout.cut_actions is 'drop'": lambda: RolloutConfig(cut_actions="drop"),
    "mesh.sampler_devices is 2 with mesh.sampler 'shared'": lambda: MeshConfig(
        sampler="shared", sampler_devices=2
    ),
    "mesh.sampler_devices is 3 with rollout.slots 32": lambda: Config(
        mesh=MeshConfig(sampler_devices=3)
    ),
    "mesh.sampler_devices is 16 with rollout.slots 32": lambda: Config(
        mesh=MeshConfig(sampler_devices=16)
    ),
    "vllm.servers has 'http://a:b'": lambda: VLLMConfig(("http://a:b",), "w"),
    "vllm.servers has 'http://a:99999'": lambda: VLLMConfig(("http://a:99999",), "w"),
    "vllm.servers has 'http://[::1'": lambda: VLLMConfig(("http://[::1",), "w"),
    "vllm.servers has 'http://a b:1'": lambda: VLLMConfig(("http://a b:1",), "w"),
    "vllm.servers has 'a:8000'": lambda: VLLMConfig(("a:8000",), "w"),
    "vllm.servers is ('http://a:1',) with vllm.weights_dir none": lambda: VLLMConfig(
        ("http://a:1",)
    ),
    "vllm.servers and teacher.servers both have 'http://a:1'": lambda: Config(
        vllm=VLLMConfig(("http://a:1/",), "w"),
        teacher=TeacherConfig(servers=("http://a:1",)),
        loss=LossConfig(distill="sampled_reverse_kl"),
    ),
    "rollout.stop_ids is 261": lambda: RolloutConfig(stop_ids=261),
    "rollout.stop_texts is ('a', 'a')": lambda: RolloutConfig(stop_texts=("a", "a")),
    "rollout.stop_texts is ('',)": lambda: RolloutConfig(stop_texts=("",)),
    "rollout.stop_ids is (1, 1)": lambda: RolloutConfig(stop_ids=(1, 1)),
    "rollout.stop_ids is (1, -1)": lambda: RolloutConfig(stop_ids=(1, -1)),
    "rollout.stop_ids is (0, 1, 2, 3, 4, 5, 6, 7, 8)": lambda: RolloutConfig(
        stop_ids=tuple(range(STOP_IDS + 1))
    ),
    "rollout.stop_ids is (1, 264) with model.vocab_size 264": lambda: Config(
        rollout=RolloutConfig(stop_ids=(1, 264))
    ),
    "rollout.verify_timeout_secs is inf": lambda: RolloutConfig(
        verify_timeout_secs=float("inf")
    ),
    "rollout.failed_share_limit is 50.0": lambda: RolloutConfig(failed_share_limit=50),
    "rollout.prefill_buckets is [16, 96]": lambda: RolloutConfig(
        prefill_buckets=[16, 96]
    ),
    "rollout.prefill_buckets is (32, 16, 96)": lambda: RolloutConfig(
        prefill_buckets=(32, 16, 96)
    ),
    "rollout.gradient_buckets is (48, 64)": lambda: RolloutConfig(
        gradient_buckets=(48, 64)
    ),
    "steps is 99999999999, expected less than": lambda: Config(steps=99999999999),
    "env.factory is 'my_tasks'": lambda: EnvConfig(factory="my_tasks"),
    "env.options is {'terms': 3}": lambda: EnvConfig(options={"terms": 3}),
    "env.tool_latency.kind is 'normal'": lambda: EnvConfig(
        tool_latency=LatencyConfig("normal")
    ),
    "env.verify_latency.median_secs is 0.0": lambda: EnvConfig(
        verify_latency=LatencyConfig("lognormal", 0.0, 1.0)
    ),
    "env.verify_latency.median_secs is 0": lambda: EnvConfig(
        verify_latency=LatencyConfig("straggler")
    ),
    "env.tool_latency.sigma is -1.0": lambda: EnvConfig(
        tool_latency=LatencyConfig("lognormal", 0.1, -1.0)
    ),
    "mesh.fsdp is 0": lambda: MeshConfig(fsdp=0),
    "warm_start.target_success is 40.0": lambda: WarmStartConfig(target_success=40),
    "warm_start.batch_size is 0": lambda: WarmStartConfig(batch_size=0),
    "evaluation.questions is 0": lambda: EvaluationConfig(questions=0),
    "steps is 0": lambda: Config(steps=0),
    "seed is -1": lambda: Config(seed=-1),
    "model is 3": lambda: Config(model=3),
    "release is 'token'": lambda: Config(release="token"),
    "open_groups is 0 with release 'trajectory'": lambda: Config(open_groups=0),
    "rollout.group_size is 1 with loss.advantage 'leave_one_out'": lambda: Config(
        rollout=RolloutConfig(group_size=1),
        loss=LossConfig(advantage="leave_one_out"),
    ),
    "rollout.group_size is 1 with loss.advantage 'pass_at_k'": lambda: Config(
        rollout=RolloutConfig(group_size=1), loss=LossConfig(advantage="pass_at_k")
    ),
    "rollout.group_size is 2 with loss.advantage 'leave_one_out_std'": lambda: Config(
        rollout=RolloutConfig(group_size=2),
        loss=LossConfig(advantage="leave_one_out_std"),
    ),
    "loss.pass_k is 9 with rollout.group_size 8": lambda: Config(
        loss=LossConfig(advantage="pass_at_k", pass_k=9)
    ),
    "uniform_groups is 'drop' with rollout.group_size 1": lambda: Config(
        uniform_groups="drop",
        rollout=RolloutConfig(group_size=1),
        loss=LossConfig(advantage="fixed_baseline"),
    ),
    "uniform_groups is 'skip'": lambda: Config(uniform_groups="skip"),
    "rollout.replacement_groups is 4 with uniform_groups 'drop'": lambda: Config(
        uniform_groups="drop", rollout=RolloutConfig(replacement_groups=4)
    ),
    "rollout.replacement_groups is 0": lambda: RolloutConfig(replacement_groups=0),
    "accumulator is 'kahan'": lambda: Config(accumulator="kahan"),
    "accumulator is 'exact' with parameters of float64 (model.dtype)": lambda: Config(
        accumulator="exact", model=ModelConfig(dtype="float64")
    ),
    "accumulator is 'exact' with 8192 trajectories per step": lambda: Config(
        accumulator="exact", rollout=RolloutConfig(groups_per_step=1024)
    ),
    "accumulator is 'exact' with 4096 trajectories per step twice": lambda: Config(
        accumulator="exact",
        rollout=RolloutConfig(groups_per_step=512),
        loss=LossConfig(kl_coef=0.1),
    ),
    "rollout.stop_ids is (7,) with warm_start.steps 5": lambda: Config(
        rollout=RolloutConfig(stop_ids=(7,)), warm_start=WarmStartConfig(steps=5)
    ),
    "model.vocab_size is 256": lambda: Config(model=ModelConfig(vocab_size=256)),
    "mesh.tensor is 3 with 4 in model.heads": lambda: Config(mesh=MeshConfig(tensor=3)),
    "mesh.fsdp is 32 with 16 in rollout.gradient_buckets": lambda: Config(
        mesh=MeshConfig(fsdp=32)
    ),
}


@pytest.mark.parametrize("received", WRONG)
def test_wrong_value_is_one_line_with_value_expectation_and_way_out(received):
    with pytest.raises(ConfigError) as refused:
        WRONG[received]()
    line = str(refused.value)
    assert line.startswith(f"{received}")
    assert ", expected " in line
    assert line.endswith(".") and "\n" not in line
    assert len(line.split(". ")[-1].split()) >= 2  # a way out follows the expectation


def test_settings_that_only_differ_in_how_a_number_is_written_are_one_config():
    whole, fraction = RolloutConfig(temperature=1), RolloutConfig(temperature=1.0)
    texts = [json.dumps(config_dict(c)) for c in (whole, fraction)]
    assert texts[0] == texts[1]
    assert hash(whole) == hash(fraction)


def test_combinations_that_work_are_accepted():
    Config(open_groups=None)
    Config(release="group", open_groups=0)
    Config(loss=LossConfig(aggregation="constant", constant=96))
    Config(optim=OptimConfig(learning_rate=0.0, clip_norm=None))
    Config(mesh=MeshConfig(replica=2, fsdp=2, tensor=2))
    EnvConfig(tool_latency=LatencyConfig("none", 0.05, 0.8))
    EnvConfig(tool_latency=LatencyConfig("straggler", 0.05))
    Config(rollout=RolloutConfig(stop_ids=()))
    for advantage in ("batch_mean_std", "fixed_baseline", "tracked_baseline"):
        Config(
            rollout=RolloutConfig(group_size=1), loss=LossConfig(advantage=advantage)
        )
    Config(uniform_groups="replace", rollout=RolloutConfig(replacement_groups=4))
    Config(accumulator="exact", model=ModelConfig(dtype="bfloat16"))
    Config(accumulator="exact", rollout=RolloutConfig(groups_per_step=1023))
    Config(
        accumulator="exact",
        rollout=RolloutConfig(groups_per_step=511),
        loss=LossConfig(kl_coef=0.1),
    )
    Config(rollout=RolloutConfig(stop_ids=tuple(range(264 - STOP_IDS, 264))))


def test_exact_sums_are_refused_where_they_end():
    assert run.MOST_ADDENDS == exact_sum.MAX_ADDENDS


def test_config_json_reads_back_exactly_and_names_the_class_of_options():
    plain = config_dict(Config(env=EnvConfig(options=Options(terms=3))))
    assert json.loads(json.dumps(plain)) == plain
    assert plain["env"]["options"] == {"class": "Options", "terms": 3, "kinds": ["sum"]}


def test_every_setting_is_in_config_json_and_has_a_comment():
    plain = config_dict(Config())
    for setting in settings(Config()):
        value = plain
        for part in setting.name.split("."):
            value = value[part]
        assert setting.comment, setting.name
        assert setting.default == setting.value


def test_differences_are_listed_by_field():
    config = Config(env=EnvConfig(options=Options()))
    saved = json.loads(json.dumps(config_dict(config)))
    assert differences(saved, config_dict(config)) == []
    other = dataclasses.replace(
        config,
        seed=5,
        rollout=dataclasses.replace(config.rollout, prefill_buckets=(32, 96)),
        env=EnvConfig(),
    )
    changes = differences(saved, config_dict(other))
    names = ["seed", "rollout.prefill_buckets", "env.options"]
    assert [change.name for change in changes] == names
    assert str(changes[0]) == "seed: 0 -> 5"
    assert changes[1].current == [32, 96]


def test_buckets_that_nobody_gave_follow_the_context():
    lengths = (16, 24, 32, 48, 64, 96)
    assert RolloutConfig().gradient_buckets == lengths
    assert RolloutConfig().prefill_buckets == lengths
    for context in (9, 16, 17, 100, 1023, 1024, 40_960):
        rollout = RolloutConfig(context_tokens=context, turn_tokens=8)
        changed = dataclasses.replace(
            RolloutConfig(turn_tokens=8), context_tokens=context
        )
        assert changed == rollout
        *below, last = rollout.gradient_buckets
        assert context <= last < max(context + 8, 17)
        assert all(n < last and n & (n - 1) in (0, n * 2 // 3) for n in below)
        assert below == sorted(set(below))
    given = RolloutConfig(prefill_buckets=(96,), gradient_buckets=(48, 96))
    assert given.prefill_buckets == (96,) and given.gradient_buckets == (48, 96)
    with pytest.raises(ConfigError, match="the last at least 128"):
        dataclasses.replace(given, context_tokens=128)


def test_what_a_resume_may_change_is_declared_beside_the_fields():
    """Every other setting is part of what a run computes, new ones included."""
    rollout = ["command_timeout_secs", "trajectory_timeout_secs", "start_timeout_secs"]
    rollout += ["verify_timeout_secs", "step_timeout_secs", "verify_concurrency"]
    rollout += ["environments", "close_timeout_secs", "retry_secs"]
    rollout += ["start_fault_share", "outage_secs", "blocked_secs", "attempts"]
    rollout += ["failed_share_limit", "mismatch_warning"]
    vllm = ["servers", "weights_dir", "request_timeout_secs", "attempts"]
    changeable = [s.name for s in settings(Config()) if s.changeable]
    assert changeable == [
        "steps",
        "closing_comparison",
        *(f"rollout.{name}" for name in rollout),
        "env.accept_tasks",
        *(f"vllm.{name}" for name in [*vllm, "publish_timeout_secs"]),
        "teacher.request_timeout_secs",
        "evaluation.every_steps",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "metrics.sinks",
        "metrics.rollouts",
        "metrics.rollout_bytes",
        "metrics.artefact_bytes",
    ]
