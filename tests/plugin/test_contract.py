"""The contract, checked in every run and by ``ifsl-bench methods --check``."""

from __future__ import annotations

import time

import pytest
import torch
from ifsl_bench.methods.protonet import ProtoNet

from ifsl_bench import api
from ifsl_bench.plugin import registry
from ifsl_bench.plugin.episode_contract import (
    ContractProbe,
    check_answers,
    find_query_dependence_fault,
    find_repeat_fault,
)
from ifsl_bench.plugin.method import Base, Prediction, Query, Support
from ifsl_bench.plugin.rules import EPISODE_RULES, check_contract, find_parallel_copies_fault, make_random_probe
from ifsl_bench.plugin.session_contract import SESSION_RULES as OF_SESSIONS
from ifsl_bench.utils.errors import UserError
from tests.methods.test_methods_contract import METHODS

START = """
import torch
from ifsl_bench import Method, Prediction

class X(Method):
    def forward(self, support, query):
        means = support.class_means(self.ways)
        logits = torch.cat([query.base_logits, query.features @ means.mT], -1)
        {}
        return Prediction(logits)
"""
# At most 2.5% of an episode's spread, from the mean of its queries.
SLIGHTLY = "logits + 0.025 * logits.std((1, 2), keepdim=True) * (logits.mean(1, keepdim=True) - logits).tanh()"
BREAKS = {
    "logits = logits + torch.randn_like(logits)": "a second call gives another answer",
    "query.features.mul_(2)": "it writes into query.features",
    "logits = logits - 3 * logits.mean(0)": "depends on the other episodes in its batch",
    "logits = logits * torch.arange(1, logits.shape[1] + 1).view(1, -1, 1)": "depends on its place among the queries",
    "logits = (logits - logits.mean(1, keepdim=True)).sort(1, descending=True).values": "depends on",
    "logits = logits - 3 * logits.mean(1, keepdim=True)": "the answer to a query depends on the other queries",
    f"logits = {SLIGHTLY.replace('0.025', '0.005')}": "the answer to a query depends on the other queries",
    "logits[0] = logits[0] - 3 * logits[0].mean(0)": "depends on",
}


@pytest.fixture
def run(tmp_path, task, work):
    def call(line):
        (tmp_path / "x.py").write_text(START.format(line))
        return api.run(f"{tmp_path / 'x.py'}:X", task, work=work)

    return call


def test_a_method_that_breaks_the_contract_is_not_measured(run, clusters):
    for line, rule in BREAKS.items():
        with pytest.raises(UserError, match=rf"method 'X' breaks the contract: .*{rule}"):
            run(line)
    assert not list((clusters / "home").glob("results/*/X*"))


def test_what_an_inner_search_leaves_open_is_no_breach(run):
    statistics = "torch.zeros(len(logits))"
    with pytest.raises(UserError, match="depends on the other queries"):
        run(f"return Prediction({SLIGHTLY}, {{'steps': {statistics}}})")
    assert run(f"return Prediction({SLIGHTLY}, {{'solver_steps': {statistics}}})").summary["acc"]["mean"] > 20
    with pytest.raises(UserError, match="depends on the other queries"):
        run(f"return Prediction(logits - 3 * logits.mean(1, keepdim=True), {{'solver_steps': {statistics}}})")


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("searched", [True, False])
def test_rounding_where_large_numbers_cancel_is_no_breach(sound, searched):
    """Squared distances far from the origin lose digits, differently for one query and for many; of a method with an
    inner search, which may end a little apart, so far that it would be a breach too."""
    torch.manual_seed(0)
    far = 100 if searched else 3
    base = Base(torch.randn(9, 512), torch.zeros(9), far + 0.1 * torch.randn(9, 512))
    x, q = (far + 0.1 * torch.randn(8, rows, 512) for rows in (25, 40))
    labels, hidden = torch.arange(5).repeat_interleave(5).expand(8, -1), torch.zeros(8, 9, dtype=torch.bool)

    class Far(ProtoNet):
        def forward(self, support, query):
            logits = super().forward(support, query).logits
            if not sound:
                logits = logits - logits.mean(1, keepdim=True)
            return Prediction(logits, {"solver_steps": torch.zeros(len(logits))} if searched else {})

    support, query = Support(x, labels, hidden, x @ base.weight.T), Query(q, q @ base.weight.T)
    with torch.no_grad():
        case = ContractProbe("far", Far(base, 5), support, query, hidden).with_search_flag()
        assert find_query_dependence_fault(case), "in single precision"
    if sound:
        check_answers(case)
    else:
        with pytest.raises(UserError, match="depends on the other queries"):
            check_answers(case)


