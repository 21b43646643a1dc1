"""Fields of a result that few tests are about: of a method that trains nothing, on the whole of one data set."""

PLAIN = {
    "options": {}, "tuned": {}, "train": {}, "solver": {}, "training": {}, "cost": {}, "provenance": {},
    "novel_fingerprint": "", "partial": False, "setting": "every", "passed_over": [], "edge": [], "calibration": None,
    "transductive": False, "places": {},
}  # fmt: skip
