"""What a result says of the code that made it."""

from __future__ import annotations

import subprocess

from ifsl_bench.experiments import evaluate_stage as evaluating


def test_the_commit_says_whether_code_differs_and_leaves_results_out(tmp_path, monkeypatch):
    files = {
        "ifsl_bench/experiments/evaluate_stage.py": "1",
        "results/t-1shot/lr.seed-0.json": "1",
        "results/claims.toml": "1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(evaluating, "__file__", str(tmp_path / "ifsl_bench/experiments/evaluate_stage.py"))
    assert evaluating.read_git_commit() == ""

    def git(*arguments: str) -> str:
        names = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        return subprocess.run(
            ["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD").strip()
    assert evaluating.read_git_commit() == head
    (tmp_path / "results/t-1shot/lr.seed-0.json").write_text("2")
    (tmp_path / "results/t-1shot/lr.seed-1.json").write_text("1")
    assert evaluating.read_git_commit() == head
    for name in ("results/claims.toml", "ifsl_bench/experiments/evaluate_stage.py"):
        (tmp_path / name).write_text("2")
        assert evaluating.read_git_commit() == f"{head}+changes", name
        git("checkout", name)
