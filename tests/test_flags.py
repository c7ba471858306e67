"""The command line: what reaches a command, and what is refused before it starts."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

import thundersync_jax
from thundersync_jax.__main__ import COMMANDS, main
from thundersync_jax.config import Config
from thundersync_jax.config.settings import parse, settings, to_text
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.flags import Flag, load_config, run

ROOT = Path(__file__).resolve().parent.parent

FILE = '''
import dataclasses

from thundersync_jax.config import Config, EnvConfig, OptimConfig, RolloutConfig
from thundersync_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Options:
    terms: int = 2  # numbers in a sum
    kinds: tuple[str, ...] = ("sum",)  # kinds of questions
    name: str | None = "none yet"  # shown to people

    def __post_init__(self):
        if self.terms == 13:
            raise ValueError("terms is 13, expected luck. Take 12.")


def get_config(variant=None):
    """A base and its variants."""
    base = Config(
        steps=7,
        optim=OptimConfig(learning_rate=1e-4),
        env=EnvConfig(options=Options(terms=3)),
    )
    match variant:
        case None:
            return base
        case "long":
            return dataclasses.replace(base, steps=70)
        case "typo":
            return dataclasses.replace(base, rollout=RolloutConfig(group_sise=4))
        case "bad":
            return dataclasses.replace(base, steps=0)
        case "bug":
            return undefined
        case "text":
            return "steps=3"
    raise ConfigError(f"variant {variant!r} is unknown, expected long. Leave it out.")
'''


@pytest.fixture(name="file")
def _file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # a config's folder joins it
    monkeypatch.delitem(sys.modules, "tiny_run", raising=False)
    path = tmp_path / "tiny_run.py"
    path.write_text(FILE)
    return str(path)


def command_line(*arguments, command=None, **options):
    """Runs a command in this process: (exit status, what it was called with)."""
    calls = []

    def record(*positional, **keywords):
        calls.append((positional, keywords))
        return command(*positional, **keywords) if command else None

    with pytest.raises(SystemExit) as ended:
        run(record, argv=["program", *arguments], **options)
    return ended.value.code, calls


def parsed(file, *arguments):
    """The config that a command would be called with."""
    status, calls = command_line(f"--config={file}", "--workdir=w", *arguments)
    assert status == 0
    return calls[0][0][0]


@pytest.mark.smoke
def test_overrides_apply_after_the_file_and_in_order(file):
    config = parsed(
        f"{file}:long",
        "--config.optim.learning_rate=3e-6",
        "--config.open_groups",
        "none",
        "--config.model.qk_norm=true",
        "--config.rollout.gradient_buckets=32,96",
        "--config.rollout.temperature=2",
        "--config.loss.advantage=mean_only",
        "--config.env.options.kinds=sum,gcd",
        "--config.env.options.name=none",
        "--config.seed=1",
        "--config.seed=2",
    )
    assert config.steps == 70  # the variant's
    assert config.optim.learning_rate == 3e-6
    assert config.open_groups is None
    assert config.model.qk_norm is True
    assert config.rollout.gradient_buckets == (32, 96)
    assert config.rollout.temperature == 2.0
    assert config.loss.advantage == "mean_only"
    assert config.env.options.kinds == ("sum", "gcd")
    assert config.env.options.name is None
    assert config.env.options.terms == 3
    assert config.seed == 2


def test_overrides_that_only_work_together_are_checked_together(file):
    """heads 6 does not go with the file's kv_heads 4, nor kv_heads 3 with heads 4."""
    overrides = ("--config.model.heads=6", "--config.model.kv_heads=3")
    assert parsed(file, *overrides).model.kv_heads == 3


