"""Power, temperatures, clocks, and throttling of the device that this process runs on, from sysfs and NVML.

Sources are interfaces that the kernel documents:

- INA3221 (``Documentation/hwmon/ina3221.rst``): ``in[123]_label``, ``in[123]_input`` in mV, ``curr[123]_input`` in mA.
  INA238 (``Documentation/hwmon/ina238.rst``), at the input of a Thor's carrier board: ``power1_input`` in microwatts.
  The channels that add up to the module or the board depend on the board (:data:`TOTAL_CHANNELS`, from the chapter
  "Platform Power and Performance" of NVIDIA's Jetson Linux Developer Guide). Alarms: ``curr*_crit_alarm``,
  ``curr*_max_alarm``.
- Over-current events of a Jetson, counted from boot: ``oc*_event_cnt`` of the hwmon device ``soctherm_oc``.
- RAPL (``Documentation/power/powercap/powercap.rst``): ``energy_uj`` in microjoules, which wraps around to 0 after
  ``max_energy_range_uj``; on most kernels, only root can read it.
- ``/sys/class/thermal``: temperatures, trip points, and cooling devices; ``/sys/devices/system/cpu``: clocks, and
  ``thermal_throttle`` on x86; ``get_throttled`` of a Raspberry Pi's firmware.
- NVML through its C interface, for NVIDIA cards. On a Jetson it answers 0 to much that it does not know, so 0 is
  unknown, and devfreq and hwmon have priority.

Missing values are None or empty; nothing is estimated. The root folder is a parameter, so that a copy of a board's file
tree can be read.
"""

from __future__ import annotations

import ctypes
import math
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ls_edge.device.hardware import text_of

