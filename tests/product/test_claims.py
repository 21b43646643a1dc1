"""Claims of README and docs on rows are borne by the stored results; nothing is said of rows without a claim."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import claims as module_of_claims
import numpy as np
import pytest
from claims import Claim, EvaluatedClaim, edges_of, evaluate, evaluate_all, read_claims, summary
from scipy import stats

from ifsl_bench import grid
from ifsl_bench.analysis import task_results
from ifsl_bench.analysis.comparison import compare_rows
from ifsl_bench.analysis.task_results import load_task_results
from ifsl_bench.plugin.display_names import display_names_by_row
from ifsl_bench.protocols.tasks.task_files import load_tasks
from ifsl_bench.store.result_folder import CLAIMS_FILE, packaged_results_folder
from ifsl_bench.store.schema import write_result
from ifsl_bench.utils.errors import UserError
from ifsl_bench.utils.files import Paths
from tests.analysis.test_recipe_grid import relabelled, without_stored_recipes
from tests.store.result_fields import row

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TASK = "mini-5shot"
VERBS = {  # the first that fits: "gains nothing" is no gain
    "not told apart": r"not told apart|cannot be told apart",
    "equivalent": r"within (?=[\d.]+\b)|equivalent|gains? nothing|costs? nothing|level with|as good as",
    "ahead": r"ahead|leads?|gains?|beats?|better|outperforms?",
    "behind": r"behind|los(?:es|e|t)|costs?|worse",
}
VERB = re.compile("|".join(rf"\b(?P<{says.replace(' ', '_')}>{words})" for says, words in VERBS.items()))
NAMES = sorted(
    (*(re.escape(row.printed_name) for row in display_names_by_row().values()), "[Aa]ttractors?", "[Aa]ttention"),
    key=len,
)
METHOD = re.compile(rf"(?<![\w+`/-])(?:{'|'.join(reversed(NAMES))})\b")
FINDINGS = ("README.md", "results.md")  # where "it gains 2 points" is of a row too

READS_ALL = pytest.mark.slow("all rows that sentences compare are read")


@pytest.fixture(scope="module")
def claims() -> dict[str, EvaluatedClaim]:
    return {judgement.name: judgement for judgement in evaluate_all()}


@pytest.fixture(scope="module")
def tables(claims) -> ModuleType:
    """docs/tables.py, the claims computed once."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.sentences = lambda: {name: judgement.text for name, judgement in claims.items()}
    return module


# -- what pages say


@READS_ALL
def test_every_claim_holds_and_says_so(claims):
    """Its verb is one of what it says, its rows end inside of what was tried or it says that they do not."""
    for name, judgement in claims.items():
        assert judgement.holds, f"{name} is {judgement.verdict}: {judgement.text}"
        verbs = {match.lastgroup.replace("_", " ") for match in VERB.finditer(judgement.text)}
        assert verbs == {judgement.claim.says}, f"{name}: {judgement.text}"
        assert bool(edges_of(judgement)) == ("edge" in judgement.text), f"{name}: {edges_of(judgement)}"


@READS_ALL
def test_every_claim_is_in_a_page_with_its_numbers(claims, tables):
    for name, page in PAGES.items():
        assert tables.claimed(page) == page, f"{name}: write its numbers with: python docs/tables.py"
    missing = set(claims) - {name for page in PAGES.values() for name in tables.CLAIM.findall(page)}
    assert not missing, f"in no page: {missing}"


def unclaimed(page: str, tables: ModuleType, findings: bool = True) -> list[str]:
    """The sentences of a page that compare rows and are no claims or questions. What papers say is not computed."""
    rows = re.compile(rf"{METHOD.pattern}|\d points?\b") if findings else METHOD
    for name in dict.fromkeys(tables.CLAIM.findall(page)):
        page = tables.marked(name, tables.sentences()[name]).sub("", page)
    prose = re.sub(r"```.*?```|<!--.*?-->|^\|[^\n]*$|^ {4}[^\n]*$|`[^`\n]*`|\]\([^)]*\)", "", page, flags=re.S | re.M)
    sentences = re.split(r"(?<=[.?!:])\s+(?=[A-Z*\[(])|\n\s*\n|\n(?=[*#]|\d\.)", prose)
    return [
        sentence
        for sentence in sentences
        if VERB.search(sentence) and rows.search(sentence) and "paper" not in sentence and not sentence.endswith("?")
    ]


