"""Fields of a result that few tests are about: of a method that trains nothing, on the whole of one data set."""

import msgspec

from ifsl_bench.board.episode_counts import EpisodeCounts
from ifsl_bench.board.result_file import Result

PLAIN = {
    "options": {}, "tuned": {}, "train": {}, "solver": {}, "training": {}, "cost": {}, "provenance": {},
    "novel_fingerprint": "", "partial": False, "setting": "every", "passed_over": [], "edge": [], "calibration": None,
    "transductive": False, "places": {},
}  # fmt: skip


def listed(result: Result) -> Result:
    """The same result with its counts as lists of numbers, for a test to change."""
    columns = {name: result.episodes.column(name).tolist() for name in EpisodeCounts.COLUMNS}
    return msgspec.structs.replace(result, episodes=msgspec.structs.replace(result.episodes, **columns))
