"""The cells of the paper's six settings that wildflower/papers/model_search has otherwise than printed, and why.

    python -m benchmarks.model_search.deviations

writes the table in README.md. What is printed is typed in tests/benchmarks/test_model_search_settings.py, which fails
for a difference that is not listed here, and for a listed one that is none.
"""

from pathlib import Path
from typing import NamedTuple

from benchmarks.tables import markdown, write_between

README = Path(__file__).with_name("README.md")


class Deviation(NamedTuple):
    """A cell of a setting.

    printed: None where the paper prints nothing, or where the cell is lost in our copy.
    """

    setting: str
    cell: str
    printed: object
    ours: object
    why: str


LOST = "its cell is lost in our copy of Table 1; "
AS_HETEROFL = LOST + "appendix E gives HeteroFL's hyperparameters"
FALLS = "the rate falls at "
STRETCHED = "; stretched to the printed range"
ROLES = "the installed texts have 448 roles of at least 2,000 characters, and of any length 1,069 that fill a window"
DEALT = (
    "shares of every class are drawn from Dir(0.1), and then devices differ in size; the paper does not say how its "
    "are equal"
)
HEADS = "6 do not divide its hidden size of 256; a head has 64 channels, as in BERT-large"
QUARTER = "halves lead to a hidden size of 512; the printed smallest model of 256 takes 1/4"
TRAVELS = "the smallest whole number of seconds in which the highest rate carries the largest model"
SPEED = "devices differ, and the simulated clock needs a number"
ATT, T_MOBILE = "ATT-LTE-driving-down", "TMobile-LTE-driving-down"

DEVIATIONS = (
    Deviation("s6", "devices", 1128, 448, ROLES),
    Deviation("s1", "local epochs", None, 5, AS_HETEROFL),
    Deviation("s2", "local epochs", None, 1, LOST + "appendix E gives FedRolex's hyperparameters, whose code has 1"),
    Deviation("s3", "local epochs", None, 5, AS_HETEROFL),
    Deviation("s6", "local epochs", None, 1, LOST + "nothing else says it, and this is the least"),
    *(Deviation(name, "shards of equal size", True, False, DEALT) for name in ("s1", "s2", "s4")),
    Deviation("s6", "heads of the smallest model", 6, 4, HEADS),
    Deviation("s6", "shares", (0, 0.5, 1), (0, 0.25, 0.5, 1), QUARTER),
    Deviation("s3", "rounds", None, 400, FALLS + "150 and 250"),
    Deviation("s4", "rounds", None, 800, FALLS + "300 and 500, as in setting 1"),
    Deviation("s5", "rounds", None, 500, "the cycle of the cosine"),
    Deviation("s6", "rounds", None, 30, FALLS + "10 and 20"),
    Deviation("s5", "logs", ("Wi-Fi",), (ATT,), "the authors' logs are not published" + STRETCHED),
    Deviation("s6", "logs", ("4G/LTE", "Wi-Fi"), (T_MOBILE, ATT), "those that ../shared/traces has" + STRETCHED),
    *(
        Deviation(name, "seconds that weights may travel", None, 2.0, TRAVELS)
        for name in ("s1", "s2", "s3", "s4", "s5")
    ),
    Deviation("s6", "seconds that weights may travel", None, 89.0, TRAVELS),
    *(Deviation(f"s{number}", "speed, of 100 GFLOP/s", None, (0.5, 2.0), SPEED) for number in range(1, 7)),
)


def table() -> str:
    """One row per difference, of all settings that have it."""
    settings: dict[tuple[str, str, str, str], list[str]] = {}
    for one in DEVIATIONS:
        row = one.cell, shown(one.printed), shown(one.ours), one.why
        settings.setdefault(row, []).append(one.setting.removeprefix("s"))
    rows = [[cell, ", ".join(of), *rest] for (cell, *rest), of in settings.items()]
    return markdown(("cell", "settings", "printed", "ours", "why"), rows)


def shown(value: object) -> str:
    """A value as it stands in the table."""
    if value is None:
        return "not printed"
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,g}" if isinstance(value, int | float) else str(value)


def main() -> None:
    """Write the table."""
    print(write_between(README, "deviations", table()))


if __name__ == "__main__":
    main()
