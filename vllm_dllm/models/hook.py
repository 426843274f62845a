"""The engine's configuration for block-diffusion models: what vLLM asks of us while it puts its own together.

vLLM calls the hook first thing in ``VllmConfig.__post_init__``, once, in the process that starts the engine;
the other processes get the result. `create_scheduler` catches up on what vLLM decides later than that.
"""

from typing import Any

import vllm.envs as envs
from vllm.config import ModelConfig, VllmConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.config.diffusion import DiffusionConfig
from vllm.config.vllm import OptimizationLevel
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.interface import SchedulerInterface

from vllm_dllm.cpu.threads import bind_ranks
from vllm_dllm.geometry import Geometry, draft_graph_of
from vllm_dllm.methods import SCHEDULES
from vllm_dllm.models.configs import BlockDiffusionConfig
from vllm_dllm.models.draft_adapter import FILES, Source
from vllm_dllm.models.fit import capture_sizes, fit_engine
from vllm_dllm.models.offloading import transfers_that_do_not_work
from vllm_dllm.models.quantization import check_method
from vllm_dllm.models.registry import other_server
from vllm_dllm.observe.vllm_log import OF_DIFFUSION_MODELS, leave_out, module_logger
from vllm_dllm.options.autoregressive import check_engine_options
from vllm_dllm.options.drafter import UNFIT_BACKENDS
from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.schema import ENGINE_KEY, DecodingOptions, DllmConfig, parse_engine_options
from vllm_dllm.traits import FamilyTraits

logger = module_logger(__name__)


class BlockDiffusionModelConfig(VerifyAndUpdateConfig):
    """The hook, for the architectures of all families."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Validate the options, resolve the block length and fit pages, batch and context to it.

        Raises:
            ValueError: something cannot work; the message names the option and its value.
        """
        hf_config = vllm_config.model_config.hf_config
        if vllm_config.model_config.runner_type == "draft":
            # vLLM loads a drafter under the engine's configuration, which is the target's.
            return
        if not isinstance(hf_config, BlockDiffusionConfig):
            raise ValueError(
                f"{vllm_config.model_config.architecture} cannot run on a configuration of "
                f"model_type={hf_config.model_type!r}; set the model_type of its family in config.json"
            )
        hf_config.check_supported_values()
        if other := other_server(vllm_config.model_config.architecture):
            raise ValueError(other)
        _refuse_what_does_not_work_yet(vllm_config, hf_config.traits.family)
        check_method(vllm_config.model_config)
        leave_out(OF_DIFFUSION_MODELS)
        geometry = fit_engine(vllm_config, _resolve(vllm_config, hf_config))
        _publish(vllm_config, geometry)
        if geometry.traits.sees_whole_text:
            _check_default_max_tokens(vllm_config, geometry.traits.family)
        draft_graph_of(vllm_config)  # a wrong one is an error at start
        if current_platform.is_cpu():
            bind_ranks(vllm_config.parallel_config)
        model = vllm_config.model_config
        # vLLM would take a request for more than there are, which ends the engine.
        model.max_logprobs = min(model.max_logprobs, model.get_vocab_size())
        # Keeps backends out that only do causal attention, and puts FlashAttention before FlashInfer.
        vllm_config.attention_config.use_non_causal = True
        compilation = vllm_config.compilation_config
        no_mode_chosen = compilation.cudagraph_mode in (None, CUDAGraphMode.FULL_AND_PIECEWISE)
        if not current_platform.is_cpu() and no_mode_chosen and geometry.traits.sees_whole_text:
            # Attention stays outside of the graphs. Said here, before backends size their buffers for full graphs.
            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        if not current_platform.is_cpu() and not (
            compilation.cudagraph_capture_sizes or compilation.max_cudagraph_capture_size
        ):
            compilation.cudagraph_capture_sizes = capture_sizes(geometry.block_length, geometry.step_rows)
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = f"{__name__}.{create_scheduler.__name__}"
        else:
            _check_scheduler(scheduler.scheduler_cls)