def test_copies_that_meet_are_found_where_the_class_says_that_they_do_not():
    class Draws(ProtoNet):
        """Takes and gives back PyTorch's one generator."""

        def forward(self, support, query):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                time.sleep(0.02)
                return Prediction(super().forward(support, query).logits + torch.randn(self.base.weight.shape[0] + 5))

    class Declares(Draws):
        parallel_copies = True

    cases = {kind: make_random_probe("x", kind, {}, 1, False, False) for kind in (Draws, Declares, ProtoNet)}
    breaches = (
        find_parallel_copies_fault(cases[Declares]) for _ in range(10)
    )  # on a busy machine they may miss each other
    assert any("several threads" in breach for breach in breaches)
    assert not find_parallel_copies_fault(cases[Draws]), "a subclass of a method that declares it does not"
    assert not find_parallel_copies_fault(cases[ProtoNet])
    with torch.no_grad():
        assert not find_repeat_fault(cases[Declares]), "one alone keeps the other rules"


@pytest.mark.parametrize("kept", ["prototypes", "weight"])
def test_what_a_method_keeps_of_a_hidden_class_is_found(kept):
    """It computes that from the base classifier when it is made, and hides nothing of it later."""

    class Keeps(ProtoNet):
        def __init__(self, base, ways):
            super().__init__(base, ways)
            self.register_buffer("mean", getattr(base, kept).mean(0))

        def forward(self, support, query):
            logits = super().forward(support, query).logits
            novel = logits[..., -self.ways :] + (query.features @ self.mean).unsqueeze(-1)
            return Prediction(torch.cat([logits[..., : -self.ways], novel], -1))

    breach = "a hidden base class leaves a trace in the answers"
    assert breach in dict(check_contract("keeps", Keeps, {})).values()
    assert breach not in dict(check_contract("protonet", ProtoNet, {})).values()


FITTED = ("etf-neck", "upper-bound")  # to each support set, by gradient descent
CHEAPER = {"ranpac": {"projections": 50}}
REGISTERED = [
    pytest.param(name, marks=[pytest.mark.slow("a fit for each of 28 answers")] * (name in FITTED)) for name in METHODS
]


@pytest.mark.parametrize("name", REGISTERED)
def test_every_registered_method_keeps_every_rule(name):
    if registry.load_plugin(registry.METHOD_GROUP, name).missing_module:
        pytest.skip("its extra is not installed")
    kind = registry.get_method(name)
    options = {"weight_decay": 1e-2} if "weight_decay" in kind.grid else CHEAPER.get(name, {})
    breaches = dict(check_contract(name, kind, options))
    assert len(breaches) == len(EPISODE_RULES) - (not kind.may_run_in_threads()), (
        "copies are for classes that allow them"
    )
    assert not {rule: broken for rule, broken in breaches.items() if broken}


def test_the_command_says_rule_by_rule_what_is_broken(call, tmp_path):
    status, out, _ = call("methods", "--check", "protonet")
    assert status == 0
    kind = registry.get_method("protonet")
    assert out.count(" ok") == len(EPISODE_RULES) - (not kind.may_run_in_threads()) + len(OF_SESSIONS) - (
        not kind.order_free
    )
    (tmp_path / "x.py").write_text(START.format("logits = logits + torch.randn_like(logits)"))
    status, out, err = call("methods", "--check", str(tmp_path / "x.py"))
    assert status == 2
    assert "a second call gives another answer" in out
    assert "method 'X' breaks" in err
    (tmp_path / "x.py").write_text(START.format("logits = logits[:, :, 1:]"))
    status, out, err = call("methods", "--check", str(tmp_path / "x.py"))
    assert (status, out) == (2, "")
    assert err.count("returned logits of shape") == 1, "not once for each rule"
    assert err.endswith("; asked with 1 shot and all base classes\n")
