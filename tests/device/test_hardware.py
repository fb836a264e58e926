"""Facts of the machine, read from texts as Linux writes them."""

import os
import re
import resource
from pathlib import Path

import pytest

from ls_edge.device import hardware


def test_only_the_features_that_matter_for_engines_are_listed():
    assert hardware.cpu_features("processor: 0\nflags\t\t: fpu avx2 amx_int8 sse\n") == ["avx2", "amx_int8"]
    assert hardware.cpu_features("Features\t: fp asimd asimddp sve2\n") == ["asimd", "asimddp"]
    assert hardware.cpu_features("") == []


@pytest.mark.parametrize(
    ("flags", "bfloat16", "saturates"),
    [
        ("fpu avx2 avx512f", False, True),
        ("fpu avx2 avx512f avx512_bf16", True, True),
        ("fpu avx2 avx512_vnni", False, False),
        ("fpu avx2 amx_int8 amx_bf16", True, False),
        ("fpu sse", False, False),
    ],
)
def test_bfloat16_and_saturation_follow_the_flags_of_the_processor(flags, bfloat16, saturates):
    cpuinfo = f"processor : 0\nflags\t\t: {flags}\n"
    assert hardware.multiplies_bfloat16(cpuinfo) == bfloat16
    assert hardware.int8_products_saturate(cpuinfo) == saturates
    assert not hardware.multiplies_bfloat16("")


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="reads /proc")
def test_free_memory_is_at_most_the_total():
    total, free = hardware.memory_gib()
    assert 0 < free <= total


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="reads /proc")
def test_free_memory_is_that_of_the_process(monkeypatch):
    used = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    limits = {resource.RLIMIT_DATA: (used + 2**26, -1)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, (resource.RLIM_INFINITY,) * 2))
    total, free = hardware.memory_gib()
    assert total == (used + 2**26) / 2**30
    assert 2**25 < free * 2**30 < 2**27


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="reads /proc")
def test_free_memory_is_that_of_the_service_and_its_slice(tmp_path):
    own, service = tmp_path / "own", tmp_path / "cgroup/system.slice/ls-edge.service"
    own.write_text("0::/system.slice/ls-edge.service\n")
    service.mkdir(parents=True)
    mib = 2**20
    for folder, kind, limit, used, cached in ((service, "max", 64, 60, 20), (service.parent, "high", 96, 80, 0)):
        (folder / f"memory.{kind}").write_text(f"{limit * mib}\n")
        (folder / "memory.current").write_text(f"{used * mib}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached << 19}\nactive_file {cached << 19}\n")
    assert hardware.memory_gib(tmp_path / "cgroup", own) == (64 / 1024, 16 / 1024)
    (service.parent / "memory.current").write_text(f"{61 * mib}\n")
    assert hardware.memory_gib(tmp_path / "cgroup", own) == (64 / 1024, 24 / 1024)


@pytest.mark.parametrize("tree", ["cpu,cpuacct", "cpuacct,cpu", "cpu"])
@pytest.mark.parametrize("below", ["docker/abc", ""])  # on the host, in a container
def test_limits_of_control_groups_of_version_1_are_read(tmp_path, tree, below):
    own, root = tmp_path / "own", tmp_path / "cgroup"
    assert hardware.shows_limits(root, own)
    own.write_text("9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n")
    assert not hardware.shows_limits(root, own)
    cpu, memory = root / tree / below, root / "memory" / below
    for place, files in (
        (cpu, {"cpu.cfs_quota_us": 150_000, "cpu.cfs_period_us": 100_000}),
        (memory, {"memory.limit_in_bytes": 400 * 2**20, "memory.usage_in_bytes": 100 * 2**20}),
    ):
        assert not hardware.shows_limits(root, own)
        place.mkdir(parents=True)
        for name, value in files.items():
            (place / name).write_text(f"{value}\n")
    (memory / "memory.stat").write_text(f"active_file 0\ntotal_inactive_file {2**24}\ntotal_active_file {2**22}\n")
    assert hardware.cpu_quota(root, own) == 1.5
    assert hardware.memory_gib(root, own) == (400 / 1024, 320 / 1024)
    assert hardware.shows_limits(root, own)
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert hardware.cpu_quota(root, own) is None
    assert hardware.memory_gib(root, own)[0] == hardware.memory_gib(tmp_path, tmp_path)[0]


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("32.7.6", "4"), ("35.4.1", "5"), ("36.3.0", "6.0"), ("36.4.0", "6.1"), ("36.4.3", "6.2"), ("36.4.4", "6.2.1"),
        ("36.4.7", "6.2.1"), ("36.5.0", "6.2.2"), ("36.5.2", "6.2.3"), ("36.6.0", "6"), ("38.2.1", "7.0"),
        ("38.4.0", "7.1"), ("39.2.0", "7.2"), ("99.1.0", "of Jetson Linux 99.1.0"),
    ],
)  # fmt: skip
def test_jetpack_follows_from_jetson_linux_whatever_packages_were_installed(make_jetson, release, version):
    root = make_jetson(release)
    (root / "var/lib/dpkg").mkdir(parents=True)
    (root / "var/lib/dpkg/status").write_text(
        "Package: nvidia-jetpack\nStatus: deinstall ok config-files\nVersion: 5.1+b1\n"
    )
    assert (hardware.jetson_linux(root), hardware.jetpack(root)) == (release, version)
    assert hardware.board(root) == f"NVIDIA Jetson Orin NX, Jetson Linux {release}"


def test_a_pc_is_no_jetson_and_a_container_has_a_copy_of_the_boards_name(tmp_path):
    assert (hardware.jetson_linux(tmp_path), hardware.jetpack(tmp_path), hardware.board(tmp_path)) == (None, None, None)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/nv_jetson_model").write_text("NVIDIA Jetson AGX Orin Developer Kit\0")
    assert hardware.board(tmp_path) == "NVIDIA Jetson AGX Orin Developer Kit"
