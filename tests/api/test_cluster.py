"""Folders of clusters on this machine."""

import os
import tempfile
import time

import ls_edge
from ls_edge.core.files import folder_lock


def test_folders_of_killed_clusters_are_removed(tmp_path, tiny_bundle, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("cluster-killed", "cluster-living", "cluster-starting", "other")
    killed, living, starting, other = (tmp_path / f"ls-edge-{name}" for name in names)
    for folder in (killed, living, starting, other):
        folder.mkdir()
        (folder / "peers.yaml").touch()
        if folder != starting:
            os.utime(folder, (time.time() - 3600,) * 2)
    with folder_lock(living), ls_edge.Cluster(tiny_bundle, peers=1):
        assert not killed.exists()
        assert len(list(tmp_path.iterdir())) == 4
    assert {*tmp_path.iterdir()} == {living, starting, other}
