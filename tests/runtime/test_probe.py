"""How much of the machine a rank may use."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("horovod.tensorflow")
from tf_caramel.runtime import probe


def write(folder, **files):
    """Files of these names, "__" for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [("50000 100000", "max 100000", 0.5), ("max 100000", "300000 100000", 3.0), ("max 100000", "max 100000", math.inf)],
)
def test_the_tightest_quota_from_the_process_s_group_upwards_counts(tmp_path, own, above, cores):
    mounted = tmp_path / "mounted"
    write(mounted / "a", cpu__max=above)
    write(mounted / "a" / "b", cpu__max=own)
    write(tmp_path, groups="0::/a/b")
    assert probe.quota(tmp_path / "groups", mounted) == cores


def test_quotas_of_the_first_version_are_in_the_cpu_controller_s_tree(tmp_path):
    mounted = tmp_path / "mounted"
    write(mounted / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(mounted / "cpu" / "a", cpu__cfs_quota_us="25000", cpu__cfs_period_us="10000")
    write(tmp_path, groups="3:cpuset:/a\n2:cpu,cpuacct:/a\n4:memory:/a/b")
    assert probe.quota(tmp_path / "groups", mounted) == 2.5


def test_a_path_of_the_host_s_that_a_container_does_not_see_leads_to_the_container_s_own(tmp_path):
    write(tmp_path / "mounted", cpu__max="150000 100000")
    write(tmp_path, groups="0::/docker/123")
    assert probe.quota(tmp_path / "groups", tmp_path / "mounted") == 1.5


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert probe.quota(tmp_path / "groups", tmp_path) == math.inf
    write(tmp_path, groups="0::/")
    assert probe.quota(tmp_path / "groups", tmp_path) == math.inf
