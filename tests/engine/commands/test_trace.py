"""Recording a request's denoising, the page that plays it, and the picture of it."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from tests import warm
from tests.engine.commands.test_cli import VLLM_DLLM, invoke
from vllm_dllm.commands.engine import BUNDLED_MODEL
from vllm_dllm.commands.trace import command, record, render
from vllm_dllm.commands.trace.record import Branch, Change, Forward, Trace, effects
from vllm_dllm.observe.recorder import Round
from vllm_dllm.observe.step_events import token_text

MASK = ord("_")


def ids(text: str) -> list[int]:
    """A token per character; ``_`` is the mask token."""
    return [*map(ord, text)]


def branch(tokens: str, *, reached: bool = True, predicted: str = "abcd") -> Branch:
    return Branch(ids(tokens), ids(predicted), (0.5, 0.25, 1.0, 0.125), reached)


def forward(*branches: Branch, after: str, accepted: int = 0, **fields: Any) -> Forward:
    """A forward over a block of 4 positions."""
    before = branches[accepted].tokens if branches else ids(after)
    values: dict[str, Any] = {
        "block_start": 0,
        "first": 0,
        "denoised": True,
        "branches": branches,
        "accepted": accepted,
        "chosen": tuple(old != new for old, new in zip(before, ids(after), strict=True)),
        "tokens": ids(after),
    }
    return Forward(**{**values, **fields})


def trace_of(*forwards: Forward, prompt_length: int = 0, output_length: int = 8, **fields: Any) -> Trace:
    occurring = {token for f in forwards for b in f.branches for token in (*b.tokens, *b.predicted, *f.tokens)}
    values: dict[str, Any] = {
        "model": "some/model",
        "prompt": "Why?",
        "settings": {"policy": "static", "verify": "freedave"},
        "prompt_length": prompt_length,
        "output_length": output_length,
        "mask_token_id": MASK,
        "special_token_ids": [MASK],
        "texts": {token: chr(token) for token in occurring},
        "forwards": forwards,
    }
    return Trace(**{**values, **fields})


def two_blocks() -> Trace:
    """Prompt "p", answer "bcdeZ": five tokens in four forwards; the last two positions were dropped."""
    return trace_of(
        forward(branch("p___"), after="pb__", first=1),
        forward(
            branch("pb__"),
            branch("pbc_"),
            branch("pbx_", reached=False),
            after="pbcd",
            accepted=1,
            first=1,
        ),
        forward(branch("____"), after="e__h", block_start=4),
        forward(branch("e__h"), branch("eZ_h"), after="eZfh", accepted=1, block_start=4),
        prompt_length=1,
        output_length=5,
    )


# Recording


def make_round(**fields: Any) -> Round:
    """Of two requests with up to three branches of two positions; the first branch of the second is absent."""
    values: dict[str, Any] = {
        "req_ids": ["a", "b"],
        "block_start": torch.tensor([0, 8]),
        "first": torch.tensor([0, 1]),
        "denoised": torch.tensor([True, True]),
        "branches": torch.arange(12).view(2, 3, 2),
        "present": torch.tensor([[True, True, True], [True, False, True]]),
        "reached": torch.tensor([[True, False, False], [True, False, True]]),
        "accepted": torch.tensor([0, 2]),
        "predicted": torch.arange(12, 24).view(2, 3, 2),
        "confidence": torch.arange(12).view(2, 3, 2) / 16,
        "chosen": torch.tensor([[True, False], [False, True]]),
        "tokens": torch.tensor([[90, 91], [92, 93]]),
        "top_tokens": lambda k: torch.zeros(2, 2, k),
    }
    return Round(**{**values, **fields})


def test_a_round_gives_the_present_branches_of_its_request_and_which_of_them_was_accepted() -> None:
    assert record.read_round(make_round(), 1) == Forward(
        block_start=8,
        first=1,
        denoised=True,
        branches=[
            Branch([6, 7], [18, 19], [6 / 16, 7 / 16], True),
            Branch([10, 11], [22, 23], [10 / 16, 11 / 16], True),
        ],
        accepted=1,
        chosen=[False, True],
        tokens=[92, 93],
    )


class SpaceDroppingTokenizer:
    """Drops the space before the first word of a text, as SentencePiece does; token 2 is half a character."""

    pieces = ("▁the", "ly", "<0xF0>")

    def decode(self, tokens: list[int]) -> str:
        if tokens[0] == 2:
            return "\N{REPLACEMENT CHARACTER}" * len(tokens)
        text = "".join(self.pieces[token] if token < 2 else "" for token in tokens)
        return text.replace("▁", " ").removeprefix(" ")

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.pieces[token] if token < len(self.pieces) else None


def test_texts_of_tokens_keep_their_space_and_stand_for_what_has_no_text() -> None:
    texts = [token_text(SpaceDroppingTokenizer(), token) for token in range(4)]
    assert texts == [" the", "ly", "<0xF0>", "<3>"]


# What follows from the forwards


def test_a_position_changes_in_the_forward_that_unmasked_it_by_draft_or_by_policy() -> None:
    assert [effect.changes for effect in effects(two_blocks())] == [
        [Change(1, ord("b"), "policy")],
        [Change(2, ord("c"), "draft"), Change(3, ord("d"), "policy")],
        [Change(4, ord("e"), "policy"), Change(7, ord("h"), "policy")],
        [Change(5, ord("Z"), "draft"), Change(6, ord("f"), "policy")],
    ]


def test_a_revised_token_is_an_edit_and_an_unchanged_one_is_no_change() -> None:
    recorded = trace_of(forward(branch("____"), after="ab__"), forward(branch("ab__"), after="axc_"))
    assert effects(recorded)[1].changes == [Change(1, ord("x"), "edit"), Change(2, ord("c"), "policy")]


def test_a_token_that_stood_before_the_first_forward_came_with_the_prefill() -> None:
    recorded = trace_of(forward(branch("a___"), after="ab__"))
    assert [effect.changes for effect in effects(recorded)] == [
        [Change(0, ord("a"), "prefill"), Change(1, ord("b"), "policy")]
    ]


def test_a_forward_between_blocks_gives_the_next_block_its_first_token_and_tries_nothing() -> None:
    # What such a forward saw is the block before.
    recorded = trace_of(
        forward(branch("abc_"), after="abcd"),
        forward(branch("abcd"), after="e___", block_start=4, denoised=False),
        forward(branch("e___"), after="ef__", block_start=4),
    )
    (_, between, after) = effects(recorded)
    assert (between.changes, after.changes) == ([Change(4, ord("e"), "policy")], [Change(5, ord("f"), "policy")])
    assert after.drafts == 0


def test_totals_count_tokens_of_the_answer_and_drafts_up_to_each_forward() -> None:
    counts = [(effect.tokens, effect.drafts, effect.accepted) for effect in effects(two_blocks())]
    assert counts == [(1, 0, 0), (3, 2, 1), (4, 2, 1), (5, 3, 2)]


def test_forwards_are_numbered_anew_in_each_block() -> None:
    assert [effect.step for effect in effects(two_blocks())] == [0, 1, 0, 1]


def test_caption_gives_the_totals_and_leaves_out_drafts_where_there_were_none() -> None:
    assert render.caption(two_blocks()) == "5 tokens in 4 forwards, 1.25 per forward; 2 of 3 drafts accepted"
    assert "drafts" not in render.caption(trace_of(forward(branch("____"), after="abcd"), output_length=4))


# The page


class Page(HTMLParser):
    """Elements of a page with their attributes, and the text of its script elements."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "<img src=x onerror=alert(1)>",
    "&lt;\"'\\u003c@DATA@",
    "👩‍🔬 \u2028\u0000\x7f",
    "<|im_end|>",
]


