"""The settings of a run's rounds, from its configuration."""

from __future__ import annotations

from typing import Literal

from wildflower.messages.orders import LocalTraining
from wildflower.models.family import Family
from wildflower.models.frozen import check_trained
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.inline_tables import rates_of
from wildflower.server_app.inputs import run_folder
from wildflower.strategies.aggregation import Aggregation
from wildflower.strategies.privacy import Privacy, noise_multiplier_for
from wildflower.strategies.run_settings import RoundSettings
from wildflower.tasks.scoring import HELD_OUT
from wildflower.tasks.task import Task


def settings_of(config: RunConfig, task: Task, family: Family) -> RoundSettings:
    """Return the settings of a run; ConfigError where they do not go with its family, or with one another."""
    return RoundSettings(
        run=config.run_name,
        replaced_devices=task.spec.devices - config.devices,
        task=task.spec.to_json(),
        task_name=config.task,
        seed=config.seed,
        rounds=config.rounds,
        devices_per_round=config.devices_per_round,
        sampled_devices=config.sampled_devices,
        buffer=config.buffer,
        training=local_training(config).model_copy(update={"learning_rates": _learning_rates(config, family)}),
        schedule=config.schedule.kind,
        decay_rounds=tuple(int(r) for r in config.schedule.decay_rounds),
        decay_factor=config.schedule.decay_factor,
        memory_fraction=config.budget.memory_fraction,
        transfer_seconds=config.budget.transfer_seconds or None,
        deadline_seconds=config.deadline_seconds or None,
        round_seconds=config.budget.round_seconds or None,
        evaluate_every=config.evaluate_every,
        evaluate_tiers=config.evaluate_tiers,
        statistics_devices=config.statistics.devices,
        statistics_examples=config.statistics.examples,
        deliver=config.deliver if config.evaluate_tiers and len(task.test) >= HELD_OUT else "largest",
        personal_every=config.personal.every,
        personal_epochs=config.personal.epochs,
        personal_from=config.personal.first_round,
        # With the run, so that a resumed run finds it and no other does. Nodes that act as workers keep it where they
        # keep their own: they may be on other machines.
        state_dir=str(run_folder(config) / "device-state") if config.fleet and config.engine != "nodes" else "",
        norm_bound=config.aggregation.norm_bound,
        privacy=privacy_of(config),
        secure_minimum=config.secure_aggregation.minimum,
        aggregation=Aggregation(config.aggregation.rule, config.aggregation.trim),
        wire=config.wire,
        side_by_side=_side_by_side(config.compute.side_by_side),
        metric=task.metric,
        label_sets=task.label_sets is not None,
        score_without_model=task.metric.without_model(task.test.labels),
    )


def local_training(config: RunConfig) -> LocalTraining:
    """Return how devices train, at one learning rate for all parts."""
    return LocalTraining(
        epochs=config.local_epochs,
        steps=config.local_steps,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        optimizer=config.optimizer,
        learning_rate=config.learning_rate,
        momentum=config.momentum if config.optimizer == "sgd" else 0.0,
        betas=(config.adam.betas[0], config.adam.betas[1]),
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        augment=config.augment,
        layout=config.compute.layout,
        fused=config.adam.fused,
    )


def _side_by_side(value: str) -> int | Literal["auto", "fastest"]:
    named: dict[str, int | Literal["auto", "fastest"]] = {"auto": "auto", "fastest": "fastest", "off": 1}
    return named.get(value) or int(value)


def privacy_of(config: RunConfig) -> Privacy | None:
    """Return how the run protects its devices; ConfigError where no noise is enough, or the accountant is not
    installed."""
    if not config.dp.is_on:
        return None
    rate = config.devices_per_round / config.devices
    try:
        noise = config.dp.noise_multiplier or noise_multiplier_for(
            config.dp.epsilon, config.rounds, rate, config.dp.delta
        )
        seeded = bool(config.fleet)
        privacy = Privacy(
            config.dp.clip, noise, config.dp.delta, rate, config.devices_per_round, seeded, config.dp.epsilon
        )
        epsilon = privacy.epsilon(config.rounds)
    except ValueError as error:
        key = "dp.epsilon" if config.dp.epsilon else "dp.noise-multiplier"
        raise ConfigError(f"{key} = {config.to_dict()[key]!r}: {error}") from None
    log.info(
        "Differential privacy: noise multiplier %.4g, epsilon %.4g with delta %g after %s rounds",
        noise,
        epsilon,
        config.dp.delta,
        config.rounds,
    )
    return privacy


def _learning_rates(config: RunConfig, family: Family) -> dict[str, float]:
    """The multiples of the learning rate by part; ConfigError where a part is not in the family, or is frozen."""
    rates = {part: float(rate) for part, rate in rates_of(config.learning_rates).items()}
    with raised_as(ConfigError, f"learning-rates = {config.learning_rates!r}: "):
        check_trained(family, rates)
    return rates
