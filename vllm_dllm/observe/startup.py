"""Log lines about an engine that starts: ``vllm-dllm cache: page_size=32 pages=1024``.

Each line has a subject (engine, decoding, cache, batch, patches) and the subject's facts as ``key=value``;
``docs/metrics.md`` explains the keys. The scheduler writes the lines, because an engine has one scheduler and any
number of workers.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.config import VllmConfig

from vllm_dllm import __version__, patches
from vllm_dllm.geometry import draft_graph_of, geometry_of
from vllm_dllm.methods import BY_KIND, SCHEDULES, VERIFIER_ROWS
from vllm_dllm.observe.vllm_log import module_logger
from vllm_dllm.options.drafter import DrafterOptions
from vllm_dllm.options.resolve import resolve
from vllm_dllm.options.resolved import ResolvedOptions
from vllm_dllm.options.schema import DecodingOptions, DllmConfig
from vllm_dllm.runtime.plan.scratch import scratch_pages_of

logger = module_logger(__name__)

Facts = dict[str, Any]


def log_engine(facts_by_subject: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the lines of an engine: `diffusion_facts` or `drafter_facts`."""
    for subject, facts in facts_by_subject.items():
        logger.info("%s", format_line(subject, facts))


def format_line(subject: str, facts: Mapping[str, Any]) -> str:
    """``vllm-dllm decoding: policy=threshold drafts=3``. Text that is more than a word is quoted as in JSON."""
    return f"vllm-dllm {subject}: " + " ".join(f"{key}={_format(value)}" for key, value in facts.items())


