"""Tokenizer, special tokens and chat template of a Hugging Face folder."""

import datetime
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from thundersync_jax.chat import byte_level
from thundersync_jax.config.checks import installed
from thundersync_jax.config.model_folder import not_there
from thundersync_jax.errors import ConfigError, one_line

TOKENIZER_FILE = "tokenizer.json"
_USER = "chat templates"
_MOST_STEPS, _MOST_CHARACTERS, _MOST_SECS = 1_000_000, 100_000_000, 30.0
_COUNT = "the bounds: "  # of names that no template can say
_CHARACTERS_PER_BIT = 1000  # what a long number costs beside a long text
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def template_of(folder: Path, tools: bool) -> str | None:
    """The source of a folder's template; None where it has none."""
    with_tools = folder / "additional_chat_templates" / "tool_use.jinja"
    for file in [with_tools] * tools + [folder / "chat_template.jinja"]:
        if file.exists():
            return _text_of(file)
    file = folder / "tokenizer_config.json"
    templates = read_json(file).get("chat_template")
    if templates is None or isinstance(templates, str):
        return templates
    try:
        by_name = {entry["name"]: entry["template"] for entry in templates}
        if not all(isinstance(template, str) for template in by_name.values()):
            raise TypeError("one that is no text")
    except (TypeError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{file} has the chat_template {str(templates)[:60]}, expected a text, or "
            "a list of objects with a name and a template; restore it."
        ) from error
    return (tools and by_name.get("tool_use")) or by_name.get("default")


def special_tokens(folder: Path) -> dict[str, Any]:
    """The named tokens that templates may use, such as bos_token."""
    config = read_json(folder / "special_tokens_map.json")
    config |= read_json(folder / "tokenizer_config.json")
    tokens = {f"{name}_token": config.get(f"{name}_token") for name in _NAMED}
    found = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
        if token is not None
    }
    for name, token in found.items():
        if not isinstance(token, str):
            raise ConfigError(
                f"the {name} of {folder} is {str(tokens[name])[:60]}, expected a text, "
                "or an object with its content. Correct tokenizer_config.json."
            )
    return found


def speaks_bytes(folder: Path) -> bool:
    """Whether a folder has no tokenizer, or the byte-level one."""
    file = folder / TOKENIZER_FILE
    if not file.exists():
        return True
    ours = byte_level.tokenizer_json()["model"]["vocab"]
    model = read_json(file).get("model")
    return isinstance(model, dict) and model.get("vocab") == ours


def vocabulary(folder: Path) -> dict[str, int]:
    """Every token by its name: of the folder's tokenizer, or byte-level ones."""
    if speaks_bytes(folder):
        return byte_level.vocabulary()
    return load_tokenizer(folder).get_vocab(with_added_tokens=True)


def read_json(file: Path) -> dict[str, Any]:
    """The content of a file that need not be there."""
    if not file.exists():
        return {}
    text = _text_of(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = not_there(file) or error
        raise ConfigError(f"{file} is no JSON ({why}); restore it.") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file} holds a {type(content).__name__}, expected a JSON object; "
            "restore it."
        )
    return content


def load_tokenizer(folder: Path) -> Any:
    """Returns the `tokenizers.Tokenizer` of a folder, which neither cuts nor pads."""
    file = folder / TOKENIZER_FILE
    if not file.exists():
        raise ConfigError(
            f"{folder} has a chat template and no {TOKENIZER_FILE}; expected both. "
            "Save the tokenizer as the `tokenizers` library does."
        )
    # Batches are of one text; a process that forks would be warned of threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizers = installed("tokenizers", _USER, "hf")
    try:
        loaded = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        why = not_there(file) or error
        raise ConfigError(f"{file} is no tokenizer ({why}); restore it.") from error
    if not loaded.get_vocab_size():
        raise ConfigError(f"{file} has no token; restore it.")
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def compiled(
    source: str, folder: Path, day: datetime.datetime | None = None
) -> Callable[..., str]:
    """The template as a function of its variables, in a sandbox.

    The date that it may print is `day`, or that of this call: never that of a prompt.
    What it may compute is bounded, in steps, characters and time.
    """
    jinja2, sandbox, ext, nodes = (
        installed(f"jinja2{part}", _USER, "hf")
        for part in ("", ".sandbox", ".ext", ".nodes")
    )
    bounds = _Bounds()

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bounds.product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_blocks(ext)],
    )
    environment.filters["tojson"] = _to_json
    day = datetime.datetime.now() if day is None else day
    environment.globals["strftime_now"] = day.strftime

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    for count in (bounds.step, bounds.shown, bounds.made):
        environment.filters[_COUNT + count.__name__] = _unfolded(jinja2, count)

    def render(**variables: Any) -> str:
        bounds.begin()
        try:
            return template.render(**variables)
        except _BoundError as error:
            raise ConfigError(
                f"the chat template of {folder} does not end: {error}. Mend it."
            ) from error
        except Exception as error:  # whatever a template does wrong is one line
            raise ConfigError(
                f"the chat template of {folder} refuses a conversation: {error}"
            ) from error

    try:
        tree = environment.parse(source)
        _bound(tree, nodes)
        template = environment.from_string(tree)
    except Exception as error:  # brackets in brackets are one of Python's
        why = one_line(error).partition(": ")[2] or one_line(error)
        raise ConfigError(
            f"the chat template of {folder} is no template: {why}. Mend it."
        ) from error
    return render


