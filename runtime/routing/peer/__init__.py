"""Routing of a process that serves blocks: its rules, engine, waves, STATE."""
