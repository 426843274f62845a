"""The tables of ``docs/options.md`` are those that ``tools/option_tables.py`` writes."""

import re
import sys

import pytest

from tests.paths import ROOT
from vllm_dllm.methods import POLICIES, POLICY_NAMES, VERIFIER_NAMES
from vllm_dllm.options.schema import DecodingOptions, DllmConfig

sys.path.insert(0, str(ROOT / "tools"))

import option_tables

PAGE = option_tables.PAGE.read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert option_tables.up_to_date(PAGE) == PAGE, "run: python tools/option_tables.py"


def test_a_page_that_is_out_of_date_is_noticed() -> None:
    old = PAGE.replace("| 0 to 64, `auto` |", "| 0 to 32, `auto` |")
    assert old != PAGE
    assert option_tables.up_to_date(old) == PAGE


def test_every_change_to_vllm_has_a_row() -> None:
    rows = re.findall(r"^\| \[(\d+)\]\(\.\./patches/(\1-\S+\.diff)\)", PAGE, re.MULTILINE)
    assert [name for _, name in rows] == sorted(path.name for path in (ROOT / "patches").glob("*.diff"))


def test_every_option_has_one_row() -> None:
    request = re.findall(r"^\| `dllm_(\w+)` \| ", PAGE, re.MULTILINE)
    assert request == list(DecodingOptions.model_fields)
    engine = re.findall(r"^\| `(\w+)` \| ", PAGE.split("## Engine options")[1].split("\n## ")[0], re.MULTILINE)
    assert engine == [name for name in DllmConfig.model_fields if name not in DecodingOptions.model_fields]


@pytest.mark.parametrize(("option", "names"), [("policy", POLICY_NAMES), ("verify", VERIFIER_NAMES)])
def test_names_are_values_of_their_option(option: str, names: tuple[str, ...]) -> None:
    assert option_tables.values_of(option, DecodingOptions) == ", ".join(f"`{name}`" for name in names)


@pytest.mark.parametrize(
    ("option", "values", "default"),
    [
        ("drafts", "0 to 64, `auto`", "`freedave` 8, `spiffy` 3, `psd` 3"),
        ("remask", "above 0, to 1", "0.5"),
        ("radius", "integer >= 0", "4"),
        ("eos_early_stop", "boolean", "on"),
        ("threshold", "0 to 1", "the family's, `localleap` 0.9, `multi_block` 0.9"),
        ("relaxed_threshold", "0 to 1", "0.75, `hierarchy` 0.4"),
    ],
)
def test_values_and_defaults_are_those_of_the_code(option: str, values: str, default: str) -> None:
    assert option_tables.values_of(option, DecodingOptions) == values
    assert option_tables.default_of(option) == default


def test_every_policy_has_one_row() -> None:
    section = PAGE.split("### Policies")[1].split("\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [row.name for row in POLICIES]