def _unfolded(jinja2: ModuleType, function: Callable[[Any], Any]) -> Callable:
    """A filter that is called at every rendering, of constants too."""
    return jinja2.pass_context(lambda context, value: function(value))


class _Bounds(threading.local):
    """What one rendering may compute; a conversation takes a small part of it."""

    def begin(self) -> None:
        """Counts anew."""
        self._steps = self._characters = 0
        self._end_secs = time.monotonic() + _MOST_SECS

    def step(self, characters: int) -> bool:
        """One turn of a loop, or one call, which shows so much beside values."""
        self._steps += 1
        self._count(characters)
        if self._steps > _MOST_STEPS:
            raise _BoundError(f"it takes more than {_MOST_STEPS:,} steps")
        if time.monotonic() > self._end_secs:
            raise _BoundError(f"it takes longer than {_MOST_SECS:g} s")
        return True

    def shown(self, value: Any) -> Any:
        """A value that becomes text."""
        self._count(len(value) if isinstance(value, str) else 0)
        return value

    def made(self, value: Any) -> Any:
        """A value that gets a name."""
        size = len(value) if isinstance(value, str | list | tuple | dict) else 0
        if size > _MOST_CHARACTERS:
            raise _BoundError(f"it makes a value of more than {_MOST_CHARACTERS:,}")
        return value

    def product(self, operator: str, left: Any, right: Any) -> None:
        """What is about to be multiplied, or raised to a power."""
        texts = [v for v in (left, right) if isinstance(v, str | list | tuple)]
        numbers = [abs(v) for v in (left, right) if isinstance(v, int)]
        size = 0
        if texts and numbers:
            size = len(texts[0]) * numbers[0]
        elif len(numbers) == 2:
            first, second = (number.bit_length() for number in numbers)
            bits = first * numbers[1] if operator == "**" else first + second
            size = bits * _CHARACTERS_PER_BIT
        if size > _MOST_CHARACTERS:
            raise _BoundError(f"it makes a value of more than {_MOST_CHARACTERS:,}")

    def _count(self, characters: int) -> None:
        self._characters += characters
        if self._characters > _MOST_CHARACTERS:
            raise _BoundError(f"it shows more than {_MOST_CHARACTERS:,} characters")


class _BoundError(Exception):
    """A template that computes without an end in sight."""


def _bound(tree: Any, nodes: ModuleType) -> None:
    """Lets a parsed template count what it does, as `_Bounds` says."""

    def counted(name: str, value: Any) -> Any:
        return nodes.Filter(value, _COUNT + name, [], [], None, None)

    def known(node: Any) -> bool:
        return isinstance(node, nodes.TemplateData | nodes.Const)

    for output in [*tree.find_all(nodes.Output)]:
        output.nodes = [n if known(n) else counted("shown", n) for n in output.nodes]
    for node in [*tree.find_all((nodes.Assign, nodes.AssignBlock))]:
        name = "node" if isinstance(node, nodes.Assign) else "filter"
        setattr(node, name, counted("made", getattr(node, name)))
    for loop in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
        own = [text for node in loop.body for text in node.find_all(nodes.TemplateData)]
        size = nodes.Const(sum(len(text.data) for text in own))
        loop.body.insert(0, nodes.ExprStmt(counted("step", size)))
        if getattr(loop, "test", None) is not None:
            loop.test = nodes.And(counted("step", nodes.Const(0)), loop.test)
    tree.set_lineno(1)
    tree.set_environment(tree.environment)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read as UTF-8 text ({one_line(error)}); restore it."
        ) from error


def _generation_blocks(ext: ModuleType) -> type:
    """{% generation %} marks what an assistant says; here that is what was sampled."""

    class GenerationBlocks(ext.Extension):
        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlocks


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    # Jinja's own escapes what HTML would read.
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)
