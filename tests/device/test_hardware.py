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