def _check_default_max_tokens(vllm_config: VllmConfig, family: str) -> None:
    """Check the ``max_tokens`` of requests that give none, of a model with full attention, and log it.

    Raises:
        ValueError: it is no number of tokens. A request with it would never end.
    """
    default = vllm_config.model_config.get_diff_sampling_param().get("max_tokens")
    if default is not None and (type(default) is not int or default < 1):
        raise ValueError(
            f"max_new_tokens={default!r} of generation_config.json or of --override-generation-config is not allowed: "
            "requests that give no max_tokens get it; allowed here: a whole number of at least 1"
        )
    logger.info(
        "Requests that give no max_tokens get %s, not the rest of the context: %s models see the masks of the whole "
        "answer. max_new_tokens of generation_config.json or of --override-generation-config sets another default",
        "the rest of the context" if default is None else default,
        family,
    )


def _publish(vllm_config: VllmConfig, geometry: Geometry) -> None:
    """Leave the record where every process finds it, and what vLLM itself reads where vLLM reads it."""
    hf_config, options = vllm_config.model_config.hf_config, geometry.options
    hf_config.geometry = geometry
    hf_config.block_length = geometry.block_length
    vllm_config.additional_config = {**vllm_config.additional_config, ENGINE_KEY: options.model_dump(exclude_none=True)}
    vllm_config.diffusion_config = DiffusionConfig(
        canvas_length=geometry.canvas_length, max_denoising_steps=options.denoising_steps
    )


def create_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> SchedulerInterface:
    """What vLLM finds under ``scheduler_cls`` and calls in the engine's process, like the class it expects.

    Two things can only be settled here, because vLLM goes on with its configuration after the hook. It
    decides on asynchronous scheduling, which the platform may take back. And it refuses metrics per request
    that are on without a ``speculative_config``, though the scheduler, their only reader, has them.
    """
    from vllm_dllm.runtime.engine_process import exit_with_parent
    from vllm_dllm.runtime.scheduling import DllmAsyncScheduler, DllmScheduler
    from vllm_dllm.runtime.scheduling.full import FullAttentionScheduler

    exit_with_parent()
    # vLLM completes its configuration once more in the engine's process.
    leave_out(OF_DIFFUSION_MODELS)
    observability = vllm_config.observability_config
    if observability.per_request_spec_decode_metrics == "none":
        # What a request cost travels to the front end in these metrics.
        observability.per_request_spec_decode_metrics = "summary"
    scheduler = DllmAsyncScheduler if vllm_config.scheduler_config.async_scheduling else DllmScheduler
    if vllm_config.model_config.hf_config.traits.sees_whole_text:
        scheduler = FullAttentionScheduler
    return scheduler(vllm_config=vllm_config, **kwargs)


def _check_scheduler(scheduler_cls: str | type) -> None:
    from vllm_dllm.runtime.scheduling import DllmScheduler

    cls = resolve_obj_by_qualname(scheduler_cls) if isinstance(scheduler_cls, str) else scheduler_cls
    if cls is not create_scheduler and not (isinstance(cls, type) and issubclass(cls, DllmScheduler)):
        raise ValueError(
            f"scheduler_cls={scheduler_cls!r} does not know the rows of a block; derive it from "
            "vllm_dllm.runtime.scheduling.DllmScheduler or DllmAsyncScheduler"
        )


