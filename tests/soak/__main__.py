"""Soak tests: damaged input and injected faults, for a given time, from a seed:

    .venv/bin/python -m tests.soak [--seconds 600] [--seed 1] [--areas wire,configs] [--workers 2] [--state FILE]
    .venv/bin/python -m tests.soak --seed 1 --area configs --case 1234

The first form runs cases of all areas in turn, prints each new kind of failure, then the counts, and exits with code 1
if there were failures. With --state it continues where the last campaign with this file ended. The second form repeats
one case.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.soak.areas import AREAS, COLUMNS, NUM_CASES
from tests.soak.campaign import Campaign, Tally, all_failures


def table(tallies: Mapping[str, Tally]) -> Table:
    """Return the counts of each area."""
    shown = Table("area", title="soak tests")
    for header in ("cases", "accepted", "refused", "failed", "kinds", "seconds"):
        shown.add_column(header, justify="right")
    for name, tally in tallies.items():
        if tally.unavailable:
            shown.add_row(name, f"skipped: {tally.unavailable}")
            continue
        counts = (tally.cases, tally.accepted, tally.refused, tally.failed, len(tally.kinds), round(tally.seconds))
        shown.add_row(name, *map(str, counts))
    return shown


def results(name: str, tally: Tally) -> Table:
    """Return the rows of an area."""
    shown = Table(title=name)
    for column in COLUMNS[name]:
        shown.add_column(column)
    for row in tally.rows:
        shown.add_row(*row)
    return shown


def main() -> None:
    """Run a campaign or one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds",
        type=float,
        help="duration, seconds; cases in progress are completed; default: 600, or all cases of faults and storm",
    )
    parser.add_argument("--cases", type=int, help="largest number of cases of an area")
    parser.add_argument("--seed", type=int, default=1, help="seed of the campaign")
    parser.add_argument("--areas", default=",".join(AREAS), help="areas, comma-separated")
    parser.add_argument("--workers", type=int, default=1, help="areas that run at the same time")
    parser.add_argument("--state", type=Path, help="file that holds the counts, from which a campaign continues")
    parser.add_argument("--json", type=Path, default=Path("runs/soak/result.json"), help="path of the results")
    parser.add_argument("--area", choices=AREAS, help="area of --case")
    parser.add_argument("--case", type=int, help="number of one case to repeat")
    options = parser.parse_args()
    if options.case is not None:
        if options.area is None:
            parser.error("--case needs --area")
        sys.exit(repeat(options.area, options.case, options.seed))
    names = [options.area] if options.area else options.areas.split(",")
    if unknown := set(names) - AREAS.keys():
        parser.error(f"unknown area {', '.join(sorted(unknown))}; use {', '.join(AREAS)}")
    campaign = Campaign({name: AREAS[name] for name in names}, seed=options.seed, state=options.state)
    seconds = options.seconds or (math.inf if NUM_CASES.keys() >= set(names) else 600.0)
    campaign.run(seconds=seconds, cases=options.cases, limits=NUM_CASES, workers=options.workers)
    console = Console(width=120)
    for name, tally in campaign.tallies.items():
        if tally.rows:
            console.print(results(name, tally))
    console.print(table(campaign.tallies))
    failures = all_failures(campaign.tallies)
    for failure in failures:
        print(f"python -m tests.soak --seed {options.seed} --area {failure.area} --case {failure.case}")
        print(f"  {failure.change}: {failure.reason}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(campaign.to_dict(), indent=1))
    sys.exit(bool(failures))


def repeat(area: str, case: int, seed: int) -> int:
    """Run one case, print its outcome, and return the exit code."""
    result = Campaign({area: AREAS[area]}, seed=seed).run_case(area, case)
    if isinstance(result, str):
        print(f"{area} {case}: {result}")
        return 0
    print(result.detail)
    return 1


if __name__ == "__main__":
    main()
