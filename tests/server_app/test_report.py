import base64
import html
import io
import json
import re
from functools import partial

import plotly.graph_objects as go
import pytest
from fake_runs import CONFIG, a_device, a_round, three_rounds
from page_figures import charts_of, split
from plotly.offline import get_plotlyjs
from rich.console import Console

from wildflower.launch.showing import Lines, summary_rows
from wildflower.server_app import report_maps
from wildflower.server_app.activity import gather_activity
from wildflower.server_app.journal import Journal
from wildflower.server_app.label_spread import Labels
from wildflower.server_app.report import write_report
from wildflower.server_app.report_maps import Shades
from wildflower.server_app.run_folder import JournalError, read_devices, read_rounds, read_summary
from wildflower.server_app.run_records import DeviceRecord, RoundRecord
from wildflower.server_app.summary import global_model
from wildflower.server_app.tables import frame_of
from wildflower.server_app.units import percent
from wildflower.strategies.heterofl import HeteroFL
from wildflower.strategies.local import LocalOnly

EVIL = "<script>alert('1')</script>&"


def device(number: int, round: int, **changes) -> DeviceRecord:
    return DeviceRecord.model_validate(a_device(round, number, **changes))


def test_the_page_needs_no_network_and_has_the_figures(tmp_path):
    three_rounds(tmp_path).finish("finished")
    page = (tmp_path / "report.html").read_text()
    rest, figures, library = split(page)
    assert not re.search(r"<(link|img|iframe)|src=|https?://|url\(", rest)
    assert "plotly.js" in library[:200]
    assert len(page) < 5_000_000
    for figure in ("30 %", "best 30 % in round 3", "3 min", "4.5 s", "3 late, 3 failed", "failed: no memory"):
        assert figure in rest
    texts = charts_of(page)["Who trained what when: device by round"].texts
    assert "device 2 (small), round 3: 1 failed" in texts
    assert "device 0 (small), round 2: 1 trained, 500 parameters" in texts
    for figure in figures:
        for trace in figure["traces"]:
            trace.pop("colorscale", None)
        go.Figure({"data": figure["traces"], "layout": figure["layout"]})  # ValueError where Plotly would not take it


def test_the_page_brings_plotlys_script_whole(tmp_path):
    three_rounds(tmp_path).finish("finished")
    assert split((tmp_path / "report.html").read_text())[2] == get_plotlyjs()


def test_what_it_cost_and_which_models_were_trained_over_time(tmp_path):
    three_rounds(tmp_path).finish("finished")
    charts = charts_of((tmp_path / "report.html").read_text())
    in_all = charts["Bytes in all"]
    assert {name: trace["y"] for name, trace in zip(in_all.names, in_all.traces, strict=True)} == {
        "training, down": [1000, 2000, 3000],
        "training, up": [900, 1800, 2700],
        "statistics, down": [300, 600, 900],
        "statistics, up": [20, 40, 60],
        "scoring, down": [5000, 10000, 15000],
    }
    assert charts["Simulated minutes in all"].traces[0]["y"] == [1, 2, 3]
    delivered, _ = charts["Accuracy over traffic"].traces
    assert delivered["x"] == [1900, 3800, 5700]
    (bars,) = charts["Trained models by size"].traces
    assert (bars["x"], bars["y"]) == ([1, 2, 3], [1, 1, 1])
    assert charts["Trained models by size"].names == ["500 parameters"]


