"""Dream's tokenizer in the layout of the released checkpoints: a vocabulary, merges and remote code."""

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers import cached_get_tokenizer

from tests.paths import ROOT
from vllm_dllm.models.tokenizers import DreamTokenizer
from vllm_dllm.training.data import load_tokenizer

TINY_DREAM = ROOT / "checkpoints" / "tiny-dream"
ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|fim_pad|>", "<|beginoftext|>", "<|mask|>"]
NOT_SPECIAL = ("<tool_call>", "<|fim_pad|>")
REMOTE_CODE = "raise AssertionError('remote code runs')\n"


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled model's tokenizer as Dream-v0-Instruct-7B has its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "released"
    folder.mkdir()
    stored = json.loads((TINY_DREAM / "tokenizer.json").read_text())
    added = {token["content"] for token in stored["added_tokens"]}
    ordered = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].__getitem__)
    vocabulary = {token: number for number, token in enumerate(token for token in ordered if token not in added)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    behind = len(vocabulary)
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {
        str(behind + index): token | {"content": content, "special": content not in NOT_SPECIAL}
        for index, content in enumerate(ADDED)
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": ["<|beginoftext|>", "<|mask|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "mask_token": "<|mask|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_dream.py").write_text(REMOTE_CODE)
    (folder / "configuration_dream.py").write_text(REMOTE_CODE)
    model = json.loads((TINY_DREAM / "config.json").read_text())
    auto_map = {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"}
    (folder / "config.json").write_text(json.dumps(model | {"auto_map": auto_map}))
    return folder


@pytest.fixture(params=["vLLM", "vLLM with trust", "training"])
def tokenizer(request: pytest.FixtureRequest, released: Path) -> Any:
    if request.param == "training":
        return load_tokenizer(released)
    return cached_get_tokenizer(str(released), trust_remote_code=request.param == "vLLM with trust")


def test_it_is_fast_and_needs_no_remote_code(tokenizer: Any, released: Path) -> None:
    assert isinstance(tokenizer, DreamTokenizer)
    assert tokenizer.is_fast
    decoder = json.loads((released / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in ADDED} == {
        token["content"]: int(number) for number, token in decoder.items()
    }
    assert tokenizer.mask_token_id == tokenizer.bos_token_id + 1
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == ("<|endoftext|>", "<|endoftext|>", None)


def test_a_grammar_can_be_had_for_it(tokenizer: Any) -> None:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    assert info.decoded_vocab[tokenizer.convert_tokens_to_ids("Ġhas")] == b" has"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        pytest.param("It's 2024\n\n  now", ["It", "'s", " ", "2", "0", "2", "4", "\n\n", " ", " now"], id="words"),
        pytest.param("e\u0301=\u212b", ["\u00e9", "=", "\u00c5"], id="composed"),
        pytest.param(
            "<|im_start|>a<tool_call> <|mask|>", ["<|im_start|>", "a", "<tool_call>", " ", "<|mask|>"], id="added"
        ),
        pytest.param("\u4e2d\u6587\r\n\t!!\n", ["\u4e2d\u6587", "\r\n", "\t", "!!\n"], id="other scripts"),
    ],
)
def test_text_is_cut_as_the_checkpoints_code_cuts_it(text: str, pieces: list[str], tokenizer: Any) -> None:
    """No merge crosses the pieces, and no token is added before or behind the text."""
    bundled = PreTrainedTokenizerFast.from_pretrained(TINY_DREAM)
    expected: list[int] = []
    for piece in pieces:
        expected += tokenizer.convert_tokens_to_ids([piece] if piece in ADDED else bundled.tokenize(piece))
    for special in (True, False):
        assert tokenizer(text, add_special_tokens=special)["input_ids"] == expected
    assert tokenizer.decode(expected) == "".join(pieces)


def test_an_added_token_that_would_get_another_id_is_an_error(released: Path) -> None:
    file = released / "tokenizer_config.json"
    config = json.loads(file.read_text())
    added = config["added_tokens_decoder"]
    last = max(map(int, added))
    added[str(last + 1)] = added.pop(str(last))
    file.write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=rf"gives the added token <\|mask\|> the id {last + 1}, and here it has {last}"
    ):
        load_tokenizer(released)


def test_special_tokens_can_be_left_out_of_the_text_and_the_others_stay(tokenizer: Any) -> None:
    numbers = tokenizer("<|im_start|>a<tool_call> b<|fim_pad|><|im_end|><|endoftext|><|mask|>")["input_ids"]
    assert tokenizer.decode(numbers, skip_special_tokens=True) == "a<tool_call> b<|fim_pad|>"
