"""Settings and fixtures of all tests: one thread per process, fixed examples, a check for leaks, and bundles.

The bundles are real exports of a tiny vision transformer. With timm's initialization, blocks change the tokens so
little that any order gives nearly the same logits; these weights make order, skips and other weights show.
"""

import collections
import compileall
import contextlib
import fcntl
import functools
import gc
import importlib.metadata
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml
from hypothesis import HealthCheck, settings

from tests import forked_processes, tiers

# Read by torch and numpy when they are first imported, here and in the processes that tests start.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

# Compiled modules are kept: hundreds of processes would compile them again. All are compiled before the first test,
# because a process that may write only small files would keep half of one.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# ONNX Runtime would keep a store of events in the user's home and send it to its maker.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# The same examples in each run; HYPOTHESIS_PROFILE=explore looks for new ones.
_quiet = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("settled", derandomize=True, **_quiet)
settings.register_profile("explore", max_examples=2000, **_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "settled"))

BLOCKS = 6
"""Number of blocks of the tiny bundles."""
GRACE = 150
"""How often to look, every 20 ms, whether threads and descriptors are gone after a test."""


def pytest_collection_finish():
    """Exclude libraries and collected tests from later garbage collections, which would look at each of them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries complain, at the end of the process, of objects that nobody collects


def pytest_configure(config):
    # Ignored in the background of a script, which processes inherit: those of tests would ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "leaks_ok(reason): the test may leave threads and descriptors behind")
    for tier in tiers.TIERS:
        config.addinivalue_line("markers", f"{tier}: the test is of this tier, see tests/tiers.py")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for folder in ("ls_edge", "runtime", "export", "training", "tests"):
            compileall.compile_dir(tiers.FOLDER.parent / folder, quiet=2)
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.add_cleanup(forked_processes.install())
    tiers.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(tiers.tier_of(item), append=False)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        terminalreporter.line("not tested: " + "; ".join(f"{why} ({count})" for why, count in reasons.items()))


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk of N megabytes and return its folder; skip the test if nothing can be mounted."""
    with contextlib.ExitStack() as mounted:

        def mount(megabytes, options="rw"):
            folder = tmp_path / "disk"
            folder.mkdir()
            run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=10)
            try:
                done = run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,{options}", "tmpfs", str(folder)])
            except OSError as error:
                pytest.skip(f"no disk can be mounted here: {error}")
            if done.returncode:
                pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
            mounted.callback(run, ["umount", "-l", str(folder)], check=True)
            return folder

        yield mount


@pytest.fixture(autouse=True)
def logs_as_before():
    """Restore the logging that a command sets up, because tests run commands in this process."""
    logger = logging.getLogger("ls_edge")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    for handler in set(logger.handlers) - set(before[0]):
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture(autouse=True)
def unit_tests_are_alone(request):
    """Fail a test of the tier ``unit`` that starts a process or opens a socket."""
    if request.node.get_closest_marker("unit") is None:
        yield
        return
    with tiers.watch() as started:
        yield
    assert not started, "a test of the tier unit started: " + "; ".join(started)


@pytest.fixture(autouse=True)
def no_leaks(request):
    """Fail a test that leaves threads or open files, sockets and pipes behind."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    _read_operators_once()
    threads, descriptors = _threads(), _descriptors()
    yield
    if request.node.get_closest_marker("leaks_ok"):
        return
    left = _left(threads, descriptors)
    for look in itertools.count():  # counted, because a machine under load may need seconds to collect garbage once
        if not left:
            break
        if look == GRACE:
            pytest.fail("left behind: " + ", ".join(left))
        if look % 25 == 2:
            gc.collect()
        time.sleep(0.02)
        found = _left(threads, descriptors)
        left = [what for what in left if what in found]  # not what another thread opens for a moment at each look


def _read_operators_once():
    """Cache torch.onnx's list of 500 operators, whose sources it reads again in each export: a third of its time."""
    if "onnxscript" in sys.modules and not _seen:
        for name, module in list(sys.modules.items()):
            if name.startswith("onnxscript._framework_apis.") and hasattr(module, "get_torchlib_ops"):
                module.get_torchlib_ops = functools.cache(module.get_torchlib_ops)
                _seen.append(name)


