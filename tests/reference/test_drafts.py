"""Step-skipping in the reference: what it leaves unchanged, and how many forwards it takes."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.reference.decode import Branch, Decoded, Model, Options, Prediction, Predictions, Round, StepSkipping, decode
from tests.reference.drafts import PSD, FreeDave, Node, Spiffy, best_of_graph, decode_eagerly

MASK, STOP, VOCAB = 0, 1, 5

block_lengths = st.integers(1, 6)
seeds = st.integers(0, 2**32)
wobbles = st.sampled_from([0.0, 0.2, 0.5, 1.0])
prompts = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=7)
drafts = st.integers(0, 8)
nodes = st.dictionaries(st.integers(1, 5), st.integers(1, 3), min_size=1, max_size=4).map(lambda node: [*node.items()])
graphs = st.lists(nodes, min_size=1, max_size=8, unique_by=frozenset)
thresholds = st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0])


def model_of(seed: int, wobble: float) -> Model:
    """A model whose logits move by ``wobble`` with the tokens they are computed from; at 0 they never do.

    As under the block-causal mask, those tokens are all up to the end of the position's block.
    """

    def model(ids: Tensor, visible: Tensor) -> Tensor:
        rows = []
        for position, seen in enumerate(visible.sum(dim=1).tolist()):
            by_position = random.Random(f"{seed} {position}")
            by_state = random.Random(f"{seed} {position} {ids[:seen].tolist()}")
            rows.append([3 * by_position.gauss() + 3 * wobble * by_state.gauss() for _ in range(VOCAB)])
        return torch.tensor(rows)

    return model


def chain_graph(length: int) -> list[Node]:
    return [[(i, 1) for i in range(1, k + 1)] for k in range(1, length + 1)]


policies = st.builds(
    Options,
    block_length=block_lengths,
    mask_id=st.just(MASK),
    policy=st.sampled_from(["static", "threshold", "sequential", "entropy", "localleap"]),
    tokens_per_step=st.integers(1, 3),
    denoising_steps=st.none() | st.integers(1, 6),
    threshold=thresholds,
    threshold_inclusive=st.booleans(),
    entropy_bound=st.sampled_from([0.1, 0.5, 2.0]),
    relaxed_threshold=thresholds,
    radius=st.integers(0, 3),
)
all_options = st.one_of(
    policies,
    policies.flatmap(lambda o: st.integers(1, o.block_length).map(lambda s: replace(o, sub_block_length=s))),
    policies.map(lambda o: replace(o, shifted=True)),
    policies.map(lambda o: replace(o, stop_ids=frozenset({STOP}), eos_early_stop=True)),
    policies.map(lambda o: replace(o, edit_threshold=0.6, max_post_edit_steps=2)),
)
runs = st.tuples(st.builds(model_of, seeds, wobbles), prompts, st.integers(1, 10), all_options)
static_runs = st.tuples(
    st.builds(model_of, seeds, wobbles),
    prompts,
    st.integers(1, 10),
    st.builds(
        Options,
        block_length=block_lengths,
        mask_id=st.just(MASK),
        policy=st.sampled_from(["static", "sequential"]),
        tokens_per_step=st.integers(1, 3),
    ),
)
Run = tuple[Model, list[int], int, Options]


@given(runs, st.builds(FreeDave, drafts) | st.builds(Spiffy, graphs, drafts))
def test_exact_match_gives_the_same_tokens_and_takes_no_more_forwards(run: Run, skipping: FreeDave | Spiffy) -> None:
    plain, got = decode(*run), decode(*run, skipping)
    assert got.tokens == plain.tokens
    assert got.nfe <= plain.nfe
    if not run[3].eos_early_stop:
        assert got.canvas == plain.canvas
        assert got.nfe + sum(round_.hops for round_ in got.rounds) == plain.nfe


@given(runs, st.builds(FreeDave, st.integers(0, 1)) | st.builds(Spiffy, graphs, st.just(0)) | st.just(PSD(0)))
def test_without_drafts_every_verifier_is_the_policy(run: Run, skipping: StepSkipping) -> None:
    assert decode(*run, skipping) == decode(*run)


@given(static_runs, st.integers(1, 8))
def test_with_one_step_schedules_the_verifiers_agree(run: Run, d: int) -> None:
    """Static schedules leave a policy's criterion no room beside the exact next state."""
    freedave = decode(*run, FreeDave(d))
    assert decode(*run, FreeDave(d, "subset")) == freedave
    assert decode(*run, PSD(d - 1)) == freedave
    if run[3].tokens_per_step == 1:
        spiffy = decode(*run, Spiffy(chain_graph(8), 8))
        assert (spiffy.canvas, spiffy.nfe) == ((most := decode(*run, FreeDave(9))).canvas, most.nfe)


