"""Power, temperatures, clocks and throttling of the device that this process runs on, from sysfs and from NVML.

Sources are the interfaces that the kernel documents:

- INA3221 (``Documentation/hwmon/ina3221.rst``): ``in[123]_label``, ``in[123]_input`` in mV, ``curr[123]_input`` in mA.
  Which channels make up the whole board differs from board to board (:data:`BOARD_CHANNELS`, from the chapter "Platform
  Power and Performance" of NVIDIA's Jetson Linux Developer Guide). Alarms: ``curr*_crit_alarm``, ``curr*_max_alarm``.
- Over-current events of a Jetson: ``oc*_event_cnt`` of the hwmon device ``soctherm_oc``; they are counted from boot.
- RAPL (``Documentation/power/powercap/powercap.rst``): ``energy_uj`` in microjoules, which begins again at 0 after
  ``max_energy_range_uj``; most kernels let only root read it.
- ``/sys/class/thermal``: temperatures, trip points and cooling devices; ``/sys/devices/system/cpu``: clocks, and
  ``thermal_throttle`` on x86; ``get_throttled`` of a Raspberry Pi's firmware.
- NVML by its C interface, for NVIDIA cards.

Missing values are None or empty; nothing is estimated. The root is a parameter, so that a copy of a board's tree can be
read.
"""

from __future__ import annotations

import ctypes
import re
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import msgspec