_seen = []
"""Modules whose list of operators is cached."""


def _left(threads, descriptors):
    new_threads = [f"thread {thread.name!r}" for thread in _threads() - threads]
    new_files = {fd: what for fd, what in _descriptors().items() if descriptors.get(fd) != what}
    return new_threads + [f"descriptor {fd} of {what}" for fd, what in new_files.items()]


def _threads():
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _descriptors():
    """Return open descriptors and their targets without devices, which libraries keep; empty without /proc."""
    found = {}
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for descriptor in descriptors:
        try:
            what = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the one that listed them
            continue
        if not what.startswith(("/dev/", "/proc/", "/sys/")):
            found[int(descriptor)] = what
    return found


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Make a folder once for all processes of the test run: ``made_once(name, make)`` calls ``make(folder)``."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def get(name, make):
        folder = root / "made-once" / name
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "made").exists():
                make(folder / "content")
                (folder / "made").touch()
        return folder / "content"

    return get


@pytest.fixture(scope="session")
def tiny_bundle(made_once):
    """The folder of a bundle: 6 blocks of width 32, 16 tokens, 16x16 pixels, 10 classes."""
    return made_once("tiny", functools.partial(_export, seed=0)) / "bundle"


@pytest.fixture(scope="session")
def other_bundle(made_once):
    """A bundle of the same shape as ``tiny_bundle`` with other weights and classes, so with another model id."""
    return made_once("other", functools.partial(_export, seed=1, classes=8)) / "bundle"


@pytest.fixture(scope="session")
def half_bundle(made_once, tiny_bundle):
    """``tiny_bundle`` with float16 inside: another bundle of the same model."""
    from ls_edge.core.bundle import Bundle
    from ls_edge.export.settings import ExportSettings
    from ls_edge.export.writer import export_run
    from ls_edge.training.runs.checkpoint import load_run

    run, settings = tiny_bundle.parent / "run", ExportSettings(precision="fp16")
    folder = made_once("half", lambda folder: export_run(load_run(run), folder, settings))
    half, whole = Bundle.open(folder).manifest, Bundle.open(tiny_bundle).manifest
    assert half.model_id == whole.model_id
    assert half.bundle_id != whole.bundle_id
    return folder


@pytest.fixture(scope="session")
def banded_bundle(tiny_bundle, tmp_path_factory):
    """``tiny_bundle`` with the bands 0/1-4/5, as ``export --bands`` would write it."""
    import shutil

    import msgspec

    from ls_edge.core.bands import Bands
    from ls_edge.core.bundle import Bundle, bundle_id_of, interface_of, manifest_bands, model_id_of, write_manifest

    folder = tmp_path_factory.mktemp("banded") / "bundle"
    shutil.copytree(tiny_bundle, folder)
    m, bands = Bundle.open(folder).manifest, Bands.from_json("0/1-4/5")
    interface = interface_of(m.image, m.tokens, bands, m.classes, needs_slot=m.needs_slot)
    changed = msgspec.structs.replace(
        m, bands=manifest_bands(bands), bundle_id=bundle_id_of(interface, m.precision, m.parts),
        model_id=model_id_of("banded", interface),
    )  # fmt: skip
    write_manifest(folder, changed)
    return folder


@pytest.fixture(scope="session")
def wide_bundle(made_once):
    """The folder of a bundle with tokens of 49 KB: 2 blocks of width 768."""
    return made_once("wide", functools.partial(_export, seed=2, depth=2, width=768)) / "bundle"


