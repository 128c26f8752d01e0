import re
import tomllib
from pathlib import Path

import pytest

from server_app.config import RunConfig
from strategies import STRATEGIES

PAGE = (Path(__file__).parents[2] / "docs/methods.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
HEAD = re.compile(r"\n\*\*As in the paper by default\?\*\* ((?:Yes|No)\b.*?)\n\n", re.DOTALL)


def test_the_contents_lead_to_every_section_in_order():
    contents = re.findall(r"^- \[(.*)\]\(#(.*)\)$", PAGE.partition("\n## ")[0], re.MULTILINE)
    assert [title for title, _ in contents] == [title.replace("`", "") for title in SECTIONS]
    # As GitHub makes them.
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in SECTIONS]
    assert [anchor for _, anchor in contents] == anchors


@pytest.mark.parametrize("method", STRATEGIES)
def test_every_method_says_first_whether_it_is_as_in_the_paper_and_which_keys_make_it_so(method):
    [text] = [text for title, text in SECTIONS.items() if title.endswith(f"(`{method}`)")]
    said = HEAD.match(text)
    assert said
    settings = [line for line in re.findall(r"`([^`]*)`", said.group(1)) if "=" in line]
    for setting in settings:
        name, _, value = setting.partition(" = ")
        given = tomllib.loads(f"value = {value}")["value"]
        RunConfig.from_run_config({name: given})
        if name.startswith(f"{method}.") and method != "fedavg":
            assert given != RunConfig().to_dict()[name], f"{setting} is the default"
