"""Rooms: imports go downwards from folder to folder; what others lift works alone."""

import ast
import itertools
import pathlib
import shutil
import subprocess
import sys

import pytest

import thundersync_jax

PACKAGE = pathlib.Path(thundersync_jax.__file__).parent
BASE = ("types", "errors")
# From the bottom to the top. A folder imports itself and those before it. The top
# level's other files, the commands, are above them all.
ROOMS = (
    *("ops", "stream", "config", "models", "hf", "chat", "sandbox", "envs"),
    *("engines", "rollout", "metrics", "run", "view", "measure"),
)
FLOOR = dict.fromkeys(BASE, 0) | {room: i + 1 for i, room in enumerate(ROOMS)}
COMMANDS = len(ROOMS) + 1
LIFTED = ("stream/accumulator.py", "stream/schedule", "ops")
# A host that only rolls out needs no jax for these.
WITHOUT_JAX = ("types", "errors", "config", "chat", "sandbox", "envs", "rollout")
MOST_TOP_LEVEL_FILES = 12


def modules(package):
    """Dotted names inside a package, with their files."""
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        if name != "__init__":
            yield name.removesuffix(".__init__"), path


def floor(name):
    return FLOOR.get(name.partition(".")[0], COMMANDS)


def imports(name, path):
    """All modules that a file imports anywhere, under `TYPE_CHECKING` too."""
    around = ["thundersync_jax", *name.split(".")]
    if path.name != "__init__.py":
        around.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = around[: len(around) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}"


def graph(package):
    """For each module the modules of the package that it imports."""
    known = dict(modules(package))
    edges = {}
    for name, path in known.items():
        edges[name] = set()
        for imported in imports(name, path):
            inside = imported.removeprefix("thundersync_jax.")
            if inside == imported:
                continue
            while inside and inside not in known:  # a name inside a module
                inside = inside.rpartition(".")[0]
            if inside and inside != name:
                edges[name].add(inside)
    return edges


def upward(package):
    return [
        f"{name} imports {imported}"
        for name, found in graph(package).items()
        for imported in found
        if floor(imported) > floor(name)
        or (floor(imported) == COMMANDS and imported != "flags")
    ]


def cycles(package):
    """Modules that import each other, directly or around corners."""
    edges = graph(package)
    # A folder's __init__ offers names of its files; they import their neighbours.
    edges = {name: {x for x in found if x in edges} for name, found in edges.items()}
    left = dict(edges)
    while free := [n for n, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_imports_go_downwards_from_folder_to_folder():
    assert not upward(PACKAGE)


def test_every_folder_has_a_floor():
    """A folder that nobody ranked would count as a command."""
    folders = {
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()
    }
    assert folders == set(ROOMS)
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert set(BASE) < files and len(files) <= MOST_TOP_LEVEL_FILES


def test_no_module_imports_itself_around_corners():
    assert cycles(PACKAGE) == []


PAIRS = list(itertools.combinations(("errors", *ROOMS, "train"), 2))


@pytest.mark.parametrize("below, above", PAIRS)
def test_an_upward_import_between_any_two_folders_is_seen(tmp_path, below, above):
    copy = tmp_path / "package"
    for name in (below, above):
        if (PACKAGE / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PACKAGE / name, copy / name, ignore=ignored)
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(PACKAGE / f"{name}.py", copy)
    assert not upward(copy)
    inside = [path for name, path in modules(copy) if name.partition(".")[0] == below]
    target = [name for name, _ in modules(copy) if name.partition(".")[0] == above][-1]
    with open(inside[-1], "a") as file:
        file.write(f"\nif TYPE_CHECKING:\n    import thundersync_jax.{target}\n")
    assert len(upward(copy)) == 1


def test_a_cycle_inside_a_folder_is_seen(tmp_path):
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        source = f"from thundersync_jax.{other} import x\n"
        (tmp_path / f"{name}.py").write_text(source)
    assert cycles(tmp_path) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("lifted", LIFTED)
def test_what_others_lift_imports_nothing_of_the_package_around_it(lifted):
    room = lifted.removesuffix(".py").replace("/", ".")
    around = [
        f"{name} imports {imported}"
        for name, found in graph(PACKAGE).items()
        if f"{name}.".startswith(f"{room}.")
        for imported in found
        if not f"{imported}.".startswith(f"{room}.")
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


def test_base_and_host_rooms_run_without_jax():
    names = [
        f"thundersync_jax.{name}"
        for name, _ in modules(PACKAGE)
        if name.partition(".")[0] in WITHOUT_JAX
    ]
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
    "stream/accumulator.py": """
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
    "stream/schedule": """
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
        shutil.copytree(source, tmp_path / source.name, ignore=ignored)
    else:
        shutil.copy(source, tmp_path)
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
