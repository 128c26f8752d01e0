"""RaFL's search (Eq. 2): the best personal model for a device under what the knowledge network leaves of its budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost
from wildflower.models.elastic import ElasticFamily, ElasticSpace
from wildflower.models.family import FAMILIES
from wildflower.models.space import Space
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.strategies.evolution import EvolutionSearch, Picks
from wildflower.strategies.fleet_search import find_priced
from wildflower.strategies.method import Setup
from wildflower.strategies.predictor import MIN_PAIRS, fit_predictor, is_of_supernet, load_pairs
from wildflower.strategies.pricing import fits
from wildflower.strategies.rafl.rafl_params import RaFLParams
from wildflower.strategies.rafl.two_networks import TwoNetworks
from wildflower.strategies.search import ExactSearch, PoolSearch


class PersonalSearch:
    """Finds personal models, the same for a device and a budget in every round.

    pairs: sub-networks of the supernet and their measured accuracies.
    """

    def __init__(
        self, params: RaFLParams, networks: TwoNetworks, pairs: tuple[list[Picks], list[float]] = ([], [])
    ) -> None:
        self.params, self.networks, self.pairs = params, networks, pairs
        self.space, self.settings = networks.space, networks.settings

    def log_limits(self) -> None:
        """Log in what the search falls short of what was asked for."""
        if isinstance(self.searcher, ExactSearch) and not self.searcher.exact:
            log.info("The search is thinned out, so that a little more may fit than is found")
        if isinstance(self.searcher, EvolutionSearch) and not self.pairs[0]:
            log.info("The search is for the most multiplications: no accuracies of sub-networks lie beside the weights")
        elif isinstance(self.searcher, EvolutionSearch) and not self._predicts:
            log.info(
                "The search is for the most multiplications: accuracies of %s sub-networks lie beside the weights, and "
                "a predictor needs %s: measure more, as with wildflower supernet --pairs 200",
                len(self.pairs[0]),
                MIN_PAIRS,
            )

    @property
    def remedy(self) -> str:
        """Return what makes smaller personal models possible."""
        if isinstance(self.space, ElasticSpace):
            return "smaller options in family-arguments, such as depths and expand_ratios (docs/supernets.md)"
        return f"smaller shares in rafl.shares = {', '.join(f'{share:g}' for share in self.params.shares)!r}"

    @property
    def _predicts(self) -> bool:
        """Whether there are enough measured accuracies to predict others from."""
        return len(self.pairs[0]) >= MIN_PAIRS

    @cached_property
    def searcher(self) -> ExactSearch | PoolSearch | EvolutionSearch:
        """The search itself; made when it is first asked."""
        if self.params.searcher == "pool":
            return PoolSearch(self.space, self.networks.personal_cost)
        batch_size, optimizer = self.settings.training.examples_at_once, self.settings.optimizer
        if self.params.searcher in ("auto", "exact"):
            try:
                # Eq. 2 is an argmax.
                return ExactSearch(self.space, batch_size=batch_size, optimizer=optimizer, tolerance=0.0)
            except ValueError as error:
                if self.params.searcher == "exact":
                    raise ValueError(f"rafl.searcher = 'exact': {error}; 'pool' needs no chain of blocks") from None
                log.warning("Personal models are drawn into a pool, where the exact search cannot be: %s", error)
                return PoolSearch(self.space, self.networks.personal_cost)
        score = None
        if self._predicts:
            predictor = fit_predictor(self.space, *self.pairs, self.settings.seed)
            if predictor.rank_correlation > 0:
                log.info("Accuracies are predicted, with a rank correlation of %.2f", predictor.rank_correlation)
            else:  # also NaN, where all predictions or all accuracies that were held out are alike
                log.warning(
                    "Accuracies are predicted with a rank correlation of %.2f: the predictor orders sub-networks no "
                    "better than chance does, so that devices get what a random choice would give. Measure more "
                    "sub-networks, as with wildflower supernet --pairs 200, train the supernet for longer, or set "
                    "rafl.searcher = 'exact'",
                    predictor.rank_correlation,
                )
            score = predictor.score
        return EvolutionSearch(self.space, batch_size=batch_size, optimizer=optimizer, score=score)

    def find(self, device: int, budget: Budget, *, grows: bool = True) -> Architecture | None:
        """Return the best architecture for a budget (Eq. 2); None: none fits. grows: whether a pool may grow by it."""

        def price(found: Architecture) -> Cost:
            return self.networks.price(found, first=True)

        left = self.networks.left_for_personal(budget)
        found = None if left is None else find_priced(partial(self._find, device, grows), price, budget, left)
        if found is not None:
            return found
        smallest = self.space.smallest()
        return smallest if self._few(smallest, device) and fits(price(smallest), budget) else None

    def _few(self, architecture: Architecture, device: int) -> bool:
        """Whether a personal model takes no more multiplications than its device may spend."""
        most = self.max_macs(device)
        if most is None or not isinstance(self.searcher, EvolutionSearch):
            return True
        return self.searcher.prices.macs(self.space.smallest_picks()) <= most

    def max_macs(self, device: int) -> int | None:
        """Return the multiplications that a device's personal model may take, the same in every round; None: any."""
        if not self.params.macs:
            return None
        return int(self.settings.rng(0, 21, device).uniform(self.params.macs[0], self.params.macs[-1]))

    def _find(self, device: int, grows: bool, left: Budget) -> Architecture | None:
        """What the searcher finds for a device under what the knowledge network leaves."""
        if isinstance(self.searcher, PoolSearch) and not grows:
            return self.searcher.largest(left)
        if isinstance(self.searcher, EvolutionSearch):
            return self._evolved(device, left)
        return self.searcher.find(left, self.settings.rng(0, 8, device))

    @cached_property
    def _evolved(self) -> Callable[[int, Budget], Architecture | None]:
        """The evolution's answers, each of which takes up to a second, and is asked for again in every evaluation."""
        searcher = self.searcher
        assert isinstance(searcher, EvolutionSearch)

        def find(device: int, left: Budget) -> Architecture | None:
            return searcher.find(left, self.settings.rng(0, 8, device), self.max_macs(device))

        return lru_cache(maxsize=4096)(find)


