"""Facts of the machine, read from texts as Linux writes them."""

import os

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
def test_free_memory_is_that_of_the_service_and_its_slice(tmp_path):
    own, service = tmp_path / "own", tmp_path / "cgroup/system.slice/ls-edge.service"
    own.write_text("0::/system.slice/ls-edge.service\n")
    service.mkdir(parents=True)
    mib = 2**20
    for folder, limit, used, cached in ((service, 64, 60, 20), (service.parent, 96, 80, 0)):
        (folder / "memory.max").write_text(f"{limit * mib}\n")
        (folder / "memory.current").write_text(f"{used * mib}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached * mib}\nactive_file 7\n")
    assert hardware.memory_gib(tmp_path / "cgroup", own) == (64 / 1024, 16 / 1024)
    (service.parent / "memory.current").write_text(f"{61 * mib}\n")
    assert hardware.memory_gib(tmp_path / "cgroup", own) == (64 / 1024, 24 / 1024)


@pytest.mark.parametrize("folder", ["cpu,cpuacct/docker/abc", "cpu,cpuacct", "cpu"])  # on the host, in a container
def test_limits_of_control_groups_of_version_1_are_read(tmp_path, folder):
    own, root = tmp_path / "own", tmp_path / "cgroup"
    assert hardware.shows_limits(root, own)
    own.write_text("9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n")
    assert not hardware.shows_limits(root, own)
    memory, cpu = root / folder.replace("cpu,cpuacct", "memory").replace("cpu", "memory"), root / folder
    for place, files in (
        (cpu, {"cpu.cfs_quota_us": 150_000, "cpu.cfs_period_us": 100_000}),
        (memory, {"memory.limit_in_bytes": 400 * 2**20, "memory.usage_in_bytes": 100 * 2**20}),
    ):
        place.mkdir(parents=True)
        for name, value in files.items():
            (place / name).write_text(f"{value}\n")
    (memory / "memory.stat").write_text(f"total_inactive_file {20 * 2**20}\n")
    assert hardware.cpu_quota(root, own) == 1.5
    assert hardware.memory_gib(root, own) == (400 / 1024, 320 / 1024)
    assert hardware.shows_limits(root, own)
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert hardware.cpu_quota(root, own) is None
    assert hardware.memory_gib(root, own)[0] == hardware.memory_gib(tmp_path, tmp_path)[0]


def test_jetpack_comes_from_its_package_or_from_jetson_linux(tmp_path):
    assert (hardware.jetson_linux(tmp_path), hardware.jetpack(tmp_path)) == (None, None)
    (tmp_path / "etc").mkdir()
    release = tmp_path / "etc/nv_tegra_release"
    for first, version in (("36", "6"), ("38", "7"), ("99", "of Jetson Linux 99")):
        release.write_text(f"# R{first} (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n")
        assert (hardware.jetson_linux(tmp_path), hardware.jetpack(tmp_path)) == (f"{first}.4.3", version)
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(
        "Package: nvidia-jetpack-runtime\nStatus: install ok installed\nVersion: 9\n\n"
        "Package: nvidia-jetpack\nStatus: install ok installed\nMaintainer: NVIDIA\nDepends: a,\n b\n"
        "Version: 6.2+b77\n\nPackage: other\nVersion: 1\n"
    )
    assert hardware.jetpack(tmp_path) == "6.2"
