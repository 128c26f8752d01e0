"""Hours of the day, such as "22:00-06:00", as owners and fleet files write them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

DAY_SECONDS = 24 * 3600


def _hours(text: str) -> str:
    if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", text) or text[:5] == text[6:]:
        raise ValueError('must be two different times of a day, such as "22:00-06:00"')
    return text


Hours = Annotated[str, Field(max_length=11), AfterValidator(_hours)]


def seconds_until(hours: str, day_seconds: float) -> float:
    """Return how long it takes until these hours begin; 0 within them.

    Args:
        hours: such as "22:00-06:00".
        day_seconds: since midnight.
    """
    begin, end = (3600 * int(hours[at : at + 2]) + 60 * int(hours[at + 3 : at + 5]) for at in (0, 6))
    if (day_seconds - begin) % DAY_SECONDS < (end - begin) % DAY_SECONDS:
        return 0.0
    return (begin - day_seconds) % DAY_SECONDS
