"""A checkpoint gives the state back bit for bit, or says in one line why it cannot."""

import logging
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from thundersync_jax.errors import ConfigError
from thundersync_jax.run.checkpoint import Checkpoints, sha256
from thundersync_jax.run.state import State

REPOSITORY = pathlib.Path(__file__).parents[1]
OPTIMIZER = optax.adamw(1e-2)


def mesh(devices):
    return jax.make_mesh(
        (len(devices),), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices
    )


def on(devices, tree):
    """Vectors of even length are sharded, the rest is copied."""

    def place(x):
        even = x.ndim and x.shape[0] % len(devices) == 0
        spec = PartitionSpec("fsdp") if even else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh(devices), spec))

    return jax.tree.map(place, tree)


def trained(devices, steps=3):
    """Parameters and AdamW state after a few updates, so that nothing is round."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w": jax.random.normal(keys[0], (8, 3)),
        "layers": [jax.random.normal(keys[1], (4,)), jnp.float32(1.001)],
    }
    state = on(devices, State(params, OPTIMIZER.init(params)))
    for _ in range(steps):
        state = update(state)
    return state


@jax.jit
def update(state):
    gradient = jax.tree.map(jnp.sin, state.params)
    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state)


def shapes_on(devices, tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        on(devices, jax.tree.map(jnp.zeros_like, tree)),
    )


def test_a_restored_state_has_the_same_bits_and_goes_on_with_the_same_bits(tmp_path):
    state = trained(jax.devices()[:2])
    host = {"step": 3, "elapsed_secs": 0.1 + 0.2, "order": [1, 2], "nested": {"a": "é"}}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state, host)
    with Checkpoints(tmp_path) as checkpoints:
        restored, facts = checkpoints.restore(checkpoints.latest(), state)
    assert facts == host
    assert type(restored) is State and type(restored.opt_state) is tuple
    assert sha256(restored) == sha256(state)
    assert restored.opt_state[0].count == 3
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert x.sharding == y.sharding and x.dtype == y.dtype
    assert sha256(update(restored)) == sha256(update(state))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_state_is_restored_to_another_sharding(tmp_path, devices):
    state = trained(jax.devices()[:2])
    like = shapes_on(jax.devices()[-devices:], state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        restored, facts = checkpoints.restore(1, like)
    assert facts == {} and sha256(restored) == sha256(state)
    for x, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert x.sharding == wanted.sharding


def test_shapes_without_a_sharding_are_restored_to_the_first_device(tmp_path):
    state = trained(jax.devices()[:2])
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        restored, _ = checkpoints.restore(1, jax.eval_shape(lambda: state))
    assert {d for x in jax.tree.leaves(restored) for d in x.devices()} == {
        jax.devices()[0]
    }
    assert sha256(restored) == sha256(state)


def test_parameters_are_restored_whatever_optimizer_made_them(tmp_path):
    state = trained(jax.devices()[:1])
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {"version": 3})
        like = {"params": shapes_on(jax.devices()[:4], state.params)}
        saved, facts = checkpoints.restore(1, like, part=True)
        assert facts == {"version": 3} and saved.keys() == {"params"}
        assert sha256(saved["params"]) == sha256(state.params)
        with pytest.raises(ConfigError, match="params"):
            checkpoints.restore(1, {"params": {"w": like["params"]["w"]}}, part=True)
        with pytest.raises(ConfigError, match="opt_state"):
            checkpoints.restore(1, like)


def test_an_array_free_to_move_stays_free(tmp_path):
    tree = {"count": jnp.zeros((), jnp.int32) + 7}
    other = jax.device_put(jnp.ones(()), jax.devices()[3])
    assert (tree["count"] + other).devices() == {jax.devices()[3]}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, tree, {})
        restored, _ = checkpoints.restore(1, tree)
    assert (restored["count"] + other).devices() == {jax.devices()[3]}
    assert restored["count"] == 7


def test_float32_masters_survive_bfloat16_compute(tmp_path):
    """TensorAuto/OpenTau#185: masters were rebuilt from bfloat16, 1.001 became 1.0."""
    masters = {"w": jnp.full(4, 1.001, jnp.float32)}
    computed = masters["w"].astype(jnp.bfloat16)
    assert float(computed[0]) == 1.0
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, masters, {})
        restored, _ = checkpoints.restore(1, masters)
        assert restored["w"].dtype == jnp.float32
        np.testing.assert_array_equal(restored["w"], np.full(4, 1.001, np.float32))
        with pytest.raises(ConfigError, match=r"w is float32\[4\], expected bfloat16"):
            checkpoints.restore(1, {"w": computed})