def test_page_holds_the_whole_trace() -> None:
    data = Page(render.render_html(two_blocks())).data
    assert data["settings"] == {"policy": "static", "verify": "freedave"}
    assert data["texts"]["112"] == "p"
    (first, second, *_) = data["forwards"]
    assert first["effect"]["changes"] == [[1, ord("b"), "policy"]]
    assert (second["accepted"], second["chosen"]) == (1, [False, False, False, True])
    counts = {name: value for name, value in second["effect"].items() if name != "changes"}
    assert counts == {"step": 1, "tokens": 3, "drafts": 2, "accepted": 1}
    assert [b["reached"] for b in second["branches"]] == [True, True, False]
    assert second["branches"][2]["tokens"] == list(ids("pbx_"))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_the_model_or_the_user_becomes_part_of_the_page(text: str) -> None:
    plain = Page(render.render_html(two_blocks()))
    texts = {**two_blocks().texts, ord("b"): text}
    page = Page(
        render.render_html(
            dataclasses.replace(two_blocks(), texts=texts, prompt=text, model=text, settings={"policy": text})
        )
    )
    assert page.elements == plain.elements
    assert page.scripts[1:] == plain.scripts[1:]
    assert page.data["texts"][str(ord("b"))] == page.data["prompt"] == page.data["model"] == text
    assert "<" not in page.scripts[0]