def _export(folder, seed, depth=BLOCKS, width=32, classes=10):
    import torch

    from ls_edge.export.writer import export_run
    from ls_edge.training.config import RunRecord, TrainConfig
    from ls_edge.training.models.small_models import build, image_spec_of
    from ls_edge.training.runs.checkpoint import load_run, save_run

    torch.set_num_threads(1)
    args, names = {"depth": depth, "embed_dim": width, "num_classes": classes}, tuple("0123456789"[:classes])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        view = build("vit_digits", args)
        for parameter in view.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    record = RunRecord(
        version="0", model="vit_digits", model_args=args, kept=tuple(range(depth)), classes=names,
        image=image_spec_of(view), trained_on="", method="shuffle",
    )  # fmt: skip
    save_run(folder / "run", view, TrainConfig(), record)
    export_run(load_run(folder / "run"), folder / "bundle")


@pytest.fixture(scope="session")
def shared_runs(made_once):
    """Folder of a run that learned the digits a little, ``start``, and one from it with 4 shared blocks, ``run``."""
    return made_once("shared-runs", _train_shared)


def _train_shared(folder):
    from ls_edge.training.config import read_config
    from ls_edge.training.loop import train
    from tests.training.trainings import Silent

    folder.mkdir()
    fixed = {"data": "digits", "threads": 1, "device": "cpu", "precision": "fp32", "lr": 4e-3, "batch_size": 64}
    model = "model: {args: {embed_dim: 32, depth: 4}}\n"
    (folder / "start.yaml").write_text(model + "method: sequential")
    (folder / "run.yaml").write_text(model + "method: shared\nmethod_args: {adapter_rank: 2}")
    for name, init in (("start", None), ("run", str(folder / "start"))):
        config, _ = read_config(folder / f"{name}.yaml", {**fixed, "init": init, "epochs": 6})
        train(config, folder / name, reporter=Silent())


@pytest.fixture(scope="session")
def shared_bundle(made_once, shared_runs):
    """The folder of the bundle of that run: 4 blocks, one file."""
    from ls_edge.export.writer import export_run
    from ls_edge.training.runs.checkpoint import load_run

    return made_once("shared", lambda folder: export_run(load_run(shared_runs / "run"), folder))