def test_scalars_and_arrays_of_numpy_are_saved(tmp_path):
    tree = {"a": np.float64(0.1), "b": np.arange(3), "c": 5, "d": np.int64(2**40)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, tree, {"success": np.float32(0.5), "done": np.bool_(True)})
        restored, facts = checkpoints.restore(1, tree)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(restored))
    assert sha256(restored) == sha256(tree)
    assert facts == {"success": 0.5, "done": True}


def test_what_happens_to_the_state_after_save_does_not_reach_the_file(tmp_path):
    """Donated device buffers, numpy arrays written to, a host dict that goes on."""
    state = {"x": jnp.zeros(2_000_000), "n": np.zeros(300_000)}
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    unsaved = jnp.zeros(2_000_000)
    donate(unsaved)
    assert unsaved.is_deleted()
    host = {"list": [1]}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in range(1, 4):
            before = {"x": float(state["x"][0]), "n": float(state["n"][0])}
            checkpoints.save(step, state, host)
            for _ in range(5):
                state["x"] = donate(state["x"])
            state["n"] += 1
            host["list"].append(step)
            like = {"x": jnp.zeros(2_000_000), "n": np.zeros(300_000)}
            restored, facts = checkpoints.restore(step, like)
            assert np.all(np.asarray(restored["x"]) == before["x"])
            assert np.all(restored["n"] == before["n"])
            assert facts["list"] == [1, *range(1, step)]


def test_a_save_while_another_runs_is_not_lost(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": jnp.full(500_000, step)}, {"step": step})
        assert checkpoints.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            tree, host = checkpoints.restore(step, {"x": jnp.zeros(500_000, jnp.int32)})
            assert host == {"step": step} and np.all(np.asarray(tree["x"]) == step)


def test_saving_and_validating_need_no_common_period(tmp_path):
    """NVIDIA-NeMo/RL#1229: saving every 3 and validating every 5 steps failed."""
    host = {}
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(1, 11):
            if step % 5 == 0:
                host["heldout_success"] = step / 10
            if step % 3 == 0:
                checkpoints.save(step, {"x": jnp.float32(step)}, host)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3, 6, 9]
        facts = [checkpoints.restore(s, {"x": jnp.float32(0)})[1] for s in (3, 6, 9)]
    assert facts == [{}, {"heldout_success": 0.5}, {"heldout_success": 0.5}]


