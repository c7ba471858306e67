"""New weights reach every server before the next request, or the run ends."""

import contextlib
import errno
import json

import echo_task
import jax
import numpy as np
import pytest
from served_policy import PolicyServer, written

from thundersync_jax import train
from thundersync_jax.config import VLLMConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.engines.vllm.engine import Server
from thundersync_jax.engines.vllm.publish import Publisher
from thundersync_jax.errors import ConfigError, ServerError
from thundersync_jax.hf import weights
from thundersync_jax.metrics.writer import METRICS, read
from thundersync_jax.models import transformer

CONFIG = echo_task.small()
CONTEXT = CONFIG.rollout.context_tokens
ORDER = [
    "/pause?mode=wait",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
]

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture
def folder(tmp_path):
    return written(CONFIG, tmp_path / "weights", untied=True)


@pytest.fixture
def served(folder):
    with PolicyServer(folder, CONTEXT) as server:
        yield server


def publisher(folder, lines=None, config=CONFIG, **settings):
    given = VLLMConfig(("http://localhost:1",), folder, **settings)
    on_line = print if lines is None else lines.append
    return Publisher(given, config.model, CONTEXT, on_line)


def params_of(seed):
    return transformer.init(CONFIG.model, jax.random.key(seed))


def publish(publisher, seed, version, *served):
    servers = [Server(one.address, 20.0) for one in served]
    return publisher.publish(params_of(seed), version, servers)


def test_weights_arrive_in_this_order_and_are_proved(folder, served):
    lines = []
    one = publisher(folder, lines)
    for version in (0, 1, 2):
        name, lost = publish(one, version, version, served)
        assert lost == {} and f"policy {version}" in name
        assert served.calls == ORDER * (version + 2)  # others first, at the start
        assert served.weight_version == name
        assert one.difference < 1e-5
    assert len(lines) == 1 and "1 servers hold the policy" in lines[0]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        # verl-project/verl#4248: the sampler keeps its first weights for ever.
        ("reloads", "log-probabilities of"),
        # NVIDIA-NeMo/RL#4018: new weights continue prefixes of the old ones.
        ("forgets", "log-probabilities of tokens that it sampled"),
        ("at_temperature", "log-probabilities of tokens that it sampled"),
    ],
)
def test_a_server_that_samples_from_something_else_ends_the_run(
    folder, served, broken, said
):
    setattr(served, broken, False)
    one = publisher(folder)
    with pytest.raises(ServerError) as error:
        publish(one, 0, 0, served)
        publish(one, 1, 1, served)
    assert served.address in str(error.value) and said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_that_never_reloads_is_found_out_at_the_start(folder, served):
    """With small steps its weights would stay within the tolerance for long."""
    served.reloads = False
    params = served._params | {}
    params.pop("unembed")
    one = publisher(folder)
    with pytest.raises(ServerError, match="does not sample from the learner's policy"):
        one.publish(params, 0, [Server(served.address, 20.0)])


def test_a_folder_that_cannot_be_written_ends_the_run(folder, served, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    one = publisher(folder)
    monkeypatch.setattr(weights, "write_tensors", full)
    with pytest.raises(ServerError, match=r"weights_dir .*No space left on device"):
        publish(one, 0, 0, served)


def test_a_missing_folder_is_named_with_its_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"vllm\.weights_dir is .*export --initial"):
        publisher(str(tmp_path / "none"))


def test_a_tolerance_is_the_users_choice(folder, served):
    served.at_temperature = False
    one = publisher(folder, probe_tolerance=50.0)
    publish(one, 0, 0, served)
    assert one.difference > 1e-2


def test_a_number_that_is_none_is_no_proof(folder, served):
    def without(body, answer):
        for choice in answer["choices"]:
            for table in choice["prompt_logprobs"] or ():
                for entry in (table or {}).values():
                    entry["logprob"] = float("nan")
        return answer

    served.change = without
    with pytest.raises(ServerError):
        publish(publisher(folder), 0, 0, served)


def test_servers_that_are_gone_are_named_and_the_others_go_on(folder, served):
    with PolicyServer(folder, CONTEXT) as other:
        gone = other.address
    one = publisher(folder)
    name, lost = publish(one, 0, 0, served, other)
    assert [server.address for server in lost] == [gone]
    assert served.weight_version == name and one.difference < 1e-5


def test_no_two_publications_have_one_name(folder, served):
    """Another trainer's policy of the same version is not this one's."""
    names = [publish(publisher(folder), 0, 0, served)[0] for _ in range(2)]
    one = publisher(folder)
    names += [publish(one, 0, 0, served)[0] for _ in range(2)]
    assert len(set(names)) == 4


def test_a_server_that_refuses_the_weights_ends_the_run(folder, served):
    served.development = False
    with pytest.raises(ServerError, match="404"):
        publish(publisher(folder), 0, 0, served)


def test_two_trainers_of_one_server_are_found_out(folder, served, monkeypatch):
    monkeypatch.setattr(Server, "weight_version", lambda self: "7")
    with pytest.raises(ServerError, match="another trainer"):
        publish(publisher(folder), 0, 0, served)


def test_another_model_in_the_folder_is_refused_before_anything_is_written(tmp_path):
    wider = replace(CONFIG, {"model.width": 32})
    folder = written(wider, tmp_path / "wider")
    before = (tmp_path / "wider" / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"model\.width 32, the policy has 16"):
        publisher(folder)
    assert (tmp_path / "wider" / "model.safetensors").read_bytes() == before


def test_the_folder_that_the_policy_comes_from_is_never_written_to(folder):
    changes = {"model.path": folder, "chat.format": "bytes"}
    servers = {"vllm.servers": ("http://localhost:1",), "vllm.weights_dir": folder}
    with pytest.raises(ConfigError, match=r"vllm\.weights_dir .* is model\.path"):
        replace(CONFIG, changes | servers)


def test_a_run_samples_from_its_servers_alone(folder, tmp_path):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(PolicyServer(folder, CONTEXT)) for _ in range(2)]
        config = replace(
            CONFIG,
            {
                "vllm.servers": tuple(server.address for server in servers),
                "vllm.weights_dir": folder,
                "steps": 2,
            },
        )
        train.train(config, tmp_path / "run")
        asked = [len(server.bodies) for server in servers]
    rows = read(tmp_path / "run")[1:]
    assert min(asked) > 10
    spans = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    assert sum(span["name"] == "publish" for span in spans) >= 2
    for row in rows:
        assert row["mismatch_mean"] < 1e-5 and row["staleness_max"] == 0
        assert row["probe_difference"] < 1e-5
        assert np.isfinite(row["gradient_norm"])
    assert set(rows[-1]) <= set(METRICS) | {"step"}
