"""Tell which functions of vLLM that this plugin replaces, wraps or overrides have changed since somebody read them.

    .venv/bin/python tools/seams.py                      # what moved since the newest version that was reviewed
    .venv/bin/python tools/seams.py --against SITE       # the same, with the differences; SITE has the other `vllm`
    .venv/bin/python tools/seams.py --reviewed           # they were read: remember the installed version's

A signature shows only part of what a function promises, so that what is compared are bodies: of the functions
themselves and of those that they call. ``tools/seams`` holds a fingerprint of each, a file per version.
"""

import argparse
import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import pkgutil
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

REVIEWED = Path(__file__).with_suffix("")
"""Folder with a file of fingerprints for each version."""

DEPTH = 1
"""Calls that are followed; into the functions that kernels call, which belong to the kernel, as deep as it goes."""

CALLERS = (
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.take_draft_token_ids",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
    "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask",
    "vllm.v1.structured_output:StructuredOutputManager._get_constraint_bounds",
    "vllm.v1.structured_output:StructuredOutputManager.accept_tokens",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.postprocess_sampled",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch",
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
    "vllm.v1.worker.gpu.cudagraph_utils:prepare_inputs_to_capture",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
    "vllm.v1.worker.gpu.warmup:warmup_kernels",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler._build_store_jobs",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler._calc_num_offloadable_tokens",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler.build_connector_meta",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler.get_num_new_matched_tokens",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler.update_state_after_alloc",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker:OffloadingConnectorWorker.prepare_store_kv",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker:OffloadingConnectorWorker.handle_preemptions",
    "vllm.v1.engine.core:EngineCore.step",
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
    "vllm.v1.engine.core:EngineCore.post_step",
    "vllm.config.vllm:VllmConfig.use_v2_model_runner",
    "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides",
    "vllm.triton_utils.dispatcher:register_kernels",
    "vllm.model_executor.models.registry:_run_in_subprocess",
    "vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls",
    "vllm.triton_utils.importing:",
)
"""Functions, and one whole module, whose way of calling this plugin, or of being called, the plugin relies on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="SITE", help="folder with the package vllm of another version")
    parser.add_argument("--reviewed", action="store_true", help="remember the installed version's functions as read")
    arguments = parser.parse_args()
    version, bodies = installed_version(), dict(sorted(find_bodies().items()))
    prints = {name: fingerprint(body) for name, body in bodies.items()}
    if arguments.reviewed:
        path = REVIEWED / f"{version}.json"
        path.write_text(json.dumps(prints, indent=0) + "\n")
        print(f"{path}: {len(prints)} functions")
        return
    of_version, reviewed = newest_review(version)
    moved = changes(prints, reviewed)
    for name, what in moved.items():
        print(f"{name}: {what}")
        if arguments.against and name in bodies:
            other = body_of(name, arguments.against)
            old, new = ("" if body is None else ast.unparse(body) for body in (other, bodies[name]))
            print("\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2)))
    print(f"vLLM {version}: {len(moved)} of {len(prints)} functions moved since {of_version}")
    sys.exit(bool(moved))


def installed_version() -> str:
    from vllm.version import __version__

    return __version__.partition("+")[0]


def newest_review(version: str) -> tuple[str, dict[str, str]]:
    """The version that was reviewed and its fingerprints: ``version`` itself, or else the newest."""
    path = REVIEWED / f"{version}.json"
    if not path.exists():
        path = max(REVIEWED.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])
    return path.stem, json.loads(path.read_text())


def changes(prints: dict[str, str], reviewed: dict[str, str]) -> dict[str, str]:
    """What is different, by name: ``changed``, ``new`` or ``gone``."""
    found = {
        name: "new" if name not in reviewed else "changed"
        for name, fingerprint in prints.items()
        if reviewed.get(name) != fingerprint
    }
    return found | dict.fromkeys(sorted(reviewed.keys() - prints.keys()), "gone")


def fingerprint(body: ast.AST) -> str:
    return hashlib.sha256(ast.dump(body).encode()).hexdigest()[:16]


def find_bodies() -> dict[str, ast.AST]:
    """Bodies of vLLM's functions that the plugin depends on, by ``module:qualified name``."""
    found: dict[str, ast.AST] = {}
    to_do = deque((name, DEPTH) for name in (*replaced(), *wrapped(), *overridden(), *CALLERS))
    while to_do:
        name, depth = to_do.popleft()
        if name in found:
            continue
        body = body_of(name)
        if body is None:
            continue
        found[name] = body
        is_device_code = "jit" in {ast.unparse(each).rpartition(".")[2] for each in getattr(body, "decorator_list", ())}
        if depth or is_device_code:
            to_do.extend((callee, 0) for callee in callees(name, body))
    return found