def test_only_the_newest_are_kept_and_a_reader_removes_none(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (5, 9, 10, 100):
            checkpoints.save(step, {"x": jnp.float32(step)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "100"]
    with Checkpoints(tmp_path) as reader:
        assert reader.steps() == [10, 100] and reader.latest() == 100
        with pytest.raises(ConfigError, match="opened for reading"):
            reader.save(101, {"x": jnp.float32(0)}, {})


def test_looking_into_an_empty_place_leaves_nothing_there(tmp_path):
    with Checkpoints(tmp_path / "typo") as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(ConfigError, match="no checkpoint of step 1"):
            checkpoints.restore(1, {})
    assert not (tmp_path / "typo").exists()


KILLED_WHILE_SAVING = """
    import os, pathlib, signal, sys
    import jax, jax.numpy as jnp
    from thundersync_jax.run.checkpoint import Checkpoints

    folder = pathlib.Path(sys.argv[1])
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, {"x": jnp.full(4, 1.001)}, {"updates": 1})
    checkpoints.wait()
    big = jax.random.normal(jax.random.key(0), (8_000_000,))
    checkpoints.save(2, {"x": big}, {"updates": 2})
    while not any(p.is_file() for p in folder.glob("2*/**/*")):
        pass
    assert not (folder / "2").exists()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_save_cut_off_by_sigkill_is_never_the_latest(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_WHILE_SAVING), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert process.stdout == process.stderr == ""
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2 and "1" in left and "2" not in left
    like = {"x": jnp.zeros(4)}
    with Checkpoints(tmp_path) as reader:
        assert reader.latest() == 1
        time.sleep(0.2)  # orbax cleans in the background
        reader.restore(1, like)
    assert {path.name for path in tmp_path.iterdir()} == left, "a reader cleaned up"
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest() == 1
        tree, host = checkpoints.restore(1, like)
        assert host == {"updates": 1} and float(tree["x"][0]) == np.float32(1.001)
        checkpoints.save(5, like, {"updates": 5})
        assert checkpoints.latest() == 5
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_a_deletion_that_was_cut_off_is_finished_later(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.float32(step)}, {})
    for path in (tmp_path / "1").iterdir():
        if path.is_file():
            path.unlink()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest() == 2
        checkpoints.save(3, {"x": jnp.float32(3)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


@pytest.fixture
def full_disk():
    """Files may not grow beyond 10 kB; a write beyond fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(full):
        limit = 10_000 if full else soft
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    yield fill
    fill(False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("call", ["save", "wait", "latest", "restore", "close"])
def test_a_failed_save_is_raised_by_the_next_call(tmp_path, full_disk, call, capfd):
    small, big = {"x": jnp.zeros(4)}, {"x": jax.random.normal(jax.random.key(0), 10**6)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small, {})
    checkpoints.wait()
    full_disk(True)
    checkpoints.save(2, big, {})
    arguments = {"save": (3, small, {}), "restore": (1, small)}.get(call, ())
    with pytest.raises(
        ConfigError, match="step 2 was not saved to .*too large.* is 1.$"
    ):
        getattr(checkpoints, call)(*arguments)
    full_disk(False)
    assert checkpoints.steps() == [1]
    checkpoints.restore(1, small)
    checkpoints.save(2, big, {})
    assert checkpoints.steps() == [2]
    checkpoints.close()
    assert capfd.readouterr() == ("", "")


def test_another_failure_keeps_its_own_words(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(4)}, {})
        saving = checkpoints._saving[1]
        checkpoints._saving = 1, SimpleNamespace(result=lambda: saving.result() + "")
        with pytest.raises(TypeError) as caught:
            checkpoints.wait()
    assert caught.value.__notes__ == [f"while saving step 1 to {tmp_path}"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a disk of its own")
def test_a_run_on_a_full_disk_ends_in_one_line_and_goes_on_with_room(tmp_path):
    command = [sys.executable, "-m", "thundersync_jax.train", f"--workdir={tmp_path}/w"]
    command += ["--config=tests/echo_task.py", "--config.steps=3"]
    command += ["--config.warm_start.steps=5", "--config.checkpoint.every_steps=1"]
    command += ["--config.metrics.sinks=", "--config.env.tool_latency.kind=none"]
    train = shlex.join(command)
    disk = f"mount -t tmpfs -o size={{}}k{{}} tmpfs {tmp_path}"
    lines = [disk.format(300, ""), f"({train} >/dev/null; echo status $?)"]
    lines += [disk.format(90_000, ",remount"), train]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", " && ".join(lines)],  # no mount is left behind
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if "status" not in done.stdout:
        pytest.skip(f"no disk of its own to be had: {done.stderr}")
    assert done.returncode == 0 and "status 2\n" in done.stdout
    line = rf"ConfigError: step 2 was not saved to {tmp_path}/w/checkpoints \(No space"
    assert re.fullmatch(
        line + r" left .*Free some and run .* there is 1\.\n", done.stderr
    )
    assert "resumed after step 1\n" in done.stdout.partition("status 2\n")[2]


def test_saving_prints_nothing_and_other_logs_stay(tmp_path, caplog, capfd):
    with Checkpoints(tmp_path, keep=1) as checkpoints, caplog.at_level(logging.DEBUG):
        checkpoints.save(1, {"x": jnp.zeros(4)}, {})
        checkpoints.restore(1, {"x": jnp.zeros(4)})
        logging.getLogger("absl").info("somebody else's")
    absl = [r.getMessage() for r in caplog.records if r.name == "absl"]
    assert absl == ["somebody else's"]
    assert capfd.readouterr() == ("", "")


def test_close_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.zeros(4)}, {})
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
    assert set(threading.enumerate()) <= before


LIKE = {"a": jnp.zeros(3), "b": {"c": jnp.zeros((2, 2)), "d": jnp.zeros(())}}


@pytest.mark.parametrize(
    ("like", "named"),
    [
        (LIKE | {"a": jnp.zeros(4)}, "a is float32[3], expected float32[4]"),
        (LIKE | {"e": jnp.zeros(1)}, "e is absent, expected float32[1]"),
        ({"a": jnp.zeros(3)}, "b/c is float32[2, 2], expected absent"),
        (LIKE | {"a": jnp.zeros(3, int)}, "a is float32[3], expected int32[3]"),
        ({"z": [jnp.zeros(1)] * 9}, "9 more"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(tmp_path, like, named):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, LIKE, {})
        with pytest.raises(ConfigError) as caught:
            checkpoints.restore(1, like)
    text = str(caught.value)
    assert named in text and "\n" not in text and str(tmp_path) in text


def test_a_step_that_is_there_or_is_not_there_is_named(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(4, LIKE, {})
        with pytest.raises(ConfigError, match=r"step 5, expected one of \[4\]"):
            checkpoints.restore(5, LIKE)
        for step in (3, 4):
            with pytest.raises(ConfigError, match=f"step {step} cannot be saved"):
                checkpoints.save(step, LIKE, {})
        with pytest.raises(TypeError):
            checkpoints.save(5, LIKE, {"array": jnp.zeros(2)})
        assert checkpoints.steps() == [4]


TORN = """
    import os, pathlib, sys
    import jax.numpy as jnp
    from thundersync_jax import flags
    from thundersync_jax.run.checkpoint import Checkpoints

    folder = pathlib.Path(sys.argv.pop())
    tree = {str(i): jnp.ones((64, 64)) for i in range(30)}

    def command(config):
        with Checkpoints(folder, keep=2) as checkpoints:
            [checkpoints.save(step, tree, {}) for step in (1, 2)]
        for file in (folder / "2").rglob("d/*"):
            os.truncate(file, file.stat().st_size // 2)
        with Checkpoints(folder) as checkpoints:
            checkpoints.restore(2, tree)

    flags.run(lambda *_: command(None), needs=("workdir",))
"""


def test_a_torn_checkpoint_is_one_line_though_many_reads_are_under_way(tmp_path):
    """Each further read said that the event loop is closed, in 190 lines of all."""
    code, workdir = textwrap.dedent(TORN), f"--workdir={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code, workdir, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.match("ConfigError: .*/2 cannot be read.* Delete that", done.stderr)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damaged", ["*", "_CHECKPOINT_METADATA", "_METADATA", "d/*"])
def test_a_damaged_checkpoint_names_its_directory_and_the_way_out(tmp_path, damaged):
    state = trained(jax.devices()[:1])
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        [checkpoints.save(step, state, {"version": step}) for step in (1, 2)]
    for file in filter(os.path.isfile, (tmp_path / "2").rglob(damaged)):
        os.truncate(file, file.stat().st_size // 2)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ConfigError, match="/2 .* Delete .* step 1 is") as error:
            checkpoints.restore(2, state)
        found, _ = checkpoints.restore(1, state)
    assert error.value.__cause__ and sha256(found) == sha256(state)


def test_a_hash_depends_on_paths_dtypes_shapes_and_bits_and_on_nothing_else():
    tree = {"a": jnp.arange(4.0), "b": jnp.zeros(2)}
    same = on(jax.devices()[:2], {"b": tree["b"], "a": tree["a"]})
    assert sha256(same) == sha256(tree) == sha256(jax.device_get(tree))
    others = [
        tree | {"b": -tree["b"]},
        tree | {"b": tree["b"].astype(jnp.int32)},
        tree | {"a": tree["a"].reshape(2, 2)},
        {"a": tree["a"], "c": tree["b"]},
        {"a": {"b": tree["a"]}, "b": tree["b"]},
        tree | {"a": jnp.nextafter(tree["a"], 9)},
    ]
    assert len({sha256(x) for x in [tree, *others]}) == 1 + len(others)


def test_a_hash_follows_the_paths_and_not_the_order_of_fields():
    class Swapped(NamedTuple):
        b: jax.Array
        a: jax.Array

    swapped = Swapped(b=jnp.zeros(2), a=jnp.ones(3))
    assert sha256(swapped) == sha256(swapped._asdict())
