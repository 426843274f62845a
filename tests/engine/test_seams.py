"""``tools/seams.py``: which functions of vLLM have changed under the plugin."""

import subprocess
import sys
from pathlib import Path

import vllm

from tests.paths import ROOT
from tools import seams

SAMPLE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:rejection_sample"
KERNEL = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:_rejection_kernel"


def test_all_functions_of_vllm_that_the_plugin_changes_were_read() -> None:
    """If this fails for another vLLM: read what moved (``--against``), then remember it (``--reviewed``)."""
    done = subprocess.run([sys.executable, "tools/seams.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"0 of {len(seams.newest_review(seams.installed_version())[1])} functions moved" in done.stdout


def test_a_function_that_a_kernel_calls_is_among_them() -> None:
    _, reviewed = seams.newest_review(seams.installed_version())
    assert {SAMPLE, KERNEL, "vllm.v1.worker.gpu.sample.gumbel:tl_rand32"} <= reviewed.keys()
    assert "vllm.v1.core.sched.scheduler:Scheduler.update_from_output" in reviewed  # overridden
    assert "vllm.engine.arg_utils:EngineArgs.create_speculative_config" in reviewed  # wrapped


def test_a_body_that_changed_is_told_from_comments(tmp_path: Path) -> None:
    def print_of(source: str) -> str:
        target.write_text(source)
        seams.tree_of.cache_clear()
        body = seams.body_of(SAMPLE, tmp_path)
        assert body is not None
        return seams.fingerprint(body)

    module = Path("vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py")
    target = tmp_path / module
    target.parent.mkdir(parents=True)
    source = (Path(vllm.__file__).parents[1] / module).read_text()
    head, name, tail = source.partition("def rejection_sample(")
    changed = tail.replace("num_speculative_steps + 1", "1 + num_speculative_steps")
    assert changed != tail
    assert print_of(head + "# A comment." + "\n" + name + tail) == print_of(source)
    assert print_of(head + name + changed) != print_of(source)


def test_what_is_different_has_a_name() -> None:
    found = seams.changes({"same": "1", "other": "2", "more": "3"}, {"same": "1", "other": "1", "less": "4"})
    assert found == {"other": "changed", "more": "new", "less": "gone"}
