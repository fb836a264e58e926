"""Commands in this process and in ones of their own; the bundles of the runtime's tests, and one without torch."""

import hashlib
import os
import re
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from ls_edge.cli.main import main
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import (
    SCHEMA,
    ImageSpec,
    Manifest,
    PartFile,
    PartFiles,
    TokenSpec,
    bundle_id_of,
    interface_of,
    manifest_bands,
    model_id_of,
    part_metadata,
    write_manifest,
)  # fmt: skip
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults
from tests.runtime.serve.serving import PLACEMENT


def hear_ctrl_c():
    """Handle Ctrl-C as a child of a terminal does; children of a process in the background ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Commands:
    """``ls-edge`` as a user starts it."""

    def __init__(self):
        self.started = []

    def run(self, *arguments, **options):
        """Run a command to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=options.get("timeout", 60))
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, *arguments, before=(), prepare=hear_ctrl_c, **options):
        """Start a command; ``before`` are words ahead of it, such as those of a wrapper."""
        options.pop("timeout", None)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        words = [*before, sys.executable, "-m", "ls_edge", *map(str, arguments)]
        process = subprocess.Popen(words, preexec_fn=prepare, **options)
        self.started.append(process)
        return process

    def close(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def _ls_edge():
    """Run and start commands; none outlives the test, or the tests of the module."""
    commands = Commands()
    yield commands
    commands.close()


ls_edge = pytest.fixture(_ls_edge)
ls_edge_of_module = pytest.fixture(_ls_edge, scope="module")


def complaints(done):
    """The lines of a command's errors and warnings, without its progress and the times of answers."""
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ls-edge: ")]
    return [re.sub(r"^ls-edge: \d\d:\d\d:\d\d ", "ls-edge: ", line) for line in lines]


@pytest.fixture(name="complaints", scope="session")
def _complaints():
    return complaints


DIM, SIDE, PATCH = 8, 16, 4


def _model(draft, part, nodes, given, made, weights):
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        nodes, part.split()[0],
        [helper.make_tensor_value_info(given[0], TensorProto.FLOAT, given[1])],
        [helper.make_tensor_value_info(made[0], TensorProto.FLOAT, made[1])],
        [numpy_helper.from_array(value, key) for key, value in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, part_metadata(draft, part))
    return model.SerializeToString()


def _parts(classes, seed, blocks, draft):
    from onnx import helper

    rng = np.random.default_rng(seed)

    def weights(*shape):
        return (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)

    count = (SIDE // PATCH) ** 2
    tokens = ["batch", count, DIM]
    yield "stem", _model(
        draft, "stem",
        [
            helper.make_node("Conv", ["images", "w"], ["patches"], "conv", strides=[PATCH, PATCH]),
            helper.make_node("Reshape", ["patches", "shape"], ["flat"], "reshape"),
            helper.make_node("Transpose", ["flat"], ["tokens"], "transpose", perm=[0, 2, 1]),
        ],
        ("images", ["batch", 3, SIDE, SIDE]), ("tokens", tokens),
        {"w": weights(DIM, 3, PATCH, PATCH), "shape": np.array([0, DIM, count], np.int64)},
    )  # fmt: skip
    for index in range(blocks):
        yield f"block {index}", _model(
            draft, f"block {index}",
            [
                helper.make_node("MatMul", ["tokens", "w"], ["mixed"], "matmul"),
                helper.make_node("Add", ["tokens", "mixed"], ["tokens_out"], "add"),
            ],
            ("tokens", tokens), ("tokens_out", tokens), {"w": weights(DIM, DIM) * np.float32(0.5)},
        )  # fmt: skip
    yield "head", _model(
        draft, "head",
        [
            helper.make_node("ReduceMean", ["tokens"], ["mean"], "reducemean", axes=[1], keepdims=0),
            helper.make_node("MatMul", ["mean", "w"], ["logits"], "matmul"),
        ],
        ("tokens", tokens), ("logits", ["batch", len(classes)]),
        {"w": weights(DIM, len(classes))},
    )  # fmt: skip


def make_bundle(folder, *, classes=tuple("0123456789"), seed=0, blocks=4, bands=None, image=None, **fields):
    """Write a bundle of random weights that takes 16x16 images; ``fields`` are of the manifest."""
    (folder / "blocks").mkdir(parents=True, exist_ok=True)
    image = image or ImageSpec((SIDE, SIDE), (0.5,) * 3, (0.5,) * 3)
    tokens = TokenSpec((SIDE // PATCH) ** 2, DIM)
    bands = Bands.from_json(bands, blocks)
    interface = interface_of(image, tokens, bands, classes, needs_slot=False)
    none = PartFile("", "", 0)
    draft = Manifest(
        schema=SCHEMA, bundle_id="", model_id=model_id_of(f"seed {seed}", interface),
        model="tiny", method="shuffle", classes=tuple(classes), image=image, tokens=tokens, needs_slot=False,
        precision="fp32", opset=17, parts=PartFiles(none, none, ()), bands=manifest_bands(bands),
    )  # fmt: skip
    made = {}
    for name, content in _parts(classes, seed, blocks, draft):
        file = f"blocks/{int(name.split()[1]):02d}.onnx" if name.startswith("block") else f"{name}.onnx"
        (folder / file).write_bytes(content)
        made[name] = PartFile(file, hashlib.sha256(content).hexdigest(), len(content))
    parts = PartFiles(made["stem"], made["head"], tuple(made[f"block {index}"] for index in range(blocks)))
    manifest = msgspec.structs.replace(draft, parts=parts, bundle_id=bundle_id_of(interface, "fp32", parts))
    write_manifest(folder, msgspec.structs.replace(manifest, **fields))
    return folder


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """The folder of a bundle that nobody changes."""
    return make_bundle(tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture(scope="session")
def swarm(tmp_path_factory, bundle):
    """Peers of ``bundle`` that nobody changes."""
    with LocalCluster(tmp_path_factory.mktemp("peers"), bundle, PLACEMENT) as local:
        local.wait_warm()
        yield local


@pytest.fixture
def slow(tmp_path, bundle, request):
    """One peer, whose engine takes 0.1 s for a block, or the milliseconds of a parameter."""
    local = FaultyCluster(tmp_path / "slow", bundle, {"a": [0, 1, 2, 3]})
    local.set_faults("a", Faults(least_ms=getattr(request, "param", 100)))  # before it starts, so that it knows
    with local:
        local.wait_warm()
        yield local


@pytest.fixture(name="make_bundle", scope="session")
def _make_bundle():
    return make_bundle


@pytest.fixture
def command(capfd):
    """Run a command in this process: ``command("eval", ...)`` is its exit code, standard output and error."""

    def run(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def process():
    """Run a command as a process of its own, with these environment variables; output as bytes."""

    def run(*arguments, timeout=60, **env):
        return subprocess.run(
            [sys.executable, "-m", "ls_edge", *map(str, arguments)], capture_output=True, check=False, timeout=timeout,
            stdin=subprocess.DEVNULL, env={**os.environ, **env},
        )  # fmt: skip

    return run
