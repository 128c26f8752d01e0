"""Texts that are written from the settings: the block of keys in pyproject.toml, and the tables of keys in docs/.

Flower refuses keys that pyproject.toml does not list, without saying which. `python -m wildflower.server_app.keys`
writes the block and the tables anew; tests hold both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from wildflower.server_app.inline_tables import to_toml
from wildflower.server_app.listed_keys import PYPROJECT
from wildflower.server_app.units import markdown_table

DOCS = PYPROJECT.parent / "docs"
# The keys that people set: what is learned by whom, how, and where it goes. `wildflower config` shows them first.
COMMON = (
    *("task", "data-dir", "family", "initial.weights", "partition", "alpha"),
    *("devices", "workers", "fleet", "devices-per-round", "deadline-seconds"),
    *("strategy", "widths", "rounds", "local-epochs", "batch-size", "optimizer", "learning-rate", "momentum"),
    *("weight-decay", "seed", "evaluate-every", "deliver", "run-name", "resume"),
)
_BLOCK = re.compile(r"(?<=^\[tool\.flwr\.app\.config\]\n).*?(?=^\[)", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"(?<=^<!-- keys -->\n).*?(?=^<!-- /keys -->)", re.DOTALL | re.MULTILINE)


def with_block(pyproject: str, text: str) -> str:
    """The text of a pyproject.toml with this block in place of its own."""
    found, count = _BLOCK.subn(lambda _: text, pyproject)
    if count != 1:
        raise ValueError("pyproject.toml has no table [tool.flwr.app.config] in front of another table")
    return found


def key_table(defaults: Mapping[str, object], descriptions: Mapping[str, str]) -> str:
    """A Markdown table of keys: the default of each, and what it means."""
    rows = [(f"`{key}`", f"`{to_toml(value)}`", descriptions[key]) for key, value in defaults.items()]
    return markdown_table(("key", "default", "meaning"), rows)


def with_table(page: str, table: str) -> str:
    """The text of a page with this table between its marks `<!-- keys -->` and `<!-- /keys -->`."""
    found, count = _TABLE.subn(lambda _: f"\n{table}\n", page)
    if count != 1:
        raise ValueError("a page has its keys between one line <!-- keys --> and one line <!-- /keys -->")
    return found


def keys_by_group(keys: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the keys of the run by the titles of their parts, and those of methods by the group that they are of.

    Args:
        keys: in the order of the settings.
    """
    from wildflower.server_app.config import PARTS, run_groups
    from wildflower.strategies.params import kebab

    titles = {kebab(name): title for name, title in PARTS.items()}
    own = run_groups()
    run: dict[str, list[str]] = {}
    of_methods: dict[str, list[str]] = {}
    title = ""
    for key in keys:
        group, dot, _ = key.partition(".")
        if dot and group not in own:
            of_methods.setdefault(group, []).append(key)
        else:
            title = titles.get(key, title)
            run.setdefault(title, []).append(key)
    return run, of_methods


def pages() -> dict[str, str]:
    """The pages below docs/ that have tables of keys -> the tables.

    They are docs/keys.md, with the keys of the run itself, the page of every method, with those of the parts
    that it shares with other methods, and the pages of these parts.
    """
    from wildflower.server_app.config import all_settings, defaults
    from wildflower.strategies import METHODS

    descriptions = {key: field.description or "" for key, field in all_settings().items()}
    usual = defaults()
    run, groups = keys_by_group(usual)

    def table(*names: str) -> str:
        keys = [key for name in names for key in groups.get(name, [])]
        return of_keys(keys) if keys else "There are none.\n"

    def of_keys(keys: Sequence[str]) -> str:
        return key_table({key: usual[key] for key in keys}, descriptions)

    found = {"keys.md": "\n".join(f"## {title}\n\n{of_keys(keys)}" for title, keys in run.items())}
    for name, kind in METHODS.items():
        found[f"methods/{name}.md"] = table(name, *kind.shared_params)
        found |= {f"methods/{shared}.md": table(shared) for shared in kind.shared_params}
    return found


def block_of_settings(strategy: str = "") -> str:
    """The lines of the block, with the keys of a run's `strategy` from outside: every key, its default, what it is."""
    from wildflower.server_app.config import all_settings, defaults

    told = {key: " ".join((field.description or "").split()) for key, field in all_settings(strategy).items()}
    run, of_methods = keys_by_group(usual := defaults(strategy))
    lines: list[str] = []
    for title, keys in [*run.items(), *((f"Settings of {group}", keys) for group, keys in of_methods.items())]:
        lines.append(f"# {title}")
        lines += [f"{key} = {to_toml(usual[key])}  # {told[key]}" for key in keys]
    return "\n".join(lines) + "\n\n"


def main() -> None:
    """Write the block of pyproject.toml anew, and the tables of docs/."""
    PYPROJECT.write_text(with_block(PYPROJECT.read_text(encoding="utf-8"), block_of_settings()), encoding="utf-8")
    for name, table in pages().items():
        page = DOCS / name
        if page.is_file():
            page.write_text(with_table(page.read_text(encoding="utf-8"), table), encoding="utf-8")
        else:
            print(f"docs/{name} is not there: its table of keys is not written")


if __name__ == "__main__":
    main()
