"""The public functions of ``ls_edge``: what the commands do, for programs and notebooks.

They configure neither logging nor signals, restore torch's settings, and report progress and warnings by callbacks.
"""