def test_models_of_near_sizes_are_told_apart(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    sizes = (1_626_442, 1_631_007)
    journal.write_round(a_round(1), [a_device(1, number, parameters=size) for number, size in enumerate(sizes)])
    journal.finish("finished")
    shown = charts_of((tmp_path / "report.html").read_text())["Trained models by size"]
    assert shown.names == ["1,626,442 parameters", "1,631,007 parameters"]
    assert [trace["y"] for trace in shown.traces] == [[1], [1]]


def test_the_page_says_what_happened_whether_that_is_good_and_what_to_try(tmp_path):
    journal = Journal.open(tmp_path, CONFIG | {"deliver": "largest"}, resume=False)
    for number in range(1, 11):
        tiers = {"large": 0.05 * number, "small": 0.02 * number}
        devices = [a_device(number, 0), a_device(number, 1, outcome="late"), a_device(number, 2, tier="large")]
        score = {"delivered_score": 0.04 * number, "delivered_score_by_tier": tiers}
        journal.write_round(a_round(number, **score), devices)
    labels = Labels(classes=["a", "b"], counts=[[3, 1], [3, 3]], tiers=["small", "small"], devices=2)
    (tmp_path / "labels.json").write_text(labels.model_dump_json())
    journal.finish("finished")
    page = (tmp_path / "report.html").read_text()
    told = re.findall("<li>([^<]*)</li>", page.partition("What happened")[2].partition('<div class="cards">')[0])
    assert [html.unescape(sentence) for sentence in told] == [
        "3 devices learned digits with heterofl in 10 rounds: 20 trainings, 10 missed.",
        "It took 15 s on this machine and 10 min on the clock of the simulated devices, and 19 kB of training "
        "travelled.",
        # Means of the last two evaluations: 0.38 delivered, 0.475 and 0.19 by tier. Six of ten examples are of class a.
        "The model that a device would be given now has accuracy 38 % on average over all devices.",
        "That is no more than the baseline: always the commonest class would have 60 %.",
        "Devices of tier large get the best models (47.5 %), those of small the worst.",
        "33 % of the trainings were missed, most often so: late",
        "The score was still rising at the end: try more rounds (rounds = 20).",
        'Give every device the best model that fits it and not the largest: deliver = "best".',
        "Give devices of tier small more memory, or compare with one model that all devices can train: strategy = "
        '"one-model".',
        "One seed tells little: wildflower sweep EXPERIMENT.toml --seeds 1-3 repeats the run with three.",
    ]
    assert charts_of(page)["Accuracy over rounds"].traces[-1]["y"] == [0.6, 0.6]
    assert "the mean, over all devices of the fleet, of the score of the model" in page


@pytest.mark.parametrize(
    ("scores", "losses", "falls"),
    [
        ([0.5, 0.85, 0.7, 0.73], [1.0, 0.5, 0.9, 1.1], True),
        ([0.5, 0.85, 0.7, 0.73], [1.0, 0.5, 0.9, 0.9], False),  # less than twice the loss
        ([0.5, 0.85, 0.7, 0.78], [1.0, 0.5, 0.9, 1.1], False),  # by less than ten points
        ([0.85, 0.85, 0.85, 0.85], [0.5, 0.5, 0.9, 2.0], False),
    ],
)
def test_a_score_that_has_fallen_while_the_loss_rose_is_told(tmp_path, scores, losses, falls):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    for number, (score, loss) in enumerate(zip(scores, losses, strict=True), start=1):
        journal.write_round(a_round(number, score=score, delivered_score=score, loss=loss), [a_device(number, 0)])
    journal.finish("finished")
    told = (
        "The score was 85 % in round 2, and the loss has more than doubled since: try a smaller learning-rate, or "
        "fewer local-epochs."
    )
    assert (told in html.unescape((tmp_path / "report.html").read_text())) == falls


def rows_of(page, title):
    """The rows of the first table below a heading, by their heads."""
    table = page.partition(f"<h2>{title}</h2>")[2].partition("</table>")[0]
    heads = re.findall("<th[^>]*>([^<]*)</th>", table)
    rows = [re.findall("<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr")[2:]]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_which_devices_got_what_and_why(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    budget = a_device(1, 0)["budget"]
    small = {"budget": budget | {"download_bytes": 2500, "upload_bytes": 2500}, "predicted_memory_bytes": 10**5}
    poor = {"parameters": None, "predicted_memory_bytes": None, "outcome": "skipped: no architecture fits"}
    devices = [
        a_device(1, 0, tier="large", parameters=900),
        a_device(1, 1, **small),
        a_device(1, 2),
        a_device(1, 3, tier="tiny", **poor),
    ]
    tiers = {"large": 0.5, "small": 0.25}
    journal.write_round(a_round(1, delivered_score_by_tier=tiers, score_by_device={1: 0.125}), devices)
    journal.finish("finished")
    page = (tmp_path / "report.html").read_text()
    large, middle, tiny = rows_of(page, "Which devices got what, and why")
    assert (large["tier"], large["devices"], large["memory"], large["link"]) == ("large", "1", "1 MB", "no limit")
    assert (large["model, parameters"], large["what binds"], large["score"]) == ("900", "nothing", "50 %")
    assert (middle["devices"], middle["link"], middle["memory it takes"]) == ("2", "2.5 kB", "50 %")
    assert (tiny["what binds"], tiny["trained"], tiny["skipped"]) == ("no model fits", "", "1")
    one_by_one = page.partition("4 devices one by one")[2].partition("</details>")[0]
    assert "<tr><td>1</td><td>small</td><td class=n>1 MB</td><td class=n>2.5 kB</td><td class=n>500</td>" in one_by_one
    assert "<td class=n>link, down</td><td class=n>12.5 %</td>" in one_by_one


class Alone(LocalOnly):
    """A method from outside whose models stay on devices."""


class Cut(HeteroFL):
    """A method from outside with a whole model."""


@pytest.mark.parametrize(
    ("strategy", "saved", "name"),
    [
        ("local", False, "mean of the devices' models"),
        ("spatl", False, "mean of the devices' models"),
        (f"{__name__}:Alone", False, "mean of the devices' models"),
        (f"{__name__}:Cut", False, "whole model"),
        ("rafl", True, "global model"),
        ("lotteryfl", True, "whole model"),
        ("heterofl", False, "whole model"),
    ],
)
def test_a_method_whose_models_stay_on_devices_has_no_whole_model(strategy, saved, name, tmp_path):
    journal = Journal.open(tmp_path, CONFIG | {"strategy": strategy}, resume=False)
    if saved:
        (tmp_path / "models").mkdir()
    journal.write_round(a_round(1), [a_device(1, 0)])
    journal.finish("finished")
    named = partial(global_model, tmp_path, {"strategy": strategy})
    page = (tmp_path / "report.html").read_text()
    assert ("whole model" in split(page)[0]) is (name == "whole model")
    names = charts_of(page)["Accuracy over rounds"].names
    assert names == ["delivered", *([name] if named() else [])]
    # The terminal has the mean's name as well.
    said = io.StringIO()
    Lines(Console(file=said, width=200), total=6, earlier=0, named=named).rounds(read_rounds(tmp_path))
    assert f", {name} " in said.getvalue()
    rows = dict(summary_rows(read_summary(tmp_path), virtual_clock=True, whole=named()))
    assert name in rows
    assert ("whole model" in rows) is (name == "whole model")


def test_no_tier_is_worst_where_scores_differ_in_the_last_bits_alone(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1, delivered_score=0.9, delivered_score_by_tier={"a": 0.1 + 0.2, "b": 0.3}), [])
    journal.finish("finished")
    rows = summary_rows(read_summary(tmp_path), virtual_clock=True, whole="whole model")
    assert [row for row in rows if row[0].startswith("  tier")] == [("  tier a", "30 %"), ("  tier b", "30 %")]
    assert "Devices of all tiers get equally good models." in (tmp_path / "report.html").read_text()


def test_every_table_is_there_for_a_paper_and_every_chart_as_svg(tmp_path):
    three_rounds(tmp_path).finish("finished")
    rest, figures, _ = split((tmp_path / "report.html").read_text())
    assert rest.count("data-svg=") == len(figures)
    for ending in ("csv", "tex", "md"):
        assert len(re.findall(rf'download="[^"]*\.{ending}"', rest)) == rest.count("<table>")
    letters = dict(re.findall(r'download="tiers\.(\w+)"\s*href="data:text/plain;base64,([^"]*)"', rest))
    tiers = {ending: base64.b64decode(text).decode() for ending, text in letters.items()}
    assert tiers["csv"].splitlines()[0].startswith('tier,devices,memory,link,"model, parameters"')
    assert r"90 \%" in tiers["tex"]
    assert tiers["md"].startswith("| tier | devices | memory |")


def test_very_many_sizes_keep_three_digits(monkeypatch):
    monkeypatch.setattr("wildflower.server_app.activity.MAX_SIZES", 2)
    records = [device(number, 1, parameters=size) for number, size in enumerate((123_456, 123_999, 77_777))]
    assert gather_activity(records, rounds=1).sizes == {0: {123_000: 1, 124_000: 1, 77_800: 1}}
    assert gather_activity(records[:2], rounds=1).sizes == {0: {123_456: 1, 123_999: 1}}


def test_classes_and_devices_over_time(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    for number in (1, 2, 3):
        scores = {} if number == 2 else {"accuracy_by_class": {"cat": 0.25 * number, "<dog>": 0.5}}
        devices = {} if number == 2 else {"score_by_device": {0: 0.1 * number, 7: 0.5}}
        personal = {"personal_score_by_device": {7: 0.75}} if number == 3 else {}
        journal.write_round(a_round(number, **scores, **devices, **personal), [a_device(number, 0)])
    journal.finish("finished")
    charts = charts_of((tmp_path / "report.html").read_text())
    (classes,) = charts["Accuracy of the whole model: class by round"].traces
    assert (classes["x"], classes["y"]) == ([1, 3], ["cat", "&lt;dog>"])
    assert classes["text"][0] == ["class cat, round 1: 25 %", "class cat, round 3: 75 %"]
    assert classes["z"] == [[0, 2], [1, 1]]  # of three colors, for 25, 50 and 75 %
    (devices,) = charts["Delivered accuracy: device by round"].traces
    assert devices["y"] == ["0 (small)", "7"]
    assert devices["text"][1][1] == "device 7, round 3: 50 %"
    assert charts["Personal accuracy: device by round"].traces[0]["text"] == [["device 7, round 3: 75 %"]]


def test_of_many_evaluations_some_are_shown_the_last_among_them(monkeypatch):
    monkeypatch.setattr(report_maps, "MAX_CELLS", 8)
    scores = {number: {"a": 0.01 * number, "b": float("nan")} for number in range(1, 10)}
    (chart,) = report_maps._score_map("Accuracy", "class", scores, percent)
    (trace,) = chart.traces
    assert trace["x"] == [3, 6, 9]
    assert trace["text"][0] == ["class a, round 3: 3 %", "class a, round 6: 6 %", "class a, round 9: 9 %"]
    assert trace["z"][1] == [None, None, None]
    assert chart.note == "One of 3 evaluations is shown."


def test_many_sizes_share_few_colors(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1), [a_device(1, number, parameters=1000 * number) for number in range(1, 14)])
    journal.finish("finished")
    shown = charts_of((tmp_path / "report.html").read_text())["Trained models by size"]
    # 1,000 to 13,000 in six equal steps of 2,000: the first has 1,000 to 3,000.
    assert shown.names[0] == "up to 3,000 parameters"
    assert [trace["y"] for trace in shown.traces] == [[3], [2], [2], [2], [2], [2]]


def test_every_round_is_a_line_of_the_data(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1, score=None, delivered_score_by_tier=None), [])
    journal.write_round(a_round(2, delivered_score_by_tier={"a, b": 0.5}), [])
    journal.finish("finished")
    frame = frame_of(read_rounds(tmp_path), RoundRecord)
    assert frame["score"].isna().tolist() == [True, False]
    assert frame["delivered_score_by_tier.a, b"].tolist()[1] == 0.5
    assert frame["server_seconds.finish"].tolist()[1] == 0.1
    assert "delivered_score_by_tier" not in frame


