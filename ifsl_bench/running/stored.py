"""Stored results: whether a job's is there and current, and how a new one takes an old one's place."""

from __future__ import annotations

from ifsl_bench.backbone.pretrain import pretrained_sha256
from ifsl_bench.board import result_file
from ifsl_bench.board.result_file import Result
from ifsl_bench.common.errors import CorruptFile
from ifsl_bench.common.files import locked
from ifsl_bench.data.preparing.outline import fingerprint_of
from ifsl_bench.episodic.prepared import Workspace
from ifsl_bench.running.job import Job
from ifsl_bench.running.stages import Pretrain


def stored_result(job: Job, work: Workspace) -> Result | None:
    """The job's stored result, if it is what the job would make now.

    Task definition, data, method code, options, training, episodes and the backbone's weights must be the same, as far
    as data and backbone are in the cache to compare with.
    """
    path, searched = job.result_path(work.home), job.searched
    if not path.exists():
        return None
    try:
        result = result_file.read(path)
    except CorruptFile as error:
        work.reporter.warn(f"{error}; it is made again")
        return None
    fingerprint = fingerprint_of(job.task, work.home)
    key = Pretrain(job.task, job.method.head, job.seed).key(work.home, result.fingerprint)
    weights = pretrained_sha256(work.home, key)
    wanted = {
        "task": (result.task_hash, job.task.hash),
        "data": (result.fingerprint, fingerprint or result.fingerprint),
        "method's code": (result.provenance.get("method_source"), job.source),
        "options": (result.given()[0], {k: v for k, v in job.options.items() if k not in searched}),
        "training": (result.given()[1], job.training.changes()),
        "choice of options or checkpoint": (result.setting, job.setting if result.setting else "every"),
        "calibration": (result.calibrated, job.calibrated),
        "seed": (result.seed, job.seed),
        "number of episodes": (len(result.episodes.base_joint), job.episodes),
        "backbone": (result.pretraining.get("key"), key),
        "backbone's weights": (result.pretraining.get("sha256"), weights or result.pretraining.get("sha256")),
    }
    changed = [name for name, (stored, now) in wanted.items() if stored != now]
    if changed:
        work.reporter.say(f"{path.name} is out of date (changed: {', '.join(changed)})")
        return None
    return result


def store(job: Job, work: Workspace, result: Result) -> None:
    """Writes a result; one that says something else and was there is renamed, not overwritten: nothing is lost."""
    with locked(work.home.cache / "results"):
        if kept := result_file.keep_old(work.home.results, result):
            work.reporter.warn(f"the result that was there differs; it is kept as {kept}")
        result_file.write(work.home.results, result)
    work.reporter.say(f"result: {job.result_path(work.home)}")
