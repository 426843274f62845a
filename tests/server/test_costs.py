"""What a request cost: in its response, and in the server's Prometheus metrics."""

from pathlib import Path
from typing import Any

import openai
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.harness import engine
from vllm_dllm import request_stats
from vllm_dllm.observe.metrics import SCRATCH_PAGES
from vllm_dllm.observe.stats import response_stats
from vllm_dllm.observe.wires import SCRATCH_PAGES_USED

from .ask import CODE, QUESTION, TOKENS, chat, completion
from .server import MAX_DRAFTS, MAX_MODEL_LEN, MAX_NUM_SEQS, Server

pytestmark = pytest.mark.slow

OPTIONS: tuple[dict[str, Any], ...] = (
    {"dllm_policy": "threshold", "dllm_threshold": 0.3},
    {"dllm_policy": "static", "dllm_tokens_per_step": 2},
    {"dllm_policy": "entropy", "dllm_entropy_bound": 3.0},
    {"dllm_policy": "static", "dllm_verify": "freedave"},
    {"dllm_policy": "threshold", "dllm_threshold": 0.3, "dllm_verify": "spiffy", "dllm_step_map": True},
)

LONG = 400
"""Tokens of an answer that is still going on when its client has read the beginning."""


def test_a_response_tells_its_forwards_and_the_tokens_it_returned(client: openai.OpenAI, block_length: int) -> None:
    for options in OPTIONS:
        reply = client.completions.create(**completion(CODE, **options))
        stats = response_stats(reply.metrics)
        assert stats.committed_tokens == TOKENS
        assert 0 < stats.nfe < TOKENS + block_length
        assert stats.denoising_steps == stats.nfe


def test_one_token_per_step_costs_a_forward_per_token(client: openai.OpenAI) -> None:
    reply = client.completions.create(**completion([20] * 8, dllm_policy="static"))
    assert response_stats(reply.metrics).nfe == TOKENS


def test_a_stop_token_ends_the_count_of_tokens_too(client: openai.OpenAI) -> None:
    whole = client.completions.create(**completion(CODE)).choices[0].token_ids
    for stop_token in dict.fromkeys(whole[:4]):
        reply = client.completions.create(**completion(CODE, body={"stop_token_ids": [stop_token]}))
        assert reply.usage is not None
        assert response_stats(reply.metrics).committed_tokens == reply.usage.completion_tokens


def test_a_response_of_a_request_with_a_stop_string_tells_its_cost_as_well(client: openai.OpenAI) -> None:
    whole = client.completions.create(**completion(CODE)).choices[0].text
    reply = client.completions.create(**completion(CODE, stop=[whole[10:13]]))
    assert reply.choices[0].finish_reason == "stop"
    assert 0 < response_stats(reply.metrics).nfe < TOKENS


def test_denoising_ends_at_a_stop_token_unless_the_block_is_wanted_whole(
    client: openai.OpenAI, config: dict[str, Any]
) -> None:
    end = config["eos_token_id"]
    costs = {}
    for early in (0, 1):
        reply = client.completions.create(
            **completion(
                [20] * 8,
                logit_bias={str(end): 100},
                body={"ignore_eos": False},
                dllm_policy="sequential",
                dllm_eos_early_stop=early,
            )
        )
        assert reply.choices[0].token_ids == [end]
        costs[early] = response_stats(reply.metrics).nfe
    assert costs[1] == 1 < costs[0]


def test_a_response_tells_its_drafts_and_the_forwards_they_saved(client: openai.OpenAI) -> None:
    plain = client.completions.create(**completion([20] * 8, dllm_policy="static"))
    drafted = client.completions.create(**completion([20] * 8, dllm_policy="static", dllm_verify="freedave"))
    assert drafted.choices[0].token_ids == plain.choices[0].token_ids
    before, after = response_stats(plain.metrics), response_stats(drafted.metrics)
    assert (before.drafted, before.accepted, before.acceptance_histogram) == (0, 0, ())
    histogram = plain.metrics["speculative_decoding"]["acceptance_histogram"]
    assert histogram[-1] > 0  # no entries for what no forward did
    assert after.nfe == before.nfe - after.accepted
    assert 0 < after.accepted <= after.drafted
    assert sum(depth * forwards for depth, forwards in enumerate(after.acceptance_histogram)) == after.accepted


def test_the_last_chunk_of_a_stream_tells_what_the_whole_response_tells(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**chat(QUESTION, **OPTIONS[-1]))
    streamed = chat(QUESTION, **OPTIONS[-1], stream=True, stream_options={"include_usage": True})
    *_, last = client.chat.completions.create(**streamed)
    assert response_stats(last.metrics) == response_stats(reply.metrics)


def test_the_cost_of_several_choices_is_not_told(client: openai.OpenAI) -> None:
    reply = client.completions.create(**completion(CODE, n=2, temperature=1.0))
    with pytest.raises(ValueError, match="n=1"):
        response_stats(reply.metrics)


