"""Rows of numbers in CSV, TSV and JSON lines: what is read, and what is told of other files."""

import json

import numpy as np
import pytest
import torch

from tests.small_run import simulated_grid
from wildflower.server_app.app import run
from wildflower.server_app.config import RunConfig
from wildflower.server_app.run_folder import read_devices, read_rounds
from wildflower.tasks.agreement import Declared, agree, problem_of
from wildflower.tasks.device_data import Agreed, Form
from wildflower.tasks.inspection import describe
from wildflower.tasks.tables import TableArguments, load
from wildflower.tasks.task import TaskSpec, load_task

ARGUMENTS = TableArguments(columns=("height", "weight"), label="kind")
AGREED = Agreed(
    form=Form(stored="float64", input_shape=(2, 1), labels="classes"),
    label_names=("cat", "dog"),
    mean=(0.0, 0.0),
    std=(1.0, 1.0),
)
CSV = "weight,kind,note,height\n2,cat,soft,1.5\n4,dog,,-2\n8,cat,x,1e3\n"


def spec_of(folder, arguments=ARGUMENTS, **given):
    return TaskSpec(name="table", devices=4, data_dir=str(folder), partition="own", arguments=arguments, **given)


def problem(folder, arguments=ARGUMENTS):
    found = describe(spec_of(folder, arguments), 0, moments=True)
    assert (found.examples, found.form, found.moments) == (0, None, None)
    return found.problem


def of_values(moments):
    """Sum and sum of squares of each column, of the values themselves and not of what is left less a center."""
    n = moments.values
    each = zip(moments.sums, moments.squares, moments.centers, strict=True)
    return [
        (pytest.approx(total + n * center), pytest.approx(square + 2 * center * total + n * center**2))
        for total, square, center in each
    ]


def test_columns_are_read_by_their_names_in_the_order_of_the_configuration(tmp_path):
    (tmp_path / "train.csv").write_text(CSV)
    found = describe(spec_of(tmp_path), 0, moments=True)
    assert found.form == Form(stored="float64", input_shape=(2, 1), labels="classes")
    assert (found.examples, found.label_names) == (3, ("cat", "dog"))
    assert found.moments.values == 3
    assert of_values(found.moments) == [(1.5 - 2 + 1000, 2.25 + 4 + 1e6), (14.0, 84.0)]
    agreed = Agreed(form=found.form, label_names=("cat", "dog"), mean=(0.0, 0.0), std=(1.0, 1.0))
    task = load_task(spec_of(tmp_path, agreed=agreed)).for_device(0)
    assert task.train.inputs[:, :, 0].tolist() == [[1.5, 2.0], [-2.0, 4.0], [1000.0, 8.0]]
    assert task.train.labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize("form", ["tsv", "jsonl", "saved"])
def test_other_files_hold_the_same(tmp_path, form):
    rows = [dict(zip(("weight", "kind", "height"), row, strict=True)) for row in ((2, "cat", 1.5), (4, "dog", -2.0))]
    arguments = ARGUMENTS.model_copy(update={"train": f"train.{form}" if form != "saved" else "train.csv"})
    if form == "tsv":
        (tmp_path / "train.tsv").write_text("weight\tkind\theight\n2\tcat\t1.5\n4\tdog\t-2\n")
    elif form == "jsonl":
        (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "train")
    found = describe(spec_of(tmp_path, arguments), 0, moments=True)
    assert (found.examples, found.label_names) == (2, ("cat", "dog"))
    assert of_values(found.moments) == [(-0.5, 6.25), (6.0, 20.0)]


def test_a_device_may_have_rows_to_test_on_and_none_to_train_on(tmp_path):
    (tmp_path / "test.csv").write_text(CSV)
    arguments = ARGUMENTS.model_copy(update={"test": "test.csv"})
    assert "no training examples" in problem(tmp_path, arguments)
    (tmp_path / "train.csv").write_text(CSV.replace("8,cat,x,1e3\n", ""))
    found = describe(spec_of(tmp_path, arguments), 0, moments=True)
    assert (found.examples, found.test_examples) == (2, 3)


