"""Full CUDA graphs for the steps of a diffusion model in which every request decodes
(``patches/021-diffusion-canvas-graphs.diff``).

vLLM captures full graphs for one number of rows per request. What a diffusion model computes of a request varies from
step to step (a block, a block beside a commit, drafts), and a request whose prompt ends within a block counts as a
prefill until that block is done. A model whose state lays attention out by block, whoever the rows are of, says so in
its configuration.
"""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dllm.patches.original import of_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

MARKER = "diffusion_canvas_graphs"

ONLY_CANVASES = "only_canvases"
"""On the manager of graphs: every request of the step decodes."""

_active = False


def apply() -> bool:
    """Let `give_to_runner` make the change; False where vLLM has it.

    The change is not made here, and the module is read and not imported: the front end does without the runner.
    """
    global _active
    spec = find_spec("vllm.v1.worker.gpu.cudagraph_utils")
    _active = spec is None or spec.origin is None or MARKER not in Path(spec.origin).read_text(encoding="utf-8")
    return _active


def give_to_runner() -> None:
    """Change the classes of the runner and of its graphs. A model's state calls this before there are graphs."""
    if not _active:
        return
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager as Manager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Runner

    if hasattr(Manager.__init__, MARKER):
        return
    gather = of_vllm(Runner, "gather_batch_req_state", ("self", "scheduler_output", "dummy_run"))
    initialize = of_vllm(Manager, "__init__", ("self", "vllm_config", "device", "cudagraph_mode", "decode_query_len"))
    dispatch = of_vllm(Manager, "dispatch", ("self", "num_reqs", "num_tokens", "uniform_token_count"))

    @functools.wraps(initialize)
    def initialize_manager(self: Manager, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> None:
        is_asked_for = asks(vllm_config)
        setattr(self, MARKER, is_asked_for)
        kwargs["varlen_decode"] = kwargs.get("varlen_decode", False) or is_asked_for
        initialize(self, vllm_config, *args, **kwargs)

    @functools.wraps(gather)
    def gather_batch_req_state(self: "GPUModelRunner", scheduler_output: "SchedulerOutput", dummy_run: bool) -> Any:
        state, uniform = gather(self, scheduler_output, dummy_run)
        # With data parallelism, ranks agree on a graph by what vLLM says of each rank's batch.
        if getattr(self.cudagraph_manager, MARKER, False) and self.dp_size == 1:
            canvases = None if state is None else state.num_draft_tokens_np
            setattr(self.cudagraph_manager, ONLY_CANVASES, canvases is not None and bool(canvases.all()))
        return state, uniform

    @functools.wraps(dispatch)
    def dispatch_canvases(self: Manager, *args: Any, max_query_len: int | None = None, **kwargs: Any) -> Any:
        if max_query_len is None and getattr(self, ONLY_CANVASES, False):
            max_query_len = self.decode_query_len
        return dispatch(self, *args, max_query_len=max_query_len, **kwargs)

    setattr(initialize_manager, MARKER, True)
    Runner.gather_batch_req_state = gather_batch_req_state
    Manager.__init__ = initialize_manager
    Manager.dispatch = dispatch_canvases


def asks(vllm_config: "VllmConfig") -> bool:
    """Whether the configuration of the model asks for it."""
    return getattr(vllm_config.model_config.hf_config, MARKER, False)
