"""Benchmarks behind the numbers in the documents: ``python -m benchmarks [NAME...] [--quick] [--json FILE]``.

Each benchmark is a module with ``run(quick) -> dict``, the figures, and ``show(document, console)``, the tables. What
is compared runs on one machine, in turn, so that whatever else the machine does falls on all of it; figures are medians
and ratios of such runs. The folder is not installed and needs the development environment; ``make bench`` runs it.
"""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ORT_DISABLE_TELEMETRY"), "1")
"""Environment of what is measured; engines get their threads as an option."""
