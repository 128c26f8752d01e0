"""Labels that look alike: composed and decomposed accents, numbers in several spellings, blanks, missing values."""

import logging
import unicodedata

import numpy as np
import pytest
import torch

from tests.own_folders import npz_folder
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.tasks.agreement import Declared, agree, label_warnings
from wildflower.tasks.device_data import Form, Moments, Summary, UnfitError, check_labels, made
from wildflower.tasks.inspection import describe
from wildflower.tasks.labels import alike, label_text, same, shown
from wildflower.tasks.rows import as_name
from wildflower.tasks.tables import TableArguments
from wildflower.tasks.task import TaskSpec

COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


def said(device, *names):
    form = Form(stored="uint8", input_shape=(1, 2, 2), labels="classes")
    moments = Moments(values=400, sums=(800.0,), squares=(90000.0,))
    return Summary(device=device, examples=100, form=form, label_names=names, moments=moments)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (DECOMPOSED, COMPOSED),
        (" cat\t", "cat"),
        ("\ufeffcat\u200b ", "cat"),
        ("\u00a0cat\u00a0", "cat"),
        ("hot dog", "hot dog"),
        (7, "7"),
        ("\u200b \u200b", ""),
    ],
)
def test_the_text_of_a_label(label, text):
    assert label_text(label) == text


@pytest.mark.parametrize(
    "names",
    [
        ("01", "1", "1.0"),
        ("+1", "1"),
        ("0", "0.00"),
        ("10", "1e1"),
        ("hot dog", "hot  dog"),
        ("hot dog", "hot\u00a0dog"),
        ("cat", "ca\u200bt"),
        ("1", "\uff11"),
    ],
)
def test_labels_that_nobody_tells_apart(names):
    assert same(names) == [tuple(sorted(names))]
    assert alike([*names, "another"]) == [tuple(sorted(names))]


@pytest.mark.parametrize(
    "names", [("Yes", "yes"), ("hot_dog", "hot-dog"), ("NA", "nan"), ("None", "null"), ("TRUE", "true")]
)
def test_labels_that_may_be_slips(names):
    assert same(names) == []
    assert alike(names) == [tuple(sorted(names))]


@pytest.mark.parametrize(
    "names", [("1", "-1"), ("1", "10", "2"), ("cat", "cats"), ("B-PER", "I-PER"), ("1.5", "15"), ("a",)]
)
def test_labels_that_are_others(names):
    assert alike(names) == []


@pytest.mark.parametrize("name", ["NA", "n/a", "nan", "None", "null", "<NA>"])
def test_a_label_that_stands_for_a_missing_value(name):
    assert alike([name, "cat"]) == [(name,)]


def test_what_nobody_sees_is_shown():
    assert shown("ca\u200bt") == r"'ca\u200bt'"
    assert shown(COMPOSED) == f"'{COMPOSED}'"


def test_accents_are_composed_on_devices_and_by_the_server(tmp_path):
    npz_folder(
        tmp_path, np.arange(16, dtype=np.uint8).reshape(4, 1, 2, 2), [DECOMPOSED, COMPOSED, "t\u00e9", "te\u0301"]
    )
    spec = TaskSpec(name="npz", devices=1, data_dir=str(tmp_path), partition="own")
    assert describe(spec, 0, moments=True).label_names == (COMPOSED, "t\u00e9")
    assert agree([said(0, DECOMPOSED, "a"), said(1, COMPOSED)], Declared(), 1000)[0].label_names == ("a", COMPOSED)
    assert TableArguments(columns=("a",), classes=(DECOMPOSED, "b")).classes == (COMPOSED, "b")
    assert as_name(f" {DECOMPOSED} ") == COMPOSED
    with pytest.raises(ValueError, match="a name is listed twice"):
        TableArguments(columns=("a",), classes=(DECOMPOSED, COMPOSED))


def test_columns_are_found_whatever_their_accents(tmp_path):
    (tmp_path / "train.csv").write_text(f"{DECOMPOSED} , kind\n1,a\n2,b\n")
    arguments = TableArguments(columns=(COMPOSED,), label="kind")
    spec = TaskSpec(name="table", devices=1, data_dir=str(tmp_path), partition="own", arguments=arguments)
    assert describe(spec, 0, moments=True).examples == 2


def test_a_device_that_writes_a_label_otherwise_than_most_does_not_take_part():
    devices = [said(0, "0", "1"), said(1, "0", "1"), said(2, "0.0", "1.0"), said(3, "1")]
    agreed, unfit = agree(devices, Declared(), 1000)
    assert agreed.label_names == ("0", "1")
    assert unfit == {
        2: "its label '0.0' looks like '0', which 2 other devices have: write it alike, or declare classes in "
        "task-arguments"
    }
    assert agree(devices[::-1], Declared(), 1000) == (agreed, unfit)
    declared = Declared(label_names=("0", "1", "0.0", "1.0"))
    assert agree(devices, declared, 1000)[1] == {}


