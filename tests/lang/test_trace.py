"""What a trace tells of a program: the records, the text, and a page in which nothing but data comes from outside."""

import html.parser
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import radixrt.lang as rl
from radixrt.lang.backends.protocol import ServerTimes
from radixrt.lang.records import CallRecord
from radixrt.lang.source_line import SourceLine
from radixrt.lang.tracing.page import page_of
from radixrt.lang.tracing.phases import first_token_after_s, phases_of
from tests.lang.scripted_backend import ScriptedBackend

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "</script ><script >document.title='owned'</script >",
    "</script/",
    "<!--<script>",
    "]]><img src=x onerror=\"document.title='owned'\">",
    "\u2028\u2029\ud800 &lt;b&gt; ${alert(1)} $title $data",
]


class _Page(html.parser.HTMLParser):
    """What a browser would see: the elements, the scripts, and whatever loads something from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.scripts: list[str] = []
        self.links: list[str] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self._open.append(tag)
        self.links += [
            value or "" for name, value in attributes if name in ("src", "href", "onerror")
        ]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open.remove(tag)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif self._open:
            self.text[self._open[-1]] = self.text.get(self._open[-1], "") + data


def owner_of(place: str) -> str:
    """Get the owner of a place."""
    return place


@rl.function
def vote(s: rl.State, topic: str) -> None:
    s += rl.user(topic)
    forks = s.fork(2)
    for fork in forks:
        fork += rl.assistant(rl.gen("opinion"))
    s += rl.user("; ".join(fork["opinion"] for fork in forks))
    s += rl.assistant(rl.gen("end"))


def test_a_trace_holds_every_call_fork_and_join_of_a_run() -> None:
    state = vote.run("Trees", backend=ScriptedBackend())
    (run,) = state.trace().data()["runs"]
    assert [branch["id"] for branch in run["branches"]] == ["0", "0.0", "0.1"]
    assert [(call["branch"], call["name"]) for call in run["calls"]] == [
        ("0.0", "opinion"), ("0.1", "opinion"), ("0", "end"),
    ]  # fmt: skip
    (join,) = run["joins"]  # by reading from every branch
    assert (join["branches"], join["into"]) == (["0.0", "0.1"], "0")
    last = run["calls"][2]
    assert last["prompt"].endswith("user: <Trees>; <Trees>") and last["answer"].startswith(
        "<<Trees>"
    )
    assert last["written"] >= join["at"] and last["tokens_out"] == 1 and last["error"] is None
    assert last["file"] == __file__


def test_joins_that_the_program_names_are_told_once() -> None:
    @rl.function
    def program(s: rl.State) -> None:
        with s.fork(3) as forks:
            for fork in forks:
                fork += rl.user("a") + rl.assistant(rl.gen("x"))

    (run,) = program.run(backend=ScriptedBackend()).trace().data()["runs"]
    assert [join["branches"] for join in run["joins"]] == [["0.0", "0.1", "0.2"]]


def test_tools_errors_and_cancelled_calls_are_part_of_it() -> None:
    backend = ScriptedBackend()

    @rl.function
    def program(s: rl.State) -> None:
        lost = s.copy()
        s += rl.user("one") + rl.assistant(rl.gen("number", type=int))
        with pytest.raises(rl.AnswerError):
            s["number"]
        backend.hold()
        lost += rl.user("two") + rl.assistant(rl.gen("never"))
        lost.cancel()
        backend.release()
        call = rl.ToolCall(
            "owner_of", {"place": "Vidur"}, "1", owner_of, s._run.record.tools_of("0")
        )
        assert call.run() == "Vidur"
        with pytest.raises(TypeError):
            rl.ToolCall("owner_of", {}, "2", owner_of, s._run.record.tools_of("0")).run()

    (run,) = program.run(backend=backend).trace().data()["runs"]
    failed, cancelled = run["calls"]
    assert "can't be read as int" in failed["error"]
    assert cancelled["end"] is None or cancelled["error"] == "It was cancelled."
    fine, wrong = run["tools"]
    assert fine["name"] == "owner_of" and fine["error"] is None and fine["end"] >= fine["start"]
    assert wrong["error"].startswith("TypeError")


def _call(**times: Any) -> CallRecord:
    source = SourceLine("file.py", 1, "program")
    return CallRecord("x", "gen('x')", source, "0", written_at=10.0, **times)


def test_the_phases_of_a_call_fill_its_time() -> None:
    reached: dict[str, Any] = {
        "ready_at": 11.0,
        "sent_at": 12.0,
        "first_piece_at": 13.0,
        "ended_at": 15.0,
    }
    server = ServerTimes(queued_s=0.5, prefill_s=1.0, total_s=2.5)
    expected = {
        "told": (_call(**reached, times=server), ["waiting", "held", "sending", "queued", "prefill", "decoding"], 2.0),
        "streamed": (_call(**reached, streamed=True), ["waiting", "held", "first token", "decoding"], 1.0),
        "neither": (_call(**reached), ["waiting", "held", "answering"], None),
        "unsent": (_call(ready_at=11.0), ["waiting", "held"], None),
        "blocked": (_call(), ["waiting"], None),
    }  # fmt: skip
    for call, names, first_token in expected.values():
        phases = phases_of(call, now=15.0)
        assert [phase.name for phase in phases] == names
        assert phases[0].start == 10.0 and phases[-1].end == 15.0
        assert all(one.end == other.start for one, other in itertools.pairwise(phases))
        assert first_token_after_s(call) == first_token


def test_the_page_holds_the_records_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    state = vote.run("Trees", backend=ScriptedBackend())
    trace = state.trace()
    trace.save(tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    page = _Page(text)
    data, _ = page.scripts
    assert json.loads(data) == trace.data()
    assert page.links == [] and "default-src 'none'" in text
    assert (
        re.findall(r"(?:https?:)?//[a-z][\w.]+", text.replace("http://www.w3.org/2000/svg", ""))
        == []
    )


def test_what_models_and_users_write_is_never_markup() -> None:
    plain = _Page(page_of(vote.run("Trees", backend=ScriptedBackend()).trace().data()))
    for text in HOSTILE:
        data = vote.run(text, backend=ScriptedBackend()).trace().data()
        data["title"] = data["runs"][0]["calls"][0]["error"] = text
        page = _Page(page_of(data))
        assert page.elements == plain.elements and page.scripts[1:] == plain.scripts[1:]
        assert json.loads(page.scripts[0]) == data
        assert page.text["h1"] == text


def test_a_recorder_collects_the_runs_of_all_threads_and_writes_them_after_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.html"
    vote.run("before", backend=ScriptedBackend())
    with pytest.raises(ZeroDivisionError), rl.trace(path) as recorder:
        vote.run_batch(
            [{"topic": str(number)} for number in range(5)],
            backend=ScriptedBackend(),
            progress=False,
        )
        raise ZeroDivisionError
    vote.run("after", backend=ScriptedBackend())
    trace = recorder.trace()
    assert len(trace.runs) == 5 and len(trace.calls) == 15
    assert json.loads(_Page(path.read_text()).scripts[0])["title"] == "vote · 5 runs"


def test_the_text_has_a_line_a_call() -> None:
    state = vote.run("Trees", backend=ScriptedBackend())
    summary, *lines, legend = str(state.trace()).splitlines()
    tokens_in = sum(call.usage.prompt_tokens for call in state.calls())
    assert summary.startswith("vote · ") and tokens_in > 3
    assert f"3 calls · 3 branches · {tokens_in} tokens in (0 cached) · 3 out" in summary
    assert [line.split()[:2] for line in lines] == [
        ["0.0", "gen('opinion')"], ["0.1", "gen('opinion')"], ["0", "gen('end')"],
    ]  # fmt: skip
    assert "waiting" in legend


def test_a_notebook_shows_the_page_in_a_frame_that_can_reach_nothing() -> None:
    frame = vote.run(HOSTILE[0], backend=ScriptedBackend()).trace()._repr_html_()
    assert _Page(frame).elements == ["iframe"]
    assert 'sandbox="allow-scripts"' in frame


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_every_call_and_runs_nothing_else(tmp_path: Path) -> None:
    backend = ScriptedBackend()
    with rl.trace(tmp_path / "out.html"):
        for text in HOSTILE[:5]:
            vote.run(text, backend=backend)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
               "--dump-dom", f"file://{tmp_path}/out.html"]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    page = _Page(dom)
    assert len(re.findall(r'<g class="call', dom)) == 15
    assert page.text["title"] == "vote · 5 runs · trace" and page.elements.count("script") == 2
    assert "img" not in page.elements
