"""The diffs in ``patches/`` make the same changes as the runtime shims, on a copy of the installed vLLM."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from tests import warm
from tests.paths import ROOT
from vllm_dllm.patches import DISABLE, PATCHES
from vllm_dllm.versions import has_legacy_ray_executor

INSTALLED = Path(vllm.__file__).parent
VERSIONS = sorted((ROOT / "patches").glob("0.*"))
"""Folders with the diffs that a later version of vLLM needs in other words."""
DIFFS = sorted((ROOT / "patches").glob("*.diff"))
PATCHED_FILE = re.compile(r"^\+\+\+ b/vllm/(\S+)", re.MULTILINE)


@pytest.fixture(scope="module")
def patched_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a package ``vllm`` that the diffs were applied to."""
    directory = tmp_path_factory.mktemp("overlay")
    diffs = [*map(for_installed_version, DIFFS)]
    changed = {Path(name) for diff in diffs for name in PATCHED_FILE.findall(diff.read_text())}
    copy_or_link(INSTALLED, directory / "vllm", changed)
    for diff in diffs:
        subprocess.run(
            ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-i", diff],
            cwd=directory,
            check=True,
            capture_output=True,
        )
    return directory


def for_installed_version(diff: Path) -> Path:
    """The diff that applies to the installed vLLM."""
    own = diff.parent / vllm.__version__.rpartition(".")[0] / diff.name
    return own if own.exists() else diff


