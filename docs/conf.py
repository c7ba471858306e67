"""Sphinx: MyST pages, and an API reference from the package's docstrings.

    python -m sphinx -W -b html docs docs/_build

Docstrings are plain text with backticks, not reStructuredText, so `as_markup` writes
them as such before napoleon reads their sections.
"""

import ast
import pathlib
import re

from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "thundersync_jax"

project = "thundersync_jax"
author = copyright = "The thundersync_jax authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"page_width": "72em", "sidebar_width": "16em"}
html_show_sphinx = False
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the Args sections have shapes, dtypes and units
add_module_names = False
napoleon_custom_sections = [("Attributes", "params_style")]  # no link from each name

_SECTION = re.compile(r"\w[\w ]*:")
_FIELD = re.compile(r"(Source|Differs)(?=: )")  # a section of one line and its rest
_CODE = re.compile(r"`([^`]+)`")


def as_markup(app, what, name, thing, options, lines) -> None:
    """Rewrites a docstring's lines: backticks become literals, equations blocks.

    What is indented by four or more after an empty line, and is in no section, is an
    equation or a command.
    """
    texts, section = [], False
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        first = paragraph.partition("\n")[0]
        if not first.startswith(" "):
            section = bool(_SECTION.fullmatch(first))
        if first.startswith("    ") and not section:
            texts.append(f"::\n\n{paragraph}")
        else:
            texts.append(_fields(_escaped(paragraph)))
    lines[:] = "\n\n".join(texts).split("\n")


def _fields(text: str) -> str:
    """`Source: ...` as a field, with all lines of the paragraph that follow it."""
    written, inside = [], False
    for line in text.split("\n"):
        inside = bool(_FIELD.match(line)) or inside
        if _FIELD.match(line):
            line = f":{line}"
        elif inside:
            line = f"  {line.strip()}"
        written.append(line)
    return "\n".join(written)


def _escaped(text: str) -> str:
    """Stars, bars and underscores that mean nothing; `x` as a literal."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_plain(text[end : code.start()]), f"``{code.group(1)}``"]
        end = code.end()
        if text[end : end + 1].isalnum():  # as the s of a plural
            parts.append("\\ ")
    return "".join([*parts, _plain(text[end:])])


def _plain(text: str) -> str:
    text = re.sub(r"([*|\\`]|_(?=\W|$))", r"\\\1", text)
    return re.sub(r"(?<!\w)\\\*(\w[\w ]*)\\\*(?!\w)", r"*\1*", text)  # emphasis


def skip_aliases(app, what, name, thing, skip, options) -> bool | None:
    """Fields of a NamedTuple say "Alias for field number": its docstring says more."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for") else None


def files() -> str:
    """Every file of the package with the first line of its docstring."""
    rows = ["| file | what it is |", "|---|---|"]
    for path in sorted(
        PACKAGE.rglob("*.py"), key=lambda path: (path.parent, path.name)
    ):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if text and path.name != "__init__.py":
            about = text.partition("\n")[0].rstrip(".").replace("|", r"\|")
            rows.append(f"| `{path.relative_to(PACKAGE)}` | {about} |")
    return "\n".join(rows)


def settings() -> str:
    """Every setting with its default and its comment."""
    from thundersync_jax.config import Config
    from thundersync_jax.config.settings import settings, to_text

    rows = ["| setting | default | what it means | may change on resume |"]
    rows.append("|---|---|---|---|")
    for setting in settings(Config()):
        default = to_text(setting.default) or "()"
        comment = setting.comment.replace("|", r"\|")
        change = "yes" if setting.changeable else ""
        rows.append(f"| `{setting.name}` | `{default}` | {comment} | {change} |")
    return "\n".join(rows)


def metrics() -> str:
    """Every number of metrics.jsonl with its unit."""
    from thundersync_jax.metrics.writer import METRICS

    rows = ["| name | unit | what is measured |", "|---|---|---|"]
    for name, text in METRICS.items():
        unit, _, about = text.partition("; ")
        rows.append(
            f"| `{name}` | {unit} | {about} |".replace("|log-ratio|", r"\|log-ratio\|")
        )
    return "\n".join(rows)


def write_reference(app: Sphinx) -> None:
    """One page for each folder of the package, in `api/`, which git ignores."""
    pages: dict[pathlib.Path, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.read_text(encoding="utf-8").strip():
            pages.setdefault(path.relative_to(PACKAGE).parent, []).append(path.stem)
    target = pathlib.Path(app.srcdir) / "api"
    target.mkdir(exist_ok=True)
    for folder, modules in pages.items():
        dotted = ".".join([PACKAGE.name, *folder.parts])
        text = f"# {dotted}\n"
        for module in sorted(modules, key=lambda name: name != "__init__"):
            name = dotted if module == "__init__" else f"{dotted}.{module}"
            directive = f".. automodule:: {name}\n   :members:\n   :ignore-module-all:"
            text += f"\n## {name}\n\n```{{eval-rst}}\n{directive}\n```\n"
        page = target / f"{dotted}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
    for page in set(target.glob("*.md")) - {
        target / f"{'.'.join([PACKAGE.name, *folder.parts])}.md" for folder in pages
    }:
        page.unlink()


class Listing(SphinxDirective):
    """A table that the package itself has: `{listing} files`, settings or metrics."""

    required_arguments = 1

    def run(self):
        tables = {"files": files, "settings": settings, "metrics": metrics}
        return self.parse_text_to_nodes(tables[self.arguments[0]]())


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", as_markup, priority=100)
    app.connect("autodoc-skip-member", skip_aliases)
    app.add_directive("listing", Listing)
