"""Tables, charts and HTML pages of results; only charts and pages need the extra ``report``."""
