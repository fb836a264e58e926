"""Facts about the local machine: hardware, sensors, profiles and installed requirements."""
