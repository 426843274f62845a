"""Who serves an architecture: this plugin, or another one."""

MODELS = "vllm_dllm.models.families"
"""Module of the model classes."""


def other_server(architecture: str) -> str | None:
    """Who else has registered a model class of an architecture of ours, and how to choose; ``None``: nobody has."""
    from vllm import ModelRegistry

    model = ModelRegistry.models.get(architecture)
    if model is None:
        return None
    # vLLM keeps a name, to import later, or the class.
    module = getattr(model, "module_name", None) or model.model_cls.__module__
    if module == MODELS:
        return None
    return (
        f"{architecture} has a model class of {module}, and not vllm-dllm's; VLLM_PLUGINS=vllm_dllm loads vllm-dllm "
        "alone (names of several plugins are separated by commas)"
    )
