"""The fastest mode of each program that loses no more than our settings do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from common.report import Row, ratio_fields
from common.timing import Timings
from common.ways import OURS, Way


def fastest_rivals(ways: Mapping[str, Way], rows: Sequence[Row], timings: Timings) -> Iterator[Row]:
    """Go through our ways and other programs, with a row for each pair.

    A mode is a rival where its relative loss of perplexity against its own dense mode is not above
    ours against transformers on the same windows; dense modes lose nothing. Standard errors are not
    taken into account.
    """
    others = dict.fromkeys(way.program for way in ways.values() if way.program != OURS)
    for ours in (row for row in rows if ways[row["variant"]].program == OURS):
        for program in others:
            rivals = [
                row
                for row in rows
                if ways[row["variant"]].program == program
                and row["delta_percent"] <= max(0.0, ours["delta_percent"])
            ]
            best = min(rivals, key=lambda row: row["seconds"])
            yield {
                "ours": ours["variant"],
                "our_delta_percent": ours["delta_percent"],
                "rival": best["variant"],
                "rival_delta_percent": best["delta_percent"],
                **ratio_fields("our_speedup", timings.ratio(best["variant"], ours["variant"])),
            }