def seconds_of(devices, rows=6):
    """Unix seconds of a few minutes, and another column, of each device; and all rows together."""
    rng = np.random.default_rng(5)
    each = [np.stack([1.7e9 + rng.integers(0, 300, rows), rng.normal(0, 1, rows)], 1) for _ in range(devices)]
    return each, np.concatenate(each)


def test_columns_far_from_zero_keep_their_differences_where_rows_are_dealt_out(tmp_path):
    _, rows = seconds_of(4)
    task = dealt_out(tmp_path, [f"{when!r},{other!r},{'ab'[n % 2]}" for n, (when, other) in enumerate(rows.tolist())])
    mean, std = (value.numpy() for value in task.normalization)
    trained = task.train.inputs[:, :, 0].numpy()
    assert mean == pytest.approx(trained.mean(axis=0), rel=1e-15)
    assert std == pytest.approx(trained.std(axis=0), rel=1e-6)
    found = task.prepare(task.train.inputs, augment=None)
    assert found.dtype == torch.float32
    assert found[:, :, 0].numpy() == pytest.approx((trained - trained.mean(axis=0)) / trained.std(axis=0), abs=1e-5)


def test_columns_far_from_zero_keep_their_differences_where_devices_agree(tmp_path):
    each, rows = seconds_of(3)
    spec = spec_of(tmp_path, device_folders=True)
    for device, own in enumerate(each):
        folder = tmp_path / "devices" / f"{device:04d}"
        folder.mkdir(parents=True)
        lines = [f"{when!r},{other!r},{'ab'[n % 2]}" for n, (when, other) in enumerate(own.tolist())]
        (folder / "train.csv").write_text("\n".join(["height,weight,kind", *lines]))
    said = [describe(spec, device, moments=True) for device in range(3)]
    agreed, unfit = agree(said, Declared(), 1000)
    assert unfit == {}
    assert agreed == agree(said[::-1], Declared(), 1000)[0]
    assert agreed.mean == pytest.approx(rows.mean(axis=0), rel=1e-15)
    assert agreed.std == pytest.approx(rows.std(axis=0), rel=1e-6)
    task = load_task(spec.model_copy(update={"agreed": agreed})).for_device(1)
    expected = (each[1] - rows.mean(axis=0)) / rows.std(axis=0)
    assert task.prepare(task.train.inputs, augment=None)[:, :, 0].numpy() == pytest.approx(expected, abs=1e-5)


def test_one_value_of_a_column_on_all_devices_is_told_however_large(tmp_path):
    for device, number in enumerate((3, 5)):
        folder = tmp_path / "devices" / f"{device:04d}"
        folder.mkdir(parents=True)
        lines = ["height,weight,kind", *(f"{n},1700000001.1,{'ab'[n % 2]}" for n in range(number))]
        (folder / "train.csv").write_text("\n".join(lines))
    said = [describe(spec_of(tmp_path, device_folders=True), device, moments=True) for device in range(2)]
    with pytest.raises(ValueError, match="channel 1 of all devices' inputs, counted from 0, has one value only"):
        agree(said, Declared(), 1000)


def test_a_center_that_no_values_have_is_refused(tmp_path):
    (tmp_path / "train.csv").write_text(CSV)
    said = describe(spec_of(tmp_path), 0, moments=True)
    assert problem_of(said, 1000) == ""
    for centers, why in (((), "gives 0 centers"), ((0.0, 1e39), "a center that no float64 values have")):
        wrong = said.model_copy(update={"moments": said.moments.model_copy(update={"centers": centers})})
        assert why in problem_of(wrong, 1000)


def test_labels_that_32_bits_round_away_are_refused(tmp_path):
    rows = "".join(f"{n},{1700000000 + n}\n" for n in range(5))
    (tmp_path / "train.csv").write_text(f"a,b\n{rows}")
    why = problem(tmp_path, TableArguments(columns=("a",), label="b", labels="numbers"))
    assert "labels such as 1700000004.0 are rounded by up to" in why
    assert "subtract a number from all" in why


