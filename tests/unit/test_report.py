"""`acsgd report`: one page of one or more runs, whatever their files hold."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lib.records import RECORD

from acsgd.commands.report.command import ReportCommand, page_of
from acsgd.commands.top import TopCommand
from acsgd.io.telemetry.history import read_run
from acsgd.io.telemetry.step_time import StepTime

HOSTILE = '</script><script>document.title="injected"</script><img src=x onerror=document.title="injected">{{DATA}}'
RANKS = {
    "compute_s": [[0.5, 1.0], [0.25, 0.25]],
    "pp_forward_wait_s": [[0.0, 0.75], [0.0, 0.0]],
    "pp_forward_bytes": [[4e6, 0], [4e6, 0]],
    "pp_backward_bytes": [[0, 2e6], [0, 2e6]],
}
LOG = "2026-11-20 16:05:35.123 | INFO     | rank 0, stage 0, replica 0 | acsgd.io.telemetry.metrics:note:1 - "


def make_run(directory: Path, steps: int = 4, config: str = "[optim]\nsteps = 4\n") -> Path:
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(config)
    record = RECORD._replace(ranks=RANKS, schedule_bubble=0.2)
    lines = [record._replace(step=step, evaluation={"eval_loss": 3.0}).line() for step in range(1, steps + 1)]
    lines.insert(2, {"event": "view", "after_step": 2, "hosts": HOSTILE})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "logs").mkdir()
    (directory / "logs" / "rank-00000.log").write_text(
        f"{LOG}resuming from runs/x/checkpoints/step-00000002: step 2\n{LOG}step 3: loss 9.0 is a spike; {HOSTILE}\n"
        f"not a record\n{LOG}saved runs/x/checkpoints/step-00000004, on disk after 0.1 s\n"
    )
    return directory


class _Page(html.parser.HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attributes if name in ("src", "href")]


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_a_page_holds_all_runs_and_asks_no_other_host(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name / "run") for name in ("a", "b")]
    page = page_of([read_run(run) for run in runs])
    parsed, data = _Page(page), data_of(page)
    assert parsed.tags.count("script") == 3
    assert parsed.links == []
    assert "default-src 'none'" in page
    assert len(page) < 200_000
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    curves = {(chart.get("run"), chart["title"]): chart["curves"] for chart in data["charts"]}
    assert [curve["values"] for curve in curves[None, "Loss"]] == [[2.5] * 4, [3.0] * 4] * 2
    sent = {curve["label"]: curve["values"][0] for curve in curves[1, "Sent over each link, MB/step"]}
    assert sent == {"link 0->1": 4.0, "link 2->3": 4.0, "link 1->0": 2.0, "link 3->2": 2.0}
    events = [(event["step"], event["kind"]) for event in data["runs"][0]["events"]]
    assert events == [(2, "view"), (2, "resume"), (3, "spike"), (4, "save")]


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    config = f"[log]\nname = '{HOSTILE}'\n"
    page = page_of([read_run(make_run(tmp_path / HOSTILE.replace("/", "|"), config=config))])
    assert _Page(page).tags == _Page(page_of([read_run(make_run(tmp_path / "plain"))])).tags
    assert data_of(page)["runs"][0]["config"]["log.name"] == HOSTILE


@pytest.mark.parametrize(
    ("damage", "sentence", "steps"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl cannot be read (No such file", 0),
        (lambda run: (run / "metrics.jsonl").write_bytes(b""), "metrics.jsonl has no step yet", 0),
        (
            lambda run: (run / "metrics.jsonl").write_bytes(
                b'\xff\n[]\n{"step": 1e400}\n'
                + b"[" * 10**5
                + b'\n{"step": 1, "ranks": [1], "loss": NaN}\n{"step": "x"}\n7\n{"step": 2, "step_s": "y"}\n'
                b'{"step": "3", "step_s": 1e400, "ranks": {"compute_s": [[1e400]]}, "data_wait_s": 0}\n{"st'
            ),
            "6 damaged lines are left out, the first is line 1",
            3,
        ),
        (
            lambda run: (run / "metrics.jsonl").write_bytes(
                b'"event"\n{"step": 1, "step_s": 1e308, "save_stall_s": 1e308, "loss": 1%b}\n'
                b'{"step": 2, "step_s": 1e-320, "ranks": {"dp_bytes": [[1%b, 1e308]], "compute_s": [[1e308, 1e308]]}}\n'
                b'{"event": "\\ud800", "after_step": 2, "text": "\\udc80"}\n' % (b"0" * 400, b"0" * 400)
            ),
            "1 damaged lines are left out, the first is line 1",
            2,
        ),
        (lambda run: (run / "config.toml").write_text("a = " + "[" * 10**5), "config.toml is damaged (", 4),
        (lambda run: (run / "config.toml").write_text(f"[optim]\nsteps = '{'9' * 5000}'"), None, 4),
        (lambda run: (run / "config.toml").unlink(), "config.toml cannot be read (No such file", 4),
        (lambda run: (run / "config.toml").write_bytes(b"\xff = ["), "config.toml is damaged (", 4),
        (lambda run: shutil.rmtree(run / "logs"), None, 4),
    ],
)
def test_what_is_missing_is_one_sentence_and_the_rest_is_shown(
    damage: Any, sentence: str | None, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    damage(run)
    ReportCommand((run,)).run()
    *problems, wrote = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote {run / 'report.html'}, ")
    shown = data_of((run / "report.html").read_text())["runs"][0]
    assert (shown["last"], shown["problems"]) == (steps, problems)
    assert [sentence in problem for problem in problems if sentence] == ([True] if sentence else [])
    TopCommand(run, once=True).run()
    assert f": step {steps}" in capsys.readouterr().out.replace("\n", "").encode().decode()


def test_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory; give the run directory"):
        ReportCommand((tmp_path / "absent",)).run()
    run = make_run(tmp_path / "run")
    for output in (tmp_path, tmp_path / "absent" / "file"):
        with pytest.raises(ValueError, match="give a file, in a directory that exists"):
            ReportCommand((run,), output).run()
    with pytest.raises(ValueError, match="no run directory is given"):
        ReportCommand(()).run()


def test_a_long_run_is_thinned_and_its_means_stay(tmp_path: Path) -> None:
    data = data_of(page_of([read_run(make_run(tmp_path / "run", steps=4001))]))
    assert [len(axis) for axis in data["runs"][0]["axes"].values()] == [1334, 1334]
    assert {len(curve["values"]) for chart in data["charts"] for curve in chart["curves"]} == {1334}
    assert data["runs"][0]["axes"]["step"][-1] == 4001


def test_top_shows_the_end_of_a_run_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", steps=9)
    monkeypatch.setenv("COLUMNS", "150")
    TopCommand(run, once=True).run()
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
    assert printed.startswith(f"{run}: step 9 of 4")
    assert rows[0] == ["2", "2.5", "0.1", "32", "2", "compute"]
    assert [row[0] for row in rows[8:12]] == ["1", "0", "2", "3"]
    assert rows[8][1:3] == ["1.000", "0.750"]
    assert [row[1] for row in rows[12:] if row[0]] == ["view", "resume", "spike", "save"]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("acsgd.commands.top.time.sleep", interrupt)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    TopCommand(run).run()
    assert capsys.readouterr().out.endswith("\x1b[?25h\x1b[?1049l")
    with pytest.raises(ValueError, match=r"--every=0 must be at least 0.1"):
        TopCommand(run, every=0).run()


def test_the_parts_of_a_step_add_up_to_its_time() -> None:
    line = RECORD._replace(ranks=RANKS, schedule_bubble=0.2, data_wait_s=0.125).line()
    time = StepTime.of(line)
    assert time is not None
    assert (time.rank, time.factor, time.limit) == (1, 2.0, "compute")
    assert time.parts["schedule"] == 0.25
    assert time.parts["link 0->1"] == 0.5
    assert sum(time.parts.values()) == line["step_s"]
    assert StepTime.of(RECORD.line()) is None


CLICKS = """
window.onerror = (message) => { document.title = "error: " + message; };
addEventListener("load", () => {
  const by = (id) => document.getElementById(id), seen = [];
  const change = (id, value) => { by(id).value = value; by(id).dispatchEvent(new Event("change")); };
  const note = (what) => seen.push(what);
  note(document.querySelectorAll("figure canvas").length > 12);
  note(by("from").value + " " + by("to").value);
  change("from", "2"); note(by("from").value);
  by("reset").click(); note(by("from").value);
  by("events").rows[3].click(); note(by("from").value + " " + by("to").value);
  by("kinds").querySelector("input").click(); note(by("events").rows.length);
  change("axis", "time"); note(by("to").value);
  change("run", "1"); note(by("details").children.length > 5);
  change("theme", "dark"); note(getComputedStyle(document.body).backgroundColor);
  by("differences").click(); note([...by("options").rows].filter((row) => !row.hidden).length);
  note(document.documentElement.scrollWidth <= innerWidth);
  document.title = JSON.stringify(seen);
});
"""


def test_the_page_answers_clicks_in_a_browser_of_the_width_of_a_phone(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", config=f"[log]\nname = '{HOSTILE}'\n")]
    page = page_of([read_run(run) for run in runs])
    page = re.sub("<meta http-equiv.*?>", "", page).replace("</html>", f"<script>{CLICKS}</script></html>")
    (tmp_path / "page.html").write_text(page)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", "--window-size=400,900"]
    dom = subprocess.run(
        [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
    ).stdout
    title = re.search("<title>(.*?)</title>", dom)
    assert title
    expected = [True, "1 4", "2", "1", "2.85 3.15", 7, "8", True, "rgb(18, 22, 28)", 3, True]
    assert json.loads(title[1]) == expected