REFUSED = {
    ("--config.optim.lerning_rate=1",): "optim.lerning_rate is no setting. Did you mean"
    " optim.learning_rate",
    ("--config.group_size=4",): "group_size is no setting. Did you mean "
    "rollout.group_size?",
    ("--config.kind=none",): "Did you mean model.rope.kind or env.tool_latency.kind or",
    ("--config.lr=1",): "lr is no setting. Did you mean optim.learning_rate or",
    ("--config.kl_cof=1",): "kl_cof is no setting. Did you mean loss.kl_coef?",
    ("--config.loss.kl_cof=1",): "Did you mean loss.kl_coef",
    ("--config.loss.clip_ratio=0.2",): "loss.clip_ratio is no setting, expected none: "
    "at the only update of a step every ratio is 1",
    ("--config.optim.ppo_epochs=4",): "there is one update per step",
    ("--config.critic.lr=4",): "a baseline is one number per trajectory",
    ("--config.loss.token_rewards=1",): "a reward belongs to a trajectory",
    ("--config.accumulator=float",): "is 'float', expected one of 'plain', 'exact'",
    ("--config.loss.pass_k=2",): "loss.pass_k is 2 with loss.advantage 'mean_std'",
    ("--config.optim=1",): "names a group, expected one of its settings",
    ("--config.steps",): "steps has no value",
    ("--config.steps", "--json"): "steps has no value",
    ("--config.steps=3.5",): "steps is '3.5', expected a whole number",
    ("--config.steps=none",): "steps is 'none', expected a whole number",
    ("--config.steps", "-1"): "steps is -1, expected more than 0",
    ("--config.open_groups=many",): "is 'many', expected a whole number or none",
    ("--config.open_groups=0",): "open_groups is 0 with release 'trajectory'",
    ("--config.optim.clip_norm=inf",): "clip_norm is inf, expected a finite number",
    ("--config.model.qk_norm=1",): "model.qk_norm is '1', expected true or false",
    ("--config.model.dtype=fp8",): "'fp8', expected one of 'float32', 'bfloat16'",
    ("--config.rollout.prefill_buckets=16,x",): "a tuple whose elements are each a",
    ("--config.rollout.group_size=1",): "rollout.group_size is 1 with loss.advantage",
    ("--config.env.options.terms=x",): "env.options.terms is 'x'",
    ("--config.env.options.terms=13",): "terms is 13, expected luck. Take 12.",
    ("--samples=few",): "--samples is 'few', expected a whole number",
    ("--sample=3",): "--sample is no flag. Did you mean --samples?",
    ("quickly",): "'quickly' stands alone",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_wrong_command_line_is_one_line_and_status_2(file, capsys, arguments):
    """A typo names the nearest setting (THUDM/slime#397: it was silently ignored)."""
    status, calls = command_line(
        f"--config={file}",
        "--workdir=w",
        *arguments,
        flags={"samples": Flag(int, 4, "answers")},
    )
    shown = capsys.readouterr()
    assert status == 2 and not calls
    assert REFUSED[arguments] in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out or "--json" in arguments


@pytest.mark.parametrize(
    ("variant", "message"),
    {
        ":typo": "RolloutConfig has no setting 'group_sise'. Did you mean group_size",
        ":bad": "steps is 0, expected more than 0",
        ":bug": "NameError: name 'undefined' is not defined",
        ":text": "returned str, expected Config",
        ":short": "variant 'short' is unknown, expected long",
        "x": "expected a Python file",
    }.items(),
)
def test_wrong_config_file_is_one_line_and_status_2(file, capsys, variant, message):
    status, calls = command_line(f"--config={file}{variant}", "--workdir=w")
    shown = capsys.readouterr().err
    assert status == 2 and not calls
    assert message in shown and shown.count("\n") == 1
    if variant in (":typo", ":bad", ":bug", ":short"):
        assert ".py:" in shown.replace(f"{file}:short", "")  # with the line's number


def test_missing_file_names_the_nearest_one(file, capsys):
    assert command_line(f"--config={file[:-6]}ran.py")[0] == 2
    assert f"Did you mean {file}?" in capsys.readouterr().err


def test_a_file_that_is_not_python_is_named(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text("# Title\n")
    assert command_line(f"--config={path}")[0] == 2
    assert "README.md', expected a Python file with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("Config(steps=3)", "returns the same for it as for none"),
        ("{None: Config()}[variant]", r"ignorant.py:2: there is no 'foo' \(KeyError\)"),
    ],
)
def test_a_variant_that_the_file_does_not_know_is_refused(tmp_path, body, message):
    path = tmp_path / "ignorant.py"
    path.write_text(
        "from thundersync_jax.config import Config\n"
        f"get_config = lambda variant=None: {body}\n"
    )
    load_config(str(path))
    with pytest.raises(ConfigError, match=message):
        load_config(f"{path}:foo")