@pytest.mark.parametrize("mark", [";", "\t"])
def test_semicolons_and_decimal_commas(tmp_path, mark):
    lines = ["height,weight,kind", "1.5,-2,cat", "0.25,1e3,dog"]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    right = load_task(spec_of(tmp_path, agreed=AGREED)).for_device(0).train.inputs
    text = "\n".join(lines).replace(",", mark).replace(".", ",")
    (tmp_path / "train.csv").write_text(text, encoding="utf-8-sig")
    why = problem(tmp_path)
    assert "train.csv:2: height is '1,5', it must be a finite number without separators of thousands" in why
    assert "decimal = ','" in why
    arguments = ARGUMENTS.model_copy(update={"decimal": ","})
    found = load_task(spec_of(tmp_path, arguments, agreed=AGREED)).for_device(0).train.inputs
    assert found.tolist() == right.tolist()
    (tmp_path / "train.csv").write_text(text.replace("1e3", "1.000"))
    assert "weight is '1.000', it must be a finite number without separators" in problem(tmp_path, arguments)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_refused_in_words(tmp_path, encoding):
    (tmp_path / "train.csv").write_text(CSV, encoding=encoding)
    assert "train.csv: it is in UTF-16, or no text at all: save it in UTF-8" in problem(tmp_path)


def test_files_that_are_not_read_are_counted(tmp_path):
    for name in ("train.csv", "test.csv", "train2.CSV", "notes.txt"):
        (tmp_path / name).write_text(CSV)
    remarks = describe(spec_of(tmp_path), 0, moments=True).remarks
    assert [(remark.count, remark.example) for remark in remarks] == [(2, "test.csv")]
    (tmp_path / "test.csv").unlink()
    rows = [f"{number},{-number},{'cat' if number % 2 else 'dog'}" for number in range(20)]
    assert [remark.example for remark in dealt_out(tmp_path, rows).remarks] == ["train2.CSV"]


def test_labels_may_be_numbers(tmp_path):
    (tmp_path / "train.csv").write_text("a,b\n1,0.5\n2,1\n")
    found = describe(spec_of(tmp_path, TableArguments(columns=("a",), label="b", labels="numbers")), 0, moments=True)
    assert (found.form.labels, found.label_names) == ("numbers", ())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "train.csv: has no header with the columns' names"),
        ("weight,kind,height\n", "train.csv: holds no rows"),
        ("weight,kind\n2,cat\n", "train.csv:1: no column 'height', there are 'weight', 'kind'"),
        ("weight,height\n2,3\n", "train.csv:1: no column 'kind', there are 'weight', 'height'"),
        ("weight;kind\n2;cat\n", "train.csv:1: no column 'height', there are 'weight', 'kind'"),
        (CSV + '"1,5",cat,,3\n', "weight is '1,5', it must be a finite number without separators of thousands"),
        (CSV + '"1,234.5",cat,,3\n', "weight is '1,234.5', it must be a finite number without separators"),
        (CSV + "1 234,cat,,3\n", "weight is '1 234', it must be a finite number without separators of thousands"),
        (CSV + "1,cat,,tall\n", "train.csv:5: height is 'tall', it must be a finite number"),
        (CSV + "1,cat,,\n", "train.csv:5: height is '', it must be a finite number"),
        (CSV + "nan,cat,,1\n", "train.csv:5: weight is 'nan', it must be a finite number"),
        (CSV + "1e39,cat,,1\n", "train.csv:5: weight is 1e+39, more than a number of 32 bits can be"),
        (CSV + "1,,,1\n", "train.csv:5: kind is '', it must be a name or a whole number"),
        (CSV + "1_000,cat,,1\n", "train.csv:5: weight is '1_000', it must be a finite number"),
        ("x,x,label\n1,2,cat\n", "train.csv: the header names the column 'x' twice"),
        (CSV + "1,cat\n", "train.csv:5: 2 values, the header has 4 columns"),
        (CSV + ";;;\n", "train.csv:5: 1 value, the header has 4 columns"),
        ("sep=;\r\nweight;kind\r\n2;cat\r\n", "train.csv:1: 'sep=;' is a line for Excel alone: leave it out"),
        ("weight,kind\r2,cat\r", "train.csv:1: lines end as on Macs of old, in a carriage return"),
        ('weight,kind\n"2,cat\n', "train.csv:2: unexpected end of data"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(tmp_path, text, why):
    (tmp_path / "train.csv").write_text(text, newline="")
    assert why in problem(tmp_path)


def test_no_file(tmp_path):
    assert "no file train.csv of the task 'table'" in problem(tmp_path)
    assert problem(tmp_path).endswith("; the folder holds nothing")
    for name in ("Train.CSV", "a.xlsx", "b.xlsx", "c.xlsx"):
        (tmp_path / name).touch()
    assert problem(tmp_path).endswith("; the folder holds Train.CSV, a.xlsx, b.xlsx, ...")
    (tmp_path / "train.jsonl").write_text("[1, 2]\n")
    assert "train.jsonl:1: must be an object" in problem(
        tmp_path, ARGUMENTS.model_copy(update={"train": "train.jsonl"})
    )


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"columns": ["a", "a"]}, "'a' is there twice"),
        ({"columns": ["label"]}, "'label' is there twice, or is the label"),
        ({"columns": ["a"] * 257}, "columns"),
        ({"columns": ["a"], "train": "../other.csv"}, "is no file name that ends in .csv, .tsv, .jsonl"),
        ({"columns": ["a"], "test": "test.xls"}, "is no file name that ends in"),
    ],
)
def test_arguments_are_checked(values, why):
    with pytest.raises(ValueError, match=why):
        TableArguments.model_validate_json(json.dumps(values))


