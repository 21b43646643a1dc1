"""Check of a result file's method, and of the choice of its options, against the installed method."""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_args

from ifsl_bench.backbones.contract import pretraining_corpora
from ifsl_bench.backbones.pretrained import HeadKind, make_pretraining_key
from ifsl_bench.experiments.job import Job, with_recipe
from ifsl_bench.experiments.search import candidates_by_round, options_at_edge
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.display_names import parse_label
from ifsl_bench.plugin.find_method import MethodRef
from ifsl_bench.plugin.options import resolve_options
from ifsl_bench.plugin.space import LEARNING_RATE_OPTION
from ifsl_bench.protocols.tasks.contamination import SEEN_LEVELS, seen_state_in_pretraining
from ifsl_bench.protocols.tasks.task import Task
from ifsl_bench.protocols.tasks.task_limits import MOST_TRIALS
from ifsl_bench.protocols.tasks.variants import TrainingChanges
from ifsl_bench.store.check import FileCheckResult, UnverifiedError, check_result, unverified_on_error
from ifsl_bench.store.schema import Result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from ifsl_bench.utils.text_format import format_value

METHOD_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._+-]*"  # a method's name, also in labels


def _recorded_distribution(result: Result) -> dict[str, str]:
    """Return name and version of the recorded package of the method; empty for a class of no package."""
    recorded = result.provenance.get("distribution")
    return {key: str(value) for key, value in recorded.items()} if isinstance(recorded, dict) else {}


def _find_registering_packages(result: Result) -> tuple[list[EntryPoint], list[EntryPoint]]:
    """Return the packages that register the method here, and which of them the file names."""
    owners = registry.find_owning_entry_points(registry.METHOD_GROUP, result.method)
    package = _recorded_distribution(result).get("name", "")
    theirs = [
        point for point in owners if not package or registry.is_same_package(registry.distribution_name(point), package)
    ]
    return owners, theirs


def _missing_method_fault(result: Result) -> str | None:
    """Return why the method cannot be loaded here; None where it can."""
    owners, _ = _find_registering_packages(result)
    if not owners:
        return f"method {result.method} is not installed here"
    lacks = registry.load_plugin(registry.METHOD_GROUP, result.method).missing_module
    return f"{lacks}, which method {result.method} needs, is not installed" if lacks else None


def _make_job_from_result(result: Result, task: Task) -> Job:
    """Return the job that the file is of.

    Raises:
        UserError: options or training that the method does not take.
    """
    name, method, meant = registry.resolve_method(result.method)
    (set_options, train), trials = result.user_settings(), result.n_trials
    if recipe := parse_label(result.label).recipe:
        task = with_recipe(task, recipe)
    options, training = (
        resolve_options(method, name, {**meant, **set_options}, task, trials),
        TrainingChanges.parse_values(train),
    )
    count = len(result.episodes)
    return Job(MethodRef(name, method), options, task, training, result.seed, count, trials, result.includes_bias)


def _job_or_none(result: Result, task: Task) -> Job | None:
    """Return the job; None where there is none, for which :func:`_method_faults` yields the reason."""
    owners, theirs = _find_registering_packages(result)
    if (owners and not theirs) or _missing_method_fault(result):
        return None
    with contextlib.suppress(UserError):
        return _make_job_from_result(result, task)
    return None