BOARD_CHANNELS: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"VDD_IN"}), frozenset({"VDD_IN"})),  # Orin Nano, Orin NX, Xavier NX, TX2: the whole module
    (frozenset({"POM_5V_IN"}), frozenset({"POM_5V_IN"})),  # Nano
    # AGX Orin has no such channel; VDDQ_VDD2_1V8AO is fed by VIN_SYS_5V0, so it must not be added again
    (
        frozenset({"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}),
        frozenset({"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}),
    ),
)
"""Labels that identify a board, and the channels whose sum is its total power."""

SAMPLE_EVERY_S = 0.05
"""Interval between readings of power; a shorter one follows peaks and costs processor time."""

_THROTTLING_DEVICE = re.compile(
    r"^(Processor|cpufreq|thermal-cpufreq|devfreq|thermal-devfreq|\w+-throttle-alert|[cg]pu-balanced)"
)
"""Cooling devices that slow the device down; the others are fans."""
_PI_NOW = {0: "under-voltage", 1: "clock capped", 2: "throttled", 3: "soft temperature limit"}
"""Bits of a Raspberry Pi's ``get_throttled`` for the present moment."""
_NVML_SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
                   0x80: "power brake"}  # fmt: skip
"""Bits of ``nvmlDeviceGetCurrentClocksThrottleReasons`` that mean trouble; a card at its power cap is none."""


class DeviceState(msgspec.Struct, frozen=True):
    """Clocks, temperatures, throttling and alarms at one moment."""

    temperatures_c: dict[str, float]
    clocks_mhz: dict[str, float]
    """Present clock of each processor core (``cpu0``) and GPU (``gpu0``)."""
    throttled: list[str]
    """Present causes of throttling."""
    counters: dict[str, int]
    """Throttling and over-current events since the device was started."""


class GpuReading(msgspec.Struct, frozen=True):
    """Values of one card from NVML, or None."""

    name: str
    watts: float | None
    joules: float | None
    """Since the driver was loaded."""
    temperature_c: float | None
    clock_mhz: float | None
    slowdowns: list[str]


class PowerReading(msgspec.Struct, frozen=True):
    """Mean power over a period."""

    watts: float
    scope: str
    """Consumer: ``board``, ``platform`` (RAPL's psys), ``processor``, ``gpu`` or ``processor and gpu``."""
    source: str
    """``ina3221``, ``rapl``, ``nvml`` or ``rapl and nvml``."""
    channels: dict[str, float]
    """Mean watts of each channel, including those that are a part of another."""


class Sensors:
    """The sensors of a device; ``root`` is the folder that holds its ``sys`` and ``proc``."""

    def __init__(self, root: Path = Path("/"), nvml: Nvml | None = None) -> None:
        """Open ``nvml`` by default, if ``root`` is this machine."""
        self.root = root
        self._sys = root / "sys"
        self._nvml = Nvml.open() if nvml is None and root == Path("/") else nvml

    @property
    def has_power(self) -> bool:
        """Whether any sensor measures power."""
        return bool(self.channel_watts() or self.energy_uj() or any(_tells_power(gpu) for gpu in self.gpus()))

    def gpus(self) -> list[GpuReading]:
        """Return the cards that NVML knows; none without NVML."""
        return [] if self._nvml is None else self._nvml.read()

    def channel_watts(self) -> dict[str, float]:
        """Return the power of each INA3221 channel with a label and a reading, in watts."""
        found: dict[str, float] = {}
        for monitor in self._hwmon("ina3221"):
            for channel in (1, 2, 3):
                label = _text(monitor / f"in{channel}_label")
                volts, amperes = _number(monitor / f"in{channel}_input"), _number(monitor / f"curr{channel}_input")
                if label and label != "NC" and volts is not None and amperes is not None:
                    found[label] = volts * amperes / 1e6
        return found

    def energy_uj(self) -> dict[str, tuple[int, int]]:
        """Return microjoules and counter range by RAPL domain: ``psys`` alone, or all packages and their memory."""
        found: dict[str, tuple[int, int]] = {}
        for zone in sorted((self._sys / "class/powercap").glob("intel-rapl:*")):
            name, energy, most = (
                _text(zone / "name"),
                _number(zone / "energy_uj"),
                _number(zone / "max_energy_range_uj"),
            )
            if energy is not None and (name == "psys" or name.startswith("package") or name == "dram"):
                found[f"{zone.name.removeprefix('intel-rapl:')} {name}"] = (round(energy), round(most or 0))
        psys = {name: value for name, value in found.items() if name.endswith(" psys")}
        return psys or found

    def state(self) -> DeviceState:
        """Read clocks, temperatures, throttling and alarms."""
        gpus = self.gpus()
        temperatures, hot = self._temperatures()
        cores = _readings(self._sys / "devices/system/cpu", "cpu[0-9]*/cpufreq/scaling_cur_freq")
        clocks = {path.parent.parent.name: khz / 1e3 for path, khz in cores}
        devices = _readings(self._sys / "class/devfreq", "*gpu*/cur_freq")
        clocks |= {f"gpu{number}": hertz / 1e6 for number, (_, hertz) in enumerate(devices)}
        throttled = [*hot, *self._slowing_devices(), *self._alarms(), *self._pi_bits()]
        for number, gpu in enumerate(gpus):
            if gpu.temperature_c is not None:
                temperatures[f"gpu{number}"] = gpu.temperature_c
            if gpu.clock_mhz is not None:
                clocks[f"gpu{number}"] = gpu.clock_mhz
            throttled += [f"gpu{number}: {why}" for why in gpu.slowdowns]
        return DeviceState(temperatures, clocks, throttled, self._counters())

    def battery_wh(self) -> float | None:
        """Return the energy left in all batteries, in watt hours, or None."""
        found: list[float] = []
        for supply in sorted((self._sys / "class/power_supply").glob("*")):
            if _text(supply / "type") != "Battery" or _text(supply / "scope") == "Device":
                continue
            energy, charge, volts = (_number(supply / name) for name in ("energy_now", "charge_now", "voltage_now"))
            if energy is not None:
                found.append(energy / 1e6)
            elif charge is not None and volts is not None:
                found.append(charge * volts / 1e12)
        return round(sum(found), 3) if found else None

    def power_mode(self) -> str | None:
        """Return a Jetson's power mode (nvpmodel), by its name if the configuration has it."""
        mode = re.search(r"pmode:(\d+)", _text(self.root / "var/lib/nvpmodel/status"))
        if mode is None:
            return None
        names = re.findall(r"POWER_MODEL\s+ID=(\d+)\s+NAME=([\w.-]+)", _text(self.root / "etc/nvpmodel.conf"))
        return next((name for number, name in names if int(number) == int(mode[1])), str(int(mode[1])))

    def l4t(self) -> str | None:
        """Return the release of Jetson Linux, such as ``36.4.3``."""
        found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _text(self.root / "etc/nv_tegra_release"))
        return f"{found[1]}.{found[2]}" if found else None

    def _hwmon(self, name: str) -> list[Path]:
        return [path for path in sorted((self._sys / "class/hwmon").glob("hwmon*")) if _text(path / "name") == name]

    def _temperatures(self) -> tuple[dict[str, float], list[str]]:
        """Return temperatures by zone, and the zones at a passive or hot trip point."""
        found: dict[str, float] = {}
        hot: list[str] = []
        for zone in sorted((self._sys / "class/thermal").glob("thermal_zone*")):
            name, temperature = _text(zone / "type"), _number(zone / "temp")
            if temperature is None or not -100e3 < temperature < 200e3:  # sensors that are switched off say so
                continue
            found[name if name not in found else f"{name} {zone.name.removeprefix('thermal_zone')}"] = temperature / 1e3
            for trip in sorted(zone.glob("trip_point_*_type")):
                at = _number(zone / trip.name.replace("_type", "_temp"))
                if _text(trip) in ("passive", "hot") and at is not None and 0 < at <= temperature:
                    hot.append(f"{name} at {temperature / 1e3:.0f} \N{DEGREE SIGN}C (limit {at / 1e3:.0f})")
                    break
        return found, hot

    def _slowing_devices(self) -> list[str]:
        found = []
        for path, level in _readings(self._sys / "class/thermal", "cooling_device*/cur_state"):
            name = _text(path.parent / "type")
            if level and _THROTTLING_DEVICE.match(name):
                found.append(f"{name} at level {level:.0f}")
        return found

    def _alarms(self) -> list[str]:
        found = []
        for monitor in self._hwmon("ina3221"):
            for alarm in sorted([*monitor.glob("curr*_crit_alarm"), *monitor.glob("curr*_max_alarm")]):
                if _number(alarm):
                    channel = re.sub(r"\D", "", alarm.name)
                    found.append(
                        f"over-current alarm of {_text(monitor / f'in{channel}_label') or f'channel {channel}'}"
                    )
        return found

    def _pi_bits(self) -> list[str]:
        bits = self._pi_throttled()
        return [why for bit, why in _PI_NOW.items() if bits >> bit & 1]

    def _pi_throttled(self) -> int:
        for path in sorted((self._sys / "devices/platform").glob("soc*/soc*firmware/get_throttled")):
            text = _text(path).removeprefix("0x")
            if re.fullmatch(r"[0-9a-fA-F]+", text):
                return int(text, 16)
        return 0

    def _counters(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for monitor in sorted((self._sys / "class/hwmon").glob("hwmon*")):
            for path, count in _readings(monitor, "oc*_event_cnt"):
                found[f"{_text(monitor / 'name')} {path.name.removesuffix('_event_cnt')}"] = round(count)
        counters = "cpu[0-9]*/thermal_throttle/*_throttle_count"
        for path, count in _readings(self._sys / "devices/system/cpu", counters):
            name = path.name.removesuffix("_throttle_count")
            found[name] = found.get(name, 0) + round(count)
        bits = self._pi_throttled() >> 16
        found |= {f"{why} since boot": 1 for bit, why in _PI_NOW.items() if bits >> bit & 1}
        return found


def throttling(before: DeviceState, after: DeviceState) -> list[str]:
    """Return the causes of throttling at two moments, and the events counted between them."""
    found = list(dict.fromkeys([*before.throttled, *after.throttled]))
    for name, count in after.counters.items():
        more = count - before.counters.get(name, 0)
        if more > 0:
            found.append(f"{name}: {more} more")
    return found


class PowerMeter:
    """Context manager that measures mean power, from samples of channels and differences of counters."""

    def __init__(self, sensors: Sensors, every_s: float = SAMPLE_EVERY_S) -> None:
        self.reading: PowerReading | None = None
        """Mean power after the end; None if no sensor measures power."""
        self._sensors, self._every_s = sensors, every_s
        self._samples: list[dict[str, float]] = []
        self._gpu_samples: list[list[GpuReading]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power", daemon=True)

    def __enter__(self) -> PowerMeter:
        self._begun = time.monotonic()
        self._energy = self._sensors.energy_uj()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        seconds = time.monotonic() - self._begun
        rapl = used_watts(self._energy, self._sensors.energy_uj(), seconds)
        self.reading = total_power(_means(self._samples), rapl, self._gpu_watts(seconds))

    def _sample(self) -> None:
        is_last = False
        while True:
            self._samples.append(self._sensors.channel_watts())
            self._gpu_samples.append(self._sensors.gpus())
            if is_last:
                return
            is_last = self._ended.wait(self._every_s)

    def _gpu_watts(self, seconds: float) -> dict[str, float]:
        """Return mean watts of each card, from its energy counter or else from samples."""
        found: dict[str, float] = {}
        for number, (first, last) in enumerate(zip(self._gpu_samples[0], self._gpu_samples[-1], strict=False)):
            if first.joules is not None and last.joules is not None and last.joules > first.joules:
                found[f"gpu{number}"] = (last.joules - first.joules) / seconds
                continue
            samples = [gpus[number].watts for gpus in self._gpu_samples if number < len(gpus)]
            known = [watts for watts in samples if watts is not None]
            if known:
                found[f"gpu{number}"] = sum(known) / len(known)
        return found


def used_watts(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]], seconds: float
) -> dict[str, float]:
    """Return mean watts of each RAPL domain between two readings; a counter may have wrapped around."""
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
    """Return a device's power from the channels that measure most of it, or None.

    ``channels`` are those of INA3221; ``rapl`` and ``gpus`` are mean watts by domain and card.
    """
    everything = {name: round(watts, 4) for name, watts in {**channels, **rapl, **gpus}.items()}
    for known_by, summed in BOARD_CHANNELS:
        if known_by <= channels.keys():
            return PowerReading(round(sum(channels[name] for name in summed), 4), "board", "ina3221", everything)
    processor, cards = sum(rapl.values()), sum(gpus.values())
    if rapl:
        whole = any(name.endswith(" psys") for name in rapl)
        scope = "platform" if whole else "processor"
        if gpus:
            return PowerReading(round(processor + cards, 4), f"{scope} and gpu", "rapl and nvml", everything)
        return PowerReading(round(processor, 4), scope, "rapl", everything)
    return PowerReading(round(cards, 4), "gpu", "nvml", everything) if gpus else None


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
            device = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                self._devices.append(device)

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
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", device, ctypes.c_uint())
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.c_ulonglong())
        temperature = self._ask("nvmlDeviceGetTemperature", device, ctypes.c_uint(), 0)  # of the GPU
        clock = self._ask("nvmlDeviceGetClockInfo", device, ctypes.c_uint(), 1)  # of its processors
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.c_ulonglong()) or 0
        return GpuReading(
            name=name.value.decode(errors="replace"),
            watts=None if milliwatts is None else milliwatts / 1e3,
            joules=None if millijoules is None else millijoules / 1e3,
            temperature_c=None if temperature is None else float(temperature),
            clock_mhz=None if clock is None else float(clock),
            slowdowns=[why for bit, why in _NVML_SLOWDOWNS.items() if reasons & bit],
        )

    def _ask(
        self, function: str, device: ctypes.c_void_p, value: ctypes.c_uint | ctypes.c_ulonglong, *which: int
    ) -> int | None:
        call = getattr(self._library, function, None)
        if call is None or call(device, *map(ctypes.c_uint, which), ctypes.byref(value)) != 0:
            return None
        return int(value.value)


def _tells_power(gpu: GpuReading) -> bool:
    return gpu.watts is not None or gpu.joules is not None


def _means(samples: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for sample in samples for name in sample})
    return {name: statistics.fmean(sample[name] for sample in samples if name in sample) for name in names}


def _readings(folder: Path, pattern: str) -> Iterator[tuple[Path, float]]:
    """Yield the files below a folder that hold a number."""
    for path in sorted(folder.glob(pattern)):
        if (value := _number(path)) is not None:
            yield path, value


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="utf-8", errors="replace").strip())
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""
