"""Which tokens a drafter may draft, and what it reads where it lacks one."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dllm.speculators.vocabulary import SharedVocabulary, VocabularyError, read_mapping, share_vocabulary

WIDTH = 1000
TOKENS = {f"<{index}>": index for index in range(900)}


def share(target: dict[str, int] | None, drafter: dict[str, int] | None, own_ids: tuple[int, ...] = ()) -> torch.Tensor:
    return share_vocabulary(target, drafter, num_target_ids=WIDTH, num_draft_ids=WIDTH, own_ids=own_ids)


def missing(draft_ids: torch.Tensor) -> list[int]:
    return (draft_ids < 0).nonzero().squeeze(1).tolist()


def test_the_same_tokenizer_shares_all_but_the_drafters_own_ids() -> None:
    shared = share(TOKENS, TOKENS, own_ids=(950, 951))
    assert missing(shared) == [950, 951]
    for tokens in ((None, None), (TOKENS, None), (None, TOKENS)):
        assert torch.equal(share(*tokens, own_ids=(950, 951)), shared)


def test_ids_that_mean_something_else_or_nothing_are_not_shared() -> None:
    """As in Qwen3, which has tokens where Qwen2.5 has none, and Open-dCoder its mask."""
    target = {**TOKENS, "<think>": 920, "</think>": 921}
    drafter = {**TOKENS, "<M>": 920, "extra": 930}
    del drafter["<7>"]
    drafter["other"] = 7
    assert missing(share(target, drafter, own_ids=(920,))) == [7, 920, 921, 930]


def test_tokens_beyond_the_embeddings_do_not_matter() -> None:
    assert missing(share(TOKENS, {**TOKENS, "far": WIDTH + 3})) == []


def test_another_tokenizer_is_refused_with_its_first_difference() -> None:
    other = {token: 920 - index if index > 20 else index for token, index in TOKENS.items()}
    with pytest.raises(VocabularyError, match=r"another tokenizer .* 878 of 900 ids differ \(id 21 is '<21>'"):
        share(TOKENS, other)


@pytest.mark.parametrize(("different", "is_refused"), [(9, False), (10, True)])
def test_one_token_in_a_hundred_may_differ(different: int, is_refused: bool) -> None:
    other = {token if index >= different else f"{token}!": index for token, index in TOKENS.items()}
    if is_refused:
        with pytest.raises(VocabularyError, match="another tokenizer"):
            share(TOKENS, other)
    else:
        assert missing(share(TOKENS, other)) == list(range(different))


def test_embeddings_of_another_width_are_refused_with_both_widths() -> None:
    with pytest.raises(VocabularyError, match="1001 tokens and the target for 1000; a vocab_mapping"):
        share_vocabulary(TOKENS, TOKENS, num_target_ids=1000, num_draft_ids=1001, own_ids=())


# Mapping files.


def mapping(folder: Path, entries: object, own_ids: tuple[int, ...] = ()) -> torch.Tensor:
    path = folder / "mapping.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return read_mapping(path, num_target_ids=6, num_draft_ids=9, own_ids=own_ids)


def test_a_mapping_says_which_ids_mean_the_same(tmp_path: Path) -> None:
    shared = mapping(tmp_path, {"8": 0, "1": 1, "3": 4, "7": 5}, own_ids=(7,))
    assert shared.tolist() == [8, 1, -1, -1, 3, -1]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("{", "is not JSON"),
        ([1, 2], "must be an object"),
        ({}, "maps no token"),
        ({"7": 1}, "maps no token"),
        ({"9": 1}, r"maps '9' to 1; allowed: 0 to 8, as a string, to 0 to 5"),
        ({"-1": 1}, "maps '-1' to 1"),
        ({"a": 1}, "maps 'a' to 1"),
        ({"1": 6}, "maps '1' to 6"),
        ({"1": -1}, "maps '1' to -1"),
        ({"1": "2"}, "maps '1' to '2'"),
        ({"1": True}, "maps '1' to True"),
        ({"1": 2.0}, r"maps '1' to 2\.0"),
        ({"1": None}, "maps '1' to None"),
        ({"1": 3, "2": 3}, "maps two ids to 3"),
        ({"²": 3}, "maps '²' to 3"),
    ],
)
def test_a_bad_mapping_is_refused_with_what_is_wrong(tmp_path: Path, entries: object, message: str) -> None:
    with pytest.raises(VocabularyError, match=message) as error:
        mapping(tmp_path, entries, own_ids=(7,))
    assert str(tmp_path / "mapping.json") in str(error.value)


def test_a_mapping_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(VocabularyError, match=r"vocab_mapping='.*' cannot be read: "):
            read_mapping(path, num_target_ids=6, num_draft_ids=9, own_ids=())
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(VocabularyError, match="is not JSON"):
        read_mapping(tmp_path / "binary.json", num_target_ids=6, num_draft_ids=9, own_ids=())


# On the device.


@given(st.data())
def test_distributions_over_the_targets_tokens(data: st.DataObject) -> None:
    """Each shared token has the drafter's logit for it, all others have none; texts are read in the same way."""
    num_target, num_draft = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    ids = data.draw(st.lists(st.integers(-1, num_draft - 1), min_size=num_target, max_size=num_target))
    substitute = data.draw(st.integers(0, num_draft - 1))
    vocabulary = SharedVocabulary(torch.tensor(ids), substitute, num_draft, torch.device("cpu"))
    logits = torch.randn(3, num_draft)
    expected = [[float(row[i]) if i >= 0 else float("-inf") for i in ids] for row in logits]
    assert vocabulary.read_as.tolist() == [i if i >= 0 else substitute for i in ids]
    assert vocabulary.logits(logits.clone()).tolist() == expected


def test_a_softmax_over_what_is_left_is_the_drafters_distribution_given_that_it_is_shared() -> None:
    vocabulary = SharedVocabulary(torch.tensor([0, -1, 2, 3, -1]), 0, 5, torch.device("cpu"))
    logits = torch.tensor([[1.0, 3.0, 0.5, -1.0, 2.0]])
    distribution = logits.softmax(-1) * torch.tensor([1, 0, 1, 1, 0])
    torch.testing.assert_close(vocabulary.logits(logits.clone()).softmax(-1), distribution / distribution.sum())