def test_rows_may_be_dealt_out_as_well(tmp_path):
    rows = [f"{number},{-number},{'cat' if number % 2 else 'dog'}" for number in range(20)]
    (tmp_path / "train.csv").write_text("\n".join(["height,weight,kind", *rows]))
    spec = TaskSpec(name="table", devices=2, data_dir=str(tmp_path), arguments=ARGUMENTS)
    task = load_task(spec)
    assert (len(task.train), len(task.test), task.label_names, task.input_shape) == (16, 4, ("cat", "dog"), (2, 1))
    assert task.normalization[0].tolist() == pytest.approx(task.train.inputs.mean(dim=0)[:, 0].tolist())


def test_without_columns_all_but_the_labels_are_read_in_the_order_of_the_file(tmp_path):
    task = dealt_out(
        tmp_path, [f"{n},{-n},{'cat' if n % 2 else 'dog'}" for n in range(20)], TableArguments(label="kind")
    )
    assert task.columns == ("height", "weight")
    assert (task.train.inputs[:, 0] == -task.train.inputs[:, 1]).all()
    assert "columns must be named in task-arguments" in problem(tmp_path, TableArguments(label="kind"))
    (tmp_path / "train.csv").write_text("kind\ncat\n")
    with pytest.raises(ValueError, match=r"train\.csv: 0 columns beside 'kind', and a model reads 1 to 256: name them"):
        load(str(tmp_path), TableArguments(label="kind"))


@pytest.mark.parametrize("value", ["One year", ""])
def test_a_text_or_a_gap_among_numbers_is_told_where_the_remedy_stands(tmp_path, value):
    with pytest.raises(ValueError, match=r"train\.csv:2: weight is .* or make numbers of texts and gaps"):
        dealt_out(tmp_path, [f"1,{value},cat", "2,2,dog"])


def dealt_out(folder, rows, arguments=ARGUMENTS):
    (folder / "train.csv").write_text("\n".join(["height,weight,kind", *rows]))
    return load_task(TaskSpec(name="table", devices=2, data_dir=str(folder), arguments=arguments))


@pytest.mark.parametrize("label", [lambda number: f"{number / 7:g}", lambda number: str(100 * number)])
def test_numbers_are_not_taken_for_names_of_classes(tmp_path, label):
    rows = [f"{number},{-number},{label(number)}" for number in range(20)]
    with pytest.raises(ValueError, match=f"{tmp_path}: kind has 20 different numbers .* labels = 'numbers'"):
        dealt_out(tmp_path, rows)
    task = dealt_out(tmp_path, rows, ARGUMENTS.model_copy(update={"labels": "numbers"}))
    assert task.label_kind == "numbers"


