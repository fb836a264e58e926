"""Public functions of ``ls_edge``: the commands, for programs and notebooks.

They configure neither logging nor signals, restore torch's settings, and report progress and warnings by callbacks.
"""