@pytest.fixture
def make_jetson(tmp_path):
    """Return a function that makes the files that tell a Jetson's release and name, and nodes below ``dev``."""

    def make(release, model="NVIDIA Jetson Orin NX", nodes=()):
        first, _, revision = release.partition(".")
        root = tmp_path / "jetson"
        for path, text in (
            ("etc/nv_tegra_release", f"# R{first} (release), REVISION: {revision}, GCID: 3, BOARD: generic\n"),
            ("proc/device-tree/model", f"{model}\0"),
            *((f"dev/{node}", "") for node in nodes),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        return root

    return make


@pytest.fixture
def install_only(monkeypatch):
    """Return a function that replaces the installed distributions: versions by name."""

    def install(versions):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


@pytest.fixture
def write_peers(tmp_path):
    """Write a ``peers.yaml`` with a free port of the loopback for each peer, and return its path."""

    def write(placement, *, keys=None, sources=(), top=None, **each):
        from ls_edge.runtime.fleet.local_cluster import free_ports

        peers = [
            {"name": name, "address": f"tcp://127.0.0.1:{port}", "threads": 1, **each}
            | {"blocks": blocks if isinstance(blocks, str) else list(blocks)}
            for (name, blocks), port in zip(placement.items(), free_ports(len(placement)), strict=True)
        ]
        listed = [{"name": name} for name in sources]
        for entry in [*peers, *listed] if keys else []:
            entry["public_key"] = keys[entry["name"]].public.decode()
        path = tmp_path / "peers.yaml"
        text = yaml.safe_dump({**(top or {}), "sources": listed, "peers": peers}, sort_keys=False)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def serve():
    """Serve real peers on threads of this process, and stop them after the test."""
    running = []

    def start(peer, *arguments):
        thread = threading.Thread(target=peer.serve, args=arguments, name=f"peer {peer.name}")
        running.append((peer, thread))
        thread.start()
        return peer

    yield start
    for peer, _ in running:
        peer.stop()
        peer.stop()
    for peer, thread in running:
        thread.join(10)
        assert not thread.is_alive(), f"{peer.name} did not leave"


@pytest.fixture
def serve_peers(write_peers, serve, tiny_bundle, tmp_path):
    """Serve real peers on threads of this process, and return their file: ``serve_peers({"a": range(6)})``.

    With ``faulty``, engines have the faults that a test writes to ``NAME.faults`` in ``tmp_path``.
    """

    def start(placement, bundle=tiny_bundle, *, faulty=False, **each):
        from ls_edge.core.bundle import Bundle
        from ls_edge.core.peers_file import load_peers
        from ls_edge.runtime.peer.peer import Peer
        from tests.faults.engines import inject

        file, opened = load_peers(write_peers(placement, **each)), Bundle.open(bundle)
        for name in placement:
            peer = Peer(file, name, opened)
            serve(inject(peer, tmp_path / f"{name}.faults") if faulty else peer)
        return file

    return start


@pytest.fixture
def start_peers(tmp_path, tiny_bundle):
    """Start real peers as processes and wait until they are warm: ``start_peers({"a": range(6)})``."""
    from tests.faults.cluster import FaultyCluster

    with contextlib.ExitStack() as running:

        def start(placement, bundle=tiny_bundle, **named):
            peers = running.enter_context(FaultyCluster(tmp_path / "peers", bundle, placement, **named))
            peers.wait_warm(*placement)
            return peers

        yield start


@pytest.fixture(scope="module")
def peers(request, tmp_path_factory, tiny_bundle):
    """Real peers as processes, for all tests of a module: those of its ``PLACEMENT``."""
    from tests.faults.cluster import FaultyCluster

    with FaultyCluster(tmp_path_factory.mktemp("peers"), tiny_bundle, request.module.PLACEMENT) as running:
        running.wait_warm()
        yield running


@pytest.fixture
def open_source(tiny_bundle):
    """Open sources whose parts all have holders, and close them after the test: ``open_source(file)``."""
    from ls_edge.runtime.source.source import Source

    with contextlib.ExitStack() as opened:

        def start(peers, bundle=tiny_bundle, **settings):
            source = opened.enter_context(Source.open(peers, bundle, **settings))
            assert source.wait_ready(30) == ()
            return source

        yield start


@pytest.fixture
def images():
    """Preprocessed images: ``images(4)`` is float32 ``[4, 3, 16, 16]``."""

    def draw(count, seed=0):
        import numpy as np

        return np.random.default_rng(seed).standard_normal((count, 3, 16, 16)).astype(np.float32)

    return draw


@pytest.fixture
def assert_replays():
    """Compare answers with the bundle's parts run in sequence in this process (guarantee R2)."""

    def check(bundle, images, answers, tolerance=1e-4):
        from ls_edge.core.bundle import Bundle
        from ls_edge.engines.pipeline import Pipeline
        from tests.traces import replay

        by_request = dict(zip((answer.request for answer in answers), images, strict=True))
        records = [answer.record for answer in answers]
        with Pipeline.open(Bundle.open(bundle), threads=1) as pipeline:
            for replayed in replay(pipeline, records, lambda record: by_request[record.id]):
                assert replayed.error <= tolerance, f"request {replayed.id} is off by {replayed.error}"

    return check


def wait_until(true, timeout=30.0, what="that"):
    """Poll until ``true()``; fail the test after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            pytest.fail(f"waited {timeout} s in vain for {what}")
        time.sleep(0.005)


@pytest.fixture(name="wait_until")
def _wait_until():
    return wait_until


def mutate(frame, rng):
    """Return the frame with bytes changed, removed, doubled or inserted in some places."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.choice((0x00, 0x80, 0x90, 0xC0, 0xC4, 0xCF, 0xD3, 0xDD, 0xDF, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            data[at:at] = data[at : at + rng.randrange(1, 17)]
    return bytes(data)


@pytest.fixture(name="mutate", scope="session")
def _mutate():
    return mutate
