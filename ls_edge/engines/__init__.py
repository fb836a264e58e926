"""Engines: one part of a bundle on one device, opened from bytes whose digest was checked."""
