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
    assert found["devices"] == str(root / "dev/nvmap")
    assert kernel_messages() == "NvMapMemAllocInternalTagged: error 12"
    os.remove(programs / "dmesg")
    assert kernel_messages() == "dmesg is not installed"