def copy_or_link(source: Path, target: Path, changed: set[Path]) -> None:
    """Copy the ``changed`` files, relative to ``source``, and link the rest, whole folders at a time."""
    target.mkdir()
    for entry in source.iterdir():
        below = {path.relative_to(entry.name) for path in changed if path.parts[0] == entry.name}
        if not below:
            (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            copy_or_link(entry, target / entry.name, below)
        else:
            shutil.copy(entry, target / entry.name)


BEHAVIOUR = ("-q", "--tb=line", "-p", "no:cacheprovider", "tests/engine/patches/test_behaviour.py")
"""Arguments of pytest for the checks of ``test_behaviour.py`` on some vLLM as it is."""
ON_THE_COPY = f"""
import os, sys
import pytest, vllm
from vllm_dllm.patches import apply_all
print(vllm.__file__, apply_all(), flush=True)
os.environ[{DISABLE!r}] = "1"
sys.exit(pytest.main({[*BEHAVIOUR]!r}))
"""


@pytest.fixture(scope="module")
def on_the_copy(patched_copy: Path) -> subprocess.CompletedProcess[str]:
    """What the shims change in the patched vLLM, and the checks on it without them."""
    environment = {**os.environ, DISABLE: "0", "PYTHONPATH": str(patched_copy)}
    command = [sys.executable, "-c", ON_THE_COPY]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_shim_has_its_diff() -> None:
    assert {diff.name for folder in VERSIONS for diff in folder.iterdir()} <= {diff.name for diff in DIFFS}
    assert [diff.name[:3] for diff in DIFFS] == [f"{number:03}" for number in range(1, len(PATCHES) + 1)]


@pytest.mark.parametrize("diff", sorted((ROOT / "patches").rglob("*.diff")), ids=lambda diff: diff.stem)
def test_a_diff_says_why_it_is_needed(diff: Path) -> None:
    reason, _, _ = diff.read_text().partition("diff --git")
    title, _, body = reason.strip().partition("\n\n")
    assert "\n" not in title
    assert len(body) > 100


def test_every_diff_has_the_text_of_its_pull_request_and_tests_that_exist() -> None:
    sections = (ROOT / "patches" / "README.md").read_text().split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == [diff.stem for diff in DIFFS]
    behaviour = (ROOT / "tests" / "engine" / "patches" / "test_behaviour.py").read_text()
    for section in sections:
        assert re.findall(r"^\*\*(.+)\.\*\* ", section, re.MULTILINE) == [
            "Problem",
            "Change",
            "Test",
            "Helps",
            "Belongs to",
        ]
        tests = re.findall(r"`(test_\w+)`", section)
        assert tests
        assert [name for name in tests if f"def {name}(" not in behaviour] == []


@pytest.mark.slow
def test_the_diffs_alone_give_the_behaviour(on_the_copy: subprocess.CompletedProcess[str]) -> None:
    assert on_the_copy.returncode == 0, on_the_copy.stdout


@pytest.mark.slow
def test_stock_vllm_without_shims_lacks_it() -> None:
    result = warm.run(["-m", "pytest", *BEHAVIOUR], env={**os.environ, DISABLE: "1"}, cwd=ROOT, timeout=300)
    for test in (
        "test_a_model_that_honours_a_parameter_gets_it",
        "test_the_model_validates_what_its_sampler_cannot_honour",
        "test_request_metrics_can_be_switched_on_for_a_diffusion_model",
        "test_a_finished_request_hands_its_observations_to_the_loggers",
        "test_the_loggers_a_model_names_are_built_for_it",
        "test_beam_search_of_a_diffusion_model_is_refused[True]",
        "test_beam_search_of_a_diffusion_model_is_refused[False]",
        "test_a_model_takes_over_what_is_asked_of_its_own_method",
        "test_other_models_refuse_a_method_that_vllm_does_not_know",
        "test_a_bare_name_is_short_for_a_method_of_vllm",
        "test_every_api_server_can_start_from_the_same_arguments",
        "test_a_model_may_refuse_a_request_as_a_whole",
        "test_it_sees_what_an_open_max_tokens_comes_to",
        "test_a_model_may_say_what_an_open_max_tokens_comes_to[3-params0-20]",
        "test_a_draft_model_with_its_own_speculator_says_what_it_needs",
        "test_its_vocabulary_may_have_another_width",
        "test_a_draft_model_may_bring_its_own_speculator[True]",
        "test_a_plugin_makes_the_configuration_for_its_method",
        "test_methods_of_plugins_are_among_those_allowed",
        "test_ray_places_workers_on_its_cpus",
        "test_a_worker_on_a_cpu_is_known_by_its_rank",
        "test_a_worker_on_a_cpu_runs_on_the_processors_of_its_rank_on_its_node[bound]",
        "test_names_of_processors_stay_on_their_node",
        "test_ranks_reduce_in_shared_memory_only_where_they_share_it[False]",
        *(["test_the_legacy_ray_executor_is_refused_on_a_cpu"] if has_legacy_ray_executor() else []),
        "test_data_parallelism_by_ray_is_refused_on_a_cpu",
        "test_a_server_ends_with_the_error_of_its_engine[True]",
        "test_constraints_that_are_no_object_are_refused_by_their_type[constraints0-CompletionRequest]",
        "test_constraints_that_are_no_object_are_refused_by_their_type[regex-ChatCompletionRequest]",
        "test_a_default_of_max_num_seqs_is_known_as_one_and_may_be_bounded[None-3-3]",
        "test_an_id_that_cannot_be_encoded_is_refused[request_id]",
        "test_an_id_that_cannot_be_encoded_is_refused[session_id]",
        "test_an_option_of_a_plugin_beside_vllm_xargs_is_refused[CompletionRequest]",
        "test_an_option_of_a_plugin_beside_vllm_xargs_is_refused[AnthropicMessagesRequest]",
        "test_an_option_of_a_plugin_beside_extra_args_is_refused[a request-fields0]",
        "test_an_option_of_a_plugin_beside_extra_args_is_refused[sampling_params-fields3]",
        "test_an_option_of_a_plugin_in_an_object_of_extra_args_is_refused",
        "test_an_option_of_a_plugin_is_refused_by_models_that_do_not_read_it",
        "test_engine_options_of_a_plugin_are_refused_by_models_that_do_not_read_them",
        "test_an_engine_that_was_told_to_end_is_no_error[True]",
        "test_a_refused_stream_is_no_error[True-True]",
        "test_a_refused_stream_is_no_error[False-True]",
        "test_a_refused_message_is_no_error[True]",
        "test_killing_processes_that_got_no_time_to_end_is_no_warning[0]",
        "test_a_model_may_send_events_between_the_chunks_of_a_stream[few]",
        "test_graphs_of_canvases_take_any_mix_of_rows",
        "test_a_step_of_canvases_runs_in_a_graph_beside_the_end_of_a_prompt",
        "test_a_kernel_that_a_start_compiles_is_expected[error]",
        "test_a_stream_is_refused_before_it_begins[outputs]",
    ):
        assert f"::{test}" in result.stdout, result.stdout


@pytest.mark.slow
def test_shims_leave_a_vllm_alone_that_has_the_changes(
    patched_copy: Path, on_the_copy: subprocess.CompletedProcess[str]
) -> None:
    assert on_the_copy.stdout.splitlines()[0] == f"{patched_copy}/vllm/__init__.py ()", on_the_copy.stderr