def test_a_default_variant_may_be_named(tmp_path):
    path = tmp_path / "named.py"
    path.write_text(
        "from thundersync_jax.config import Config\n"
        "def get_config(variant=None):\n"
        "    return Config(steps={None: 3, 'short': 3, 'long': 9}[variant])\n"
    )
    assert load_config(f"{path}:short") == load_config(str(path))
    assert load_config(f"{path}:long").steps == 9
    with pytest.raises(ConfigError, match="there is no 'shrot'"):
        load_config(f"{path}:shrot")


INTERRUPTED = {
    "raises": "time.sleep(60)",
    "swallows": "try: time.sleep(60)\n    except KeyboardInterrupt: pass",
    "fails": "try: time.sleep(60)\n    finally: raise RuntimeError('mine')",
    "hangs": "try: time.sleep(60)\n    finally: time.sleep(60)",
    "thread": "threading.Thread(target=time.sleep, args=(60,)).start(); time.sleep(60)",
}


@pytest.mark.parametrize("how", INTERRUPTED)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_one_line_whatever_the_command_makes_of_it(how, number):
    script = (
        "import threading, time\n"
        "from thundersync_jax import flags\n"
        "from thundersync_jax.rollout import interrupts\n"
        "interrupts._GRACE_SECS = 0.2\n"
        "def command(workdir):\n"
        "    print('started', flush=True)\n"
        f"    {INTERRUPTED[how]}\n"
        "flags.run(command, needs=(), argv=['program', '--json'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=10)
    assert errors == "interrupted\n"
    assert process.returncode == 128 + number
    result = {"error": "interrupted", "kind": "KeyboardInterrupt"}
    assert json.loads(output) == result


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")
@pytest.mark.parametrize("library", ["numpy", "jaxlib"])
def test_a_signal_while_a_command_imports_ends_it(library):
    """jax's callbacks of the garbage collector swallowed it, and the run went on."""
    command = [sys.executable, "-m", "thundersync_jax.train", "--config=none.py"]
    with subprocess.Popen(
        ["nice", "-n", "19", *command, "--workdir=w"], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        mapped = Path(f"/proc/{process.pid}/maps")
        while process.poll() is None and library not in mapped.read_text():
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 130)


def test_every_command_is_listed_and_runs_by_its_name(capsys, monkeypatch):
    package = Path(thundersync_jax.__file__).parent
    commands = [
        path.stem
        for path in package.glob("*.py")
        if "__main__" in path.read_text() and path.stem not in ("__main__", "flags")
    ]
    assert sorted(COMMANDS) == sorted(commands)
    one, other = (
        subprocess.run(
            [sys.executable, "-m", *how, "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=True,
        ).stdout
        for how in (["thundersync_jax.show"], ["thundersync_jax", "show"])
    )
    assert one == other and "usage: python -m thundersync_jax.show" in one
    monkeypatch.setattr(sys, "argv", ["thundersync"])
    main()
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in commands)
    monkeypatch.setattr(sys, "argv", ["thundersync", "trian"])
    with pytest.raises(SystemExit):
        main()
    assert "'trian' is no command. Did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["--config", "--workdir"])
def test_missing_flags_are_named(file, capsys, missing):
    given = {"--config": file, "--workdir": "w"}
    del given[missing]
    status, _ = command_line(*(f"{name}={value}" for name, value in given.items()))
    assert status == 2
    assert f"{missing} is missing" in capsys.readouterr().err


def test_own_flags_arrive_as_keyword_arguments(file):
    flags = {
        "samples": Flag(int, 4, "answers"),
        "releases": Flag(tuple, ("batch", "group"), "release rules"),
        "step": Flag(int, None, "step"),
    }
    given = (f"--config={file}", "--samples", "9", "--releases=batch,trajectory")
    status, calls = command_line(*given, flags=flags, needs=("config",))
    (_, workdir), keywords = calls[0]
    assert status == 0 and workdir is None
    assert keywords == {
        "samples": 9,
        "releases": ("batch", "trajectory"),
        "step": None,
    }


def test_a_command_without_settings_refuses_them(capsys):
    status, calls = command_line("--workdir=w", needs=("workdir",))
    assert status == 0 and calls == [((Path("w"),), {})]
    status, calls = command_line("--workdir=w", "--config.seed=1", needs=("workdir",))
    assert status == 2 and not calls
    assert "config.seed" in capsys.readouterr().err


def test_json_is_the_last_line_and_failure_the_status(file, capsys):
    def command(config, workdir):
        print("for people")
        return {"passed": config.seed == 0, "value": float("nan"), "dir": workdir}

    arguments = (f"--config={file}", "--workdir=w", "--json")
    assert command_line(*arguments, command=command)[0] == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"passed": True, "value": None, "dir": "w"}
    assert command_line(*arguments, "--config.seed=1", command=command)[0] == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (StreamError("twice"), 2), (ConfigError("no"), 2)],
)
def test_interrupts_and_refusals_inside_a_command_are_one_line(
    file, capsys, error, status
):
    def command(config, workdir):
        raise error

    arguments = (f"--config={file}", "--workdir=w")
    assert command_line(*arguments, command=command)[0] == status
    assert capsys.readouterr().err.count("\n") == 1


