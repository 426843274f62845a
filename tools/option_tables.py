#!/usr/bin/env python3
"""Write the tables of options, policies and verifiers into docs/options.md.

    python tools/option_tables.py

The tables follow `vllm_dllm.options.schema` (names, values, and what stands below an option as its text) and
`vllm_dllm.methods` (policies, verifiers, defaults). A test fails when the page is out of date.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from record import ROOT, replace_marked

from vllm_dllm.methods import POLICIES, SCHEDULES, VERIFIERS, PolicyRow, VerifierRow
from vllm_dllm.options.resolve import DEFAULT_POLICY
from vllm_dllm.options.resolved import OPTION_DEFAULTS
from vllm_dllm.options.schema import LEAST_ALG_TEMP, REQUEST_PREFIX, DecodingOptions, DllmConfig

PAGE = ROOT / "docs" / "options.md"

LINKS = {
    "policy": "[policies](#policies)",
    "cfg_scale": "[guidance](guidance.md)",
    "verify": "[step-skipping](step-skipping.md)",
    "window": "[FeF-DLLM](fef.md), [S2D2](s2d2.md)",
    "route": "[S2D2](s2d2.md#when-to-verify)",
    "estimator": "[S2D2](s2d2.md#when-to-verify)",
    "causal_cache": "[S2D2](s2d2.md)",
    "causal_drafts": "[S2D2](s2d2.md#causal-drafts)",
    "resample_steps": "[FeF-DLLM](fef.md)",
    "remask": "[FeF-DLLM](fef.md)",
    "max_drafts": "[what drafts cost](step-skipping.md#what-it-costs)",
    "draft_graph": "[draft graphs](draft-graphs.md)",
    "eager": "[short blocks](step-skipping.md#short-blocks-eager), [multi-block decoding](multi-block.md)",
    "block_add_threshold": "[multi-block decoding](multi-block.md)",
    "decoded_token_threshold": "[multi-block decoding](multi-block.md)",
    "cache": "[caches](full-attention.md#caches)",
    "guidance": "[guidance](guidance.md)",
    "compile_steps": "[compiled steps](gpu.md#compiled-steps)",
}
"""Where more is said about an option."""

VALUES = {
    "draft_adapter": "boolean, a path, or a name on the hub",
    "alg_temp": f"0, or {LEAST_ALG_TEMP:.0e} to 1e6".replace("e-0", "e-"),
    "sub_block_length": "divisor of `block_length`",
    "generation_window": "multiple of `block_length`",
    "block_add_threshold": "1e-6 to 1",
    "draft_graph": "file of `vllm-dllm calibrate`, or the name of the model's family",
}
"""Values that a type does not say."""

LARGEST_INT = 2**31 - 1
"""A bound that is the worker's, and no user's."""
PLAIN = {1e6: "1e6", -1e6: "-1e6"}
"""Numbers that are not written in full."""

DEFAULTS = {"policy": f"`{DEFAULT_POLICY}`", "verify": "`none`", "match": "`exact`", "tokens_per_step": "1"}
"""Defaults that are in no table of `vllm_dllm.methods`."""


def texts_of(model: type) -> dict[str, str]:
    """What stands below each option of a class, as Markdown."""
    (tree,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        option.target.id: re.sub(r"``", "`", inspect.cleandoc(text.value.value).replace("\n", " "))
        for option, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(option, ast.AnnAssign) and isinstance(option.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def values_of(name: str, model: type[DecodingOptions]) -> str:
    """What an option may be, from its JSON schema."""
    schema = model.model_json_schema()["properties"][name]
    return VALUES.get(name) or ", ".join(_alternatives(schema))


def _alternatives(schema: dict[str, Any]) -> Iterator[str]:
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _alternatives(each)
    elif "enum" in schema or "const" in schema:
        yield from (f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    elif schema["type"] == "boolean":
        yield "boolean"
    elif schema["type"] != "null":
        above = schema.get("exclusiveMinimum")
        least = _plain(schema["minimum"]) if above is None else f"above {_plain(above)},"
        most = schema.get("maximum", LARGEST_INT)
        yield f"integer >= {least}" if most == LARGEST_INT else f"{least} to {_plain(most)}"


def _plain(number: float) -> str:
    return PLAIN.get(number, f"{number:g}")


def default_of(name: str) -> str:
    """The default of an option of a request, with those of single policies and verifiers."""
    if name in DEFAULTS:
        return DEFAULTS[name]
    if name == "drafts":
        return ", ".join(f"`{row.name}` {row.default_drafts}" for row in VERIFIERS if name in row.options)
    special = [f"`{row.name}` {row.defaults[name]:g}" for row in POLICIES if name in row.defaults]
    if name not in OPTION_DEFAULTS:
        return ", ".join(["the family's" if special else "none", *special])
    value = OPTION_DEFAULTS[name]
    if isinstance(value, str):
        return f"`{value}`"
    return ", ".join([("on" if value else "off") if isinstance(value, bool) else f"{value:g}", *special])


def option_table(model: type[DecodingOptions], prefix: str, names: Iterable[str]) -> str:
    """A row for each of the options ``names`` of a class."""
    texts = {**texts_of(DecodingOptions), **texts_of(model)}
    rows = []
    for name in names:
        meaning, _, default = texts[name].partition(" Default: ")
        meaning = meaning.rstrip(".") + (f" ({LINKS[name]})" if name in LINKS else "")
        default = default.rstrip(".") or default_of(name)
        rows.append([f"`{prefix}{name}`", values_of(name, model), default, meaning])
    return table(["option", "values", "default", "meaning"], rows)


def policy_table() -> str:
    return table(
        ["policy", "unmasks in a step", "of", "reads"],
        [[f"`{row.name}`", row.unmasks, row.paper, _read_by(row)] for row in POLICIES],
    )


def _read_by(row: PolicyRow) -> str:
    """Options of a policy, the three schedules as one."""
    names = [f"`{name}`" for name in row.options if name not in SCHEDULES]
    return ", ".join([*names, *(["schedule"] if {*SCHEDULES} <= {*row.options} else [])])


def _drafts_of(row: VerifierRow) -> str:
    if row.name == "s2d2":
        return "a run of masks"
    if row.name == "isd":
        return "as many as a forward has masks"
    return "the rest of a block" if row.is_autoregressive else str(row.default_drafts)


def verifier_table() -> str:
    return table(
        ["verifier", "paper", "drafts by default", "reads"],
        [
            [f"`{row.name}`", row.paper, _drafts_of(row), ", ".join(f"`{name}`" for name in row.options)]
            for row in VERIFIERS
            if row.paper
        ],
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, *rows)).replace(
        "\n", f"\n{'|---' * len(head)}|\n", 1
    )


def up_to_date(page: str) -> str:
    """A page with the tables as they should be now."""
    engine = [name for name in DllmConfig.model_fields if name not in DecodingOptions.model_fields]
    for name, text in {
        "engine options": option_table(DllmConfig, "", engine),
        "request options": option_table(DecodingOptions, REQUEST_PREFIX, DecodingOptions.model_fields),
        "policies": policy_table(),
        "verifiers": verifier_table(),
    }.items():
        page = replace_marked(page, text, f"tools/option_tables.py: {name}")
    return page


if __name__ == "__main__":
    PAGE.write_text(up_to_date(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
