"""Build what the site has beside docs/: README as its first page, benchmarks, linked sources, and reference.

Pages are written for GitHub's reader as well. So links between files of the repository become links of the site here,
and lists that are indented as GitHub reads them are indented as Python-Markdown does.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import wildflower
from wildflower.cli.command import app

ROOT = Path(__file__).parents[2]
# Files of the repository that lie outside docs/ -> pages of the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
COPIED = (".json", ".ipynb", ".svg")  # linked files that are copied; others become pages that show them
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"^ *(`{3,}).*?^ *\1 *$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]*)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]*)">\s*</picture>'
)


def page_of(path: str) -> str:
    """Return the page of the site for a file of the repository: `docs/fleets.md` is `fleets.md`."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/") and not path.endswith(".ipynb"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/") and path.endswith(".md"):
        return path
    return f"source/{path}" if path.endswith(COPIED) else f"source/{path}.md"


def file_of(page: str) -> str:
    """Return the file of the repository that a page of the site was made from."""
    for path, made in OUTSIDE.items():
        if page == made:
            return path
    return page if page.startswith("benchmarks/") else f"docs/{page}"


def linked(text: str, path: str) -> Iterator[str]:
    """Yield the files of the repository to which a file links."""
    for match in LINK.finditer(CODE.sub("", text)):
        target = match[2].partition("#")[0]
        if target and "://" not in target and not target.startswith("mailto:"):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def with_links_of_the_site(text: str, path: str) -> str:
    """Return a page's text with links between pages of the site, where it has links between files."""
    here = posixpath.dirname(page_of(path)) or "."

    def changed(match: re.Match[str]) -> str:
        target, sharp, anchor = match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        there = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        return f"{match[1]}{posixpath.relpath(there, here)}{sharp}{anchor}{match[3]}"

    return _outside_code(text, lambda part: LINK.sub(changed, part))


def _outside_code(text: str, change: Any) -> str:
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def with_deeper_lists(text: str) -> str:
    """Return a page's text with four spaces for each level of a list, where GitHub takes two."""
    lines, in_list, fence, deeper = [], False, "", 0
    for line in text.splitlines():
        stripped = line.lstrip(" ")
        indent = len(line) - len(stripped)
        if not fence:
            if not indent and stripped:
                in_list = bool(re.match(r"([-*]|\d+\.) ", stripped))
            deeper = 4 * max(indent // 2, 1) - indent if in_list and indent else 0
        lines.append(" " * deeper + line if stripped else "")
        if mark := re.match(r"`{3,}", stripped):
            fence = "" if fence and stripped.rstrip() == fence else fence or mark[0]
    return "\n".join(lines) + "\n"


def with_two_pictures(text: str) -> str:
    """Return a page's text with Material's pair of pictures, light and dark, where GitHub takes a `<picture>`."""
    return PICTURE.sub(r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)", text)


def on_config(config: MkDocsConfig) -> None:
    """Add a page for each method and for each benchmark to the site's contents."""
    sections = {name: pages for section in config.nav or [] for name, pages in section.items()}
    methods = sorted(page.name for page in (ROOT / "docs/methods").glob("*.md") if page.name != "README.md")
    sections["Methods"] += [{name.removesuffix(".md"): f"methods/{name}"} for name in methods]
    for page in sorted(ROOT.glob("benchmarks/*/README.md")):
        title = re.search(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert title, f"{page} has no title"
        first = str(page.relative_to(ROOT))
        others = [file for file in sorted(page.parent.glob("*.md")) if file != page]
        below = [{file.stem.replace("-", " "): str(file.relative_to(ROOT))} for file in others]
        sections["Evidence"].append({title[1]: [first, *below] if below else first})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/, and the files to which any page links."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for path in sorted(ROOT.glob("benchmarks/**/*.md")):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    files.append(File.generated(config, "commands.md", content=commands()))
    files.append(File.generated(config, "python-reference.md", content=python_reference()))
    there = {file.src_uri for file in files}
    pages = [file for file in files if file.is_documentation_page() and not file.inclusion.is_excluded()]
    for page in pages:
        path = file_of(page.src_uri)
        for target in linked(page.content_string, path):
            made = page_of(target)
            if made.startswith("source/") and made not in there and (ROOT / target).is_file():
                there.add(made)
                files.append(_source(config, target, made))
    return files


def _source(config: MkDocsConfig, path: str, made: str) -> File:
    if path.endswith(COPIED):
        return File.generated(config, made, abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    shown = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{text}````\n"
    return File.generated(config, made, content=shown)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page as Python-Markdown reads it, with the site's links."""
    if page.file.src_uri.startswith("source/") or page.file.src_uri in ("commands.md", "python-reference.md"):
        return markdown
    text = with_two_pictures(markdown)
    return with_deeper_lists(with_links_of_the_site(text, file_of(page.file.src_uri)))


def commands() -> str:
    """Return the page of all subcommands of `wildflower`, with their arguments and options."""
    group = typer.main.get_command(app)
    lines = ["# Commands", "", "Each command says the same with `--help`.", ""]
    assert hasattr(group, "commands")
    for name, command in group.commands.items():
        words = " ".join(_metavar(p) for p in command.params if p.param_type_name == "argument")
        paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
        lines += [f"## {name}", "", f"`wildflower {name} {words}`", "", *"\n\n".join(paragraphs).splitlines(), ""]
        rows = [_row(parameter) for parameter in command.params if getattr(parameter, "help", None)]
        if rows:
            lines += ["| option | default | meaning |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def _metavar(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return f"{name}..." if parameter.nargs == -1 else name


def _row(parameter: Any) -> str:
    argument = parameter.param_type_name == "argument"
    name = _metavar(parameter) if argument else ", ".join(parameter.opts)
    if not argument and parameter.metavar:
        name += f" {parameter.metavar}"
    default = parameter.default
    unset = default is None or callable(default) or default is False or default == () or default is ... or default == ""
    cells = [f"`{name}`", "" if unset else f"`{default}`", " ".join(parameter.help.split())]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# What a user's own code is written against, beside what `import wildflower as wf` offers.
CONTRACTS = {
    "A method of your own": [
        "wildflower.strategies.method.Method",
        "wildflower.strategies.submodel.SubModelMethod",
        "wildflower.strategies.client_step.ClientStep",
        "wildflower.strategies.client_context.ClientContext",
        "wildflower.strategies.method.Traits",
        *(
            f"wildflower.strategies.contract_values.{name}"
            for name in ("Setup", "Order", "Selection", "Group", "Contribution", "Trained", "Model", "State")
        ),
    ],
    "A family of models of your own": ["wildflower.models.base.Family"],
    "A task of your own": ["wildflower.tasks.task.Task", "wildflower.tasks.spec.Kind"],
    "A hook of a run": ["wildflower.rounds.hooks.RoundHook", "wildflower.rounds.hooks.Round"],
}


def python_reference() -> str:
    """Return the page of the classes and functions for Python, which mkdocstrings fills from their docstrings."""
    lines = [
        "# Python",
        "",
        "[Python](python.md) shows how runs are started and read.",
        "",
        "## `import wildflower as wf`",
    ]
    for name in wildflower.__all__:
        value = getattr(wildflower, name)
        lines += ["", f"::: {value.__module__}.{value.__qualname__}"]
    for title, names in CONTRACTS.items():
        lines += ["", f"## {title}", *(f"\n::: {name}" for name in names)]
    return "\n".join(lines) + "\n"
