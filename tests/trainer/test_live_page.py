"""The live page of a run: over HTTP, and in a real browser (headless Chromium); `titogym runs`."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.trainer.test_asynchronous import Case
from tests.trainer.worlds import failed, tasks
from titogym.cli.main import app
from titogym.errors import UserError
from titogym.trainer.pages.live import serving
from titogym.trainer.pages.view import Listing, figures
from titogym.trainer.runs.directory import RunDirectory

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    warnings.warn("no Chromium on this machine: the live page is NOT TESTED in a browser", stacklevel=1)

MARKUP = "<script>window.hacked = true</script>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("runs") / "bandit"
    case = Case(path, run__steps=6)
    case.world.break_episode = lambda n: failed(tasks(1)[0], "crashed", MARKUP) if n == 7 else None
    asyncio.run(case.go())
    asyncio.run(Case(path.with_name("other"), run__steps=3, buffer__max_staleness=1).go())
    run = RunDirectory(path)
    record = run.metrics()[-1]  # the world in memory has no torch: the figures that it would give
    record |= {
        "histogram": {"0.98": 3, "1.002": 40, "1.02": 9, "inf": 1},
        "tis/lag_1/tokens": 53,
        "tis/lag_1/deviation": 0.01,
        "tis/lag_1/k3": 1e-4,
        "tis/lag_1/clipped_fraction": 0.02,
    }
    lines = [*run.metrics_path.read_bytes().splitlines()[:-1], json.dumps(record).encode()]
    run.metrics_path.write_bytes(b"\n".join(lines) + b"\n")
    kept = [r for place, r in run.trajectories() if place.startswith("step-000006")]
    kept[0]["texts"][3] = MARKUP
    run.keep_trajectories("step-000006", kept)
    return path


@pytest.fixture
def url(directory) -> Iterator[str]:
    with serving(RunDirectory(directory), 0) as url:
        yield url


def test_the_page_has_everything_and_runs_no_foreign_script(url):
    page = httpx.get(url)
    assert page.status_code == 200
    for expected in (
        "Reward",
        "Queue",
        "Staleness",
        "Importance ratios",
        "Slowest tasks",
        "not running",
        "Mismatch by age",
        "by how long they take",
    ):
        assert expected in page.text
    assert page.text.count("<svg") >= 6
    assert MARKUP not in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe-inline" not in page.headers["content-security-policy"].split("style-src")[0]


def test_every_listed_trajectory_opens_token_by_token(url):
    page = httpx.get(url).text
    places = [part.split('"')[0] for part in page.split('href="/trajectories/')[1:]]
    assert len(places) >= 20
    assert places[0].startswith("step-000006") or places[0].startswith("eval-000006")
    for place in (places[0], places[-1]):
        opened = httpx.get(f"{url}/trajectories/{place}")
        assert opened.status_code == 200
        assert "engine log-prob" in opened.text
    assert MARKUP not in httpx.get(f"{url}/trajectories/step-000006/0").text


@pytest.mark.parametrize(
    "place",
    [
        "step-000006/99",
        "step-1/" + "9" * 5000,
        "nothing",
        "..%2F..%2Fconfig.json",
        "step-9/x",
        "../config/0",
        "step-1/-1",
    ],
)
def test_what_is_not_kept_is_not_found(url, place):
    assert httpx.get(f"{url}/trajectories/{place}").status_code == 404


def test_a_foreign_name_for_this_address_is_refused(url):
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 400


def test_new_trajectories_are_listed_first_and_old_files_are_read_once(directory, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    record = next(iter(RunDirectory(directory).trajectories()))[1]
    for step in (1, 2, 10):
        run.keep_trajectories(f"step-{step:06d}", [record] * 2)
    read: list[str] = []
    kept = run.kept

    def counted(self: RunDirectory, name: str) -> Any:
        read.append(name)
        return kept(name)

    monkeypatch.setattr(RunDirectory, "kept", counted)
    listing = Listing(run)
    assert [line["place"] for line in listing.latest(3)] == [
        "step-000010/0",
        "step-000010/1",
        "step-000002/0",
    ]
    run.keep_trajectories("eval-000010", [record])
    assert listing.latest(3)[0]["place"] == "step-000010/0"
    assert "eval-000010/0" in [line["place"] for line in listing.latest(9)]
    assert sorted(read) == ["eval-000010", "step-000001", "step-000002", "step-000010"]


def test_long_runs_draw_a_bounded_number_of_points(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "long")
    run = RunDirectory(tmp_path / "long")
    record = run.metrics()[-1]
    run.metrics_path.write_text("".join(json.dumps({**record, "step": n}) + "\n" for n in range(1, 1203)))
    reward = figures(run)["charts"][0]["series"][0]
    assert 400 <= len(reward.points) <= 500
    assert reward.points[-1][0] == 1202


def test_prometheus_metrics_are_those_of_the_last_step(url, directory):
    text = httpx.get(url + "/metrics").text
    last = RunDirectory(directory).metrics()[-1]
    assert f"titogym_step {last['step']}\n" in text
    assert f"titogym_reward_mean {last['reward/mean']!r}\n" in text
    assert f"titogym_eval_score {RunDirectory(directory).evaluations()[-1]['score']!r}\n" in text


def test_a_page_of_a_damaged_run_says_so(tmp_path):
    RunDirectory.create(tmp_path, Case(tmp_path).config).release()
    (tmp_path / "metrics.jsonl").write_text("{\n{}\n")
    with serving(RunDirectory(tmp_path), 0) as url:
        page = httpx.get(url)
    assert page.status_code == 500
    assert "the file was damaged" in page.text


def test_a_port_that_is_taken_is_told(url, directory):
    port = int(url.rpartition(":")[2])
    run = RunDirectory(directory)
    with pytest.raises(UserError, match=f"Port {port} .* cannot be used"), serving(run, port):
        pass


# --- in a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def test_the_page_follows_a_run_and_opens_its_trajectories(browser, directory, tmp_path):
    path = tmp_path / "followed"
    shutil.copytree(directory, path)
    run = RunDirectory(path)
    records = run.metrics()
    run.metrics_path.write_text("".join(json.dumps(r) + "\n" for r in records[:2]))
    status = {"step": 2, "steps": 6, "phase": "training", "queue": 3, "capacity": 4}
    status |= {"in_flight": 5, "places": 12}
    run.write_status(status)
    errors: list[str] = []
    with serving(run, 0) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto(url)
        assert page.locator(".state").inner_text() == "running: training"
        assert "5 of 12" in page.locator("#tiles").inner_text()
        dots = page.locator("#figures .card.wide circle.c1")
        assert dots.count() == 2
        for record in records[2:]:
            run.add_metrics(record)
        run.write_status({**status, "step": 6, "phase": "saving the model"})
        page.locator(".state", has_text="saving the model").wait_for()
        assert dots.count() == 6
        assert "6 of 6" in page.locator("#tiles").inner_text()
        run.clear_status()
        page.locator(".state", has_text="not running").wait_for()
        assert page.locator("rect.bar").count() == 4
        assert "53" in page.locator("#figures").inner_text()

        link = page.locator("#trajectories a[href$='step-000006/0']")
        link.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(".tokens b")
        assert MARKUP in page.locator(".tokens").inner_text()
        assert "engine log-prob" in str(page.locator(".tokens b").first.get_attribute("title"))
        assert page.evaluate("window.hacked") is None
        page.go_back()
        page.wait_for_selector("#trajectories a")
        page.close()
    assert errors == []


def test_the_page_says_that_its_server_has_ended(browser, directory):
    page = browser.new_page()
    page.set_default_timeout(20_000)
    with serving(RunDirectory(directory), 0) as url:
        page.goto(url)
    page.locator(".state", has_text="server has ended").wait_for()
    page.close()


# --- titogym runs ------------------------------------------------------------------------------------


def runs(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["runs", *arguments], env={"COLUMNS": "200"})


def test_runs_are_listed_with_what_they_came_to(directory):
    result = runs("list", str(directory.parent))
    assert result.exit_code == 0, result.output
    after = RunDirectory(directory).evaluations()[-1]["score"]
    assert "bandit" in result.output
    assert "6 of 6" in result.output
    assert f"{after:.3f}" in result.output


def test_a_damaged_run_does_not_hide_the_others(directory, tmp_path):
    for name in ("good", "damaged"):
        shutil.copytree(directory, tmp_path / name)
    (tmp_path / "damaged" / "metrics.jsonl").write_text("{]\n{}\n")
    result = runs("list", str(tmp_path))
    assert result.exit_code == 0, result.exception
    assert "JSON" in result.output
    assert "6 of 6" in result.output


def test_runs_are_compared_by_what_they_came_to_and_how_they_differ(directory):
    result = runs("compare", str(directory), str(directory.with_name("other")))
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("│")] for line in result.output.splitlines()]
    rows = {cells[1]: cells[2:4] for cells in lines if len(cells) > 3}
    assert rows["steps"] == ["6", "3"]
    assert rows["buffer.max_staleness"] == ["3", "1"]
    assert rows["run.steps"] == ["6", "3"]
    assert "model.dir" not in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "."], "There is no run in"),
        (["compare", "."], "not a run directory"),
        (["watch", "."], "not a run directory"),
    ],
)
def test_what_is_no_run_is_told(tmp_path, arguments, message):
    result = runs(arguments[0], str(tmp_path))
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_one_run_cannot_be_compared(directory):
    assert "at least two" in str(runs("compare", str(directory)).exception)


def test_watch_serves_until_it_is_interrupted(directory):
    command = [sys.executable, "-m", "titogym", "runs", "watch", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.partition(" at ")[2].split()[0]
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                assert "bandit" in httpx.get(url).text
                break
            except httpx.TransportError:
                time.sleep(0.1)
        process.send_signal(2)
        assert process.wait(20) == 0
