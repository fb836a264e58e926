"""A double of ``onnxruntime-gpu`` for tests: ONNX Runtime's CPU provider behind the double of CUDA; see README.md.

Sessions, their options and their bindings are those of the ONNX Runtime that is installed, but CUDA is in the list of
providers and "runs" on the stream of ``user_compute_stream``, between addresses of the double of CUDA. Whoever leaves
TF32 on gets results that are rounded as TF32 rounds.
"""

from pathlib import Path

import cudart as cuda
import numpy as np
import onnxruntime

CUDA = "CUDAExecutionProvider"
# Options of the CUDA provider of onnxruntime-gpu 1.31, from its documentation.
OPTIONS = {
    "device_id", "gpu_mem_limit", "arena_extend_strategy", "cudnn_conv_algo_search", "do_copy_in_default_stream",
    "cudnn_conv_use_max_workspace", "cudnn_conv1d_pad_to_nc1d", "user_compute_stream", "enable_cuda_graph",
    "prefer_nhwc", "use_ep_level_unified_stream", "use_tf32", "fuse_conv_bias",
}  # fmt: skip


class OnnxRuntimeWithCuda:
    """Double of the module ``onnxruntime``."""

    def __init__(self, *, broken=()):
        """``broken``: providers that are listed and whose libraries do not load."""
        self.broken, self.opened, self.preloaded = broken, [], 0

    def __getattr__(self, name):
        return getattr(onnxruntime, name)

    def get_available_providers(self):
        return [CUDA, "CPUExecutionProvider"]

    def preload_dlls(self, cuda=True, cudnn=True, msvc=True, directory=None):
        self.preloaded += 1
        print("Failed to load libcurand.so.10: not there")

    def InferenceSession(self, path_or_bytes, options, providers, enable_fallback=1):
        raw = path_or_bytes if isinstance(path_or_bytes, bytes) else Path(path_or_bytes).read_bytes()
        self.opened.append(providers)
        given = dict(providers).get(CUDA, {})
        if given.keys() - OPTIONS:
            raise RuntimeError(f"Unknown provider option: {', '.join(given.keys() - OPTIONS)}")
        named = [name for name, _ in providers if name not in self.broken]
        return Session(onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"]), named, given)


class Session:
    """A session of the CPU provider that takes addresses of the double of CUDA."""

    def __init__(self, session, providers, options):
        self._session, self._options = session, options
        self.get_providers = lambda: providers

    def __getattr__(self, name):
        return getattr(self._session, name)

    def io_binding(self):
        return Binding(self._session)

    def run_with_iobinding(self, iobinding, run_options=None):
        if not iobinding.places:
            return self._session.run_with_iobinding(iobinding.real, run_options)
        stream, places = int(self._options.get("user_compute_stream", "0")), dict(iobinding.places)

        def work():
            inputs = {a.name: cuda.DEVICE.values(*places[a.name]).copy() for a in self._session.get_inputs()}
            for args, values in zip(self._session.get_outputs(), self._session.run(None, inputs), strict=True):
                rounds = self._options.get("use_tf32", "1") != "0"
                cuda.DEVICE.values(*places[args.name])[...] = cuda.tf32(values) if rounds else values

        cuda.DEVICE.counts["execute"] += 1
        cuda.DEVICE.enqueue(stream, work)
        key = "disable_synchronize_execution_providers"
        if run_options is None or run_options.get_run_config_entry(key) != "1":
            cuda.DEVICE.synchronize(stream)
        return None


class Binding:
    """An ``IOBinding`` between addresses on the GPU, or the real one."""

    def __init__(self, session):
        self.real, self.places = session.io_binding(), {}

    def __getattr__(self, name):
        return getattr(self.real, name)

    def bind_input(self, name, device_type, device_id, element_type, shape, buffer_ptr):
        assert (device_type, device_id) == ("cuda", 0)
        self.places[name] = (np.dtype(element_type), tuple(shape), buffer_ptr)

    def bind_output(self, name, device_type="cpu", device_id=0, element_type=None, shape=None, buffer_ptr=None):
        self.bind_input(name, device_type, device_id, element_type, shape, buffer_ptr)