def test_few_numbers_are_names_of_classes(tmp_path):
    task = dealt_out(tmp_path, [f"{number},{-number},{number % 4 + 0.5}" for number in range(40)])
    assert task.label_names == ("0.5", "1.5", "2.5", "3.5")


def test_a_number_that_json_has_as_a_label_is_told_what_to_say(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"height": 1, "weight": 2, "kind": 0.5}\n')
    arguments = ARGUMENTS.model_copy(update={"train": "train.jsonl"})
    told = "train.jsonl:1: kind is 0.5, it must be a name or a whole number; labels that are numbers need labels ="
    assert told in problem(tmp_path, arguments)


def test_a_column_with_one_value_is_named(tmp_path):
    rows = [f"{number},3,{'cat' if number % 2 else 'dog'}" for number in range(20)]
    with pytest.raises(ValueError, match=f"{tmp_path}: weight is 3 in all training rows, .* or out of columns"):
        dealt_out(tmp_path, rows)


def test_too_few_rows_to_keep_some_for_testing(tmp_path):
    with pytest.raises(ValueError, match=r"2 examples of 2 classes are too few to keep a share of 0\.2 of each"):
        dealt_out(tmp_path, ["1,2,cat", "3,4,dog"])


def write_devices(folder, rows=40):
    """Three devices, whose label is which of two numbers is larger; one has a single class, one lacks a column."""
    generator = torch.Generator().manual_seed(0)
    for device in range(4):
        lines = ["height,weight,kind"]
        for height, weight in torch.randn(rows, 2, generator=generator).tolist():
            if device == 1 and height < weight:
                height, weight = weight, height
            lines.append(f"{height},{weight},{'tall' if height > weight else 'wide'}")
        if device == 3:
            lines[0] = "length,weight,kind"
        where = folder / "devices" / f"{device:04d}"
        where.mkdir(parents=True)
        (where / "train.csv").write_text("\n".join(lines))


def test_devices_with_tables_train_and_one_without_a_column_is_refused(tmp_path):
    write_devices(tmp_path)
    fleet = tmp_path / "four.toml"
    fleet.write_text('[[group]]\nname = "all"\ncount = 4\nmemory = "4 GB"\nlink = "100 Mbit/s"\nspeed = 1.0\n')
    keys = {
        "task": "table",
        "task-arguments": "columns = ['height', 'weight'], label = 'kind'",
        "partition": "own",
        "test-fraction": 0.25,
        "data-dir": str(tmp_path),
        "fleet": str(fleet),
        "family-arguments": "hidden = [8]",
        "strategy": "heterofl",
        "devices": 4,
        "devices-per-round": 4,
        "rounds": 4,
        "local-epochs": 4,
        "batch-size": 8,
        "output-dir": str(tmp_path / "runs"),
        "seed": 1,
    }
    config = RunConfig.from_run_config({**keys, "run-name": "one"})
    run_dir = run(simulated_grid(), config)
    last = read_rounds(run_dir)[-1]
    assert (last.devices_replied, last.devices_refused, last.scored_devices) == (3, 1, 3)
    assert last.score > 0.85
    [outcome] = {device.outcome for device in read_devices(run_dir) if device.device == 3}
    assert "train.csv:1: no column 'height', there are 'length', 'weight', 'kind'" in outcome


def test_a_test_file_that_the_arguments_do_not_name_is_not_passed_over(tmp_path):
    rows = "".join(f"{n},{'cat' if n % 2 else 'dog'},x,{n / 2}\n" for n in range(20))
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text("weight,kind,note,height\n" + rows)
    with pytest.raises(ValueError, match=r"test\.csv is not read.* add test = 'test\.csv', or test_share = 0\.2"):
        load(str(tmp_path), ARGUMENTS)
    given = ARGUMENTS.model_dump()
    (tmp_path / "train.csv").rename(tmp_path / "more.csv")
    assert len(load(str(tmp_path), TableArguments(columns=("height",), label="kind", train="test.csv")).test) == 4
    (tmp_path / "more.csv").rename(tmp_path / "train.csv")
    assert len(load(str(tmp_path), TableArguments(**given | {"test": "test.csv"})).test) == 20
    assert len(load(str(tmp_path), TableArguments(**given | {"test_share": 0.2})).test) == 4
