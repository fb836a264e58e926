"""Export of a trained model to a bundle of verified ONNX files.

The package is callable: ``ls_edge.export(run, out)`` calls :func:`ls_edge.export.writer.export`.
"""

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Export a run; torch and onnx are imported on the first call."""
        from ls_edge.device.requirements import require_import

        require_import("export", ("onnx", "torch"), "export", "cpu")
        from ls_edge.export.writer import export

        return export(*arguments, **settings)


sys.modules[__name__].__class__ = _Package
