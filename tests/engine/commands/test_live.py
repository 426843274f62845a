"""The live view: what it draws of step events, and where answers come from."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from threading import Thread
from typing import Any

import pytest
import typer
from rich.console import Console

from vllm_dllm.commands import live
from vllm_dllm.observe.step_events import StepEvent


def event(
    forward: int, start: int, texts: str, *, unmasked: tuple[int, ...] = (), drafted: tuple[int, ...] = ()
) -> StepEvent:
    """An event whose tokens are characters; "_" is masked."""
    tokens = tuple(None if text == "_" else ord(text) for text in texts)
    return StepEvent(forward, start, tokens, unmasked, drafted, tuple("" if text == "_" else text for text in texts))


def pieces(text: live.DenoisedText) -> list[tuple[str, str]]:
    """What is drawn of an answer, by token: the text and its style."""
    console = Console(width=80)
    (_, padding, _) = text.__rich__().renderables  # type: ignore[union-attr]
    drawn = padding.renderable
    return [(piece.text, str(piece.style or "")) for piece in console.render(drawn) if piece.text.strip()]


def test_a_token_is_drawn_by_what_its_last_forward_did() -> None:
    answer = live.DenoisedText("question")
    answer.take(event(0, 0, "a__d", unmasked=(0, 3)))
    assert pieces(answer) == [("a", "bold green"), ("░", "dim"), ("░", "dim"), ("d", "bold green")]
    answer.take(event(1, 0, "abcd", unmasked=(1, 2), drafted=(1,)))
    assert pieces(answer) == [
        ("a", ""),
        ("b", "bold black on yellow"),
        ("c", "bold green"),
        ("d", ""),
    ]
    assert answer.forwards == 2


def test_a_missed_event_leaves_no_gap_and_a_window_may_shrink() -> None:
    answer = live.DenoisedText("question")
    answer.take(event(0, 0, "ab__", unmasked=(0, 1)))
    answer.take(event(5, 4, "_f", unmasked=(1,)))
    assert answer.texts == ["a", "b", "", "", "", "f"]
    assert answer.kinds == ["kept"] * 4 + ["masked", "unmasked"]
    # Preempted: the block begins anew, and looks ahead less far.
    answer.take(event(6, 4, "e", unmasked=(0,)))
    assert answer.texts[:5] == ["a", "b", "", "", "e"]
    assert len(answer.kinds) == len(answer.texts) == 5


def test_a_page_names_its_colours_and_takes_markup_as_text() -> None:
    answers = [live.DenoisedText("Is [b] bold?"), live.DenoisedText("No")]
    answers[1].take(event(0, 0, "[/b]", unmasked=(0,)))
    console = Console(width=100, record=True, file=StringIO())
    console.print(live.page_of("threshold 0.9", answers))
    text = console.export_text()
    for part in ("threshold 0.9", "Is [b] bold?", "[/b]", "unmasked by the last forward", "accepted draft", "masked"):
        assert part in text


def test_a_terminal_is_redrawn_and_wiped_and_a_file_gets_a_notice_alone() -> None:
    for is_terminal in (True, False):
        file = StringIO()
        console = Console(width=60, file=file, force_terminal=is_terminal, color_system="standard")
        with live.shown(console, "title", ["prompt"]) as show:
            show(0, event(0, 0, "x_", unmasked=(0,)))
        written = file.getvalue()
        assert ("░" in written) == is_terminal
        assert ("the output is no terminal" in written) != is_terminal
        # Erased in the end.
        assert written.rstrip().endswith("\x1b[2K") == is_terminal


def test_a_dumb_terminal_gets_a_notice_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    # Without a height Rich takes such a terminal to be 80 wide.
    console = Console(width=90, height=25, file=StringIO(), force_terminal=True, record=True)
    with live.shown(console, "title", ["prompt"]):
        pass
    assert "--live draws nothing here: the output is a terminal that draws nothing anew (TERM)" in console.export_text()


@pytest.mark.parametrize("body", ["<html></html>", '{"object": "list", "data": []}', '{"ok": true}'])
def test_a_server_without_models_is_a_wrong_argument(body: str) -> None:
    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if body.startswith("<") else "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(typer.BadParameter, match="the server lists no model at /v1/models"):
            live.answer_there(f"http://127.0.0.1:{server.server_port}", ["?"], 4, {}, None)
        server.shutdown()


def test_a_server_that_is_not_there_is_a_wrong_argument() -> None:
    with pytest.raises(typer.BadParameter, match=r"http://127\.0\.0\.1:9: Connection error"):
        live.answer_there("http://127.0.0.1:9", ["?"], 4, {}, None)
