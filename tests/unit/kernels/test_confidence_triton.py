"""The Triton kernels against the torch function, in the interpreter and on a GPU."""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from vllm_dllm.kernels.confidence import Draws, RowStats, row_stats_torch
from vllm_dllm.kernels.row_stats import row_stats

FORBIDDEN = 5

# Triton reads TRITON_INTERPRET when it is imported, and this process may have done that long ago: the kernel
# is run by processes of their own.


def start_with(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def triton_process(environment: dict[str, str]) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_with,
        initargs=(environment,),
    )


def call_kernel(logits: torch.Tensor, arguments: dict[str, Any]) -> RowStats:
    from vllm_dllm.kernels.confidence_triton import row_stats_triton

    return row_stats_triton(logits, **arguments)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., RowStats]]:
    """The kernel's launcher, run in a process where Triton interprets."""
    with triton_process({"TRITON_INTERPRET": "1"}) as pool:
        yield lambda logits, **arguments: pool.submit(call_kernel, logits, arguments).result()


def arguments_of(temperature: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Arguments of the two functions; ``options`` are fields of `Draws` or arguments."""
    rows = torch.arange(len(temperature))
    of_draws = {name: options.pop(name) for name in Draws._fields if name in options}
    draws = Draws(temperature, rows * -(2**61) + 17, rows * 3, rows % 4)._replace(**of_draws)
    return {
        "draws": draws if (temperature > 0).any() else None,
        "forbidden_token": FORBIDDEN,
        "with_entropy": True,
        "with_margin": True,
    } | options


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 7919 + vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits[:, FORBIDDEN] = 12.0
    return logits.to(dtype)


def assert_same(ours: RowStats, expected: RowStats) -> None:
    assert torch.equal(ours.token, expected.token)
    torch.testing.assert_close(ours.confidence, expected.confidence, rtol=1e-5, atol=1e-30)
    assert (ours.entropy is None) == (expected.entropy is None)
    if ours.entropy is not None:
        torch.testing.assert_close(ours.entropy, expected.entropy, rtol=1e-5, atol=1e-6)
    assert (ours.margin is None) == (expected.margin is None)
    if ours.margin is not None:
        torch.testing.assert_close(ours.margin, expected.margin, rtol=1e-5, atol=1e-7)


TEMPERATURES = {
    "greedy": torch.zeros(5),
    "sampled": torch.tensor([1.0, 0.7, 0.25, 1.3, 3.0]),
    "mixed": torch.tensor([0.0, 1.0, 0.0, 0.6, 2.0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [100, 2048, 5003])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_kernel_agrees_with_the_torch_function(
    interpreted: Callable[..., RowStats], temperature: str, vocab: int, dtype: torch.dtype
) -> None:
    logits = random_logits(5, vocab, dtype)
    arguments = arguments_of(TEMPERATURES[temperature])
    assert_same(interpreted(logits, **arguments), row_stats_torch(logits, **arguments))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_kernel_leaves_out_entropy_margin_and_temperature_when_told_so(
    interpreted: Callable[..., RowStats], temperature: str
) -> None:
    logits = random_logits(5, 3000)
    for options in ({"with_entropy": False}, {"with_margin": False}, {"temperature_applied": True}):
        arguments = arguments_of(TEMPERATURES[temperature], **options)
        assert_same(interpreted(logits, **arguments), row_stats_torch(logits, **arguments))


def test_the_kernel_reads_logits_and_keys_of_any_stride(interpreted: Callable[..., RowStats]) -> None:
    storage = random_logits(10, 4000)
    keys = torch.arange(20).view(10, 2)
    for logits in (storage[::2, 7:2900], storage.T[:5]):
        arguments = arguments_of(TEMPERATURES["mixed"], position=keys[:5, 1], round_=torch.tensor(2).expand(5))
        assert_same(interpreted(logits, **arguments), row_stats_torch(logits, **arguments))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_kernel_handles_filtered_rows(interpreted: Callable[..., RowStats], temperature: str) -> None:
    logits = torch.full((5, 4500), -torch.inf)
    # One token; one beside the forbidden token; all over; the end of the last block; the lowest finite value.
    logits[0, 4321] = 1.0
    logits[1, [FORBIDDEN, 3000]] = 2.0
    logits[2, ::100] = torch.linspace(-1, 1, 45)
    logits[3, 4400:] = -7.0
    logits[4] = torch.finfo(torch.float32).min
    logits[4, 11:20] = 0.5
    arguments = arguments_of(TEMPERATURES[temperature])
    assert_same(interpreted(logits, **arguments), row_stats_torch(logits, **arguments))


def test_the_kernel_never_chooses_the_forbidden_token(interpreted: Callable[..., RowStats]) -> None:
    for forbidden, t in itertools.product((0, 1, 2500), TEMPERATURES.values()):
        logits = torch.full((5, 3000), -torch.inf)
        logits[:, forbidden] = 1.0
        arguments = arguments_of(t, forbidden_token=forbidden)
        assert_same(interpreted(logits, **arguments), row_stats_torch(logits, **arguments))


def test_the_kernel_gives_a_tie_to_the_smallest_token_id(interpreted: Callable[..., RowStats]) -> None:
    logits = torch.zeros(5, 6000)
    # Across lanes of a block and across blocks; 3 is in the same lane as 2048 + 3.
    for row, tied in enumerate([(3, 2051), (1999, 2050), (2050, 4000), (4097, 5), (0, 5999)]):
        logits[row, list(tied)] = 1.0
    result = interpreted(logits, **arguments_of(TEMPERATURES["greedy"]))
    assert result.token.tolist() == [3, 1999, 2050, 4097, 0]
    assert result.margin is not None
    # Row 3 has one of its two in the forbidden column.
    assert [margin > 0 for margin in result.margin.tolist()] == [False, False, False, True, False]


def test_the_kernel_finds_the_second_of_the_margin_wherever_it_is(interpreted: Callable[..., RowStats]) -> None:
    # The largest logit at 2100; the second in its lane before and after it, beside it, first and last of all.
    seconds = [2100 - 2048, 2100 + 2048, 2101, 0, 6999]
    logits = random_logits(5, 7000).clamp(max=10.0)
    logits[:, FORBIDDEN] = 12.0
    logits[:, 2100] = 11.5
    for row, second in enumerate(seconds):
        logits[row, second] = 11.0
    for t in TEMPERATURES.values():
        arguments = arguments_of(t)
        result = interpreted(logits, **arguments)
        assert_same(result, row_stats_torch(logits, **arguments))
        scale = torch.where(t > 0, t, 1.0).double()
        mass = (logits.double() / scale.unsqueeze(1)).logsumexp(1)
        expected = (11.5 / scale - mass).exp() - (11.0 / scale - mass).exp()
        assert result.margin is not None
        torch.testing.assert_close(result.margin.double(), expected, rtol=1e-5, atol=1e-7)


def test_the_kernel_of_no_rows_is_not_launched(interpreted: Callable[..., RowStats]) -> None:
    result = interpreted(torch.empty(0, 64), **arguments_of(torch.zeros(0)))
    assert [len(t) for t in result if t is not None] == [0, 0, 0, 0]


def test_a_logit_that_is_not_a_number_still_gives_a_token_of_the_vocabulary(
    interpreted: Callable[..., RowStats],
) -> None:
    for t in TEMPERATURES.values():
        result = interpreted(torch.full((5, 3000), torch.nan), **arguments_of(t))
        assert ((result.token >= 0) & (result.token < 3000)).all()


@pytest.fixture
def part() -> int:
    """Columns that one program reduces."""
    from vllm_dllm.kernels.confidence_triton import PART_COLUMNS

    return PART_COLUMNS


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_kernels_merge_parts_of_a_row(interpreted: Callable[..., RowStats], part: int, temperature: str) -> None:
    for vocab in (4 * part, 4 * part + 1, 7 * part - 1):
        logits = random_logits(5, vocab, torch.bfloat16)
        arguments = arguments_of(TEMPERATURES[temperature])
        assert_same(interpreted(logits, **arguments), row_stats_torch(logits, **arguments))


def test_a_part_may_have_no_token_to_choose(interpreted: Callable[..., RowStats], part: int) -> None:
    # The last part has the forbidden token alone; the first one is filtered.
    vocab = 2 * part + 1
    logits = random_logits(5, vocab)
    logits[:, :part] = -torch.inf
    logits[:, -1] = 12.0
    for t in TEMPERATURES.values():
        arguments = arguments_of(t, forbidden_token=vocab - 1)
        assert_same(interpreted(logits, **arguments), row_stats_torch(logits, **arguments))


def test_ties_and_margins_cross_the_ends_of_parts(interpreted: Callable[..., RowStats], part: int) -> None:
    logits = torch.zeros(5, 3 * part)
    for row, tied in enumerate(
        [(part - 1, part), (0, 3 * part - 1), (part, part + 1), (2 * part, part), (2 * part, FORBIDDEN)]
    ):
        logits[row, list(tied)] = 1.0
    result = interpreted(logits, **arguments_of(TEMPERATURES["greedy"]))
    assert result.token.tolist() == [part - 1, 0, part, part, 2 * part]
    assert result.margin is not None
    assert [margin > 0 for margin in result.margin.tolist()] == [False, False, False, False, True]


def rows_of(arguments: dict[str, Any], which: torch.Tensor) -> dict[str, Any]:
    draws = arguments["draws"]
    return arguments | {"draws": draws and draws._replace(**{n: getattr(draws, n)[which] for n in Draws._fields[:4]})}


def assert_identical(ours: RowStats, expected: RowStats, which: torch.Tensor | slice = slice(None)) -> None:
    for values, of_all in zip(ours, expected, strict=True):
        if values is not None:
            assert of_all is not None
            assert torch.equal(values, of_all[which])


@pytest.mark.parametrize(
    ("rows", "temperature"), [(25, "greedy"), (25, "sampled"), pytest.param(500, "mixed", marks=pytest.mark.slow)]
)
def test_the_number_of_rows_changes_no_bit_of_a_row(
    interpreted: Callable[..., RowStats], part: int, rows: int, temperature: str
) -> None:
    logits = random_logits(rows, part + 3, torch.bfloat16)
    arguments = arguments_of(TEMPERATURES[temperature].repeat(rows // 5))
    together = interpreted(logits, **arguments)
    for which in (torch.tensor([0]), torch.tensor([rows - 1]), torch.arange(8), torch.tensor([rows - 3, 11, 4])):
        assert_identical(interpreted(logits[which], **rows_of(arguments, which)), together, which)


def test_what_other_rows_ask_for_changes_no_bit_of_a_row(interpreted: Callable[..., RowStats], part: int) -> None:
    logits = random_logits(5, 2 * part + 3, torch.bfloat16)
    arguments = arguments_of(TEMPERATURES["mixed"])
    everything = interpreted(logits, **arguments)
    for options in ({"with_entropy": False}, {"with_margin": False}, {"with_entropy": False, "with_margin": False}):
        assert_identical(interpreted(logits, **(arguments | options)), everything)
    greedy = torch.tensor([0, 2])
    alone = interpreted(logits[greedy], **arguments_of(torch.zeros(2)))
    assert_identical(alone, everything, greedy)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_number_of_rows_changes_no_bit_of_a_row_on_a_gpu() -> None:
    for vocab, dtype in ((151936, torch.bfloat16), (50257, torch.bfloat16), (50257, torch.float32)):
        logits = random_logits(500, vocab, dtype).cuda()
        for t in TEMPERATURES.values():
            arguments = arguments_of(t.repeat(100))
            if arguments["draws"] is not None:
                arguments["draws"] = Draws(*(values.cuda() for values in arguments["draws"][:4]))
            together = row_stats(logits, **arguments)
            for which in (torch.tensor([0]), torch.arange(8), torch.tensor([471, 3, 250, 98, 7])):
                which = which.cuda()
                assert_identical(row_stats(logits[which], **rows_of(arguments, which)), together, which)
            for options in ({"with_entropy": False}, {"with_margin": False}):
                assert_identical(row_stats(logits, **(arguments | options)), together)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5003, 151936])
def test_the_compiled_kernel_agrees_with_the_torch_function_on_a_gpu(vocab: int, dtype: torch.dtype) -> None:
    logits = random_logits(300, vocab, dtype)
    for t in TEMPERATURES.values():
        arguments = arguments_of(t.repeat(60))
        draws = arguments["draws"] and Draws(*(values.cuda() for values in arguments["draws"][:4]))
        ours = row_stats(logits.cuda(), **(arguments | {"draws": draws}))
        expected = row_stats_torch(logits, **arguments)
        # The logarithms of the two devices differ in their last bits, so draws may differ in rare near-ties.
        agree = ours.token.cpu() == expected.token
        assert agree.float().mean() > 0.99
        torch.testing.assert_close(ours.confidence.cpu()[agree], expected.confidence[agree], rtol=1e-4, atol=1e-30)
        torch.testing.assert_close(ours.entropy.cpu(), expected.entropy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.margin.cpu(), expected.margin, rtol=1e-4, atol=1e-6)
