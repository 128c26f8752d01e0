"""A few values, or one device, that would make all other inputs alike once they are normalized."""

import numpy as np
import pytest
import torch

from wildflower.tasks import npz, tables
from wildflower.tasks.agreement import Declared, agree
from wildflower.tasks.device_data import Form, Summary, moments_of
from wildflower.tasks.outliers import crowded

SIGNAL = Form(stored="float32", input_shape=(2, 8), labels="classes")


def said(device, inputs, names=("a", "b")):
    return Summary(device=device, examples=len(inputs), form=SIGNAL, label_names=names, moments=moments_of(inputs))


def signals(seed, *, unit=1.0, offset=0.0):
    """(20, 2, 8), of which the second channel has another unit."""
    values = torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(seed))
    values[:, 1] = values[:, 1] * unit + offset
    return values


def agreed(*inputs, declared=Declared()):
    return agree([said(device, each) for device, each in enumerate(inputs)], declared, 1000)


@pytest.mark.parametrize("odd", [{"unit": 1e30}, {"offset": -1e12}, {"unit": 1e5}])
def test_a_device_far_off_all_others_does_not_change_what_they_are_normalized_by(odd):
    honest = [signals(1), signals(2), signals(3)]
    found, unfit = agreed(*honest, signals(4, **odd))
    alone, nobody = agreed(*honest)
    assert (found, nobody) == (alone, {})
    assert list(unfit) == [3]
    assert "channel 1 of its inputs, counted from 0, lies" in unfit[3]
    assert "declare mean and std" in unfit[3]


def test_a_device_far_off_adds_no_labels():
    given = [said(device, signals(device)) for device in range(3)] + [said(3, signals(3, unit=1e9), ("a", "z"))]
    assert agree(given, Declared(), 1000)[0].label_names == ("a", "b")


def test_another_unit_such_as_mv_for_v_is_no_reason():
    _, unfit = agreed(signals(1), signals(2), signals(3), signals(4, unit=900.0))
    assert unfit == {}


def test_it_takes_a_majority_to_rule_a_device_out():
    assert agreed(signals(1), signals(2, unit=1e9))[1] == {}
    assert agreed(signals(1), signals(2), signals(3, unit=1e9), signals(4, unit=1e9))[1] == {}
    assert list(agreed(signals(1), signals(2, unit=1e-9), signals(3, unit=1e9), signals(4))[1]) == [2]


def test_where_most_have_one_value_nobody_is_far_off():
    assert agreed(signals(1, unit=0.0), signals(2, unit=0.0), signals(3))[1] == {}


def test_declared_normalization_holds_for_all():
    declared = Declared(mean=(0.0, 0.0), std=(1.0, 1e9))
    found, unfit = agreed(signals(1), signals(2), signals(3, unit=1e9), declared=declared)
    assert (found.std, unfit) == ((1.0, 1e9), {})


@pytest.mark.parametrize("wrong", [1e30, -99999.0, 3e4])
def test_a_few_wrong_values_are_told(wrong):
    inputs = signals(1)
    assert crowded(inputs) == []
    inputs[3:5, 1] = wrong
    assert crowded(inputs) == [1]


@pytest.mark.parametrize("values", [[0.0] * 90 + [1e9] * 10, [0.0] * 50 + [1.0] * 50, list(range(100))])
def test_zeros_with_a_few_other_values_are_usual(values):
    assert crowded(torch.tensor(values).float()[:, None]) == []


def test_files_of_arrays_say_it_for_all_and_for_one_device(tmp_path):
    inputs = signals(1).numpy()
    inputs[0, 0, 0] = 1e20
    for name in ("train", "test"):
        np.savez(tmp_path / f"{name}.npz", inputs=inputs, labels=np.arange(20) % 2)
    for found in (npz.load(str(tmp_path)), npz.own(str(tmp_path))):
        [remark] = found.remarks
        assert remark.what.startswith("channels half of whose values lie within a hundredth of the deviation")
        assert (remark.count, remark.example) == (2, "channel 0, counted from 0")


def test_tables_name_the_column(tmp_path):
    rows = "".join(f"{n * 0.1},{-999999 if n % 10 == 0 else n},{n % 2}\n" for n in range(100))
    (tmp_path / "train.csv").write_text(f"length,weight,kind\n{rows}")
    arguments = tables.TableArguments(label="kind", columns=("length", "weight"))
    for found in (tables.load(str(tmp_path), arguments), tables.own(str(tmp_path), arguments)):
        [remark] = found.remarks
        assert (remark.count, remark.example) == (1, "weight")
        assert "missing ones" in remark.what