@pytest.mark.parametrize("options", OPTIONS)
def test_server_and_offline_engine_give_the_same_tokens_at_the_same_cost(
    client: openai.OpenAI, checkpoint: Path, options: dict[str, Any]
) -> None:
    reply = client.completions.create(**completion(CODE, **options))
    llm = engine(
        checkpoint, dllm={"max_drafts": MAX_DRAFTS}, max_model_len=MAX_MODEL_LEN, hf_overrides={}, max_num_seqs=8
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        extra_args=options,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = {"prompt_token_ids": reply.choices[0].prompt_token_ids}
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == reply.choices[0].token_ids
    assert request_stats(output) == response_stats(reply.metrics)
    assert (request_stats(output).step_map is not None) == options.get("dllm_step_map", False)


def test_prometheus_counts_what_the_responses_tell(server: Server, client: openai.OpenAI, block_length: int) -> None:
    names = ("forwards", "denoising_steps", "committed_tokens", "drafted_branches", "accepted_steps")
    ours = {name: f"vllm_dllm:{name}_total" for name in names}
    theirs = {name: f"vllm:diffusion_num_{name}_total" for name in ("denoising_steps", "committed_tokens")}
    requests, depths = "vllm_dllm:tokens_per_forward_count", "vllm_dllm:acceptance_depth_count"
    server.wait_for_metric("vllm:num_requests_running", 0)
    before = {name: server.metric(name) for name in (*ours.values(), *theirs.values(), requests, depths)}
    replies = [client.completions.create(**completion(CODE, **options)) for options in OPTIONS]
    stats = [response_stats(reply.metrics) for reply in replies]

    def expect(name: str, increase: int) -> None:
        server.wait_for_metric(name, before[name] + increase)

    expect(requests, len(replies))
    expect(ours["forwards"], sum(each.nfe for each in stats))
    expect(ours["denoising_steps"], sum(each.denoising_steps for each in stats))
    expect(ours["committed_tokens"], len(replies) * TOKENS)
    expect(ours["drafted_branches"], sum(each.drafted for each in stats))
    expect(ours["accepted_steps"], sum(each.accepted for each in stats))
    expect(depths, sum(sum(each.acceptance_histogram) for each in stats))
    # vLLM's counter has a step more for each block's worth of tokens, which `vllm bench serve` subtracts.
    steps, tokens = (server.metric(name) - before[name] for name in theirs.values())
    assert steps - tokens / block_length == pytest.approx(sum(each.denoising_steps for each in stats), abs=1)
    # vLLM counts what the scheduler commits, including the end of the last block that max_tokens cuts off.
    committed = theirs["committed_tokens"]
    assert server.metric(committed) - before[committed] >= len(replies) * TOKENS


def test_prometheus_counts_the_rows_of_every_step(server: Server, client: openai.OpenAI, block_length: int) -> None:
    names = ("vllm_dllm:rows_per_step_count", "vllm_dllm:rows_per_step_sum")
    server.wait_for_metric("vllm:num_requests_running", 0)
    before = [server.metric(name) for name in names]
    prompt = [20] * (2 * block_length)
    stats = [response_stats(client.completions.create(**completion(prompt, **options)).metrics) for options in OPTIONS]
    # Alone, a request has a step of its own for each forward, and one for its prompt, which may have been remembered.
    expected = before[0] + sum(each.nfe for each in stats) + len(stats)
    server.wait_for_metric(names[0], expected)
    rows = server.metric(names[1]) - before[1]
    least = len(stats) + sum(each.denoising_steps + each.drafted for each in stats) * block_length
    assert least <= rows <= least + len(stats) * len(prompt) + sum(each.nfe for each in stats) * block_length


def test_scratch_pages_are_in_use_while_drafts_are_and_free_after_clients_left(
    server: Server, client: openai.OpenAI
) -> None:
    server.wait_for_metric("vllm:num_requests_running", 0)
    assert server.metric(SCRATCH_PAGES) == MAX_NUM_SEQS * MAX_DRAFTS
    server.wait_for_metric(SCRATCH_PAGES_USED, 0)
    generated = server.metric("vllm:generation_tokens_total")
    request = completion(CODE, max_tokens=LONG, stream=True, dllm_policy="static", dllm_verify="freedave")
    streams = [client.completions.create(**request) for _ in range(MAX_NUM_SEQS)]
    # Not a scrape more than it takes, or the texts would end before the clients leave.
    used = next(filter(None, (server.metric(SCRATCH_PAGES_USED) for _ in streams[0])))
    assert 0 < used <= len(streams) * MAX_DRAFTS
    for stream in streams:
        stream.close()
    for gauge in (SCRATCH_PAGES_USED, "vllm:kv_cache_usage_perc", "vllm:num_requests_running"):
        server.wait_for_metric(gauge, 0)
    assert server.metric("vllm:generation_tokens_total") - generated < len(streams) * LONG
