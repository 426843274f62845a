"""Which of vLLM's ways to move K/V work for diffusion models: offloading by OffloadingConnector, of finished blocks."""

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_dllm.models.configs import BlockDiffusionConfig

CONNECTOR = "OffloadingConnector"
"""The connector that ``vllm_dllm.runtime.scheduling.offloading`` knows."""

STORE, STORE_WITH_TIERS = "CPUOffloadingSpec", "TieringOffloadingSpec"
"""What the connector stores pages in: host memory, its default, or host memory with tiers of files behind it."""


def transfers_that_do_not_work(vllm_config: VllmConfig) -> dict[str, bool]:
    """What of KV transfer and offloading does not work, with its option, and whether the configuration asks for it."""
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    config: BlockDiffusionConfig = vllm_config.model_config.hf_config
    # vLLM names the connector of --kv-offloading-size later.
    offloads = cache.kv_offloading_size is not None
    asked = offloads or transfer is not None
    given = None if offloads or transfer is None else transfer.kv_connector
    store = STORE if transfer is None else transfer.kv_connector_extra_config.get("spec_name", STORE)
    return {
        "KV offloading (--kv-offloading-size), since their K/V depends on the whole text,": asked
        and config.traits.sees_whole_text,
        f"kv_connector={given!r} (--kv-transfer-config), only with {CONNECTOR}": transfer is not None
        and not offloads
        and given != CONNECTOR,
        f"kv_offloading_backend={cache.kv_offloading_backend!r} (--kv-offloading-backend), only with native": offloads
        and cache.kv_offloading_backend != "native",
        # Its tiers outlive new weights, and do not know the options by which an engine computes K/V.
        f"spec_name={store!r} (--kv-transfer-config), only with {STORE}": asked and store == STORE_WITH_TIERS,
        "VLLM_USE_SIMPLE_KV_OFFLOAD=1": offloads and envs.VLLM_USE_SIMPLE_KV_OFFLOAD,
        "KV offloading without prefix caching (--no-enable-prefix-caching)": asked and not cache.enable_prefix_caching,
        # The scheduler of each rank must decide alike, and loads end when they end.
        "KV offloading (--kv-offloading-size) with an external launcher": asked
        and vllm_config.parallel_config.distributed_executor_backend == "external_launcher",
        "KV offloading (--kv-offloading-size) on a CPU": asked and current_platform.is_cpu() and store == STORE,
    }