def _method_faults(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Compare label, options and backbone with those that the installed method and the task make."""
    owners, theirs = _find_registering_packages(result)
    if owners and not theirs:
        here, package = (
            " and ".join(registry.distribution_name(point) for point in owners),
            _recorded_distribution(result)["name"],
        )
        yield f"method: {result.method!r} of package {package}, the one that is installed here is of package {here}"
        return
    if missing := _missing_method_fault(result):
        yield from _unknown_method_faults(result, task)
        raise UnverifiedError(f"label, options and backbone, since {missing}")
    try:
        job = _make_job_from_result(result, task)
    except UserError as error:
        yield f"options: {error}"
        return
    if others := sorted(result.chosen_option_names - set(job.method.space)):  # they would be missing in the label
        yield f"tuned: {others[0]} is no option that method {job.method_name} tunes"
    if job.setting != result.setting:
        yield f"setting: {result.setting!r}, method and options make it {job.setting!r}"
    if job.label != result.label:
        yield f"label: {result.label!r}, method, options and number of episodes make it {job.label!r}"
    with unverified_on_error("backbone"):
        corpora = pretraining_corpora(task.pretraining)
    yield from _backbone_faults(result, task, corpora)
    key = make_pretraining_key(job.task, result.fingerprint, job.method.head, result.seed)
    if result.pretraining.get("key") not in (None, key):
        yield f"pretraining.key: {result.pretraining['key']!r}, task, data and seed make it {key!r}"


def _backbone_faults(result: Result, task: Task, corpora: Sequence[str] | None) -> Iterator[str]:
    """Check the recorded earlier pretraining of a backbone against its description here."""
    pretraining, named = result.pretraining, list(corpora or ())
    if pretraining.get("pretrained_on", []) != named:
        recorded_corpora = reprlib.repr(pretraining.get("pretrained_on"))
        yield f"pretraining.pretrained_on: {recorded_corpora}, backbone {task.pretraining.backbone} makes it {named}"
    here, recorded = seen_state_in_pretraining(corpora, task.novel_data, task.base_order), pretraining.get("seen", "no")
    if recorded in SEEN_LEVELS and SEEN_LEVELS.index(recorded) < SEEN_LEVELS.index(here):
        yield f"pretraining.seen: {recorded!r}, what is known of the backbone and {task.novel_data} makes it {here!r}"


def _package_faults(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Check the distribution that the method is from; a class of no package has none."""
    recorded, (owners, _) = _recorded_distribution(result), _find_registering_packages(result)
    if owners and not (recorded.get("name") and recorded.get("version")):
        package = registry.distribution_name(owners[0])
        yield f"provenance.distribution: name and version missing; method {result.method!r} is of package {package}"
    elif other_version := _other_version_note(result):
        job = _job_or_none(result, task)
        if job is None or not job.is_made_by_same_code(result.provenance):
            raise UnverifiedError(f"distribution, since {other_version}")


def _other_version_note(result: Result) -> str | None:
    """Return in words the other version of its package that the method is from; None for the installed one."""
    recorded, (_, theirs) = _recorded_distribution(result), _find_registering_packages(result)
    if not theirs or not recorded.get("version"):
        return None
    here = registry.distribution_name_and_version(theirs[0])
    if recorded["version"] == here["version"]:
        return None
    return f"the method is of {here['name']} {recorded['version']}, installed is {here['version']}"


def _search_faults(result: Result, task: Task, home: Paths) -> Iterator[str]:
    """Make the choice of options again, and compare the method's code; another version may have others."""
    if (job := _job_or_none(result, task)) is None:
        return
    faults, other_version = list(_search_value_faults(result, job)), _other_version_note(result)
    if faults and other_version:
        raise UnverifiedError(f"choice of options, since {other_version}")
    yield from faults
    if not other_version and not job.is_made_by_same_code(result.provenance):
        yield f"provenance: method {result.method} as it is installed here has other code, or another revision"


def _unknown_method_faults(result: Result, task: Task) -> Iterator[str]:
    """Check label and backbone without the method: the label is no other method's."""
    name = parse_label(result.label).method_name
    for what, text in (("label", name), ("method", result.method)):
        if not re.fullmatch(METHOD_NAME_PATTERN, text):
            yield f"{what}: {text!r} is no name of a method"
    with contextlib.suppress(UserError):
        if (owner := registry.resolve_method(name)[0]) != result.method:
            yield f"label: {name!r} is method {owner}, the file is of method {result.method}"
    keys = [make_pretraining_key(task, result.fingerprint, head, result.seed) for head in get_args(HeadKind)]
    if (key := result.pretraining.get("key")) not in (None, *keys):
        yield f"pretraining.key: {key!r}, task, data and seed make it {' or '.join(map(repr, keys))}"


def _search_value_faults(result: Result, job: Job) -> Iterator[str]:
    """Yield a line for each value that no search of the job that a result is of gives."""
    if result.transductive != job.method.transductive:
        yield f"transductive: {str(result.transductive).lower()}, method {job.method_name} says otherwise"
    if result.flags != (flags := job.method.flags(job.method_options)):
        yield f"flags: {result.flags}, method {job.method_name} says {flags}"
    if job.training_changes.non_default_values() and not job.is_meta_trained:
        name = next(iter(job.training_changes.non_default_values()))
        yield f"train: {name}, and method {job.method_name} with these options trains nothing"
    names = ", ".join(job.searched_names)
    if list(result.tuned) != [names] * bool(names):
        tuned = " and ".join(result.tuned) or "nothing"
        yield f"tuned: {tuned}, in setting {result.setting!r} {names or 'one thing'} is chosen on validation episodes"
    elif names:
        yield from _choice_faults(result, names, job)
    elif result.n_trials:
        yield f"setting: {result.setting!r}, and nothing was tuned"
    else:
        yield from _settings_faults(result, job, {}, "")


def _choice_faults(result: Result, names: str, job: Job) -> Iterator[str]:
    """Check that the settings to try were tried, and the best of them chosen."""
    tried = result.tuned[names]
    if result.n_trials > MOST_TRIALS:  # said already
        return
    if result.n_trials and len(tried) > result.n_trials:
        yield f"tuned: {len(tried)} settings were tried, {result.setting!r} allows {result.n_trials}"
        return
    rounds = candidates_by_round(job, lambda candidate: result.validation_accuracy(candidate.name))
    candidates = {candidate.name: candidate for of_round in rounds for candidate in of_round}
    sizes = [len(of_round) for of_round in rounds]
    if tried.keys() != candidates.keys() or result.rounds != sizes:
        reasons = [f"{setting} is none of the settings to try" for setting in tried if setting not in candidates][:1]
        reasons += [f"{setting} was not tried" for setting in candidates if setting not in tried][:1]
        reasons = reasons or [f"rounds are {result.rounds}"]
        yield f"tuned: {', '.join(reasons)}; {result.setting!r} has rounds of {', '.join(map(str, sizes))}"
        return
    sound = {setting: tried[setting] for setting in candidates if setting not in result.passed_over}
    if not sound:
        yield "passed_over: all that was tried, so that nothing can have been chosen"
        return
    best = max(sound, key=sound.__getitem__)
    point, chosen = candidates[best].option_values, candidates[best].job
    offered = [candidate.option_values for candidate in candidates.values()]
    edge = options_at_edge(job.method, chosen.method_options, point, offered)
    yield from _settings_faults(result, chosen, point, best, edge)


def _settings_faults(
    result: Result, job: Job, point: Mapping[str, Any], best: str, edge: Sequence[str] = ()
) -> Iterator[str]:
    """Compare options, training and edge with the job that was chosen, at this point."""
    options = {**job.method_options, **{key: value for key, value in point.items() if key != LEARNING_RATE_OPTION}}
    why = f"the best of those tried, {best}, has" if best else "method and task make it"
    for name, recorded, expected in (
        ("options", result.options, options),
        ("train", result.train, job.training_changes.non_default_values()),
    ):
        for key in sorted(recorded.keys() | expected.keys()):
            recorded_text, expected_text = (
                format_value(of[key]) if key in of else "none" for of in (recorded, expected)
            )
            if recorded_text != expected_text and recorded.get(key) != expected.get(key):
                yield f"{name}.{key}: {recorded_text}, {why} {expected_text}"
    if sorted(result.edge) != sorted(edge):
        yield f"edge: {', '.join(result.edge) or 'nothing'}, what was chosen has {', '.join(edge) or 'nothing'} there"
    if not best and result.passed_over:
        yield f"passed_over: {result.passed_over[0]}, and nothing was tuned"


def check_file(path: Path, tasks: Mapping[str, Task] | None = None, home: Paths | None = None) -> FileCheckResult:
    """Verify a result file as :func:`ifsl_bench.store.check.check_result` does, and its method.

    Where the method is installed, label and choice of options are made again, and its code is compared.

    Args:
        path: of the file.
        tasks: further tasks, by name, next to the packaged ones.
        home: the folders with data sets and own tasks.
    """
    return check_result(path, tasks, home, (_method_faults, _package_faults, _search_faults))
