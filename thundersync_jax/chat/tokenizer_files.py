"""Tokenizer, special tokens and chat template of a Hugging Face folder."""

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from thundersync_jax.chat import byte_level
from thundersync_jax.config.checks import installed
from thundersync_jax.config.model_folder import not_there
from thundersync_jax.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
_USER = "chat templates"
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def template_of(folder: Path, tools: bool) -> str | None:
    """The source of a folder's template; None where it has none."""
    with_tools = folder / "additional_chat_templates" / "tool_use.jinja"
    for file in [with_tools] * tools + [folder / "chat_template.jinja"]:
        if file.exists():
            return file.read_text(encoding="utf-8")
    templates = read_json(folder / "tokenizer_config.json").get("chat_template")
    if not isinstance(templates, list):
        return templates
    by_name = {entry["name"]: entry["template"] for entry in templates}
    return (tools and by_name.get("tool_use")) or by_name.get("default")


def special_tokens(folder: Path) -> dict[str, Any]:
    """The named tokens that templates may use, such as bos_token."""
    config = read_json(folder / "special_tokens_map.json")
    config |= read_json(folder / "tokenizer_config.json")
    tokens = {f"{name}_token": config.get(f"{name}_token") for name in _NAMED}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
        if token is not None
    }


def speaks_bytes(folder: Path) -> bool:
    """Whether a folder has no tokenizer, or the byte-level one."""
    file = folder / TOKENIZER_FILE
    if not file.exists():
        return True
    ours = byte_level.tokenizer_json()["model"]["vocab"]
    return read_json(file).get("model", {}).get("vocab") == ours


def vocabulary(folder: Path) -> dict[str, int]:
    """Every token by its name: of the folder's tokenizer, or byte-level ones."""
    if speaks_bytes(folder):
        return byte_level.vocabulary()
    return load_tokenizer(folder).get_vocab(with_added_tokens=True)


def read_json(file: Path) -> dict[str, Any]:
    """The content of a file that need not be there."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
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
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def compiled(
    source: str, folder: Path, day: datetime.datetime | None = None
) -> Callable[..., str]:
    """The template as a function of its variables, in a sandbox.

    The date that it may print is `day`, or that of this call: never that of a prompt.
    """
    jinja2 = installed("jinja2", _USER, "hf")
    sandbox = installed("jinja2.sandbox", _USER, "hf")
    ext = installed("jinja2.ext", _USER, "hf")
    environment = sandbox.ImmutableSandboxedEnvironment(
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

    def render(**variables: Any) -> str:
        try:
            return template.render(**variables)
        except Exception as error:  # whatever a template does wrong is one line
            raise ConfigError(
                f"the chat template of {folder} refuses a conversation: {error}"
            ) from error

    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"the chat template of {folder} is no template: {error}. Mend it."
        ) from error
    return render


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
