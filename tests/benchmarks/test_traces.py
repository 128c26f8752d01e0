import pytest

from benchmarks.model_search import traces
from wildflower.devices.fleet import Fleet

FLEET = """
[[group]]
name = "all"
share = 1
memory = "1 GB"
down_trace = "{folder}/X-driving-down.csv"
up_trace = "{folder}/X-driving-up.csv"
"""


def test_packets_of_1500_bytes_are_counted_by_the_second():
    """Two packets in the first second, none in the second, one in the third: 24,000, 0 and 12,000 bits."""
    assert traces.mbit_per_s(["0", "999", "2000", "3000"]) == [0.024, 0.0, 0.012]
    for lines in ([], ["-1"], ["soon"]):
        with pytest.raises(ValueError):
            traces.mbit_per_s(lines)


def test_what_is_written_is_a_trace_of_a_fleet(tmp_path, monkeypatch):
    (tmp_path / "X-driving.down").write_text("\n".join(str(ms) for ms in range(0, 3000, 4)))
    (tmp_path / "X-driving.up").write_text("\n".join(str(ms) for ms in range(0, 3000, 8)))
    monkeypatch.setattr("sys.argv", ["traces", str(tmp_path), str(tmp_path / "out")])
    traces.main()
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(folder=tmp_path / "out"))
    report = Fleet(file, devices=1, seed=0).report(0, 0.0)
    # A packet every 4 ms is 250 a second: 3 Mbit/s; every 8 ms, 1.5.
    assert (report.down_mbit_per_s, report.up_mbit_per_s) == (3.0, 1.5)