def space_of(family: Family, params: RaFLParams) -> Space | ElasticSpace:
    """Return where personal models are searched; ValueError where the family has no such space."""
    if params.space == "shares":
        with raised_as(ValueError, f"rafl.shares = {list(params.shares)}: "):
            return Space.of(family, sorted(params.shares), None)
    if not isinstance(family, ElasticFamily):
        able = ", ".join(name for name, kind in FAMILIES.items() if issubclass(kind, ElasticFamily))
        raise ValueError(
            f"rafl.space = 'once-for-all': {family.name} has no space of its own: use one of {able}, or rafl.space = "
            "'shares'"
        )
    return ElasticSpace.of(family)


def measured_pairs(setup: Setup, space: Space | ElasticSpace) -> tuple[list[Picks], list[float]]:
    """Return sub-networks and their accuracies, as `wildflower supernet` writes them beside the weights.

    There are none without such a file.

    ValueError where what lies there is something else, or of a space in which this run does not search.
    """
    file = None if setup.initial_file is None else setup.initial_file.with_suffix(".json")
    if file is None or not file.is_file():
        return [], []
    if not isinstance(space, ElasticSpace):
        if not is_of_supernet(file):
            return [], []
        raise ValueError(
            f"rafl.searcher = 'evolution': the accuracies in {file} are of sub-networks of the once-for-all space, and "
            "rafl.space = 'shares' has others: set rafl.space = 'once-for-all', or rafl.searcher = 'exact'"
        )
    with raised_as(ValueError, "rafl.searcher = 'evolution': "):
        return load_pairs(file, space)