def bounds(decoded: Decoded, prompt: list[int], options: Options, d: int) -> tuple[int, int]:
    """Forwards of a run whose drafts are all right, and of one whose drafts are all wrong."""
    length = options.block_length
    # Masks of each block: the first shares its block with the prompt's tail.
    first = -len(prompt) % length or length
    sizes = [first] + [length] * ((len(decoded.canvas) - first) // length)
    steps = [math.ceil(n / options.tokens_per_step) for n in sizes]
    return sum(1 + math.ceil((n - 1) / d) for n in steps), sum(steps)


@given(static_runs, st.integers(1, 8))
def test_a_block_of_n_steps_takes_from_one_plus_n_less_one_over_d_to_n_forwards(run: Run, d: int) -> None:
    got = decode(*run, FreeDave(d))
    fewest, most = bounds(got, run[1], run[3], d)
    assert fewest <= got.nfe <= most


@given(static_runs, seeds, st.integers(1, 8), st.data())
def test_drafts_that_are_all_right_take_the_fewest_forwards(run: Run, seed: int, d: int, data: st.DataObject) -> None:
    _, prompt, max_new_tokens, options = run
    skipping = data.draw(st.sampled_from([FreeDave(d), FreeDave(d, "subset"), PSD(d - 1)]))
    got = decode(model_of(seed, 0.0), prompt, max_new_tokens, options, skipping)
    assert got.nfe == bounds(got, prompt, options, d)[0]


class Compare(FreeDave):
    """FreeDave that asks the other verifiers of the same drafts."""

    def accept(
        self, branches: list[Branch], target: Callable[[int, int], list[int]], options: Options
    ) -> tuple[int, int]:
        exact = super().accept(branches, target, options)
        subset = replace(FreeDave(self.d), match="subset").accept(branches, target, options)
        psd = PSD(self.d - 1).accept(branches, target, options)
        assert exact[0] <= subset[0] <= psd[0]
        return exact


@given(runs, st.integers(1, 8))
def test_of_the_same_chain_subset_accepts_no_less_than_exact_and_psd_no_less_than_subset(run: Run, d: int) -> None:
    model, prompt, max_new_tokens, options = run
    options = replace(options, denoising_steps=None)
    decode(model, prompt, max_new_tokens, options, Compare(d))


def test_psd_accepts_what_an_accepted_parent_commits_where_the_next_state_holds_more() -> None:
    """After position 0, a step commits 1 and 2. The draft with 1 alone is not that state, but part of it, and lets the
    model be sure of 3 as well."""

    def model(ids: Tensor, visible: Tensor) -> Tensor:
        logits = torch.zeros(len(ids), VOCAB)
        logits[:, 2] = torch.tensor([4.0, 3.0, 2.0, 1.0])
        if ids[0] != MASK:
            logits[1:3, 2] = 9.0
        if ids[1] != MASK:
            logits[3, 2] = 9.0
        return logits

    options = Options(block_length=4, mask_id=MASK, threshold=0.9)
    run: Run = model, [], 4, options
    assert [len(step) for step in decode(*run).steps] == [1, 2, 1]
    assert decode(*run, FreeDave(2)).rounds[1:] == [
        Round(step=1, masked=3, drafts=1, accepted=0, hops=0),
        Round(step=2, masked=1, drafts=0, accepted=0, hops=0),
    ]
    assert decode(*run, PSD(1)).rounds[1:] == [Round(step=1, masked=3, drafts=1, accepted=1, hops=1)]
    assert decode(*run, FreeDave(2, "subset")).rounds == decode(*run, PSD(1)).rounds
    assert decode(*run, FreeDave(3)).rounds[1:] == [Round(step=1, masked=3, drafts=2, accepted=2, hops=1)]


def test_psd_needs_a_parent_that_the_draft_contains() -> None:
    """Position 1 makes the model sure of 2 and 3, but the draft of 2 and 3 lacks 1."""

    def model(ids: Tensor, visible: Tensor) -> Tensor:
        logits = torch.zeros(len(ids), VOCAB)
        logits[:, 2] = torch.tensor([4.0, 3.0, 2.0, 1.0] if ids[1] == MASK else [9.0, 9.0, 9.0, 9.0])
        return logits

    options = Options(block_length=4, mask_id=MASK, threshold=0.97)
    got = decode(model, [], 4, options, PSD(2, graph=[[(1, 1)], [(2, 1), (3, 1)]]))
    assert got.rounds[1:] == [Round(step=1, masked=3, drafts=2, accepted=1, hops=1)]


@given(runs, st.builds(PSD, drafts, st.none() | graphs) | st.builds(FreeDave, drafts, st.just("subset")))
def test_inexact_match_finishes_every_block_and_a_round_takes_at_least_its_step(
    run: Run, skipping: PSD | FreeDave
) -> None:
    got, options = decode(*run, skipping), run[3]
    assert MASK not in got.tokens
    for round_, written in zip(got.rounds, got.steps, strict=True):
        quota = 0 if options.denoising_steps is not None else options.tokens_per_step
        if options.sub_block_length is None and options.policy != "entropy":
            assert len(written) >= min(quota, round_.masked)


@given(runs, st.integers(1, 8))
def test_eager_drafts_give_the_same_tokens_and_take_no_more_forwards(run: Run, d: int) -> None:
    model, prompt, max_new_tokens, options = run
    options = replace(
        options,
        shifted=False,
        sub_block_length=None,
        denoising_steps=None,
        edit_threshold=math.inf,
        stop_ids=frozenset(),
        eos_early_stop=False,
    )
    plain = decode(model, prompt, max_new_tokens, options)
    got = decode_eagerly(model, prompt, max_new_tokens, options, FreeDave(d))
    assert got.canvas == plain.canvas
    assert got.nfe <= plain.nfe


def prediction(*probabilities: float) -> Prediction:
    """Of tokens 1, 2, ..., best first."""
    log_probs = torch.tensor([0.0, *probabilities]).log()
    return Prediction(1, probabilities[0], 0.0, log_probs)


def test_spiffy_keeps_the_nodes_with_the_best_scores() -> None:
    options = Options(block_length=4, mask_id=MASK, policy="static")
    predictions: Predictions = {
        0: prediction(0.5, 0.3),
        1: prediction(0.8, 0.1),
        2: prediction(0.6, 0.2),
        3: prediction(0.4, 0.3),
    }
    a, b, ab, ac = [(1, 1)], [(2, 1)], [(1, 1), (2, 1)], [(1, 1), (3, 2)]  # positions by rank: 1, 2, 0, 3
    local = {"a": 0.8, "b": 0.6, "ab": (0.8 * 0.6) ** 0.5, "ac": (0.8 * 0.3) ** 0.5}
    score = {
        "a": (local["a"] * (local["ab"] * local["ac"]) ** 0.5) ** 0.5,  # 0.685
        "b": (local["b"] * local["ab"]) ** 0.5,  # 0.645
        "ab": local["ab"],  # 0.693
        "ac": local["ac"],  # 0.490
    }
    assert sorted(score, key=score.__getitem__) == ["ac", "b", "a", "ab"]

    def kept(graph: list[Node], count: int, canvas: list[int]) -> list[list[int]]:
        return [draft.canvas for draft in best_of_graph(graph, canvas, predictions, 0, 0, options, count)]

    empty = [MASK] * 4
    assert kept([a, b, ab, ac], 3, empty) == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert kept([a, b, ab, ac], 9, empty)[3] == [2, 1, 0, 0], "(3, 2): the second best token of the third position"
    too_much = [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert kept([too_much, [(5, 1)]], 9, empty) == [], "a draft leaves a mask, and has only masked positions"
    # With two masks left the child of (1, 1) would leave none. It would pull (1, 1) below (2, 1).
    assert kept([a, b, [(1, 1), (2, 2)]], 9, [4, 0, 0, 4]) == [[4, 1, 0, 4], [4, 0, 1, 4]]


@pytest.mark.parametrize(("d", "nfe"), [(2, 6), (8, 2)])
def test_an_eager_draft_fills_the_blocks_that_follow(d: int, nfe: int) -> None:
    options = Options(block_length=2, mask_id=MASK, policy="static")
    run = model_of(0, 0.0), [2, 2], 8, options
    lazy, eager = decode(*run, FreeDave(d)), decode_eagerly(*run, FreeDave(d))
    assert eager.canvas == lazy.canvas == decode(*run).canvas
    assert (lazy.nfe, eager.nfe) == (8, nfe)