@READS_ALL
def test_nothing_is_said_of_rows_without_a_claim(tables):
    page_sentences = {name: unclaimed(page, tables, name in FINDINGS) for name, page in PAGES.items()}
    assert {name: sentences for name, sentences in page_sentences.items() if sentences} == {}


@READS_ALL
def test_a_sentence_without_a_claim_is_noticed(tables):
    (line,) = re.findall(r"^.*<!-- claim: bias-photographs-1shot -->", PAGES["results.md"], re.M)
    assert unclaimed(line, tables) == []
    assert unclaimed(line.partition("<!--")[0], tables)
    assert unclaimed(f"{line} On birds it gains 2 points.", tables) == ["On birds it gains 2 points."]


@READS_ALL
def test_a_wrong_number_is_written_anew_and_other_words_are_refused(tables):
    words = "with 60 base classes LR+A is\n9.9 points ahead of LR and 12 points ahead of LR+S."
    line = f"{words}<!-- claim: base-classes-5shot -->"
    again = tables.claimed(line)
    assert again == tables.claimed(again) != line
    numbers = re.escape(words).replace(re.escape("9.9"), r"\d\.\d").replace("12", r"\d\.\d")
    assert re.fullmatch(f"{numbers}<!.*>", again)
    with pytest.raises(UserError, match="the words before the comment of claim base-classes-5shot are not: with 60"):
        tables.claimed(line.replace("ahead", "behind"))
    with pytest.raises(UserError, match="unknown claim 'nobody-said-that'"):
        tables.claimed("Well.<!-- claim: nobody-said-that -->")


# -- verdicts


def naive(claims: dict[str, Claim]) -> dict[str, str]:
    """Verdicts from ``compare``, SciPy's Student distribution and plain loops over Holm's steps."""
    p: dict[tuple, float] = {}
    requirements: dict[str, tuple[list, list]] = {}
    loaded = {
        task: load_task_results(load_tasks(task)[0], packaged_results_folder())
        for claim in claims.values()
        for task in claim.tasks
    }
    for name, claim in claims.items():
        requirements[name] = assertions, refutations = [], []
        for task in claim.tasks:
            board = loaded[task]
            for a, b in claim.rows:
                for rival in [r.label for r in board.ranking.family if r.label != a] if b == "*" else [b]:
                    gap = compare_rows(
                        board.find_row(a), board.find_row(rival), board.comparable_rows
                    ).overall_differences[claim.metric]

                    def above(first, second, c, sign, gap=gap, key=(task, claim.metric)):
                        p[*key, first, second, c] = stats.t.sf(
                            (sign * gap.mean - c) / gap.standard_error, gap.degrees_of_freedom
                        )
                        return *key, first, second, c

                    m = claim.margin
                    ours, theirs = above(a, rival, 0.0, 1), above(rival, a, 0.0, -1)
                    if m:
                        del p[ours], p[theirs]
                        assertions += [above(a, rival, -m, 1), above(rival, a, -m, -1)]
                        refutations += [above(a, rival, m, 1), above(rival, a, m, -1)]
                    else:
                        assertions += {"ahead": [ours], "behind": [theirs]}.get(claim.says, [])
                        refutations += {"ahead": [theirs], "behind": [ours]}.get(claim.says, [ours, theirs])
    asserted = {key for assertions, refutations in requirements.values() for key in assertions or refutations}
    opposed = {key for assertions, refutations in requirements.values() if assertions for key in refutations}
    rejections = set()
    for keys, level in ((asserted, 0.045), (opposed, 0.005)):
        for step, key in enumerate(sorted(keys, key=p.get)):
            if p[key] > level / (len(keys) - step):
                break
            rejections.add(key)
    verdicts = {}
    for name, (assertions, refutations) in requirements.items():
        says, m = claims[name].says, claims[name].margin
        if rejections & set(refutations):
            verdicts[name] = "contradicted"
        elif says == "not told apart" or not set(assertions) <= rejections:
            verdicts[name] = "not shown" if m else "not told apart"
        else:
            verdicts[name] = f"equivalent within {m:g}" if m else "supported"
    return verdicts


