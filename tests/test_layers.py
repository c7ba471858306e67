"""Imports go downwards only, and what others lift works on its own."""

import ast
import pathlib
import shutil
import subprocess
import sys

import pytest

import thundersync_jax

PACKAGE = pathlib.Path(thundersync_jax.__file__).parent
RUN = 5  # whatever is not named below: where everything meets
LAYERS = {
    # Interfaces that two layers share are data, and belong to the lowest.
    0: "types config loss_config model_config model_folder rope_scaling "
    "combinations errors flags interrupts checks settings "
    "rollout.engine envs.base",
    1: "ops",
    2: "models",
    3: "mesh buckets signature surrogate segments accumulator replica state",
    4: "rollout envs schedule ledger coefficients refusals",
}
RANK = {name: rank for rank, names in LAYERS.items() for name in names.split()}
LIFTED = ("accumulator", "schedule", "ops")
WITHOUT_JAX = (0, 4)


def modules():
    """Dotted names inside the package, with their files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if name != "__init__":
            yield name.removesuffix(".__init__"), path


def rank(name):
    """The layer of the longest prefix that has one."""
    while name and name not in RANK:
        name = name.rpartition(".")[0]
    return RANK.get(name, RUN)


def imports(name, path):
    """All modules that a file imports anywhere, ours by their names in the package."""
    package = ["thundersync_jax", *name.split(".")]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                found = f"{base}.{alias.name}"
                yield found if exists(found) else base


def exists(name):
    inside = name.removeprefix("thundersync_jax.").replace(".", "/")
    return (PACKAGE / f"{inside}.py").exists() or (PACKAGE / inside).is_dir()


def ours(name, path):
    for imported in imports(name, path):
        if imported.startswith("thundersync_jax"):
            yield imported.removeprefix("thundersync_jax").removeprefix(".")


def test_every_layer_has_its_files():
    """A rule about names that nothing has any more would hold in vain."""
    assert RANK.keys() <= {name for name, _ in modules()}
    assert sum(1 for name, path in modules() for _ in ours(name, path)) > 50


def test_imports_go_downwards_only():
    upwards = [
        f"{name} (layer {rank(name)}) imports {imported} (layer {rank(imported)})"
        for name, path in modules()
        for imported in ours(name, path)
        if rank(imported) > rank(name)
    ]
    assert not upwards


@pytest.mark.parametrize("lifted", LIFTED)
def test_what_others_lift_imports_nothing_of_the_package_around_it(lifted):
    around = [
        f"{name} imports {imported}"
        for name, path in modules()
        if name.split(".")[0] == lifted
        for imported in ours(name, path)
        if imported.split(".")[0] != lifted
    ]
    assert not around


def test_advantages_need_numpy_only():
    path = PACKAGE / "ops" / "advantages.py"
    outside = {
        module.split(".")[0]
        for module in imports("ops.advantages", path)
        if module.split(".")[0] not in sys.stdlib_module_names
    }
    assert outside == {"numpy"}


def test_base_and_host_layers_run_without_jax():
    names = [f"thundersync_jax.{n}" for n, _ in modules() if rank(n) in WITHOUT_JAX]
    names.append("thundersync_jax.ops.advantages")
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
found = sorted({{m.split(".")[0] for m in sys.modules}} & {{"jax", "jaxlib", "flax"}})
sys.exit(f"imported {{found}}" if found else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


USES = {
    "accumulator": """
import jax.numpy as jnp, numpy as np, accumulator
params = {"w": jnp.ones((2, 3))}
batch = accumulator.add_direct(accumulator.init(params), {"w": 2 * params["w"]})
group = accumulator.init(params, 2)
for reward in (1.0, 3.0):
    weights = np.array([[1.0], [reward - 1.0]])
    fresh = np.bool_(reward == 1.0)
    group = accumulator.add_group(group, fresh, (params,), weights)
batch = accumulator.close_group(batch, group, np.array([-1.0, 1.0]))
gradient, norm = accumulator.finalize(batch, 2.0, params)
assert (gradient["w"] == 1.0).all() and abs(float(norm) - 6**0.5) < 1e-6
""",
    "schedule": """
import schedule
plan = schedule.Schedule(schedule.Rules("trajectory", places=1))
plan.open_group("a", 2)
plan.sample("a", 0, bucket=8)
plan.complete("a", 0)
assert plan.reward("a", 0, 1.0) is None
call = plan.next_call(replica=0)
assert (call.items[0].member, call.place, plan.ready) == (0, 0, False)
assert plan.fail("a", 1) == schedule.Close("a", "dropped")
assert plan.folds() == [schedule.Fold("a", 0, None, (0,), kept=False)]
""",
    "ops": """
import importlib, pathlib, numpy as np
for path in pathlib.Path("ops").glob("*.py"):
    importlib.import_module(f"ops.{path.stem}")
from ops import advantages, losses
assert list(advantages.leave_one_out().advantages([1, 0, 0])) == [1, -.5, -.5]
assert losses.policy_gradient(np.array([-2, np.nan]), np.array([.5, 0])) == 1
""",
}


@pytest.mark.parametrize("lifted", LIFTED)
def test_lifted_code_works_alone_in_an_empty_folder(lifted, tmp_path):
    source = PACKAGE / lifted
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, tmp_path / lifted, ignore=ignored)
    else:
        shutil.copy(source.with_suffix(".py"), tmp_path)
    hidden = """
import sys
sys.modules["thundersync_jax"] = None  # importing it fails, installed or not
"""
    done = subprocess.run(
        [sys.executable, "-c", hidden + USES[lifted]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
