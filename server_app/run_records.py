"""The lines of a journal, and a summary."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from wildflower.server_app.units import score_format
from wildflower.tasks.metrics import Scale, scale_of

Count = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]  # above 1 when a budget was overrun


class Record(BaseModel):
    """The content of a file of a run, or of one of its lines: every key must be there, no other may.

    Numbers that JSON does not have are written as the strings "NaN", "Infinity" and "-Infinity", and are read back as
    floats.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class TierBudget(Record):
    """The most that devices of a tier have; None is no limit."""

    memory_bytes: int
    payload_bytes: int | None


class RunFile(Record):
    """The content of config.json.

    Attributes:
        config: every key of the run and its value.
        versions: of what results may depend on.
        fleet: the hash of the fleet's files; "" of real devices.
        plugins: hashes of modules from outside, by their names.
        initial: the hash of the file of first weights; "" where they are drawn.
        data: what identifies the data, `Task.identity`; {} where devices hold their own.
        budgets: the most memory and payload that simulated devices of each tier have, `Fleet.most_bytes`.
    """

    model_config = ConfigDict(populate_by_name=True)

    config: dict[str, Any]
    versions: dict[str, str | None]
    seed: int
    fleet: str = Field(alias="fleet-sha256")
    plugins: dict[str, str] = Field({}, alias="plugins-sha256")
    initial: str = Field("", alias="initial-weights-sha256")
    data: dict[str, int | str] = {}
    budgets: dict[str, TierBudget] = {}

    @field_validator("config")
    @classmethod
    def _has_method(cls, config: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(config.get("strategy"), str):
            raise ValueError("must name the run's strategy")
        return config


class RoundRecord(Record):
    """One finished round. `wall_seconds` is what this round took, `simulated_seconds` the virtual clock at its end."""

    round: Annotated[int, Field(ge=1)]
    strategy: str
    task: str
    metric: str
    higher_is_better: bool  # of its values
    score: float | None  # these four are None in a round without evaluation
    loss: float | None  # these two also where the global model could not be scored
    score_by_tier: dict[str, float] | None
    score_by_exit: list[float] | None  # from the shallowest on; None too where the family has one exit only
    # Of what devices would be given now. None too with evaluate-tiers = false.
    delivered_score: float | None = None
    delivered_score_by_tier: dict[str, float] | None = None
    delivered_devices: Count | None = None
    devices_without_model: Count | None = None
    devices_beyond_budget: Count | None = None
    # Of the whole model, by the names of classes; None too where labels are not one class per example, where there are
    # many classes, and where devices score.
    accuracy_by_class: dict[str, Share] | None = None
    # Of what each device would be given, or where devices score, what each did; None too where there are many devices.
    score_by_device: dict[int, float] | None = None
    # None too where the server has a test set.
    worst_device: Annotated[int, Field(ge=0)] | None = None
    worst_score: float | None = None
    scored_devices: Count | None = None
    personal_score: float | None  # these four are None in a round without personal evaluation
    personal_score_by_tier: dict[str, float] | None
    personal_devices: Count | None
    personal_failed: Count | None
    # None too where there are many devices, unless these have label sets of their own.
    personal_score_by_device: dict[int, float] | None = None
    # Of further networks that devices scored on their own examples; None too where the method has none.
    personal_score_by_network: dict[str, float] | None = None
    # What all noised models so far cost of privacy, by the run's ledger, and their number: more than rounds where some
    # were done again. None without differential privacy.
    epsilon: float | None = None
    delta: float | None = None
    noised_releases: Count | None = None
    # Lines of devices.jsonl that are of this round, one for each order. The journal counts them.
    device_lines: Count = 0
    devices_sampled: Count
    devices_replied: Count
    devices_failed: Count
    devices_refused: Count
    devices_bounded: Count  # whose updates were scaled down to aggregation.norm-bound or dp.clip
    devices_state_lost: Count = 0  # that began anew because what they kept is gone
    devices_below_smallest: Count  # could afford no architecture of the strategy, whether skipped or not
    training_bytes_down: Bytes  # of tensor sets; with first questions, and the exchanges about masks
    training_bytes_up: Bytes
    statistics_bytes_down: Bytes  # for the batch norm statistics of models that are scored
    statistics_bytes_up: Bytes
    scoring_bytes_down: Bytes  # of models that devices score
    memory_utilisation: Share | None  # None when no device trained
    bandwidth_utilisation: Share | None  # None when no device trained under a payload budget
    distinct_architectures: Count
    simulated_seconds: Seconds
    wall_seconds: Seconds
    server_seconds: dict[str, Seconds]  # assign, payload, absorb, finish (aggregation), evaluate, and a method's own
    metrics: dict[str, float | None]  # of the method's own
    server_peak_rss_bytes: Bytes

    @property
    def figure(self) -> float | None:
        """The score of what devices would be given, or the global model's where that was not evaluated."""
        return self.score if self.delivered_score is None else self.delivered_score

    @property
    def training_bytes(self) -> int:
        """Both ways together."""
        return self.training_bytes_down + self.training_bytes_up

    @property
    def scale(self) -> Scale:
        """Return what the scores mean."""
        return scale_of(self.metric, self.higher_is_better)


NO_FIGURES = {"round", "strategy", "task", "metric", "higher_is_better", "worst_device", "device_lines"}
NO_FIGURES |= {"accuracy_by_class", "score_by_device", "personal_score_by_device"}  # each would be many
TRAFFIC = [name for name in RoundRecord.model_fields if name.endswith(("_bytes_down", "_bytes_up"))]


class BudgetRecord(Record):
    """Amounts that a device might spend in a round; None is no limit."""

    memory_bytes: Bytes
    download_bytes: Bytes | None
    upload_bytes: Bytes | None
    deadline_seconds: Seconds | None


class DeviceRecord(Record):
    """One device in one round. What a device that did not train cannot have is None."""

    device: Annotated[int, Field(ge=0)]
    node: int | None
    round: Annotated[int, Field(ge=1)]
    tier: str | None
    architecture: dict[str, Any] | None
    parameters: Count | None
    download_bytes: Bytes | None
    upload_bytes: Bytes | None
    budget: BudgetRecord | None
    predicted_memory_bytes: Bytes | None
    training_flops: Count | None = None  # of one example, by the price
    measured_memory_bytes: Bytes | None
    seconds: Seconds | None
    at_once: Annotated[int, Field(ge=1)] = 1  # devices of its worker that were trained at once, itself among them
    simulated_seconds: Seconds | None
    examples: Count | None
    loss: float | None
    bounded: bool  # its update was scaled down to aggregation.norm-bound or dp.clip
    outcome: str

    @field_validator("outcome")
    @classmethod
    def _known_outcome(cls, outcome: str) -> str:
        if outcome in ("trained", "late") or outcome.startswith(("failed: ", "refused: ", "skipped: ")):
            return outcome
        raise ValueError(f"{outcome!r} is not 'trained', 'late', 'failed: ...', 'refused: ...' or 'skipped: ...'")

    @property
    def outcome_word(self) -> str:
        """The outcome without its reason: trained, late, failed, refused or skipped."""
        return self.outcome.split(":", 1)[0]


class Summary(Record):
    """The whole run in a few figures. Bytes and wall seconds are sums over the rounds. A file never says unfinished."""

    status: Literal["finished", "failed", "unfinished"]
    rounds: Count
    metric: str | None  # None where no round was finished
    higher_is_better: bool
    # Final scores are means over the last fifth of the evaluations.
    final_score: float | None
    best_score: float | None
    best_round: int | None
    score_by_tier: dict[str, float] | None
    score_by_exit: list[float] | None
    delivered_score: float | None = None
    delivered_score_by_tier: dict[str, float] | None = None
    worst_tier: str | None = None
    worst_tier_score: float | None = None
    last_score: float | None = None  # of the last evaluation alone
    last_delivered_score: float | None = None
    # These three are the most in one of the evaluations that the final scores are means of.
    delivered_devices: Count | None = None
    devices_without_model: Count | None = None
    devices_beyond_budget: Count | None = None
    worst_device: Count | None = None  # these three of the last evaluation, where devices score
    worst_device_score: float | None = None
    scored_devices: Count | None = None
    final_evaluations: Count | None = None  # how many the means are over
    personal_score: float | None  # means over the personal evaluations in the last fifth of the rounds
    personal_score_by_tier: dict[str, float] | None
    personal_score_by_network: dict[str, float] | None = None
    epsilon: float | None = None  # of the whole run; these three are None without differential privacy
    delta: float | None = None
    noised_releases: Count | None = None
    training_bytes_down: Bytes
    training_bytes_up: Bytes
    statistics_bytes_down: Bytes
    statistics_bytes_up: Bytes
    scoring_bytes_down: Bytes
    devices_by_outcome: dict[str, int]
    simulated_seconds: Seconds
    wall_seconds: Seconds
    error: str | None

    @property
    def scale(self) -> Scale:
        """Return what the scores mean."""
        return scale_of(self.metric, self.higher_is_better)

    @property
    def figure(self) -> float | None:
        """Return what a run is measured by: the delivered score, or the final one where it has none."""
        return self.final_score if self.delivered_score is None else self.delivered_score

    @property
    def tiers_differ(self) -> bool:
        """Say whether tiers' scores differ as they are shown: means of equal scores may differ in their last bits."""
        text = score_format(self.scale)
        return len({text(score) for score in (self.delivered_score_by_tier or {}).values()}) > 1

    def delivered_note(self) -> str:
        """Return what stands beside the delivered score: over how many evaluations it is, the last, and who is left
        out."""
        parts, text = [], score_format(self.scale)
        if (self.final_evaluations or 0) > 1 and self.last_delivered_score is not None:
            last = text(self.last_delivered_score)
            parts.append(f"mean of the last {self.final_evaluations} evaluations, the last {last}")
        devices, most = self.delivered_devices or 0, "up to " if (self.final_evaluations or 0) > 1 else ""
        if self.devices_without_model:
            parts.append(f"{most}{self.devices_without_model} of {devices} devices get none")
        if self.devices_beyond_budget:
            parts.append(f"{most}{self.devices_beyond_budget} of {devices} devices get more than they afford")
        return "; ".join(parts)


def scalars_of(record: RoundRecord) -> dict[str, float | None]:
    """The figures of a round by the names that TensorBoard and trackers show them under.

    They are the names of the fields, with the name of the metric for "score".
    """
    found: dict[str, float | None] = {}
    for name, value in record.model_dump(exclude=NO_FIGURES).items():
        found |= flat({name.replace("score", record.metric): value}, between="/")
    return found


def flat(record: Mapping[str, Any], whole: Iterable[str] = (), between: str = ".") -> dict[str, Any]:
    """A record with an entry per part of its dicts and lists, which count from 1; the `whole` ones stay as they are."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if key not in whole and isinstance(value, dict):
            found |= {f"{key}{between}{part}": entry for part, entry in value.items()}
        elif key not in whole and isinstance(value, list):
            found |= {f"{key}{between}{number}": entry for number, entry in enumerate(value, start=1)}
        else:
            found[key] = value
    return found
