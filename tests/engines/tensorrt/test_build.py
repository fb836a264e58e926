"""Building of engines, on doubles of CUDA and TensorRT: options, progress, and parts that cannot be built."""

import importlib
import logging
import sys

import onnx
import pytest

from ls_edge.core.errors import EngineError
from ls_edge.engines.opening import open_block_engines, open_engine
from ls_edge.engines.tensorrt import build as tensorrt_build
from ls_edge.engines.tensorrt.build import EngineOptions, key_of
from ls_edge.engines.tensorrt.cache import TensorRTDevice, default_folder
from tests.engines.bundles import edited
from tests.engines.reference import ORDER, tokens


def test_few_engines_serve_all_batches(bundle):
    device = TensorRTDevice("10.3.0", "Orin", "8.7", 8)
    largest = {batch: EngineOptions.of(batch).max_batch for batch in (None, 1, 8, 9, 16, 1000)}
    assert largest == {None: 8, 1: 8, 8: 8, 9: 16, 16: 16, 1000: 1024}
    digests = {key_of("ab", device, EngineOptions.of(batch)).digest() for batch in largest}
    assert len(digests) == 3


def test_the_error_has_tensorrts_reason_and_the_progress_is_reported(bundle, gpu, doubles, monkeypatch, caplog):
    monkeypatch.setattr(tensorrt_build, "PROGRESS_EVERY_S", 0.0)
    reported = []
    with caplog.at_level(logging.INFO, "ls_edge.engines"):
        open_engine(
            bundle, "block 0", kind="tensorrt", on_step=lambda _done, _total, text: reported.append(text)
        ).close()
    assert (reported.pop(0), reported.pop()) == ("block 0", "ready")
    assert reported[0].startswith("block 0: building an engine for TensorRT ")
    assert "block 0: Building Engine, step 1 of 2" in reported
    assert reported[-1].startswith("block 0: ready after ")
    assert [f"{record.part}: {record.status}" for record in caplog.records if record.message == "engine"] == reported
    monkeypatch.setattr(doubles.Builder, "refuse", "no tactic fits the workspace")
    with pytest.raises(
        EngineError, match=r"could not build an engine for Double of a GPU \(no tactic fits the workspace"
    ):
        open_engine(bundle, "block 1", kind="tensorrt")


def test_the_reason_of_each_failed_build_is_known(bundle, gpu, doubles, monkeypatch):
    """TensorRT logs to the first logger of the process as long as one of its objects exists."""
    engine = open_engine(bundle, "block 0", kind="tensorrt")
    for why in ("no tactic fits the workspace", "out of memory"):
        monkeypatch.setattr(doubles.Builder, "refuse", why)
        with pytest.raises(EngineError, match=rf"could not build an engine for Double of a GPU \({why}"):
            open_engine(bundle, "block 1", kind="tensorrt")
    engine.close()
    monkeypatch.setattr(doubles.Builder, "_problem", staticmethod(lambda *_: ""))
    monkeypatch.setattr(doubles.Builder, "refuse", "")
    monkeypatch.setattr(doubles.Builder, "build_serialized_network", lambda *_: None)
    with pytest.raises(EngineError, match="it gave no reason"):
        open_engine(bundle, "block 1", kind="tensorrt")


def test_closing_the_first_engine_leaves_the_others_their_runtime(bundle, gpu):
    engines = open_block_engines(bundle, (0, 1), kind="tensorrt")
    engines[0].close()
    engines[1].run({"tokens": tokens()})
    engines[1].close()


@pytest.mark.parametrize("cache", ["of another device", "damaged"])
def test_a_timing_cache_that_tensorrt_refuses_is_begun_again(bundle, gpu, doubles, monkeypatch, cache):
    open_engine(bundle, "block 0", kind="tensorrt").close()
    (path,) = default_folder().glob("*.timing")
    measured = path.read_bytes()
    if cache == "damaged":
        path.write_bytes(b"damaged")
    else:
        monkeypatch.setattr(doubles, "_properties", lambda: b"another device\n")
    open_engine(bundle, "block 1", kind="tensorrt").close()
    assert path.read_bytes() == (measured if cache == "damaged" else b"another device\n.")


def test_another_number_of_multiprocessors_needs_engines_and_times_of_its_own(bundle, gpu):
    reported = []
    for gpu.multiprocessors in (8, 4):
        open_engine(bundle, "block 0", kind="tensorrt", on_step=lambda *step: reported.append(step[-1])).close()
    assert sum("building an engine" in text for text in reported) == 2
    assert len(list(default_folder().glob("*.timing"))) == 2


def test_an_error_of_the_progress_ends_a_build(bundle, gpu, monkeypatch):
    def on_step(_done, _total, text):
        if "step 1" in text:
            raise BrokenPipeError("the terminal is closed")

    monkeypatch.setattr(tensorrt_build, "PROGRESS_EVERY_S", 0.0)
    with pytest.raises(BrokenPipeError, match="the terminal is closed"):
        open_engine(bundle, "block 0", on_step=on_step)


def test_without_memory_for_tensorrt_itself_the_error_says_so(bundle, gpu):
    gpu.memory = 0
    with pytest.raises(EngineError, match=r"^TensorRT 10\.3\.0 does not start \(CUDA init.* error: 2\); end other"):
        open_engine(bundle, "block 0", kind="tensorrt")


def test_tensorrt_does_not_read_weights_from_another_file(bundle, gpu, tmp_path):
    def move_weights(_, model):
        tensor = next(tensor for tensor in model.graph.initializer if tensor.raw_data)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="/etc/hostname")

    moved = edited(bundle, tmp_path / "bundle", move_weights)
    with pytest.raises(EngineError, match=r"^block 0 does not load: .* weights are in another file; export it again"):
        open_engine(moved, "block 0", kind="tensorrt")


@pytest.mark.parametrize("version", ["10.0.1", "8.6.1", "12.0.0"])
def test_a_tensorrt_of_another_version_is_refused_in_one_line(bundle, gpu, doubles, monkeypatch, version):
    monkeypatch.setattr(doubles, "__version__", version)
    with pytest.raises(EngineError, match=rf"^tensorrt is version {version}, this ls-edge supports 10.3 to 11; update"):
        open_block_engines(bundle, ORDER, kind="tensorrt")


def test_a_folder_that_is_called_tensorrt_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "tensorrt").mkdir()
    assert tensorrt_build.tensorrt_name() != "tensorrt"
    (tmp_path / "tensorrt.py").touch()
    importlib.invalidate_caches()
    with pytest.raises(
        EngineError, match=r"^tensorrt does not load \(.*no attribute '__version__'\); run with --engine onnx"
    ):
        tensorrt_build.tensorrt_module()
    del sys.modules["tensorrt"]


@pytest.mark.parametrize(("limit", "workspace"), [(None, 1 << 30), (1 << 33, 1 << 30), (1 << 25, 1 << 25)])
def test_kernels_get_at_most_the_memory_limit_of_the_peer(bundle, gpu, limit, workspace):
    engine = open_engine(bundle, "block 0", kind="tensorrt", gpu_mem_limit=limit)
    assert engine._engine._header["workspace"] == workspace
    engine.close()