def test_page_needs_nothing_from_anywhere_and_forbids_the_browser_to_ask() -> None:
    html = render.render_html(two_blocks())
    page = Page(html)
    assert not [attributes for _, attributes in page.elements if attributes.keys() & {"src", "href", "srcset", "data"}]
    assert not re.search(r"https?:|@import|url\(|fetch\(|import\(", html)
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_page_writes_texts_as_texts_only() -> None:
    script = Page(render.render_html(two_blocks())).scripts[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_every_control_has_a_name_and_every_element_the_script_asks_for_is_there() -> None:
    html = render.render_html(two_blocks())
    page = Page(html)
    for tag, attributes in page.elements:
        if tag == "button":
            assert attributes["type"] == "button"
            assert attributes.get("aria-label") or attributes["id"] == "play"  # its text says what it does
        if tag == "input":
            assert attributes["aria-label"]
    assert "<label>Speed" in html
    present = {attributes.get("id") for _, attributes in page.elements}
    asked = set(re.findall(r'\$\("([a-z]+)"\)', page.scripts[1]))
    assert asked <= present
    assert {"play", "back", "next", "slider", "speed", "branches"} <= asked


def test_a_confidence_that_is_no_number_is_an_error_and_not_a_broken_page() -> None:
    broken = dataclasses.replace(branch("____"), confidence=(float("nan"),) * 4)
    with pytest.raises(ValueError, match="not JSON compliant"):
        render.render_html(trace_of(forward(broken, after="a___")))


# A document with as much of the DOM as the page's script uses.
DOCUMENT = r"""
const text = (node) => node.children.length ? node.children.map(text).join("") : node.textContent;
class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, attributes: {}, own: "", className: "", classes: new Set() });
    this.style = { setProperty() {} };
    this.clientWidth = 1200;
    this.classList = { add: (name) => this.classes.add(name),
                       toggle: (name, on) => (on ? this.classes.add(name) : this.classes.delete(name)) };
    this.options = { length: 5 };
  }
  get textContent() { return this.own; }
  set textContent(value) { this.own = String(value); this.children = []; }
  appendChild(node) { this.append(node); return node; }
  append(...nodes) { if (this.own && !this.children.length) this.children.push({ textContent: this.own, children: [] });
                     this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  insertRow() { const row = new Element("tr"); this.children.push(row); return row; }
  createTHead() { return this.insertRow(); }
  createTBody() { return this.insertRow(); }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(kind, listener) { this["on" + kind] = listener; }
  closest(selector) { return selector.split(", ").includes(this.tag) ? this : null; }
}
const elements = {};
global.document = {
  getElementById: (id) => (elements[id] ??= new Element(id)),
  createElement: (tag) => new Element(tag),
  addEventListener: (kind, listener) => (elements[kind] = listener),
};
global.location = { hash: process.argv[3] ?? "" };
global.setTimeout = (call) => call();
global.history = { replaceState: (state, title, url) => (location.hash = url) };
global.getComputedStyle = () => ({ fontSize: "16px" });
global.window = {
  matchMedia: () => ({ matches: elements.branches.clientWidth < 640 }),
  addEventListener: (kind, listener) => (elements["window " + kind] = listener),
};
elements.trace = { textContent: require("fs").readFileSync(process.argv[2], "utf8") };
const seen = (id) => text(elements[id]);
const press = (key, on = new Element("body")) =>
  elements.keydown({ key, target: on, preventDefault() {} });
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not there to run the page's script")
class TestPlaying:
    @staticmethod
    def run(tmp_path: Path, commands: str, recorded: Trace | None = None, link: str = "") -> Any:
        """What ``commands`` gives, run behind the script of the page that ``link`` opens.

        ``seen(id)`` is an element's text."""
        data, script = Page(render.render_html(recorded or two_blocks())).scripts
        (tmp_path / "data.json").write_text(data)
        (tmp_path / "page.js").write_text(
            DOCUMENT + script.replace('"use strict";', "") + f"\nconsole.log(JSON.stringify({commands}));pause();"
        )
        command = ["node", "page.js", "data.json", link]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def test_opens_at_the_end(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, '[seen("forwards"), seen("play"), location.hash]') == ["4 of 4", "Play", "#forward=4"]

    @pytest.mark.parametrize(
        ("link", "forwards"), [("#forward=2", "2 of 4"), ("#forward=0", "0 of 4"), ("#forward=99", "4 of 4")]
    )
    def test_a_link_names_a_forward(self, tmp_path: Path, link: str, forwards: str) -> None:
        assert self.run(tmp_path, 'seen("forwards")', link=link) == forwards

    def test_the_address_names_the_forward_that_is_shown(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, '(press("ArrowLeft"), location.hash)') == "#forward=3"
        followed = '(location.hash = "#forward=1", elements["window hashchange"](), seen("forwards"))'
        assert self.run(tmp_path, followed) == "1 of 4"

    def test_counts_and_text_follow_the_forwards(self, tmp_path: Path) -> None:
        counters = '[seen("forwards"), seen("tokens"), seen("rate"), seen("drafts"), seen("text")]'
        keys = '["Home", "ArrowRight", "ArrowRight", "End"]'
        shown = self.run(tmp_path, f"{keys}.map((key) => (press(key), {counters}))")
        assert shown == [
            ["0 of 4", "0", "–", "0 of 0", ""],
            ["1 of 4", "1", "1.00", "0 of 0", "b"],
            ["2 of 4", "3", "1.50", "1 of 2", "bcd"],
            ["4 of 4", "5", "1.25", "2 of 3", "bcdeZfh"],
        ]

    def test_marks_what_is_new_drafted_masked_and_dropped(self, tmp_path: Path) -> None:
        marks = 'elements.text.children.map((node) => [node.className, ...node.classes].join(" "))'
        assert self.run(tmp_path, f"(go(2), {marks})") == ["token", "token drafted now", "token now"]
        assert self.run(tmp_path, f"(go(3), {marks})")[3:] == [
            "token now",
            "masked",
            "masked dropped",
            "token now dropped",
        ]

    def test_shows_each_branch_with_its_verdict_and_details(self, tmp_path: Path) -> None:
        rows = "elements.branches.children[0].children[1].children.slice(1)"
        verdicts = self.run(tmp_path, f"(go(2), {rows}.map((row) => [row.className, text(row.children[0])]))")
        assert verdicts == [
            ["reached", "the block✓ where the path begins"],
            ["accepted", "draft 1✓ accepted, went on from here"],
            ["rejected", "draft 2✗ not accepted"],
        ]
        details = self.run(tmp_path, f"(go(2), {rows}[1].children.slice(1).map((cell) => cell.dataset.detail))")
        assert details == [
            "position 0: “p”, part of the prompt",
            "position 1: “b”, unmasked before",
            "position 2: “c”, drafted; the block itself predicts “c” at 100.0 %",
            "position 3: masked; this branch predicts “d” at 12.5 %, unmasked by this forward",
        ]

    def test_finished_positions_of_a_wider_window_are_no_prompt(self, tmp_path: Path) -> None:
        recorded = trace_of(forward(branch("____"), after="ab__"), forward(branch("ab__"), after="abcd", first=2))
        first_cell = "elements.branches.children[0].children[1].children[1].children[1]"
        detail = self.run(tmp_path, f"(go(2), {first_cell}.dataset.detail)", recorded)
        assert detail == "position 0: “a”, unmasked before"

    def test_a_block_wider_than_the_window_takes_several_lines(self, tmp_path: Path) -> None:
        width = 'elements.branches.clientWidth = 300, elements["window resize"]()'
        positions = "elements.branches.children[0].children.slice(1).map((line) => line.children[0].children.slice(1))"
        wide = trace_of(forward(Branch(ids("________"), ids("abcdefgh"), (0.5,) * 8, True), after="abcdefgh"))
        shown = self.run(tmp_path, f"({width}, {positions}.map((line) => line.map(text)))", wide)
        assert shown == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
        assert self.run(tmp_path, f"{positions}.map((line) => line.length)", wide) == [8]

    def test_says_when_a_forward_only_wrote_to_the_cache(self, tmp_path: Path) -> None:
        recorded = trace_of(forward(branch("abcd"), after="e___", block_start=4, denoised=False))
        assert "only wrote" in self.run(tmp_path, '(go(1), seen("branches"))', recorded)

    def test_space_plays_and_pauses_but_not_where_a_button_would_be_pressed(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, '(press(" "), seen("play"))') == "Pause"
        assert self.run(tmp_path, '(press(" "), press(" "), seen("play"))') == "Play"
        assert self.run(tmp_path, '(press(" ", new Element("button")), seen("play"))') == "Play"

    def test_keys_of_the_slider_are_left_to_it(self, tmp_path: Path) -> None:
        assert (
            self.run(tmp_path, '(press("End", new Element("input")), seen("forwards"))', link="#forward=0") == "0 of 4"
        )

    def test_playing_from_the_end_begins_again(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, '(go(4), play(), seen("forwards"))') == "0 of 4"


# The picture


def test_picture_shows_which_forward_of_its_block_unmasked_each_position_of_the_answer() -> None:
    axes, bars, _ = render.make_figure(two_blocks()).axes
    masked, unmasked = (image.get_array() for image in axes.images)
    # Rows are forwards, columns the five tokens of the answer; 0 where there is nothing to see.
    assert unmasked.filled(0).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 2, 2, 0, 0],
        [1, 2, 2, 1, 0],
        [1, 2, 2, 1, 2],
    ]
    assert masked.filled(0).tolist() == [
        [0, -1, -1, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, -1],
        [0, 0, 0, 0, 0],
    ]
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[1, 2], [4, 4]]
    by_policy, by_draft = ([bar.get_width() for bar in container] for container in bars.containers)
    assert (by_policy, by_draft) == ([1, 1, 1, 0], [0, 1, 0, 1])


