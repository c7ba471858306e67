"""README and docs: what they show runs, and what they name is there."""

import ast
import contextlib
import io
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import warnings

import memory_table
import pytest

from thundersync_jax.__main__ import COMMANDS
from thundersync_jax.config import Config
from thundersync_jax.config.settings import settings
from thundersync_jax.flags import load_config

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "thundersync_jax"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MOST_README_LINES = 300
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
WITHOUT_CONFIG = ("show", "compare")
# What stands for a value that the reader has to put in.
PLACEHOLDERS = {
    ":models/Qwen3-0.6B": "",
    ".release=R": ".release=trajectory",
    ".seed=S": ".seed=0",
    "=N": "=1",
    " DIR": " runs/a",
    "thundersync NAME": "thundersync train",
    "thundersync_jax NAME": "thundersync_jax train",
    "thundersync_jax.NAME": "thundersync_jax.train",
}
GROUPS = {setting.name.partition(".")[0] for setting in settings(Config())}
# Folders that commands write.
WRITTEN = ("runs/", "models/", "rollouts/", "checkpoints/", "path/to/", "api/")
WRITTEN += ("artefacts/",)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def codes(text):
    """Pieces of code in the running text, line breaks undone."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def shell_lines(text):
    """Command lines of a page: its bash blocks, and commands in the running text."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            yield from re.split(r" && |; ", line)
    for code in codes(text):
        for line in re.split(r" && |; ", code):
            first = re.sub(r"^([A-Z_]+=(\S+|\"[^\"]*\") )*", "", line).partition(" ")[0]
            known = ("python", "thundersync", "pip", "pytest", "launch/local_vllm.sh")
            if " " in line and (first in known or first in COMMANDS):
                yield line


def check_command(line):
    """Parses a command line as the program that it names would."""
    for placeholder, value in PLACEHOLDERS.items():
        line = line.replace(placeholder, value)
    words = shlex.split(line)
    command = "train"
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        command = value if name == "COMMAND" else command
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program == "thundersync":
        program, *rest = rest
    if program in COMMANDS:
        check_flags(program, rest)
    elif program == "pip":
        check_extras(rest)
    elif program == "pytest":
        check_files(rest)
    elif program.startswith("launch/"):
        assert os.access(ROOT / program, os.X_OK), f"{program} is no program"
        if program.endswith("local_vllm.sh"):
            rest = [f"--config={rest[0]}", f"--workdir={rest[1]}", *rest[2:]]
        if program.endswith("bench_gpu.sh"):
            rest = ["--config=configs/bench_gpu.py", *rest]
        check_flags(command, rest)
    elif program in ("python", "python3"):
        check_python(rest)
    else:
        assert program in ("ruff", "bash"), f"{program!r} of {line!r} is not known here"


def check_python(words):
    if words[0] == "-c":
        ast.parse(words[1])
    elif words[0] != "-m":
        check_script(words)
    elif words[1].startswith("thundersync_jax."):
        check_flags(words[1].partition(".")[2], words[2:])
    elif words[1] == "thundersync_jax":
        check_flags(words[2], words[3:])
    elif words[1] == "pytest":
        check_files(words[2:])
    else:
        assert words[1] in ("venv", "sphinx"), f"module {words[1]!r}"


def check_flags(command, words):
    """The command itself reads its flags, prints settings or help, and stops."""
    words = [word for word in words if word != "…"]
    stop = "--help" if command in WITHOUT_CONFIG else "--print_config"
    if stop == "--print_config" and not any(w.startswith("--config=") for w in words):
        words.append("--config=configs/quickstart.py")
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        pytest.raises(SystemExit) as end,
    ):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [command, *words, stop])
        warnings.simplefilter("ignore", RuntimeWarning)  # it is imported already
        runpy.run_module(f"thundersync_jax.{command}", run_name="__main__")
    assert end.value.code == 0, printed.getvalue()[-500:]


def check_script(words):
    """A script that parses its arguments has each of those names in its source."""
    source = (ROOT / words[0]).read_text(encoding="utf-8")
    for word in words[1:]:
        assert f'"{word.partition("=")[0]}"' in source, f"{words[0]} has no {word}"


def check_files(words):
    for word in words:
        if word.startswith("tests/"):
            assert (ROOT / word).is_file(), f"{word} is not there"


def check_extras(words):
    metadata = (ROOT / "setup.py").read_text(encoding="utf-8")
    for extra in re.findall(
        r"[\w-]+", "".join(re.findall(r"\[(.*)\]", " ".join(words)))
    ):
        assert f'"{extra}": ' in metadata, f"setup.py has no extra {extra!r}"


def names(group):
    """Every setting and every group of settings."""
    for setting in settings(group):
        parts = setting.name.split(".")
        yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


SETTINGS = {
    *names(Config()),
    *names(load_config(str(ROOT / "configs" / "quickstart.py"))),
}


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize("page", TEXTS)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """Those of a page one after the other, in one namespace."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for number, block in enumerate(blocks(TEXTS[page], "python"), start=1):
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", TEXTS)
def test_commands_are_accepted(page):
    for line in shell_lines(TEXTS[page]):
        check_command(line)


@pytest.mark.parametrize("page", TEXTS)
def test_settings_exist(page):
    text = TEXTS[page]
    found = re.findall(r"--config\.([\w.]*\w)", text)
    for code in codes(text):
        name, equals, _ = code.partition("=")
        group, dot, _ = name.partition(".")
        if group in GROUPS and dot and re.fullmatch(r"[\w.]+", name):
            if not name.endswith((".py", ".jsonl", ".safetensors")):
                found.append(name)
        elif equals and name in GROUPS:
            found.append(name)
    assert sorted(set(found) - SETTINGS) == []


@pytest.mark.parametrize("page", TEXTS)
def test_files_exist(page):
    missing = []
    for code in codes(TEXTS[page]):
        for path in re.findall(r"(?<![\w/.])[\w.-]+/[\w./-]*", code):
            path = path.rstrip(".")
            around = (ROOT, PACKAGE, ROOT / "docs")
            named = path.endswith("/") or "." in path
            written = path.startswith(WRITTEN)
            there = any((base / path).exists() for base in around)
            if named and not written and not there:
                missing.append(path)
    assert missing == []


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXTS["README.md"])
    inside = [target for target in targets if "://" not in target]
    assert inside
    assert [target for target in inside if not (ROOT / target).exists()] == []


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= MOST_README_LINES


def test_the_memory_table_is_what_its_script_prints():
    assert memory_table.table() in TEXTS["README.md"]


def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    folders = [
        "-d",
        str(tmp_path / "trees"),
        str(ROOT / "docs"),
        str(tmp_path / "html"),
    ]
    done = subprocess.run([*command, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    listed = (tmp_path / "html" / "extending.html").read_text(encoding="utf-8")
    assert "stream/accumulator.py" in listed