def _format(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    text = ",".join(value) or "none" if isinstance(value, tuple) else str(value)
    return text if text and not any(char.isspace() or char in "\"'\\=" for char in text) else json.dumps(text)


def diffusion_facts(vllm_config: VllmConfig, *, num_pages: int, page_size: int) -> dict[str, Facts]:
    """Facts of a diffusion model's engine by subject, in the order of the lines.

    Args:
        num_pages: of the KV cache, scratch pages among them.
        page_size: in tokens.
    """
    geometry = geometry_of(vllm_config)
    traits, options = geometry.traits, geometry.options
    defaults = resolve(DecodingOptions(), options, traits, geometry.block_length)
    scratch = scratch_pages_of(vllm_config, page_size)
    return {
        "engine": _engine(
            vllm_config,
            family=traits.family,
            attention=traits.attention,
            block_length=geometry.block_length,
            sub_block_length=options.sub_block_length,
        ),
        "decoding": {
            **_policy(options, defaults),
            "verify": defaults.verify,
            "drafts": "auto" if defaults.auto_drafts else defaults.num_drafts,
            "max_drafts": geometry.max_drafts,
            **_draft_graph(vllm_config),
            "eager": options.eager or False,
        },
        "cache": {
            "cache": options.cache if traits.sees_whole_text else "committed",
            "generation_window": options.generation_window,
            "refresh_interval": options.refresh_interval,
            "guidance": geometry.options.has_room_for_guidance,
            "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
            "page_size": page_size,
            "pages": num_pages,
            "scratch_pages": scratch,
            "request_pages": num_pages - scratch - 1,  # vLLM's null page is nobody's
        },
        "batch": _batch(vllm_config, geometry.canvas_length),
        "patches": _patches(),
    }


def drafter_facts(vllm_config: VllmConfig, options: DrafterOptions) -> dict[str, Facts]:
    """Facts of an engine whose autoregressive model has a diffusion drafter (DEER), in the same form."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    draft_model = speculative.draft_model_config
    traits = draft_model.hf_config.traits
    is_split = vllm_config.parallel_config.tensor_parallel_size > 1
    ranks = ("replicated" if speculative.draft_tensor_parallel_size == 1 else "sharded") if is_split else "one"
    return {
        "engine": _engine(vllm_config),
        "drafter": {
            "model": draft_model.model,
            "family": traits.family,
            "architecture": draft_model.architecture,
            "attention": traits.attention,
            "block_length": draft_model.hf_config.block_length if not traits.blocks_from_prompt else None,
            "drafts": speculative.num_speculative_tokens,
            "sampling": speculative.draft_sample_method,
            "temperature_factor": options.draft_temperature_factor,
            "draft_cache": options.draft_cache,
            "adaptive": options.adaptive,
            "draft_length": options.draft_length,
            "max_model_len": draft_model.max_model_len,
            "tokens_not_shared": len(options.missing_ids),
            "ranks": ranks,
        },
        "batch": _batch(
            vllm_config,
            1 + speculative.num_speculative_tokens,
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        ),
        "patches": _patches(),
    }


def _engine(vllm_config: VllmConfig, **of_diffusion_model: Any) -> Facts:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return {
        "version": __version__,
        "vllm": vllm.__version__,
        "model": model.model,
        "architecture": model.architecture,
        **of_diffusion_model,
        # Not the number of data-parallel engines: vLLM keeps it from those of dense models, which are on their own.
        "tensor_parallel": parallel.tensor_parallel_size,
        "data_parallel_index": parallel.data_parallel_index,
    }


def _batch(vllm_config: VllmConfig, rows_per_request: int, **of_drafter: Any) -> Facts:
    scheduler = vllm_config.scheduler_config
    return {
        "rows_per_step": scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        "rows_per_request": rows_per_request,
        "max_requests": scheduler.max_num_seqs,
        "max_model_len": vllm_config.model_config.max_model_len,
        **of_drafter,
        "async_scheduling": bool(scheduler.async_scheduling),
    }


def _policy(options: DllmConfig, defaults: ResolvedOptions) -> Facts:
    """How requests are decoded that ask for nothing else."""
    if not (verifier := VERIFIER_ROWS[defaults.verify]).uses_policy:
        return {name: getattr(defaults, name) for name in verifier.options}
    facts: Facts = {"policy": defaults.policy}
    row = BY_KIND[defaults.kind]
    facts |= {name: getattr(defaults, name) for name in row.options if name not in (*SCHEDULES, "alg_temp")}
    if row.timed:
        facts["num_steps"] = defaults.num_steps
    elif {*SCHEDULES} <= {*row.options}:
        facts |= _schedule(options, defaults)
    if defaults.verify == "s2d2":
        facts |= {"window": defaults.window, "route": defaults.route}
        facts |= {name: bool(getattr(options, name)) for name in ("causal_cache", "causal_drafts")}
    if defaults.alg_temp:
        facts["alg_temp"] = defaults.alg_temp
    if defaults.cfg_scale:
        facts["cfg_scale"] = defaults.cfg_scale
    if not math.isinf(defaults.edit_threshold):
        facts["edit_threshold"] = defaults.edit_threshold
    return facts


def _schedule(options: DllmConfig, defaults: ResolvedOptions) -> Facts:
    for name in ("denoising_steps", "steps"):
        if (given := getattr(options, name)) is not None:
            return {name: given}
    return {"tokens_per_step": defaults.quota}


def _draft_graph(vllm_config: VllmConfig) -> Facts:
    """The graph that ``spiffy`` drafts from, and ``psd`` if the user gave it."""
    graph = draft_graph_of(vllm_config)
    if graph is None:
        return {"draft_graph": None}
    return {
        "draft_graph": geometry_of(vllm_config).options.draft_graph
        or f"shipped, {'' if graph.steps else 'not '}calibrated on {graph.family}",
        "draft_graph_nodes": len(graph.nodes),
        "draft_graph_model": graph.model,
    }


def _patches() -> Facts:
    """Which changes to vLLM this process runs with, and which the installed vLLM has already."""
    if os.environ.get(patches.DISABLE) == "1":
        return {"applied": (), "in_vllm": "not looked for"}
    applied = patches.apply_all()
    return {"applied": applied, "in_vllm": tuple(name for name in patches.PATCHES if name not in applied)}
