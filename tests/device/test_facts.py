"""Facts of a board for its report: files of a copied tree, programs, and what is missing."""

import os
import stat

from ls_edge.device.facts import facts, kernel_messages


def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def test_facts_come_from_files_and_programs_and_say_what_is_missing(tmp_path, monkeypatch):
    root, programs = tmp_path / "root", tmp_path / "bin"
    write(root / "proc/meminfo", "MemTotal: 7 kB\nActive: 1 kB\nCmaFree: 2 kB\n")
    write(root / "sys/class/devfreq/17000000.gpu/min_freq", "306000000\n")
    write(root / "sys/class/hwmon/hwmon1/name", "ina238\n")
    write(root / "sys/class/hwmon/hwmon1/in1_label", "VIN\n")
    write(root / "dev/nvmap", "")
    write(root / "dev/nvgpu/igpu0/power", "")
    write(root / "etc/nv_tegra_release", "# R39 (release), REVISION: 2.0, GCID: 1\n# KERNEL_VARIANT: oot\n")
    write(root / "proc/device-tree/compatible", "nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0")
    write(root / "var/lib/nvpmodel/status", "pmode:0002 fmode:quiet\n")
    write(root / "etc/nvpmodel.conf", "# x\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\nCPU_ONLINE CORE_1 1\n")
    for name, text in (
        ("thermal_zone0/type", "cpu-thermal"), ("thermal_zone0/trip_point_2_temp", "70000"),
        ("thermal_zone0/trip_point_2_type", "passive"), ("thermal_zone0/trip_point_2_hyst", "8000"),
        ("thermal_zone0/cdev0/type", "hot-surface-alert"), ("thermal_zone0/cdev0_trip_point", "2"),
    ):  # fmt: skip
        write(root / "sys/class/thermal" / name, f"{text}\n")
    script = stat.S_IRWXU
    write(programs / "nvpmodel", "#!/bin/sh\necho NV Power Mode: 15W; echo 0\n", script)
    write(programs / "dmesg", "#!/bin/sh\necho 'NvMapMemAllocInternalTagged: error 12'; echo usb\n", script)
    monkeypatch.setenv("PATH", str(programs))
    found = dict(facts(root))
    assert found["power mode"] == "NV Power Mode: 15W\n0"
    assert found["cards"] == "nvidia-smi is not installed"
    assert found["memory"] == "proc/meminfo: MemTotal: 7 kB\nproc/meminfo: CmaFree: 2 kB"
    assert found["clocks of the GPU, Hz"] == "sys/class/devfreq/17000000.gpu/min_freq: 306000000"
    assert found["sensors"].splitlines()[-1] == "sys/class/hwmon/hwmon1/in1_label: VIN"
    assert found["switched-off parts of the GPU"] == "no such file here"
    assert found["devices"].splitlines() == [str(root / "dev/nvmap"), str(root / "dev/nvgpu/igpu0/power")]
    assert [line.rpartition("/")[2] for line in found["thermal trips"].splitlines()] == [
        "type: cpu-thermal", "trip_point_2_temp: 70000", "trip_point_2_type: passive", "cdev0_trip_point: 2",
        "type: hot-surface-alert",
    ]  # fmt: skip
    assert [line.partition(": ")[2] for line in found["release"].splitlines()] == [
        "nvidia,p3768-0000+p3767-0005 nvidia,tegra234", "# R39 (release), REVISION: 2.0, GCID: 1",
    ]  # fmt: skip
    assert [line.partition(": ")[2] for line in found["power modes"].splitlines()] == [
        "pmode:0002 fmode:quiet", "< POWER_MODEL ID=2 NAME=MAXN_SUPER >",
    ]  # fmt: skip
    assert kernel_messages() == "NvMapMemAllocInternalTagged: error 12"
    os.remove(programs / "dmesg")
    assert kernel_messages() == "dmesg is not installed"
