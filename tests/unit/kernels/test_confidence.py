"""The torch function against float64 references, and the statistics of its draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.engine.memory import PeakMemory
from tests.profiles import examples
from vllm_dllm.kernels import confidence
from vllm_dllm.kernels.confidence import Draws, RowStats, position_noise
from vllm_dllm.kernels.row_stats import row_stats

FORBIDDEN = 5


def stats_of(
    logits: torch.Tensor,
    temperature: float | list[float] | torch.Tensor = 0.0,
    *,
    seed: int | torch.Tensor = 11,
    position: int | torch.Tensor = 3,
    round_: int | torch.Tensor = 0,
    temperature_applied: bool = False,
    **options: Any,
) -> RowStats:
    """``row_stats`` with scalars broadcast over the rows."""
    rows = logits.shape[0]

    def per_row(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(rows)

    t = per_row(temperature, torch.float32)
    keys = [per_row(value, torch.int64) for value in (seed, position, round_)]
    draws = Draws(t, *keys, temperature_applied) if (t > 0).any() else None
    return row_stats(logits, draws, **({"forbidden_token": FORBIDDEN} | options))


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 7919 + vocab)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)


def assert_matches_reference(
    logits: torch.Tensor, temperature: torch.Tensor, result: RowStats, forbidden: int = FORBIDDEN
) -> None:
    """Confidence, entropy and margin of the chosen tokens, and the choice of the greedy rows, in float64."""
    x = logits.double() / torch.where(temperature > 0, temperature, 1.0).double().unsqueeze(1)
    probability = x.softmax(1)
    # A float32 logit of size m is known to m * 2^-24, and so is what is subtracted from it.
    rounding = 2.0**-22 * float(x[x.isfinite()].abs().max())
    expected = probability.gather(1, result.token.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(result.confidence.double(), expected, rtol=1e-5 + rounding, atol=1e-30)
    if result.entropy is not None:
        expected = torch.special.entr(probability).sum(1)
        torch.testing.assert_close(result.entropy.double(), expected, rtol=1e-5, atol=1e-6 + rounding)
    if result.margin is not None:
        others = probability.clone()
        others[:, forbidden] = 0
        largest, second = others.topk(2, dim=1).values.unbind(1)
        # Below that, float32 has no room.
        assert ((result.margin.double() - largest + second).abs() <= (1e-5 + rounding) * largest + 1e-30).all()
    allowed = logits.double().clone()
    allowed[:, forbidden] = -torch.inf
    greedy = temperature == 0
    assert torch.equal(result.token[greedy], allowed.argmax(1)[greedy])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7), (16, 2048), (9, 4099), (40, 30000)])
def test_confidence_entropy_and_margin_match_a_float64_softmax(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = random_logits(*shape, dtype)
    temperature = torch.tensor([0.0, 1.0, 0.3]).repeat(shape[0])[: shape[0]]
    assert_matches_reference(logits, temperature, stats_of(logits, temperature, with_entropy=True, with_margin=True))
    greedy = stats_of(logits, with_entropy=True, with_margin=True)
    assert_matches_reference(logits, torch.zeros(shape[0]), greedy)


def test_entropy_and_margin_are_left_out_unless_asked_for() -> None:
    logits = random_logits(3, 64)
    assert stats_of(logits)[2:] == (None, None)
    assert stats_of(logits, with_entropy=True).margin is None
    assert stats_of(logits, with_margin=True).entropy is None


def test_asking_for_the_margin_changes_nothing_else() -> None:
    # Several chunks, of more rows than one.
    logits = random_logits(60, 30000)
    for temperature in (0.0, 0.8):
        without = stats_of(logits, temperature, position=torch.arange(60), with_entropy=True)
        result = stats_of(logits, temperature, position=torch.arange(60), with_entropy=True, with_margin=True)
        assert all(torch.equal(a, b) for a, b in zip(result[:3], without[:3], strict=True))


def test_the_margin_is_of_the_two_most_likely_tokens_whichever_is_drawn() -> None:
    logits = torch.tensor([2.0, 0.5, 1.5, 0.0]).log().expand(200, -1)
    result = stats_of(logits, 1.0, position=torch.arange(200), forbidden_token=3, with_margin=True)
    assert set(result.token.tolist()) == {0, 1, 2}
    torch.testing.assert_close(result.margin, torch.full((200,), 0.125))


def test_the_forbidden_token_takes_no_part_in_the_margin_but_keeps_its_probability_mass() -> None:
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0], [1.0, 4.0, 1.0, 2.0]]).log()
    margins = [stats_of(logits, forbidden_token=token, with_margin=True).margin.tolist() for token in range(4)]
    torch.testing.assert_close(
        torch.tensor(margins), torch.tensor([[1 / 8, 2 / 8], [3 / 8, 1 / 8], [2 / 8, 2 / 8], [2 / 8, 3 / 8]])
    )


@pytest.mark.parametrize("vocab", [7, 640, 8192])
def test_the_margin_of_two_equal_logits_is_zero_and_of_a_lone_one_its_probability(vocab: int) -> None:
    logits = torch.full((40, vocab), -torch.inf)
    logits[:20, [0, vocab - 1]] = 1.0
    logits[20:, 0] = 1.0
    for temperature in (0.0, 1.0):
        margin = stats_of(logits, temperature, with_margin=True).margin
        assert margin is not None
        assert margin.tolist() == [0.0] * 20 + [1.0] * 20
        # Without the other choice, half of the mass is all that is left; without the only one, nothing.
        margin = stats_of(logits, temperature, forbidden_token=0, with_margin=True).margin
        assert margin is not None
        assert margin.tolist() == [0.5] * 20 + [0.0] * 20


def test_no_rows_give_empty_results() -> None:
    for temperature in (0.0, 1.0):
        nothing = torch.empty(0, dtype=torch.int64)
        draws = Draws(torch.empty(0), nothing, nothing, nothing) if temperature > 0 else None
        result = row_stats(torch.empty(0, 64), draws, forbidden_token=FORBIDDEN, with_entropy=True, with_margin=True)
        assert [t.shape for t in result if t is not None] == [(0,)] * 4
        assert result.token.dtype == torch.int64


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_strided_logits_give_the_results_of_their_contiguous_copy_and_stay_unmodified(
    temperature: float,
) -> None:
    storage = random_logits(24, 3000)
    for view in (storage[:, :2048], storage[::3, 100:1700], storage.T[:, :20]):
        before = storage.clone()
        options = {"with_entropy": True, "with_margin": True}
        result = stats_of(view, temperature, **options)
        for ours, expected in zip(result, stats_of(view.contiguous(), temperature, **options), strict=True):
            assert ours is not None
            assert torch.equal(ours, expected)
        assert torch.equal(storage, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_forbidden_token_is_not_chosen_but_keeps_its_probability_mass(temperature: float) -> None:
    logits = random_logits(32, 512)
    logits[:, FORBIDDEN] = 20.0
    result = stats_of(logits, temperature, seed=torch.arange(32))
    assert (result.token != FORBIDDEN).all()
    assert (result.confidence < 1e-3).all()


@pytest.mark.parametrize("vocab", [3, 4096])
def test_a_row_with_nothing_but_the_forbidden_token_chooses_another_one(vocab: int) -> None:
    for forbidden in (0, 1, vocab - 1):
        logits = torch.full((8, vocab), -torch.inf)
        logits[:, forbidden] = 1.0
        for temperature in (0.0, 1.0):
            result = stats_of(logits, temperature, forbidden_token=forbidden)
            assert (result.token != forbidden).all()
            assert (result.confidence == 0).all()


@pytest.mark.parametrize("forbidden", [-1, 64])
def test_a_forbidden_token_outside_the_vocabulary_is_an_error(forbidden: int) -> None:
    with pytest.raises(ValueError, match="forbidden_token"):
        stats_of(random_logits(2, 64), forbidden_token=forbidden)


@pytest.mark.parametrize("vocab", [100, 640, 8192])
def test_the_smallest_token_id_wins_a_tie(vocab: int) -> None:
    logits = torch.zeros(30, vocab)
    logits[:, 40:] = 1.0
    assert stats_of(logits).token.tolist() == [40] * 30
    assert stats_of(logits, forbidden_token=40).token.tolist() == [41] * 30


def test_filtered_tokens_are_never_drawn() -> None:
    logits = random_logits(200, 4096)
    kept = torch.rand(200, 4096, generator=torch.Generator().manual_seed(1)) < 0.002
    kept[:, 17] = True
    logits.masked_fill_(~kept, -torch.inf)
    result = stats_of(logits, 1.5, seed=torch.arange(200), with_entropy=True)
    assert kept.gather(1, result.token.unsqueeze(1)).all()
    assert_matches_reference(logits, torch.full((200,), 1.5), result)


def test_a_row_with_one_token_left_draws_it_for_sure() -> None:
    logits = torch.full((500, 300), -torch.inf)
    logits[:, 123] = -4.0
    result = stats_of(logits, 0.7, position=torch.arange(500), with_entropy=True)
    assert (result.token == 123).all()
    assert (result.confidence == 1).all()
    assert result.entropy is not None
    assert (result.entropy == 0).all()


def test_temperature_applied_beforehand_gives_the_same_draws() -> None:
    logits = random_logits(64, 1000)
    # A power of two divides exactly, so not even rounding may differ.
    temperature = torch.tensor([0.0, 0.5]).repeat(32)
    divided = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    inside = stats_of(logits, temperature, position=torch.arange(64))
    outside = stats_of(divided, temperature, position=torch.arange(64), temperature_applied=True)
    assert torch.equal(inside.token, outside.token)
    assert torch.equal(inside.confidence, outside.confidence)


def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    # Large enough that the whole batch takes several chunks, and the parts take one.
    logits = random_logits(300, 5120)
    keys = {
        "seed": torch.arange(300) % 4,
        "position": torch.arange(300) // 4,
        "round_": torch.arange(300) % 3,
    }
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0]).repeat(60)
    whole = stats_of(logits, temperature, **keys)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    for part in (order, order[:7], order[7:8]):
        result = stats_of(logits[part], temperature[part], **{name: k[part] for name, k in keys.items()})
        assert torch.equal(result.token, whole.token[part])
        torch.testing.assert_close(result.confidence, whole.confidence[part], rtol=1e-6, atol=0)


KEYS = ["seed", "position", "round_"]
LOGITS = torch.tensor([1.2, -0.3, 0.0, 2.0, 0.7, 9.0, -torch.inf, -1.5])  # FORBIDDEN is far the most likely


def draws_of(count: int, temperature: float = 1.0, **keys: Any) -> torch.Tensor:
    return stats_of(LOGITS.expand(count, -1), temperature, **keys).token


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("varied", KEYS)
def test_draws_follow_the_softmax_of_the_allowed_tokens(varied: str, temperature: float) -> None:
    count = 40000
    tokens = draws_of(count, temperature, **{varied: torch.arange(count)})
    expected = LOGITS.double() / temperature
    expected[FORBIDDEN] = -torch.inf
    expected = expected.softmax(0)
    support = expected > 0
    observed = torch.bincount(tokens, minlength=len(LOGITS))
    assert not observed[~support].any()
    assert stats.chisquare(observed[support], (expected * count)[support]).pvalue > 1e-3


@pytest.mark.parametrize("first", KEYS)
@pytest.mark.parametrize("second", KEYS)
def test_draws_of_neighbouring_keys_are_independent(first: str, second: str) -> None:
    """Draws along one key, with and without a step of one along the same or another key."""
    count = 40000
    # Every other key, so that with first == second no draw is counted in two pairs.
    keys = {name: torch.zeros(count, dtype=torch.int64) for name in KEYS}
    keys[first] = torch.arange(0, 2 * count, 2)
    stepped = keys | {second: keys[second] + 1}
    table = torch.zeros(len(LOGITS), len(LOGITS))
    pairs = draws_of(count, **keys) * len(LOGITS) + draws_of(count, **stepped)
    table = torch.bincount(pairs, minlength=table.numel()).view_as(table)
    used = table.sum(1) > 0
    table = table[used][:, used]
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3


def test_swapping_seed_position_and_round_gives_other_draws() -> None:
    a, b = torch.arange(2000), torch.arange(2000) + 5000
    draws = [
        draws_of(2000, 3.0, seed=a, position=b),
        draws_of(2000, 3.0, seed=b, position=a),
        draws_of(2000, 3.0, seed=a, position=0, round_=b),
    ]
    for i in range(3):
        assert (draws[i] == draws[i - 1]).float().mean() < 0.5


def test_extreme_keys_draw_like_any_other() -> None:
    extremes = torch.tensor([-(2**63), -1, 0, 1, 2**63 - 1])
    seed, position = (t.flatten() for t in torch.meshgrid(extremes, extremes, indexing="ij"))
    tokens = stats_of(torch.zeros(25, 4096), 1.0, seed=seed, position=position).token
    assert tokens.unique().numel() == 25


def test_rare_tokens_are_drawn_at_their_rate() -> None:
    """The tail of the noise is right: one dominant token against many tokens 12 nats below."""
    count, vocab = 4000, 2048
    logits = torch.zeros(1, vocab)
    logits[0, 0] = 12.0
    tokens = torch.cat(
        [
            stats_of(logits.expand(1000, -1), 1.0, position=torch.arange(start, start + 1000)).token
            for start in range(0, count, 1000)
        ]
    )
    rate = (vocab - 2) * torch.e**-12 / (1 + (vocab - 2) * torch.e**-12)
    assert stats.binomtest(int((tokens != 0).sum()), count, rate).pvalue > 1e-3


noise_keys = (*KEYS, "stream")


def noise_of(count: int, *, stream: int = 0, **keys: Any) -> torch.Tensor:
    """[count]: ``position_noise``, with scalars broadcast."""
    values = (torch.as_tensor(keys.get(name, 3)).expand(count) for name in KEYS)
    return position_noise(*values, stream=stream)


def noise_along(key: str, count: int, offset: int = 0) -> torch.Tensor:
    """[count]: noise of every other value of one key."""
    if key == "stream":
        return torch.cat([noise_of(1, stream=stream) for stream in range(offset, 2 * count + offset, 2)])
    return noise_of(count, **{key: torch.arange(0, 2 * count, 2) + offset})


@pytest.mark.parametrize("key", noise_keys)
def test_position_noise_is_uniform_along_every_key(key: str) -> None:
    noise = noise_along(key, 4000 if key == "stream" else 100000)
    assert noise.dtype == torch.float32
    assert stats.kstest(noise.numpy(), "uniform").pvalue > 1e-3
    assert stats.chisquare((noise * 64).long().bincount(minlength=64)).pvalue > 1e-3


@pytest.mark.parametrize("key", noise_keys)
def test_position_noise_of_neighbouring_keys_is_independent(key: str) -> None:
    count = 4000 if key == "stream" else 40000
    assert_independent(noise_along(key, count), noise_along(key, count, offset=1))


def assert_independent(a: torch.Tensor, b: torch.Tensor, bins: int = 8) -> None:
    """Of values in (0, 1) and of choices from 0 to ``bins`` - 1, which are int64."""
    columns = [values if values.dtype == torch.int64 else (values * bins).long() for values in (a, b)]
    table = torch.bincount(columns[0] * bins + columns[1], minlength=bins**2).view(bins, bins)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("varied", KEYS)
def test_streams_of_position_noise_are_independent_of_one_another_and_of_the_draws(varied: str) -> None:
    count = 40000
    keys = dict.fromkeys(KEYS, 3) | {varied: torch.arange(count)}
    streams = [noise_of(count, stream=stream, **keys) for stream in range(3)]
    draws = draws_of(count, 3.0, **keys)
    for i, noise in enumerate(streams):
        assert_independent(noise, streams[i - 1])
        assert_independent(noise, draws)


def test_position_noise_is_a_property_of_its_keys_in_any_shape() -> None:
    seed, position, round_ = torch.arange(3).view(3, 1, 1) - 1, torch.arange(5) + 7, torch.arange(4).view(4, 1)
    before = [t.clone() for t in (seed, position, round_)]
    noise = position_noise(seed, position, round_, stream=1)
    assert noise.shape == (3, 4, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, (seed, position, round_), strict=True))
    for s, r, p in [(0, 0, 0), (2, 3, 4), (1, 2, 3)]:
        alone = position_noise(seed[s, 0, 0], position[p], round_[r, 0], stream=1)
        assert alone.shape == ()
        assert alone == noise[s, r, p]
    assert noise.unique().numel() == noise.numel()


def test_position_noise_of_extreme_keys_lies_inside_the_interval() -> None:
    extremes = torch.tensor([-(2**63), -1, 0, 1, 2**63 - 1])
    for stream in (0, 1, 2**31, 2**62):
        noise = position_noise(extremes, extremes.view(5, 1), extremes.view(5, 1, 1), stream=stream)
        assert ((noise > 0) & (noise < 1)).all()
        assert noise.unique().numel() == 125
    with pytest.raises(ValueError, match="stream"):
        position_noise(extremes, extremes, extremes, stream=-1)


@pytest.mark.parametrize(("bits", "value"), [(0, 2.0**-33), (2**32 - 1, 1 - 2.0**-24)])
def test_the_ends_of_the_noise_stay_inside_the_interval(
    bits: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confidence, "_mix64_", lambda z: z.fill_(0).add_(bits).bitwise_left_shift_(32))
    zero = torch.zeros(3, dtype=torch.int64)
    assert position_noise(zero, zero, zero, stream=0).tolist() == [value] * 3


def peak_of(function: Callable[[torch.Tensor], Any], logits: torch.Tensor) -> int:
    with PeakMemory() as memory:
        function(logits)
    return memory.peak


def test_temporary_memory_does_not_grow_with_the_rows() -> None:
    vocab, rows = 150_001, 64
    logits = random_logits(1, vocab, torch.bfloat16).expand(4 * rows, -1)
    functions: list[Callable[[torch.Tensor], Any]] = [
        lambda x: stats_of(x, with_entropy=True),
        lambda x: stats_of(x, 1.0, with_entropy=True),
        lambda x: stats_of(x, with_margin=True),
        lambda x: stats_of(x, 1.0, with_margin=True),
    ]
    for function in functions:
        few, many = peak_of(function, logits[:rows]), peak_of(function, logits[: 2 * rows])
        # The results of the rows, tens of bytes each, are all that may grow.
        assert many - few < 1000 * rows
        assert 4 * vocab < many < 32 * 2**20
    # The measure itself: two float32 copies of the logits are seen as such.
    assert peak_of(lambda x: x.float().exp(), logits[:rows]) == 2 * rows * vocab * 4


@given(data=st.data())
@examples(60)
def test_any_row_gets_an_allowed_token_with_its_probability(data: st.DataObject) -> None:
    rows, vocab = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 200))
    forbidden = data.draw(st.integers(0, vocab - 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    spread = data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    logits = torch.randn(rows, vocab, generator=generator) * spread
    filtered = torch.rand(rows, vocab, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 0.95]))
    keep = data.draw(st.integers(0, vocab - 1).filter(lambda token: token != forbidden))
    filtered[:, keep] = False
    logits.masked_fill_(filtered, -torch.inf)
    temperature = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.0]), min_size=rows, max_size=rows)))
    key = st.integers(-(2**63), 2**63 - 1)
    result = stats_of(
        logits,
        temperature,
        seed=data.draw(key),
        position=data.draw(key),
        round_=data.draw(key),
        forbidden_token=forbidden,
        with_entropy=True,
        with_margin=True,
    )
    assert (result.token != forbidden).all()
    assert not filtered.gather(1, result.token.unsqueeze(1)).any()
    assert_matches_reference(logits, temperature, result, forbidden)
