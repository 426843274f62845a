"""What the benchmark of drafters makes of its measurements."""

import sys
from dataclasses import replace

from tests.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import deer_report


def outcome(system: str, drafts: int, accepted: dict[int, int], *, temperature: float = 0.0) -> deer_report.Outcome:
    """Two requests of 20 tokens."""
    rounds = sum(accepted.values())
    return deer_report.Outcome(
        system=system,
        drafts=drafts,
        temperature=temperature,
        concurrency=1,
        requests=2,
        seconds=2.0,
        num_tokens=40,
        equal=None if temperature else 2,
        forwards=rounds + 2 if accepted else 40,
        accepted=accepted,
        accuracy=0.5,
    )


def test_drafters_are_judged_by_what_they_save_the_target() -> None:
    outcomes = [
        outcome("target alone", 0, {}),
        outcome("autoregressive draft model small", 16, {2: 4, 3: 4}),
        outcome("DEER", 4, {2: 12}),
        outcome("DEER", 16, {0: 2, 6: 6}),
        outcome("DEER, stage I only", 16, {4: 8}),
    ]
    assert [one.tau for one in outcomes] == [None, 2.5, 2.0, 4.5, 4.0]
    targets = deer_report.make_target_sheet(outcomes, (4, 16)).rows
    assert [row[-1] for row in targets] == ["pass"] * 5
    table = deer_report.make_tau_sheet(outcomes).markdown()
    assert "| 0 | DEER | 16 | 4.50 | 4.00 | 0.25 | 1.00× | 2/2 | 50% |" in table
    assert (
        "| DEER | 16 | 25.0% | 0.0% | 75.0% | 0.0% | 0.0% | 0.0% | 6 |"
        in deer_report.make_histogram_sheet(outcomes).markdown()
    )
    drawn = [
        outcome("autoregressive draft model small", 16, {9: 4}, temperature=0.6),
        outcome("DEER", 16, {4: 8}, temperature=0.6),
    ]
    both = {row[0]: row[-1] for row in deer_report.make_target_sheet(outcomes + drawn, (4, 16)).rows}
    assert both["accepted per round (τ), k=16, temperature 0.6, the paper's of Qwen3-30B-A3B"] == "miss"
    assert both["accepted per round over the autoregressive draft model small's, k=16, temperature 0.6"] == "miss"
    assert both["accepted per round over the autoregressive draft model small's, k=16, temperature 0"] == "pass"
    falling = [replace(one, accepted={1: 8}) if one.drafts == 16 else one for one in outcomes]
    assert [row[-1] for row in deer_report.make_target_sheet(falling, (4, 16)).rows].count("miss") >= 3