def test_other_errors_keep_their_traceback(file, capsys):
    def command(config, workdir):
        raise ValueError("somebody else's")

    with pytest.raises(ValueError, match="somebody else's"):
        run(command, argv=["program", f"--config={file}", "--workdir=w", "--json"])
    expected = {"error": "somebody else's", "kind": "ValueError"}
    assert json.loads(capsys.readouterr().out) == expected


EXITED = "the command's own code called sys.exit"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("a\nb"), 2, "a b"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(0), 1, f"{EXITED}(0)"),
        (SystemExit(3), 3, f"{EXITED}(3)"),
    ],
)
def test_json_is_the_last_line_of_a_failure_too(file, capsys, error, status, message):
    def command(config, workdir):
        print("for people")
        raise error

    given = (f"--config={file}", "--workdir=w", "--json")
    assert command_line(*given, command=command)[0] == status
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "for people"
    expected = {"error": message, "kind": type(error).__name__}
    assert json.loads(shown.out.splitlines()[-1]) == expected
    assert shown.err.count("\n") == 1


def test_json_is_the_last_line_of_a_command_line_that_is_refused(file, capsys):
    for given in (["--json", "--config.steps"], ["--sample=3", "--json"], ["--json"]):
        assert command_line(*given)[0] == 2
        shown = capsys.readouterr()
        assert json.loads(shown.out)["error"] in shown.err
    assert command_line("--json", "--help") == (0, [])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {}


def test_what_stands_alone_arrives_where_a_command_takes_it():
    options = {
        "needs": (),
        "positional": "dirs",
        "flags": {"plot": Flag(str, None, "")},
    }
    status, calls = command_line("a", "--plot=x.png", "b", **options)
    assert (status, calls) == (0, [((), {"dirs": ("a", "b"), "plot": "x.png"})])


@pytest.mark.parametrize(
    "body", ["sys.exit(0)", "raise SystemExit", "raise GeneratorExit"]
)
def test_a_config_file_that_exits_is_an_error(tmp_path, capsys, body):
    """A job script took it for a finished run."""
    path = tmp_path / "leaves.py"
    path.write_text(f"import sys\n{body}\n")
    assert command_line(f"--config={path}", "--workdir=w")[0] == 2
    shown = capsys.readouterr().err
    assert "leaves.py:2: " in shown and shown.count("\n") == 1


def test_a_folder_in_place_of_a_config_is_named(capsys):
    assert command_line("--config=tests", "--workdir=w")[0] == 2
    assert "--config is 'tests', which is a folder" in capsys.readouterr().err