def _refuse_what_does_not_work_yet(vllm_config: VllmConfig, family: str) -> None:
    parallel = vllm_config.parallel_config
    cache, backend = vllm_config.cache_config, vllm_config.attention_config.backend
    model = vllm_config.model_config
    unsupported = transfers_that_do_not_work(vllm_config) | {
        "pipeline parallelism (--pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        "decode context parallelism (--decode-context-parallel-size)": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism (--prefill-context-parallel-size)": parallel.prefill_context_parallel_size > 1,
        "dual batch overlap (--enable-dbo)": parallel.enable_dbo,
        "several batches at a time (--ubatch-size)": parallel.ubatch_size > 1,
        "speculative decoding (--speculative-config)": vllm_config.speculative_config is not None,
        # vLLM's layer for adapters of experts has kernels for GPUs alone, and takes the place of all experts.
        "LoRA adapters (--enable-lora) of a mixture of experts on a CPU": vllm_config.lora_config is not None
        and model.is_moe
        and current_platform.is_cpu(),
        # The front end in Rust admits requests without our checks, and a wrong option would end the engine.
        "vLLM's front end in Rust (VLLM_USE_RUST_FRONTEND=1)": envs.VLLM_USE_RUST_FRONTEND,
        "fast prefill (--kv-sharing-fast-prefill)": cache.kv_sharing_fast_prefill,
        "pooling, for LLM.encode, embed, classify and score (--runner pooling)": model.runner_type != "generate",
        "embeddings for prompts (--enable-prompt-embeds)": model.enable_prompt_embeds,
        # Grammars of these backends cannot go back, and a block is drafted ahead of its grammar.
        "the structured output backends outlines and lm-format-enforcer (--structured-outputs-config)": (
            vllm_config.structured_outputs_config.backend in ("outlines", "lm-format-enforcer")
        ),
        # vLLM has no collective that gathers experts' rows of several engines there.
        "experts and data parallelism (--data-parallel-size) on a CPU": model.is_moe
        and parallel.data_parallel_size > 1
        and current_platform.is_cpu(),
        # vLLM's kernel for experts ends the worker with a segmentation fault.
        "expert parallelism (--enable-expert-parallel) on a CPU": model.is_moe
        and parallel.enable_expert_parallel
        and current_platform.is_cpu(),
        # The worker's integer per request that vLLM counts NaNs in carries something else here.
        "VLLM_COMPUTE_NANS_IN_LOGITS=1 and VLLM_RAISE_ON_LOGIT_NANS=1": envs.VLLM_COMPUTE_NANS_IN_LOGITS
        or envs.VLLM_RAISE_ON_LOGIT_NANS,
        # vLLM takes every row for a token of the text, and a block has many forwards.
        "experts of tokens (--enable-return-routed-experts)": vllm_config.aux_output_config.enabled,
        "noise of 64 bits (--use-fp64-gumbel)": model.use_fp64_gumbel,
        # Every rank plans and samples the whole batch.
        "batch-sharded sampling (--enable-batch-sharded-sampling)": bool(parallel.enable_batch_sharded_sampling),
        f"--attention-backend {' or '.join(UNFIT_BACKENDS)}": backend is not None and backend.name in UNFIT_BACKENDS,
    }
    asked = [feature for feature, is_on in unsupported.items() if is_on]
    if asked:
        raise ValueError(f"{family} models do not work with {', '.join(asked)} in vllm-dllm; leave it out")


def _check_first_tokens(given: dict[str, Any], traits: FamilyTraits) -> None:
    """Refuse options that do not go with where the family has a block's first token from."""
    if traits.commit_predicts and given.get("eager"):
        reason = f"the first token of a block of {traits.family} models is only known once the block before it is"
        if given.get("first_token") == "denoised":
            reason = f"blocks of {traits.family} models see the blocks before them as they are once they are"
        raise ValueError(f"eager=True is not allowed: {reason} committed")
    if "first_token" in given and not traits.may_denoise_first_tokens:
        raise ValueError(
            f"first_token={given['first_token']!r} is not allowed: {traits.family} models have one way to decode the "
            "first token of a block (it is an option of Nemotron-Labs-Diffusion models)"
        )


def _resolve_adapter(model: ModelConfig, options: DllmConfig, traits: FamilyTraits) -> DllmConfig:
    """Settle whether rows that draft have an adapter, by what the checkpoint has and the user gives."""
    given, folder, reason = options.draft_adapter, traits.draft_adapter, None
    if folder is None:
        reason = (
            f"{traits.family} models have no adapter for drafts (Nemotron-Labs-Diffusion and I-DLM models may have)"
        )
    elif options.first_token == "denoised":
        reason = f"the engine's first_token={options.first_token!r} leaves no drafts to adapt; leave it out"
    elif given is True and not folder:
        reason = f"checkpoints of {traits.family} models have no adapter in them; allowed: the path or hub name of one"
    if given and reason is not None:
        raise ValueError(f"draft_adapter={given!r} is not allowed: {reason}")
    if folder is None:
        return options
    if reason is not None or given is False or not (given or folder):
        return options.model_copy(update={"draft_adapter": False})
    source = Source.of(given or True, model, folder)
    missing = source.missing()
    if given and missing:
        raise ValueError(
            f"draft_adapter={given!r} is not allowed: {source.model} has no {' and no '.join(missing)}; leave it out"
        )
    if 0 < len(missing) < len(FILES):
        logger.warning(
            "Drafts of LinearSpec go without the checkpoint's adapter: %s has no %s. Fetch the file, or leave this "
            "message out with the engine option draft_adapter=False",
            model.model,
            missing[0],
        )
    return options.model_copy(update={"draft_adapter": not missing and (given or True)})


