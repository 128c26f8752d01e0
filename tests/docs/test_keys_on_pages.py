"""Keys that pages name are keys of today: one that was renamed or removed stands on no page but that of changes."""

import re

import pytest

from tests.docs.prose import ROOT, pages
from wildflower.server_app.config import defaults
from wildflower.strategies import METHODS

KEYS = {key for method in METHODS for key in defaults(method)}
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}
NAMED = re.compile(r"`([a-z][a-z0-9-]*)\.([a-z][a-z0-9-]*)(?: = [^`]*)?`")
ENDINGS = {"py", "md", "json", "jsonl", "toml", "csv", "log"}
MODULES = {"wildflower.method"}


def unknown(text: str) -> list[str]:
    """Return what a text names as keys of a group that there is, and is none."""
    named = {".".join(found) for found in NAMED.findall(text) if found[0] in GROUPS and found[1] not in ENDINGS}
    return sorted(named - KEYS - MODULES)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_keys_that_there_are(page):
    assert unknown(page.read_text(encoding="utf-8")) == []


def test_a_key_that_is_gone_is_found():
    assert unknown("`compute.layout`, `recipfl.divergence = 'a'`, `wildflower.py`") == ["recipfl.divergence"]
