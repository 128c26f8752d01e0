"""The explorations of RecipFL's paper: what strong devices hold, how many weak and how many strong devices there are.

python -m benchmarks.recipfl.explorations [--jobs 2] [--methods NAME ...]

50 rounds and one seed each. 2 strong devices with half of the data and 100 weak ones, where nothing else is said.
"""

from pathlib import Path

from benchmarks.recipfl.run import METHODS
from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent
COMPARED = ("all-small", "exclusive", "recipfl")


def devices(strong: int, weak: int) -> list[str]:
    """Settings of a fleet of its own."""
    fleet = HERE / "fleets" / f"{strong}-and-{weak}.toml"
    return [f"fleet={fleet}", f"devices={strong + weak}", f"strong.devices={strong}"]


BASE = [f"fleet={HERE / 'fleet.toml'}"]
EXPLORED = {
    "base": BASE,
    "share-0.1": [*BASE, "strong.share=0.1"],
    "share-0.9": [*BASE, "strong.share=0.9"],
    "weak-10": devices(2, 10),
    "weak-1000": devices(2, 1000),
    "strong-5": devices(5, 100),
    "strong-50": devices(50, 100),
}
STUDY = Study(
    HERE / "explorations.toml",
    {f"{place}-{method}": [*sets, *METHODS[method]] for place, sets in EXPLORED.items() for method in COMPARED},
    once=tuple(EXPLORED),
    general=False,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
