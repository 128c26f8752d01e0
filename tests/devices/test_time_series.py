import numpy as np
import pytest

from wildflower.devices.time_series import LINK_COLUMNS, MEMORY_COLUMNS, Trace, read_trace


def write(folder, text):
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_constant_within_a_second_and_starts_over():
    trace = Trace.of([1.0, 2.0, 3.0])
    assert [trace.at(second) for second in (0, 0.99, 1, 2.5, 3, 4.2, 3_000_002)] == [1, 1, 2, 3, 1, 2, 3]


def test_an_offset_moves_the_start_and_shares_the_values():
    trace = Trace.of([1.0, 2.0, 3.0])
    later = trace.starting_at(2)
    assert [later.at(second) for second in (0, 1, 1.5, 2, 3)] == [3, 1, 1, 2, 3]
    assert later.values is trace.values


def test_a_link_file_gives_mbit_per_s(tmp_path):
    trace = read_trace(write(tmp_path, "seconds,mbit_per_s\n0,2.5\n1,0\n2,1e1\n"), LINK_COLUMNS)
    np.testing.assert_array_equal(trace.values, [2.5, 0.0, 10.0])
    np.testing.assert_array_equal(trace.cumulative, [0.0, 2.5, 2.5, 12.5])


@pytest.mark.parametrize(("unit", "factor"), [("kbit_per_s", 0.001), ("gbit_per_s", 1000.0)])
def test_the_header_gives_the_unit_of_a_link(tmp_path, unit, factor):
    assert read_trace(write(tmp_path, f"seconds,{unit}\n0,4\n"), LINK_COLUMNS).at(0) == pytest.approx(4 * factor)


@pytest.mark.parametrize(("unit", "factor"), [("bytes", 1), ("mb", 10**6), ("gb", 10**9), ("mib", 2**20)])
def test_the_header_gives_the_unit_of_memory(tmp_path, unit, factor):
    assert read_trace(write(tmp_path, f"seconds,{unit}\n0,4\n"), MEMORY_COLUMNS).at(0) == 4 * factor


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: '': must be 'seconds,<unit>'"),
        ("0,1\n1,2\n", "line 1: '0,1': must be 'seconds,<unit>'"),
        ("seconds,mbits\n0,1\n", "did you mean 'mbit_per_s'"),
        ("seconds,mbit_per_s,note\n0,1,x\n", "line 1"),
        ("seconds,mbit_per_s\n", "the trace is empty"),
        ("seconds,mbit_per_s\n0,1\n2,1\n", "line 3: second '2': must be 1; a trace has one line per second, no gaps"),
        ("seconds,mbit_per_s\n0,1\n0,1\n", "line 3: second '0': must be 1"),
        ("seconds,mbit_per_s\n5,1\n6,1\n", "line 2: second '5': must be 0"),
        ("seconds,mbit_per_s\n0,1\n\n2,1\n", "line 3: '': must be two values, 'seconds,mbit_per_s'"),
        ("seconds,mbit_per_s\n0,1,2\n", "line 2: '0,1,2': must be two values"),
        ("seconds,mbit_per_s\n0,-1\n", "line 2: mbit_per_s = '-1': must be a finite number of at least 0"),
        ("seconds,mbit_per_s\n0,nan\n", "line 2: mbit_per_s = 'nan': must be a finite number"),
        ("seconds,mbit_per_s\n0,1\n1,inf\n", "line 3: mbit_per_s = 'inf': must be a finite number"),
        ("seconds,mbit_per_s\n0,fast\n", "line 2: mbit_per_s = 'fast': must be a finite number"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_line(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_trace(path, LINK_COLUMNS)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))


def test_a_missing_file_is_a_value_error_with_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.csv: cannot read this trace"):
        read_trace(tmp_path / "nowhere.csv", LINK_COLUMNS)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot read this trace"):
        read_trace(path, LINK_COLUMNS)


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path):
    path = tmp_path / "marked.csv"
    path.write_text("seconds,mbit_per_s\n0,2\n", encoding="utf-8-sig")
    assert read_trace(path, LINK_COLUMNS).values.tolist() == [2.0]