def _check_causal_modes(options: DllmConfig, traits: FamilyTraits) -> None:
    """Refuse causal rows that are no part of how the engine decodes."""
    for name in ("causal_cache", "causal_drafts"):
        if getattr(options, name) and options.verify != "s2d2":
            raise ValueError(f"{name}=True goes with verify='s2d2', whose verifier it is for")
    if options.causal_drafts and traits.editing:
        raise ValueError(
            f"causal_drafts=True is not allowed: {traits.family} models edit tokens before the first mask, and are "
            "trained to see the whole block there (it is an option of SDAR and Fast-dLLM v2 models)"
        )
    if options.causal_drafts and options.block_length == 1:
        raise ValueError("causal_drafts=True is not allowed with block_length=1: such a block has one position")


def _resolve(vllm_config: VllmConfig, hf_config: BlockDiffusionConfig) -> DllmConfig:
    """Lay the engine options over vLLM's ``--diffusion-config``, and those over the model's configuration."""
    options = parse_engine_options(vllm_config.additional_config)
    given = options.model_dump(exclude_none=True)
    if (diffusion := vllm_config.diffusion_config) is not None:
        # To the user the canvas is what one denoises, a block; the rows of a step are our business.
        if diffusion.canvas_length is not None:
            given.setdefault("block_length", diffusion.canvas_length)
        if diffusion.max_denoising_steps is not None and given.keys().isdisjoint(SCHEDULES):
            given["denoising_steps"] = diffusion.max_denoising_steps
    if "block_length" not in given:
        given["block_length"] = hf_config.block_length
        guessed, source = hf_config.guessed_block_length or (None, None)
        if guessed == hf_config.block_length:
            logger.info("block_length=%d, from %s: config.json gives none", guessed, source)
    traits = hf_config.traits
    if traits.sub_block_length is not None:
        given.setdefault("sub_block_length", traits.sub_block_length)
    _check_first_tokens(given, traits)
    check_engine_options(given, traits)
    if not traits.sees_whole_text:
        if given["block_length"] != hf_config.block_length:
            # Where blocks see the whole text, their length is a matter of decoding, not of training.
            logger.warning(
                "block_length=%d is not the checkpoint's, which is %d: %s models are trained for one length of blocks, "
                "and may write worse text with another",
                given["block_length"],
                hf_config.block_length,
                traits.family,
            )
        for name in ("cache", "generation_window", "refresh_interval", "guidance"):
            if name in given:
                raise ValueError(
                    f"{name}={given[name]!r} is not allowed: blocks of {traits.family} models do not see what comes "
                    "after them, so K/V stays as it is (it is an option of models with full attention)"
                )
    if given.get("eager") and given.get("sub_block_length"):
        raise ValueError("eager=True and sub_block_length exclude each other; leave one of them out")
    options = parse_engine_options({ENGINE_KEY: given})
    assert options.block_length is not None
    # Wrong defaults are an error at start, not one of every request that sets nothing.
    defaults = resolve(DecodingOptions(), options, traits, options.block_length)
    if options.sub_block_length is not None and options.block_length % options.sub_block_length:
        raise ValueError(
            f"sub_block_length={options.sub_block_length} does not divide block_length={options.block_length}"
        )
    _check_causal_modes(options, traits)
    options = _resolve_adapter(vllm_config.model_config, options, traits)
    if options.compile_steps is None:
        mode = vllm_config.compilation_config.mode
        if mode is None and vllm_config.optimization_level == OptimizationLevel.O0:
            mode = CompilationMode.NONE  # as vLLM decides later
        eager = vllm_config.model_config.enforce_eager or mode == CompilationMode.NONE
        options = options.model_copy(update={"compile_steps": not (eager or current_platform.is_cpu())})
    if options.max_drafts is None:
        # Room for what they ask for.
        options = options.model_copy(update={"max_drafts": defaults.num_drafts})
    return options
