"""Benchmarks behind the numbers in the documents: ``python -m benchmarks [NAME...] [--quick] [--json FILE]``.

Each benchmark is a module with ``run(quick)``, which returns the results, and ``show(document, console)``, which prints
tables. Contenders run in turn on one machine, so that other load affects all of them equally; results are medians
and ratios of such runs. The folder is not installed and needs the development environment. ``make bench`` runs it.
"""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ORT_DISABLE_TELEMETRY"), "1")
"""Environment of the measured processes; engines get their threads as an option."""