def test_of_as_many_spellings_neither_is_left_out():
    """Else one device could rule out another that alone has a label."""
    devices = [said(0, "1", "2"), said(1, "01", "2")]
    agreed, unfit = agree(devices, Declared(), 1000)
    assert (agreed.label_names, unfit) == (("01", "1", "2"), {})
    assert "'01' of device 1, '1' of device 0" in label_warnings(devices)[0]


def test_a_device_that_has_both_spellings_is_warned_of():
    devices = [said(0, "1", "1.0"), said(1, "1", "2")]
    assert agree(devices, Declared(), 1000)[1] == {}
    assert label_warnings(devices) == [
        "These labels look alike, and are classes of their own: '1' of devices 0, 1, '1.0' of device 0"
    ]


def test_slips_are_warned_of_with_the_devices_that_have_them():
    devices = [said(0, "Yes", "no"), said(1, "yes", "no"), said(2, "yes", "NA")]
    assert agree(devices, Declared(), 1000)[1] == {}
    assert sorted(label_warnings(devices)) == [
        "These labels look alike, and are classes of their own: 'Yes' of device 0, 'yes' of devices 1, 2",
        "This label is what programs write where a value is missing, and is a class here: 'NA' of device 2",
    ]


def test_a_late_device_is_told_which_label_it_may_mean():
    with pytest.raises(UnfitError, match=r"the run has no label '1\.0': it has '0', '1'; is '1' meant\?"):
        check_labels(["1.0"], ("0", "1"))
    with pytest.raises(UnfitError, match=r"the run has no label 'ca\\u200bt': it has 'cat', 'dog'; is 'cat' meant\?"):
        check_labels(["ca\u200bt"], ("cat", "dog"))


def test_fractions_and_names_in_one_file_are_refused():
    with pytest.raises(ValueError, match=r"some labels are fractions such as 1 and others are names"):
        made([(torch.zeros(2, 1, 1), [1.0, "cat"])])


def test_what_csv_and_json_say_of_missing_values_stays_as_it_is(tmp_path):
    (tmp_path / "train.csv").write_text("a,label\n" + "".join(f"{n},{name}\n" for n, name in enumerate(TRAPS)))
    spec = TaskSpec(
        name="table", devices=1, data_dir=str(tmp_path), partition="own", arguments=TableArguments(columns=("a",))
    )
    assert set(describe(spec, 0, moments=True).label_names) == set(TRAPS)
    (tmp_path / "train.csv").write_text("a,label\n1,\n2,x\n")
    assert "train.csv:2: label is '', it must be a name" in describe(spec, 0, moments=True).problem
    for value, why in (("null", "label is None"), ("NaN", "label is nan"), ("1.0", "label is 1.0")):
        (tmp_path / "train.jsonl").write_text(f'{{"a": 1, "label": {value}}}\n')
        arguments = TableArguments(columns=("a",), train="train.jsonl")
        found = describe(
            TaskSpec(name="table", devices=1, data_dir=str(tmp_path), partition="own", arguments=arguments),
            0,
            moments=True,
        )
        assert f"train.jsonl:1: {why}" in found.problem


TRAPS = ("NA", "None", "null", "True", "nan", "01", "1")


def test_boards_that_differ_in_what_nobody_sees_are_told_before_round_1(tmp_path, caplog):
    rows = [f"{number},{{}}\n" for number in range(6)]
    spellings = [("1", "2"), ("1", "2"), ("1.0", "2.0"), ("1", "NA")]
    for device, pair in enumerate(spellings):
        folder = tmp_path / "devices" / f"{device:04d}"
        folder.mkdir(parents=True)
        (folder / "train.csv").write_text("a,label\n" + "".join(row.format(pair[n % 2]) for n, row in enumerate(rows)))
    fleet = tmp_path / "four.toml"
    fleet.write_bytes(
        b'\xef\xbb\xbf[[group]]\nname = "all"\ncount = 4\nmemory = "4 GB"\nlink = "100 Mbit/s"\nspeed = 1.0\n'
    )
    values = {
        "task": "table",
        "task-arguments": "columns = ['a']",
        "partition": "own",
        "test-fraction": 0.34,
        "data-dir": str(tmp_path),
        "fleet": str(fleet),
        "devices": 4,
        "devices-per-round": 4,
        "family-arguments": "hidden = [8]",
        "strategy": "heterofl",
    }
    with caplog.at_level(logging.WARNING, logger="flwr"):
        engine, _ = build(RunConfig.from_run_config(values))
    assert engine.own.spec.agreed.label_names == ("1", "2", "NA")
    assert "Device 2 does not take part: its label '1.0' looks like '1', which 3 other devices have" in caplog.text
    assert "'NA' of device 3" in caplog.text


def test_normal_forms_are_what_is_compared():
    """The two spellings are really two texts, so that the tests above can fail."""
    assert COMPOSED != DECOMPOSED
    assert unicodedata.normalize("NFD", COMPOSED) == DECOMPOSED
