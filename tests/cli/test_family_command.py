"""`wildflower family`."""

import own_traced
from typer.testing import CliRunner

from wildflower.cli.command import app

OWN = ["--set", "task=digits", "--set", "family=own_traced:Residual"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["family", *arguments], env={"COLUMNS": "160"})


def test_the_page_says_what_is_cut_together_what_is_not_and_what_widths_cost():
    shown = invoke(*OWN, "--set", "widths=1, 0.5")
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    parameters = sum(p.numel() for p in own_traced.Residual(10).parameters())
    assert any(f"own_traced:Residual: {parameters:,} parameters" in line for line in lines)
    [stem] = [line for line in lines if line.startswith("│ conv1 ")]
    assert "conv1.weight[0], bn1.weight[0], bn1.bias[0]" in stem
    [head] = [line for line in lines if "fc.weight[0]" in line and "output" in line]
    assert "it is an output" in head
    assert sum("│ 0.5 " in line or "│ 1 " in line for line in lines) == 2


def test_the_page_shows_blocks_and_exits():
    shown = invoke(*OWN)
    assert any(
        "layer2.0, layer2.1" in line and line.rstrip(" │").endswith("layer2.1") for line in shown.output.splitlines()
    )
    assert "Exits" not in shown.output
    shown = invoke(*OWN, "--set", "strategy=depthfl")
    assert any(line.startswith("│ fc ") and "layer2.0.conv1" in line for line in shown.output.splitlines())
    assert "Depth" not in shown.output


def test_a_family_of_described_layers_has_a_page_too():
    shown = invoke("--set", "task=digits", "--set", "family=lenet5")
    assert shown.exit_code == 0, shown.output
    assert "conv1" in shown.output


def test_what_cannot_be_cut_is_an_error():
    shown = invoke("--set", "task=digits", "--set", "family=own_traced:ByValue")
    assert shown.exit_code == 1
    assert "decides by the values of a tensor" in shown.output