@pytest.mark.smoke
def test_print_config_says_what_set_every_setting_and_calls_nothing(file, capsys):
    """Settings were in no list (rllm-org/rllm#250)."""
    given = (f"--config={file}", "--print_config", "--config.env.options.terms=5")
    status, calls = command_line(*given)
    rows = {}
    for line in capsys.readouterr().out.splitlines():
        name, value, *rest = line.split()
        rows[name] = (value, " ".join(rest))
    assert status == 0 and not calls
    assert list(rows) == [s.name for s in settings(load_config(file))]
    assert rows["steps"] == ("7", f"{file} optimizer updates")
    assert rows["seed"][1].startswith("default ")
    assert rows["env.options.terms"] == ("5", "command line numbers in a sum")
    assert rows["loss.constant"][0] == "none"


def test_help_names_the_flags_and_how_to_override(capsys):
    flags = {"samples": Flag(int, 4, "answers per question")}
    assert command_line("--help", flags=flags) == (0, [])
    shown = capsys.readouterr().out
    for text in ("--workdir=DIR", "--samples=N", "answers per question (4)"):
        assert text in shown
    assert "--config.optim.learning_rate=3e-6" in shown


def test_a_config_can_import_its_neighbours_and_its_factory_finds_it(file, tmp_path):
    neighbour = tmp_path / "tiny_variant.py"
    neighbour.write_text("import tiny_run\n\n\ndef get_config():\n")
    with neighbour.open("a") as text:
        text.write("    return tiny_run.get_config('long')\n")
    assert load_config(str(neighbour)).steps == 70
    assert type(load_config(file).env.options).__module__ == "tiny_run"


def test_variants_of_a_config_without_any_are_refused(tmp_path):
    path = tmp_path / "plain_run.py"
    path.write_text(
        "from thundersync_jax.config import Config\nget_config = lambda: Config()\n"
    )
    assert load_config(str(path)) == Config()
    with pytest.raises(ConfigError, match="names variant 'fast'"):
        load_config(f"{path}:fast")


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("configs/*.py")), ids=lambda p: p.stem
)
def test_shipped_config_builds(path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_config(str(path))


@pytest.mark.smoke
def test_a_refused_command_line_never_imports_jax(tmp_path):
    script = tmp_path / "command.py"
    script.write_text(
        "import sys\n"
        "import atexit\n"
        "from thundersync_jax.flags import run\n"
        "atexit.register(lambda: print('jax' in sys.modules, flush=True))\n"
        "run(lambda config, workdir: None)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script), "--config=nowhere.py", "--workdir=w"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == "False\n"
    assert ended.stderr.startswith("ConfigError: --config is 'nowhere.py', expected a")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line_wherever_it_is_met(number, file, capsys):
    def write(*_):
        raise OSError(number, os.strerror(number), "w/metrics.jsonl")

    status, _ = command_line(f"--config={file}", "--workdir=w", command=write)
    assert status == 2
    error = capsys.readouterr().err
    assert (
        "w/metrics.jsonl" in error and "Free some" in error and error.count("\n") == 1
    )


@pytest.mark.parametrize("name", ["engine", "teacher", "rollouts"])
def test_an_error_while_a_thread_compiles_keeps_its_status(name):
    """At the interpreter's end such a thread would abort the process, status 134."""
    program = (
        "import atexit, threading, time\n"
        "from thundersync_jax import flags\n"
        "from thundersync_jax.errors import ConfigError\n"
        "atexit.register(print, 'the end of the interpreter')\n"
        "def command(workdir):\n"
        "    hangs = lambda: time.sleep(60)\n"
        f"    threading.Thread(target=hangs, daemon=True, name={name!r}).start()\n"
        "    raise ConfigError('wrong')\n"
        "flags.run(command, needs=(), argv=['program', '--json'])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and ended.stderr == "ConfigError: wrong\n"
    assert ended.stdout == '{"error": "wrong", "kind": "ConfigError"}\n'


@hypothesis.given(st.lists(st.text(max_size=4), max_size=3).map(tuple))
def test_texts_with_commas_are_typed_as_a_list_in_json(texts):
    (setting,) = (s for s in settings(Config()) if s.name == "rollout.stop_texts")
    typed = to_text(texts)
    assert parse(typed, setting) == texts
    if all(re.fullmatch(r"[a-z</>=]+", text) for text in texts):
        assert typed == ",".join(texts)