@READS_ALL
def test_verdicts_are_those_of_a_plain_computation():
    every = read_claims(packaged_results_folder() / CLAIMS_FILE)
    some = {name: every[name] for name in ("attention-gains", "attention-letters-5shot", "lwof-letters")}
    some["wrong"] = Claim("", ["glyphs-1shot"], "ahead", [("lr+s", "lr+a")])
    some["small"] = Claim("", ["glyphs-5shot"], "equivalent", [("lr+a", "lr+s"), ("mlp+a", "mlp+s")], margin=0.6)
    some["far"] = Claim("", ["glyphs-1shot"], "equivalent", [("lr+a", "lr+s")], margin=2.0)
    some["chance"] = Claim("", ["glyphs-5shot"], "behind", [("lr", "lr+a")], metric="calibrated_acc")  # p = 0.01, alone
    some["alike"] = Claim("", ["glyphs-1shot"], "not told apart", [("lr+a", "lr+s")])
    result = {
        judgement.name: judgement.verdict
        for judgement in evaluate(some, Paths(packaged_results_folder(), packaged_results_folder()))
    }
    assert result == naive(some)
    assert set(result.values()) == {"supported", "contradicted", "not told apart", "not shown", "equivalent within 1.5"}


@pytest.mark.parametrize(
    ("a", "b", "says", "margin", "verdict", "holds"),
    [
        ("low", "high", "behind", 0, "supported", True),
        ("low", "high", "ahead", 0, "contradicted", False),
        ("low", "same", "ahead", 0, "not told apart", False),
        ("low", "same", "not told apart", 0, "not told apart", True),
        ("low", "high", "not told apart", 0, "contradicted", False),
        ("low", "same", "equivalent", 1.0, "equivalent within 1", True),
        ("low", "loose.x=1", "equivalent", 1.0, "not shown", False),
        ("low", "loose.x=1", "not told apart", 0, "not told apart", True),
        ("high", "low", "equivalent", 1.0, "contradicted", False),
        ("high", "*", "ahead", 0, "supported", True),
    ],
)
def test_verdicts_of_rows_whose_differences_are_known(a, b, says, margin, verdict, holds, tmp_path, monkeypatch):
    """A hit is 2 points: "high" is 4 points above "low" and "same"; "loose", 5 points apart between seeds, may be."""
    row_means = {"high": [14] * 5, "low": [12] * 5, "same": [12] * 5, "loose.x=1": [7, 17, 12, 9.5, 14.5]}
    for noise, (label, means) in enumerate(row_means.items()):
        settings = {"method": "loose", "options": {"x": 1}} if "." in label else {}
        for result in row(label, means, n=2000, noise=noise, **settings).results:
            write_result(tmp_path, result)
    monkeypatch.setattr(task_results, "packaged_results_folder", lambda: tmp_path / "none")
    claim = Claim("{0.by:.1f} {least.by:.1f}", [TASK], says, [(a, b)], margin=margin)
    (judgement,) = evaluate({"x": claim}, Paths(tmp_path, tmp_path))
    assert (judgement.verdict, judgement.holds) == (verdict, holds)
    if says == "behind":
        assert np.allclose([float(number) for number in judgement.text.split()], 4, atol=0.2)  # 8 standard errors


def test_the_lazy_model_of_another_row_never_answers_with_a_novel_class():
    claim = Claim("", ["tiny-features-sessions"], "ahead", [("ncm", "lazy (lr)")])
    (judgement,) = evaluate({"x": claim}, Paths(packaged_results_folder(), packaged_results_folder()))
    assert "with 95% interval over orders and seeds." in summary([judgement])
    (evidence,) = judgement.evidence
    (row,) = (
        row
        for row in load_task_results(*load_tasks("tiny-features-sessions"), packaged_results_folder()).rows
        if row.label == "lr"
    )
    gaps = []
    for ncm, lr in zip(evidence.a.results, row.results, strict=True):
        hits, queries = lr.to_hit_counts().hits[:, :1].astype(int), lr.to_hit_counts().queries.astype(int)
        gaps.append(ncm.summary["acc"]["mean"] - 100 * (hits / queries.cumsum(1)).mean())
    assert evidence.difference.mean == pytest.approx(np.mean(gaps), abs=1e-5)  # summaries have six digits


@pytest.fixture
def no_stored_recipes(tmp_path_factory):
    with without_stored_recipes(tmp_path_factory.mktemp("stored")):
        yield


