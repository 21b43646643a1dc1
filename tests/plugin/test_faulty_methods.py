"""Methods that break what :class:`ifsl_bench.Method` says of them: one line each."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from ifsl_bench import Choices, Method, Range, api
from ifsl_bench.experiments.job import make_jobs
from ifsl_bench.experiments.run_config import RunConfig
from ifsl_bench.experiments.search import draw_next_search_round, options_at_edge
from ifsl_bench.experiments.trained_models import SolveCounts
from ifsl_bench.plugin.find_method import find_method
from ifsl_bench.plugin.method import AdditiveClassifier, Base, Prediction
from ifsl_bench.plugin.options import check_method, declared_search_space, make_method
from ifsl_bench.protocols.loader import EvaluationResult
from ifsl_bench.protocols.metrics import EpisodeHitCounts
from ifsl_bench.utils.errors import UserError
from tests.plugin.test_options import Every

START = """
import numpy as np
import torch
from ifsl_bench import Choices, MetaTraining, Method, Prediction, Range

class X(Method):
    {}

    def forward(self, support, query):
        means = support.class_means(self.ways)
        logits = torch.cat([query.base_logits, query.features @ means.mT], -1)
        {}
"""
DECLARED = {
    "def __init__(self, base, ways): raise KeyError()": "X cannot be made: .*x.py line 7: Key",
    "def __init__(self, base, ways): self.a = torch.nn.Linear(2, 2)": "X cannot be made: .*x.py line 7: AttributeError",
    "def __init__(self, base): super().__init__(base, 5)": "X cannot be made: .*TypeError",
    "def __init__(self, base, ways): self.own = 1": r"X.__init__ does not call super\(\).__init__\(base, ways\)",
    "schedule = {'steps': 5}": r"X.schedule is \{'steps': 5\}, expected ifsl_bench.MetaTraining\(...\) or None",
    "def __init__(self, base, ways, own: int = 1): super().__init__(base, ways)":
        r"X.__init__ takes 'own' by position; put \* before it",
    "def __init__(self, base, ways, **more): super().__init__(base, ways, **more)":
        r"X.__init__ takes \*\*, but no base class of it has options",
    "def __init__(self, base, ways, *, episodes: int = 1): super().__init__(base, ways)":
        "option 'episodes' of X would look like the number of episodes in labels; rename it",
    "shorthands = ['x']": r"X.shorthands is \['x'\], expected name -> the options",
    "shorthands = {'x': {1: 2}}": r"X.shorthands\['x'\] sets 1, no option of it",
    "defaults = classmethod(lambda cls, task: None)": "X.defaults returned None, expected a dict",
    "defaults = classmethod(lambda cls, task: task.nothing)": "X.defaults failed: .*line 7: AttributeError",
    "transductive = 'no'": "X.transductive is 'no', expected True or False",
    "revision = '2'": "X.revision is '2', expected a whole number",
    "requires = ['torch']": r"X.requires is \['torch'\], expected module -> the command",
    "head = 1": "X.head is 1, expected 'linear' or 'cosine'",
    "space = {'a': (1, 2)}": "X.space is .*, expected option -> ifsl_bench.Range or ifsl_bench.Choices",
    "grid = {'a': (1, 2)}": "X.grid names 'a', which is no option of its space",
    "defaults = classmethod(lambda cls, task: {'nothing': 1})": "defaults names 'nothing'",
    "space = {1: Range(0, 1)}": "X.space names 1, which is none of its options",
    "def __init__(self, base, ways): raise SystemExit(3)": "X cannot be made: .*x.py line 7: SystemExit: 3",
    "def __init__(self, base, ways): super().__init__(base, ways); base.weight.zero_()": "it writes into base.weight",
    "def __init__(self, base, ways): super().__init__(base, ways); self.base = 1": "X.__init__ sets self.base to int",
    "label = classmethod(lambda cls, name, options: options['no'])": "X.label failed: .*x.py line 7: KeyError: 'no'",
    "keeps_supports = classmethod(lambda cls, options: exit(4))": "X.keeps_supports failed: .* SystemExit: 4",
    "def __init__(self, base, ways): raise BaseException('b')": "X cannot be made: .*x.py line 7: BaseException: b",
    "def __init__(self, base, ways): super().__init__(base, ways); self.ways = 3": "X.__init__ sets self.ways to 3; l",
    "def __init__(self, base, ways, *, a: int = 'x'): super().__init__(base, ways)": "of X: its default 'x' is not int",
    "label = classmethod(lambda cls, name, options: (_ for _ in ()).throw(GeneratorExit))": "X.label failed: .* Genera",
    "gpu_min_episodes = classmethod(lambda cls, options: 1 // 0)": "X.gpu_min_episodes failed: .*ZeroDivision",
}  # fmt: skip
ANSWERED = {
    "return Prediction(logits.numpy())": "method 'X' returned logits as ndarray, expected a dense torch.Tensor",
    "return Prediction((1000 * logits).long())": "method 'X' returned logits of torch.int64, .* expected a dense",
    "return Prediction(logits[..., 1:])": r"'X' returned logits of shape \[8, 50, 12\], expected \[8, 50, 13\]",
    "return Prediction(logits * torch.nan)": "returned NaN or infinite logits in 8 of 8 episodes of a batch",
    "return Prediction(logits.masked_fill(logits == logits, -torch.inf))": "infinite logits in 8 of 8 episodes",
    "logits[..., -1] = -torch.inf; return Prediction(logits)": "infinite logits in 8 of 8 episodes",
    "logits[..., 0] = -torch.inf; return Prediction(logits)": "infinite logits in 8 of 8 episodes",
    "return Prediction(logits.masked_fill(torch.tensor(len(logits) > 8), -torch.inf))": r"infinite logits in (\d+) of ",
    "raise ValueError('mine')": "method 'X' failed: .*x.py line 12: ValueError: mine",
    "raise SystemExit(3)": "method 'X' failed: .*x.py line 12: SystemExit: 3",
    "raise BaseException('b')": "method 'X' failed: .*x.py line 12: BaseException: b",
    "raise GeneratorExit": "method 'X' failed: .*x.py line 12: GeneratorExit",
    "raise ValueError('long' * 1000)": r"x.py line 12: ValueError: [long]{1000} \.\.\. \(",
    "return logits": r"method 'X' returned Tensor, expected ifsl_bench.Prediction\(logits\)",
    "return Prediction(logits.argmax(-1, keepdim=True))": "of torch.int64, .* with a score of each class for each qu",
    "return Prediction(logits.amax(-1, keepdim=True))": "novel classes.: a score of each class for each query",
    "assert False": r"method 'X' failed: .*x.py line 12: AssertionError \(",
    "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})": r"method 'X' failed: .*x.py line 12: E \(",
    "support.labels[0] += 1; logits += support.class_means(5)[:, :1, :1]; return Prediction(logits)": "it writes into ",
    "support.labels.numpy()[0] = 7; return Prediction(logits)": "breaks the contract: it writes into support.labels",
    "support.hidden[:] = True; return Prediction(logits)": "breaks the contract: it writes into support.hidden",
    "support.hidden.numpy()[:] = True; return Prediction(logits)": "breaks the contract: it writes into support.hidden",
    "len(logits) > 8 and query.features.zero_(); return Prediction(logits)": "it writes into query.features",
    "len(logits) > 8 and self.base.weight.zero_(); return Prediction(logits)": "it writes into base.weight",
    "return Prediction(logits.to_sparse())": "returned logits of torch.float32, torch.sparse_coo, expected a dense",
    "return Prediction(torch.nested.nested_tensor([*logits]))": "logits of torch.float32, .*, nested, expected a dense",
    "return Prediction(logits, {'a': torch.nested.nested_tensor([*logits])})": "statistic 'a' as Tensor, expected",
    "return Prediction(logits, {'a': logits[:, 0, 0].bfloat16()})": "statistic 'a' of torch.bfloat16 on cpu",
    "return Prediction(logits, {1: logits[:, 0, 0]})": "returned a statistic named 1, expected a str",
    "return Prediction(logits, {'a': torch.zeros(1)})": r"statistic 'a' as a tensor of shape \[1\], expected \[8\]",
    "return Prediction(logits, None)": "method 'X' returned statistics of type NoneType, expected name -> tensor",
    "return Prediction(logits, {'a': np.zeros(len(logits))})": "statistic 'a' as ndarray",
    "return Prediction(logits + query.labels)": "failed: .*x.py line 12: .*labels of queries are withheld from methods",
    "return Prediction(logits.to('meta'))": "returned logits on device meta, expected them on cpu",
}


@pytest.fixture
def jobs(tmp_path, task, work):
    def jobs_and_work(declared, answered):
        (tmp_path / "x.py").write_text(START.format(declared, answered))
        return make_jobs(RunConfig([f"{tmp_path / 'x.py'}:X"], [task]), work.home), work

    return jobs_and_work


def test_what_a_class_declares_wrongly_is_said_before_any_work(jobs):
    for line, message in DECLARED.items():
        with pytest.raises(UserError, match=message) as caught:
            jobs(line, "return Prediction(logits)")
        assert "\n" not in str(caught.value)


def test_a_class_that_answers_nothing_is_said():
    for defined, message in (
        ({}, "X defines neither forward nor learn and answer"),
        ({"learn": lambda self, support, before=None: None}, "X defines learn, but not answer"),
        ({"answer": lambda self, state, query: None}, "X defines answer, but not learn"),
    ):
        with pytest.raises(UserError, match=message):
            check_method(type("X", (Method,), defined))


def test_a_growing_method_with_an_answer_of_its_own_is_refused():
    """Its sequences are answered from ``class_logits`` alone, so it would be measured without that answer."""
    growing = dict.fromkeys(("learn_classes", "class_logits"), lambda self, *_: None)
    check_method(type("X", (AdditiveClassifier,), growing))
    with pytest.raises(UserError, match="X is an AdditiveClassifier, which sessions never ask to answer"):
        check_method(type("X", (AdditiveClassifier,), {**growing, "answer": growing["class_logits"]}))


def test_an_answer_of_another_type_is_one_line(jobs):
    for line, message in ANSWERED.items():
        made_jobs, work = jobs("pass", line)
        with pytest.raises(UserError, match=message) as caught:
            api.run_job(made_jobs[0], work)
        assert "\n" not in str(caught.value)


def test_logits_of_a_new_tensor_subclass_in_each_call_are_taken_as_tensors(jobs):
    columns = []
    for answer in ("logits", "logits.as_subclass(type('Own', (torch.Tensor,), {}))"):
        made_jobs, work = jobs("pass", f"return Prediction({answer})")
        columns.append(api.run_job(made_jobs[0], work).episodes.read_column("novel_joint"))
    assert np.array_equal(*columns)


def test_a_run_and_the_check_remark_on_ties(tmp_path, clusters, task, call):
    how = ("--task", task, "--episodes", "20", "-q", "--home", str(clusters / "home"))
    for answer, remarks in (
        ("logits", False),
        ("logits.sign()", True),
        ("logits.bfloat16()", None),
    ):
        (tmp_path / "x.py").write_text(START.format("", f"return Prediction({answer})"))
        status, _, err = call("run", "--rerun", "--method", f"{tmp_path / 'x.py'}:X", *how)
        assert status == 0
        assert remarks is None or ("several classes have the highest logit" in err) == remarks, err
    status, out, _ = call("methods", "--check", f"{tmp_path / 'x.py'}:X")
    assert (status, "\nRemark: its logits are torch.bfloat16" in out) == (0, True)


def test_a_method_that_needs_images_of_base_classes_says_so(tmp_path, call):
    """Of features that are given there are only the means; a run names what is missing, the check finds it before."""
    (tmp_path / "x.py").write_text(
        START.format(
            "def __init__(self, base, ways):\n        super().__init__(base, ways); self.images = base.images()",
            "return Prediction(logits)",
        )
    )
    status, out, _ = call("methods", "--check", f"{tmp_path / 'x.py'}:X")
    assert (status, "it fails where Base.images is None" in " ".join(out.split())) == (2, True)
    kind = find_method(f"{tmp_path / 'x.py'}:X")[0].method
    with pytest.raises(UserError, match=r"line 8: TypeError: .*; Base.images is None, since this data set has only"):
        make_method(kind, Base(torch.eye(3), torch.zeros(3), torch.eye(3)), 2, {})


def test_a_solve_that_ends_at_nan_has_not_converged():
    counts = EpisodeHitCounts(*(np.zeros(3, np.int64) for _ in range(4)), base_queries=1, novel_queries=1)
    failed = np.array([0.0, np.nan, 1.0])
    evaluation = EvaluationResult(counts, {"solver_unconverged": failed}, None)
    assert evaluation.n_unconverged_episodes == 2
    assert list(evaluation.convergence_remarks()) == ["the inner solve of 2 of 3 episodes did not converge"]
    solves = SolveCounts({})
    solves.add_prediction(Prediction(torch.zeros(3, 1, 1), {"solver_unconverged": torch.from_numpy(failed)}))
    assert solves.total_counts() == {"episodes": 3, "unconverged": 2}


def declaring(space, grid=None):
    return type("X", (Every,), {"space": space, "grid": grid or {}})


@pytest.mark.parametrize(
    ("option", "given", "kind"),
    [
        ("share", Range(0, 1), float),
        ("limit", Range(1, 100, log=True), float),
        ("train.rate", Range(1, 2), float),
        ("count", Range(1.0, 5.0), int),
        ("count", Range(1, 100, log=True), int),
        ("share", Choices((1, 2, 0.5)), float),
        ("choice", Choices(("a", 3)), (str, int)),
    ],
)
def test_the_type_of_an_option_decides_what_is_tried(option, given, kind):
    method, default = declaring({option: given}), {option: 1}
    check_method(method)
    tried = [point[option] for point in draw_next_search_round(method, {}, 16, default)[1:]]
    assert all(isinstance(value, kind) for value in tried)
    assert len(set(tried)) == {Range(0, 1): 7}.get(given, len(set(tried))), "not the ends alone"
    if isinstance(given, Range):
        assert all(given.low <= value <= given.high for value in tried)
        ends = [{option: kind(given.low)}, {option: kind(given.high)}]
        assert [options_at_edge(method, {}, end, ends) for end in ends] == [[option], [option]]


def test_the_grid_is_of_the_options_types_too():
    method = declaring({"share": Range(0, 1), "count": Range(1, 9)}, {"share": [0, 1], "count": (1, 3)})
    check_method(method)
    tried = draw_next_search_round(method, {}, 0, {})
    assert [repr(point) for point in tried[:2]] == ["{'share': 0.0, 'count': 1}", "{'share': 0.0, 'count': 3}"]
    assert options_at_edge(method, {}, tried[0], tried) == ["share", "count"]
    assert declared_search_space(method) == {"share": Range(0.0, 1.0), "count": Range(1, 9)}


@pytest.mark.parametrize(
    ("space", "grid", "message"),
    [
        ({"count": Range(0.5, 5)}, {}, r"X.space\['count'\]: Range\(.*\) is no range of int"),
        ({"flag": Range(0, 1)}, {}, r"X.space\['flag'\]: Range\(.*\) is no range of bool"),
        ({"count": Choices((1, 2.5))}, {}, r"X.space\['count'\]: 2.5 is not int"),
        ({"share": Choices((True, 0.5))}, {}, "True is not float"),
        ({"share": Range(0, 1)}, {"share": (0.1, "much")}, r"X.grid\['share'\]: 'much' is not float"),
        ({"count": Range(1, 9)}, {"count": 3}, "X.grid is {'count': 3}, expected option -> values"),
        ({"train.rate": Range(0, 1)}, {}, r"X.space\['train.rate'\] is Range.*, but a learning rate is positive"),
        ({"train.rate": Choices((1e-3, "fast"))}, {}, "'fast' is not float"),
    ],
)
def test_a_space_that_an_option_does_not_take_is_refused_in_one_line(space, grid, message):
    with pytest.raises(UserError, match=message) as caught:
        check_method(declaring(space, grid))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train": {1: 2}}, "unknown training option 1;"),
        ({"train": {"steps": True}}, "steps is not True"),
        ({"train": {"rate": None}}, "--train: "),
        ({"seed": True}, r"seeds must be whole numbers from 0 to \d+, not \[True\]"),
        ({"tune": True}, "--tune takes the number of settings to try"),
    ],
)
def test_wrong_values_in_a_call_are_one_line(given, said):
    with pytest.raises(UserError, match=said) as caught:
        api.run("imprint", "glyphs-5shot", **given)
    assert "\n" not in str(caught.value)


LEARNER = """def __init__(self, base, ways):
        super().__init__(base, ways)
        self.a, self.idle = (torch.nn.Parameter(torch.ones(())) for _ in range(2))"""


def test_the_check_of_a_method_finds_detached_logits(tmp_path, call):
    (tmp_path / "detached.py").write_text(START.format(LEARNER, "return Prediction((self.a * logits).detach())"))
    status, out, err = call("methods", "--check", f"{tmp_path / 'detached.py'}:X")
    assert (status, err.count("\n")) == (2, 1), err
    assert "no parameter gets a gradient: the logits are det" in out + err


@pytest.mark.parametrize(("declared", "ended"), [("", 0), ("parallel_copies = True", 2)])
def test_a_method_that_cannot_be_copied_is_checked_and_may_not_declare_copies(tmp_path, call, declared, ended):
    """As with a lock, an open file, or a tensor that a graph has led to."""
    made = "def __init__(self, base, ways): super().__init__(base, ways); self.file = open(__file__)"
    (tmp_path / "x.py").write_text(START.format(f"{made}\n    {declared}", "return Prediction(logits)"))
    status, out, _ = call("methods", "--check", f"{tmp_path / 'x.py'}:X")
    assert status == ended
    assert ("it cannot be copied, against parallel_copies: TypeError: " in " ".join(out.split())) == bool(ended)


def test_an_error_names_the_last_line_of_the_users_own_files_and_traceback_all_of_it(tmp_path, call, monkeypatch):
    (tmp_path / "x.py").write_text(START.format("", "return Prediction(logits @ logits.to('nowhere'))"))

    def print_cause(error):
        print(f"{type(error.__cause__.__cause__).__name__} at length")

    monkeypatch.setattr("traceback.print_exception", print_cause)
    for more, printed in (((), ""), (("--traceback",), "RuntimeError at length\n")):
        status, out, err = call(*more, "methods", "--check", f"{tmp_path / 'x.py'}:X")
        assert (status, out) == (2, printed)
        assert "x.py line 12: RuntimeError: Expected one of cpu" in err


def test_a_method_imports_what_lies_beside_its_file_and_each_folder_has_its_own(tmp_path):
    methods = {}
    for name, value in (("one", 1), ("two", 2)):
        (folder := tmp_path / name).mkdir()
        (folder / "utils.py").write_text(f"from more import VALUE\n\ndef value():\n    return VALUE + {value}\n")
        (folder / "more.py").write_text("VALUE = 10\n")
        (folder / "x.py").write_text("from utils import value\n" + START.format("made = value()", "return None"))
        methods[name] = find_method(f"{folder / 'x.py'}:X")[0].method
    assert (methods["one"].made, methods["two"].made) == (11, 12)
    assert str(folder) not in sys.path
    assert "utils" not in sys.modules
    (folder / "more.py").write_text("VALUE = 20\n")
    assert find_method(f"{folder / 'x.py'}:X")[0].method.made == 22, "what lies beside has changed"


def test_a_file_in_a_clone_of_the_suite_is_of_the_package_that_runs(tmp_path):
    (package := tmp_path / "ifsl_bench").mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('run a second time')\n")
    (tmp_path / "x.py").write_text(START.format("", "return None"))
    assert issubclass(find_method(f"{tmp_path / 'x.py'}:X")[0].method, Method)


def test_a_parameter_without_a_gradient_is_said_by_a_run_too(tmp_path, clusters, task, call):
    how = ("--train", "steps=5", "--episodes", "20", "-q", "--home", str(clusters / "home"))
    for answer, ended, message in (
        ("self.a * logits", 0, "no step has a gradient for idle, so training leaves it unchanged"),
        ("logits", 2, "has parameters, but its logits in training do not depend on them"),
    ):
        (tmp_path / "x.py").write_text(START.format(LEARNER, f"return Prediction({answer})"))
        status, _, err = call("run", "--method", f"{tmp_path / 'x.py'}:X", "--task", task, *how)
        assert (status, message in err) == (ended, True), err