def test_picture_is_captioned_and_named_after_its_settings() -> None:
    figure = render.make_figure(two_blocks())
    assert figure.get_supxlabel() == render.caption(two_blocks())
    assert figure.get_suptitle() == "some/model\npolicy static, verify freedave"


@pytest.mark.filterwarnings("error")
def test_picture_can_be_drawn_of_any_text_and_without_drafts(tmp_path: Path) -> None:
    for text in ("$x_1$", "👩‍🔬", "\n\t ", "<b>"):
        recorded = trace_of(forward(branch("____"), after="abcd"), output_length=4)
        texts = {**recorded.texts, ord("b"): text}
        render.render_png(dataclasses.replace(recorded, texts=texts, model=text), tmp_path / "trace.png")
        assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_labels_of_the_picture_are_the_tokens_as_long_as_they_fit() -> None:
    axes = render.make_figure(two_blocks()).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list("bcdeZ")
    long = forward(
        *(Branch(ids("_" * 200), ids("a" * 200), (0.5,) * 200, True),), after="a" * 200, chosen=(True,) * 200
    )
    assert render.make_figure(trace_of(long, output_length=200)).axes[0].get_xlabel() == "position in the answer"


# The command


NEEDED = ("--model", "m", "--prompt", "p")


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (["--out", "absent/trace.html"], "--out", "there is no folder absent"),
        (["--out", "."], "--out", ". is a folder"),
        (["--out", "t.html", "--png", "./t.html"], "--png", "t.html is the file of --out"),
        (["--out", "t.html", "--png", "absent/trace.png"], "--png", "there is no folder absent"),
        (["--out", "graph.json", "--draft-graph", "graph.json"], "--draft-graph", "graph.json is the file of --out"),
        (["--out", "t.html", "--drafts", "3"], "--drafts", "nothing is drafted without --verify"),
        (["--out", "t.html", "--verify", "psd", "--drafts", "65"], "--drafts", ".* less than or equal to 64"),
        (["--out", "t.html", "--verify", "best"], "--verify", ".*'best' is not one of"),
        (["--out", "t.html", "--draft-graph", "absent.json"], "--draft-graph", "file 'absent.json' does not exist"),
        (["--out", "t.html", "--draft-graph", "graph.json"], "--draft-graph", "it goes with --verify spiffy or psd"),
        (["--out", "t.html", "--policy", "static", "--threshold", "0.5"], "--threshold", "policy 'static' has none"),
        (["--out", "t.html", "--verify", "fef", "--policy", "static"], "--policy", "verify 'fef' has none"),
        (["--out", "t.html", "--verify", "fef", "--drafts", "3"], "--drafts", "verify 'fef' has none"),
        (["--out", "t.html", "--seed", "1"], "--seed", "nothing is drawn without --temperature"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(
    arguments: list[str], option: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "load_engine", lambda *args: pytest.fail("the model was loaded"))
    monkeypatch.chdir(tmp_path)
    Path("graph.json").touch()
    status, output = invoke("trace", *NEEDED, *arguments)
    assert status == 2
    assert re.search(f"Invalid value for '?{option}'?: {message}", output)


def test_without_matplotlib_a_picture_is_refused_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "load_engine", lambda *args: pytest.fail("the model was loaded"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    status, output = invoke("trace", *NEEDED, "--out", "t.html", "--png", "t.png")
    assert status == 2
    assert "drawing needs matplotlib: pip install 'vllm-dllm[bench]'" in output


def test_engine_gets_room_for_as_many_drafts_as_the_method_means() -> None:
    assert command.make_options(None, None, "none", None, None) == ({"max_drafts": 0}, {"dllm_verify": "none"})
    engine, request = command.make_options("threshold", 0.8, "freedave", 8, None)
    assert engine == {"max_drafts": 7}
    asked = {"policy": "threshold", "threshold": 0.8, "verify": "freedave", "drafts": 8}
    assert request == {f"dllm_{name}": value for name, value in asked.items()}
    engine, _ = command.make_options(None, None, "psd", 3, Path("graph.json"))
    assert engine == {"max_drafts": 3, "draft_graph": "graph.json"}


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    status, output = invoke("trace", "--model", absent, "--prompt", "p", "--out", str(tmp_path / "t.html"))
    assert status == 2
    assert "Invalid value for --model: there is no folder" in output


def run_trace(model: Path, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(VLLM_DLLM), "trace", "--model", str(model), "--out", str(tmp_path / "trace.html"), *arguments]
    return warm.run(command, timeout=300)


def answer(page: Page) -> str:
    data = page.data
    tokens = {position: token for f in data["forwards"] for position, token, _ in f["effect"]["changes"]}
    positions = range(data["prompt_length"], data["prompt_length"] + data["output_length"])
    return "".join(data["texts"][str(tokens[position])] for position in positions)


bundled_model = pytest.mark.skipif(
    not (BUNDLED_MODEL / "config.json").is_file(), reason="the bundled model is not there"
)
QUESTION = "Ada has 12 apples. Ben gives Ada 7 more. Then Ada sells 4 apples. How many apples does Ada have now?"


@pytest.mark.slow
@bundled_model
def test_a_traced_request_is_the_one_that_was_decoded(tmp_path: Path) -> None:
    arguments = ("--prompt", QUESTION, "--policy", "static")
    plain = run_trace(BUNDLED_MODEL, tmp_path, *arguments)
    assert plain.returncode == 0, plain.stderr
    one_by_one = Page((tmp_path / "trace.html").read_text(encoding="utf-8"))
    skipping = run_trace(
        BUNDLED_MODEL, tmp_path, *arguments, "--verify", "freedave", "--png", str(tmp_path / "trace.png")
    )
    assert skipping.returncode == 0, skipping.stderr
    page = Page((tmp_path / "trace.html").read_text(encoding="utf-8"))
    assert answer(page) == answer(one_by_one)
    assert answer(page).endswith("<|im_end|>")
    data = page.data
    assert len(data["forwards"]) < len(one_by_one.data["forwards"])
    last = data["forwards"][-1]["effect"]
    assert last["tokens"] == data["output_length"]
    assert f"{last['accepted']} of {last['drafts']} drafts accepted" in skipping.stdout
    assert 0 < last["accepted"] < last["drafts"]
    # Every token is unmasked once.
    positions = [position for f in data["forwards"] for position, *_ in f["effect"]["changes"]]
    assert len(positions) == len(set(positions))
    assert (tmp_path / "trace.png").stat().st_size > 1000


@pytest.mark.slow
@bundled_model
def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    result = run_trace(model, tmp_path, "--prompt", "p")
    assert result.returncode == 2
    message = re.sub(r"[\s│]+", " ", result.stderr)
    assert "cannot be loaded: Couldn't instantiate the backend tokenizer" in message
    assert not (tmp_path / "trace.html").exists()


def test_a_request_that_the_engine_refuses_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any) -> Trace:
        raise VLLMValidationError("the prompt is too long")

    monkeypatch.setattr(command, "load_engine", lambda *args: None)
    monkeypatch.setattr(command, "record", refuse)
    status, output = invoke("trace", *NEEDED, "--out", str(tmp_path / "trace.html"))
    assert status == 2
    assert "the prompt is too long" in output
    assert not (tmp_path / "trace.html").exists()


def test_a_page_that_cannot_be_written_in_the_end_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load_engine", "record", "caption"):
        monkeypatch.setattr(command, name, lambda *args: None)
    monkeypatch.setattr(command, "render_html", lambda recorded: "a page")
    status, output = invoke("trace", *NEEDED, "--out", "/dev/full")
    assert status == 2
    assert "/dev/full cannot be written: No space left on device" in output


def test_record_takes_the_recorder_off_again_even_if_decoding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SimpleNamespace(recorder=None)
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler)))
    core = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    class FailingEngine:
        llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))

        def get_tokenizer(self) -> Any:
            return SimpleNamespace(chat_template=None)

    def fail(*args: Any) -> Any:
        assert sampler.recorder is not None
        raise ValueError("no")

    monkeypatch.setattr(record, "answer_here", fail)
    with pytest.raises(ValueError, match="no"):
        record.record(FailingEngine(), "p", None, "m")  # type: ignore[arg-type]
    assert sampler.recorder is None