TOTAL_CHANNELS = (
    ({"VDD_IN"}, "module"),  # Orin Nano, Orin NX, Xavier NX, TX2
    ({"POM_5V_IN"}, "module"),  # Nano
    ({"VIN"}, "board"),  # the input of Thor's carrier board
    # AGX Orin has no such channel; VDDQ_VDD2_1V8AO is fed by VIN_SYS_5V0, so it must not be added again
    ({"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}, "module"),
)
"""Channels that identify a board, and what their sum measures."""

SAMPLE_EVERY_S = 0.05
"""Interval between power readings; a shorter one captures peaks but costs processor time."""

_THROTTLING_DEVICE = re.compile(
    r"^(Processor|cpufreq|thermal-cpufreq|devfreq|thermal-devfreq|\w+-throttle-alert|[cg]pu-balanced)"
)
"""Cooling devices that slow down the device; others are fans, or only report, such as ``hot-surface-alert``."""
_GPU_DEVFREQ = re.compile(r"\.gpu$|\.g[a-z]\d+b$|^gpu-gpc-")
"""GPUs among devfreq's devices: ``17000000.gpu``, ``17000000.ga10b``, ``gpu-gpc-0``; ``gpu-nvd-0`` is Thor's video."""
_PI_NOW = {0: "under-voltage", 1: "clock capped", 2: "throttled", 3: "soft temperature limit"}
"""Bits of a Raspberry Pi's ``get_throttled`` for the current state."""
_NVML_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of ``nvmlDeviceGetCurrentClocksThrottleReasons`` that indicate a problem, unlike a card at its power cap."""


class DeviceState(msgspec.Struct, frozen=True):
    """Clocks, temperatures, throttling, and alarms at one moment."""

    temperatures_c: dict[str, float]
    clocks_mhz: dict[str, float]
    throttled: list[str]
    counters: dict[str, int]
    """Number of throttling and over-current events since boot."""
    limits_mhz: dict[str, float] = {}
    """Current maximum clocks, set by the power mode or otherwise."""


class GpuReading(msgspec.Struct, frozen=True):
    """NVML values of a card; unknown values are None."""

    name: str
    watts: float | None
    joules: float | None
    """Energy since the driver was loaded."""
    temperature_c: float | None
    clock_mhz: float | None
    slowdowns: list[str]


class PowerReading(msgspec.Struct, frozen=True):
    """Mean power over a period."""

    watts: float
    scope: str
    """Measured consumer: ``module`` or ``board`` of a Jetson (module and carrier), ``platform`` (RAPL's psys),
    ``processor``, ``gpu``, or ``processor and gpu``."""
    channels: dict[str, float]
    """Mean watts of each channel, including channels that are part of another one."""


class Sensors:
    """Sensors of a device; ``root`` is the folder that contains its ``sys`` and ``proc``."""

    def __init__(self, root: Path = Path("/"), nvml: Nvml | None = None) -> None:
        """Open NVML if it is not given and ``root`` is that of this machine."""
        self.root = root
        self._nvml = Nvml.open() if nvml is None and root == Path("/") else nvml

    def gpus(self) -> list[GpuReading]:
        """Return the cards that NVML knows, or none without NVML."""
        return [] if self._nvml is None else self._nvml.read()

    def gpu_watts(self) -> dict[str, float]:
        """Return the current power in watts of each card that reports it."""
        return {f"gpu{number}": gpu.watts for number, gpu in enumerate(self.gpus()) if gpu.watts is not None}

    def channel_watts(self) -> dict[str, float]:
        """Return the watts of each INA3221 channel that has a label and a reading, and of each INA238.

        If several have the same label, the names of their devices follow, since none of them is known to be the total.
        """
        found = self._read("channels")
        uses = Counter(name.rpartition(" ")[0] for name, _ in found)
        names = {name: label if uses[label := name.rpartition(" ")[0]] == 1 else name for name, _ in found}
        return {names[name]: watts for name, watts in found if math.isfinite(watts)}

    def energy_uj(self) -> dict[str, tuple[int, int]]:
        """Return microjoules and counter range by RAPL domain: ``psys`` alone, or all packages and their memory."""
        found = {}
        for path, energy in _numbers(self.root, "sys/class/powercap/intel-rapl:*/energy_uj"):
            name, most = text_of(path.with_name("name")), _number(path.with_name("max_energy_range_uj"))
            if name in ("psys", "dram") or name.startswith("package"):
                found[f"{path.parent.name.removeprefix('intel-rapl:')} {name}"] = round(energy), round(most or 0)
        psys = {name: value for name, value in found.items() if name.endswith(" psys")}
        return psys or found

    def state(self) -> DeviceState:
        """Read clocks, temperatures, throttling and alarms."""
        temperatures = dict(self._read("temperatures"))
        found = sorted(path.name for path in self.root.glob("sys/class/devfreq/*") if _GPU_DEVFREQ.search(path.name))
        clocks, limits = (
            dict(self._read(f"core {which}"))
            | {f"gpu{found.index(name)}": mhz for name, mhz in self._read(f"gpu {which}")}
            for which in ("clocks", "limits")
        )
        throttled = [why for why, _ in self._read("slowdowns")]
        for number, gpu in enumerate(self.gpus()):
            if gpu.temperature_c is not None:
                temperatures[f"gpu{number}"] = gpu.temperature_c
            if gpu.clock_mhz is not None:
                clocks.setdefault(f"gpu{number}", gpu.clock_mhz)
            throttled += [f"gpu{number}: {why}" for why in gpu.slowdowns]
        counters = Counter[str]()
        for name, count in self._read("counters"):
            counters[name] += round(count)
        return DeviceState(temperatures, clocks, throttled, dict(counters), limits)

    def power_mode(self) -> str | None:
        """Return the power mode of a Jetson (nvpmodel), by name if the configuration has one."""
        mode = re.search(r"pmode:(\d+)", text_of(self.root / "var/lib/nvpmodel/status"))
        if mode is None:
            return None
        names = re.findall(r"POWER_MODEL\s+ID=(\d+)\s+NAME=([\w.-]+)", text_of(self.root / "etc/nvpmodel.conf"))
        return next((name for number, name in names if int(number) == int(mode[1])), str(int(mode[1])))

    def _read(self, quantity: str) -> _Readings:
        readers = _READERS[quantity].items()
        files = ((path, read) for pattern, read in readers for path in sorted(self.root.glob(pattern)))
        return [reading for path, read in files for reading in read(path)]


def throttling(before: DeviceState, after: DeviceState) -> list[str]:
    """Return the causes of throttling in two states, and the events that were counted between them."""
    found = list(dict.fromkeys([*before.throttled, *after.throttled]))
    for name, count in after.counters.items():
        more = count - before.counters.get(name, 0)
        if more > 0:
            found.append(f"{name}: {more} more")
    return found


class PowerMeter:
    """Context manager that measures mean power by sampling channels and reading counters at both ends."""

    def __init__(self, sensors: Sensors, every_s: float = SAMPLE_EVERY_S) -> None:
        self.reading: PowerReading | None = None
        """Mean power, available after the context; None if no sensor measures power."""
        self._sensors, self._every_s = sensors, every_s
        self._samples: list[tuple[dict[str, float], dict[str, float]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power", daemon=True)

    def __enter__(self) -> PowerMeter:
        self._begun = time.monotonic()
        self._counters = self._sensors.energy_uj()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        seconds = time.monotonic() - self._begun
        rapl = used_watts(self._counters, self._sensors.energy_uj(), seconds)
        channels, gpus = (_means(samples) for samples in zip(*self._samples, strict=True))
        self.reading = total_power(channels, rapl, gpus)

    def _sample(self) -> None:
        is_last = False
        while True:
            self._samples.append((self._sensors.channel_watts(), self._sensors.gpu_watts()))
            if is_last:
                return
            is_last = self._ended.wait(self._every_s)


def used_watts(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]], seconds: float
) -> dict[str, float]:
    """Return the mean watts of each RAPL domain between two readings, even if a counter has wrapped around."""
    found = {}
    for name, (energy, most) in after.items():
        if name in before and seconds > 0:
            used = energy - before[name][0]
            if used < 0:
                used += most
            if used >= 0:
                found[name] = used / 1e6 / seconds
    return found


def total_power(
    channels: Mapping[str, float], rapl: Mapping[str, float], gpus: Mapping[str, float]
) -> PowerReading | None:
    """Return the power of a device from the channels that cover most of it, or None without channels.

    All arguments are mean watts: ``channels`` by channel of INA3221 and INA238, ``rapl`` by domain, ``gpus`` by card.
    """
    everything = {name: round(watts, 4) for name, watts in {**channels, **rapl, **gpus}.items()}
    for summed, scope in TOTAL_CHANNELS:
        if summed <= channels.keys():
            return PowerReading(round(sum(channels[name] for name in summed), 4), scope, everything)
    processor, cards = sum(rapl.values()), sum(gpus.values())
    if rapl:
        whole = any(name.endswith(" psys") for name in rapl)
        scope = "platform" if whole else "processor"
        if gpus:
            return PowerReading(round(processor + cards, 4), f"{scope} and gpu", everything)
        return PowerReading(round(processor, 4), scope, everything)
    return PowerReading(round(cards, 4), "gpu", everything) if gpus else None


class Nvml:
    """NVIDIA's management library, through its C interface."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Initialize the library; raise :class:`OSError` if the driver refuses."""
        self._library = library
        if library.nvmlInit_v2() != 0:
            raise OSError("NVML does not start; is the NVIDIA driver loaded?")
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        self._devices: list[ctypes.c_void_p] = []
        for index in range(count.value):
            self._devices.append(ctypes.c_void_p())  # stays null for a card that has failed; the others keep numbers
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._devices[index]))

    @classmethod
    def open(cls, path: str = "libnvidia-ml.so.1") -> Nvml | None:
        """Load the library, or return None if it is missing, lacks a function or finds no driver."""
        try:
            return cls(ctypes.CDLL(path))
        except (OSError, AttributeError):
            return None

    def read(self) -> list[GpuReading]:
        """Read every card."""
        return [self._read(device) for device in self._devices]

    def _read(self, device: ctypes.c_void_p) -> GpuReading:
        name = ctypes.create_string_buffer(96)
        self._library.nvmlDeviceGetName(device, name, ctypes.c_uint(len(name)))
        values = {
            field: self._ask(function, device, kind(), *which)
            for field, (function, kind, which, _) in _NVML_READERS.items()
        }
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.c_ulonglong()) or 0
        return GpuReading(
            name=name.value.decode(errors="replace"),
            slowdowns=[why for bit, why in _NVML_SLOWDOWNS.items() if reasons & bit],
            **{name: value / _NVML_READERS[name][3] if value else None for name, value in values.items()},
        )

    def _ask(
        self, function: str, device: ctypes.c_void_p, value: ctypes.c_uint | ctypes.c_ulonglong, *which: int
    ) -> int | None:
        call = getattr(self._library, function, None)
        if call is None or call(device, *map(ctypes.c_uint, which), ctypes.byref(value)) != 0:
            return None
        return int(value.value)


