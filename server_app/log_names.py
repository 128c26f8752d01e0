"""The log of a run on real devices names them: "node 8812... (kitchen)", "device 3 (kitchen)"."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from wildflower.rounds.population import Population

NUMBERS = re.compile(r"\b(node|device)s? \[?(\d{1,20}\b(?:(?:, | and )\d{1,20}\b)*)", re.IGNORECASE)


def with_names(text: str, nodes: Mapping[int, str], devices: Mapping[int, str]) -> str:
    """Return a line of a log with a name behind each number of a node or a device that has one."""

    def name(of: Mapping[int, str], number: re.Match[str]) -> str:
        found = of.get(int(number[0]))
        return f"{number[0]} ({found})" if found else number[0]

    def names(match: re.Match[str]) -> str:
        of = nodes if match[1].lower() == "node" else devices
        start = match.start(2) - match.start()
        return match[0][:start] + re.sub(r"\d+", partial(name, of), match[2])

    return NUMBERS.sub(names, text)


@contextmanager
def naming_devices(population: Population) -> Iterator[None]:
    """Name real devices in what Flower's log is given; the workers of a simulation have no names."""

    def naming(record: logging.LogRecord) -> bool:
        if population.names:
            devices = {state.device: state.name for state in population.newest_reports()}
            record.msg, record.args = with_names(record.getMessage(), population.names, devices), ()
        return True

    logger = logging.getLogger("flwr")
    logger.addFilter(naming)
    try:
        yield
    finally:
        logger.removeFilter(naming)
