"""Fine-tune vision transformers whose blocks run in any order, and run them on whatever devices can be reached.

The four rooms: ``ls_edge`` (command line, errors, configuration, bundle, reports), ``ls_edge.training``,
``ls_edge.export`` and ``ls_edge.runtime``. ``docs/architecture.md`` says how data flows through them.
"""

__version__ = "0.1.0"
