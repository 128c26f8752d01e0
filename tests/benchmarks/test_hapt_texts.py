"""HAPT's recordings out of the pickle of a package, of which nothing is run."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks import hapt_texts
from benchmarks.hapt_texts import read_recordings
from tests.programs import run_python
from wildflower.tasks.hapt import CHANNELS

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
    file = folder / hapt_texts.FILE
    file.write_bytes(gzip.compress(content))
    return file


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
    monkeypatch.setattr(hapt_texts, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_recordings(write(tmp_path, dumps({1: [frame(*recording((1, 200)))]})))
    (tmp_path / hapt_texts.FILE).write_bytes(b"not packed")
    with pytest.raises(ValueError, match="Not a gzipped file"):
        read_recordings(tmp_path / hapt_texts.FILE)


@pytest.mark.thorough
def test_reading_imports_nothing_heavy(tmp_path: Path) -> None:
    file = write(tmp_path, dumps({1: [frame(*recording((1, 5)))]}))
    program = (
        "import sys; from pathlib import Path; from benchmarks.hapt_texts import PACKAGE, read_recordings;"
        f"print(len(read_recordings(Path({str(file)!r}))));"
        "print({'datasets', 'pandas', PACKAGE} & set(sys.modules))"
    )
    done = run_python("-c", program)
    assert done.stdout.split() == ["1", "set()"], done.stderr
