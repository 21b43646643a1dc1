"""Removing a prepared data set."""

from __future__ import annotations

from ifsl_bench.utils.files import write_bytes
from ifsl_bench.utils.locks import hold_lock, unfinished_path


def test_what_goes_is_said_and_goes_when_agreed_to(features_folder, tmp_path, call):
    home = ("--home", str(tmp_path / "home"))
    assert call("data", "prepare", "mine", "--from", str(features_folder), *home)[0] == 0
    folder, tasks = tmp_path / "home" / "data" / "mine", tmp_path / "home" / "tasks" / "mine.toml"
    assert tasks.is_file()
    status, out, err = call("data", "remove", "mine", *home)
    assert status == 2
    assert [str(folder), str(tasks)] == [line.removeprefix("to be removed: ") for line in out.splitlines()]
    assert err == "ifsl-bench: there is no terminal to ask for confirmation: add --yes to remove what is listed\n"
    assert folder.is_dir()
    status, out, _ = call("data", "remove", "mine", "--yes", *home)
    assert status == 0
    assert "cache prune" in out
    assert not folder.exists()
    assert not tasks.exists()
    assert "mine" not in call("data", "list", *home)[1]
    status, _, err = call("data", "remove", "mine", "--yes", *home)
    assert status == 2
    assert "unknown prepared data set 'mine'" in err
    assert call("data", "prepare", "mine", "--from", str(features_folder), *home)[0] == 0


def test_an_unfinished_import_goes_and_one_that_runs_stays(tmp_path, call):
    home = ("--home", str(tmp_path / "home"))
    folder = tmp_path / "home" / "data" / "mine"
    unfinished_path(folder).mkdir(parents=True)
    (unfinished_path(folder) / "base-train.images.npy").touch()
    with hold_lock(folder):
        status, _, err = call("data", "remove", "mine", "--yes", *home)
    assert status == 2
    assert "being imported by another process" in err
    status, out, _ = call("data", "remove", "mine", "--yes", *home)
    assert status == 0
    assert f"to be removed: {unfinished_path(folder)}\n" in out
    assert not unfinished_path(folder).exists()
    assert "mine" not in call("data", "list", *home)[1]


def test_the_task_file_stays_while_results_are_read_with_it(features_folder, tmp_path, call):
    home = ("--home", str(tmp_path / "home"))
    assert call("data", "prepare", "mine", "--from", str(features_folder), *home)[0] == 0
    result = tmp_path / "home" / "results" / "mine-5shot" / "imprint.seed-0.json"
    write_bytes(result, b"{}")
    assert call("data", "remove", "mine", "--yes", *home)[0] == 0
    assert not (tmp_path / "home" / "data" / "mine").exists()
    assert call("tasks", "show", "mine-5shot", *home)[0] == 0
    status, _, err = call("data", "remove", "mine", "--yes", *home)
    assert (status, err.count("\n")) == (2, 1)
    assert "mine.toml stays, with which results" in err
    result.unlink()
    assert call("data", "remove", "mine", "--yes", *home)[0] == 0
    assert not (tmp_path / "home" / "tasks" / "mine.toml").exists()


def test_what_belongs_to_other_data_stays(features_folder, tmp_path, call):
    home = ("--home", str(tmp_path / "home"))
    assert call("data", "prepare", "mine", "--from", str(features_folder), *home)[0] == 0
    text = (tmp_path / "home" / "tasks" / "mine.toml").read_text()  # on the same data
    write_bytes(tmp_path / "home" / "tasks" / "others.toml", text.replace("mine-", "others-").encode())
    write_bytes(tmp_path / "home" / "results" / "mine-2-5shot" / "imprint.seed-0.json", b"{}")
    status, _, err = call("data", "remove", "others", "--yes", *home)
    assert (status, err.split(";")[0]) == (2, "ifsl-bench: unknown prepared data set 'others'")
    write_bytes(tmp_path / "home" / "tasks" / "wrong.toml", b"[")
    assert call("data", "remove", "mine", "--yes", *home)[0] == 0
    assert sorted(path.name for path in (tmp_path / "home" / "tasks").iterdir()) == ["others.toml", "wrong.toml"]


def test_names_that_are_no_data_set_remove_nothing(clusters, call):
    home = clusters / "home"
    for name in ("..", "../data", "clusters/manifest.json", "", ".", str(home / "data" / "clusters")):
        status, out, err = call("data", "remove", name, "--yes", "--home", str(home))
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
    assert (home / "data" / "clusters" / "manifest.json").is_file()
