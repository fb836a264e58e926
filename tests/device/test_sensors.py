"""Sensors, read from trees as the kernel lays them out, and from a library with NVML's interface."""

import shutil
import subprocess

import pytest

from ls_edge.device.sensors import Nvml, PowerMeter, Sensors, throttling, total_power, used_watts


def tree(root, files):
    for path, content in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{content}\n", encoding="utf-8")
    return Sensors(root)


def ina3221(number, channels, **alarms):
    base = f"sys/class/hwmon/hwmon{number}"
    files = {f"{base}/name": "ina3221"}
    for index, (label, millivolts, milliamperes) in enumerate(channels, 1):
        files[f"{base}/in{index}_label"] = label
        files[f"{base}/in{index}_input"] = millivolts
        files[f"{base}/curr{index}_input"] = milliamperes
    return files | {f"{base}/{name}": value for name, value in alarms.items()}


ORIN_NANO = ina3221(1, [("VDD_IN", 5000, 1400), ("VDD_CPU_GPU_CV", 5000, 400), ("VDD_SOC", 5000, 300)])
AGX_ORIN = ina3221(3, [("VDD_GPU_SOC", 20000, 300), ("VDD_CPU_CV", 20000, 50), ("VIN_SYS_5V0", 5000, 800)]) | ina3221(
    4, [("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 200), ("NC", 0, 0)]
)


THOR_RAILS = ina3221(3, [("VDD_GPU", 20000, 300), ("VDD_CPU_SOC_MSS", 20000, 50), ("VIN_SYS_5V0", 5000, 800)])
INA238 = {"sys/class/hwmon/hwmon5/name": "ina238", "sys/class/hwmon/hwmon5/power1_input": 38_500_000}  # microwatts


@pytest.mark.parametrize(
    ("files", "channels", "total"),
    [
        (ORIN_NANO, {"VDD_IN": 7.0, "VDD_CPU_GPU_CV": 2.0, "VDD_SOC": 1.5}, (7.0, "module")),
        (  # the memory is fed by VIN_SYS_5V0
            AGX_ORIN,
            {"VDD_GPU_SOC": 6.0, "VDD_CPU_CV": 1.0, "VIN_SYS_5V0": 4.0, "VDDQ_VDD2_1V8AO": 1.0},
            (11.0, "module"),
        ),
        (
            THOR_RAILS | INA238,
            {"VDD_GPU": 6.0, "VDD_CPU_SOC_MSS": 1.0, "VIN_SYS_5V0": 4.0, "VIN": 38.5},
            (38.5, "board"),
        ),
        (THOR_RAILS, {"VDD_GPU": 6.0, "VDD_CPU_SOC_MSS": 1.0, "VIN_SYS_5V0": 4.0}, None),
        (  # the same label twice: none is known to be the module's
            ORIN_NANO | ina3221(4, [("VDD_IN", 5000, 200)]),
            {"VDD_IN hwmon1": 7.0, "VDD_CPU_GPU_CV": 2.0, "VDD_SOC": 1.5, "VDD_IN hwmon4": 1.0},
            None,
        ),
        ({}, {}, None),
    ],
)
def test_channels_add_up_to_the_module_or_the_board_and_unknown_ones_to_nothing(tmp_path, files, channels, total):
    found = tree(tmp_path, files).channel_watts()
    assert found == channels
    power = total_power(found, {}, {})
    assert (power and (power.watts, power.scope)) == total


def zone(number, name, millidegrees, *trips):
    """A thermal zone with trip points: a temperature and the cooling devices bound to it."""
    base = f"sys/class/thermal/thermal_zone{number}"
    files, bound = {f"{base}/type": name, f"{base}/temp": millidegrees}, 0
    for index, (limit, devices) in enumerate(trips):
        files |= {f"{base}/trip_point_{index}_type": "passive", f"{base}/trip_point_{index}_temp": limit}
        for device in devices:
            files |= {f"{base}/cdev{bound}/type": device, f"{base}/cdev{bound}_trip_point": index}
            bound += 1
    return files


ORIN_TRIPS = (99_000, ("cpufreq-cpu0", "cpu-throttle-alert", "devfreq-17000000.gpu")), (70_000, ("hot-surface-alert",))


@pytest.mark.parametrize(
    ("files", "throttled"),
    [
        (zone(0, "cpu-thermal", 92_000, *ORIN_TRIPS), []),
        (zone(0, "cpu-thermal", 99_500, *ORIN_TRIPS), ["cpu-thermal 0 at 100 °C (limit 99)"]),
        (zone(0, "GPU-therm", 93_000, (93_000, ("thermal-devfreq-0",))), ["GPU-therm 0 at 93 °C (limit 93)"]),
        (zone(4, "PMIC-Die", 100_000, (100_000, ())), []),  # of a Xavier: always the same value
        (zone(1, "tj-thermal", 60_000, (51_000, ("pwm-fan",)), (-274_000, ("cpufreq-cpu0",))), []),
        ({"sys/class/thermal/cooling_device7/type": "hot-surface-alert",
          "sys/class/thermal/cooling_device7/cur_state": 1}, []),
    ],
)  # fmt: skip
def test_a_trip_point_throttles_only_through_a_device_that_lowers_clocks(tmp_path, files, throttled):
    assert tree(tmp_path, files).state().throttled == throttled


@pytest.mark.parametrize(
    ("devices", "clocks"),
    [
        ({"17000000.gpu": 624_750_000, "15340000.vic": 1_000_000}, [624.75]),  # Orin
        ({"17000000.ga10b": 306_000_000, "15480000.nvdec": 1_000_000}, [306.0]),  # Orin, JetPack 5
        ({"17000000.gv11b": 1_377_000_000}, [1377.0]),  # Xavier
        ({"gpu-gpc-0": 1_575_000_000, "gpu-nvd-0": 1_692_000_000}, [1575.0]),  # Thor
    ],
)
def test_only_the_gpu_counts_among_the_devices_that_change_clocks(tmp_path, devices, clocks):
    state = tree(tmp_path, {f"sys/class/devfreq/{name}/cur_freq": hertz for name, hertz in devices.items()}).state()
    assert list(state.clocks_mhz.values()) == clocks


def rapl(zones):
    files = {}
    for zone, (name, energy, most) in zones.items():
        base = f"sys/class/powercap/intel-rapl:{zone}"
        files |= {f"{base}/name": name, f"{base}/energy_uj": energy, f"{base}/max_energy_range_uj": most}
    return files


def test_rapl_counts_packages_and_memory_but_not_their_parts(tmp_path):
    sensors = tree(
        tmp_path, rapl({"0": ("package-0", 1000, 5000), "0:0": ("core", 700, 5000), "0:2": ("dram", 100, 5000)})
    )
    assert sensors.energy_uj() == {"0 package-0": (1000, 5000), "0:2 dram": (100, 5000)}
    tree(tmp_path, rapl({"1": ("psys", 9000, 50000)}))
    assert sensors.energy_uj() == {"1 psys": (9000, 50000)}


def test_a_rapl_counter_may_wrap_around():
    before, after = {"0 package-0": (9_000_000, 10_000_000)}, {"0 package-0": (3_000_000, 10_000_000)}
    assert used_watts(before, after, 2.0) == {"0 package-0": 2.0}
    found = total_power({}, used_watts(before, after, 2.0), {"gpu0": 5.0})
    assert (found.watts, found.scope) == (7.0, "processor and gpu")


def test_a_meter_averages_samples(tmp_path):
    sensors = tree(tmp_path, ORIN_NANO)
    with PowerMeter(sensors, every_s=0.005) as meter:
        pass
    assert meter.reading.watts == 7.0
    with PowerMeter(Sensors(tmp_path / "nothing"), every_s=0.005) as meter:
        pass
    assert meter.reading is None


def test_clocks_temperatures_and_causes_of_throttling_are_read(tmp_path):
    calm = tree(
        tmp_path,
        ORIN_NANO
        | zone(0, "cpu-thermal", 51_250, *ORIN_TRIPS)
        | {
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": 1510400,
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": 1728000,
            "sys/class/devfreq/17000000.gpu/cur_freq": 624750000,
            "sys/class/devfreq/17000000.gpu/max_freq": 1020000000,
            "sys/class/thermal/thermal_zone1/type": "cv0-thermal",
            "sys/class/thermal/thermal_zone1/temp": -256000,
            "sys/class/thermal/cooling_device0/type": "pwm-fan",
            "sys/class/thermal/cooling_device0/cur_state": 2,
            "sys/class/thermal/cooling_device1/type": "cpu-throttle-alert",
            "sys/class/thermal/cooling_device1/cur_state": 0,
            "sys/class/hwmon/hwmon2/name": "soctherm_oc",
            "sys/class/hwmon/hwmon2/oc3_event_cnt": 4,
        },
    )
    before = calm.state()
    assert before.clocks_mhz == {"cpu0": 1510.4, "gpu0": 624.75}
    assert before.limits_mhz == {"cpu0": 1728.0, "gpu0": 1020.0}
    assert before.temperatures_c == {"cpu-thermal 0": 51.25}
    assert before.throttled == []
    assert throttling(before, before) == []
    hot = tree(
        tmp_path,
        {
            "sys/class/thermal/thermal_zone0/temp": 99500,
            "sys/class/thermal/cooling_device1/cur_state": 1,
            "sys/class/hwmon/hwmon1/curr1_max_alarm": 1,
            "sys/class/hwmon/hwmon2/oc3_event_cnt": 9,
        },
    )
    assert throttling(before, hot.state()) == [
        "cpu-thermal 0 at 100 °C (limit 99)",
        "cpu-throttle-alert at level 1",
        "over-current alarm of VDD_IN",
        "soctherm_oc oc3: 5 more",
    ]


def test_throttling_is_read_on_x86_and_a_raspberry_pi(tmp_path):
    files = {
        "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": 3,
        "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": 1,
        "sys/devices/platform/soc/soc:firmware/get_throttled": "50000",
    }
    before = tree(tmp_path, files).state()
    assert before.counters["core"] == 4
    assert before.throttled == []  # under-voltage and throttling were before
    files["sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count"] = 6
    files["sys/devices/platform/soc/soc:firmware/get_throttled"] = "50005"
    assert throttling(before, tree(tmp_path, files).state()) == ["under-voltage", "throttled", "core: 5 more"]


def test_names_of_temperatures_do_not_depend_on_the_zones_that_can_be_read(tmp_path):
    files = {f"sys/class/thermal/thermal_zone{number}/type": "acpitz" for number in (0, 2, 10)}
    files |= {f"sys/class/thermal/thermal_zone{number}/temp": 40_000 + number for number in (0, 2, 10)}
    files |= {f"sys/class/devfreq/gpu-gpc-{number}/cur_freq": 1_000_000 for number in (0, 1)}
    assert list(tree(tmp_path, files).state().temperatures_c) == ["acpitz 0", "acpitz 10", "acpitz 2"]
    for name in ("thermal/thermal_zone0/temp", "devfreq/gpu-gpc-0/cur_freq"):  # Wi-Fi sleeps, and a GPU
        (tmp_path / "sys/class" / name).write_text("")
    found = Sensors(tmp_path).state()
    assert (list(found.temperatures_c), list(found.clocks_mhz)) == (["acpitz 10", "acpitz 2"], ["gpu1"])


def test_under_voltage_of_the_kernels_driver_throttles(tmp_path):
    files = {"sys/class/hwmon/hwmon1/name": "rpi_volt", "sys/class/hwmon/hwmon1/in0_lcrit_alarm": 1}
    assert tree(tmp_path, files).state().throttled == ["under-voltage"]
    assert tree(tmp_path, {"sys/class/hwmon/hwmon1/name": "other"}).state().throttled == []


def test_a_jetson_reports_its_power_mode(tmp_path):
    sensors = tree(
        tmp_path,
        {
            "var/lib/nvpmodel/status": "pmode:0002",
            "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\nCPU_ONLINE 1\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >",
        },
    )
    assert sensors.power_mode() == "MAXN_SUPER"
    (tmp_path / "etc/nvpmodel.conf").unlink()
    assert sensors.power_mode() == "2"


def test_without_sensors_everything_is_empty(tmp_path):
    sensors = Sensors(tmp_path)
    state = sensors.state()
    assert (state.temperatures_c, state.clocks_mhz, state.throttled, state.counters) == ({}, {}, [], {})
    assert (sensors.power_mode(), sensors.gpus()) == (None, [])
    assert Nvml.open(str(tmp_path / "libnvidia-ml.so.1")) is None


NVML = """
#include <string.h>
static int card;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = index ? &card : 0; return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) { strcpy(name, device ? "Some GPU" : ""); return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { *mw = 71500; return device == &card ? 0 : 2; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) { *mj = 0; return 0; }
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *t) { *t = 40 + sensor; return !device; }
int nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *mhz) { *mhz = 1000 + type; return !device; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *r) { *r = 0x45; return !device; }
"""


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("cc") is None, reason="builds a library")
def test_cards_are_read_through_nvml_and_keep_their_number_when_one_fails(tmp_path):
    (tmp_path / "nvml.c").write_text(NVML, encoding="utf-8")
    library = tmp_path / "libnvml.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True, timeout=60)
    nvml = Nvml.open(str(library))
    gone, gpu = nvml.read()
    assert (gone.name, gone.temperature_c, gone.slowdowns) == ("", None, [])
    assert (gpu.name, gpu.watts, gpu.joules) == ("Some GPU", 71.5, None)
    assert (gpu.temperature_c, gpu.clock_mhz, gpu.slowdowns) == (40.0, 1001.0, ["hardware thermal slowdown"])
    tree(tmp_path, {f"sys/class/devfreq/1{number}000000.gpu/cur_freq": 306_000_000 for number in (7, 8)})
    sensors = Sensors(tmp_path, nvml)
    assert sensors.state().clocks_mhz == {"gpu0": 306.0, "gpu1": 306.0}  # the kernel knows better than NVML on a Jetson
    assert sensors.state().throttled == ["gpu1: hardware thermal slowdown"]
    with PowerMeter(sensors, every_s=0.005) as meter:
        pass
    assert (meter.reading.watts, meter.reading.scope) == (71.5, "gpu")
