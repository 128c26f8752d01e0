"""Run folders as a run would leave them, for the tests of what reads them."""

from pathlib import Path

from wildflower.server_app.journal import Journal

CONFIG = {"task": "digits", "strategy": "heterofl", "fleet": "pis", "rounds": 3, "seed": 7, "learning-rate": 0.1}


def a_round(number: int, **changes) -> dict:
    record = {
        "round": number,
        "strategy": "heterofl",
        "task": "digits",
        "metric": "accuracy",
        "higher_is_better": True,
        "score": 0.1 * number,
        "loss": 2.0 / number,
        "score_by_tier": {"small": 0.05 * number, "large": 0.1 * number},
        "score_by_exit": None,
        "delivered_score": 0.08 * number,
        "delivered_score_by_tier": {"small": 0.05 * number, "large": 0.1 * number},
        "delivered_devices": 5,
        "devices_without_model": 0,
        "devices_beyond_budget": 0,
        "accuracy_by_class": None,
        "score_by_device": None,
        "worst_device": None,
        "worst_score": None,
        "scored_devices": None,
        "personal_score": None,
        "personal_score_by_tier": None,
        "personal_score_by_device": None,
        "personal_score_by_network": None,
        "personal_devices": None,
        "personal_failed": None,
        "epsilon": None,
        "delta": None,
        "noised_releases": None,
        "devices_sampled": 3,
        "devices_replied": 2,
        "devices_failed": 1,
        "devices_refused": 0,
        "devices_bounded": 0,
        "devices_state_lost": 0,
        "devices_below_smallest": 0,
        "training_bytes_down": 1000,
        "training_bytes_up": 900,
        "statistics_bytes_down": 300,
        "statistics_bytes_up": 20,
        "scoring_bytes_down": 5000,
        "memory_utilisation": 0.9,
        "bandwidth_utilisation": None,
        "distinct_architectures": 2,
        "simulated_seconds": 60.0 * number,
        "wall_seconds": 1.5,
        "server_seconds": {
            "assign": 0.1,
            "payload": 0.1,
            "absorb": 0.1,
            "finish": 0.1,
            "evaluate": 0.1,
            "hypernetworks": 0.1,
            "distill": 0.1,
        },
        "metrics": {},
        "server_peak_rss_bytes": 10**8,
    }
    return record | changes


def a_device(number: int, device: int, **changes) -> dict:
    record = {
        "device": device,
        "node": 2**63 - 5,
        "round": number,
        "tier": "small",
        "architecture": {"widths": [3, 8]},
        "parameters": 500,
        "download_bytes": 2000,
        "upload_bytes": 1500,
        "budget": {"memory_bytes": 10**6, "download_bytes": None, "upload_bytes": None, "deadline_seconds": 30.0},
        "predicted_memory_bytes": 9 * 10**5,
        "training_flops": 3 * 10**6,
        "measured_memory_bytes": None,
        "seconds": 0.2,
        "at_once": 1,
        "simulated_seconds": 12.0,
        "examples": 40,
        "loss": 1.0,
        "bounded": False,
        "outcome": "trained",
    }
    return record | changes


def three_rounds(run_dir: Path) -> Journal:
    journal = Journal.open(run_dir, CONFIG, resume=False)
    for number in (1, 2, 3):
        journal.write_round(
            a_round(number),
            [
                a_device(number, 0),
                a_device(number, 1, outcome="late"),
                a_device(number, 2, outcome="failed: no memory"),
            ],
        )
    return journal