@pytest.mark.slow("rows of recipes are made")
def test_claims_on_recipes_and_on_shares_of_variance(no_stored_recipes, tmp_path):
    """A recipe minus another under a classifier is the row minus the row; a share is that of the command `grid`."""
    stand_ins = {("closer", "ncm"): "protonet", ("closer", "teen"): "imprint"}
    relabelled(tmp_path, "glyphs-sessions", stand_ins, range(3))
    file = tmp_path / "claims.toml"
    file.write_text(
        """
[recipes]
text = "closer is {least.by:.1f} to {most.by:.1f} points behind"
recipes = [["closer", "ce"]]
methods = ["ncm", "teen"]
tasks = ["glyphs-sessions"]
says = "behind"
[shares]
text = "The classifier explains {0.by:.1f} percent more than the recipe"
shares = [["classifier", "recipe"]]
tasks = ["glyphs-sessions"]
says = "ahead"
[number]
text = "The recipe explains more than 99 percent"
shares = [["recipe", 99]]
tasks = ["glyphs-sessions"]
says = "ahead"
"""
    )
    folders = Paths(tmp_path, tmp_path)
    judged = {judgement.name: judgement for judgement in evaluate(read_claims(file), folders)}
    board = load_task_results(*load_tasks("glyphs-sessions"), tmp_path).select_recipes(["ce", "closer"])
    for evidence, method in zip(judged["recipes"].evidence, ("ncm", "teen"), strict=True):
        a, b = board.find_row(f"{method}.recipe=closer"), board.find_row(method)
        assert (evidence.a.label, evidence.b.label) == (a.label, b.label)
        assert evidence.difference == compare_rows(a, b, board.comparable_rows).overall_differences["acc"]
    shares = {record["source"]: record for record in grid("glyphs-sessions", results=tmp_path) if "percent" in record}
    gap = shares["classifier"]["percent"] - shares["recipe"]["percent"]
    assert judged["shares"].evidence[0].by == pytest.approx(gap, abs=1e-3)
    assert judged["shares"].verdict == "not told apart", "with two of each"
    assert judged["number"].verdict == "contradicted", "and so its two differences are kept apart from the other's"
    assert "percent of the variance of Avg." in "\n".join(module_of_claims.lines_of(judged["shares"]))
    with pytest.raises(UserError, match="unknown source 'recipes' of the variance on glyphs-sessions"):
        evaluate({"x": Claim("", ["glyphs-sessions"], "ahead", shares=[("recipes", 1.0)])}, folders)
    with pytest.raises(UserError, match="there is no row of lr on glyphs-sessions under the recipe closer"):
        evaluate({"x": Claim("", ["glyphs-sessions"], "ahead", recipes=[("closer", "ce")], methods=["lr"])}, folders)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('says = "ahead"\nrecipes = [["a", "b"]]\nmethods = ["ncm"]', "a claim is on rows, on recipes under methods"),
        ('says = "above"', "Invalid enum value 'above'"),
        ('says = "ahead"\nmargn = 1.0', "unknown field `margn`; did you mean 'margin'?"),
        ('says = "equivalent"', "equivalence needs a margin above 0"),
        ('says = "ahead"\nmargin = 1', "no other claim has one"),
        ('says = "ahead"\nmetric = "accuracy"', "unknown metric 'accuracy' of claim x"),
    ],
)
def test_mistakes_in_the_file(line, reason, tmp_path):
    file = tmp_path / "claims.toml"
    file.write_text(f'[x]\ntext = "A leads."\nrows = [["a", "b"]]\ntasks = ["{TASK}"]\n{line}\n')
    with pytest.raises(UserError, match=re.escape(reason)):
        read_claims(file)


@READS_ALL
def test_the_command(claims, monkeypatch, capsys):
    monkeypatch.setattr(
        module_of_claims, "evaluate_all", lambda _: list(claims.values())
    )  # as it would find them again
    monkeypatch.setattr(sys, "argv", ["claims.py", "attention-gains"])
    assert module_of_claims.main() == 0
    assert claims["attention-gains"].text in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["claims.py", "attention-gain"])
    assert module_of_claims.main() == 2
    assert "unknown claim 'attention-gain'" in capsys.readouterr().err
