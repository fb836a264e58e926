"""Vocabulary and file formats that every other package uses; needs numpy, msgspec and PyYAML only."""
