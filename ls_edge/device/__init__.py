"""This machine: hardware, sensors, profiles and installed requirements."""