def test_exits_and_personal_accuracy_have_their_charts(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    personal = {"personal_score": 0.625, "personal_score_by_tier": {"weak": 0.5, "strong": 0.75}}
    personal["personal_score_by_network"] = {"second network": 0.125}
    journal.write_round(a_round(1, score_by_exit=[0.25, 0.5], **personal, personal_devices=4, personal_failed=0), [])
    journal.write_round(a_round(2), [])
    journal.finish("finished")
    page = (tmp_path / "report.html").read_text()
    names = ("exit 2", "weak", "strong", "second network")
    for text in ("Accuracy by exit of the global model", "Personal accuracy, on devices", *names):
        assert text in page
    three_rounds(tmp_path / "without").finish("finished")
    page = (tmp_path / "without" / "report.html").read_text()
    assert "by exit" not in page
    assert "Personal" not in page


def test_a_chart_leaves_out_what_never_happened(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    parts = a_round(1)["server_seconds"]
    for number in (1, 2):
        failed = number - 1
        seconds = {part: number * value for part, value in parts.items()} | {"distill": 0.0}
        changes = {"devices_replied": 0, "devices_failed": failed, "server_seconds": seconds}
        changes["metrics"] = {"never_measured": None, "drift": 0.5 if number == 2 else None}
        journal.write_round(a_round(number, **changes), [])
    journal.finish("finished")
    rest, _, _ = split(page := (tmp_path / "report.html").read_text())
    charts = charts_of(page)
    assert charts["Devices per round"].names == ["replied", "sampled", "failed"]
    server = ["assign", "payload", "absorb", "finish", "evaluate", "hypernetworks"]
    assert charts["Seconds per round on the server"].names == server
    assert charts["Drift"].names == ["drift"]
    assert "never" not in rest.lower()


def test_a_part_of_the_servers_time_that_some_rounds_lack_has_its_line(tmp_path):
    """A method names parts of its own, and may do so in some rounds only."""
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    seconds = a_round(1)["server_seconds"]
    journal.write_round(a_round(1, server_seconds=seconds | {"sorting": 1.5}), [])
    journal.write_round(a_round(2, server_seconds=seconds), [])
    journal.finish("finished")
    server = charts_of((tmp_path / "report.html").read_text())["Seconds per round on the server"].texts
    assert "sorting: 1.5 s at round 1" in server
    assert "sorting: 0 s at round 2" in server


def test_devices_that_lost_what_they_kept_are_counted(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1, devices_state_lost=2), [])
    journal.finish("finished")
    devices = charts_of((tmp_path / "report.html").read_text())["Devices per round"].texts
    assert "lost what they kept: 2 at round 1" in devices


def test_tiers_stand_as_in_the_fleet_file(tmp_path, monkeypatch):
    monkeypatch.setattr("wildflower.server_app.activity.MAX_DEVICES", 1)
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    tiers = {"exit 10": 0.4, "exit 2": 0.3}
    devices = [a_device(1, 7, tier="exit 10"), a_device(1, 3, tier="exit 2")]
    personal = {"personal_score": 0.5, "personal_score_by_tier": tiers, "personal_devices": 4}
    journal.write_round(a_round(1, delivered_score_by_tier=tiers, personal_failed=0, **personal), devices)
    journal.finish("finished")
    charts = charts_of((tmp_path / "report.html").read_text())
    for title in ("Accuracy delivered by tier", "Personal accuracy, on devices' own test shards"):
        names = charts[title].names
        assert [name for name in names if name.startswith("exit")] == ["exit 2", "exit 10"]
    assert list(gather_activity(read_devices(tmp_path), rounds=1).rows) == ["exit 2", "exit 10"]


def test_what_is_no_default_is_seen_at_once_with_what_it_means(tmp_path):
    config = CONFIG | {"strategy": "fedrolex", "alpha": 0.5, "note": "of no method"}
    Journal.open(tmp_path, config, resume=False).finish("finished")
    page = write_report(tmp_path).read_text()
    shown, _, folded = page.partition("<h2>Configuration</h2>")[2].partition("<details>")
    assert re.findall(r"<tr><td>([a-z-]+)</td>", shown) == [
        "strategy",
        "fleet",
        "rounds",
        "seed",
        "learning-rate",
        "note",
    ]
    assert "<td>rounds</td><td>3</td><td>Rounds of the whole run</td>" in shown
    assert re.findall(r"<tr><td>([a-z-]+)</td>", folded.partition("</details>")[0]) == ["task", "alpha"]
    assert "2 keys with their default" in folded


def test_every_text_is_escaped(tmp_path):
    run_dir = tmp_path / f"run {EVIL.replace('/', '')}"
    journal = Journal.open(run_dir, CONFIG | {"note": EVIL, EVIL: 1, "fleet": EVIL}, resume=False)
    journal.write_round(
        a_round(1, strategy=EVIL, task=EVIL, delivered_score_by_tier={EVIL: 0.5}, metrics={EVIL: 1.0}),
        [a_device(1, 0, tier=EVIL, outcome=f"refused: {EVIL}"), a_device(1, 1, tier=EVIL, architecture={EVIL: 1})],
    )
    journal.finish("failed", f"ValueError: {EVIL}")
    page = (run_dir / "report.html").read_text()
    rest, _, _ = split(page)
    assert len(re.findall("<script", page)) == len(re.findall("<script", rest)) == 3  # figures, library, drawing
    assert "ValueError: &lt;script&gt;" in rest
    markup = rest.partition("</main>")[0].partition("</style>")[2]
    assert not re.search(r"&(?!amp;|lt;|gt;|#34;|#39;)", markup)
    assert charts_of(page)["Accuracy delivered by tier"].names == [EVIL]


def test_a_run_without_rounds_has_a_page(tmp_path):
    Journal.open(tmp_path, CONFIG, resume=False)
    page = write_report(tmp_path).read_text()
    assert "unfinished" in page
    assert "learning-rate" in page


def test_a_run_that_never_evaluated_has_a_page(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    empty = {"score": None, "loss": None, "score_by_tier": None, "memory_utilisation": None}
    journal.write_round(a_round(1, **empty), [a_device(1, 0, architecture=None, parameters=None, outcome="late")])
    journal.finish("finished")
    page = (tmp_path / "report.html").read_text()
    assert "nothing was measured" in page
    assert "Accuracy by tier" not in page


def test_a_method_has_its_own_figures(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    seconds = a_round(1)["server_seconds"] | {"distill": 2.5}
    for number in (1, 2):
        metrics = {"distillation_steps_per_second": 37.0, "distillation_mutual_information_nats": 0.25 * number}
        changes = {"metrics": metrics, "devices_below_smallest": 2, "server_seconds": seconds}
        journal.write_round(a_round(number, **changes), [a_device(number, 0)])
    journal.finish("finished")
    page = (tmp_path / "report.html").read_text()
    assert "mutual information nats: 0.5 at round 2" in charts_of(page)["Distillation mutual information nats"].texts
    assert "The same in every round: Distillation steps per second: 37." in page
    assert "Devices per round: replied 2, sampled 3, failed 1, below the smallest 2" in page
    assert "distill 2.5 s" in page
    three_rounds(tmp_path / "plain").finish("finished")
    assert "steps per second" not in (tmp_path / "plain" / "report.html").read_text()


def test_no_report_of_a_folder_without_a_run(tmp_path):
    with pytest.raises(JournalError, match="is not the folder of a run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_huge_fleet_is_shown_by_tier_and_stays_small(tmp_path):
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    for number in range(1, 41):
        devices = [a_device(number, 1000 * number + index, tier=f"tier {index % 4}") for index in range(50)]
        journal.write_round(a_round(number), devices)
    journal.finish("finished")
    page = (tmp_path / "report.html").read_text()
    rest, figures, _ = split(page)
    assert "2,000 trained</strong><small>of 2,000 that were asked" in rest
    assert "tier tier 3, round 40: 12 trained" in charts_of(page)["Who trained what when: tier by round"].texts
    assert "device 1000" not in page
    assert len(rest) + len(json.dumps(figures)) < 150_000


def test_activity_adds_up_by_device_and_leaves_out_an_unfinished_round():
    records = [
        device(4, 1, parameters=100),
        device(4, 2, parameters=300),
        device(4, 3, outcome="late"),
        device(9, 2, outcome="refused: needs 12,345 bytes"),
        device(8, 2, outcome="refused: needs 999 bytes"),
        device(7, 4),
    ]
    activity = gather_activity(records, rounds=3)
    assert list(activity.rows) == [4, 8, 9]
    assert activity.rows[4].outcomes == {"trained": 2, "late": 1}
    assert activity.rows[4].mean_parameters == 200
    assert activity.rows[4].down_bytes == 4000
    assert activity.rows[4].memory_share == pytest.approx(1.8)
    assert activity.cells[4, 1].mean_parameters == 300
    assert activity.reasons == {"refused: needs # bytes": 2, "late": 1}
    assert (activity.columns, len(activity.asked), len(activity.trained), activity.by_tier) == (3, 3, 1, False)


def test_long_runs_share_columns():
    activity = gather_activity([device(0, number) for number in range(1, 302)], rounds=301)
    assert (activity.rounds_per_column, activity.columns) == (3, 101)
    assert activity.cells[0, 100].total == 1
    assert activity.cells[0, 0].total == 3


def test_tiers_take_over_above_the_limit(monkeypatch):
    monkeypatch.setattr("wildflower.server_app.activity.MAX_DEVICES", 2)
    records = [device(number, 1, tier="ab"[number % 2]) for number in range(3)]
    assert list(gather_activity(records[:2], rounds=1).rows) == [0, 1]
    activity = gather_activity(records, rounds=1)
    assert activity.by_tier
    assert {name: tally.total for name, tally in activity.rows.items()} == {"a": 2, "b": 1}
    assert activity.cells["a", 0].total == 2


def test_shades():
    few = Shades([5, 1, 5])
    assert few.key(str) == [("s0", "1"), ("s5", "5")]
    assert [few.color(size) for size in (1, 5)] == ["s0", "s5"]
    assert Shades([7]).color(7) == "s5"
    many = Shades(range(1, 14))
    assert many.key(str)[0] == ("s0", "up to 3.0")
    assert many.bounds == [3, 5, 7, 9, 11, 13]
    assert [many.color(size) for size in (1, 3, 4, 13)] == ["s0", "s0", "s1", "s5"]


def test_rows_of_a_chart_have_names_of_their_own():
    names = ["Kitchen appliances: toaster", "Kitchen appliances: toaster oven", "phone"]
    assert report_maps.row_names(names) == ["Kitchen appliances: toa…", "Kitchen appliances:… (2)", "phone"]


def test_a_part_whose_name_begins_with_another_ones_keeps_both_columns(tmp_path):
    """What a tier is called is the user's."""
    journal = Journal.open(tmp_path, CONFIG, resume=False)
    journal.write_round(a_round(1, delivered_score_by_tier={"pi": 0.5, "pi.4": 0.75}), [])
    journal.finish("finished")
    [row] = frame_of(read_rounds(tmp_path), RoundRecord).to_dict("records")
    assert (row["delivered_score_by_tier.pi"], row["delivered_score_by_tier.pi.4"]) == (0.5, 0.75)