def replaced() -> Iterator[str]:
    """What has a fallback on a CPU."""
    from vllm_dllm.cpu.fallbacks import FALLBACKS

    for symbol in FALLBACKS:
        yield where_defined(name_of_path(f"vllm.v1.worker.gpu.{symbol}"))


def name_of_path(path: str) -> str:
    """``module:qualified name`` of a dotted path."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            if importlib.util.find_spec(module):
                return f"{module}:{'.'.join(parts[length:])}"
        except ModuleNotFoundError:  # a class, where a package was looked for
            continue
    raise LookupError(path)


def where_defined(name: str) -> str:
    """The name in the module that defines the function, where ``name`` is one under which it is imported."""
    module, _, function = name.partition(":")
    for node in ast.walk(tree_of(module) or ast.Module([])):
        if isinstance(node, ast.ImportFrom) and node.module and function in {alias.name for alias in node.names}:
            return f"{node.module}:{function}"
    return name


def wrapped() -> Iterator[str]:
    """What patches change."""
    from vllm_dllm.patches.original import LOOKED_UP

    for owner, attribute in LOOKED_UP:
        if isinstance(owner, ModuleType):
            yield f"{owner.__name__}:{attribute}"
        for base in owner.__mro__ if inspect.isclass(owner) else ():
            if attribute in vars(base):
                yield f"{base.__module__}:{base.__qualname__}.{attribute}"
                break


def overridden() -> Iterator[str]:
    """Methods of vLLM's classes that classes of the plugin have, too."""
    import vllm_dllm

    for module in pkgutil.walk_packages(vllm_dllm.__path__, "vllm_dllm."):
        if module.name.startswith("vllm_dllm.training"):
            continue
        for ours in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(ours) or ours.__module__ != module.name:
                continue
            for base in ours.__mro__[1:]:
                if not base.__module__.startswith("vllm."):
                    continue
                for attribute in vars(ours).keys() & vars(base).keys():
                    original = vars(base)[attribute]
                    if inspect.isfunction(original) or isinstance(original, (property, classmethod, staticmethod)):
                        yield f"{base.__module__}:{base.__qualname__}.{attribute}"


@functools.cache
def tree_of(module: str, site: Path | None = None) -> ast.Module | None:
    if site is not None:
        path = site.joinpath(*module.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return without_docstrings(source.read_text()) if source.exists() else None
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return without_docstrings(Path(spec.origin).read_text())


def without_docstrings(source: str) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
        if getattr(node, "type_params", None) == []:  # Python 3.11 has no such field
            del node.type_params  # type: ignore[attr-defined]
    return tree


def body_of(name: str, site: Path | None = None) -> ast.AST | None:
    """The function (or module) of this name, without docstrings; None: there is none, or not in Python.

    Args:
        site: folder with the packages; None: the installed ones.
    """
    module, _, qualified = name.partition(":")
    node: ast.AST | None = tree_of(module, site)
    for part in filter(None, qualified.split(".")):
        if node is None:
            return None
        node = next(
            (
                each
                for each in ast.walk(node)
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and each.name == part
            ),
            None,
        )
    return node


def callees(name: str, body: ast.AST) -> Iterator[str]:
    """Functions of vLLM that ``body`` calls or launches, as far as their names say which they are."""
    module_name, _, qualified = name.partition(":")
    module = importlib.import_module(module_name)
    owner = getattr(module, qualified.partition(".")[0], None) if "." in qualified else None
    for node in ast.walk(body):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        if isinstance(called, ast.Name):
            yield from definition(vars(module).get(called.id))
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            if called.value.id in ("self", "cls") and inspect.isclass(owner):
                for base in owner.__mro__:
                    if called.attr in vars(base) and base.__module__.startswith("vllm."):
                        yield f"{base.__module__}:{base.__qualname__}.{called.attr}"
                        break
            elif isinstance(found := vars(module).get(called.value.id), ModuleType):
                yield from definition(getattr(found, called.attr, None))


def definition(called: Any) -> Iterator[str]:
    """``module:qualified name`` of a function, kernel or class of vLLM."""
    called = getattr(called, "fn", called)  # of a kernel, which has the function as an attribute
    module, qualified = getattr(called, "__module__", None), getattr(called, "__qualname__", None)
    if not isinstance(module, str) or not module.startswith("vllm.") or not isinstance(qualified, str):
        return
    yield f"{module}:{qualified}.__init__" if inspect.isclass(called) else f"{module}:{qualified}"


if __name__ == "__main__":
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    main()
