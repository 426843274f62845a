"""Records of an engine's denoising steps, and draft graphs calibrated from them, for the benchmarks of drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from answers import answer
from systems import Request
from workload import Workload

from vllm_dllm.commands.calibrate import Recording
from vllm_dllm.decoding.calibration import Step, candidates, select, trajectory
from vllm_dllm.decoding.draft_graph import DraftGraph
from vllm_dllm.observe.recorder import recording

if TYPE_CHECKING:
    from vllm import LLM

CALIBRATION_PROMPTS = 200
"""The paper takes 50, whose answers are four times as long."""
NODES = 10
LOOKAHEAD = 5


def ask(workload: Workload, questions: Sequence[str]) -> Workload:
    """The workload's model with other questions, whose answers nobody grades."""
    assert workload.tokenizer is not None
    prompts = [
        workload.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    max_tokens = workload.requests[0].max_tokens
    return Workload(
        model=workload.model,
        checkpoint=workload.checkpoint,
        block_length=workload.block_length,
        mask_token_id=workload.mask_token_id,
        stop_token_ids=workload.stop_token_ids,
        requests=[Request(prompt, max_tokens) for prompt in prompts],
    )


def record_steps(llm: "LLM", workload: Workload, policy: dict[str, Any]) -> list[list[Step]]:
    """The steps of every block that the policy decodes greedily and without drafts."""
    recorded = Recording(workload.mask_token_id, left_to_right=False, sub_block_length=None)
    with recording(llm, recorded):
        answer(llm, workload, policy)
    return recorded.blocks


def calibrate(blocks: Sequence[Sequence[Step]], path: Path) -> DraftGraph:
    """Spiffy's algorithms 2 and 3 on recorded blocks; the graph is written to ``path``."""
    found = candidates([trajectory(block, LOOKAHEAD) for block in blocks])
    selected = select(found, NODES)
    graph = DraftGraph(nodes=tuple(each.node for each in selected), counts=tuple(each.count for each in selected))
    graph.save(path)
    return graph
