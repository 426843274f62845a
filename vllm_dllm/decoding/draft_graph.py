"""Draft graphs (Spiffy, arXiv 2509.18085, section 4.4): which later states of a block are worth drafting.

A node stands for one draft: what to fill into the block as it stands, told by ranks. (i, j) is the j-th best token of
the i-th most confident masked position, both from 1, both by the logits that the block as it stands came from. An edge
leads from every node to its proper supersets, so a draft may be reached by several paths.
"""

import functools
import hashlib
import json
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

MOST_NODES = 64
MOST_POSITIONS = 64
MOST_VOCAB_RANK = 8

PositionRank = Annotated[int, Field(ge=1, le=MOST_POSITIONS, strict=True)]
VocabRank = Annotated[int, Field(ge=1, le=MOST_VOCAB_RANK, strict=True)]
Node: TypeAlias = frozenset[tuple[int, int]]
"""Pairs (position rank, vocab rank), one per position."""


class DraftGraph(BaseModel):
    """A draft graph and where it comes from. Its JSON form is described in ``docs/draft-graphs.md``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    """Of the file format."""
    nodes: Annotated[tuple[frozenset[tuple[PositionRank, VocabRank]], ...], Field(min_length=1, max_length=MOST_NODES)]
    counts: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """How often each node was a state of the block in the calibration; ``None``: not calibrated."""
    model: str | None = None
    """Name of the model it was calibrated on; ``None``: fits any model of the family."""
    fingerprint: str | None = None
    """``fingerprint`` of that model's configuration."""
    family: str | None = None
    """``FamilyTraits.family``; ``None``: fits any family."""
    block_length: Annotated[int, Field(ge=1)] | None = None
    """Block length it was calibrated with; ``None``: fits any."""
    policy: dict[str, str | int | float] | None = None
    """Request options that it was calibrated with: ``policy`` and its numbers."""
    data: str | None = None
    """What it was calibrated on."""
    prompts: Annotated[int, Field(ge=1)] | None = None
    """Prompts in that data."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Denoising steps in the calibration from which drafts could have been made."""
    lookahead: Annotated[int, Field(ge=1)] | None = None
    """Steps that the calibration looked ahead from each."""
    note: str | None = None
    """For the reader."""

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        for number, node in enumerate(nodes, 1):
            if not node:
                raise ValueError(f"node {number} is empty: it would draft the block as it stands")
            if len({position for position, _ in node}) < len(node):
                raise ValueError(f"node {number}, {format_node(node)}, gives a position two tokens")
            if node in nodes[: number - 1]:
                raise ValueError(f"node {number}, {format_node(node)}, is the same as node {nodes.index(node) + 1}")
        return nodes

    @model_validator(mode="after")
    def _check_counts(self) -> "DraftGraph":
        if self.counts is not None and len(self.counts) != len(self.nodes):
            raise ValueError(f"{len(self.counts)} counts do not fit {len(self.nodes)} nodes")
        return self

    @field_serializer("nodes")
    def _sort_nodes(self, nodes: tuple[Node, ...]) -> list[list[tuple[int, int]]]:
        return [sorted(node) for node in nodes]

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "DraftGraph":
        """Read a graph from its JSON file; ``ValueError`` says what is wrong with the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"draft graph {path}: cannot be read: {error}") from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"draft graph {path}: {_first_error(error)}") from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the graph as JSON, a line per field and per node."""
        fields = self.model_dump(mode="json")
        lines = {name: json.dumps(value, ensure_ascii=False) for name, value in fields.items()}
        lines["nodes"] = "[\n    " + ",\n    ".join(json.dumps(node) for node in fields["nodes"]) + "\n  ]"
        text = ",\n".join(f"  {json.dumps(name)}: {value}" for name, value in lines.items())
        Path(path).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")

    def membership(self, device: torch.device | str | None = None) -> torch.Tensor:
        """[nodes, ranks] int64: vocab rank that node n gives to position rank i + 1; 0 where it leaves it masked."""
        num_ranks = max(position for node in self.nodes for position, _ in node)
        rows = [[dict(node).get(rank, 0) for rank in range(1, num_ranks + 1)] for node in self.nodes]
        return torch.tensor(rows, dtype=torch.int64, device=device)

    def child_matrix(self, device: torch.device | str | None = None) -> torch.Tensor:
        """[nodes, nodes] bool: whether node q is a child of node p, at [p, q]."""
        return torch.tensor([[p < q for q in self.nodes] for p in self.nodes], dtype=torch.bool, device=device)


def format_node(node: Node) -> str:
    """``(1,1) (2,1)``."""
    return " ".join(f"({position},{vocab})" for position, vocab in sorted(node))


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else part for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}; allowed: {', '.join(DraftGraph.model_fields)}"
    reason = str(first["msg"]).removeprefix("Value error, ")
    if where and isinstance(first["input"], (bool, int, float, str)):
        where = f"{where}={first['input']!r}"
    return f"{where}: {reason}" if where else reason


_FACTS = (
    "model_type",
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "vocab_size",
    "mask_token_id",
)
"""What a configuration says of the network itself. Not the block length, which a graph names of its own."""


def fingerprint(hf_config: Any) -> str:
    """Name of a model's architecture: 64 hexadecimal digits, the same wherever the checkpoint lies.

    Fine-tunes of one model share it, as they may share a graph.
    """
    facts = {name: getattr(hf_config, name, None) for name in _FACTS}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


_SHIPPED = Path(__file__).parents[1] / "graphs" / "sdar.json"
_SHIPPED_FOR = (
    "SDAR",
    "LLaDA2",
    "Fast-dLLM v2",
    "LLaDA",
    "LLaDA-MoE",
    "Dream",
    "Open-dCoder",
    "openPangu",
    "Nemotron-Labs-Diffusion",
)
"""Model families (``FamilyTraits.family``) that draft by the graph in ``_SHIPPED``, which names the family that it was
calibrated on."""


@functools.cache
def default_graph(family: str) -> DraftGraph:
    """The graph that ships for a model family. It names no model and no block length, and fits all of the family.

    A family without a calibration gets the nodes of another family's graph, without the facts of that calibration.

    Raises:
        ValueError: none ships for this family.
    """
    if family not in _SHIPPED_FOR:
        raise ValueError(f"no draft graph ships for {family!r}; there are some for {', '.join(_SHIPPED_FOR)}")
    graph = DraftGraph.load(_SHIPPED)
    if graph.family == family:
        return graph
    note = f"Not calibrated on this family: the nodes are those of the graph for {graph.family}."
    return DraftGraph(nodes=graph.nodes, family=family, note=note)


def load_graph(path_or_family: str, *, family: str, block_length: int, fingerprint: str) -> DraftGraph:
    """The graph of a file, or the one that ships for a family, if it fits the model with the other arguments.

    Raises:
        ValueError: the graph cannot be read, or was calibrated for another model or block length.
    """
    graph = default_graph(path_or_family) if path_or_family in _SHIPPED_FOR else DraftGraph.load(path_or_family)
    for what, of_graph, of_model in (
        ("family", graph.family, family),
        ("block length", graph.block_length, block_length),
        ("architecture", graph.fingerprint, fingerprint),
    ):
        if of_graph is not None and of_graph != of_model:
            name = "" if graph.model is None else f" (it was made for {graph.model})"
            raise ValueError(
                f"draft graph {path_or_family} is for {what} {of_graph}{name}, and this model has {what} {of_model}; "
                "calibrate one for it with `vllm-dllm calibrate`"
            )
    return graph