_NVML_READERS: dict[str, tuple[str, type[ctypes.c_uint | ctypes.c_ulonglong], tuple[int, ...], float]] = {
    "watts": ("nvmlDeviceGetPowerUsage", ctypes.c_uint, (), 1e3),
    "joules": ("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, (), 1e3),
    "temperature_c": ("nvmlDeviceGetTemperature", ctypes.c_uint, (0,), 1),  # of the GPU
    "clock_mhz": ("nvmlDeviceGetClockInfo", ctypes.c_uint, (1,), 1),  # of its processors
}
"""Function, type, arguments, and divisor for each field of :class:`GpuReading`."""

_Readings = list[tuple[str, float]]
_Reader = Callable[[Path], _Readings]


def _scaled(divisor: float, name: Callable[[Path], str]) -> _Reader:
    """Return a reader of files that hold one number."""

    def read(path: Path) -> _Readings:
        value = _number(path)
        return [] if value is None else [(name(path), value / divisor)]

    return read


_core_mhz = _scaled(1e3, lambda path: path.parent.parent.name)
_devfreq_mhz = _scaled(1e6, lambda path: path.parent.name)


def _gpu_mhz(path: Path) -> _Readings:
    return _devfreq_mhz(path) if _GPU_DEVFREQ.search(path.parent.name) else []


def _channel(label: Path) -> _Readings:
    monitor, channel, name = label.parent, label.name[2], text_of(label)
    volts, amperes = _number(monitor / f"in{channel}_input"), _number(monitor / f"curr{channel}_input")
    if text_of(monitor / "name") != "ina3221" or name in ("", "NC"):
        return []
    return [(f"{name} {monitor.name}", math.nan if volts is None or amperes is None else volts * amperes / 1e6)]


def _input(power: Path) -> _Readings:
    """Return the power of an INA238; the name of its only channel is its label or, without one, ``VIN``."""
    label, microwatts = text_of(power.with_name("in1_label")) or "VIN", _number(power)
    if text_of(power.with_name("name")) != "ina238" or microwatts is None:
        return []
    return [(f"{label} {power.parent.name}", microwatts / 1e6)]


def _temperature(path: Path) -> _Readings:
    degrees = _number(path)  # disabled sensors report impossible values
    zone = path.parent.name.removeprefix("thermal_zone")  # the same number, whichever zones can be read
    return (
        [(f"{text_of(path.with_name('type'))} {zone}", degrees / 1e3)]
        if degrees is not None and abs(degrees - 5e4) < 15e4
        else []
    )


def _trip_point(path: Path) -> _Readings:
    """Return the first passive or hot trip point that a thermal zone has reached and that lowers clocks."""
    bound = [
        _number(trip)
        for trip in path.parent.glob("cdev*_trip_point")
        if _THROTTLING_DEVICE.match(text_of(trip.with_name(trip.name.removesuffix("_trip_point")) / "type"))
    ]
    for zone, degrees in _temperature(path):
        for at, limit in _numbers(path.parent, "trip_point_*_temp"):
            kind = text_of(at.with_name(at.name.replace("_temp", "_type")))
            throttles = kind in ("passive", "hot") and int(at.name.split("_")[2]) in bound
            if throttles and 0 < limit <= 1e3 * degrees:
                return [(f"{zone} at {degrees:.0f} \N{DEGREE SIGN}C (limit {limit / 1e3:.0f})", 1)]
    return []


def _cooling_device(path: Path) -> _Readings:
    name, level = text_of(path.with_name("type")), _number(path)
    return [(f"{name} at level {level:.0f}", level)] if level and _THROTTLING_DEVICE.match(name) else []


def _alarm(path: Path) -> _Readings:
    if text_of(path.with_name("name")) != "ina3221" or not _number(path):
        return []
    channel = re.sub(r"\D", "", path.name)
    return [(f"over-current alarm of {text_of(path.with_name(f'in{channel}_label')) or f'channel {channel}'}", 1)]


def _pi_alarm(path: Path) -> _Readings:
    """Return the under-voltage that the kernel's driver of a Raspberry Pi reports."""
    return [("under-voltage", 1)] if text_of(path.with_name("name")) == "rpi_volt" and _number(path) else []


def _pi_bits(path: Path) -> list[str]:
    text = text_of(path).removeprefix("0x")
    bits = int(text, 16) if re.fullmatch(r"[0-9a-fA-F]+", text) else 0
    names = {**_PI_NOW, **{bit + 16: f"{why} since boot" for bit, why in _PI_NOW.items()}}
    return [why for bit, why in names.items() if bits >> bit & 1]


_PI = "sys/devices/platform/soc*/soc*firmware/get_throttled"
_READERS: dict[str, dict[str, _Reader]] = {
    "channels": {"sys/class/hwmon/hwmon*/in[123]_label": _channel, "sys/class/hwmon/hwmon*/power1_input": _input},
    "temperatures": {"sys/class/thermal/thermal_zone*/temp": _temperature},
    "core clocks": {"sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq": _core_mhz},
    "core limits": {"sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_max_freq": _core_mhz},
    "gpu clocks": {"sys/class/devfreq/*/cur_freq": _gpu_mhz},
    "gpu limits": {"sys/class/devfreq/*/max_freq": _gpu_mhz},
    "slowdowns": {
        "sys/class/thermal/thermal_zone*/temp": _trip_point,
        "sys/class/thermal/cooling_device*/cur_state": _cooling_device,
        "sys/class/hwmon/hwmon*/in0_lcrit_alarm": _pi_alarm,
        "sys/class/hwmon/hwmon*/curr*_crit_alarm": _alarm,
        "sys/class/hwmon/hwmon*/curr*_max_alarm": _alarm,
        _PI: lambda path: [(why, 1) for why in _pi_bits(path) if not why.endswith("since boot")],
    },
    "counters": {
        "sys/class/hwmon/hwmon*/oc*_event_cnt": _scaled(
            1, lambda path: f"{text_of(path.with_name('name'))} {path.name.removesuffix('_event_cnt')}"
        ),
        "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count": _scaled(
            1, lambda path: path.name.removesuffix("_throttle_count")
        ),
        _PI: lambda path: [(why, 1) for why in _pi_bits(path) if why.endswith("since boot")],
    },
}
"""Readers of files below the root, by quantity and path pattern."""


def _means(samples: tuple[dict[str, float], ...]) -> dict[str, float]:
    names = sorted({name for sample in samples for name in sample})
    return {name: statistics.fmean(sample[name] for sample in samples if name in sample) for name in names}


def _numbers(folder: Path, pattern: str) -> list[tuple[Path, float]]:
    """Return the files below a folder that contain a number."""
    found = ((path, _number(path)) for path in sorted(folder.glob(pattern)))
    return [(path, value) for path, value in found if value is not None]


def _number(path: Path) -> float | None:
    try:
        return float(text_of(path))
    except ValueError:
        return None
