"""Rounds with a time budget against rounds that wait, on devices of unequal speeds.

python -m benchmarks.time_budget.run [--jobs 2] [--seeds 1 2] [--methods NAME ...]
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.runs import rounds_of
from benchmarks.studies import Figures, Study, main
from benchmarks.tables import markdown
from wildflower.server_app.run_folder import read_devices

HERE = Path(__file__).resolve().parent
# "deadline" is what there was before: devices train the whole model, and who is late is dropped.
VARIANTS = {
    "waits for all": [],
    "deadline-seconds = 3": ["deadline-seconds=3"],
    "round-seconds = 3": ["budget.round-seconds=3"],
}
MOMENTS = (30, 60, 90, 200, 400)  # simulated seconds at which accuracies are compared


def figures(folder: Path) -> dict:
    """Simulated seconds and accuracy of every evaluation, and what the tiers trained."""
    lines, devices = rounds_of(folder), list(read_devices(folder))
    tiers = {
        tier: [round(mean(d.parameters or 0 for d in of)), sum(d.outcome == "trained" for d in of), len(of)]
        for tier in sorted({d.tier for d in devices if d.tier})
        if (of := [d for d in devices if d.tier == tier])
    }
    curve = [[round(line["simulated_seconds"], 3), line["score"]] for line in lines if line["score"] is not None]
    return {"curve": curve, "tiers": tiers, "rounds": len(lines)}


def at(curve: Sequence[Sequence[float]], seconds: float) -> float | None:
    """The accuracy of the last evaluation by a moment; None where the run was over long before, or none was made."""
    if curve[-1][0] < seconds:
        return None
    return next((score for when, score in reversed(curve) if when <= seconds), None)


def tables(_study: Study, results: dict[str, Figures]) -> str:
    """Time per round and accuracy over simulated time; then what every tier trained. Means over the seeds."""
    rows = []
    for variant, seeds in results.items():
        runs = [*seeds.values()]
        seconds = mean(run["curve"][-1][0] / run["rounds"] for run in runs)
        scores = [[at(run["curve"], moment) for run in runs] for moment in MOMENTS]
        cells = [f"{100 * mean(s):.1f} %" if None not in s else "" for s in scores]  # type: ignore[type-var]
        last = mean(mean(score for _, score in run["curve"][-3:]) for run in runs)
        rows.append([variant, str(len(runs)), f"{seconds:.2f}", *cells, f"{100 * last:.1f} %"])
    moments = [f"after {seconds} s" for seconds in MOMENTS]
    curves = markdown(["", "seeds", "seconds per round", *moments, "last, of 30 rounds"], rows)
    tiers = sorted({tier for seeds in results.values() for run in seeds.values() for tier in run["tiers"]})
    rows = []
    for variant, seeds in results.items():
        rows.append([variant])
        for tier in tiers:
            parameters, trained, orders = zip(*(run["tiers"][tier] for run in seeds.values()), strict=True)
            rows[-1].append(f"{mean(parameters):,.0f} parameters, trained {sum(trained)} of {sum(orders)}")
    return f"{curves}\n\nWhat the tiers trained, and how many of the orders of all seeds were done:\n\n" + markdown(
        ["", *tiers], rows
    )


STUDY = Study(HERE / "table.toml", VARIANTS, figures=figures, table=tables)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
